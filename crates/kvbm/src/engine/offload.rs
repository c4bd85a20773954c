//! Offloading engine blocks to G2.

use super::generations::{Generations, Hold};
use super::{Busy, Engine, EngineError, Fence, still_the_same};
use crate::config::FIRST_GROUP;
use crate::leader::Leader;
use crate::manager::{KvBlockManager, OffloadError};
use crate::transfers::{Destination, Move, Purpose, Request};
use kvbm_plan::{BlockId, BlockIdentity, Command, GroupId, NamespaceId, Path, Tier};
use kvbm_pool::{Arrival, BlockMetadata, Losses, Lost, Pinned, Refusal};
use kvbm_tokens::BlockChain;
use std::sync::Arc;

/// What an offload of engine blocks began with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OffloadStarted {
    /// Blocks that are being copied.
    pub started: usize,
    /// Blocks that G2 has, or is about to have.
    pub present: usize,
    /// Blocks that were not taken.
    pub refused: Vec<RefusedBlock>,
}

/// An engine block that was not offloaded. Offering it again, with the blocks before it, does no
/// harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedBlock {
    /// The block.
    pub block: BlockId,
    /// Why.
    pub reason: Refusal,
}

/// How engine blocks are copied to G2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadOptions {
    group: GroupId,
    after: Option<Fence>,
    metadata: BlockMetadata,
}

impl OffloadOptions {
    /// The blocks hold their final bytes when this device event is complete; now, where none is
    /// given.
    #[must_use]
    pub const fn after(self, fence: Fence) -> Self {
        Self { after: Some(fence), ..self }
    }

    /// The blocks' cache group; the first, where none is given.
    #[must_use]
    pub const fn group(self, group: GroupId) -> Self {
        Self { group, ..self }
    }

    /// For those of the blocks that are on no tier yet: the larger their priority, the longer they
    /// stay, on every tier.
    #[must_use]
    pub const fn metadata(self, metadata: BlockMetadata) -> Self {
        Self { metadata, ..self }
    }
}

impl KvBlockManager<Engine> {
    /// Copies engine blocks to G2 in the background: `ids[i]` holds block `first + i` of `chain`,
    /// where `chain` begins at the sequence's first block and `first` is the position of the first
    /// id.
    ///
    /// The blocks must hold their final bytes once the events of `after` are complete, or now where
    /// there is none. A block whose content may have changed before its copy was over
    /// ([`released`](Self::released), [`before_reuse`](Self::before_reuse), an onboard into it) is
    /// not made visible.
    ///
    /// Offering blocks again is cheap: what G2 has counts as present. Where a block was refused
    /// because the one before it is missing, offer the sequence again from its first block.
    ///
    /// Where a worker starts anew, or a rank is given up, what G1 held is gone
    /// ([`rank_lost`](Self::rank_lost)): blocks are taken again that were given to something since
    /// ([`before_reuse`](Self::before_reuse), [`released`](Self::released), an onboard).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<Fence>,
    ) -> Result<OffloadStarted, EngineError> {
        self.offload_group(FIRST_GROUP, ids, chain, first, after)
    }

    /// As [`offload`](Self::offload), with what [`OffloadOptions`] say.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started. Blocks of a group that there is not are refused.
    pub fn offload_with<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        options: OffloadOptions,
    ) -> Result<OffloadStarted, EngineError> {
        let when = options.after.map_or(When::Now, When::After);
        self.start_offload(ids, chain.into(), first, when, options)
    }

    /// Copies registered blocks down in the background, now rather than when a trigger says so:
    /// blocks of G2 to G3 or to a volume (G4). Blocks before them that are missing there go first.
    /// The parts of a [`Prefix`](kvbm_pool::Prefix) are pinned blocks of a tier
    /// ([`into_parts`](kvbm_pool::Prefix::into_parts)).
    ///
    /// # Errors
    /// [`OffloadError`]; nothing was started.
    pub fn offload_down(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        self.offload_pinned(blocks, to)
    }

    /// As [`offload`](Self::offload), of blocks of a cache group. Blocks of a group with a window
    /// or state may begin anywhere in the sequence: see [`kept_blocks`](Self::kept_blocks).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started. Blocks of a group that there is not are refused.
    pub fn offload_group<'a>(
        &self,
        group: GroupId,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<Fence>,
    ) -> Result<OffloadStarted, EngineError> {
        self.offload_with(ids, chain, first, OffloadOptions { group, after, ..OffloadOptions::default() })
    }

    /// Like [`offload`](Self::offload), for blocks that the running iteration computes: each layer
    /// is copied while the next one is computed, as soon as [`layer_done`](Self::layer_done) says
    /// that it is written, and all are when [`step`](Self::step) ends the iteration. In at most
    /// `transfer.layer_steps` steps; where copying takes less time than the plans for the layers,
    /// in one at the end of the iteration.
    ///
    /// The blocks count as read from now on: whatever becomes of the iteration, ask
    /// [`before_reuse`](Self::before_reuse) before they are given to something else.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload_by_layer<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<OffloadStarted, EngineError> {
        let when = When::Computed(self.running_iteration());
        self.start_offload(ids, chain.into(), first, when, OffloadOptions::default())
    }

    /// The running iteration has written `layer` of all its blocks on every rank's device: not
    /// submitted, written. Layers count from 0, in the order in which they are computed. Opens the
    /// gates of copies that wait for it.
    pub fn layer_done(&self, layer: u32) {
        let advance = Command::Advance { iteration: self.running_iteration(), layer: Some(layer) };
        // A worker that cannot be reached fails its plans by itself.
        let _not_sent = self.leader.ranks.broadcast(&advance);
    }

    /// The number that [`step`](Self::step) will give to the iteration when it is over.
    fn running_iteration(&self) -> u64 {
        self.iteration().saturating_add(1)
    }

    fn start_offload(
        &self,
        ids: &[BlockId],
        chain: BlockChain<'_>,
        first: usize,
        when: When,
        options: OffloadOptions,
    ) -> Result<OffloadStarted, EngineError> {
        self.check(ids)?;
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
                group: options.group,
                hash: link.hash,
                parent: link.parent,
                position: link.position,
            })
            .collect();
        // What events will say of them, should they arrive.
        self.events.note(&chain, first, ids.len());
        let what = What { identities: &identities, content: Content::Now, metadata: options.metadata };
        start(&self.leader, &self.g1.blocks, ids, what, when)
    }
}

