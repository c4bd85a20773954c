//! Slots of registered blocks: their users, their duplicates, and what becomes of a slot whose
//! block is removed or whose bytes are bad.

use super::policy_calls::ENDED;
use super::state::Core;
use crate::entry::{NONE, Presence};
use crate::prefetch::prefetch;
use crate::selection::Quarantine;
use crate::slot::Usage;
use crate::status::EvictionReason;
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

    /// A Held slot becomes Registered, with one user.
    #[inline]
    pub(crate) fn fill(&mut self, tier: usize, slot: u32, index: u32) {
        self.slot(tier, slot).register(index);
        self.tenants.count(tier, self.entries[index].namespace(), true);
        let counts = &mut self.tiers[tier];
        counts.held -= 1;
        counts.active += 1;
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
        let on = &mut self.tiers[tier];
        let state = &on.slots[slot as usize];
        if state.refs() == 0 && state.usage() == Usage::Registered {
            on.inactive -= 1;
            on.active += 1;
            self.tenants.count_idle(tier, self.entries[state.entry.get()].namespace(), false);
        }
        state.add_ref();
        if kind == Reference::Transfer {
            on.transfer_pins += 1;
        }
    }

    /// One reference less.
    #[inline]
    pub(crate) fn drop_reference(&mut self, tier: usize, slot: u32, kind: Reference) {
        let on = &mut self.tiers[tier];
        let state = &on.slots[slot as usize];
        let left = state.drop_ref();
        let (usage, index) = (state.usage(), state.entry.get());
        if kind == Reference::Transfer {
            on.transfer_pins -= 1;
        }
        if usage != Usage::Registered {
            if left == 0 {
                self.free_removed(tier, slot);
            }
            return;
        }
        let entry = &self.entries[index];
        if entry.slot(tier) != slot {
            if left == 0 {
                self.drop_duplicate(tier, slot);
            }
            return;
        }
        if left == 0 {
            on.active -= 1;
            on.inactive += 1;
        }
        match kind {
            Reference::Use => {
                entry.last_step.set(self.step as u16);
                self.expiry.note(index);
                if !self.policy.is_some() && entry.memory() == ENDED {
                    on.push_old(slot);
                } else {
                    on.push_young(slot);
                }
            }
            // It came up for eviction while it was copied: it is still among the oldest.
            Reference::Transfer if left == 0 && state.order_position.get() == NONE => on.push_old(slot),
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
        let on = &mut self.tiers[tier];
        let state = on.slot(slot);
        let (usage, index) = (state.usage(), state.entry.get());
        match usage {
            Usage::Detached => on.put_free(slot),
            Usage::Tainted => on.retire(slot),
            _ => return,
        }
        on.detached -= 1;
        let entry = &self.entries[index];
        self.tenants.count(tier, entry.namespace(), false);
        entry.drop_link();
        self.entries.give_up_unused(index);
    }

    /// A duplicate lost its last user: its slot is free again.
    fn drop_duplicate(&mut self, tier: usize, slot: u32) {
        let index = self.entry_of(tier, slot);
        self.tiers[tier].unlink_duplicate(self.entry(index).slot(tier), slot);
        self.update_evictable(index, tier);
        self.tenants.count(tier, self.entries[index].namespace(), false);
        self.tiers[tier].active -= 1;
        self.tiers[tier].put_free(slot);
    }

    /// Whether the block on `tier` has no users and no block continues it there.
    pub(crate) fn is_unused(&self, index: u32, tier: usize) -> bool {
        let entry = self.entry(index);
        if entry.presence(tier) != Presence::Present || self.entries.is_continued(index, tier) {
            return false;
        }
        let state = self.slot(tier, entry.slot(tier));
        state.refs() == 0 && state.link.get() == NONE
    }

    /// Takes a Registered slot from its entry, which does not name it any more. With users it
    /// becomes `usage`, and the answer is true; without users it is free, or out of use where its
    /// bytes are bad.
    pub(crate) fn detach(&mut self, tier: usize, slot: u32, usage: Usage) -> bool {
        let set = self.set_of(self.entry_of(tier, slot), tier);
        let on = &mut self.tiers[tier];
        self.policy.note_removal(set, slot, on);
        let state = &on.slots[slot as usize];
        let entry = &self.entries[state.entry.get()];
        if state.refs() > 0 {
            on.active -= 1;
            on.detached += 1;
            state.set_usage(usage);
            state.order_position.set(NONE);
            state.link.set(NONE);
            entry.add_link();
            return true;
        }
        on.inactive -= 1;
        self.tenants.count_idle(tier, entry.namespace(), false);
        self.tenants.count(tier, entry.namespace(), false);
        if usage == Usage::Tainted {
            on.retire(slot);
        } else {
            on.put_free(slot);
        }
        false
    }

    /// The bytes in a slot are bad: no lookup finds it any more, and no allocation gets it.
    pub(crate) fn quarantine(&mut self, tier: usize, block: BlockId) -> Quarantine {
        let Some(state) = self.tiers[tier].slots.get(block.index()) else {
            return Quarantine::NotRegistered;
        };
        match state.usage() {
            Usage::Registered => self.quarantine_registered(tier, block.0),
            Usage::Detached => {
                state.set_usage(Usage::Tainted);
                Quarantine::AfterLastUser
            }
            Usage::Tainted => Quarantine::AfterLastUser,
            Usage::Quarantined => Quarantine::Done,
            Usage::Free | Usage::Held | Usage::Arriving | Usage::Cancelled => Quarantine::NotRegistered,
        }
    }

    /// Puts a slot out of use for good, with the block in it. `false` where it is held, or
    /// something is on its way to it.
    pub(crate) fn retire(&mut self, tier: usize, block: BlockId) -> bool {
        let is_retired = self.quarantine(tier, block) != Quarantine::NotRegistered;
        let on = &mut self.tiers[tier];
        is_retired || on.free.retire_free(&on.slots, block)
    }

    fn quarantine_registered(&mut self, tier: usize, slot: u32) -> Quarantine {
        let state = self.slot(tier, slot);
        let (index, heir) = (state.entry.get(), state.link.get());
        self.tiers[tier].count_eviction(EvictionReason::Quarantined);
        let primary = self.entry(index).slot(tier);
        if primary != slot {
            self.tiers[tier].unlink_duplicate(primary, slot);
            // Its primary may have to wait for children again.
            self.update_evictable(index, tier);
        } else if heir == NONE {
            self.set_presence(index, tier, Presence::Absent);
            self.entry(index).slots[tier].set(NONE);
        } else {
            self.entry(index).slots[tier].set(heir);
        }
        let in_use = self.detach(tier, slot, Usage::Tainted);
        self.entries.give_up_unused(index);
        if in_use { Quarantine::AfterLastUser } else { Quarantine::Done }
    }
}
