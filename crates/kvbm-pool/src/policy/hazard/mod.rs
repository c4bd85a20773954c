//! The adaptive policy: evicts what its own past says is least likely to be used again soon.
//!
//! A block's class is how often it was used, how far it was from the end of its request, how many turns the request's
//! conversation had, and whether the caller said that its branch ends. For each class the rate of reuse by time since
//! the last use is learnt ([`model`]) from every block: those on a tier, and for a while those that are gone
//! ([`history`]). Victims are the least worth of a sample of the evictable slots ([`leaves`]).
//!
//! All that is followed on a tier only where it was shown to keep more of what is used again than recency does, and as long as
//! it is ([`trial`]).
//!
//! Nothing is fitted to a workload: time is counted in block uses and measured against the capacity, and what a class
//! or a hint is worth is what was seen of it. A hint that is often wrong costs nothing for long.

pub(super) mod history;
mod leaves;
mod model;
mod trial;

use super::{BlockMemory, BlockUse, EvictionPolicy, Numbers, Random, RequestPart, Sets, SlotSet};
use crate::core::NONE;
use crate::tier::TIERS;
use history::History;
use leaves::Leaves;
use model::Model;
use std::cmp::Ordering;
use trial::{Rate, Trial};

/// Leaves looked at for a victim, and how many lie side by side.
const SAMPLE: usize = 64;
const WINDOW: usize = 8;
/// Entries of the history for each slot of the largest tier; where that is more than [`LONG_HISTORY`], fewer, down to a half.
const HISTORY: usize = 4;
const LONG_HISTORY: usize = 1 << 19;
/// Units of time in which as many blocks are used as the largest tier holds.
const UNITS: usize = 1024;
/// Blocks older than this count as of this age. A block is looked at long before its time wraps.
const OLDEST: u16 = 40_000;
/// Blocks used between two looks into the history, at eight entries each.
const USES_PER_LOOK: u64 = 4;

// A class: uses, turn, distance from the tail (two bits each), ended.
const USES: u8 = 0b11;
const TURN_SHIFT: u32 = 2;
const TAIL_SHIFT: u32 = 4;
const ENDED_SHIFT: u32 = 6;

/// A victim found without a sample. When a leaf goes, its parent becomes one; if that is worth no more than the next best
/// of the sample from which its child was taken, it follows. So chains go in runs, which the memory likes.
#[derive(Clone, Copy)]
struct Next {
    bar: f32,
    slot: u32,
}

impl Next {
    const NOTHING: Self = Self { bar: f32::NEG_INFINITY, slot: NONE };

    /// None yet; the next best of the sample is the bar.
    fn after(second: Offer) -> Self {
        Self { bar: second.worth, slot: NONE }
    }

    #[inline]
    fn consider(&mut self, slot: u32, worth: f32) {
        if worth <= self.bar {
            self.slot = slot;
        }
    }

    fn take(&mut self) -> Option<u32> {
        let slot = std::mem::replace(&mut self.slot, NONE);
        (slot != NONE).then_some(slot)
    }
}

/// What victims of a set are chosen from.
struct Candidates {
    leaves: Leaves,
    next: Next,
}

/// The policy "hazard".
pub struct Hazard {
    model: Model,
    history: History,
    sets: Sets<Candidates>,
    trials: [Option<Trial>; TIERS],
    random: Random,
    /// Blocks used so far, and how many make a unit of time.
    uses: u64,
    unit_shift: u32,
    /// Slots of the largest tier.
    largest: usize,
    /// Turn of the request that is under way, its blocks so far, and which part of it was told last.
    turn: u8,
    pending: u64,
    part: RequestPart,
    /// Uses between two steps of fitting, and between two of fading.
    fit_every: u64,
    fade_every: u64,
    next_fit: u64,
    next_fade: u64,
    next_look: u64,
}

impl Hazard {
    /// Bytes of history for each block remembered.
    pub const HISTORY_BYTES: usize = history::BYTES;

    /// For tiers of `capacity` slots.
    pub fn new(capacity: [usize; TIERS], seed: u64) -> Self {
        let largest = capacity.into_iter().max().unwrap_or(0);
        let fade_every = (largest as u64).max(4096);
        Self {
            model: Model::new(),
            history: History::new((HISTORY * largest).min(LONG_HISTORY).max(largest / 2)),
            sets: Sets::new(capacity, |slots| Candidates { leaves: Leaves::new(slots), next: Next::NOTHING }),
            trials: capacity.map(|slots| (slots > 0).then(|| Trial::new(slots, seed))),
            random: Random::new(seed),
            uses: 0,
            largest,
            unit_shift: (largest / UNITS).max(1).ilog2(),
            turn: 0,
            pending: 0,
            part: RequestPart::Registered,
            fit_every: (fade_every / model::CLASSES as u64).max(16),
            fade_every,
            next_fit: 0,
            next_fade: fade_every,
            next_look: 0,
        }
    }
}

