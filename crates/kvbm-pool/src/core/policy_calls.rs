//! Calls of the eviction policy: uses of blocks, and which slots may be evicted.

use super::entries::{BATCH, Entries};
use super::tier_state::TierState;
use crate::config::RegistryConfig;
use crate::entry::{BlockMemory, Entry, NONE, tag_of};
use crate::policy::{BlockUse, EvictionPolicy, RequestPart, SlotNumbers, SlotSet};
use kvbm_plan::{BlockIdentity, GroupId, SequenceHash};

/// Where the end of a block's request is not known.
pub(crate) const FAR_FROM_TAIL: u32 = u32::MAX;

/// The memory of a block under `lru-leaf` whose branch has ended, until it is used again.
pub(crate) const ENDED: BlockMemory = BlockMemory { time: 0, class: 1 };

/// Blocks that the policy observes for each block used.
const LOOKS_PER_USE: usize = 2;

/// The policy that chooses victims, with what is kept for its calls.
pub(crate) struct PolicyCalls {
    /// None for least recently used, which is built in.
    policy: Option<Box<dyn EvictionPolicy>>,
    /// Entry that the policy observes next.
    observed: u32,
    /// Slots that the policy chose.
    chosen: Vec<u32>,
}

impl PolicyCalls {
    pub(crate) fn new(policy: Option<Box<dyn EvictionPolicy>>) -> Self {
        Self { policy, observed: 0, chosen: Vec::with_capacity(RegistryConfig::MOST_EVICTED_AT_ONCE) }
    }

    /// Whether there is a policy. Without one the least recently used go.
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether there is a policy that chooses victims of a set, rather than the least recently
    /// used.
    pub(crate) fn chooses(&self, set: SlotSet) -> bool {
        self.policy.as_ref().is_some_and(|policy| !policy.follows_recency(set))
    }

    /// Whether a slot of a set is evictable.
    pub(crate) fn has_victim(&self, set: SlotSet) -> bool {
        self.policy.as_ref().is_some_and(|policy| policy.has_victim(set))
    }

    /// The uses that the policy expects of a block.
    pub(crate) fn expected_reuse(&self, memory: BlockMemory) -> Option<f32> {
        self.policy.as_ref().and_then(|policy| policy.expected_reuse(memory))
    }

    /// Tells the policy what is kept of the block in a listed slot of a set.
    pub(crate) fn list(&mut self, set: SlotSet, slot: u32, entry: &Entry, tier: &TierState) {
        let Some(policy) = &mut self.policy else { return };
        let numbers = &mut SlotNumbers::of(&tier.slots);
        policy.evictable(set, slot, entry.memory(), entry.priority.get(), numbers);
    }

    /// A listed slot of a set is not evictable any more.
    pub(crate) fn unlist(&mut self, set: SlotSet, slot: u32, tier: &mut TierState) {
        if let Some(policy) = &mut self.policy {
            policy.kept(set, slot, &mut SlotNumbers::of(&tier.slots));
        }
        tier.count_listed(slot, false);
    }

    /// The block in a slot of a set is removed.
    pub(crate) fn note_removal(&mut self, set: SlotSet, slot: u32, tier: &mut TierState) {
        let Some(policy) = &mut self.policy else { return };
        policy.emptied(set, slot, &mut SlotNumbers::of(&tier.slots));
        if tier.slot(slot).is_listed() {
            tier.count_listed(slot, false);
        }
    }

    /// A request uses these entries; `NONE` where it has a block that is nowhere.
    pub(crate) fn note_use(&mut self, request: &[u32], entries: &Entries) {
        let Some(policy) = &mut self.policy else { return };
        let there = |&&index: &&u32| index != NONE;
        let Some(&deepest) = request.iter().rfind(there) else { return };
        let uses = request.iter().filter(there).count();
        policy.begin(Some(entries[deepest].memory()), RequestPart::Used, uses);
        for (at, &index) in request.iter().enumerate().filter(|(_, index)| **index != NONE) {
            let entry = &entries[index];
            if !entry.take_fresh() {
                let block = BlockUse { tag: entry.tag(), from_tail: (request.len() - 1 - at) as u32 };
                entry.set_memory(policy.used(&block, entry.memory()));
            }
        }
        self.observe_some(uses, entries);
    }

