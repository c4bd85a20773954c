//! Saving a preempted sequence's private blocks.
//!
//! Blocks that a sequence computes and has not registered exist once. When the engine preempts the sequence, `park` moves
//! them to G2 as they are, the partial tail included, and `resume` brings them back. They are never registered or
//! shared: nobody else can find them, and dropping a [`Parked`] forgets them.

use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::leader::operation::{Destination, Move, Operation, Parts, Purpose, expired};
use crate::manager::{KvBlockManager, ONLY_GROUP, Owned};
use crate::signal::deadline;
use kvbm_plan::{BlockId, BlockIdentity, Failure, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{AllocError, BatchPosition, BlockBatch, G1, G2, Losses, Lost, Partial, Reset, SequenceError};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Private blocks of a preempted sequence, on G2.
#[derive(Debug)]
#[must_use = "dropping it forgets the sequence's private blocks"]
pub struct Parked {
    blocks: Arc<BlockBatch<G2, Reset>>,
    /// Names for the parked bytes: never registered, they only tie each slot to what was put there.
    names: Vec<BlockIdentity>,
    origin: BatchPosition,
}

/// Blocks that could not be parked or resumed.
#[derive(Debug, thiserror::Error)]
pub enum ParkError {
    /// The other tier has no room.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The bytes did not arrive.
    #[error("private blocks not moved: {}", FirstOf(.0))]
    Failed(Vec<BlockFailure>),
    /// The blocks cannot continue their sequence.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The blocks are another manager's.
    #[error("the blocks belong to another manager: give them to the one that they came from")]
    Foreign,
    /// What is in the blocks is gone.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The manager is shutting down.
    #[error("the manager is shutting down: recompute the sequence elsewhere")]
    ShuttingDown,
}

/// A park that failed; the blocks are where they were.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ParkRejected<B> {
    /// What was to be moved; `None` where a worker may still touch it, so that it comes back only when that is over.
    pub blocks: Option<B>,
    /// Why.
    #[source]
    pub error: ParkError,
}

impl Parked {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether no block was parked.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Where the blocks lie in their sequence.
    pub fn origin(&self) -> BatchPosition {
        self.origin
    }
}

impl KvBlockManager<Owned> {
    /// Moves a sequence's unregistered blocks to G2 and frees their G1 slots. Waits at most the transfer deadline.
    ///
    /// # Errors
    /// The blocks come back with the reason: [`ParkError::Lost`] where G1 lost what it held since they were allocated.
    pub fn park(
        &self,
        blocks: BlockBatch<G1, Partial>,
    ) -> Result<Parked, ParkRejected<BlockBatch<G1, Partial>>> {
        if !self.leader.registry.owns_blocks(&blocks) {
            return Err(ParkRejected { blocks: Some(blocks), error: ParkError::Foreign });
        }
        if let Err(lost) = self.leader.check_lost(Tier::G1, blocks.losses()) {
            return Err(ParkRejected { blocks: Some(blocks), error: lost.into() });
        }
        let origin = blocks.origin();
        let host =
            match self.leader.registry.pool::<G2>().get_mutable_blocks_for(origin.namespace, blocks.len()) {
                Ok(host) => Arc::new(host),
                Err(error) => {
                    self.leader.count_refusal(origin.namespace, &error);
                    return Err(ParkRejected { blocks: Some(blocks), error: error.into() });
                }
            };
        let names = private_names(blocks.len());
        let losses = blocks.losses();
        let source = Arc::new(blocks);
        let moves = moves(&names, Tier::G1, source.block_ids(), host.block_ids());
        let moved = self.leader.move_private(
            Tier::G2,
            moves,
            losses,
            vec![Box::new(Arc::clone(&source)), Box::new(Arc::clone(&host))],
        );
        match moved {
            Ok(()) => Ok(Parked { blocks: host, names, origin }),
            Err(error) => Err(ParkRejected { blocks: Arc::into_inner(source), error }),
        }
    }

