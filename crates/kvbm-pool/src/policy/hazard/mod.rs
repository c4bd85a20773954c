//! The adaptive policy: evicts what its own past says is least likely to be used again soon.
//!
//! A block's class says how often it was used and how far it was from the end of its request. It
//! also says how many turns the request's conversation had, and whether the caller said that its
//! branch ends. For each class the rate of reuse by time since the last use is learnt ([`model`])
//! from every block on a tier, and for a while from those that are gone ([`history`]). Victims are
//! the least worth of a sample of the evictable slots ([`leaves`]).
//!
//! All that is followed on a tier only where it was shown to keep more of what is used again than
//! recency does, and as long as it is ([`trial`]).
//!
//! Nothing is fitted to a workload. Time is counted in block uses and measured against the
//! capacity. What a class or a hint is worth is what was seen of it. A hint that is often wrong
//! costs nothing for long.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `trial` | whether the policy keeps more than recency does | `candidates` |
//! | `leaves` | the evictable slots of a tier | |
//! | `history` | blocks that are gone | |
//! | `model` | rates of reuse, learnt | |
//! | `candidates` | which of some candidates is evicted | |

mod candidates;
mod history;
mod leaves;
mod model;
mod trial;

use super::eviction::{BlockUse, EvictionPolicy, RequestPart, SlotNumbers, SlotSet};
use super::slot_sets::SlotSets;
use crate::entry::{BlockMemory, NONE};
use crate::random::Random;
use crate::tier::TIERS;
use candidates::{Least, Next, Offer, SAMPLE, WINDOW};
use history::History;
use leaves::{Leaves, UnusedParts};
use model::{Observations, Worth};
use trial::{Rate, Trial};

/// Entries of the history for each slot of the largest tier; where that is more than
/// [`LONG_HISTORY`], fewer, down to a half.
const HISTORY: usize = 4;
const LONG_HISTORY: usize = 500_000;
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

/// What victims of a set are chosen from.
struct Candidates {
    leaves: Leaves,
    next: Next,
    /// The clock when the sample was taken behind which `next` follows: what was used since is none
    /// of it.
    sampled: u64,
}

/// The policy `hazard`.
pub struct Hazard {
    /// Slots of the largest tier.
    largest: usize,
    /// How many blocks used make a unit of time, as a power of two.
    unit_shift: u32,
    history: History,
    worth: Worth,
    seen: Observations,
    trials: [Option<Trial>; TIERS],
    sets: SlotSets<Candidates>,
    unused: UnusedParts,
    random: Random,
    /// Blocks used so far, and at which number of them something is due.
    uses: u64,
    next_look: u64,
    next_fade: u64,
    next_fit: u64,
    /// Blocks of the request that is under way: they count as used when it is over.
    pending: u64,
    /// Whether these are blocks that were there, so far.
    in_use: bool,
    /// Turn of the request that is under way.
    turn: u8,
}

impl Hazard {
    /// Bytes of history for each block remembered.
    pub const HISTORY_BYTES: usize = history::BYTES;

    /// For tiers of `capacity` slots.
    pub fn new(capacity: [usize; TIERS], seed: u64) -> Self {
        let largest = capacity.into_iter().max().unwrap_or(0);
        let candidates = |_| Candidates { leaves: Leaves::new(), next: Next::NOTHING, sampled: 0 };
        Self {
            largest,
            unit_shift: (largest / UNITS).max(1).ilog2(),
            history: History::new((HISTORY * largest).min(LONG_HISTORY).max(largest / 2)),
            worth: Worth::new(),
            seen: Observations::new(),
            trials: capacity.map(|slots| (slots > 0).then(|| Trial::new(slots, seed))),
            sets: SlotSets::new(capacity, candidates),
            unused: UnusedParts::new(),
            random: Random::new(seed),
            uses: 0,
            next_look: 0,
            next_fade: (largest as u64).max(4096),
            next_fit: 0,
            pending: 0,
            in_use: false,
            turn: 0,
        }
    }

    /// The time, in units. It wraps.
    #[inline]
    fn now(&self) -> u16 {
        (self.uses >> self.unit_shift) as u16
    }

    /// Uses of blocks, in units of time.
    fn time(&self, uses: u64) -> f32 {
        uses as f32 / (1_u64 << self.unit_shift) as f32
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
        self.worth_at(self.age(time), class, priority)
    }

    #[inline]
    fn worth_at(&self, age: u16, class: usize, priority: u8) -> f32 {
        self.worth.of(class, age.min(OLDEST)) * (1.0 + f32::from(priority))
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
        let sampled = self.uses;
        let candidates = self.sets.at(set);
        (candidates.next, candidates.sampled) = (Next::after(second), sampled);
        (first.slot != NONE).then_some(first.slot)
    }

    #[inline]
    fn offer(&self, set: SlotSet, from: usize, count: usize, least: &mut Least) {
        let Some(candidates) = self.sets.get(set) else { return };
        let now = self.now();
        for &leaf in candidates.leaves.window(from, count) {
            let age = now.wrapping_sub(leaf.time());
            let worth = self.worth_at(age, leaf.class(), leaf.priority());
            least.offer(Offer { worth, age, slot: leaf.slot() });
        }
    }

    /// A look at a block found it unused. Each block is looked at once in `every` uses of others.
    fn saw_rest(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        let age = self.age(memory.time);
        let time = self.time(every);
        self.seen.saw_rest(class_of(memory), age.min(OLDEST), time);
        if age > OLDEST { BlockMemory { time: self.now().wrapping_sub(OLDEST), ..memory } } else { memory }
    }

