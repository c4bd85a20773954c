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
//! Where the registry has several shards each has a part of the policy, with the leaves of the shard. What is learnt is one for all ([`parts`]).
//!
//! Nothing is fitted to a workload: time is counted in block uses and measured against the capacity, and what a class
//! or a hint is worth is what was seen of it. A hint that is often wrong costs nothing for long.

pub(super) mod history;
mod leaves;
mod model;
mod parts;
mod trial;

use super::{BlockMemory, BlockUse, EvictionPolicy, Numbers, Random, RequestPart, Sets, SlotSet};
use crate::core::NONE;
use crate::sync::Arc;
use crate::tier::TIERS;
use leaves::Leaves;
use model::Seen;
use parts::Common;
use std::cmp::Ordering;

/// Leaves looked at for a victim, and how many lie side by side.
const SAMPLE: usize = 64;
const WINDOW: usize = 8;
/// Entries of the history for each slot of the largest tier; where that is more than [`LONG_HISTORY`], fewer, down to a half.
const HISTORY: usize = 4;
const LONG_HISTORY: usize = 500_000;
/// Units of time in which as many blocks are used as the largest tier holds.
const UNITS: usize = 1024;
/// Blocks older than this count as of this age. A block is looked at long before its time wraps.
const OLDEST: u16 = 40_000;
/// Blocks used between two looks into the history, at eight entries each.
const USES_PER_LOOK: u64 = 4;
/// Classes of which a part says what it saw, while one class is fitted.
const GIVEN_PER_FIT: u64 = 4;

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
    /// The clock when the sample was taken behind which `next` follows: what was used since is none of it.
    sampled: u64,
}

/// The policy "hazard", or the part of it that a shard has.
pub struct Hazard {
    common: Arc<Common>,
    sets: Sets<Candidates>,
    /// What this part saw, and has not given to all.
    seen: Seen,
    /// When it gives something next, of which class.
    next_given: u64,
    given: usize,
    random: Random,
    /// Turn of the request that is under way.
    turn: u8,
}

impl Hazard {
    /// Bytes of history for each block remembered.
    pub const HISTORY_BYTES: usize = history::BYTES;

    /// For tiers of `capacity` slots.
    pub fn new(capacity: [usize; TIERS], seed: u64) -> Self {
        Self::part(&Arc::new(Common::new(capacity, seed, 1)), 0)
    }

    fn part(common: &Arc<Common>, number: u64) -> Self {
        let candidates = |_| Candidates { leaves: Leaves::new(), next: Next::NOTHING, sampled: 0 };
        Self {
            sets: Sets::new(common.capacity, candidates),
            seen: Seen::new(),
            next_given: 0,
            given: 0,
            random: Random::new(common.seed.wrapping_add(number)),
            turn: 0,
            common: Arc::clone(common),
        }
    }
}

impl Hazard {
    #[inline]
    fn now(&self) -> u16 {
        self.common.now()
    }

