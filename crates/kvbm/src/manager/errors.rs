//! Calls that a manager refuses.

use kvbm_plan::{Rank, Tier};
use kvbm_pool::Lost;

/// An offload that cannot be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// No path leads from one to the other.
    #[error("blocks of {from} cannot be offloaded to {to}: configure {to}, and offload one tier at a time")]
    NoPath {
        /// Where the blocks are.
        from: Tier,
        /// Where they should go.
        to: Tier,
    },
    /// The blocks are another manager's.
    #[error("the blocks belong to another manager: offload them with the one that they came from")]
    Foreign,
    /// The blocks are gone.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The manager is shutting down.
    #[error("the manager is shutting down: no offload starts")]
    ShuttingDown,
}

/// A rank that cannot be given up. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RankLostError {
    /// There is no such rank.
    #[error("there is no rank {rank}: the {ranks} ranks of this manager count from 0")]
    NoSuchRank {
        /// Asked for.
        rank: Rank,
        /// Ranks configured.
        ranks: usize,
    },
    /// Its worker may write to its memory until the manager ends.
    #[error(
        "rank {0} has its worker in this process, which may write to its memory as long as it lives: drop the manager instead"
    )]
    Local(Rank),
}

/// Device events that no plan could wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// Not one event for each rank.
    #[error("{given} device events for {ranks} ranks: record one on each rank's device, in order")]
    Ranks {
        /// Events given.
        given: usize,
        /// Ranks of this process.
        ranks: usize,
    },
    /// Plans wait for the latest number only.
    #[error("device event {0} is not above all earlier ones: give numbers that grow, below 2^64 - 1")]
    Number(u64),
    /// Nobody would tell workers of another process of these events.
    #[error(
        "the workers are in other processes: give each its device event there, under a number, and `fence_at` that number"
    )]
    Elsewhere,
    /// Nobody would tell workers of this process of an event of that number.
    #[error(
        "the workers are in this process, and know no device event {0}: give the events themselves to `fence`"
    )]
    Here(u64),
}

/// A namespace whose hashes this manager cannot make.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// The namespace is incomplete.
    #[error(transparent)]
    Namespace(#[from] kvbm_tokens::NamespaceError),
    /// The salt is too long.
    #[error(transparent)]
    Salt(#[from] kvbm_tokens::ExtraKeyError),
    /// Blocks of another size.
    #[error(
        "the namespace has {given} tokens a block, this manager {ours}: blocks of one manager are of one size"
    )]
    PageSize {
        /// Of the namespace.
        given: usize,
        /// Of the model.
        ours: u32,
    },
    /// What is on disk could not be found again by its hash.
    #[error(transparent)]
    NotPersistable(#[from] kvbm_tokens::NotPersistable),
}
