//! G1 in the engine's hands.
//!
//! vLLM, SGLang and TensorRT-LLM allocate the KV tensors and assign their block ids. Here nothing is allocated, evicted,
//! deduplicated or renamed in G1: the engine names blocks, kvbm copies them down and up.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `generations` | generations and holds of engine blocks | - |
//! | `onboard` | an onboard into engine blocks | - |

mod generations;
mod onboard;

use crate::config::ONLY_GROUP;
use crate::manager::KvBlockManager;
use crate::onboard::PrefixTransfer;
use crate::transfers::{Check, Destination, Move, Purpose, Request};
pub use generations::NoSuchBlock;
use generations::{Generations, Hold};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, NamespaceId, Tier};
use kvbm_pool::{AllocError, Arrival, Lost, Prefix};
use kvbm_tokens::BlockChain;
pub use onboard::{EngineOnboardError, EngineOnboarding};
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
        if self.leader.transfers.refuses_callers() {
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
            self.leader.transfers.count_lost(Lost { tier: Tier::G1 });
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
        let (offload, interval) = (&self.leader.offload, self.leader.offload.interval());
        let destination = Destination::Reserved { arrivals, places };
        let mut request = Request::new(Purpose::Offload, Tier::G2, moves, destination, losses)
            .hold(busy)
            .hold(offload.running(interval, started.started));
        request.check = Some(self.still_the_same(read, "was reused while it was read"));
        request.on_arrival = Some(offload.on_arrival(Some(interval)));
        self.leader.transfers.start(request).detach();
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
    fn still_the_same(&self, holds: Vec<Hold>, otherwise: &'static str) -> Check {
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
        // Offloads all of whose sources are among these: what has not started never will.
        let reason = Failure::new(FailureKind::Cancelled, "the engine reuses the block");
        let reused = ids.iter().copied().collect();
        self.leader.transfers.cancel_reads(Tier::G1, &reused, &reason);
        match self.g1.blocks.wait_idle(ids, deadline) {
            busy if busy.is_empty() => Ok(()),
            blocks => Err(StillBusy { blocks }),
        }
    }

    /// Copies a prefix into engine blocks: listed block `i` of the prefix into `ids[i]`. They are the transfer's until it is over, also where
    /// nobody waits for it any more or it was late: see [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard(&self, prefix: Prefix, ids: &[BlockId]) -> Result<EngineOnboarding, EngineError> {
        self.check(ids)?;
        if !self.leader.registry.owns_prefix(&prefix) {
            return Err(EngineError::ForeignPrefix);
        }
        if ids.len() != prefix.blocks().len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: prefix.blocks().len() });
        }
        let transfers = &self.leader.transfers;
        if transfers.refuses_callers() {
            return Err(EngineError::ShuttingDown);
        }
        let losses = self.leader.registry.losses();
        if let Some(lost) = prefix.lost() {
            transfers.count_lost(lost);
            return Err(EngineError::LostPrefix(lost));
        }
        let mut transfer = PrefixTransfer::new(&self.leader, prefix);
        let moves: Vec<_> = ids.iter().enumerate().map(|(at, &dst)| transfer.to(at, dst)).collect();
        if moves.is_empty() {
            return Ok(EngineOnboarding(transfer));
        }
        let holds = self.g1.blocks.begin_write(ids, losses).map_err(EngineError::Busy)?;
        let changed = "was given to another use while it was written";
        let check = self.still_the_same(holds.clone(), changed);
        let busy = Busy { blocks: Arc::clone(&self.g1.blocks), holds };
        let destination = Destination::Unregistered;
        let mut request = transfer.request(Purpose::EngineOnboard, moves, destination, losses).hold(busy);
        request.check = Some(check);
        transfer.handles.push(transfers.start(request));
        Ok(EngineOnboarding(transfer))
    }
}
