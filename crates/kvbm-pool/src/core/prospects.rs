//! What the eviction policy is told: uses of blocks, and which slots may be evicted.
//!
//! A slot is evictable when its block is registered in it, nobody uses it, and nothing on the tier continues the block
//! (or its group does not care, or another copy takes over). [`Core::update_evictable`] follows every change of that;
//! the slot itself says whether the policy knows it as evictable, so telling is cheap where nothing changed.

use super::entry::LOOKUPS;
use super::evict::MAX_VICTIMS;
use super::slot::Usage;
use super::{Core, NONE, Presence};
use crate::policy::{BlockUse, Numbers, RequestPart, mix};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

/// Where the end of a block's request is not known.
pub(crate) const FAR_FROM_TAIL: u32 = u32::MAX;

/// Blocks shown to the policy for each block used.
const LOOKS_PER_USE: usize = 2;

fn tag(group: GroupId, hash: SequenceHash) -> u64 {
    mix(hash.to_u128() as u64 ^ u64::from(group.0) << 48)
}

/// Victims of one chain: how many so far, how many more are near, and the entry that would be next.
#[derive(Clone, Copy, Default)]
struct Run {
    length: usize,
    near: usize,
    next: u32,
}

impl Core {
    /// Tells the policy whether the entry's slot on `tier` may be evicted, if it does not know.
    #[inline]
    pub(crate) fn update_evictable(&mut self, index: u32, tier: usize) {
        if self.policy.is_some() {
            self.update_listed(index, tier);
        }
    }

    fn update_listed(&mut self, index: u32, tier: usize) {
        let entry = &self.entries[index];
        if entry.presence(tier) != Presence::Present {
            return;
        }
        let slot = entry.slots[tier];
        let state = &self.tiers[tier].slots[slot as usize];
        let continued = entry.children[tier] > 0 && state.link == NONE && self.is_full(entry.group());
        let evictable = state.usage() == Usage::Registered
            && state.refs() == 0
            && !continued
            && !self.is_kept(index, tier);
        if evictable == state.is_listed() {
            return;
        }
        if let Some(policy) = &mut self.policy {
            let slots = &mut self.tiers[tier].slots;
            if evictable {
                slots[slot as usize].set_listed(true);
                policy.evictable(tier, slot, entry.memory(), entry.priority, &mut Numbers(slots));
            } else {
                policy.kept(tier, slot, &mut Numbers(slots));
                slots[slot as usize].set_listed(false);
            }
        }
    }

    /// A listed slot is not evictable any more.
    pub(crate) fn unlist(&mut self, tier: usize, slot: u32) {
        let slots = &mut self.tiers[tier].slots;
        if let Some(policy) = &mut self.policy {
            policy.kept(tier, slot, &mut Numbers(slots));
        }
        slots[slot as usize].set_listed(false);
    }

    /// The block in `slot` was removed.
    pub(crate) fn empty(&mut self, tier: usize, slot: u32) {
        if let Some(policy) = &mut self.policy {
            let slots = &mut self.tiers[tier].slots;
            policy.emptied(tier, slot, &mut Numbers(slots));
            if slots[slot as usize].is_listed() {
                slots[slot as usize].set_listed(false);
            }
        }
    }

    /// A request uses these entries (`NONE` where it has a block that is nowhere).
    pub(crate) fn note_use(&mut self, request: &[u32]) {
        let Some(policy) = &mut self.policy else { return };
        let there = |&&index: &&u32| index != NONE;
        let Some(&deepest) = request.iter().rfind(there) else { return };
        let uses = request.iter().filter(there).count();
        policy.begin(Some(self.entries[deepest].memory()), RequestPart::Used, uses);
        for (at, &index) in request.iter().enumerate().filter(|(_, index)| **index != NONE) {
            let entry = &mut self.entries[index];
            if !entry.take_fresh() {
                let block = BlockUse {
                    tag: tag(entry.group(), entry.hash),
                    from_tail: (request.len() - 1 - at) as u32,
                };
                entry.set_memory(policy.used(&block, entry.memory()));
            }
        }
        self.show(uses);
    }

