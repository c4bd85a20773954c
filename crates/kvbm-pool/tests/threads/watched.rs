//! A policy that is watched, in parts if it has some: what each part was told must be what lies in its shard, and what it chooses must be of
//! that. It may be made to choose every victim, also where it would leave that to recency.

#![allow(dead_code, reason = "each of the tests that share this uses a part of it")]

use kvbm_pool::{BlockMemory, BlockUse, EvictionPolicy, Numbers, RequestPart, SlotSet};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

/// Who decides whether the policy chooses the next victims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chooses {
    Always,
    /// The policy itself.
    AsItSays,
}

#[derive(Default)]
struct Part {
    /// Slots of each tier that it was told of as evictable.
    evictable: [BTreeSet<u32>; 3],
    /// Victims that it chose, and whether it would choose the next ones of some tier.
    chosen: usize,
    chooses: bool,
}

/// What the parts were told and what they chose.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Vec<Part>>>);

impl Seen {
    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        self.0.lock().expect("no policy panicked with it")
    }

    /// Victims chosen so far.
    pub(crate) fn chosen(&self) -> usize {
        self.parts().iter().map(|part| part.chosen).sum()
    }

    /// Whether all parts would choose the next victims, when they were asked last.
    pub(crate) fn all_choose(&self) -> bool {
        self.parts().iter().all(|part| part.chooses)
    }

    /// Slots of a tier that are evictable, of which no two parts were told.
    pub(crate) fn evictable(&self, tier: usize) -> BTreeSet<u32> {
        let parts = self.parts();
        let all: BTreeSet<u32> = parts.iter().flat_map(|part| &part.evictable[tier]).copied().collect();
        let count: usize = parts.iter().map(|part| part.evictable[tier].len()).sum();
        assert_eq!(all.len(), count, "a slot is in one part's care");
        all
    }
}

pub(crate) struct Watched {
    policy: Box<dyn EvictionPolicy>,
    how: Chooses,
    seen: Seen,
    number: usize,
}

impl Watched {
    pub(crate) fn new(policy: Box<dyn EvictionPolicy>, how: Chooses, seen: Seen) -> Self {
        seen.parts().resize_with(1, Part::default);
        Self { policy, how, seen, number: 0 }
    }

    fn with_part<R>(&self, work: impl FnOnce(&mut Part) -> R) -> R {
        work(&mut self.seen.parts()[self.number])
    }
}

impl EvictionPolicy for Watched {
    fn split(&self, parts: usize) -> Option<Vec<Box<dyn EvictionPolicy>>> {
        let policies = self.policy.split(parts)?;
        self.seen.parts().resize_with(parts, Part::default);
        let watched = |(number, policy)| {
            let part = Self { policy, how: self.how, seen: self.seen.clone(), number };
            Box::new(part) as Box<dyn EvictionPolicy>
        };
        Some(policies.into_iter().enumerate().map(watched).collect())
    }

    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        self.policy.begin(before, part, blocks);
    }

    fn goes_on(&mut self, before: Option<BlockMemory>) {
        self.policy.goes_on(before);
    }

    fn expect(&self, tags: &[u64]) {
        self.policy.expect(tags);
    }

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        self.policy.registered(block)
    }

    fn used(&mut self, block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        self.policy.used(block, memory)
    }

    fn ended(&mut self, tag: u64, memory: BlockMemory) -> BlockMemory {
        self.policy.ended(tag, memory)
    }

    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        self.policy.observe(memory, every)
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        self.policy.forgotten(tag, memory);
    }

    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        numbers: &mut Numbers<'_>,
    ) {
        self.with_part(|part| part.evictable[set.tier].insert(slot));
        self.policy.evictable(set, slot, memory, priority, numbers);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.with_part(|part| part.evictable[set.tier].remove(&slot));
        self.policy.kept(set, slot, numbers);
    }

    fn emptied(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.with_part(|part| part.evictable[set.tier].remove(&slot));
        self.policy.emptied(set, slot, numbers);
    }

    fn touched(&mut self, tier: usize, slot: u32) {
        self.policy.touched(tier, slot);
    }

    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, numbers: &mut Numbers<'_>) {
        let before = out.len();
        self.policy.victims(set, want, out, numbers);
        self.with_part(|part| {
            for slot in &out[before..] {
                assert!(part.evictable[set.tier].remove(slot), "slot {slot} is not evictable in this part");
                part.chosen += 1;
            }
        });
        let left = self.with_part(|part| !part.evictable[set.tier].is_empty());
        assert_eq!(self.policy.has_victim(set), left, "the part knows what is left to it");
    }

    fn follows_recency(&self, set: SlotSet) -> bool {
        let follows = self.how == Chooses::AsItSays && self.policy.follows_recency(set);
        if set.tier == 0 {
            self.with_part(|part| part.chooses = !follows);
        }
        follows
    }

    fn expected_reuse(&self, memory: BlockMemory) -> Option<f32> {
        self.policy.expected_reuse(memory)
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        self.policy.has_victim(set)
    }
}
