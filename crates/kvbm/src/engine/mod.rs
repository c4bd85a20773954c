//! G1 in the engine's hands.
//!
//! vLLM, SGLang and TensorRT-LLM allocate the KV tensors and assign their block ids. Here nothing is allocated, evicted,
//! deduplicated or renamed in G1: the engine names blocks, kvbm copies them down and up.

mod generations;
mod onboard;

use crate::leader::Leader;
use crate::leader::offload::Running;
use crate::leader::operation::{Destination, Move, Parts, Purpose, SourceCheck};
use crate::manager::{KvBlockManager, ONLY_GROUP};
pub use generations::NoSuchBlock;
use generations::{Generations, Hold};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, NamespaceId, Tier};
use kvbm_pool::{AllocError, Arrival, Lost};
use kvbm_tokens::BlockChain;
pub use onboard::{EngineOnboardError, EngineOnboarding};
use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

/// G1 is memory that the engine allocated and whose blocks it names.
#[derive(Debug)]
pub struct Engine {
    pub(crate) blocks: Arc<Generations>,
}

impl Engine {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks: Arc::new(Generations::new(blocks)) }
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
    /// Blocks that have not been given to anything since a worker that has a part of them lost its memory.
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

/// What an offload of engine blocks began with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffloadStarted {
    /// Blocks that are being copied.
    pub started: usize,
    /// Blocks that G2 has, or is about to have.
    pub present: usize,
    /// Blocks that were not admitted: the block before them is not on G2 and not on its way there.
    pub refused: usize,
}

/// Ends the transfer's share in engine blocks when the hardware is done.
struct Busy {
    blocks: Arc<Generations>,
    holds: Vec<Hold>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.blocks.end(&self.holds);
    }
}

impl KvBlockManager<Engine> {
    /// Copies engine blocks to G2 in the background: `ids[i]` holds block `first + i` of `chain`, where `chain` begins at the
    /// sequence's first block and `first` is the position of the first id.
    ///
    /// The blocks must hold their final bytes once the events of the last `fence` are complete. A block whose
    /// content may have changed before its copy was over ([`released`](Self::released), [`before_reuse`](Self::before_reuse),
    /// an onboard into it) is not made visible.
    ///
    /// Where a worker starts anew, or a rank is given up, what G1 held is gone ([`rank_lost`](Self::rank_lost)): blocks are taken again
    /// that were given to something since ([`before_reuse`](Self::before_reuse), [`released`](Self::released), an onboard).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<OffloadStarted, EngineError> {
        self.check(ids)?;
        let chain = chain.into();
        let part = chain.slice(first..first.saturating_add(ids.len()));
        if part.len() != ids.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: part.len() });
        }
        if self.leader.is_turned_away() {
            return Err(EngineError::ShuttingDown);
        }
        let namespace = NamespaceId::from(part.namespace());
        let identities: Vec<_> = part
            .iter()
            .map(|link| BlockIdentity {
                namespace,
                group: ONLY_GROUP,
                hash: link.hash,
                parent: link.parent,
                position: link.position,
            })
            .collect();
        // What events will say of them, should they arrive.
        self.events.note(&chain, first, ids.len());
        self.start_offload(ids, &identities)
    }

    fn start_offload(
        &self,
        ids: &[BlockId],
        identities: &[BlockIdentity],
    ) -> Result<OffloadStarted, EngineError> {
        let losses = self.leader.registry.losses();
        let lost = self.g1.blocks.lost(ids, |since| self.leader.registry.is_lost(Tier::G1, since));
        if !lost.is_empty() {
            self.leader.count_lost(Lost { tier: Tier::G1 });
            return Err(EngineError::Lost(lost));
        }
        let holds = self.g1.blocks.begin_read(ids).map_err(EngineError::Busy)?;
        // Ends the reads wherever this ends, at the latest with the transfer.
        let busy = Busy { blocks: Arc::clone(&self.g1.blocks), holds };
        let arrivals = self.leader.registry.begin_arrivals(Tier::G2, identities)?;
        let mut started = OffloadStarted::default();
        let (mut moves, mut places, mut read) = (Vec::new(), Vec::new(), Vec::new());
        for (index, arrival) in arrivals.arrivals().iter().enumerate() {
            match *arrival {
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(Move { identity: identities[index], from: Tier::G1, src: ids[index], dst });
                    places.push(index);
                    read.push(busy.holds[index]);
                }
                Arrival::Refused(_) => started.refused += 1,
                _ => started.present += 1,
            }
        }
        started.started = moves.len();
        if moves.is_empty() {
            return Ok(started);
        }
        let reused = "was reused while it was read";
        let source_check = Some(self.still_the_same(read, reused));
        let destination = Destination::Reserved { arrivals, places };
        let round = self.leader.offloads.round();
        let running = Running::new(&self.leader, round, moves.len());
        let keep: Vec<Box<dyn Any + Send>> = vec![Box::new(busy), Box::new(running)];
        let round = Some(round);
        let parts = Parts { moves, destination, losses, keep, source_check, round, volume: None };
        let prepared = self.leader.prepare(Purpose::Offload, Tier::G2, parts);
        self.leader.send(prepared);
        Ok(started)
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

    /// A transfer between whose beginning and end an engine block may have changed is worth nothing.
    fn still_the_same(&self, holds: Vec<Hold>, otherwise: &'static str) -> SourceCheck {
        let blocks = Arc::clone(&self.g1.blocks);
        Box::new(move |index| {
            let hold = holds.get(index)?;
            let changed =
                || Failure::new(FailureKind::Cancelled, format!("engine block {} {otherwise}", hold.block));
            (!blocks.is_valid(*hold)).then(changed)
        })
    }

    /// The engine has no more use for the content of these blocks. Copies under way are discarded when they are over. The
    /// blocks that the hardware still touches are returned: wait with [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        Ok(self.g1.blocks.busy(ids))
    }

    /// Makes sure that these blocks can be overwritten: copies under way are discarded, and the call returns when the hardware
    /// no longer touches the blocks. What is in them from now on is what the engine computes after this: where G1 was lost, they can be
    /// offloaded again.
    ///
    /// # Errors
    /// What is still busy at `deadline`; an id beyond the registered memory is never busy.
    pub fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), StillBusy> {
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        self.leader.cancel_reads(ids);
        match self.g1.blocks.wait_idle(ids, deadline) {
            busy if busy.is_empty() => Ok(()),
            blocks => Err(StillBusy { blocks }),
        }
    }
}

impl Leader {
    /// Gives up offloads all of whose sources are among `ids`: what has not started never will.
    fn cancel_reads(&self, ids: &[BlockId]) {
        let reason = Failure::new(FailureKind::Cancelled, "the engine reuses the block");
        let ids = ids.iter().copied().collect();
        for operation in self.operations(|operation| operation.reads_only(Tier::G1, &ids)) {
            self.abandon(&operation, &reason);
        }
    }
}
