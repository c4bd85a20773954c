//! The states and outcomes of one arrival: a block on its way to a tier.

use kvbm_plan::{BlockId, SequenceHash};

/// What [`begin_arrivals`](crate::BlockPool::begin_arrivals) decided for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Bytes may be written to this slot; [`complete`](crate::AnyArrivals::complete) makes the
    /// block visible.
    Reserved {
        /// Destination.
        block: BlockId,
        /// Number of this arrival, by which others join it.
        ticket: u64,
    },
    /// The tier has the block: pinned, nothing to transfer.
    Present {
        /// Slot.
        block: BlockId,
    },
    /// Another transfer brings the block: wait for that one, then look again. If it fails the block
    /// is absent.
    Joined {
        /// Number of the other arrival.
        ticket: u64,
    },
    /// Completed: visible and pinned.
    Completed {
        /// Slot.
        block: BlockId,
    },
    /// Failed, or removed while it was on its way.
    Failed,
    /// The block cannot be brought here.
    Refused(Refusal),
}

/// Why a block was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The tier neither has nor awaits the block before it.
    #[error("its parent {parent} is neither on the tier nor on its way there: bring the parent first")]
    MissingParent {
        /// The block before it.
        parent: SequenceHash,
    },
    /// What was on the tier when room was made is gone, or the block's namespace is another
    /// tenant's since: the room does not suffice any more.
    #[error(
        "a block was removed, or its namespace assigned to another tenant, while room was made: try again"
    )]
    NoRoom,
    /// Group or position make no sense.
    #[error("unknown group, or parent and position contradict each other")]
    BadIdentity,
}

/// The outcome of a completed arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOutcome {
    /// Present now, and announced.
    Stored,
    /// The block was registered meanwhile: that copy is used and pinned, this one given up.
    Existing {
        /// Slot of the other copy.
        block: BlockId,
    },
    /// Not visible. The block was removed (clear, forget, a loss) while it was on its way, or this
    /// arrival was over already. Or, in a Full group, the tier neither has nor awaits its parent
    /// any more.
    Removed,
}