    /// Learns from blocks that are gone, and keeps what blocks are worth up to date.
    fn learn(&mut self) {
        let now = self.now();
        // The policy looks at each set once in so many uses.
        let sets = self.history.sets();
        let time = self.time(sets as u64 * USES_PER_LOOK);
        for look in due(&mut self.next_look, self.uses, USES_PER_LOOK) {
            let Self { history, seen, .. } = self;
            history.observe((look as usize + 1) % sets, |memory| {
                let age = now.wrapping_sub(memory.time);
                seen.saw_rest(class_of(memory), age.min(OLDEST), time);
                age > OLDEST
            });
        }
        let fade_every = (self.largest as u64).max(4096);
        if self.next_fade < self.uses {
            self.next_fade = self.uses + fade_every;
            self.seen.fade();
        }
        let fit_every = (fade_every / model::CLASSES as u64).max(16);
        for fit in due(&mut self.next_fit, self.uses, fit_every) {
            self.worth.fit(fit as usize % model::CLASSES, &self.seen);
        }
    }

    /// A block of the request is used: both small caches show whether they would have had it.
    #[inline]
    fn try_both(&mut self, tag: u64, memory: BlockMemory) {
        let (now, Self { trials, worth, .. }) = (self.now(), self);
        for trial in trials.iter_mut().flatten().filter(|trial| trial.draws(tag)) {
            trial.used(tag, memory, |memory: BlockMemory| {
                let age = now.wrapping_sub(memory.time).min(OLDEST);
                Rate { worth: worth.of(class_of(memory), age), age }
            });
        }
    }

    /// Turn of a request that uses blocks of which the last is kept so.
    fn turn_after(&mut self, before: Option<BlockMemory>) -> u8 {
        before.map_or(0, |memory| step(turn_of(memory), 3, &mut self.random))
    }

    /// What is kept of a block that is used for the `count`-th time (0 to 3 stand for 0, 1, 2-3 and
    /// more).
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
        self.seen.saw_use(class_of(memory), age);
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

/// Numbers of what is due each `every` uses.
fn due(next: &mut u64, uses: u64, every: u64) -> std::ops::Range<u64> {
    let from = *next;
    if from >= uses {
        return 0..0;
    }
    let count = (uses - from).div_ceil(every);
    *next = from + count * every;
    from / every..from / every + count
}

impl EvictionPolicy for Hazard {
    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        // Blocks that were used and blocks registered behind them are one request.
        if part == RequestPart::Used || !self.in_use || before.is_none() {
            self.uses += std::mem::take(&mut self.pending);
            self.trials.iter_mut().flatten().for_each(Trial::begin);
        }
        self.pending += blocks as u64;
        self.in_use = part == RequestPart::Used;
        self.sets.each().for_each(|candidates| candidates.next = Next::NOTHING);
        self.turn = match (before, part) {
            // The block before was used in this same request.
            (Some(memory), RequestPart::Registered) => turn_of(memory),
            (before, _) => self.turn_after(before),
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
        numbers: &mut SlotNumbers<'_>,
    ) {
        let worth = self.worth_of(memory.time, class_of(memory), priority);
        let candidates = self.sets.at(set);
        candidates.leaves.put(slot, memory, priority, &mut self.unused, numbers);
        candidates.next.consider(slot, worth);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut SlotNumbers<'_>) {
        self.sets.at(set).leaves.remove(slot, &mut self.unused, numbers);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, numbers: &mut SlotNumbers<'_>) {
        let uses = self.uses;
        let candidates = self.sets.at(set);
        // A victim that follows was found in this same request: no other has come since.
        let follow = candidates.next.take().filter(|_| candidates.sampled == uses);
        let follow = follow.filter(|&slot| numbers.get(slot).is_some());
        let victim = follow.or_else(|| self.sample(set));
        if let Some(slot) = victim {
            self.sets.at(set).leaves.remove(slot, &mut self.unused, numbers);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A victim that would follow another is forgotten when a request begins.
    #[test]
    fn no_victim_follows_one_of_another_request() {
        let mut policy = Hazard::new([64, 0, 0], 1);
        let set = SlotSet::of_tier(0);
        let follow = |policy: &mut Hazard| {
            policy.sets.at(set).next = Next { bar: f32::INFINITY, slot: NONE };
            policy.sets.at(set).next.consider(3, 0.5);
        };
        follow(&mut policy);
        assert_eq!(policy.sets.at(set).next.take(), Some(3));
        follow(&mut policy);
        policy.begin(None, RequestPart::Used, 1);
        assert_eq!(policy.sets.at(set).next.take(), None);
    }

    /// The leaves of tiers whose tenants have them in turn lie on the heap once.
    #[test]
    fn sets_take_the_parts_that_others_do_not_need_any_more() {
        const MANY: u32 = 6 * leaves::PART as u32;
        const TENANTS: usize = 4;
        let mut policy = Hazard::new([MANY as usize, 0, 0], 1);
        let slots = crate::slot::Slot::many(MANY as usize);
        let listed = |slot: u32, listed| slots[slot as usize].set_listed(listed);
        let set = |turn: usize| SlotSet { tier: 0, tenant: turn % TENANTS };
        for turn in 0..3 * TENANTS {
            for slot in 0..MANY {
                let numbers = &mut SlotNumbers::of(&slots);
                if turn > 0 {
                    policy.kept(set(turn - 1), slot, numbers);
                    listed(slot, false);
                }
                listed(slot, true);
                policy.evictable(set(turn), slot, BlockMemory::default(), 0, numbers);
            }
            let used: usize = policy.sets.each().map(|candidates| candidates.leaves.parts()).sum();
            // Six, and one more that each may have.
            let unused = policy.unused.len();
            assert!(used + unused <= 6 + TENANTS, "{used} are used, {unused} not");
        }
    }
}
