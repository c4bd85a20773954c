//! Calls of the eviction policy: uses of blocks, and which slots may be evicted.
//!
//! A slot is evictable when its block is registered in it without users, and no block on the tier
//! continues it, or its group does not care, or another copy takes over. [`Core::update_evictable`]
//! follows every change of that. The slot itself stores whether the policy lists it, so an update
//! costs little where nothing changed.

use super::entries::BATCH;
use super::state::Core;
use super::store::MAX_VICTIMS;
use crate::entry::{BlockMemory, NONE, Presence, tag_of};
use crate::policy::{BlockUse, RequestPart, SlotNumbers, SlotSet};
use crate::slot::{Slot, Usage};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

/// Where the end of a block's request is not known.
pub(crate) const FAR_FROM_TAIL: u32 = u32::MAX;

/// The memory of a block under `lru-leaf` whose branch has ended, until it is used again.
pub(crate) const ENDED: BlockMemory = BlockMemory { time: 0, class: 1 };

/// Blocks that the policy observes for each block used.
const LOOKS_PER_USE: usize = 2;

impl Core {
    /// The uses that the policy expects of pinned blocks, in order.
    pub(crate) fn expected_reuse(&self, tier: usize, blocks: &[BlockId]) -> Vec<Option<f32>> {
        let memory = |block: &BlockId| self.entry(self.entry_of(tier, block.0)).memory();
        let expected = |memory| self.policy.as_ref().and_then(|policy| policy.expected_reuse(memory));
        blocks.iter().map(|block| expected(memory(block))).collect()
    }

    /// Tells the policy whether the entry's slot on `tier` may be evicted, if that changed.
    #[inline]
    pub(crate) fn update_evictable(&mut self, index: u32, tier: usize) {
        if self.policy.is_some() {
            self.update_listed(index, tier);
        }
    }

    fn update_listed(&mut self, index: u32, tier: usize) {
        let entry = self.entry(index);
        if entry.presence(tier) != Presence::Present {
            return;
        }
        let slot = entry.slot(tier);
        let state = self.slot(tier, slot);
        let continued = entry.children(tier) > 0 && state.link.get() == NONE && self.is_full(entry.group());
        let evictable = state.usage() == Usage::Registered
            && state.refs() == 0
            && !continued
            && !self.is_pinned(index, tier);
        if evictable == state.is_listed() {
            return;
        }
        if evictable {
            self.count_listed(tier, slot, true);
            self.list(index, tier, slot);
        } else {
            self.unlist(tier, slot);
        }
    }

    /// Tells the policy what is kept of the block in a listed slot.
    fn list(&mut self, index: u32, tier: usize, slot: u32) {
        let set = self.set_of(index, tier);
        let Self { policy: Some(policy), entries, slots, .. } = self else { return };
        let entry = &entries[index as usize];
        let numbers = &mut SlotNumbers::of(&slots[tier]);
        policy.evictable(set, slot, entry.memory(), entry.priority.get(), numbers);
    }

    /// The policy may choose a slot from now on, or must not any more.
    #[inline]
    pub(crate) fn count_listed(&mut self, tier: usize, slot: u32, listed: bool) {
        self.slot(tier, slot).set_listed(listed);
        let count = &mut self.tiers[tier].listed;
        *count = if listed { *count + 1 } else { *count - 1 };
    }

    /// A listed slot is not evictable any more.
    pub(crate) fn unlist(&mut self, tier: usize, slot: u32) {
        let set = self.set_of(self.entry_of(tier, slot), tier);
        if let Some(policy) = &mut self.policy {
            policy.kept(set, slot, &mut SlotNumbers::of(&self.slots[tier]));
        }
        self.count_listed(tier, slot, false);
    }

    /// The block in `slot` is removed.
    pub(crate) fn note_removal(&mut self, tier: usize, slot: u32) {
        let set = self.set_of(self.entry_of(tier, slot), tier);
        if let Some(policy) = &mut self.policy {
            policy.emptied(set, slot, &mut SlotNumbers::of(&self.slots[tier]));
            if self.slot(tier, slot).is_listed() {
                self.count_listed(tier, slot, false);
            }
        }
    }

    /// A request uses these entries; `NONE` where it has a block that is nowhere.
    pub(crate) fn note_use(&mut self, request: &[u32]) {
        let Self { policy: Some(policy), entries, .. } = self else { return };
        let there = |&&index: &&u32| index != NONE;
        let Some(&deepest) = request.iter().rfind(there) else { return };
        let uses = request.iter().filter(there).count();
        policy.begin(Some(entries[deepest as usize].memory()), RequestPart::Used, uses);
        for (at, &index) in request.iter().enumerate().filter(|(_, index)| **index != NONE) {
            let entry = &entries[index as usize];
            if !entry.take_fresh() {
                let block = BlockUse { tag: entry.tag(), from_tail: (request.len() - 1 - at) as u32 };
                entry.set_memory(policy.used(&block, entry.memory()));
            }
        }
        self.observe_some(uses);
    }

    /// Tells the policy what has changed of a block that was touched.
    pub(crate) fn update_touched(&mut self, index: u32) {
        let Self { policy: Some(policy), entries, .. } = self else { return };
        let entry = &entries[index as usize];
        for tier in (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present) {
            policy.touched(tier, entry.slot(tier));
        }
        self.list_again(index);
    }

