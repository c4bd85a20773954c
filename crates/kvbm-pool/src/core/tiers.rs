//! One tier: its slots, free list, eviction order and counts.

use super::order::Order;
use super::slot::{Slot, Usage};
use super::{NONE, Presence};
use crate::status::{Counters, TierStatus};
use kvbm_plan::{BlockId, Tier};

/// One tier of a shard.
pub(crate) struct TierCore {
    pub slots: Box<[Slot]>,
    pub order: Order,
    /// First of the freed slots, linked through `Slot::link`.
    freed: u32,
    /// Slots from here on were never used.
    fresh: u32,
    /// Place in the order up to which offload candidates were looked for.
    pub cursor: u64,
    pub free: u32,
    pub held: u32,
    pub arriving: u32,
    pub active: u32,
    pub inactive: u32,
    pub detached: u32,
    pub quarantined: u32,
    /// References held by transfers.
    pub transfer_pins: u64,
    /// Present here and on the tier below.
    copied: u32,
    /// Present here and Arriving on the tier below.
    copying: u32,
    pub counters: Counters,
}

impl TierCore {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            slots: vec![Slot::NEW; capacity].into_boxed_slice(),
            order: Order::new(capacity),
            freed: NONE,
            fresh: 0,
            cursor: 0,
            free: capacity as u32,
            held: 0,
            arriving: 0,
            active: 0,
            inactive: 0,
            detached: 0,
            quarantined: 0,
            transfer_pins: 0,
            copied: 0,
            copying: 0,
            counters: Counters::default(),
        }
    }

    /// Takes a free slot; its usage becomes `Held`.
    #[inline]
    pub(crate) fn take_free(&mut self) -> Option<u32> {
        let id = if self.freed != NONE {
            let id = self.freed;
            self.freed = self.slots[id as usize].link;
            id
        } else if (self.fresh as usize) < self.slots.len() {
            self.fresh += 1;
            self.fresh - 1
        } else {
            return None;
        };
        self.free -= 1;
        self.held += 1;
        let slot = &mut self.slots[id as usize];
        *slot = Slot::NEW;
        slot.set_usage(Usage::Held);
        Some(id)
    }

    /// Puts a slot that nobody refers to any more into the free list; the caller has taken it out of the count of its
    /// former usage.
    #[inline]
    pub(crate) fn put_free(&mut self, id: u32) {
        self.free += 1;
        let slot = &mut self.slots[id as usize];
        *slot = Slot::NEW;
        slot.link = self.freed;
        self.freed = id;
    }

    /// Puts a slot that nobody refers to out of use for good; counted as above.
    pub(crate) fn retire(&mut self, id: u32) {
        self.quarantined += 1;
        self.slots[id as usize] = Slot::NEW;
        self.slots[id as usize].set_usage(Usage::Quarantined);
    }

    /// Puts those of `ids` that are free out of use for good and returns how many. The order of the other free slots
    /// stays. Takes time in proportion to the tier.
    pub(crate) fn retire_free(&mut self, ids: &[BlockId]) -> u32 {
        let before = self.free;
        for id in ids {
            let free = self.slots.get(id.index()).filter(|slot| slot.usage() == Usage::Free);
            if let Some(link) = free.map(|slot| slot.link) {
                self.free -= 1;
                self.retire(id.0);
                // The old list leads through it until it is relinked below.
                self.slots[id.index()].link = link;
            }
        }
        let retired = before - self.free;
        if retired > 0 {
            self.relink_free();
        }
        retired
    }

    /// Links the free slots among those that the list and the fresh part name.
    fn relink_free(&mut self) {
        let known = |id: u32| (id != NONE).then_some(id);
        let linked = std::iter::successors(known(self.freed), |&id| known(self.slots[id as usize].link));
        let all = linked.chain(self.fresh..self.slots.len() as u32);
        let free: Vec<u32> = all.filter(|&id| self.slots[id as usize].usage() == Usage::Free).collect();
        self.fresh = self.slots.len() as u32;
        self.freed = NONE;
        for id in free.into_iter().rev() {
            self.slots[id as usize].link = self.freed;
            self.freed = id;
        }
    }

    /// Held blocks go back to the free list, the last one on top.
    pub(crate) fn give_back(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            self.held -= 1;
            self.put_free(block.0);
        }
    }

    /// Takes the slots for which `used` says so out of the free list of a tier that was never used.
    pub(crate) fn claim(&mut self, used: impl Fn(u32) -> bool) {
        let all = self.slots.len() as u32;
        self.fresh = all;
        self.freed = NONE;
        self.free = 0;
        for id in (0..all).rev().filter(|&id| !used(id)) {
            if self.slots[id as usize].usage() != Usage::Quarantined {
                self.put_free(id);
            }
        }
    }

    /// Whether no slot holds anything, so that all that can be used are free.
    pub(crate) fn is_all_free(&self) -> bool {
        (self.free + self.quarantined) as usize == self.slots.len()
    }

    /// Counts a change of presence here against the presence below.
    pub(crate) fn count_copy(&mut self, below: Presence, old: Presence, new: Presence) {
        let count = match below {
            Presence::Absent => return,
            Presence::Arriving => &mut self.copying,
            Presence::Present => &mut self.copied,
        };
        match (old == Presence::Present, new == Presence::Present) {
            (false, true) => *count += 1,
            (true, false) => *count -= 1,
            _ => {}
        }
    }

    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        let capacity = self.slots.len() as u32;
        TierStatus {
            tier,
            capacity,
            free: self.free,
            held: self.held,
            arriving: self.arriving,
            active: self.active,
            inactive: self.inactive,
            detached: self.detached,
            quarantined: self.quarantined,
            transfer_pins: self.transfer_pins,
            pinned: 0,
            copied_lower: self.copied,
            copying_lower: self.copying,
            not_copied_lower: (capacity - self.free - self.quarantined).saturating_sub(self.copied),
        }
    }
}
