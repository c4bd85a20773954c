//! G1 in the engine's hands.
//!
//! vLLM, SGLang and TensorRT-LLM allocate the KV tensors and assign their block ids. Here nothing is allocated, evicted,
//! deduplicated or renamed in G1: the engine names blocks, kvbm copies them down and up.

mod generations;

use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::leader::operation::{
    Destination, Interest, Move, Operation, Parts, Purpose, SourceCheck, expired,
};
use crate::manager::{KvBlockManager, ONLY_GROUP};
pub use generations::NoSuchBlock;
use generations::{Generations, Hold};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, NamespaceId, Tier};
use kvbm_pool::{AllocError, Arrival, Prefix};
use kvbm_tokens::BlockChain;
use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
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
    /// G2 has no room.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// There is no tier to copy to.
    #[error("no host tier is configured: set host.capacity")]
    NoHost,
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

/// A prefix on its way into engine blocks. Resolves by [`wait`](Self::wait) or as a [`Future`].
///
/// Dropping it cancels what has not started and detaches what has: the blocks stay busy until the hardware is done
/// ([`KvBlockManager::before_reuse`]).
#[must_use = "dropping it cancels the onboard"]
pub struct EngineOnboarding {
    leader: Arc<Leader>,
    prefix: Arc<Prefix>,
    interest: Option<Interest>,
}

/// A prefix that did not arrive whole: the first `arrived` blocks hold verified bytes, recompute the others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{arrived} of {wanted} blocks arrived: {}", FirstOf(failures))]
pub struct EngineOnboardError {
    /// Blocks from the front that are complete and verified.
    pub arrived: usize,
    /// Blocks asked for.
    pub wanted: usize,
    /// The others.
    pub failures: Vec<BlockFailure>,
}

/// Counts an offload among those that [`KvBlockManager::wait_offloads`] waits for.
struct Outstanding {
    leader: Arc<Leader>,
    blocks: usize,
}

impl Outstanding {
    fn new(leader: &Arc<Leader>, blocks: usize) -> Self {
        leader.offloads.add(blocks);
        Self { leader: Arc::clone(leader), blocks }
    }
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        self.leader.offloads.remove(self.blocks);
    }
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
    /// The blocks must hold their final bytes once the events of the last [`fence`](Self::fence) are complete. A block whose
    /// content may have changed before its copy was over ([`released`](Self::released), [`before_reuse`](Self::before_reuse),
    /// an onboard into it) is not made visible.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<OffloadStarted, EngineError> {
        self.g1.blocks.check(ids)?;
        let chain = chain.into();
        let part = chain.slice(first..first.saturating_add(ids.len()));
        if part.len() != ids.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: part.len() });
        }
        if self.leader.registry.capacity(Tier::G2) == 0 {
            return Err(EngineError::NoHost);
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
        self.start_offload(ids, &identities)
    }

    fn start_offload(
        &self,
        ids: &[BlockId],
        identities: &[BlockIdentity],
    ) -> Result<OffloadStarted, EngineError> {
        let arrivals = self.leader.registry.begin_arrivals(Tier::G2, identities)?;
        let mut started = OffloadStarted::default();
        let (mut moves, mut places) = (Vec::new(), Vec::new());
        for (index, arrival) in arrivals.arrivals().iter().enumerate() {
            match *arrival {
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(Move { identity: identities[index], from: Tier::G1, src: ids[index], dst });
                    places.push(index);
                }
                Arrival::Refused(_) => started.refused += 1,
                _ => started.present += 1,
            }
        }
        started.started = moves.len();
        if moves.is_empty() {
            return Ok(started);
        }
        let holds = self.g1.blocks.begin_read(moves.iter().map(|step| step.src));
        let source_check = Some(self.source_check(holds.clone()));
        let busy = Busy { blocks: Arc::clone(&self.g1.blocks), holds };
        let destination = Destination::Reserved { arrivals, places };
        let outstanding = Outstanding::new(&self.leader, moves.len());
        let keep: Vec<Box<dyn Any + Send>> = vec![Box::new(busy), Box::new(outstanding)];
        let parts = Parts { moves, destination, keep, source_check };
        let prepared = self.leader.prepare(Purpose::Offload, Tier::G2, parts);
        self.leader.send(prepared);
        Ok(started)
    }

    fn source_check(&self, holds: Vec<Hold>) -> SourceCheck {
        let blocks = Arc::clone(&self.g1.blocks);
        Box::new(move |index| {
            let hold = holds.get(index)?;
            let reused = || format!("engine block {} was reused while it was read", hold.block);
            (!blocks.is_valid(*hold)).then(|| Failure::new(FailureKind::Missing, reused()))
        })
    }

    /// Brings a prefix into engine blocks: block `i` of the prefix into `ids[i]`.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard(&self, prefix: Prefix, ids: &[BlockId]) -> Result<EngineOnboarding, EngineError> {
        self.g1.blocks.check(ids)?;
        if ids.len() != prefix.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: prefix.len() });
        }
        if self.leader.is_turned_away() {
            return Err(EngineError::ShuttingDown);
        }
        let identities = prefix.identities();
        let sources = prefix.blocks().iter().zip(&identities).zip(ids);
        let moves: Vec<_> = sources
            .map(|((block, &identity), &dst)| Move { identity, from: block.tier, src: block.block, dst })
            .collect();
        let prefix = Arc::new(prefix);
        let mut onboarding = EngineOnboarding {
            leader: Arc::clone(&self.leader),
            prefix: Arc::clone(&prefix),
            interest: None,
        };
        if moves.is_empty() {
            return Ok(onboarding);
        }
        let holds = self.g1.blocks.begin_write(ids.iter().copied());
        let busy = Busy { blocks: Arc::clone(&self.g1.blocks), holds };
        let keep: Vec<Box<dyn Any + Send>> = vec![Box::new(prefix), Box::new(busy)];
        let parts = Parts { moves, destination: Destination::Unregistered, keep, source_check: None };
        let prepared = self.leader.prepare(Purpose::Private, Tier::G1, parts);
        onboarding.interest = Some(prepared.operation().interest());
        self.leader.send(prepared);
        Ok(onboarding)
    }

    /// The engine has no more use for the content of these blocks. Copies under way are discarded when they are over. The
    /// blocks that the hardware still touches are returned: wait with [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        self.g1.blocks.invalidate(ids);
        Ok(self.g1.blocks.busy(ids))
    }

    /// Makes sure that these blocks can be overwritten: copies under way are discarded, and the call returns when the hardware
    /// no longer touches the blocks.
    ///
    /// # Errors
    /// What is still busy at `deadline`; an id beyond the registered memory is never busy.
    pub fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), StillBusy> {
        self.g1.blocks.invalidate(ids);
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
        for operation in self.operations(|operation| operation.reads_only(Tier::G1, ids)) {
            self.abandon(&operation, &reason);
        }
    }
}

