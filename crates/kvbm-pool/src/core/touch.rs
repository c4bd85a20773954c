//! Uses of blocks: a request touches its blocks once, tail to head, on every tier that holds them.
//! The policy sees the request first, head to tail.

use super::batch_lookup::BatchLookup;
use super::state::Core;
use crate::entry::{BlockMemory, NONE, Presence};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, GroupId, SequenceHash};

impl Core {
    /// A use of these blocks.
    pub(crate) fn touch(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        let mut lookup = BatchLookup::new(self, group, hashes);
        while let Some(entries) = lookup.next(self) {
            found.extend(entries.iter().map(|&index| self.used_entry(index)));
        }
        self.touch_entries(&found);
        self.touched = found;
    }

    /// A use of blocks that the caller pins.
    pub(crate) fn touch_pinned(&mut self, tier: usize, blocks: &[BlockId]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        found.extend(blocks.iter().map(|block| self.used_entry(self.entry_of(tier, block.0))));
        self.touch_entries(&found);
        self.touched = found;
    }

    /// The blocks of one request, in order; `NONE` where a block is nowhere.
    fn touch_entries(&mut self, found: &[u32]) {
        self.note_use(found);
        for &index in found.iter().rev().filter(|index| **index != NONE) {
            self.touch_entry(index);
        }
    }

    /// `NONE` for an entry whose block is nowhere: it only keeps the place of a block in a chain.
    fn used_entry(&self, index: u32) -> u32 {
        if index == NONE || self.entry(index).is_nowhere() { NONE } else { index }
    }

    #[inline]
    fn touch_entry(&mut self, index: u32) {
        let entry = &self.entries[index as usize];
        entry.last_step.set(self.step as u16);
        self.expiry.note(index);
        if self.policy.is_none() {
            entry.set_memory(BlockMemory::default());
        }
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                self.tiers[tier].order.push_young(entry.slot(tier), &self.slots[tier]);
            }
        }
        self.update_touched(index);
    }
}
