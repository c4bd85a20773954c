//! The free slots of a tier.

use crate::entry::NONE;
use crate::slot::{Slot, Usage};
use kvbm_plan::BlockId;

/// Slots without a block: freed ones in a list, and those that were never used. Both may contain
/// slots that were retired since.
pub(crate) struct FreeSlots {
    /// First of the freed slots, linked through `Slot::link`.
    freed: u32,
    /// Slots from here on were never used.
    fresh: u32,
    pub free: u32,
    pub quarantined: u32,
}

impl FreeSlots {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { freed: NONE, fresh: 0, free: capacity as u32, quarantined: 0 }
    }

    /// Takes up to `want` free slots; their usage becomes `Held`.
    #[inline]
    pub(crate) fn take(&mut self, slots: &[Slot], want: usize, out: &mut Vec<BlockId>) -> u32 {
        let take = want.min(self.free as usize) as u32;
        for _ in 0..take {
            let mut id = self.pop(slots);
            while slots[id as usize].usage() != Usage::Free {
                id = self.pop(slots);
            }
            slots[id as usize].reset(Usage::Held);
            out.push(BlockId(id));
        }
        self.free -= take;
        take
    }

    /// The next slot of the list, or that was never used: a free one, or one that was retired.
    #[inline]
    fn pop(&mut self, slots: &[Slot]) -> u32 {
        if self.freed == NONE {
            self.fresh += 1;
            return self.fresh - 1;
        }
        let id = self.freed;
        self.freed = slots[id as usize].link.get();
        id
    }

    /// Puts a slot that no block refers to any more into the list; the caller has taken it out of
    /// the count of its former usage.
    #[inline]
    pub(crate) fn put(&mut self, slots: &[Slot], id: u32) {
        self.free += 1;
        let slot = &slots[id as usize];
        slot.reset(Usage::Free);
        slot.link.set(self.freed);
        self.freed = id;
    }

    /// Held blocks come back, the last one on top.
    pub(crate) fn give_back(&mut self, slots: &[Slot], blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            self.put(slots, block.0);
        }
    }

    /// Puts a slot that no block refers to any more out of use for good; the caller has taken it
    /// out of the count of its former usage.
    pub(crate) fn retire(&mut self, slots: &[Slot], id: u32) {
        self.quarantined += 1;
        slots[id as usize].reset(Usage::Quarantined);
    }

    /// Puts a free slot out of use for good. `false` where it is not free. It stays in the list, or
    /// in the part that was never used, until [`take`](Self::take) passes it.
    pub(crate) fn retire_free(&mut self, slots: &[Slot], block: BlockId) -> bool {
        let slot = &slots[block.index()];
        let is_free = slot.usage() == Usage::Free;
        if is_free {
            let next = slot.link.get();
            self.free -= 1;
            self.retire(slots, block.0);
            slot.link.set(next);
        }
        is_free
    }

    /// Takes all slots of an unused tier out of the list. Returns false and changes nothing where a
    /// slot is in use.
    pub(crate) fn empty(&mut self, slots: &[Slot]) -> bool {
        if (self.free + self.quarantined) as usize != slots.len() {
            return false;
        }
        self.fresh = slots.len() as u32;
        self.freed = NONE;
        self.free = 0;
        true
    }

    /// Fills an emptied list with the slots for which `used` is false.
    pub(crate) fn refill(&mut self, slots: &[Slot], used: impl Fn(u32) -> bool) {
        for id in (0..slots.len() as u32).rev().filter(|&id| !used(id)) {
            if slots[id as usize].usage() != Usage::Quarantined {
                self.put(slots, id);
            }
        }
    }
}
