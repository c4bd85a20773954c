//! Times to live of namespaces, and which entry is looked at next for them.

use crate::entry::NONE;
use kvbm_plan::NamespaceId;
use std::collections::BTreeMap;

/// Times to live, and the entry that is looked at next.
pub(crate) struct TimesToLive {
    pub limits: BTreeMap<NamespaceId, u16>,
    /// Entry looked at next.
    at: u32,
    /// Entries to look at in this iteration.
    pub left: usize,
    /// Ancestor to look at before that, of a block that has left.
    pub above: u32,
}

impl Default for TimesToLive {
    fn default() -> Self {
        Self { limits: BTreeMap::new(), at: 0, left: 0, above: NONE }
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

    /// The next of the entries below `end`.
    pub(crate) fn next_looked_at(&mut self, end: usize) -> u32 {
        let index = if (self.at as usize) < end { self.at } else { 0 };
        self.at = index + 1;
        index
    }
}
