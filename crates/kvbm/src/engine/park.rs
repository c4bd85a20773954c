//! Saving the private blocks of a request that the engine preempts.

use super::{Busy, Engine, EngineError, Fence, offload, still_the_same};
use crate::leader::Leader;
use crate::park::{OnG1, Parked};
use kvbm_plan::BlockId;
use kvbm_pool::BatchPosition;
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
        self.check(ids)?;
        let blocks = &self.blocks;
        let losses = offload::check_lost(leader, blocks, ids)?;
        let holds = blocks.begin_read(ids).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was reused while it was parked");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        let from = OnG1 { ids, fence: after, check: Some(check), hold };
        Ok(Parked::save(leader, origin, losses, from)?)
    }

    /// Copies parked blocks into blocks of the engine, and waits.
    pub(super) fn load_parked(
        &self,
        leader: &Leader,
        parked: &Parked,
        ids: &[BlockId],
        after: Option<Fence>,
    ) -> Result<(), EngineError> {
        self.check(ids)?;
        if ids.len() != parked.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: parked.len() });
        }
        parked.check(leader)?;
        let blocks = &self.blocks;
        let holds = blocks.begin_write(ids, leader.registry.losses()).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was given to another use while it was written");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        let to = OnG1 { ids, fence: after, check: Some(check), hold };
        Ok(parked.load(leader, to)?)
    }
}
