//! What the registry counts of one tier, and the tier's eviction order.

use super::free_slots::FreeSlots;
use super::order::EvictionOrder;
use crate::entry::Presence;
use crate::status::{TierCounters, TierStatus};
use kvbm_plan::Tier;

/// One tier: its eviction order, and its slots by what they are used for.
pub(crate) struct TierState {
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

    /// The status of a tier with these free slots and so many blocks pinned until an iteration.
    pub(crate) fn status(&self, tier: Tier, capacity: u32, free: &FreeSlots, pinned: u32) -> TierStatus {
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
