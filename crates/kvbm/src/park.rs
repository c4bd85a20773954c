//! Saving a preempted sequence's private blocks.
//!
//! Blocks that a sequence computes and has not registered exist once. When the engine preempts the
//! sequence, `park` moves them to G2 as they are, the partial tail included, and `resume` brings
//! them back. They are never registered or shared: nobody else can find them, and dropping a
//! [`Parked`] forgets them.

use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::manager::{KvBlockManager, Owned};
use crate::transfers::{Destination, Move, Purpose, Request};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{AllocError, BatchPosition, BlockBatch, G1, G2, Losses, Lost, Partial, Reset, SequenceError};
use std::any::Any;
use std::sync::Arc;

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
    /// What was to be moved; `None` where a worker may still touch it, so that it comes back only
    /// when that is over.
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
    /// Moves a sequence's unregistered blocks to G2 and frees their G1 slots. Waits at most the
    /// transfer deadline.
    ///
    /// # Errors
    /// The blocks come back with the reason: [`ParkError::Lost`] where G1 lost what it held since
    /// they were allocated.
    pub fn park(
        &self,
        blocks: BlockBatch<G1, Partial>,
    ) -> Result<Parked, ParkRejected<BlockBatch<G1, Partial>>> {
        if !self.leader.registry.owns_blocks(&blocks) {
            return Err(ParkRejected { blocks: Some(blocks), error: ParkError::Foreign });
        }
        if let Err(lost) = self.leader.transfers.check_lost(Tier::G1, blocks.losses()) {
            return Err(ParkRejected { blocks: Some(blocks), error: lost.into() });
        }
        let origin = blocks.origin();
        let host =
            match self.leader.registry.pool::<G2>().get_mutable_blocks_for(origin.namespace, blocks.len()) {
                Ok(host) => Arc::new(host),
                Err(error) => {
                    self.leader.tenants.count_refusal(origin.namespace, &error);
                    return Err(ParkRejected { blocks: Some(blocks), error: error.into() });
                }
            };
        let first = self.leader.next_private(blocks.len());
        let names = private_names(origin.group, first, blocks.len());
        let losses = blocks.losses();
        let source = Arc::new(blocks);
        let moves = moves(&names, Tier::G1, source.block_ids(), host.block_ids());
        let ends = (Arc::clone(&source), Arc::clone(&host));
        let moved = move_private(&self.leader, Tier::G2, moves, losses, ends);
        match moved {
            Ok(()) => Ok(Parked { blocks: host, names, origin }),
            Err(error) => Err(ParkRejected { blocks: Arc::into_inner(source), error }),
        }
    }

    /// Brings parked blocks back to G1, where their sequence goes on. Waits at most the transfer
    /// deadline.
    ///
    /// # Errors
    /// The blocks stay parked, and come back with the reason: [`ParkError::Lost`] where G2 lost
    /// what it held since they were parked.
    pub fn resume(&self, parked: Parked) -> Result<BlockBatch<G1, Partial>, ParkRejected<Parked>> {
        if !self.leader.registry.owns_blocks(&parked.blocks) {
            return Err(ParkRejected { blocks: Some(parked), error: ParkError::Foreign });
        }
        let losses = parked.blocks.losses();
        if let Err(lost) = self.leader.transfers.check_lost(Tier::G2, losses) {
            return Err(ParkRejected { blocks: Some(parked), error: lost.into() });
        }
        let pool = self.leader.registry.pool::<G1>();
        let device = match pool.get_mutable_blocks_for(parked.origin.namespace, parked.len()) {
            Ok(device) => Arc::new(device),
            Err(error) => {
                self.leader.tenants.count_refusal(parked.origin.namespace, &error);
                return Err(ParkRejected { blocks: Some(parked), error: error.into() });
            }
        };
        let moves = moves(&parked.names, Tier::G2, parked.blocks.block_ids(), device.block_ids());
        let ends = (Arc::clone(&parked.blocks), Arc::clone(&device));
        if let Err(error) = move_private(&self.leader, Tier::G1, moves, losses, ends) {
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

/// Moves blocks that stay private, and waits. `ends` is held until no worker touches the blocks.
fn move_private(
    leader: &Leader,
    to: Tier,
    moves: Vec<Move>,
    losses: Losses,
    ends: impl Any + Send,
) -> Result<(), ParkError> {
    let transfers = &leader.transfers;
    if transfers.refuses_callers() {
        return Err(ParkError::ShuttingDown);
    }
    let Some(from) = moves.first().map(|block| block.from) else { return Ok(()) };
    let request = Request::new(Purpose::Private, to, moves, Destination::Unregistered, losses).hold(ends);
    let handle = transfers.start(request);
    handle.wait("private blocks").map_err(|late| ParkError::Failed(handle.failures(&late)))?;
    // Before any other failure: nothing could bring the blocks back.
    transfers.check_lost(from, losses)?;
    handle.with_outcome(|outcome| match outcome.failures.as_slice() {
        [] => Ok(()),
        failures => Err(ParkError::Failed(failures.to_vec())),
    })
}

fn moves(names: &[BlockIdentity], from: Tier, src: &[BlockId], dst: &[BlockId]) -> Vec<Move> {
    let ends = src.iter().zip(dst);
    names.iter().zip(ends).map(|(&identity, (&src, &dst))| Move { identity, from, src, dst }).collect()
}

/// So many names from number `first` on that no registered block has, in a namespace of zeros.
fn private_names(group: GroupId, first: u64, count: usize) -> Vec<BlockIdentity> {
    let name = |number: u64| {
        let mut bytes = *b"private:\0\0\0\0\0\0\0\0";
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        BlockIdentity {
            namespace: NamespaceId(0),
            group,
            hash: SequenceHash::from_bytes(bytes),
            parent: None,
            position: 0,
        }
    };
    (first..first + count as u64).map(name).collect()
}
