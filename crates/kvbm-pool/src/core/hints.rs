//! What callers and clocks say of blocks: uses, ends of branches, pins until some iteration, times
//! to live.
//!
//! A request touches its blocks once, tail to head, on every tier that holds them. The policy sees
//! the request first, head to tail.

use super::batch_lookup::BatchLookup;
use super::remove::{Reach, Removal};
use super::state::Core;
use super::store::BLOCKS_PER_HOLD;
use super::timed_pins::with_ancestors;
use crate::entry::{BlockMemory, NONE, Presence};
use crate::error::PinError;
use crate::slot::Usage;
use crate::status::EvictionReason;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, GroupId, SequenceHash, Tier};
use std::collections::HashSet;

/// Entries looked at in one hold of the lock for the times to live.
const LOOKS_PER_HOLD: usize = 64;

impl Core {
    /// A use of these blocks.
    pub(crate) fn touch(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        let mut lookup = BatchLookup::new(&self.entries, group, hashes);
        while let Some(entries) = lookup.next(&self.entries) {
            found.extend(entries.iter().map(|&index| self.used_entry(index)));
        }
        self.touch_entries(&found);
        self.touched = found;
    }

    /// A use of blocks that the caller pins.
    pub(crate) fn touch_pinned(&mut self, tier: usize, blocks: &[BlockId]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        found.extend(blocks.iter().map(|block| self.used_entry(self.entry_of(tier, block.0))));
        self.touch_entries(&found);
        self.touched = found;
    }

    /// The blocks of one request, in order; `NONE` where a block is nowhere.
    fn touch_entries(&mut self, found: &[u32]) {
        self.policy.note_use(found, &self.entries);
        for &index in found.iter().rev().filter(|index| **index != NONE) {
            self.touch_entry(index);
        }
    }

    /// `NONE` for an entry whose block is nowhere: it only keeps the place of a block in a chain.
    fn used_entry(&self, index: u32) -> u32 {
        if index == NONE || self.entry(index).is_nowhere() { NONE } else { index }
    }

    #[inline]
    fn touch_entry(&mut self, index: u32) {
        self.note_time(index);
        let entry = &self.entries[index];
        if !self.policy.is_some() {
            entry.set_memory(BlockMemory::default());
        }
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                let slot = entry.slot(tier);
                self.tiers[tier].push_young(slot);
                self.policy.touched(tier, slot);
            }
        }
        if self.policy.is_some() {
            self.list_again(index);
        }
    }

    /// The caller says that nothing will continue a request: its blocks from the end up to the
    /// first that another block continues.
    pub(crate) fn branch_ends(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let mut branch = std::mem::take(&mut self.touched);
        branch.clear();
        self.entries.branch(group, hashes, &mut branch);
        // The end of the branch becomes the oldest.
        for &index in branch.iter().rev() {
            self.end_of_branch(index);
        }
        self.touched = branch;
    }

    fn end_of_branch(&mut self, index: u32) {
        let entry = &self.entries[index];
        if !self.policy.end_branch(entry) {
            return;
        }
        if self.policy.is_some() {
            return self.list_again(index);
        }
        for tier in (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present) {
            let (slot, on) = (entry.slot(tier), &mut self.tiers[tier]);
            if on.slot(slot).refs() == 0 {
                on.push_old(slot);
            }
        }
    }

    /// Pins what is Present of a chain on `tiers`, with its ancestors there, until an iteration; or
    /// nothing, where a tier would have too much pinned. Returns how many blocks of the chain are
    /// there.
    pub(crate) fn pin_chain(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        let now = self.step;
        if until <= now {
            return Err(PinError::Past { until, now });
        }
        let chain: Vec<u32> = hashes.iter().filter_map(|&hash| self.entries.find(group, hash)).collect();
        let mut places = HashSet::new();
        let mut in_order = Vec::new();
        let slotted = || tiers.iter().map(Tier::index).filter(|&tier| tier < TIERS);
        for tier in slotted() {
            for &index in &chain {
                with_ancestors(&self.entries, index, tier, &mut places, &mut in_order);
            }
            self.pins.check(tier, &self.tiers[tier], &self.entries, &self.tenants, &in_order)?;
        }
        // Parents first: each knows the pinned blocks that continue it.
        in_order.sort_by_key(|&(index, _)| self.entry(index).position.get());
        for (index, tier) in in_order {
            if self.pins.pin((index, tier), until, &self.entries, &mut self.tenants) {
                self.update_evictable(index, usize::from(tier));
            }
        }
        let is_pinned = |&&index: &&u32| slotted().any(|on| self.pins.is_pinned(&self.entries, index, on));
        Ok(chain.iter().filter(is_pinned).count())
    }

    /// Ends the pins of a chain on `tiers`, from its end on; a block that another pinned one
    /// continues stays pinned. Returns how many pins ended.
    pub(crate) fn unpin_chain(&mut self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        let mut ended = 0;
        for &hash in hashes.iter().rev() {
            let Some(index) = self.entries.find(group, hash) else { continue };
            for tier in tiers.iter().map(Tier::index) {
                if self.pins.is_end((index, tier as u8)) {
                    self.end_timed_pin(index, tier);
                    ended += 1;
                }
            }
        }
        ended
    }

    /// Ends up to [`BLOCKS_PER_HOLD`] pins whose time is over. Returns whether there are more.
    pub(crate) fn end_timed_pins(&mut self) -> bool {
        for _ in 0..BLOCKS_PER_HOLD {
            let Some((index, tier)) = self.pins.ended(self.step) else { return false };
            self.end_timed_pin(index, usize::from(tier));
        }
        true
    }

    /// The block may be evicted again. If it came up for that before, it is among the oldest.
    fn end_timed_pin(&mut self, index: u32, tier: usize) {
        self.pins.forget((index, tier as u8), &self.entries, &mut self.tenants);
        let slot = self.entry(index).slot(tier);
        let state = self.slot(tier, slot);
        if state.usage() == Usage::Registered && state.refs() == 0 && state.order_position.get() == NONE {
            self.tiers[tier].push_old(slot);
        }
        self.update_evictable(index, tier);
    }

    /// Removes expired blocks from the end of their chains on: one hold's part of the looks of an
    /// iteration. Returns whether entries are left.
    pub(crate) fn expire(&mut self) -> bool {
        let mut removal = Removal::new(TierMask::ALL, Reach::Unused, EvictionReason::Expired);
        let mut looks = 0;
        while looks < LOOKS_PER_HOLD && removal.removed.blocks as usize + TIERS <= BLOCKS_PER_HOLD {
            let Some(index) = self.expiry.next(self.entries.end()) else { return false };
            looks += 1;
            self.expire_entry(index, &mut removal);
        }
        true
    }

    /// Removes the block from every tier where its time is over and where it is not in use, not
    /// continued and not pinned; then its parent is next. The entry may be another block's by now:
    /// then it judges that block.
    fn expire_entry(&mut self, index: u32, removal: &mut Removal) {
        let entry = self.entry(index);
        if entry.is_nowhere() {
            return;
        }
        let idle = self.short_step().wrapping_sub(entry.last_step.get());
        if !self.expiry.is_over(entry.namespace(), index, idle) {
            return;
        }
        let (parent, before) = (entry.parent.get(), removal.removed.blocks);
        for tier in Tier::SLOTTED {
            let on = tier.index();
            if self.is_unused(index, on) && !self.pins.is_pinned(&self.entries, index, on) {
                removal.expel(self, index, tier);
            }
        }
        if removal.removed.blocks > before {
            self.expiry.look_above(parent);
        }
    }
}
