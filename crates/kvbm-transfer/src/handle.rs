//! A submitted plan: future, poll, wait, cancel.

use crate::hub::Hub;
use crate::report_slot::ReportSlot;
use kvbm_plan::{PlanId, TransferReport};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

/// The report was not there at the deadline. The transfer goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("transfer {plan_id} was not over at the deadline: it goes on; wait again, or cancel it")]
pub struct NotYet {
    /// The transfer.
    pub plan_id: PlanId,
}

/// A submitted plan. Resolves to its report, as a [`Future`], by [`TransferHandle::poll_report`] or
/// by [`TransferHandle::wait`]; no runtime is needed.
///
/// Dropping the handle of a plan that has not started cancels it. A started one is detached: it
/// runs to its end and owns source and destination until then.
#[must_use = "dropping the handle cancels a transfer that has not started"]
pub struct TransferHandle {
    slot: Arc<ReportSlot>,
    hub: Weak<Hub>,
    plan_id: PlanId,
    cancel_on_drop: bool,
}

impl TransferHandle {
    pub(crate) fn new(slot: Arc<ReportSlot>, hub: Weak<Hub>, plan_id: PlanId, cancel_on_drop: bool) -> Self {
        Self { slot, hub, plan_id, cancel_on_drop }
    }

    /// The plan.
    pub fn plan_id(&self) -> PlanId {
        self.plan_id
    }

    /// The report, if it is there. Never blocks.
    pub fn poll_report(&self) -> Option<Arc<TransferReport>> {
        self.slot.get()
    }

    /// Blocks until the report is there.
    ///
    /// # Errors
    /// [`NotYet`] at `deadline`; the transfer goes on.
    pub fn wait(&self, deadline: Instant) -> Result<Arc<TransferReport>, NotYet> {
        let mut state = self.slot.state.lock();
        while state.report.is_none() {
            if self.slot.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.report.clone().ok_or(NotYet { plan_id: self.plan_id })
    }

    /// Drops the plan if it has not started. Either way its report comes.
    pub fn cancel(&self) {
        if let Some(hub) = self.hub.upgrade() {
            hub.cancel(self.plan_id);
        }
    }

    /// Lets the plan run without this handle.
    pub fn detach(mut self) {
        self.cancel_on_drop = false;
    }
}

impl Future for TransferHandle {
    type Output = Arc<TransferReport>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.slot.state.lock();
        if let Some(report) = &state.report {
            return Poll::Ready(Arc::clone(report));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for TransferHandle {
    fn drop(&mut self) {
        if self.cancel_on_drop && self.poll_report().is_none() {
            self.cancel();
        }
    }
}

impl fmt::Debug for TransferHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.poll_report().is_some() { "reported" } else { "pending" };
        write!(f, "TransferHandle(plan {}, {state})", self.plan_id)
    }
}