    /// The policy learns what has changed of a block that was touched.
    pub(crate) fn refresh_prospects(&mut self, index: u32) {
        let Some(policy) = &mut self.policy else { return };
        let entry = &self.entries[index];
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                policy.touched(tier, entry.slots[tier]);
            }
        }
        self.refresh_listed(index);
    }

    fn refresh_listed(&mut self, index: u32) {
        let Some(policy) = &mut self.policy else { return };
        let entry = &self.entries[index];
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                let slot = entry.slots[tier];
                let slots = &mut self.tiers[tier].slots;
                if slots[slot as usize].is_listed() {
                    policy.evictable(tier, slot, entry.memory(), entry.priority, &mut Numbers(slots));
                }
            }
        }
    }

    /// What the policy expects of the blocks in these slots of `tier`.
    pub(crate) fn expected_reuse(&self, tier: usize, ids: &[BlockId]) -> Vec<Option<f32>> {
        let policy = self.policy.as_ref();
        let of = |id: &BlockId| self.entries[self.tiers[tier].slots[id.index()].entry].memory();
        ids.iter().map(|id| policy.and_then(|policy| policy.expected_reuse(of(id)))).collect()
    }

    /// The caller says that nothing will continue a request: its blocks from the end up to the first that something
    /// else continues.
    pub(crate) fn branch_ends(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        if self.policy.is_none() {
            return;
        }
        let last = hashes.iter().rev().find_map(|&hash| self.entries.find(group, hash));
        let mut index = last.unwrap_or(NONE);
        let mut below = 0;
        while index != NONE {
            let entry = &mut self.entries[index];
            let continued = entry.children.iter().max().copied().unwrap_or(0);
            if continued > below {
                return;
            }
            below = 1;
            if let Some(policy) = &mut self.policy {
                entry.set_memory(policy.ended(entry.memory()));
            }
            let parent = entry.parent;
            self.refresh_listed(index);
            index = parent;
        }
    }

    /// A request registers these blocks.
    pub(crate) fn note_arrival(&mut self, identities: &[BlockIdentity]) {
        let Some(policy) = &mut self.policy else { return };
        let Some(first) = identities.first() else { return };
        let before = first.parent.and_then(|parent| self.entries.find(first.group, parent));
        let before = before.map(|index| self.entries[index].memory());
        policy.begin(before, RequestPart::Registered, identities.len());
        self.show(identities.len());
    }

    /// What the policy remembers of these blocks, up to [`LOOKUPS`], is asked for soon.
    pub(crate) fn expect(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        let Some(policy) = &self.policy else { return };
        let mut tags = [0; LOOKUPS];
        let mut count = 0;
        for ((group, hash), to) in blocks.zip(&mut tags) {
            *to = tag(group, hash);
            count += 1;
        }
        policy.expect(&tags[..count]);
    }

    /// A block comes to a tier: if it was on none, the policy recalls it or gets to know it.
    pub(crate) fn recall(&mut self, index: u32, from_tail: u32) {
        let Some(policy) = &mut self.policy else { return };
        let entry = &mut self.entries[index];
        if entry.is_nowhere() {
            let block = BlockUse { tag: tag(entry.group(), entry.hash), from_tail };
            entry.set_memory(policy.registered(&block));
            if from_tail != FAR_FROM_TAIL {
                entry.set_fresh();
            }
        }
    }

    /// A block was evicted from a tier: if it is on no other, the policy may remember it.
    pub(crate) fn remember(&mut self, index: u32) {
        let Some(policy) = &mut self.policy else { return };
        let entry = &self.entries[index];
        if entry.is_nowhere() {
            policy.forgotten(tag(entry.group(), entry.hash), entry.memory());
        }
    }

    /// Shows the policy the next few blocks that are somewhere, in proportion to the uses.
    fn show(&mut self, uses: usize) {
        let Some(policy) = &mut self.policy else { return };
        let end = self.entries.end() as u32;
        let every = (end as usize / LOOKS_PER_USE).max(1) as u64;
        for _ in 0..(uses * LOOKS_PER_USE).min(end as usize) {
            self.observed = if self.observed + 1 >= end { 0 } else { self.observed + 1 };
            let entry = &mut self.entries[self.observed];
            if !entry.is_nowhere() {
                entry.set_memory(policy.observe(entry.memory(), every));
            }
        }
    }

    /// A chain goes from its end, most often. Reads what evicting the victim and those before it will read, for all of
    /// them at the same time; the longer the run has been, the further ahead.
    fn follow(&self, run: Run, tier: usize, slot: u32, left: usize) -> Run {
        let index = self.tiers[tier].slots[slot as usize].entry;
        let next = self.entries[index].parent;
        let length = if run.next == index { run.length + 1 } else { 1 };
        if length > 1 && run.near > 0 {
            return Run { length, near: run.near - 1, next };
        }
        let count = (length * length).min(LOOKUPS).min(left);
        let above = |&index: &u32| Some(self.entries[index].parent).filter(|&parent| parent != NONE);
        let chain = || std::iter::successors(Some(index), above).take(count);
        let block = |index| (self.entries[index].group(), self.entries[index].hash);
        let read = |all, index| {
            let slot = self.entries[index].slots[tier] as usize;
            all | self.tiers[tier].slots.get(slot).map_or(0, |state| state.entry)
        };
        std::hint::black_box(chain().fold(0, read));
        self.entries.fetch(chain().map(block));
        self.expect(chain().map(block));
        Run { length, near: count.saturating_sub(1), next }
    }

    /// Evicts what the policy chooses (see [`Core::evict`]).
    pub(crate) fn evict_chosen(&mut self, tier: usize, want: usize, out: &mut Vec<BlockId>) -> bool {
        let mut left = want.min(MAX_VICTIMS);
        let mut run = Run::default();
        let mut chosen = std::mem::take(&mut self.chosen);
        while left > 0 {
            chosen.clear();
            let Some(policy) = &mut self.policy else { break };
            policy.victims(tier, left, &mut chosen, &mut Numbers(&mut self.tiers[tier].slots));
            if chosen.is_empty() {
                break;
            }
            let before = left;
            for &slot in &chosen {
                // Whatever a policy answers, only what is evictable goes.
                let slots = &mut self.tiers[tier].slots;
                if left > 0 && slots.get(slot as usize).is_some_and(super::slot::Slot::is_listed) {
                    slots[slot as usize].set_listed(false);
                    run = self.follow(run, tier, slot, left);
                    self.vacate(tier, slot);
                    out.push(BlockId(slot));
                    left -= 1;
                }
            }
            if left == before {
                break;
            }
        }
        self.chosen = chosen;
        self.policy.as_ref().is_some_and(|policy| policy.has_victim(tier))
    }
}
