//! Namespaces whose blocks leave after some iterations, or some time, without use.
//!
//! No block costs memory for iterations: the entry stores that of its last use. Every iteration
//! looks at some entries in turn, at all of them within [`ROUND`] iterations, and removes expired
//! blocks from the end of their chains on. Every second does the same where a limit is a time; then
//! each entry costs four bytes more.

use super::state::Core;
use super::store::BLOCKS_PER_HOLD;
use crate::entry::NONE;
use crate::selection::Removed;
use crate::status::EvictionReason;
use crate::tier::TIERS;
use kvbm_plan::Tier;

/// Iterations in which every entry is looked at once, at most. Far less than what is missing from
/// the longest time to live to the turn of the entries' clock: nothing is overlooked.
const ROUND: usize = 1024;

/// Entries looked at in an iteration, at least: where there are no more, blocks leave in the
/// iteration in which they are due.
const LOOKS: usize = 1024;

/// Seconds in which every entry is looked at once, at most.
const SECONDS: usize = 30;

/// Entries looked at in one hold of the lock.
const LOOKS_PER_HOLD: usize = 64;

impl Core {
    /// An iteration begins.
    pub(crate) fn begin_expiry(&mut self) {
        let end = self.end();
        let expiry = &mut self.expiry;
        if !expiry.limits.is_empty() {
            expiry.left = end.min(LOOKS.max(end.div_ceil(ROUND)));
        }
    }

    /// It is this second now. Whether entries are to be looked at for that.
    pub(crate) fn begin_second(&mut self, second: u32) -> bool {
        let end = self.end();
        let expiry = &mut self.expiry;
        let is_next = second > expiry.second;
        expiry.second = expiry.second.max(second);
        expiry.cover(end);
        let looks = is_next && !expiry.seconds.is_empty();
        if looks {
            expiry.left = end.min(LOOKS.max(end.div_ceil(SECONDS)));
        }
        looks
    }

    /// One hold's part of the looks of an iteration. Returns whether entries are left.
    pub(crate) fn expire(&mut self) -> bool {
        let (mut removed, mut looks) = (Removed::default(), 0);
        while looks < LOOKS_PER_HOLD && removed.blocks as usize + TIERS <= BLOCKS_PER_HOLD {
            let end = self.end();
            let expiry = &mut self.expiry;
            let index = if expiry.above != NONE {
                std::mem::replace(&mut expiry.above, NONE)
            } else if expiry.left > 0 {
                expiry.left -= 1;
                expiry.next_looked_at(end)
            } else {
                return false;
            };
            looks += 1;
            self.expire_entry(index, &mut removed);
        }
        true
    }

    /// Removes the block from every tier where its time is over and where it is not in use, not
    /// continued and not pinned; then its parent is next. The entry may be another block's by now:
    /// then it judges that block.
    fn expire_entry(&mut self, index: u32, removed: &mut Removed) {
        let entry = self.entry(index);
        if entry.is_nowhere() {
            return;
        }
        let idle = self.short_step().wrapping_sub(entry.last_step.get());
        let namespace = entry.namespace();
        let is_old = self.expiry.limits.get(&namespace).is_some_and(|&limit| idle >= limit);
        if !is_old && !self.expiry.is_over_time(namespace, index) {
            return;
        }
        let (parent, before) = (entry.parent.get(), removed.blocks);
        for tier in Tier::SLOTTED {
            if self.is_unused(index, tier.index()) && !self.is_pinned(index, tier.index()) {
                self.expel(index, tier, EvictionReason::Expired, removed);
            }
        }
        if removed.blocks > before {
            self.expiry.above = parent;
        }
    }
}
