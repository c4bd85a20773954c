//! Decides what runs when: queues, gates, predecessors, deadlines, cancellation, and which plans
//! were seen.
//!
//! Everything here is plain state behind one lock of [`Hub`](crate::hub::Hub): no thread, no clock,
//! no I/O. Callers say what time it is.

mod gates;
mod history;
mod job;
mod queue;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use job::Portion;
pub(crate) use queue::{PathLimits, volume_of};
pub(crate) use state::{Delivery, GroupLimits, Limits, Reply, State};