impl EngineOnboarding {
    /// Blocks asked for.
    pub fn len(&self) -> usize {
        self.prefix.len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.operation().is_none_or(|operation| operation.settled.is_set())
    }

    /// Waits at most the configured transfer deadline. How many blocks arrived: all.
    ///
    /// # Errors
    /// [`EngineOnboardError`] says how many blocks from the front did arrive.
    pub fn wait(mut self) -> Result<usize, EngineOnboardError> {
        if let Some(operation) = self.operation()
            && !operation.settled.wait_until(operation.deadline)
        {
            let limit = self.leader.settings.transfer_deadline;
            self.leader.abandon(operation, &expired("onboard", limit));
        }
        self.resolve()
    }

    fn operation(&self) -> Option<&Arc<Operation>> {
        self.interest.as_ref().map(|interest| &interest.operation)
    }

    fn resolve(&mut self) -> Result<usize, EngineOnboardError> {
        let wanted = self.prefix.len();
        let failures = match self.interest.take() {
            Some(Interest { operation }) => operation.with_outcome(|outcome| outcome.failures.clone()),
            None => Vec::new(),
        };
        let first_bad = failures.iter().map(|failure| failure.identity.position as usize).min();
        let arrived = first_bad.unwrap_or(wanted);
        self.leader.count_hits(&self.prefix, arrived);
        if failures.is_empty() { Ok(wanted) } else { Err(EngineOnboardError { arrived, wanted, failures }) }
    }
}

impl Future for EngineOnboarding {
    type Output = Result<usize, EngineOnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let pending = self.operation().is_some_and(|operation| operation.settled.poll(context).is_pending());
        if pending { Poll::Pending } else { Poll::Ready(self.resolve()) }
    }
}

impl Drop for EngineOnboarding {
    fn drop(&mut self) {
        let Some(interest) = self.interest.take() else { return };
        if interest.release() {
            let cancelled = Failure::new(FailureKind::Cancelled, "the onboard was dropped");
            self.leader.abandon(&interest.operation, &cancelled);
        }
    }
}

impl fmt::Debug for EngineOnboarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineOnboarding({} blocks, done: {})", self.len(), self.is_done())
    }
}
