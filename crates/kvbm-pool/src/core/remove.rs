//! Removal on request: of a selection, or of one slot whose bytes are bad. A block in use becomes
//! invisible at once, and its slot is free after its last user.

use super::select::{Choice, Selected};
use super::state::Core;
use super::store::{BLOCKS_PER_HOLD, Hold, Store};
use crate::entry::{NONE, Presence};
use crate::selection::{Quarantine, Removed};
use crate::slot::Usage;
use crate::status::EvictionReason;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, BlockIdentity, Tier};
use std::ops::Range;

/// How far a removal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Only blocks without users that nothing on the tier continues.
    Unused,
    /// Blocks in use and on their way too, but none that something on the tier continues.
    Ends,
    /// All.
    All,
}

/// Which of the selected blocks go, and what for.
pub(crate) type How = (Reach, EvictionReason);

/// Turns of a removal in which others are let in, where blocks come all the time behind those that
/// are to go.
const MOST_TURNS: usize = 4;

impl Store {
    /// Removes the chosen blocks from `tiers`, in parts between which other threads have their
    /// turn. A block behind which another came meanwhile stays until the next turn. After some
    /// turns the rest goes in one hold of the lock: no removal waits for a thread that brings more
    /// and more.
    pub(crate) fn remove_in_parts(
        &self,
        choice: &Choice<'_>,
        tiers: TierMask,
        how: How,
        removed: &mut Removed,
    ) {
        if self.remove_in_turns(choice, tiers, how, removed) {
            self.lock().remove_now(choice, tiers, how.1, removed);
        }
    }

    /// The turns of a removal. Returns whether the last one left blocks that others continue.
    pub(crate) fn remove_in_turns(
        &self,
        choice: &Choice<'_>,
        tiers: TierMask,
        how: How,
        removed: &mut Removed,
    ) -> bool {
        (0..MOST_TURNS).all(|_| {
            let selected = self.select(choice, tiers);
            !selected.is_empty() && self.lock().remove_selected(&selected, tiers, how, removed)
        })
    }
}

impl Hold<'_> {
    /// Returns whether blocks were left that others continue.
    fn remove_selected(
        &mut self,
        selected: &[Selected],
        tiers: TierMask,
        (reach, reason): How,
        removed: &mut Removed,
    ) -> bool {
        let (mut left, mut done) = (false, 0);
        for selected in selected {
            let before = removed.blocks + removed.cancelled;
            left |= self.remove(selected, tiers, reach, reason, removed);
            done += (removed.blocks + removed.cancelled - before).max(1);
            if done >= (BLOCKS_PER_HOLD - TIERS) as u64 {
                done = 0;
                self.let_others_in();
            }
        }
        left
    }
}

impl Core {
    /// Removes all that is chosen from `tiers` in this hold of the lock.
    pub(crate) fn remove_now(
        &mut self,
        choice: &Choice<'_>,
        tiers: TierMask,
        reason: EvictionReason,
        removed: &mut Removed,
    ) {
        for selected in self.select_now(choice, tiers) {
            self.remove(&selected, tiers, Reach::All, reason, removed);
        }
    }

    /// Removes a selected block that still is what it was. Returns whether it was left because
    /// another block continues it.
    pub(crate) fn remove(
        &mut self,
        selected: &Selected,
        tiers: TierMask,
        reach: Reach,
        reason: EvictionReason,
        removed: &mut Removed,
    ) -> bool {
        let Some(index) = self.still(selected) else { return false };
        let mut left = false;
        for tier in tiers.iter() {
            let goes = match reach {
                Reach::Unused => self.is_unused(index, tier.index()),
                Reach::Ends => !self.is_continued(index, tier.index()),
                Reach::All => true,
            };
            left |= reach == Reach::Ends && !goes;
            if goes {
                self.expel(index, tier, reason, removed);
            }
        }
        left
    }

    /// Whether a block is on `tier`, or on its way there, and something there cannot be found
    /// without it.
    fn is_continued(&self, index: u32, tier: usize) -> bool {
        let entry = self.entry(index);
        entry.presence(tier) != Presence::Absent && entry.children(tier) > 0 && self.is_full(entry.group())
    }

    /// Whether the block on `tier` has no users and no block continues it there.
    pub(crate) fn is_unused(&self, index: u32, tier: usize) -> bool {
        let entry = self.entry(index);
        if entry.presence(tier) != Presence::Present || self.is_continued(index, tier) {
            return false;
        }
        let state = self.slot(tier, entry.slot(tier));
        state.refs() == 0 && state.link.get() == NONE
    }

