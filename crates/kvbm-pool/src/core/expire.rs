//! Namespaces whose blocks leave after some iterations without use.
//!
//! Nothing is kept for a block: the entry knows when it was used last. Every iteration looks at some entries in turn, all
//! of them within [`ROUND`] iterations, and removes what is over from the end of its chain on.

use super::evict::MAX_VICTIMS;
use super::{Core, NONE};
use crate::registry::Removed;
use crate::status::EvictionReason;
use crate::tier::TIERS;
use kvbm_plan::{NamespaceId, Tier};
use std::collections::BTreeMap;

/// Iterations in which every entry is looked at once, at most. Far less than what is missing from the longest time to
/// live to the turn of the entries' clock: nothing is overlooked.
const ROUND: usize = 1024;

/// Entries looked at in an iteration, at least: where there are no more, blocks leave in the iteration in which they are due.
const LOOKS: usize = 1024;

/// Entries looked at in one hold of the lock.
const LOOKS_PER_HOLD: usize = 64;

/// Times to live, and how far the looks have come.
pub(crate) struct Expiry {
    limits: BTreeMap<NamespaceId, u16>,
    /// Entry looked at next.
    at: u32,
    /// Entries to look at in this iteration.
    left: usize,
    /// Ancestor to look at before that, of a block that has left.
    above: u32,
}

impl Default for Expiry {
    fn default() -> Self {
        Self { limits: BTreeMap::new(), at: 0, left: 0, above: NONE }
    }
}

impl Expiry {
    /// Sets the time to live of a namespace's blocks, or lifts it.
    pub(crate) fn limit(&mut self, namespace: NamespaceId, iterations: Option<u16>) {
        match iterations {
            Some(iterations) => self.limits.insert(namespace, iterations),
            None => self.limits.remove(&namespace),
        };
    }

    /// The next of the entries below `end`.
    fn next_looked_at(&mut self, end: usize) -> u32 {
        let index = if (self.at as usize) < end { self.at } else { 0 };
        self.at = index + 1;
        index
    }
}

impl Core<'_> {
    /// An iteration begins.
    pub(crate) fn begin_expiry(&mut self) {
        let end = self.end();
        let expiry = &mut self.first_mut().expiry;
        if !expiry.limits.is_empty() {
            expiry.left = end.min(LOOKS.max(end.div_ceil(ROUND)));
        }
    }

    /// One hold's part of the looks of an iteration. Says whether there is more.
    pub(crate) fn expire(&mut self) -> bool {
        let (mut removed, mut looks) = (Removed::default(), 0);
        while looks < LOOKS_PER_HOLD && removed.blocks as usize + TIERS <= MAX_VICTIMS {
            let end = self.end();
            let expiry = &mut self.first_mut().expiry;
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

    /// Removes the block from every tier where its time is over, nobody uses it, nothing continues it and it is not
    /// pinned; then its parent is next. The entry may have become another one's since it was named: then that is judged.
    fn expire_entry(&mut self, index: u32, removed: &mut Removed) {
        let entry = &self.store.entries[index];
        if entry.is_nowhere() {
            return;
        }
        let idle = self.short_step().wrapping_sub(entry.last_step.get());
        if self.first().expiry.limits.get(&entry.namespace()).is_none_or(|&limit| idle < limit) {
            return;
        }
        let (parent, before) = (entry.parent.get(), removed.blocks);
        for tier in Tier::SLOTTED {
            if self.is_unused(index, tier.index()) && !self.is_kept(index, tier.index()) {
                self.expel(index, tier, EvictionReason::Expired, removed);
            }
        }
        if removed.blocks > before {
            self.first_mut().expiry.above = parent;
        }
    }
}