    fn units_per_turnover(&self) -> f32 {
        (self.common.largest >> self.common.unit_shift).max(1) as f32
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
        self.common.worth.of(class, age.min(OLDEST)) * (1.0 + f32::from(priority))
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
        let sampled = self.common.uses();
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

    /// A block was found resting, which it is in `every` uses of others once.
    fn saw_rest(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        let age = self.age(memory.time);
        let time = self.common.time(every);
        self.seen.saw_rest(class_of(memory), age.min(OLDEST), time);
        if age > OLDEST { BlockMemory { time: self.now().wrapping_sub(OLDEST), ..memory } } else { memory }
    }

    /// Learns from blocks that are gone, and keeps what blocks are worth up to date.
    fn learn(&mut self) {
        let Self { common, seen, .. } = self;
        let (now, time) = (common.now(), common.time(common.every()));
        for set in common.due_sets() {
            common.history.observe(set, |memory| {
                let age = now.wrapping_sub(memory.time);
                seen.saw_rest(class_of(memory), age.min(OLDEST), time);
                age > OLDEST
            });
        }
        let fades = common.is_time_to_fade();
        match &common.seen {
            None => {
                if fades {
                    seen.fade();
                }
                common.due_classes().for_each(|class| common.worth.fit(class, seen));
            }
            Some(all) => {
                if fades {
                    all.lock().fade();
                }
                for class in common.due_classes() {
                    common.worth.fit(class, &all.lock());
                }
                self.give();
            }
        }
    }

    /// Gives to all what this part saw of the next few classes.
    fn give(&mut self) {
        let uses = self.common.uses();
        let Some(all) = self.common.seen.as_ref().filter(|_| self.next_given < uses) else { return };
        let every = (self.common.fit_every() / GIVEN_PER_FIT).max(1);
        let due = (uses - self.next_given).div_ceil(every);
        self.next_given += due * every;
        let mut all = all.lock();
        for _ in 0..due.min(model::CLASSES as u64) {
            self.seen.give(self.given, &mut all);
            self.given = (self.given + 1) % model::CLASSES;
        }
    }

    /// Turn of a request that uses blocks of which the last is kept so.
    fn turn_after(&mut self, before: Option<BlockMemory>) -> u8 {
        before.map_or(0, |memory| step(turn_of(memory), 3, &mut self.random))
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

impl EvictionPolicy for Hazard {
    fn split(&self, parts: usize) -> Option<Vec<Box<dyn EvictionPolicy>>> {
        let common = Arc::new(Common::new(self.common.capacity, self.common.seed, parts));
        let part = |number| Box::new(Self::part(&common, number)) as Box<dyn EvictionPolicy>;
        Some((0..parts as u64).map(part).collect())
    }

    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        self.common.begin(before.is_some(), part, blocks);
        self.sets.each().for_each(|candidates| candidates.next = Next::NOTHING);
        self.turn = match (before, part) {
            // The block before was used in this same request.
            (Some(memory), RequestPart::Registered) => turn_of(memory),
            (before, _) => self.turn_after(before),
        };
        self.learn();
    }

    fn goes_on(&mut self, before: Option<BlockMemory>) {
        self.sets.each().for_each(|candidates| candidates.next = Next::NOTHING);
        self.turn = self.turn_after(before);
    }

    fn expect(&self, tags: &[u64]) {
        self.common.history.fetch(tags);
    }

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        let count = match self.common.history.take(block.tag) {
            Some(memory) => {
                let turn = step(turn_of(memory), 3, &mut self.random);
                self.turn = self.turn.max(turn);
                self.count_use(memory)
            }
            None => 0,
        };
        let memory = self.memory(count, block.from_tail);
        self.common.try_both(block.tag, memory);
        memory
    }

    fn used(&mut self, block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        let count = self.count_use(memory);
        let memory = self.memory(count, block.from_tail);
        self.common.try_both(block.tag, memory);
        memory
    }

    fn ended(&mut self, tag: u64, memory: BlockMemory) -> BlockMemory {
        let memory = BlockMemory { class: memory.class | 1 << ENDED_SHIFT, ..memory };
        self.common.changed(tag, memory);
        memory
    }

    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        self.saw_rest(memory, every)
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        let now = self.now();
        self.common.history.put(tag, memory, |time| now.wrapping_sub(time));
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
        candidates.leaves.put(slot, memory, priority, &self.common.spare, numbers);
        candidates.next.consider(slot, worth);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.sets.at(set).leaves.remove(slot, &self.common.spare, numbers);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, numbers: &mut Numbers<'_>) {
        let uses = self.common.uses();
        let candidates = self.sets.at(set);
        // A victim that follows was found in this same request: no other has come since.
        let follow = candidates.next.take().filter(|_| candidates.sampled == uses);
        let follow = follow.filter(|&slot| numbers.get(slot).is_some());
        let victim = follow.or_else(|| self.sample(set));
        if let Some(slot) = victim {
            self.sets.at(set).leaves.remove(slot, &self.common.spare, numbers);
            out.push(slot);
        }
    }

    fn follows_recency(&self, set: SlotSet) -> bool {
        self.common.trials[set.tier].as_ref().is_some_and(|trial| !trial.is_ahead())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A victim that would follow another is forgotten when a request begins, in whichever part it comes to later.
    #[test]
    fn no_victim_follows_one_of_another_request() {
        let mut part = Hazard::new([64, 0, 0], 1);
        let set = SlotSet::of_tier(0);
        let follow = |part: &mut Hazard| {
            part.sets.at(set).next = Next { bar: f32::INFINITY, slot: NONE };
            part.sets.at(set).next.consider(3, 0.5);
        };
        follow(&mut part);
        assert_eq!(part.sets.at(set).next.take(), Some(3));
        follow(&mut part);
        part.begin(None, RequestPart::Used, 1);
        assert_eq!(part.sets.at(set).next.take(), None);
        follow(&mut part);
        part.goes_on(None);
        assert_eq!(part.sets.at(set).next.take(), None);
    }

    /// What all leaves of a tier take lies on the heap once, in whichever shards they are, one after the other.
    #[test]
    fn parts_of_shards_take_the_leaves_that_others_have_no_more() {
        const MANY: u32 = 6 * leaves::PART as u32;
        const SHARDS: usize = 4;
        let common = Arc::new(Common::new([MANY as usize, 0, 0], 1, SHARDS));
        let mut shards: Vec<_> = (0..SHARDS as u64).map(|number| Hazard::part(&common, number)).collect();
        let set = SlotSet::of_tier(0);
        let slots = crate::core::slot::Slot::many(MANY as usize);
        let listed = |slot: u32, listed| slots[slot as usize].set_listed(listed);
        for turn in 0..3 * SHARDS {
            for slot in 0..MANY {
                let numbers = &mut Numbers::of(&slots);
                if turn > 0 {
                    shards[(turn - 1) % SHARDS].kept(set, slot, numbers);
                    listed(slot, false);
                }
                listed(slot, true);
                shards[turn % SHARDS].evictable(set, slot, BlockMemory::default(), 0, numbers);
            }
            let used: usize = shards.iter().map(|shard| shard.sets.get(set).unwrap().leaves.parts()).sum();
            // Six, and one more that each may have.
            assert!(used + common.spare.len() <= 6 + SHARDS, "{used} are used, {} not", common.spare.len());
        }
    }
}
