//! A policy under watch: it chooses only among the slots that the registry told it of. It may be
//! made to choose every victim, also where it would leave that to recency.

#![allow(dead_code, reason = "each of the tests that share this uses a part of it")]

use kvbm_pool::{BlockMemory, BlockUse, EvictionPolicy, RequestPart, SlotNumbers, SlotSet};
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
struct Record {
    /// Slots of each tier that are evictable, as the policy was told.
    evictable: [BTreeSet<u32>; 3],
    /// Victims that it chose, and whether it would choose the next ones of G1.
    chosen: usize,
    chooses: bool,
}

/// What the policy was told and what it chose.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Record>>);

impl Seen {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.0.lock().expect("no policy panicked with it")
    }

    /// Victims chosen so far.
    pub(crate) fn chosen(&self) -> usize {
        self.record().chosen
    }

    /// Whether the policy would choose the next victims, when it was asked last.
    pub(crate) fn chooses(&self) -> bool {
        self.record().chooses
    }

    /// Slots of a tier that are evictable.
    pub(crate) fn evictable(&self, tier: usize) -> BTreeSet<u32> {
        self.record().evictable[tier].clone()
    }
}

pub(crate) struct Watched {
    policy: Box<dyn EvictionPolicy>,
    how: Chooses,
    seen: Seen,
}

impl Watched {
    pub(crate) fn new(policy: Box<dyn EvictionPolicy>, how: Chooses, seen: Seen) -> Self {
        Self { policy, how, seen }
    }
}

impl EvictionPolicy for Watched {
    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        self.policy.begin(before, part, blocks);
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
        numbers: &mut SlotNumbers<'_>,
    ) {
        self.seen.record().evictable[set.tier].insert(slot);
        self.policy.evictable(set, slot, memory, priority, numbers);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut SlotNumbers<'_>) {
        self.seen.record().evictable[set.tier].remove(&slot);
        self.policy.kept(set, slot, numbers);
    }

    fn emptied(&mut self, set: SlotSet, slot: u32, numbers: &mut SlotNumbers<'_>) {
        self.seen.record().evictable[set.tier].remove(&slot);
        self.policy.emptied(set, slot, numbers);
    }

    fn touched(&mut self, tier: usize, slot: u32) {
        self.policy.touched(tier, slot);
    }

    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, numbers: &mut SlotNumbers<'_>) {
        let before = out.len();
        self.policy.victims(set, want, out, numbers);
        let mut record = self.seen.record();
        for slot in &out[before..] {
            assert!(record.evictable[set.tier].remove(slot), "slot {slot} is not evictable");
            record.chosen += 1;
        }
        let left = !record.evictable[set.tier].is_empty();
        assert_eq!(self.policy.has_victim(set), left, "the policy knows what is left to it");
    }

    fn follows_recency(&self, set: SlotSet) -> bool {
        let follows = self.how == Chooses::AsItSays && self.policy.follows_recency(set);
        if set.tier == 0 {
            self.seen.record().chooses = !follows;
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
