//! Namespaces whose blocks leave after some iterations, or some time, without use; and which entry
//! is looked at next for that.
//!
//! No block costs memory for iterations: the entry stores that of its last use. Every iteration
//! looks at some entries in turn, at all of them within [`ROUND`] iterations. Every second does the
//! same where a limit is a time; then each entry costs four bytes more.

use crate::entry::NONE;
use kvbm_plan::NamespaceId;
use std::cell::Cell;
use std::collections::BTreeMap;

/// Iterations in which every entry is looked at once, at most. Far less than what is missing from
/// the longest time to live to the turn of the entries' clock: nothing is overlooked.
const ROUND: usize = 1024;

/// Entries looked at in an iteration, at least: where there are no more, blocks leave in the
/// iteration in which they are due.
const LOOKS: usize = 1024;

/// Seconds in which every entry is looked at once, at most.
const SECONDS: usize = 30;

/// Times to live, and the entry that is looked at next.
pub(crate) struct TimesToLive {
    /// In iterations.
    limits: BTreeMap<NamespaceId, u16>,
    /// In seconds.
    seconds: BTreeMap<NamespaceId, u32>,
    /// The second in which each entry was used last; nothing where no limit is in seconds.
    used_at: Vec<Cell<u32>>,
    /// The clock of seconds.
    second: u32,
    /// Entry looked at next.
    at: u32,
    /// Entries to look at in this iteration.
    left: usize,
    /// Ancestor to look at before that, of a block that has left.
    above: u32,
}

impl Default for TimesToLive {
    fn default() -> Self {
        let (limits, seconds) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, seconds, used_at: Vec::new(), second: 0, at: 0, left: 0, above: NONE }
    }
}

impl TimesToLive {
    /// Sets the time to live of a namespace's blocks, or lifts it.
    pub(crate) fn limit(&mut self, namespace: NamespaceId, iterations: Option<u16>) {
        match iterations {
            Some(iterations) => self.limits.insert(namespace, iterations),
            None => self.limits.remove(&namespace),
        };
    }

    /// Sets the same in seconds. Blocks that are there count as used now.
    pub(crate) fn limit_seconds(&mut self, namespace: NamespaceId, seconds: Option<u32>) {
        match seconds {
            Some(seconds) => self.seconds.insert(namespace, seconds),
            None => self.seconds.remove(&namespace),
        };
        if self.seconds.is_empty() {
            self.used_at = Vec::new();
        }
    }

    /// Has room for the seconds of `end` entries, where a limit needs them.
    pub(crate) fn cover(&mut self, end: usize) {
        if !self.seconds.is_empty() && self.used_at.len() < end {
            self.used_at.resize(end, Cell::new(self.second));
        }
    }

    /// The entry is used now.
    #[inline]
    pub(crate) fn note(&self, index: u32) {
        if let Some(used_at) = self.used_at.get(index as usize) {
            used_at.set(self.second);
        }
    }

    /// An iteration begins; entries in use are below `end`.
    pub(crate) fn begin_iteration(&mut self, end: usize) {
        if !self.limits.is_empty() {
            self.left = end.min(LOOKS.max(end.div_ceil(ROUND)));
        }
    }

    /// It is this second now. Whether entries are to be looked at for that.
    pub(crate) fn begin_second(&mut self, second: u32, end: usize) -> bool {
        let is_next = second > self.second;
        self.second = self.second.max(second);
        self.cover(end);
        let looks = is_next && !self.seconds.is_empty();
        if looks {
            self.left = end.min(LOOKS.max(end.div_ceil(SECONDS)));
        }
        looks
    }

    /// The entry to look at next, below `end`: the parent of a block that has left, or the next in
    /// turn. None where no more are to be looked at for now.
    pub(crate) fn next(&mut self, end: usize) -> Option<u32> {
        if self.above != NONE {
            return Some(std::mem::replace(&mut self.above, NONE));
        }
        self.left = self.left.checked_sub(1)?;
        let index = if (self.at as usize) < end { self.at } else { 0 };
        self.at = index + 1;
        Some(index)
    }

    /// A block has left because its time was over: its parent is looked at next.
    pub(crate) fn look_above(&mut self, parent: u32) {
        self.above = parent;
    }

    /// Whether the time of an entry of `namespace` is over that was not used for so many
    /// iterations.
    pub(crate) fn is_over(&self, namespace: NamespaceId, index: u32, idle: u16) -> bool {
        self.limits.get(&namespace).is_some_and(|&limit| idle >= limit) || self.is_over_time(namespace, index)
    }

    /// Whether an entry of `namespace` was not used for longer than its limit in seconds.
    fn is_over_time(&self, namespace: NamespaceId, index: u32) -> bool {
        let (Some(limit), Some(used_at)) = (self.seconds.get(&namespace), self.used_at.get(index as usize))
        else {
            return false;
        };
        // The clock may be a second behind.
        self.second.saturating_sub(used_at.get()) > *limit
    }
}
