//! Offloading engine blocks to G2.

use super::generations::{Generations, Hold};
use super::{Busy, Engine, EngineError, Fence, still_the_same};
use crate::events::EventPump;
use crate::leader::Leader;
use crate::transfers::{Destination, Move, Purpose, Request};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, Path, Tier};
use kvbm_pool::{Arrival, BlockMetadata, Losses, Lost, Refusal};
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
    pub(super) group: GroupId,
    pub(super) after: Option<Fence>,
    pub(super) metadata: BlockMetadata,
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

/// Engine blocks, and where they lie in a chain: `ids[i]` holds block `first + i`.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) ids: &'a [BlockId],
    pub(super) chain: BlockChain<'a>,
    pub(super) first: usize,
}

impl Engine {
    /// Checks an offload of engine blocks and starts it.
    pub(super) fn start_offload(
        &self,
        leader: &Arc<Leader>,
        events: &EventPump,
        source: Source<'_>,
        when: When,
        options: OffloadOptions,
    ) -> Result<OffloadStarted, EngineError> {
        let Source { ids, chain, first } = source;
        self.check(ids)?;
        let part = chain.slice(first..first.saturating_add(ids.len()));
        if part.len() != ids.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: part.len() });
        }
        if leader.transfers.refuses_callers() {
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
        events.note(&chain, first, ids.len());
        let what = What { identities: &identities, content: Content::Now, metadata: options.metadata };
        start(leader, &self.blocks, ids, what, when)
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
