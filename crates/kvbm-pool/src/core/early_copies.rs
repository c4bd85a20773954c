//! Copies that are complete while that of their parent is on its way.

use super::entries::Entries;
use crate::entry::{NONE, Presence};
use crate::tier::TIERS;
use kvbm_plan::{GroupId, SequenceHash};
use std::collections::HashMap;

/// A block by group and sequence hash.
pub(crate) type BlockKey = (GroupId, SequenceHash);

/// Complete copies whose parents are on their way, and those whose parents failed.
#[derive(Default)]
pub(crate) struct EarlyCopies {
    /// By the entry that is on its way, and the tier: blocks that may be complete there before it.
    waiting: HashMap<(u32, u8), Vec<BlockKey>>,
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

    /// Whether a block that arrives on `tier` needs no parent there, or the parent is there or on
    /// its way.
    pub(crate) fn has_needed_parent(&mut self, entries: &Entries, index: u32, tier: usize) -> bool {
        let entry = &entries[index];
        let parent = entry.parent.get();
        parent == NONE || !entries.is_full(entry.group()) || self.awaits(entries, parent, tier, index)
    }

    /// Whether the parent of a block that arrives on `tier` is there or on its way; in the second
    /// case the block is noted behind it.
    fn awaits(&mut self, entries: &Entries, parent: u32, tier: usize, child: u32) -> bool {
        let presence = entries[parent].presence(tier);
        if presence == Presence::Arriving {
            let child = &entries[child];
            let key = (child.group(), child.hash());
            self.waiting.entry((parent, tier as u8)).or_default().push(key);
        }
        presence != Presence::Absent
    }

    /// Whether a block is on `tier`, or on its way there, and its parent is neither. Where the
    /// parent is on its way again, the block is noted behind it once more.
    pub(crate) fn stays_orphan(&mut self, entries: &Entries, tier: usize, (group, hash): BlockKey) -> bool {
        let Some(index) = entries.find(group, hash) else { return false };
        let (parent, presence) = (entries[index].parent.get(), entries[index].presence(tier));
        presence != Presence::Absent && parent != NONE && !self.awaits(entries, parent, tier, index)
    }
}
