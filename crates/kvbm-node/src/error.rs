//! What can go wrong.

use kvbm::{BlockId, BuildError, Rank};
use kvbm_link::BindError;

/// A node daemon that does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// The manager cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The socket cannot be listened at.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The daemon at the socket does not hand its host memory over.
    #[error("cannot take over from the daemon at {socket}: {reason}")]
    TakeOver {
        /// The socket.
        socket: String,
        /// Why.
        reason: String,
    },
    /// The memory of a rank cannot be passed on.
    #[error("host memory of rank {rank}: {reason}")]
    Memory {
        /// The rank.
        rank: usize,
        /// Why.
        reason: String,
    },
}

/// A call of an engine that the daemon did not carry out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// There is no daemon, or the engine's movers are not ready: serve without cache until it is
    /// back.
    #[error("not attached to the daemon at {socket}: {reason}")]
    Detached {
        /// Its socket.
        socket: String,
        /// What the last try came to.
        reason: String,
    },
    /// The daemon did not answer in time.
    #[error("the daemon did not answer within {} ms: it is stopped or overloaded", .0.as_millis())]
    Late(std::time::Duration),
    /// The daemon refuses the call.
    #[error("the daemon refuses: {0}")]
    Refused(String),
    /// This process has no scheduler's line.
    #[error("this process has no scheduler: attach with one to make calls")]
    NoScheduler,
    /// Memory of a rank that is not that of the engine's cache groups.
    #[error(
        "blocks of {found} cache groups on rank {rank}, and the engine has {needed}: give one layout for each"
    )]
    Groups {
        /// The rank.
        rank: Rank,
        /// Groups of the memory.
        found: usize,
        /// Groups of the engine's terms.
        needed: usize,
    },
    /// The system refuses a thread or a descriptor.
    #[error("cannot attach: {0}")]
    System(String),
}

/// Blocks that a copy may still read or write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("copies may still touch {} blocks ({blocks:?}): wait again before reusing them", blocks.len())]
pub struct NotFree {
    /// The blocks.
    pub blocks: Vec<BlockId>,
}
