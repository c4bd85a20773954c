//! Saving a preempted sequence's private blocks.
//!
//! Blocks that a sequence computes and has not registered exist once. When the engine preempts the
//! sequence, `park` moves them to G2 as they are, the partial tail included, and `resume` brings
//! them back. They are never registered or shared: nobody else can find them, and dropping a
//! [`Parked`] forgets them.
//!
//! Of a model with several cache groups, the blocks of all groups of a request move as one transfer
//! ([`ParkedGroups`]). It counts when all of its blocks have arrived, so a request has all groups
//! or none.

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
    /// One batch, in a box: errors that give it back are small then.
    blocks: Box<ParkedGroups>,
    origin: BatchPosition,
}

/// Private blocks of a preempted request in its cache groups, on G2: all batches or none.
#[derive(Debug)]
#[must_use = "dropping it forgets the request's private blocks"]
pub struct ParkedGroups {
    /// Of all batches, one after another.
    blocks: Arc<BlockBatch<G2, Reset>>,
    /// Names for the parked bytes: never registered, they only tie each slot to what was put there.
    names: Vec<BlockIdentity>,
    batches: Vec<(BatchPosition, usize)>,
}

/// Blocks that could not be parked or resumed.
#[derive(Debug, thiserror::Error)]
pub enum ParkError {
    /// The other tier has no room.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// There is no host memory.
    #[error("private blocks are parked in host memory, and there is none: set host.capacity")]
    NoHostMemory,
    /// The bytes did not arrive.
    #[error("private blocks not moved: {}", FirstOf(.0))]
    Failed(Vec<BlockFailure>),
    /// The blocks cannot continue their sequence.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The blocks are another manager's.
    #[error("the blocks belong to another manager: give them to the one that they came from")]
    Foreign,
    /// The batches of one call belong to several namespaces.
    #[error(
        "the batches of one call belong to one request: park those of another namespace in a call of its own"
    )]
    Namespaces,
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
        self.blocks.len()
    }

    /// Whether no block was parked.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Where the blocks lie in their sequence.
    pub fn origin(&self) -> BatchPosition {
        self.origin
    }

    /// Its one batch.
    pub(crate) fn as_groups(&self) -> &ParkedGroups {
        &self.blocks
    }

    /// Copies private blocks of G1 to G2, and waits. `losses`: read before the blocks were
    /// computed.
    pub(crate) fn save(
        leader: &Leader,
        origin: BatchPosition,
        losses: Losses,
        from: OnG1<'_>,
    ) -> Result<Self, ParkError> {
        let batches = vec![(origin, from.ids.len())];
        Ok(Self { blocks: Box::new(ParkedGroups::save(leader, batches, losses, from)?), origin })
    }

    /// Moves a batch of G1 to G2, and waits. The blocks come back where that fails.
    pub(crate) fn of_batch(
        leader: &Leader,
        blocks: BlockBatch<G1, Partial>,
    ) -> Result<Self, ParkRejected<BlockBatch<G1, Partial>>> {
        let origin = blocks.origin();
        match ParkedGroups::of_batches(leader, vec![blocks]) {
            Ok(blocks) => Ok(Self { blocks: Box::new(blocks), origin }),
            Err(ParkRejected { blocks, error }) => {
                Err(ParkRejected { blocks: blocks.and_then(|mut one| one.pop()), error })
            }
        }
    }

    /// Moves the blocks to a batch of G1, and waits. They stay parked where that fails.
    pub(crate) fn into_batch(self, leader: &Leader) -> Result<BlockBatch<G1, Partial>, ParkRejected<Self>> {
        let one = self.blocks.to_batches(leader);
        let one = one.and_then(|mut one| one.pop().ok_or_else(|| ParkError::Failed(Vec::new())));
        one.map_err(|error| ParkRejected { blocks: Some(self), error })
    }
}

impl ParkedGroups {
    /// Number of blocks, of all batches.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether no block was parked.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Where each batch lies in its sequence, and its number of blocks, in the order in which they
    /// were parked.
    pub fn batches(&self) -> &[(BatchPosition, usize)] {
        &self.batches
    }