impl Hazard {
    #[inline]
    fn now(&self) -> u16 {
        (self.uses >> self.unit_shift) as u16
    }

    fn units_per_turnover(&self) -> f32 {
        (self.largest >> self.unit_shift).max(1) as f32
    }

    #[inline]
    fn age(&self, time: u16) -> u16 {
        self.now().wrapping_sub(time)
    }

    #[inline]
    fn worth_of(&self, time: u16, class: usize, priority: u8) -> f32 {
        self.model.worth(class, self.age(time).min(OLDEST)) * (1.0 + f32::from(priority))
    }

    /// The leaf of least worth in a sample. The next least is the bar for what is not sampled.
    fn sample(&mut self, set: SlotSet) -> Option<u32> {
        let mut least = Least([Offer::NONE; 2]);
        let count = self.sets.at(set).leaves.len();
        if count <= SAMPLE {
            self.offer(set, 0, SAMPLE, &mut least);
        } else {
            for _ in 0..SAMPLE / WINDOW {
                let from = self.random.below(count / WINDOW + 1) * WINDOW;
                self.offer(set, from, WINDOW, &mut least);
            }
        }
        let [first, second] = least.0;
        self.sets.at(set).next = Next::after(second);
        (first.slot != NONE).then_some(first.slot)
    }

    #[inline]
    fn offer(&self, set: SlotSet, from: usize, count: usize, least: &mut Least) {
        let Some(candidates) = self.sets.get(set) else { return };
        for &leaf in candidates.leaves.window(from, count) {
            let worth = self.worth_of(leaf.time(), leaf.class(), leaf.priority());
            least.offer(Offer { worth, age: self.age(leaf.time()), slot: leaf.slot() });
        }
    }

    /// A block of a request is used: both ways of choosing victims show whether they would have had it.
    #[inline]
    fn try_both(&mut self, tag: u64, memory: BlockMemory) {
        let (now, model) = (self.now(), &self.model);
        for trial in self.trials.iter_mut().flatten().filter(|trial| trial.draws(tag)) {
            let rate = |memory: BlockMemory| {
                let age = now.wrapping_sub(memory.time).min(OLDEST);
                Rate { worth: model.worth(class_of(memory), age), age }
            };
            trial.used(tag, memory, rate);
        }
    }

    /// A block was found resting, which it is in `every` uses of others once.
    fn saw_rest(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        let age = self.age(memory.time);
        let time = every as f32 / (1_u64 << self.unit_shift) as f32;
        self.model.saw_rest(class_of(memory), age.min(OLDEST), time);
        if age > OLDEST { BlockMemory { time: self.now().wrapping_sub(OLDEST), ..memory } } else { memory }
    }

    /// Learns from blocks that are gone, and keeps the model up to date.
    fn learn(&mut self) {
        while self.next_look < self.uses {
            self.next_look += USES_PER_LOOK;
            let every = (self.history.sets() as u64) * USES_PER_LOOK;
            let time = every as f32 / (1_u64 << self.unit_shift) as f32;
            let (now, model) = (self.now(), &mut self.model);
            self.history.observe(|memory| {
                let age = now.wrapping_sub(memory.time);
                model.saw_rest(class_of(memory), age.min(OLDEST), time);
                (age <= OLDEST).then_some(memory)
            });
        }
        if self.next_fade < self.uses {
            self.next_fade = self.uses + self.fade_every;
            self.model.fade();
        }
        while self.next_fit < self.uses {
            self.next_fit += self.fit_every;
            self.model.fit_next();
        }
    }

    /// What is kept of a block that is used for the `count`-th time (0 to 3 stand for 0, 1, 2-3 and more).
    fn memory(&self, count: u8, from_tail: u32) -> BlockMemory {
        let tail = match from_tail {
            0 => 0,
            1 | 2 => 1,
            _ => 2,
        };
        BlockMemory { time: self.now(), class: count | self.turn << TURN_SHIFT | tail << TAIL_SHIFT }
    }

    /// A use of a block of which `memory` was kept: counted, and the new count of its uses.
    fn count_use(&mut self, memory: BlockMemory) -> u8 {
        let age = self.age(memory.time).min(OLDEST);
        self.model.saw_use(class_of(memory), age);
        step(memory.class & USES, 2, &mut self.random)
    }
}

