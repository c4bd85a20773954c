//! A policy of a user's that goes by anything but what blocks are, or whose.

use kvbm_pool::{BlockMemory, EvictionPolicy, SlotNumbers, SlotSet};
use std::collections::BTreeSet;

#[derive(Default)]
pub(crate) struct Blind {
    evictable: [BTreeSet<u32>; 3],
}

impl EvictionPolicy for Blind {
    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        _memory: BlockMemory,
        _priority: u8,
        _numbers: &mut SlotNumbers<'_>,
    ) {
        self.evictable[set.tier].insert(slot);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut SlotNumbers<'_>) {
        self.evictable[set.tier].remove(&slot);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, _numbers: &mut SlotNumbers<'_>) {
        out.extend(self.evictable[set.tier].pop_last());
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        !self.evictable[set.tier].is_empty()
    }
}
