//! Where the report of a plan waits for its handle.

use kvbm_plan::TransferReport;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::task::Waker;

/// The report of a plan, for its handle.
#[derive(Default)]
pub(crate) struct ReportSlot {
    pub(crate) state: Mutex<ReportState>,
    pub(crate) changed: Condvar,
}

#[derive(Default)]
pub(crate) struct ReportState {
    pub(crate) report: Option<Arc<TransferReport>>,
    pub(crate) waker: Option<Waker>,
}

impl ReportSlot {
    /// The report, if it is there.
    pub(crate) fn get(&self) -> Option<Arc<TransferReport>> {
        self.state.lock().report.clone()
    }

    /// Stores the report and wakes the waiters. The waker runs without the lock.
    pub(crate) fn put(&self, report: Arc<TransferReport>) {
        let waker = {
            let mut state = self.state.lock();
            state.report = Some(report);
            state.waker.take()
        };
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
