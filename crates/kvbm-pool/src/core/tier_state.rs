//! One tier: its slots, which of them are free, its eviction order, and what is counted of it.

use super::free_slots::FreeSlots;
use super::order::EvictionOrder;
use crate::entry::{NONE, Presence};
use crate::error::RegisterError;
use crate::losses::Lost;
use crate::slot::Slot;
use crate::status::{EvictionReason, TierCounters, TierStatus};
use kvbm_plan::{BlockId, Tier};

/// One tier: its slots, its eviction order, and its slots by what they are used for.
pub(crate) struct TierState {
    pub slots: Box<[Slot]>,
    pub free: FreeSlots,
    pub order: EvictionOrder,
    /// Position in the order up to which offload candidates were looked for.
    pub cursor: u64,
    pub held: u32,
    pub arriving: u32,
    pub active: u32,
    pub inactive: u32,
    /// Inactive blocks that the policy may choose.
    pub listed: u32,
    pub detached: u32,
    /// References held by transfers.
    pub transfer_pins: u64,
    /// Present here and on the tier below.
    copied: u32,
    /// Present here and Arriving on the tier below.
    copying: u32,
    pub counters: TierCounters,
}

impl TierState {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            slots: Slot::many(capacity),
            free: FreeSlots::new(capacity),
            order: EvictionOrder::new(capacity),
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
            counters: TierCounters::default(),
        }
    }

    #[inline]
    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Slots that blocks can be in.
    pub(crate) fn usable(&self) -> u32 {
        self.capacity() - self.free.quarantined
    }

    /// Makes `slot` the youngest of the eviction order.
    #[inline]
    pub(crate) fn push_young(&mut self, slot: u32) {
        self.order.push_young(slot, &self.slots);
    }

    /// Makes `slot` the oldest of the eviction order.
    #[inline]
    pub(crate) fn push_old(&mut self, slot: u32) {
        self.order.push_old(slot, &self.slots);
    }

    /// Takes up to `want` free slots, which become Held.
    pub(crate) fn take_free(&mut self, want: usize, out: &mut Vec<BlockId>) {
        self.held += self.free.take(&self.slots, want, out);
    }

    /// Held slots are free again.
    pub(crate) fn give_back(&mut self, blocks: &[BlockId]) {
        self.free.give_back(&self.slots, blocks);
        self.held -= blocks.len() as u32;
    }

    /// A slot that no block refers to any more is free. The caller has taken it out of the count of
    /// its former usage.
    #[inline]
    pub(crate) fn put_free(&mut self, slot: u32) {
        self.free.put(&self.slots, slot);
    }

    /// Such a slot is out of use for good.
    pub(crate) fn retire(&mut self, slot: u32) {
        self.free.retire(&self.slots, slot);
    }

    /// Takes `slot` off the list of duplicates that begins at `primary`.
    pub(crate) fn unlink_duplicate(&self, primary: u32, slot: u32) {
        let state = self.slot(slot);
        let mut at = primary;
        while at != NONE {
            let before = self.slot(at);
            let next = before.link.get();
            if next == slot {
                before.link.set(state.link.get());
                state.link.set(NONE);
                return;
            }
            at = next;
        }
    }

    /// The policy may choose a slot from now on, or must not any more.
    #[inline]
    pub(crate) fn count_listed(&mut self, slot: u32, listed: bool) {
        self.slot(slot).set_listed(listed);
        self.listed = if listed { self.listed + 1 } else { self.listed - 1 };
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

    /// Counts a block that has left.
    pub(crate) fn count_eviction(&mut self, reason: EvictionReason) {
        let counters = &mut self.counters;
        match reason {
            EvictionReason::Capacity => counters.evicted += 1,
            EvictionReason::Removed => counters.removed += 1,
            EvictionReason::Expired => counters.expired += 1,
            EvictionReason::Quarantined => counters.quarantined += 1,
            EvictionReason::Lost => counters.lost += 1,
            EvictionReason::ParentFailed => counters.orphaned += 1,
        }
    }

    /// Refuses and counts a batch where the tier, which is `tier`, lost its blocks since the batch
    /// was allocated.
    #[inline]
    pub(crate) fn refuse_lost(&mut self, tier: Tier, is_lost: bool) -> Result<(), RegisterError> {
        if !is_lost {
            return Ok(());
        }
        self.counters.registrations_lost += 1;
        Err(RegisterError::Lost(Lost { tier }))
    }

    /// The status of this tier, which is `tier`, with so many blocks pinned until an iteration.
    pub(crate) fn status(&self, tier: Tier, pinned: u32) -> TierStatus {
        let (capacity, free) = (self.capacity(), &self.free);
        let in_use = capacity - free.free - free.quarantined;
        TierStatus {
            tier,
            capacity,
            free: free.free,
            held: self.held,
            arriving: self.arriving,
            active: self.active,
            inactive: self.inactive,
            detached: self.detached,
            quarantined: free.quarantined,
            transfer_pins: self.transfer_pins,
            pinned,
            copied_lower: self.copied,
            copying_lower: self.copying,
            not_copied_lower: in_use.saturating_sub(self.copied),
        }
    }
}