    /// Makes the block invisible on `tier`, with all its duplicates.
    pub(crate) fn expel(&mut self, index: u32, tier: Tier, reason: EvictionReason, removed: &mut Removed) {
        let on = tier.index();
        match self.entry(index).presence(on) {
            Presence::Absent => return,
            Presence::Arriving => {
                self.cancel_arrival(index, on);
                self.set_presence(index, on, Presence::Absent);
                self.entry(index).slots[on].set(NONE);
                removed.cancelled += 1;
            }
            Presence::Present => {
                #[cfg(test)]
                crate::probe::block_changes();
                self.set_presence(index, on, Presence::Absent);
                let mut slot = self.entry(index).slots[on].replace(NONE);
                self.count_eviction(on, reason);
                removed.blocks += 1;
                while slot != NONE {
                    let next = self.slot(on, slot).link.get();
                    removed.in_use += u64::from(self.detach(on, slot, Usage::Detached));
                    slot = next;
                }
            }
        }
        self.give_up_unused(index);
    }

    fn count_eviction(&mut self, tier: usize, reason: EvictionReason) {
        let counters = &mut self.tiers[tier].counters;
        match reason {
            EvictionReason::Capacity => counters.evicted += 1,
            EvictionReason::Removed => counters.removed += 1,
            EvictionReason::Expired => counters.expired += 1,
            EvictionReason::Quarantined => counters.quarantined += 1,
            EvictionReason::Lost => counters.lost += 1,
            EvictionReason::ParentFailed => counters.orphaned += 1,
        }
    }

    /// Takes a Registered slot from its entry, which does not name it any more. With users it
    /// becomes `usage`, and the answer is true; without users it is free, or out of use where its
    /// bytes are bad.
    fn detach(&mut self, tier: usize, slot: u32, usage: Usage) -> bool {
        self.note_removal(tier, slot);
        let state = &self.slots[tier][slot as usize];
        let entry = &self.entries[state.entry.get() as usize];
        let counts = &mut self.tiers[tier];
        if state.refs() > 0 {
            counts.active -= 1;
            counts.detached += 1;
            state.set_usage(usage);
            state.order_position.set(NONE);
            state.link.set(NONE);
            entry.add_link();
            return true;
        }
        counts.inactive -= 1;
        self.tenants.count_idle(tier, entry.namespace(), false);
        self.tenants.count(tier, entry.namespace(), false);
        if usage == Usage::Tainted {
            self.free[tier].retire(&self.slots[tier], slot);
        } else {
            self.free[tier].put(&self.slots[tier], slot);
        }
        false
    }

    /// The bytes in a slot are bad: no lookup finds it any more, and no allocation gets it.
    pub(crate) fn quarantine(&mut self, tier: usize, block: BlockId) -> Quarantine {
        let Some(state) = self.slots[tier].get(block.index()) else {
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
        self.quarantine(tier, block) != Quarantine::NotRegistered
            || self.free[tier].retire_free(&self.slots[tier], block)
    }

    fn quarantine_registered(&mut self, tier: usize, slot: u32) -> Quarantine {
        let state = self.slot(tier, slot);
        let (index, heir) = (state.entry.get(), state.link.get());
        self.count_eviction(tier, EvictionReason::Quarantined);
        if self.entry(index).slot(tier) != slot {
            self.unlink_duplicate(tier, slot);
            // Its primary may have to wait for children again.
            self.update_evictable(index, tier);
        } else if heir == NONE {
            self.set_presence(index, tier, Presence::Absent);
            self.entry(index).slots[tier].set(NONE);
        } else {
            self.entry(index).slots[tier].set(heir);
        }
        let in_use = self.detach(tier, slot, Usage::Tainted);
        self.give_up_unused(index);
        if in_use { Quarantine::AfterLastUser } else { Quarantine::Done }
    }

    /// Copies the blocks of `entries` that are on `tiers`.
    pub(crate) fn copy_blocks(
        &self,
        entries: Range<u32>,
        tiers: &[Tier],
        copied: &mut Vec<(Tier, BlockId, BlockIdentity)>,
    ) {
        for index in entries.filter(|&index| self.entry(index).in_use()) {
            #[cfg(test)]
            crate::probe::block_changes();
            for &tier in tiers.iter().filter(|tier| tier.index() < TIERS) {
                let entry = self.entry(index);
                if entry.presence(tier.index()) == Presence::Present {
                    copied.push((tier, BlockId(entry.slot(tier.index())), self.identity(index)));
                }
            }
        }
    }
}
