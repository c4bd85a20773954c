//! Device events of the engine that plans wait for.

use super::{FenceError, KvBlockManager};
use crate::transfers::Fence;
#[cfg(feature = "worker")]
use kvbm_device::Event;

/// Makes an event of every rank's device known to the workers of this process.
#[cfg(feature = "worker")]
pub(crate) fn of_events<G>(manager: &KvBlockManager<G>, events: &[Event]) -> Result<Fence, FenceError> {
    if !manager.has_local_workers() {
        return Err(FenceError::Elsewhere);
    }
    let ranks = manager.leader.ranks.len();
    if events.len() != ranks {
        return Err(FenceError::Ranks { given: events.len(), ranks });
    }
    let number = manager.leader.transfers.next_fence();
    manager.workers.register_events(number, events);
    Ok(Fence(number))
}

/// A number that workers in other processes know an event by.
pub(crate) fn numbered<G>(manager: &KvBlockManager<G>, number: u64) -> Result<Fence, FenceError> {
    if manager.has_local_workers() {
        return Err(FenceError::Here(number));
    }
    if !manager.leader.transfers.take_fence(number) {
        return Err(FenceError::Number(number));
    }
    Ok(Fence(number))
}
