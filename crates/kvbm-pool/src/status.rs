//! Numbers for people and metrics.

use kvbm_plan::Tier;

/// Where the slots of a tier are. `free + held + arriving + active + inactive + detached +
/// quarantined = capacity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierStatus {
    /// The tier.
    pub tier: Tier,
    /// Slots.
    pub capacity: u32,
    /// Ready for allocation.
    pub free: u32,
    /// In exclusive batches: Reset, Partial or Complete.
    pub held: u32,
    /// Destinations of transfers.
    pub arriving: u32,
    /// Registered and pinned, duplicates included.
    pub active: u32,
    /// Registered and unpinned: evictable once nothing on the tier continues them.
    pub inactive: u32,
    /// Removed from the registry, waiting for their last user.
    pub detached: u32,
    /// Never used again.
    pub quarantined: u32,
    /// Pins held by transfers that read or have just written (a block may have several).
    pub transfer_pins: u64,
    /// Blocks pinned until some iteration ([`Registry::pin`](crate::Registry::pin)), in use or not.
    pub pinned: u32,
    /// Blocks that are also on the next lower tier that exists.
    pub copied_lower: u32,
    /// Blocks that are on their way there.
    pub copying_lower: u32,
    /// Blocks neither free, nor quarantined, nor on the next lower tier.
    pub not_copied_lower: u32,
}

impl TierStatus {
    /// A tier without slots.
    pub const fn without_slots(tier: Tier) -> Self {
        Self {
            tier,
            capacity: 0,
            free: 0,
            held: 0,
            arriving: 0,
            active: 0,
            inactive: 0,
            detached: 0,
            quarantined: 0,
            transfer_pins: 0,
            pinned: 0,
            copied_lower: 0,
            copying_lower: 0,
            not_copied_lower: 0,
        }
    }

    /// Share of the tier that is neither free nor already copied lower, 0 to 1: what watermarks
    /// look at.
    pub fn occupancy(&self) -> f64 {
        f64::from(self.not_copied_lower) / f64::from(self.capacity.max(1))
    }
}

/// Why a block left a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EvictionReason {
    /// Its slot was needed.
    Capacity,
    /// It was asked for: clear, forget, remove.
    Removed,
    /// It was not used for its time to live ([`Registry::set_ttl`](crate::Registry::set_ttl),
    /// [`Registry::set_ttl_time`](crate::Registry::set_ttl_time)).
    Expired,
    /// Its bytes were bad.
    Quarantined,
    /// The tier lost what it held ([`Registry::lose`](crate::Registry::lose)).
    Lost,
    /// It was copied there before the block that it continues, whose copy then failed.
    ParentFailed,
}

/// What happened on a tier since it exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Blocks that became Present, by registration, arrival or recovery.
    pub stored: u64,
    /// Blocks that were given up because their slot was needed.
    pub evicted: u64,
    /// Those of them that the eviction policy chose; the others went in order of recency, as all do
    /// under `lru-leaf` and where `hazard` follows recency
    /// ([`EvictionPolicy::follows_recency`](crate::EvictionPolicy::follows_recency)).
    pub evicted_by_choice: u64,
    /// Blocks that were removed on request.
    pub removed: u64,
    /// Blocks that were not used for their time to live.
    pub expired: u64,
    /// Blocks that were given up because their bytes were bad.
    pub quarantined: u64,
    /// Blocks that were lost with what the tier held.
    pub lost: u64,
    /// Blocks that went because the copy of one that they continue failed after theirs.
    pub orphaned: u64,
    /// Batches whose registration was refused, because they were allocated before that.
    pub registrations_lost: u64,
    /// Registrations of a block that the tier already had.
    pub duplicates: u64,
    /// Arrivals that failed or were abandoned.
    pub arrivals_failed: u64,
    /// Allocations that failed for lack of evictable blocks.
    pub allocations_failed: u64,
}

impl TierCounters {
    /// Blocks that left for `reason`.
    pub const fn evictions(&self, reason: EvictionReason) -> u64 {
        match reason {
            EvictionReason::Capacity => self.evicted,
            EvictionReason::Removed => self.removed,
            EvictionReason::Expired => self.expired,
            EvictionReason::Quarantined => self.quarantined,
            EvictionReason::Lost => self.lost,
            EvictionReason::ParentFailed => self.orphaned,
        }
    }
}
