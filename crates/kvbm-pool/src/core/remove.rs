//! Removal of a selection on request. A block in use becomes invisible at once, and its slot is
//! free after its last user.

use super::select::{Choice, Selected};
use super::state::Core;
use super::store::{BLOCKS_PER_HOLD, Hold, Store};
use crate::entry::{NONE, Presence};
use crate::selection::Removed;
use crate::slot::Usage;
use crate::status::EvictionReason;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::Tier;

/// How far a removal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Only blocks without users that nothing on the tier continues.
    Unused,
    /// Blocks in use and on their way too, but none that something on the tier continues.
    Ends,
}

/// A removal: from which tiers blocks go, which and why, and what has gone so far.
pub(crate) struct Removal {
    tiers: TierMask,
    reach: Reach,
    reason: EvictionReason,
    pub removed: Removed,
}

/// Turns of a removal in which others are let in, where blocks come all the time behind those that
/// are to go.
const MOST_TURNS: usize = 4;

impl Store {
    /// Removes the chosen blocks, in parts between which other threads have their turn. A block
    /// behind which another came meanwhile stays until the next turn. After some turns the rest
    /// goes in one hold of the lock: no removal waits for a thread that brings more and more.
    pub(crate) fn remove_in_parts(&self, choice: &Choice<'_>, removal: &mut Removal) {
        if self.remove_in_turns(choice, removal) {
            removal.take_all(&mut self.lock(), choice);
        }
    }

    /// The turns of a removal. Returns whether the last one left blocks that others continue.
    pub(crate) fn remove_in_turns(&self, choice: &Choice<'_>, removal: &mut Removal) -> bool {
        (0..MOST_TURNS).all(|_| {
            let selected = self.select(choice, removal.tiers);
            !selected.is_empty() && removal.take_selected(&mut self.lock(), &selected)
        })
    }
}

impl Removal {
    pub(crate) fn new(tiers: TierMask, reach: Reach, reason: EvictionReason) -> Self {
        Self { tiers, reach, reason, removed: Removed::default() }
    }

    /// Returns whether blocks were left that others continue.
    fn take_selected(&mut self, hold: &mut Hold<'_>, selected: &[Selected]) -> bool {
        let (mut left, mut done) = (false, 0);
        for selected in selected {
            let before = self.removed.blocks + self.removed.cancelled;
            left |= self.take(hold, selected);
            done += (self.removed.blocks + self.removed.cancelled - before).max(1);
            if done >= (BLOCKS_PER_HOLD - TIERS) as u64 {
                done = 0;
                hold.let_others_in();
            }
        }
        left
    }

    /// Removes all that is chosen in this hold of the lock, however far the removal goes.
    pub(crate) fn take_all(&mut self, core: &mut Core, choice: &Choice<'_>) {
        for selected in choice.select_now(&core.entries, self.tiers) {
            if let Some(index) = selected.still(&core.entries) {
                self.tiers.iter().for_each(|tier| self.expel(core, index, tier));
            }
        }
    }

    /// Removes a selected block that still is what it was. Returns whether it was left because
    /// another block continues it.
    pub(super) fn take(&mut self, core: &mut Core, selected: &Selected) -> bool {
        let Some(index) = selected.still(&core.entries) else { return false };
        let mut left = false;
        for tier in self.tiers.iter() {
            let goes = match self.reach {
                Reach::Unused => core.is_unused(index, tier.index()),
                Reach::Ends => !core.entries.is_continued(index, tier.index()),
            };
            left |= self.reach == Reach::Ends && !goes;
            if goes {
                self.expel(core, index, tier);
            }
        }
        left
    }

    /// Makes the block invisible on `tier`, with all its duplicates.
    pub(crate) fn expel(&mut self, core: &mut Core, index: u32, tier: Tier) {
        let on = tier.index();
        match core.entry(index).presence(on) {
            Presence::Absent => return,
            Presence::Arriving => {
                core.cancel_arrival(index, on);
                core.set_presence(index, on, Presence::Absent);
                core.entry(index).slots[on].set(NONE);
                self.removed.cancelled += 1;
            }
            Presence::Present => {
                #[cfg(test)]
                crate::probe::block_changes();
                core.set_presence(index, on, Presence::Absent);
                let mut slot = core.entry(index).slots[on].replace(NONE);
                core.tiers[on].count_eviction(self.reason);
                self.removed.blocks += 1;
                while slot != NONE {
                    let next = core.slot(on, slot).link.get();
                    self.removed.in_use += u64::from(core.detach(on, slot, Usage::Detached));
                    slot = next;
                }
            }
        }
        core.entries.give_up_unused(index);
    }
}
