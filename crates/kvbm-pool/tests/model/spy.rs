//! A policy that evicts at random and can be watched: what it is told must be what the model knows.

use kvbm_pool::{BlockMemory, BlockUse, EvictionPolicy, Numbers, RequestPart, SlotSet};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

/// What the policy was told, and what it chose.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) evictable: [BTreeSet<u32>; 3],
    pub(crate) chosen: VecDeque<(usize, u32)>,
}

pub(crate) struct Spy {
    pub(crate) seen: Arc<Mutex<Seen>>,
    pub(crate) random: u64,
}

/// What a spy keeps with the block of this tag.
fn mark(tag: u64) -> BlockMemory {
    BlockMemory { time: tag as u16, class: (tag >> 16) as u8 }
}

impl EvictionPolicy for Spy {
    fn begin(&mut self, _before: Option<BlockMemory>, _part: RequestPart, _blocks: usize) {}

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        mark(block.tag)
    }

    fn used(&mut self, block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        assert_eq!(memory, mark(block.tag), "what was kept of a block belongs to it");
        memory
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        assert_eq!(memory, mark(tag), "what was kept of a block belongs to it");
    }

    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        _memory: BlockMemory,
        _priority: u8,
        _numbers: &mut Numbers<'_>,
    ) {
        self.seen.lock().expect("the driver does not panic while it looks").evictable[set.tier].insert(slot);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut Numbers<'_>) {
        self.seen.lock().expect("the driver does not panic while it looks").evictable[set.tier].remove(&slot);
    }

    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, _numbers: &mut Numbers<'_>) {
        let mut seen = self.seen.lock().expect("the driver does not panic while it looks");
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let some = 1 + (self.random >> 40) as usize % want;
        for turn in 0..some {
            let count = seen.evictable[set.tier].len();
            if count == 0 {
                return;
            }
            let at = ((self.random >> 33) as usize + turn) % count;
            let Some(&slot) = seen.evictable[set.tier].iter().nth(at) else { return };
            seen.evictable[set.tier].remove(&slot);
            seen.chosen.push_back((set.tier, slot));
            out.push(slot);
        }
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        !self.seen.lock().expect("the driver does not panic while it looks").evictable[set.tier].is_empty()
    }
}