/// Index of the block's class in the model.
fn class_of(memory: BlockMemory) -> usize {
    usize::from(memory.class) % model::CLASSES
}

/// The next of the levels 0, 1, 2, 3; from 2 to 3 it takes `times` steps in the mean.
fn step(level: u8, times: usize, random: &mut Random) -> u8 {
    match level {
        0 | 1 => level + 1,
        2 if random.below(times) > 0 => 2,
        _ => 3,
    }
}

fn turn_of(memory: BlockMemory) -> u8 {
    memory.class >> TURN_SHIFT & 0b11
}

impl EvictionPolicy for Hazard {
    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        // A request's blocks count as used when it is over: until then the blocks of others have rested only as long as they
        // were seen to rest.
        if part == RequestPart::Used || self.part == RequestPart::Registered || before.is_none() {
            self.uses += std::mem::take(&mut self.pending);
            self.trials.iter_mut().flatten().for_each(Trial::begin);
        }
        self.pending += blocks as u64;
        self.sets.each().for_each(|candidates| candidates.next = Next::NOTHING);
        self.part = part;
        self.turn = match (before, part) {
            (None, _) => 0,
            (Some(memory), RequestPart::Used) => step(turn_of(memory), 3, &mut self.random),
            // The block before was used in this same request.
            (Some(memory), RequestPart::Registered) => turn_of(memory),
        };
        self.learn();
    }

    fn expect(&self, tags: &[u64]) {
        self.history.fetch(tags);
    }

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        let count = match self.history.take(block.tag) {
            Some(memory) => {
                let turn = step(turn_of(memory), 3, &mut self.random);
                self.turn = self.turn.max(turn);
                self.count_use(memory)
            }
            None => 0,
        };
        let memory = self.memory(count, block.from_tail);
        self.try_both(block.tag, memory);
        memory
    }

    fn used(&mut self, block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        let count = self.count_use(memory);
        let memory = self.memory(count, block.from_tail);
        self.try_both(block.tag, memory);
        memory
    }

    fn ended(&mut self, tag: u64, memory: BlockMemory) -> BlockMemory {
        let memory = BlockMemory { class: memory.class | 1 << ENDED_SHIFT, ..memory };
        for trial in self.trials.iter_mut().flatten().filter(|trial| trial.draws(tag)) {
            trial.changed(tag, memory);
        }
        memory
    }

    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        self.saw_rest(memory, every)
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        let now = self.now();
        self.history.put(tag, memory, |time| now.wrapping_sub(time));
    }

    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        numbers: &mut Numbers<'_>,
    ) {
        let worth = self.worth_of(memory.time, class_of(memory), priority);
        let candidates = self.sets.at(set);
        candidates.leaves.put(slot, memory, priority, numbers);
        candidates.next.consider(slot, worth);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.sets.at(set).leaves.remove(slot, numbers);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, numbers: &mut Numbers<'_>) {
        let follow = self.sets.at(set).next.take().filter(|&slot| numbers.get(slot).is_some());
        let victim = follow.or_else(|| self.sample(set));
        if let Some(slot) = victim {
            self.sets.at(set).leaves.remove(slot, numbers);
            out.push(slot);
        }
    }

    fn follows_recency(&self, set: SlotSet) -> bool {
        self.trials[set.tier].as_ref().is_some_and(|trial| !trial.is_ahead())
    }

    fn expected_reuse(&self, memory: BlockMemory) -> Option<f32> {
        Some(self.worth_of(memory.time, class_of(memory), 0) * self.units_per_turnover())
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        self.sets.get(set).is_some_and(|candidates| candidates.leaves.len() > 0)
    }
}

/// The two leaves of least worth among those offered; of equal worth the older.
struct Least([Offer; 2]);

#[derive(Clone, Copy)]
struct Offer {
    worth: f32,
    age: u16,
    slot: u32,
}

impl Offer {
    const NONE: Self = Self { worth: f32::INFINITY, age: 0, slot: NONE };

    fn is_before(&self, other: &Self) -> bool {
        self.worth.total_cmp(&other.worth).then_with(|| other.age.cmp(&self.age)) == Ordering::Less
    }
}

impl Least {
    #[inline]
    fn offer(&mut self, offer: Offer) {
        let [first, second] = &mut self.0;
        if offer.is_before(second) && offer.slot != first.slot {
            if offer.is_before(first) {
                *second = std::mem::replace(first, offer);
            } else {
                *second = offer;
            }
        }
    }
}
