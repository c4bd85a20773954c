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
//! | `tickets` | requests and what they were promised | `promises`, `answers` |
//! | `promises` | pinned blocks of each cache group, and their loads | `onboard` |
//! | `answers` | what callers of tickets are told | - |
//! | `onboard` | an onboard into engine blocks | `generations`, `offload` |
//! | `park` | private blocks of preempted requests | `generations`, `offload` |
//! | `offload` | an offload of engine blocks | `generations` |
//! | `generations` | generations and holds of engine blocks | - |

mod answers;
mod generations;
mod offload;
mod onboard;
mod park;
mod promises;
mod tickets;

use crate::manager::{FenceError, KvBlockManager};
use crate::park::ParkError;
use crate::signal::Signal;
use crate::transfers::Check;
pub use answers::{FinishedLoad, LookUp, TicketError};
pub use generations::NoSuchBlock;
use generations::{Generations, Hold};
use kvbm_plan::{BlockId, Comparison, Failure, FailureKind, Tier};
use kvbm_pool::{AllocError, Lost, Prefix};
pub use offload::{OffloadOptions, OffloadStarted, RefusedBlock};
pub use onboard::{EngineOnboardError, EngineOnboarding, LoadOptions};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;
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

impl KvBlockManager<Engine> {
    /// Names a point behind everything that the engine has submitted to its streams so far:
    /// `events`, one per rank in order. An [`offload`](Self::offload) of blocks that the engine has
    /// just computed waits for it.
    ///
    /// # Errors
    /// Not one event for each rank, or the workers are in other processes.
    #[cfg(feature = "worker")]
    pub fn fence(&self, events: &[kvbm_device::Event]) -> Result<Fence, FenceError> {
        self.register_fence(events)
    }

    /// Like `fence`, for workers in other processes: every rank's worker knows its device event
    /// under `number`, or will know it.
    ///
    /// # Errors
    /// A number that is not above all earlier ones, or the workers are in this process.
    pub fn fence_at(&self, number: u64) -> Result<Fence, FenceError> {
        self.numbered_fence(number)
    }

    /// Host memory that other processes map, by rank, and the blocks of G2 in it, for
    /// [`Builder::keep_host`](crate::Builder::keep_host) of another process. Call it when this
    /// manager was [shut down](Self::shutdown): what changes later is not in it.
    #[cfg(feature = "worker")]
    pub fn kept_host(&self) -> Vec<crate::KeptHost> {
        let (blocks, _) = self.leader.registry.snapshot(Tier::G2);
        let held: HashSet<_> = blocks.into_iter().collect();
        let mut ranks: Vec<_> = self.workers.iter().filter_map(crate::Worker::kept_host).collect();
        for rank in &mut ranks {
            rank.contents.retain(|content| held.contains(&(content.block, content.identity)));
        }
        ranks
    }

    /// Ids that exist, each once.
    fn check(&self, ids: &[BlockId]) -> Result<(), EngineError> {
        self.g1.blocks.check(ids)?;
        let mut seen = HashSet::with_capacity(ids.len());
        match ids.iter().find(|id| !seen.insert(id.0)) {
            Some(&twice) => Err(EngineError::NamedTwice(twice)),
            None => Ok(()),
        }
    }

    /// The engine has no more use for the content of these blocks. Copies under way are discarded
    /// when they are over. The blocks that the hardware still touches are returned: wait with
    /// [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        Ok(self.g1.blocks.busy(ids))
    }

    /// Makes sure that these blocks can be overwritten: copies under way are discarded, and the
    /// call returns when the hardware no longer touches the blocks. What is in them from now on is
    /// what the engine computes after this: where G1 was lost, they can be offloaded again.
    ///
    /// # Errors
    /// What is still busy at `deadline`; an id beyond the registered memory is never busy.
    pub fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), StillBusy> {
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        // Offloads all of whose sources are among these: what has not started never will.
        let reason = Failure::new(FailureKind::Cancelled, "the engine reuses the block");
        let reused = ids.iter().copied().collect();
        self.leader.transfers.cancel_reads(Tier::G1, &reused, &reason);
        match self.g1.blocks.wait_idle(ids, deadline) {
            busy if busy.is_empty() => Ok(()),
            blocks => Err(StillBusy { blocks }),
        }
    }

    /// Those of `ids` that a copy may still read or write.
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn busy(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        Ok(self.g1.blocks.busy(ids))
    }

    /// Copies a prefix into engine blocks: listed block `i` of the prefix into `ids[i]`. The copy
    /// waits for `after`, where the engine may still read what is in these blocks now. They are the
    /// transfer's until it is over, also where nobody waits for it any more or it was late: see
    /// [`busy`](Self::busy). What came from below G2 is copied to G2 too.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard(
        &self,
        prefix: Prefix,
        ids: &[BlockId],
        after: Option<Fence>,
    ) -> Result<EngineOnboarding, EngineError> {
        self.onboard_with(prefix, ids, LoadOptions { after, ..LoadOptions::default() })
    }

    /// Like [`onboard`](Self::onboard), with what [`LoadOptions`] say.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard_with(
        &self,
        prefix: Prefix,
        ids: &[BlockId],
        options: LoadOptions,
    ) -> Result<EngineOnboarding, EngineError> {
        self.start(prefix, ids, options, None)
    }

    /// Starts an onboard, or a comparison.
    fn start(
        &self,
        prefix: Prefix,
        ids: &[BlockId],
        options: LoadOptions,
        compare: Option<Comparison>,
    ) -> Result<EngineOnboarding, EngineError> {
        self.check(ids)?;
        if !self.leader.registry.owns_prefix(&prefix) {
            return Err(EngineError::ForeignPrefix);
        }
        if ids.len() != prefix.blocks().len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: prefix.blocks().len() });
        }
        if self.leader.transfers.refuses_callers() {
            return Err(EngineError::ShuttingDown);
        }
        let losses = self.leader.registry.losses();
        if let Some(lost) = prefix.lost() {
            self.leader.transfers.count_lost(lost);
            return Err(EngineError::LostPrefix(lost));
        }
        EngineOnboarding::start(&self.leader, &self.g1.blocks, prefix, ids, losses, options, compare)
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
