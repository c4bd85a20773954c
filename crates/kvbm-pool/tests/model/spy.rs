//! A policy that evicts at random and can be watched: what it is told must be what the model knows.

use kvbm_pool::{BlockMemory, BlockUse, EvictionPolicy, SlotNumbers, SlotSet};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// What the policy was told, and what it chose.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) evictable: [BTreeSet<u32>; 3],
    pub(crate) chosen: VecDeque<(usize, u32)>,
}

/// The policy.
pub(crate) struct Spy {
    seen: Arc<Mutex<Seen>>,
    random: u64,
}

impl Spy {
    pub(crate) fn new(seen: Arc<Mutex<Seen>>, random: u64) -> Self {
        Self { seen, random }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("the driver does not panic while it looks")
    }
}

/// What a spy keeps with the block of this tag.
fn mark(tag: u64) -> BlockMemory {
    BlockMemory { time: tag as u16, class: (tag >> 16) as u8 }
}

impl EvictionPolicy for Spy {
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
        _numbers: &mut SlotNumbers<'_>,
    ) {
        self.seen().evictable[set.tier].insert(slot);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut SlotNumbers<'_>) {
        self.seen().evictable[set.tier].remove(&slot);
    }

    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, _numbers: &mut SlotNumbers<'_>) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let some = 1 + (self.random >> 40) as usize % want;
        let mut seen = self.seen();
        for turn in 0..some {
            let evictable = &mut seen.evictable[set.tier];
            if evictable.is_empty() {
                return;
            }
            let at = ((self.random >> 33) as usize + turn) % evictable.len();
            let Some(&slot) = evictable.iter().nth(at) else { return };
            evictable.remove(&slot);
            seen.chosen.push_back((set.tier, slot));
            out.push(slot);
        }
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        !self.seen().evictable[set.tier].is_empty()
    }
}
