//! Events of CUDA streams: complete for the host when the stream's thread has seen them, on the
//! device at once.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::CudaContext;
use super::functions::sys::CUevent_flags;
use super::functions::{DriverHandle, EventHandle, StreamHandle, call};
use crate::event::{EventBackend, EventCallback};
use crate::{Completer, DeviceError, Event, EventStatus};

/// A thread that waits sleeps; the event has no time.
const FLAGS: u32 =
    CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// How far an event has come on its way to the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Issue {
    /// Its stream has not got to it.
    Queued,
    /// Recorded on the device.
    Recorded(EventHandle),
    /// It never gets there.
    Dropped,
}

pub(super) struct CudaEvent {
    context: Arc<CudaContext>,
    /// What the host sees.
    host: Event,
    issue: Mutex<Issue>,
    changed: Condvar,
}

impl CudaEvent {
    /// An event, and what completes it for the host.
    pub(super) fn new(context: &Arc<CudaContext>) -> (Arc<Self>, Completer) {
        let (host, completer) = Event::completable();
        let issue = Mutex::new(Issue::Queued);
        (Arc::new(Self { context: Arc::clone(context), host, issue, changed: Condvar::new() }), completer)
    }

    /// Records it on a stream: complete when everything issued there before is. The context must be
    /// entered.
    pub(super) fn record(&self, stream: StreamHandle) -> Result<EventHandle, DeviceError> {
        let functions = self.context.functions();
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes a handle through a pointer to one.
        self.context.check(unsafe { call!(functions, cuEventCreate(&raw mut event, FLAGS)) })?;
        // SAFETY: both handles are alive.
        let result = unsafe { call!(functions, cuEventRecord(event, stream.0)) };
        if let Err(error) = self.context.check(result) {
            // SAFETY: it was created above and nothing else knows it.
            let _nothing_to_do = unsafe { call!(functions, cuEventDestroy_v2(event)) };
            return Err(error);
        }
        let event = DriverHandle(event);
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

    /// Waits until it is recorded; `None` if it never will be. Its stream settles every event that
    /// it takes.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if its stream has not got to it by then.
    pub(super) fn recorded(&self, deadline: Instant) -> Result<Option<EventHandle>, DeviceError> {
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
        if let Issue::Recorded(event) = *self.issue.get_mut() {
            // SAFETY: created once, destroyed once. Streams that wait for it still do.
            self.context.release(|driver| unsafe { call!(driver, cuEventDestroy_v2(event.0)) });
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
