//! Saving the private blocks of a request that the engine preempts.

use super::{Busy, Engine, EngineError, Fence, offload, still_the_same};
use crate::leader::Leader;
use crate::park::{OnG1, ParkError, Parked, ParkedGroups};
use kvbm_plan::BlockId;
use kvbm_pool::{BatchPosition, Losses};
use std::sync::Arc;

impl Engine {
    /// Copies blocks to G2 as they are, and waits.
    pub(super) fn park(
        &self,
        leader: &Leader,
        ids: &[BlockId],
        origin: BatchPosition,
        after: Option<Fence>,
    ) -> Result<Parked, EngineError> {
        self.save(leader, ids, after, |losses, from| Parked::save(leader, origin, losses, from))
    }

    /// The same of batches of several cache groups, all or none.
    pub(super) fn park_groups(
        &self,
        leader: &Leader,
        batches: &[(BatchPosition, &[BlockId])],
        after: Option<Fence>,
    ) -> Result<ParkedGroups, EngineError> {
        let ids: Vec<BlockId> = batches.iter().flat_map(|(_, ids)| *ids).copied().collect();
        let origins = batches.iter().map(|&(origin, ids)| (origin, ids.len())).collect();
        self.save(leader, &ids, after, |losses, from| ParkedGroups::save(leader, origins, losses, from))
    }

    fn save<P>(
        &self,
        leader: &Leader,
        ids: &[BlockId],
        after: Option<Fence>,
        save: impl FnOnce(Losses, OnG1<'_>) -> Result<P, ParkError>,
    ) -> Result<P, EngineError> {
        self.check(ids)?;
        let blocks = &self.blocks;
        let losses = offload::check_lost(leader, blocks, ids)?;
        let holds = blocks.begin_read(ids).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was reused while it was parked");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        Ok(save(losses, OnG1 { ids, fence: after, check: Some(check), hold })?)
    }

    /// Copies parked blocks into blocks of the engine, those of each batch, all or none, and waits.
    pub(super) fn load_parked(
        &self,
        leader: &Leader,
        parked: &ParkedGroups,
        ids: &[&[BlockId]],
        after: Option<Fence>,
    ) -> Result<(), EngineError> {
        let batches = parked.batches();
        if ids.len() != batches.len() {
            return Err(EngineError::Batches { lists: ids.len(), batches: batches.len() });
        }
        let all = ids.concat();
        self.check(&all)?;
        for (ids, &(_, blocks)) in ids.iter().zip(batches) {
            if ids.len() != blocks {
                return Err(EngineError::Count { ids: ids.len(), blocks });
            }
        }
        parked.check(leader)?;
        let blocks = &self.blocks;
        let holds = blocks.begin_write(&all, leader.registry.losses()).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was given to another use while it was written");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        let to = OnG1 { ids: &all, fence: after, check: Some(check), hold };
        Ok(parked.load(leader, to)?)
    }
}
