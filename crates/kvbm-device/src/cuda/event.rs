//! Events of CUDA streams: complete for the host when the stream's thread has seen them, on the device at once.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::driver::Handle;
use crate::event::{EventBackend, EventCallback};
use crate::{Completer, DeviceError, Event, EventStatus};

/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: who waits sleeps.
const FLAGS: u32 = 1 | 2;

/// How far an event has come on its way to the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Issue {
    /// Its stream has not got to it.
    Queued,
    /// Recorded on the device.
    Recorded(Handle),
    /// It never gets there.
    Dropped,
}

pub(super) struct CudaEvent {
    shared: Arc<Shared>,
    /// What the host sees.
    host: Event,
    issue: Mutex<Issue>,
    changed: Condvar,
}

impl CudaEvent {
    /// An event, and what completes it for the host.
    pub(super) fn new(shared: &Arc<Shared>) -> (Arc<Self>, Completer) {
        let (host, completer) = Event::completable();
        let issue = Mutex::new(Issue::Queued);
        (Arc::new(Self { shared: Arc::clone(shared), host, issue, changed: Condvar::new() }), completer)
    }

    /// Records it on a stream: complete when everything issued there before is. The context must be entered.
    pub(super) fn record(&self, stream: Handle) -> Result<Handle, DeviceError> {
        let functions = self.shared.functions();
        let mut event = 0;
        // SAFETY: writes a handle through a pointer to one.
        let code = unsafe { (functions.event_create)(&raw mut event, FLAGS) };
        self.shared.check("cuEventCreate", code)?;
        // SAFETY: both handles are alive.
        let code = unsafe { (functions.event_record)(event, stream) };
        if code != 0 {
            // SAFETY: created above, seen by nobody.
            let _nothing_to_do_about_it = unsafe { (functions.event_destroy)(event) };
        }
        self.shared.check("cuEventRecord", code)?;
        self.settle(Issue::Recorded(event));
        Ok(event)
    }

    /// It will not be recorded, unless it is already.
    pub(super) fn abandon(&self) {
        let mut issue = self.issue.lock();
        if *issue == Issue::Queued {
            *issue = Issue::Dropped;
            self.changed.notify_all();
        }
    }

    fn settle(&self, issue: Issue) {
        *self.issue.lock() = issue;
        self.changed.notify_all();
    }

    /// Waits until it is recorded; `None` if it never will be. Its stream settles every event that it takes.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if its stream has not got to it by then.
    pub(super) fn recorded(&self, deadline: Instant) -> Result<Option<Handle>, DeviceError> {
        let mut issue = self.issue.lock();
        while *issue == Issue::Queued {
            if self.changed.wait_until(&mut issue, deadline).timed_out() && *issue == Issue::Queued {
                return Err(DeviceError::Deadline { what: "what a stream has before an event" });
            }
        }
        Ok(if let Issue::Recorded(event) = *issue { Some(event) } else { None })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Issue::Recorded(event) = *self.issue.get_mut()
            && let Ok(_entered) = self.shared.enter()
        {
            // SAFETY: created once, destroyed once; streams that wait for it are not disturbed by that.
            let _nothing_to_do_about_it = unsafe { (self.shared.functions().event_destroy)(event) };
        }
    }
}

impl EventBackend for CudaEvent {
    fn query(&self) -> EventStatus {
        self.host.query()
    }

    fn wait(&self, deadline: Instant) -> EventStatus {
        self.host.backend().wait(deadline)
    }

    fn on_complete(&self, callback: EventCallback) {
        self.host.backend().on_complete(callback);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
