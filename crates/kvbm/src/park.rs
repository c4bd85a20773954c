//! Saving a preempted sequence's private blocks.
//!
//! Blocks that a sequence computes and has not registered exist once. When the engine preempts the
//! sequence, `park` moves them to G2 as they are, the partial tail included, and `resume` brings
//! them back. They are never registered or shared: nobody else can find them, and dropping a
//! [`Parked`] forgets them.

use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::transfers::{Check, Destination, Fence, Move, Purpose, Request};
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
pub struct ParkRejected<B, E: std::error::Error + 'static = ParkError> {
    /// What was to be moved; `None` where a worker may still touch it, so that it comes back only
    /// when that is over.
    pub blocks: Option<B>,
    /// Why.
    #[source]
    pub error: E,
}

/// The end of a move of private blocks that is on G1, whosever G1 is.
pub(crate) struct OnG1<'a> {
    pub(crate) ids: &'a [BlockId],
    /// See [`Request::fence`] and [`Request::check`].
    pub(crate) fence: Option<Fence>,
    pub(crate) check: Option<Check>,
    /// Held until no worker touches the blocks.
    pub(crate) hold: Box<dyn Any + Send>,
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

    /// Copies private blocks of G1 to G2, and waits. `losses`: read before the blocks were
    /// computed.
    pub(crate) fn save(
        leader: &Leader,
        origin: BatchPosition,
        losses: Losses,
        from: OnG1<'_>,
    ) -> Result<Self, ParkError> {
        let count = from.ids.len();
        let host = leader.registry.pool::<G2>().get_mutable_blocks_for(origin.namespace, count);
        let host = host.inspect_err(|error| leader.tenants.count_refusal(origin.namespace, error))?;
        let names = private_names(origin.group, leader.next_private(count), count);
        let parked = Self { blocks: Arc::new(host), names, origin };
        let moves = moves(&parked.names, Tier::G1, from.ids, parked.blocks.block_ids());
        move_private(leader, Tier::G2, moves, losses, &parked.blocks, from)?;
        Ok(parked)
    }

    /// Copies them back to G1, and waits. They stay parked, too.
    pub(crate) fn load(&self, leader: &Leader, to: OnG1<'_>) -> Result<(), ParkError> {
        let moves = moves(&self.names, Tier::G2, self.blocks.block_ids(), to.ids);
        move_private(leader, Tier::G1, moves, self.blocks.losses(), &self.blocks, to)
    }

    /// Whether they can be brought back by this leader.
    pub(crate) fn check(&self, leader: &Leader) -> Result<(), ParkError> {
        if !leader.registry.owns_blocks(&self.blocks) {
            return Err(ParkError::Foreign);
        }
        Ok(leader.transfers.check_lost(Tier::G2, self.blocks.losses())?)
    }

    /// Moves a batch of G1 to G2, and waits. The blocks come back where that fails.
    pub(crate) fn of_batch(
        leader: &Leader,
        blocks: BlockBatch<G1, Partial>,
    ) -> Result<Self, ParkRejected<BlockBatch<G1, Partial>>> {
        if !leader.registry.owns_blocks(&blocks) {
            return Err(ParkRejected { blocks: Some(blocks), error: ParkError::Foreign });
        }
        let (origin, losses) = (blocks.origin(), blocks.losses());
        if let Err(lost) = leader.transfers.check_lost(Tier::G1, losses) {
            return Err(ParkRejected { blocks: Some(blocks), error: lost.into() });
        }
        let source = Arc::new(blocks);
        let hold = Box::new(Arc::clone(&source));
        let from = OnG1 { ids: source.block_ids(), fence: None, check: None, hold };
        Self::save(leader, origin, losses, from)
            .map_err(|error| ParkRejected { blocks: Arc::into_inner(source), error })
    }

    /// Moves the blocks to a batch of G1, and waits. They stay parked where that fails.
    pub(crate) fn into_batch(self, leader: &Leader) -> Result<BlockBatch<G1, Partial>, ParkRejected<Self>> {
        if let Err(error) = self.check(leader) {
            return Err(ParkRejected { blocks: Some(self), error });
        }
        let device = match leader.allocate(self.origin.namespace, self.len()) {
            Ok(device) => Arc::new(device),
            Err(error) => return Err(ParkRejected { blocks: Some(self), error: error.into() }),
        };
        let hold = Box::new(Arc::clone(&device));
        let to = OnG1 { ids: device.block_ids(), fence: None, check: None, hold };
        if let Err(error) = self.load(leader, to) {
            return Err(ParkRejected { blocks: Some(self), error });
        }
        let BatchPosition { namespace, group, position } = self.origin;
        match Arc::into_inner(device).map(|device| device.init_sequence(namespace, group, position)) {
            Some(Ok(blocks)) => Ok(blocks),
            Some(Err(rejected)) => Err(ParkRejected { blocks: Some(self), error: rejected.error.into() }),
            None => Err(ParkRejected { blocks: Some(self), error: ParkError::Failed(Vec::new()) }),
        }
    }
}

/// Moves blocks that stay private, and waits. Both ends are held until no worker touches them.
fn move_private(
    leader: &Leader,
    to: Tier,
    moves: Vec<Move>,
    losses: Losses,
    host: &Arc<BlockBatch<G2, Reset>>,
    on_g1: OnG1<'_>,
) -> Result<(), ParkError> {
    let transfers = &leader.transfers;
    if transfers.refuses_callers() {
        return Err(ParkError::ShuttingDown);
    }
    let Some(from) = moves.first().map(|block| block.from) else { return Ok(()) };
    let mut request = Request::new(Purpose::Private, to, moves, Destination::Unregistered, losses);
    (request.fence, request.check) = (on_g1.fence, on_g1.check);
    request.holds.extend([Box::new(Arc::clone(host)) as Box<dyn Any + Send>, on_g1.hold]);
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
