//! A tier: the free slots, which all shards share, and what a shard keeps of it: an eviction order and counts.

use super::order::{Common, Order};
use super::slot::{Slot, Usage};
use super::{NONE, Presence};
use crate::status::{Counters, TierStatus};
use crate::sync::Arc;
use kvbm_plan::{BlockId, Tier};

/// The free slots of a tier. A leaf lock is around them.
pub(crate) struct FreeSlots {
    /// First of the freed slots, linked through `Slot::link`.
    freed: u32,
    /// Slots from here on were never used.
    fresh: u32,
    pub free: u32,
    /// Those taken from here less those given back: a part of the count (see [`TierPart`]).
    held: u32,
    pub quarantined: u32,
}

impl FreeSlots {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self { freed: NONE, fresh: 0, free: capacity as u32, held: 0, quarantined: 0 }
    }

    /// Takes up to `want` free slots; their usage becomes `Held`.
    #[inline]
    pub(crate) fn take(&mut self, slots: &[Slot], want: usize, out: &mut Vec<BlockId>) -> u32 {
        let take = want.min(self.free as usize) as u32;
        for _ in 0..take {
            let id = if self.freed == NONE {
                self.fresh += 1;
                self.fresh - 1
            } else {
                let id = self.freed;
                self.freed = slots[id as usize].link.get();
                id
            };
            slots[id as usize].reset(Usage::Held);
            out.push(BlockId(id));
        }
        self.free -= take;
        self.held = self.held.wrapping_add(take);
        take
    }

    /// Puts a slot that nobody refers to any more into the list; the caller has taken it out of the count of its
    /// former usage.
    #[inline]
    pub(crate) fn put(&mut self, slots: &[Slot], id: u32) {
        self.free += 1;
        let slot = &slots[id as usize];
        slot.reset(Usage::Free);
        slot.link.set(self.freed);
        self.freed = id;
    }

    /// A slot that nobody refers to any more is in exclusive use from now on; counted as above.
    pub(crate) fn hold(&mut self, slots: &[Slot], id: u32) {
        self.held = self.held.wrapping_add(1);
        slots[id as usize].reset(Usage::Held);
    }

    /// Held blocks come back, the last one on top.
    pub(crate) fn give_back(&mut self, slots: &[Slot], blocks: &[BlockId]) {
        self.held = self.held.wrapping_sub(blocks.len() as u32);
        for block in blocks.iter().rev() {
            self.put(slots, block.0);
        }
    }

    /// Puts a slot that nobody refers to out of use for good; counted as above.
    pub(crate) fn retire(&mut self, slots: &[Slot], id: u32) {
        self.quarantined += 1;
        slots[id as usize].reset(Usage::Quarantined);
    }

    /// Puts those of `ids` that are free out of use for good and returns how many. The order of the other free slots
    /// stays. Takes time in proportion to the tier.
    pub(crate) fn retire_free(&mut self, slots: &[Slot], ids: &[BlockId]) -> u32 {
        let before = self.free;
        for id in ids {
            let free = slots.get(id.index()).filter(|slot| slot.usage() == Usage::Free);
            if let Some(link) = free.map(|slot| slot.link.get()) {
                self.free -= 1;
                self.retire(slots, id.0);
                // The old list leads through it until it is relinked below.
                slots[id.index()].link.set(link);
            }
        }
        let retired = before - self.free;
        if retired > 0 {
            self.relink(slots);
        }
        retired
    }

    /// Links the free slots among those that the list and the fresh part name.
    fn relink(&mut self, slots: &[Slot]) {
        let known = |id: u32| (id != NONE).then_some(id);
        let linked = std::iter::successors(known(self.freed), |&id| known(slots[id as usize].link.get()));
        let all = linked.chain(self.fresh..slots.len() as u32);
        let free: Vec<u32> = all.filter(|&id| slots[id as usize].usage() == Usage::Free).collect();
        self.fresh = slots.len() as u32;
        self.freed = NONE;
        for id in free.into_iter().rev() {
            slots[id as usize].link.set(self.freed);
            self.freed = id;
        }
    }

    /// Closes the list of a tier of which nothing is used: nobody gets a slot before [`open`](Self::open). False, and nothing
    /// changes, where something is.
    pub(crate) fn close(&mut self, slots: &[Slot]) -> bool {
        if (self.free + self.quarantined) as usize != slots.len() {
            return false;
        }
        self.fresh = slots.len() as u32;
        self.freed = NONE;
        self.free = 0;
        true
    }

    /// Opens a closed list, with the slots for which `used` does not say so.
    pub(crate) fn open(&mut self, slots: &[Slot], used: impl Fn(u32) -> bool) {
        for id in (0..slots.len() as u32).rev().filter(|&id| !used(id)) {
            if slots[id as usize].usage() != Usage::Quarantined {
                self.put(slots, id);
            }
        }
    }
}

/// What a shard keeps of a tier. Counts are of the blocks whose entries are the shard's, but `held` and `transfer_pins`,
/// which may be counted up in one shard and down in another: only their sum over all shards means anything.
pub(crate) struct TierPart {
    pub order: Order,
    /// Place in the order up to which offload candidates were looked for.
    pub cursor: u64,
    pub held: u32,
    pub arriving: u32,
    pub active: u32,
    pub inactive: u32,
    /// Those that the policy may choose.
    pub listed: u32,
    pub detached: u32,
    /// References held by transfers.
    pub transfer_pins: u64,
    /// Present here and on the tier below.
    copied: u32,
    /// Present here and Arriving on the tier below.
    copying: u32,
    pub counters: Counters,
}

impl TierPart {
    pub(crate) fn new(capacity: usize, shard: usize, order: Arc<Common>) -> Self {
        Self {
            order: Order::new(capacity, shard, order),
            cursor: 0,
            held: 0,
            arriving: 0,
            active: 0,
            inactive: 0,
            listed: 0,
            detached: 0,
            transfer_pins: 0,
            copied: 0,
            copying: 0,
            counters: Counters::default(),
        }
    }

    #[inline]
    pub(crate) fn add_held(&mut self, count: u32) {
        self.held = self.held.wrapping_add(count);
    }

    #[inline]
    pub(crate) fn drop_held(&mut self, count: u32) {
        self.held = self.held.wrapping_sub(count);
    }

    /// Blocks here that are on the tier below as well.
    #[inline]
    pub(crate) fn copied(&self) -> u32 {
        self.copied
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
}

/// Where the slots of a tier are, from all of its parts.
pub(crate) fn status<'a>(
    tier: Tier,
    capacity: u32,
    free: &FreeSlots,
    pinned: u32,
    parts: impl Iterator<Item = &'a TierPart>,
) -> TierStatus {
    let mut status = TierStatus {
        capacity,
        free: free.free,
        held: free.held,
        quarantined: free.quarantined,
        pinned,
        ..TierStatus::without_slots(tier)
    };
    for part in parts {
        status.held = status.held.wrapping_add(part.held);
        status.arriving += part.arriving;
        status.active += part.active;
        status.inactive += part.inactive;
        status.detached += part.detached;
        status.transfer_pins = status.transfer_pins.wrapping_add(part.transfer_pins);
        status.copied_lower += part.copied;
        status.copying_lower += part.copying;
    }
    let in_use = capacity - free.free - free.quarantined;
    status.not_copied_lower = in_use.saturating_sub(status.copied_lower);
    status
}