/// Who says what is in the blocks of an offload.
#[derive(Clone, Copy)]
pub(super) enum Content<'a> {
    /// The engine, of what is in them now.
    Now,
    /// The onboard that wrote them: it counts only while nothing else was done with them since.
    Written(&'a [Hold]),
}

impl Content<'_> {
    /// Whether blocks whose reads have just begun hold what was said.
    fn is_there(self, reads: &[Hold]) -> bool {
        match self {
            Self::Now => true,
            Self::Written(written) => {
                written.iter().zip(reads).all(|(written, read)| written.is_same_content(read))
            }
        }
    }
}

/// When the blocks of an offload hold their final bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum When {
    /// They do.
    Now,
    /// When this device event is complete.
    After(Fence),
    /// Layer by layer, while this iteration runs.
    Computed(u64),
}

/// What is in the blocks of an offload.
#[derive(Clone, Copy)]
pub(super) struct What<'a> {
    /// One for each block.
    pub(super) identities: &'a [BlockIdentity],
    pub(super) content: Content<'a>,
    pub(super) metadata: BlockMetadata,
}

/// Refuses blocks whose content went with G1. What was lost so far, read before.
pub(super) fn check_lost(
    leader: &Leader,
    blocks: &Generations,
    ids: &[BlockId],
) -> Result<Losses, EngineError> {
    let losses = leader.registry.losses();
    let lost = blocks.lost(ids, |since| leader.registry.is_lost(Tier::G1, since));
    if lost.is_empty() {
        return Ok(losses);
    }
    leader.transfers.count_lost(Lost { tier: Tier::G1 });
    Err(EngineError::Lost(lost))
}

/// Copies engine blocks `ids` to G2.
pub(super) fn start(
    leader: &Arc<Leader>,
    blocks: &Arc<Generations>,
    ids: &[BlockId],
    what: What<'_>,
    when: When,
) -> Result<OffloadStarted, EngineError> {
    let What { identities, content, metadata } = what;
    let losses = check_lost(leader, blocks, ids)?;
    let holds = blocks.begin_read(ids).map_err(EngineError::Busy)?;
    // Ends the reads wherever this ends, at the latest with the transfer.
    let busy = Busy { blocks: Arc::clone(blocks), holds, over: None };
    if !content.is_there(&busy.holds) {
        return Ok(OffloadStarted::default());
    }
    let arrivals = leader.registry.begin_arrivals_with(Tier::G2, identities, metadata)?;
    let mut started = OffloadStarted::default();
    let (mut moves, mut places, mut read) = (Vec::new(), Vec::new(), Vec::new());
    for (index, arrival) in arrivals.arrivals().iter().enumerate() {
        match *arrival {
            Arrival::Reserved { block: dst, .. } => {
                moves.push(Move { identity: identities[index], from: Tier::G1, src: ids[index], dst });
                places.push(index);
                read.push(busy.holds[index]);
            }
            Arrival::Refused(reason) => started.refused.push(RefusedBlock { block: ids[index], reason }),
            _ => started.present += 1,
        }
    }
    started.started = moves.len();
    if moves.is_empty() {
        return Ok(started);
    }
    let (offload, interval) = (&leader.offload, leader.offload.interval());
    let destination = Destination::Reserved { arrivals, places };
    let mut request = Request::new(Purpose::Offload, Tier::G2, moves, destination, losses)
        .hold(busy)
        .hold(offload.running(interval, started.started));
    request.check = Some(still_the_same(blocks, read, "was reused while it was read"));
    request.on_arrival = Some(offload.on_arrival(Some(interval)));
    match when {
        When::Now => {}
        When::After(fence) => request.fence = Some(fence),
        When::Computed(iteration) => {
            let transfers = &leader.transfers;
            request.layers = transfers.layer_steps(Path::G1_G2, started.started, Some(iteration));
            request.iteration = Some(iteration);
        }
    }
    leader.transfers.start(request).detach();
    Ok(started)
}