    /// A block in a slot was used.
    pub(crate) fn touched(&mut self, tier: usize, slot: u32) {
        if let Some(policy) = &mut self.policy {
            policy.touched(tier, slot);
        }
    }

    /// Nothing will continue the branch of a block. Whether what is kept of the block has changed.
    pub(crate) fn end_branch(&mut self, entry: &Entry) -> bool {
        let memory = match &mut self.policy {
            Some(policy) => policy.ended(entry.tag(), entry.memory()),
            None if entry.memory() == ENDED => return false,
            None => ENDED,
        };
        entry.set_memory(memory);
        true
    }

    /// A request registers these blocks.
    pub(crate) fn note_arrival(&mut self, identities: &[BlockIdentity], entries: &Entries) {
        let Some(policy) = &mut self.policy else { return };
        let Some(first) = identities.first() else { return };
        let before = first.parent.and_then(|parent| entries.find(first.group, parent));
        let before = before.map(|index| entries[index].memory());
        policy.begin(before, RequestPart::Registered, identities.len());
        self.observe_some(identities.len(), entries);
    }

    /// Prefetches what the policy remembers of these blocks, up to [`BATCH`].
    pub(crate) fn prefetch(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        let Some(policy) = &self.policy else { return };
        let mut tags = [0; BATCH];
        let mut count = 0;
        for ((group, hash), tag) in blocks.zip(&mut tags) {
            *tag = tag_of(group, hash);
            count += 1;
        }
        policy.expect(&tags[..count]);
    }

    /// A block comes to a tier: if it was on none, the policy recalls it or gets to know it.
    #[inline]
    pub(crate) fn recall(&mut self, entry: &Entry, from_tail: u32) {
        if !entry.is_nowhere() {
            return;
        }
        let Some(policy) = &mut self.policy else { return entry.set_memory(BlockMemory::default()) };
        entry.set_memory(policy.registered(&BlockUse { tag: entry.tag(), from_tail }));
        if from_tail != FAR_FROM_TAIL {
            entry.set_fresh();
        }
    }

    /// A block was evicted from a tier: if it is on no other, the policy may remember it.
    #[inline]
    pub(crate) fn remember(&mut self, entry: &Entry) {
        let Some(policy) = &mut self.policy else { return };
        if entry.is_nowhere() {
            policy.forgotten(entry.tag(), entry.memory());
        }
    }

    /// Lets the policy observe the next few blocks that are on some tier, in proportion to the
    /// uses.
    fn observe_some(&mut self, uses: usize, entries: &Entries) {
        let end = entries.end();
        let Self { policy: Some(policy), observed, .. } = self else { return };
        let every = (end / LOOKS_PER_USE).max(1) as u64;
        for _ in 0..(uses * LOOKS_PER_USE).min(end) {
            let next = *observed as usize + 1;
            *observed = if next < end { next as u32 } else { 0 };
            let entry = &entries[*observed];
            if !entry.is_nowhere() {
                entry.set_memory(policy.observe(entry.memory(), every));
            }
        }
    }

    /// The slots of a set that the policy chooses, at least one and at most `want`: whatever a
    /// policy answers, only listed ones may go. The vector comes [back](Self::give_back).
    pub(crate) fn choose(
        &mut self,
        set: SlotSet,
        want: usize,
        entries: &Entries,
        tier: &TierState,
    ) -> Vec<u32> {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        if let Some(policy) = &mut self.policy {
            let numbers = &mut SlotNumbers::for_victims(&tier.slots, entries.all());
            policy.victims(set, want, &mut chosen, numbers);
        }
        chosen
    }

    /// The vector of an answer, for the next one.
    pub(crate) fn give_back(&mut self, chosen: Vec<u32>) {
        self.chosen = chosen;
    }
}
