//! References of users and transfers to registered slots.

use super::policy_calls::ENDED;
use super::state::Core;
use crate::entry::NONE;
use crate::prefetch::prefetch;
use crate::slot::Usage;
use kvbm_plan::BlockId;

/// Slots whose entries are prefetched ahead while references end; the slots themselves twice as far
/// ahead.
const AHEAD: usize = 16;

/// Why a block is pinned by a handle: the end of a use makes it young, the end of a transfer does
/// not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    Use,
    Transfer,
}

impl Core {
    /// Whether pinned blocks are still registered in the slots where they are pinned, in order.
    pub(crate) fn are_registered(&self, blocks: impl IntoIterator<Item = (usize, BlockId)>) -> Vec<bool> {
        let is_registered =
            |(tier, block): (usize, BlockId)| self.slot(tier, block.0).usage() == Usage::Registered;
        blocks.into_iter().map(is_registered).collect()
    }

    /// One reference less to each of `blocks`, the last block first, so that the first is the
    /// youngest.
    pub(crate) fn drop_references(&mut self, tier: usize, blocks: &[BlockId], kind: Reference) {
        for at in (0..blocks.len()).rev() {
            if let Some(far) = at.checked_sub(2 * AHEAD) {
                prefetch(self.slot(tier, blocks[far].0));
            }
            if let Some(near) = at.checked_sub(AHEAD) {
                prefetch(self.entry(self.entry_of(tier, blocks[near].0)));
            }
            self.drop_reference(tier, blocks[at].0, kind);
        }
    }

    /// References to so many blocks are of another kind now.
    pub(crate) fn change_references(&mut self, tier: usize, blocks: usize, kind: Reference) {
        let pins = &mut self.tiers[tier].transfer_pins;
        match kind {
            Reference::Transfer => *pins += blocks as u64,
            Reference::Use => *pins -= blocks as u64,
        }
    }

    /// One reference more to a Registered slot, or to one whose block was removed while it was in
    /// use.
    #[inline]
    pub(crate) fn add_reference(&mut self, tier: usize, slot: u32, kind: Reference) {
        if self.slot(tier, slot).is_listed() {
            self.unlist(tier, slot);
        }
        let state = &self.slots[tier][slot as usize];
        let counts = &mut self.tiers[tier];
        if state.refs() == 0 && state.usage() == Usage::Registered {
            counts.inactive -= 1;
            counts.active += 1;
            self.tenants.count_idle(tier, self.entries[state.entry.get() as usize].namespace(), false);
        }
        state.add_ref();
        if kind == Reference::Transfer {
            counts.transfer_pins += 1;
        }
    }

    /// One reference less.
    #[inline]
    pub(crate) fn drop_reference(&mut self, tier: usize, slot: u32, kind: Reference) {
        let slots = &self.slots[tier];
        let state = &slots[slot as usize];
        let left = state.drop_ref();
        let (usage, index) = (state.usage(), state.entry.get());
        let counts = &mut self.tiers[tier];
        if kind == Reference::Transfer {
            counts.transfer_pins -= 1;
        }
        if usage != Usage::Registered {
            if left == 0 {
                self.free_removed(tier, slot);
            }
            return;
        }
        let entry = &self.entries[index as usize];
        if entry.slot(tier) != slot {
            if left == 0 {
                self.drop_duplicate(tier, slot);
            }
            return;
        }
        if left == 0 {
            counts.active -= 1;
            counts.inactive += 1;
        }
        match kind {
            Reference::Use => {
                entry.last_step.set(self.step as u16);
                self.expiry.note(index);
                if self.policy.is_none() && entry.memory() == ENDED {
                    counts.order.push_old(slot, slots);
                } else {
                    counts.order.push_young(slot, slots);
                }
            }
            // It came up for eviction while it was copied: it is still among the oldest.
            Reference::Transfer if left == 0 && state.order_position.get() == NONE => {
                counts.order.push_old(slot, slots);
            }
            Reference::Transfer => {}
        }
        if left == 0 {
            entry.take_fresh();
            self.tenants.count_idle(tier, entry.namespace(), true);
            self.update_evictable(index, tier);
        }
    }

    /// The last user of a slot whose block was removed is gone.
    #[cold]
    fn free_removed(&mut self, tier: usize, slot: u32) {
        let state = self.slot(tier, slot);
        let (usage, index) = (state.usage(), state.entry.get());
        match usage {
            Usage::Detached => self.free[tier].put(&self.slots[tier], slot),
            Usage::Tainted => self.free[tier].retire(&self.slots[tier], slot),
            _ => return,
        }
        self.tiers[tier].detached -= 1;
        self.tenants.count(tier, self.entries[index as usize].namespace(), false);
        self.entry(index).drop_link();
        self.give_up_unused(index);
    }
}
