//! Offloading engine blocks to G2.

use super::generations::Generations;
use super::{Busy, Engine, EngineError, Fence, still_the_same};
use crate::config::FIRST_GROUP;
use crate::leader::Leader;
use crate::manager::KvBlockManager;
use crate::transfers::{Destination, Move, Purpose, Request};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, Tier};
use kvbm_pool::{Arrival, Lost, Refusal};
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
                group,
                hash: link.hash,
                parent: link.parent,
                position: link.position,
            })
            .collect();
        // What events will say of them, should they arrive.
        self.events.note(&chain, first, ids.len());
        start(&self.leader, &self.g1.blocks, ids, &identities, after)
    }
}

/// Copies engine block `ids[i]`, which holds `identities[i]`, to G2.
pub(super) fn start(
    leader: &Arc<Leader>,
    blocks: &Arc<Generations>,
    ids: &[BlockId],
    identities: &[BlockIdentity],
    after: Option<Fence>,
) -> Result<OffloadStarted, EngineError> {
    let losses = leader.registry.losses();
    let lost = blocks.lost(ids, |since| leader.registry.is_lost(Tier::G1, since));
    if !lost.is_empty() {
        leader.transfers.count_lost(Lost { tier: Tier::G1 });
        return Err(EngineError::Lost(lost));
    }
    let holds = blocks.begin_read(ids).map_err(EngineError::Busy)?;
    // Ends the reads wherever this ends, at the latest with the transfer.
    let busy = Busy { blocks: Arc::clone(blocks), holds, over: None };
    let arrivals = leader.registry.begin_arrivals(Tier::G2, identities)?;
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
    request.fence = after;
    leader.transfers.start(request).detach();
    Ok(started)
}
