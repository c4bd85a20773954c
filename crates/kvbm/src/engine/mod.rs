//! G1 in the engine's hands.
//!
//! vLLM, SGLang and TensorRT-LLM allocate the KV tensors and assign their block ids. Here nothing
//! is allocated, evicted, deduplicated or renamed in G1: the engine names blocks, kvbm copies them
//! down and up.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `calls` | the calls of an engine | `tickets`, `onboard`, `park`, `offload`, `generations` |
//! | `tickets` | requests and what they were promised | `pinned_parts`, `answers`, `onboard` |
//! | `pinned_parts` | pinned blocks of each cache group, and their loads | `onboard` |
//! | `answers` | what callers of tickets are told | - |
//! | `onboard` | an onboard into engine blocks | `generations`, `offload` |
//! | `park` | private blocks of preempted requests | `generations`, `offload` |
//! | `offload` | an offload of engine blocks | `generations` |
//! | `generations` | generations and holds of engine blocks | - |

mod answers;
mod calls;
mod generations;
mod offload;
mod onboard;
mod park;
mod pinned_parts;
mod tickets;

use crate::park::ParkError;
use crate::signal::Signal;
use crate::transfers::Check;
pub use answers::{FinishedLoad, LookUp, TicketError};
pub use generations::NoSuchBlock;
use generations::{Generations, Hold};
use kvbm_plan::{BlockId, Failure, FailureKind};
use kvbm_pool::{AllocError, Lost};
pub use offload::{OffloadOptions, OffloadStarted, RefusedBlock};
pub use onboard::{EngineOnboardError, EngineOnboarding, LoadOptions};
use std::collections::HashSet;
use std::sync::Arc;
pub use tickets::Tickets;

/// G1 is memory that the engine allocated and whose blocks it names.
#[derive(Debug)]
pub struct Engine {
    pub(crate) blocks: Arc<Generations>,
    tickets: tickets::TicketTable,
}

impl Engine {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks: Arc::new(Generations::new(blocks)), tickets: tickets::TicketTable::default() }
    }

    /// Ids that exist, each once.
    fn check(&self, ids: &[BlockId]) -> Result<(), EngineError> {
        self.blocks.check(ids)?;
        let mut seen = HashSet::with_capacity(ids.len());
        match ids.iter().find(|id| !seen.insert(id.0)) {
            Some(&twice) => Err(EngineError::NamedTwice(twice)),
            None => Ok(()),
        }
    }
}

/// A request about the engine's blocks that cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An id beyond the registered memory.
    #[error(transparent)]
    NoSuchBlock(#[from] NoSuchBlock),
    /// Not one id for each block.
    #[error("{ids} engine blocks for {blocks} blocks of the sequence: give one id for each")]
    Count {
        /// Ids given.
        ids: usize,
        /// Blocks they should hold.
        blocks: usize,
    },
    /// Not a list of ids for each batch that was parked.
    #[error(
        "engine blocks for {lists} of {batches} batches that are parked: give a list for each (resume_groups)"
    )]
    Batches {
        /// Lists given.
        lists: usize,
        /// Batches that were parked together.
        batches: usize,
    },
    /// A block is named twice.
    #[error("engine block {0} is named twice: one block of the sequence has one place")]
    NamedTwice(BlockId),
    /// Blocks that another transfer writes.
    #[error("engine blocks {0:?} are being written: call before_reuse first")]
    Busy(Vec<BlockId>),
    /// Blocks that have not been given to anything since a worker that has a part of them lost its
    /// memory.
    #[error(
        "what was in engine blocks {0:?} is gone: G1 was lost since (a worker with a part of it started anew, or its rank was given up); \
         compute it again, in blocks for which before_reuse was called after that"
    )]
    Lost(Vec<BlockId>),
    /// The prefix was matched before a tier of it was lost.
    #[error("{} lost what it held since the prefix was matched (the memory of a worker is gone): match it again", .0.tier)]
    LostPrefix(Lost),
    /// The prefix is another manager's.
    #[error("the prefix was matched by another manager: match it again with this one")]
    ForeignPrefix,
    /// G2 has no room.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// Private blocks that could not be parked or resumed.
    #[error(transparent)]
    Private(#[from] ParkError),
    /// The manager is shutting down.
    #[error("the manager is shutting down: no transfer starts")]
    ShuttingDown,
}

/// Blocks that a transfer still touches: their memory must not be reused yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} blocks are still being read or written ({blocks:?}): wait again before reusing them", blocks.len())]
pub struct StillBusy {
    /// The blocks.
    pub blocks: Vec<BlockId>,
}

/// A device event behind everything that the engine had submitted, see `KvBlockManager::fence`.
pub use crate::transfers::Fence;

/// Ends the transfer's share in engine blocks when the hardware is done.
struct Busy {
    blocks: Arc<Generations>,
    holds: Vec<Hold>,
    /// Set then.
    over: Option<Arc<Signal>>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.blocks.end(&self.holds);
        if let Some(over) = &self.over {
            over.set();
        }
    }
}

/// A transfer between whose beginning and end an engine block may have changed is worth nothing.
fn still_the_same(blocks: &Arc<Generations>, holds: Vec<Hold>, otherwise: &'static str) -> Check {
    let blocks = Arc::clone(blocks);
    Box::new(move |index| {
        let hold = holds.get(index)?;
        let changed =
            || Failure::new(FailureKind::Cancelled, format!("engine block {} {otherwise}", hold.block));
        (!blocks.is_valid(*hold)).then(changed)
    })
}
