//! Times to live of namespaces, and which entry is looked at next for them.

use crate::entry::NONE;
use kvbm_plan::NamespaceId;
use std::cell::Cell;
use std::collections::BTreeMap;

/// Times to live, and the entry that is looked at next.
pub(crate) struct TimesToLive {
    /// In iterations.
    pub limits: BTreeMap<NamespaceId, u16>,
    /// In seconds.
    pub seconds: BTreeMap<NamespaceId, u32>,
    /// The second in which each entry was used last; nothing where no limit is in seconds.
    used_at: Vec<Cell<u32>>,
    /// The clock of seconds.
    pub second: u32,
    /// Entry looked at next.
    at: u32,
    /// Entries to look at in this iteration.
    pub left: usize,
    /// Ancestor to look at before that, of a block that has left.
    pub above: u32,
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

    /// Whether an entry of `namespace` was not used for longer than its limit in seconds.
    pub(crate) fn is_over_time(&self, namespace: NamespaceId, index: u32) -> bool {
        let (Some(limit), Some(used_at)) = (self.seconds.get(&namespace), self.used_at.get(index as usize))
        else {
            return false;
        };
        // The clock may be a second behind.
        self.second.saturating_sub(used_at.get()) > *limit
    }

    /// The next of the entries below `end`.
    pub(crate) fn next_looked_at(&mut self, end: usize) -> u32 {
        let index = if (self.at as usize) < end { self.at } else { 0 };
        self.at = index + 1;
        index
    }
}
