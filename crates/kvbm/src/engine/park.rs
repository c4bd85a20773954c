//! Saving the private blocks of a request that the engine preempts.

use super::{Busy, Engine, EngineError, Fence, offload, still_the_same};
use crate::manager::KvBlockManager;
use crate::park::{OnG1, ParkRejected, Parked};
use kvbm_plan::BlockId;
use kvbm_pool::BatchPosition;
use std::sync::Arc;

impl KvBlockManager<Engine> {
    /// Copies blocks to G2 as they are, for a request that is preempted: blocks that are not whole,
    /// or that nobody else may find. They belong to `origin`: the namespace counts for its tenant's
    /// share. The copies wait for `after`, where the blocks hold their bytes only then. Waits at
    /// most the transfer deadline. Then nothing reads the blocks, and they may be reused.
    ///
    /// Whole blocks that others may use are better given to [`offload`](Self::offload).
    ///
    /// # Errors
    /// See [`EngineError`]; [`EngineError::Private`] where the copies failed, were late
    /// ([`busy`](Self::busy) says which blocks are still read), or the blocks were reused
    /// meanwhile. The blocks are what they were.
    pub fn park(
        &self,
        ids: &[BlockId],
        origin: BatchPosition,
        after: Option<Fence>,
    ) -> Result<Parked, EngineError> {
        self.check(ids)?;
        let blocks = &self.g1.blocks;
        let losses = offload::check_lost(&self.leader, blocks, ids)?;
        let holds = blocks.begin_read(ids).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was reused while it was parked");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        let from = OnG1 { ids, fence: after, check: Some(check), hold };
        Ok(Parked::save(&self.leader, origin, losses, from)?)
    }

    /// Copies parked blocks into the engine's blocks `ids`, one for each, in order. The copies wait
    /// for `after`, where the engine may still read what is in them now. Waits at most the transfer
    /// deadline.
    ///
    /// # Errors
    /// The blocks stay parked, and come back with the reason: see [`EngineError`]. After
    /// [`EngineError::Private`] ask [`busy`](Self::busy) for the blocks that a late copy may still
    /// write.
    pub fn resume(
        &self,
        parked: Parked,
        ids: &[BlockId],
        after: Option<Fence>,
    ) -> Result<(), ParkRejected<Parked, EngineError>> {
        self.load_parked(&parked, ids, after).map_err(|error| ParkRejected { blocks: Some(parked), error })
    }

    fn load_parked(&self, parked: &Parked, ids: &[BlockId], after: Option<Fence>) -> Result<(), EngineError> {
        self.check(ids)?;
        if ids.len() != parked.len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: parked.len() });
        }
        parked.check(&self.leader)?;
        let blocks = &self.g1.blocks;
        let holds = blocks.begin_write(ids, self.leader.registry.losses()).map_err(EngineError::Busy)?;
        let check = still_the_same(blocks, holds.clone(), "was given to another use while it was written");
        let hold = Box::new(Busy { blocks: Arc::clone(blocks), holds, over: None });
        let to = OnG1 { ids, fence: after, check: Some(check), hold };
        Ok(parked.load(&self.leader, to)?)
    }
}
