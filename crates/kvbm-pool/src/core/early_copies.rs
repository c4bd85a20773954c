//! Copies that are complete while that of their parent is on its way.

use crate::tier::TIERS;
use kvbm_plan::{GroupId, SequenceHash};
use std::collections::HashMap;

/// A block by group and sequence hash.
pub(crate) type BlockKey = (GroupId, SequenceHash);

/// Complete copies whose parents are on their way, and those whose parents failed.
#[derive(Default)]
pub(crate) struct EarlyCopies {
    /// By the entry that is on its way, and the tier: blocks that may be complete there before it.
    pub waiting: HashMap<(u32, u8), Vec<BlockKey>>,
    /// On each tier, blocks whose parent failed.
    pub orphaned: [Vec<BlockKey>; TIERS],
}

impl EarlyCopies {
    fn take(&mut self, parent: u32, tier: usize) -> Vec<BlockKey> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        self.waiting.remove(&(parent, tier as u8)).unwrap_or_default()
    }

    /// The entry's block is not on its way any more.
    #[inline]
    pub(crate) fn forget(&mut self, parent: u32, tier: usize) {
        drop(self.take(parent, tier));
    }

    /// The arrival of the entry's block failed.
    pub(crate) fn fail(&mut self, parent: u32, tier: usize) {
        let children = self.take(parent, tier);
        self.orphaned[tier].extend(children);
    }
}
