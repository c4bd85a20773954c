//! A caller's share in a transfer.

use super::Transfers;
use super::transfer::{Interest, Outcome, Released, Transfer, expired};
use crate::error::BlockFailure;
use kvbm_plan::{Failure, FailureKind, deadline_after};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// How long a transfer that has all its reports may take to settle: bookkeeping, no bytes move.
const SETTLEMENT: Duration = Duration::from_secs(10);

/// See the module. Dropped, it takes the caller's interest back: a transfer in which nobody is
/// interested any more is given up.
#[must_use = "dropping it gives the transfer up"]
pub(crate) struct Handle {
    transfers: Arc<Transfers>,
    interest: Interest,
    released: bool,
}

impl Handle {
    pub(super) fn new(transfers: &Arc<Transfers>, interest: Interest) -> Self {
        Self { transfers: Arc::clone(transfers), interest, released: false }
    }

    fn transfer(&self) -> &Arc<Transfer> {
        &self.interest.transfer
    }

    pub(super) fn is_of(&self, transfer: &Arc<Transfer>) -> bool {
        Arc::ptr_eq(self.transfer(), transfer)
    }

    /// Whether it joined a transfer that another caller had started, and that caller gave the
    /// transfer up. Once.
    pub(crate) fn take_given_up(&mut self) -> bool {
        std::mem::take(&mut self.interest.joined)
            && self.with_outcome(|outcome| {
                outcome.failures.iter().any(|failed| failed.failure.kind == FailureKind::Cancelled)
            })
    }

    /// Blocks of the transfer.
    pub(crate) fn num_blocks(&self) -> usize {
        self.transfer().moves.len()
    }

    /// The tag of its plans.
    pub(crate) fn tag(&self) -> u64 {
        self.transfer().tag
    }

    pub(crate) fn is_done(&self) -> bool {
        self.transfer().settled.is_set()
    }

    /// Whether `layer` of all blocks has arrived.
    pub(crate) fn has_layer(&self, layer: u32) -> bool {
        self.transfer().has_layer(layer)
    }

    /// What waits until it is known whether a layer arrives, or a deadline passes, for whoever must
    /// not borrow the handle so long.
    pub(crate) fn layer_wait(&self) -> impl Fn(u32, Instant) + use<> {
        let transfer = Arc::clone(self.transfer());
        move |layer, deadline| transfer.wait_layer(layer, deadline)
    }

    pub(crate) fn wait_until(&self, deadline: Instant) {
        self.transfer().settled.wait_until(deadline);
    }

    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<()> {
        self.transfer().settled.poll(context)
    }

    /// Waits until the transfer has an outcome: its own, or that it is late.
    ///
    /// # Errors
    /// It has no outcome, although it should. So it counts as failed.
    pub(crate) fn wait(&self, what: &str) -> Result<(), Failure> {
        let transfer = self.transfer();
        if !transfer.settled.wait_until(transfer.deadline) {
            let late = expired(what, transfer.limit);
            self.transfers.keep_arrived(transfer);
            self.transfers.abandon(transfer, &late);
            if !transfer.settled.wait_until(deadline_after(kvbm_plan::clock::now(), SETTLEMENT)) {
                return Err(late);
            }
        }
        Ok(())
    }

    /// Looks at the outcome. Meaningful once the transfer is done. What arrived stays pinned until
    /// the handle is dropped.
    pub(crate) fn with_outcome<R>(&self, read: impl FnOnce(&Outcome) -> R) -> R {
        self.transfer().with_outcome(read)
    }

    /// The failures of all blocks, for one reason.
    pub(crate) fn failures(&self, reason: &Failure) -> Vec<BlockFailure> {
        self.transfer().failures(0, reason)
    }

    /// The transfer goes on without this caller.
    pub(crate) fn detach(mut self) {
        self.released = true;
        self.interest.detach();
    }

    /// Waits no longer: where no other caller does, the transfer is given up for `reason`, and what
    /// has arrived from the front on counts. Whether it was late.
    pub(crate) fn stop(&mut self, reason: &Failure) -> bool {
        self.released = true;
        let transfer = &self.interest.transfer;
        self.transfers.keep_arrived(transfer);
        match self.interest.release(reason) {
            Released::Over => {
                transfer.settled.wait_until(deadline_after(kvbm_plan::clock::now(), SETTLEMENT));
                false
            }
            Released::Shared => true,
            Released::Abandoned => {
                self.transfers.cancel(transfer);
                transfer.announce_kept();
                true
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        let cancelled = Failure::new(FailureKind::Cancelled, "the onboard was dropped");
        if self.interest.release(&cancelled) == Released::Abandoned {
            self.transfers.cancel(&self.interest.transfer);
        }
    }
}
