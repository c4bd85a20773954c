//! Device events of the engine that plans wait for.

use super::{FenceError, KvBlockManager, Owned};
use crate::transfers::Fence;
#[cfg(feature = "worker")]
use kvbm_device::Event;

impl<G> KvBlockManager<G> {
    /// Makes an event of every rank's device known to the workers of this process.
    #[cfg(feature = "worker")]
    pub(crate) fn register_fence(&self, events: &[Event]) -> Result<Fence, FenceError> {
        if !self.has_local_workers() {
            return Err(FenceError::Elsewhere);
        }
        let ranks = self.leader.ranks.len();
        if events.len() != ranks {
            return Err(FenceError::Ranks { given: events.len(), ranks });
        }
        let number = self.leader.transfers.next_fence();
        self.workers.register_events(number, events);
        Ok(Fence(number))
    }

    /// A number that workers in other processes know an event by.
    pub(crate) fn numbered_fence(&self, number: u64) -> Result<Fence, FenceError> {
        if self.has_local_workers() {
            return Err(FenceError::Here(number));
        }
        if !self.leader.transfers.take_fence(number) {
            return Err(FenceError::Number(number));
        }
        Ok(Fence(number))
    }
}

impl KvBlockManager<Owned> {
    /// Everything that the engine has submitted to its streams so far lies before `events`, one per
    /// rank in order. Plans that touch G1 start only after the last ones handed over: blocks are
    /// read after the engine wrote them and overwritten after the engine read them. An engine that
    /// orders its work otherwise (or waits for its streams before it calls) need not call this.
    ///
    /// # Errors
    /// Not one event for each rank, or the workers are in other processes: nothing changed.
    #[cfg(feature = "worker")]
    pub fn fence(&self, events: &[Event]) -> Result<(), FenceError> {
        let fence = self.register_fence(events)?;
        self.leader.transfers.set_fence(fence);
        Ok(())
    }

    /// Like `fence`, for workers in other processes: every rank's worker knows its device event
    /// under `number`, or will know it. Plans that touch G1 wait for it there.
    ///
    /// # Errors
    /// A number that is not above all earlier ones, or the workers are in this process: nothing
    /// changed.
    pub fn fence_at(&self, number: u64) -> Result<(), FenceError> {
        let fence = self.numbered_fence(number)?;
        self.leader.transfers.set_fence(fence);
        Ok(())
    }
}
