//! A policy that evicts at random and can be watched: what it is told must be what the model knows.

use kvbm_pool::{BlockMemory, BlockUse, EvictionPolicy, Numbers, SlotSet};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

/// What the policy was told, and what it chose.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) evictable: [BTreeSet<u32>; 3],
    pub(crate) chosen: VecDeque<(usize, u32)>,
}

/// Of all slots, or of those of a shard.
pub(crate) struct Spy {
    seen: Arc<Mutex<Seen>>,
    random: u64,
    /// What it was told itself.
    mine: [BTreeSet<u32>; 3],
}

impl Spy {
    pub(crate) fn new(seen: Arc<Mutex<Seen>>, random: u64) -> Self {
        Self { seen, random, mine: Default::default() }
    }

    /// The slot may be evicted from now on, or must not any more: that is said to one spy alone.
    fn tell(&mut self, set: SlotSet, slot: u32, evictable: bool) {
        let mut seen = self.seen.lock().expect("the driver does not panic while it looks");
        for slots in [&mut seen.evictable, &mut self.mine].map(|slots| &mut slots[set.tier]) {
            if evictable {
                slots.insert(slot)
            } else {
                slots.remove(&slot)
            };
        }
    }
}

/// What a spy keeps with the block of this tag.
fn mark(tag: u64) -> BlockMemory {
    BlockMemory { time: tag as u16, class: (tag >> 16) as u8 }
}

impl EvictionPolicy for Spy {
    fn split(&self, parts: usize) -> Option<Vec<Box<dyn EvictionPolicy>>> {
        let part = |number| Self::new(Arc::clone(&self.seen), self.random ^ number);
        Some((0..parts as u64).map(|number| Box::new(part(number)) as Box<dyn EvictionPolicy>).collect())
    }

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
        self.tell(set, slot, true);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut Numbers<'_>) {
        self.tell(set, slot, false);
    }

    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, _numbers: &mut Numbers<'_>) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let some = 1 + (self.random >> 40) as usize % want;
        for turn in 0..some {
            let count = self.mine[set.tier].len();
            if count == 0 {
                return;
            }
            let at = ((self.random >> 33) as usize + turn) % count;
            let Some(&slot) = self.mine[set.tier].iter().nth(at) else { return };
            self.tell(set, slot, false);
            self.seen
                .lock()
                .expect("the driver does not panic while it looks")
                .chosen
                .push_back((set.tier, slot));
            out.push(slot);
        }
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        !self.mine[set.tier].is_empty()
    }
}