    /// Tells the policy the memory of a block again, on every tier where its slot is listed.
    fn list_again(&mut self, index: u32) {
        for tier in 0..TIERS {
            let entry = self.entry(index);
            if entry.presence(tier) == Presence::Present {
                let slot = entry.slot(tier);
                if self.slot(tier, slot).is_listed() {
                    self.list(index, tier, slot);
                }
            }
        }
    }

    /// The caller says that nothing will continue a request: its blocks from the end up to the
    /// first that another block continues.
    pub(crate) fn branch_ends(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let last = hashes.iter().rev().find_map(|&hash| self.find(group, hash));
        let mut index = last.unwrap_or(NONE);
        // Where the block nearer to the end is the child of this one.
        let mut below = [0; TIERS];
        let mut branch = std::mem::take(&mut self.touched);
        branch.clear();
        while index != NONE {
            let entry = self.entry(index);
            if (0..TIERS).any(|tier| entry.children(tier) > below[tier]) {
                break;
            }
            below = std::array::from_fn(|tier| u32::from(entry.presence(tier) != Presence::Absent));
            branch.push(index);
            index = entry.parent.get();
        }
        // The end of the branch becomes the oldest.
        for &index in branch.iter().rev() {
            self.end_of_branch(index);
        }
        self.touched = branch;
    }

    fn end_of_branch(&mut self, index: u32) {
        let entry = &self.entries[index as usize];
        if let Some(policy) = &mut self.policy {
            entry.set_memory(policy.ended(entry.tag(), entry.memory()));
            return self.list_again(index);
        }
        if entry.memory() == ENDED {
            return;
        }
        entry.set_memory(ENDED);
        for tier in (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present) {
            let slot = entry.slot(tier);
            if self.slots[tier][slot as usize].refs() == 0 {
                self.tiers[tier].order.push_old(slot, &self.slots[tier]);
            }
        }
    }

    /// A request registers these blocks.
    pub(crate) fn note_arrival(&mut self, identities: &[BlockIdentity]) {
        let Some(first) = identities.first().filter(|_| self.policy.is_some()) else { return };
        let before = first.parent.and_then(|parent| self.find(first.group, parent));
        let before = before.map(|index| self.entry(index).memory());
        if let Some(policy) = &mut self.policy {
            policy.begin(before, RequestPart::Registered, identities.len());
        }
        self.observe_some(identities.len());
    }

    /// Prefetches what the policy remembers of these blocks, up to [`BATCH`].
    pub(crate) fn prefetch_policy(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
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
    pub(crate) fn recall(&mut self, index: u32, from_tail: u32) {
        let entry = &self.entries[index as usize];
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
    pub(crate) fn remember(&mut self, index: u32) {
        let Some(policy) = &mut self.policy else { return };
        let entry = &self.entries[index as usize];
        if entry.is_nowhere() {
            policy.forgotten(entry.tag(), entry.memory());
        }
    }

    /// Lets the policy observe the next few blocks that are on some tier, in proportion to the
    /// uses.
    fn observe_some(&mut self, uses: usize) {
        let end = self.end();
        let Self { policy: Some(policy), entries, observed, .. } = self else { return };
        let every = (end / LOOKS_PER_USE).max(1) as u64;
        for _ in 0..(uses * LOOKS_PER_USE).min(end) {
            let next = *observed as usize + 1;
            *observed = if next < end { next as u32 } else { 0 };
            let entry = &entries[*observed as usize];
            if !entry.is_nowhere() {
                entry.set_memory(policy.observe(entry.memory(), every));
            }
        }
    }

    /// Evicts the blocks that the policy chooses, up to `want` of `tier` and at most
    /// [`MAX_VICTIMS`]. Where none of its answer may go, the oldest go, for which the search looks
    /// at so many positions.
    pub(crate) fn evict_chosen(&mut self, tier: usize, want: usize, looks: usize, out: &mut Vec<BlockId>) {
        let set = SlotSet::of_tier(tier);
        let wanted = want.min(MAX_VICTIMS);
        let mut left = wanted;
        let mut chosen = std::mem::take(&mut self.chosen);
        let evicted_before = self.tiers[tier].counters.evicted;
        while left > 0 {
            chosen.clear();
            let Some(policy) = &mut self.policy else { break };
            let numbers = &mut SlotNumbers::for_victims(&self.slots[tier], &self.entries);
            policy.victims(set, left, &mut chosen, numbers);
            let before = left;
            for &slot in &chosen {
                // Whatever a policy answers, only evictable blocks go, and no more than are wanted.
                if !self.slots[tier].get(slot as usize).is_some_and(Slot::is_listed) {
                    continue;
                }
                self.count_listed(tier, slot, false);
                if left == 0 {
                    self.update_evictable(self.entry_of(tier, slot), tier);
                    continue;
                }
                self.vacate(tier, slot);
                out.push(BlockId(slot));
                left -= 1;
            }
            if left == before {
                break;
            }
        }
        self.chosen = chosen;
        let counters = &mut self.tiers[tier].counters;
        counters.evicted_by_choice += counters.evicted - evicted_before;
        if left == wanted && self.tiers[tier].listed > 0 {
            self.evict_oldest(tier, wanted, looks, out);
        }
    }
}