    /// Copies private blocks of G1 to G2, all or none, and waits. `from` has the ids of all
    /// batches, one batch after another. `losses`: read before the blocks were computed.
    pub(crate) fn save(
        leader: &Leader,
        batches: Vec<(BatchPosition, usize)>,
        losses: Losses,
        from: OnG1<'_>,
    ) -> Result<Self, ParkError> {
        let namespace = namespace_of(&batches)?;
        if leader.registry.capacity(Tier::G2) == 0 {
            return Err(ParkError::NoHostMemory);
        }
        let count = from.ids.len();
        let host = leader.registry.pool::<G2>().get_mutable_blocks_for(namespace, count);
        let host = host.inspect_err(|error| leader.tenants.count_refusal(namespace, error))?;
        let names = private_names(&batches, leader.next_private(count));
        let parked = Self { blocks: Arc::new(host), names, batches };
        let moves = moves(&parked.names, Tier::G1, from.ids, parked.blocks.block_ids());
        move_private(leader, Tier::G2, moves, losses, &parked.blocks, from)?;
        Ok(parked)
    }

    /// Copies them back to G1, all or none, and waits. They stay parked, too.
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

    /// Moves batches of G1 to G2, all or none, and waits. All come back where that fails.
    pub(crate) fn of_batches(
        leader: &Leader,
        batches: Vec<BlockBatch<G1, Partial>>,
    ) -> Result<Self, ParkRejected<Vec<BlockBatch<G1, Partial>>>> {
        if let Err(error) = check_batches(leader, &batches) {
            return Err(ParkRejected { blocks: Some(batches), error });
        }
        // What is lost from here on came after the first of them was allocated.
        let losses = batches.iter().map(BlockBatch::losses).min().unwrap_or_default();
        let origins = batches.iter().map(|batch| (batch.origin(), batch.len())).collect();
        let ids: Vec<BlockId> = batches.iter().flat_map(BlockBatch::block_ids).copied().collect();
        let source = Arc::new(batches);
        let hold = Box::new(Arc::clone(&source));
        let from = OnG1 { ids: &ids, fence: None, check: None, hold };
        Self::save(leader, origins, losses, from)
            .map_err(|error| ParkRejected { blocks: Arc::into_inner(source), error })
    }

    /// Moves the blocks to batches of G1, all or none, and waits. They stay parked where that
    /// fails.
    pub(crate) fn into_batches(
        self,
        leader: &Leader,
    ) -> Result<Vec<BlockBatch<G1, Partial>>, ParkRejected<Self>> {
        self.to_batches(leader).map_err(|error| ParkRejected { blocks: Some(self), error })
    }

    /// Copies the blocks to new batches of G1, all or none, and waits. They stay parked, too.
    fn to_batches(&self, leader: &Leader) -> Result<Vec<BlockBatch<G1, Partial>>, ParkError> {
        self.check(leader)?;
        let device = Arc::new(leader.allocate(namespace_of(&self.batches)?, self.len())?);
        let hold = Box::new(Arc::clone(&device));
        self.load(leader, OnG1 { ids: device.block_ids(), fence: None, check: None, hold })?;
        let mut rest = Arc::into_inner(device).ok_or_else(|| ParkError::Failed(Vec::new()))?;
        let mut batches = Vec::with_capacity(self.batches.len());
        for &(BatchPosition { namespace, group, position }, count) in &self.batches {
            let next = rest.split_off(count);
            let batch = std::mem::replace(&mut rest, next);
            batches.push(batch.init_sequence(namespace, group, position).map_err(|refused| refused.error)?);
        }
        Ok(batches)
    }
}

/// Whether these can be parked by this leader.
fn check_batches(leader: &Leader, batches: &[BlockBatch<G1, Partial>]) -> Result<(), ParkError> {
    if batches.iter().any(|batch| !leader.registry.owns_blocks(batch)) {
        return Err(ParkError::Foreign);
    }
    for batch in batches {
        leader.transfers.check_lost(Tier::G1, batch.losses())?;
    }
    Ok(())
}

/// The namespace of all of them, whose tenant they count for.
fn namespace_of(batches: &[(BatchPosition, usize)]) -> Result<NamespaceId, ParkError> {
    let namespace = batches.first().map_or(NamespaceId(0), |(origin, _)| origin.namespace);
    let is_one = batches.iter().all(|(origin, _)| origin.namespace == namespace);
    if is_one { Ok(namespace) } else { Err(ParkError::Namespaces) }
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

/// Names for these blocks, from number `first` on, that no registered block has, in a namespace of
/// zeros.
fn private_names(batches: &[(BatchPosition, usize)], first: u64) -> Vec<BlockIdentity> {
    let name = |(group, number): (GroupId, u64)| {
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
    let groups = batches.iter().flat_map(|(origin, count)| std::iter::repeat_n(origin.group, *count));
    groups.zip(first..).map(name).collect()
}