    /// Brings parked blocks back to G1, where their sequence goes on. Waits at most the transfer deadline.
    ///
    /// # Errors
    /// The blocks stay parked, and come back with the reason: [`ParkError::Lost`] where G2 lost what it held since they were parked.
    pub fn resume(&self, parked: Parked) -> Result<BlockBatch<G1, Partial>, ParkRejected<Parked>> {
        if !self.leader.registry.owns_blocks(&parked.blocks) {
            return Err(ParkRejected { blocks: Some(parked), error: ParkError::Foreign });
        }
        let losses = parked.blocks.losses();
        if let Err(lost) = self.leader.check_lost(Tier::G2, losses) {
            return Err(ParkRejected { blocks: Some(parked), error: lost.into() });
        }
        let pool = self.leader.registry.pool::<G1>();
        let device = match pool.get_mutable_blocks_for(parked.origin.namespace, parked.len()) {
            Ok(device) => Arc::new(device),
            Err(error) => {
                self.leader.count_refusal(parked.origin.namespace, &error);
                return Err(ParkRejected { blocks: Some(parked), error: error.into() });
            }
        };
        let moves = moves(&parked.names, Tier::G2, parked.blocks.block_ids(), device.block_ids());
        let keep: Vec<Box<dyn Any + Send>> =
            vec![Box::new(Arc::clone(&parked.blocks)), Box::new(Arc::clone(&device))];
        if let Err(error) = self.leader.move_private(Tier::G1, moves, losses, keep) {
            return Err(ParkRejected { blocks: Some(parked), error });
        }
        let BatchPosition { namespace, group, position } = parked.origin;
        match Arc::into_inner(device).map(|device| device.init_sequence(namespace, group, position)) {
            Some(Ok(blocks)) => Ok(blocks),
            Some(Err(rejected)) => Err(ParkRejected { blocks: Some(parked), error: rejected.error.into() }),
            None => Err(ParkRejected { blocks: Some(parked), error: ParkError::Failed(Vec::new()) }),
        }
    }
}

impl Leader {
    /// Moves blocks that stay private, and waits.
    fn move_private(
        self: &Arc<Self>,
        to: Tier,
        moves: Vec<Move>,
        losses: Losses,
        keep: Vec<Box<dyn Any + Send>>,
    ) -> Result<(), ParkError> {
        if self.is_turned_away() {
            return Err(ParkError::ShuttingDown);
        }
        if moves.is_empty() {
            return Ok(());
        }
        let all = moves.clone();
        let parts = Parts {
            moves,
            destination: Destination::Unregistered,
            losses,
            keep,
            source_check: None,
            round: None,
            volume: None,
        };
        let prepared = self.prepare(Purpose::Private, to, parts);
        let operation = Arc::clone(prepared.operation());
        self.send(prepared);
        if let Err(reason) = self.await_operation(&operation, "private blocks") {
            let failed = all.iter().map(|step| step.failed(to, reason.clone()));
            return Err(ParkError::Failed(failed.collect()));
        }
        // Whatever else is told of them: nothing could bring them back.
        if let Some(from) = all.first().map(|step| step.from) {
            self.check_lost(from, losses)?;
        }
        operation.with_outcome(|outcome| match outcome.failures.as_slice() {
            [] => Ok(()),
            failures => Err(ParkError::Failed(failures.to_vec())),
        })
    }
}

impl Leader {
    /// Waits until the operation has an outcome: its own, or that it is late.
    ///
    /// # Errors
    /// It has none, although it should: what became of it is not known, so it counts as failed.
    pub(crate) fn await_operation(&self, operation: &Arc<Operation>, what: &str) -> Result<(), Failure> {
        /// Between the last answer and the outcome lies bookkeeping, no transfer.
        const SETTLEMENT: Duration = Duration::from_secs(10);
        if !operation.settled.wait_until(operation.deadline) {
            let late = expired(what, operation.limit);
            self.keep_arrived(operation);
            self.abandon(operation, &late);
            if !operation.settled.wait_until(deadline(SETTLEMENT)) {
                return Err(late);
            }
        }
        Ok(())
    }
}

fn moves(names: &[BlockIdentity], from: Tier, src: &[BlockId], dst: &[BlockId]) -> Vec<Move> {
    let ends = src.iter().zip(dst);
    names.iter().zip(ends).map(|(&identity, (&src, &dst))| Move { identity, from, src, dst }).collect()
}

/// Names that no registered block has: a counter of this process, in a namespace of zeros.
fn private_names(count: usize) -> Vec<BlockIdentity> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let first = NEXT.fetch_add(count as u64, Ordering::Relaxed);
    let name = |number: u64| {
        let mut bytes = *b"private:\0\0\0\0\0\0\0\0";
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        BlockIdentity {
            namespace: NamespaceId(0),
            group: ONLY_GROUP,
            hash: SequenceHash::from_bytes(bytes),
            parent: None,
            position: 0,
        }
    };
    (first..first + count as u64).map(name).collect()
}
