//! Errors: which block, why, and the way out.

use crate::block_state::IllegalTransition;
use crate::losses::Lost;
use kvbm_plan::{GroupId, SequenceHash, Tier};
use std::fmt;

/// A tier that cannot give so many blocks now. Nothing was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct AllocError {
    /// The tier.
    pub tier: Tier,
    /// Blocks asked for.
    pub asked: usize,
    /// Slots of the tier.
    pub capacity: u32,
    /// Free slots.
    pub free: u32,
    /// Registered blocks without users, of which those that nothing in use continues can be
    /// evicted.
    pub inactive: u32,
    /// Registered blocks in use, and removed ones that still have users.
    pub in_use: u32,
    /// Blocks in exclusive batches.
    pub held: u32,
    /// Destinations of transfers.
    pub arriving: u32,
    /// Pins held by transfers.
    pub transfer_pins: u32,
    /// Slots out of use because their bytes were bad.
    pub quarantined: u32,
    /// Blocks pinned until some iteration ([`Registry::pin`](crate::Registry::pin)), in use or not.
    pub pinned: u32,
    /// Whether it was for a tenant that is over its share with them: then what others have within
    /// theirs is not evicted ([`RegistryConfig::tenants`](crate::RegistryConfig::tenants)).
    pub over_share: bool,
}

impl AllocError {
    /// What would free blocks.
    pub fn way_out(&self) -> &'static str {
        let usable = u64::from(self.capacity - self.quarantined);
        if self.capacity == 0 {
            "configure the tier"
        } else if self.asked as u64 > usable {
            "ask for fewer blocks at once or configure a larger tier"
        } else if self.over_share {
            "finish or preempt requests of the tenant, which is over its share, or raise the share"
        } else if self.arriving.saturating_add(self.transfer_pins) > self.in_use / 2 + self.held {
            "wait for transfers to finish"
        } else if self.held > self.in_use {
            "register or drop exclusive batches"
        } else if self.pinned > self.in_use {
            "unpin blocks or let pins end"
        } else {
            "drop handles of registered blocks (finish or preempt requests)"
        }
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} cannot give {} blocks: {} free, {} evictable at most, {} in use, {} held exclusively, {} arriving, \
             {} pinned by transfers, {} pinned for a time, {} quarantined, of {}; {}",
            self.tier,
            self.asked,
            self.free,
            self.inactive,
            self.in_use,
            self.held,
            self.arriving,
            self.transfer_pins,
            self.pinned,
            self.quarantined,
            self.capacity,
            self.way_out()
        )
    }
}

/// Blocks that cannot be pinned. None of them was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// Pins would leave too little room on a tier.
    #[error(
        "{asked} more blocks of {tier} cannot be pinned: {pinned} are, and the limit is {limit} of its {capacity}; unpin others, \
         let their pins end, or pin fewer"
    )]
    Limit {
        /// The tier.
        tier: Tier,
        /// Blocks asked for, ancestors included, that are not pinned yet.
        asked: usize,
        /// Blocks pinned now, of the tenant where its share is what limits them.
        pinned: u32,
        /// Most blocks pinned at a time
        /// ([`RegistryConfig::most_pinned`](crate::RegistryConfig::most_pinned)), of the tier or of
        /// the tenant's share.
        limit: u32,
        /// Slots of the tier.
        capacity: u32,
    },
    /// It would end before it begins.
    #[error("a pin until iteration {until} is over: it is {now} now; pin until a later one")]
    Past {
        /// Asked for.
        until: u64,
        /// The clock.
        now: u64,
    },
}

/// A time to live that the clock of blocks cannot tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TtlError {
    /// Too few iterations, or too many.
    #[error(
        "a time to live of {iterations} iterations: give 1 to {}",
        crate::config::RegistryConfig::MAX_TTL
    )]
    Iterations {
        /// Asked for.
        iterations: u64,
    },
    /// Too short a time, or too long.
    #[error("a time to live of {} s: give 1 s to {} s", time.as_secs_f64(), crate::config::RegistryConfig::MAX_TTL_SECONDS)]
    Time {
        /// Asked for.
        time: std::time::Duration,
    },
}

/// A batch that cannot be registered. None of it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// Nothing could ever find the block.
    #[error(
        "block {index} ({hash}): its parent {parent} is on no tier, or not at the position before; register the parent first, or \
         recompute from there"
    )]
    MissingParent {
        /// Index in the batch.
        index: usize,
        /// The block.
        hash: SequenceHash,
        /// The block before it.
        parent: SequenceHash,
    },
    /// No such group.
    #[error("block {index} is of group {group}, but the registry has {groups}: configure the group")]
    UnknownGroup {
        /// Index in the batch.
        index: usize,
        /// Group named.
        group: GroupId,
        /// Groups configured.
        groups: usize,
    },
    /// Parent and position contradict each other.
    #[error("block {index} ({hash}) at position {position}: exactly the block at position 0 has no parent")]
    BadIdentity {
        /// Index in the batch.
        index: usize,
        /// The block.
        hash: SequenceHash,
        /// Its position.
        position: u32,
    },
    /// What the batch holds is gone.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The batch belongs to another registry.
    #[error("the batch was allocated from another registry: register it with the pool that gave it")]
    ForeignBatch,
}

/// A batch that cannot change its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// The transition is not in the table.
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    /// The first block of the batch is not full yet.
    #[error(
        "the block at position {position} must be full: the sequence has {full} full blocks; add tokens first"
    )]
    NotFull {
        /// Position of the batch's first block.
        position: u32,
        /// Full blocks of the sequence.
        full: usize,
    },
    /// A run that does not start at the beginning of its sequence, and later than the batch.
    #[error("the batch starts at position {position}, the chain at {first}: give the whole sequence's chain")]
    ChainStart {
        /// Position of the batch's first block.
        position: u32,
        /// First position of the chain.
        first: u32,
    },
    /// Positions are 32 bits wide.
    #[error("{blocks} blocks from position {position} exceed 2^32: split the sequence")]
    TooLong {
        /// Position of the batch's first block.
        position: u32,
        /// Blocks in the batch.
        blocks: usize,
    },
}

/// An error that gives the batch back, so that it can be used otherwise.
pub struct RejectedBatch<B, E> {
    /// The batch, as it was.
    pub batch: B,
    /// Why it was refused.
    pub error: E,
}

impl<B, E: fmt::Debug> fmt::Debug for RejectedBatch<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectedBatch").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B, E: fmt::Display> fmt::Display for RejectedBatch<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B, E: std::error::Error + 'static> std::error::Error for RejectedBatch<B, E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}
