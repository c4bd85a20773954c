//! Events: a host waits for them, polls them or registers callbacks, and streams are ordered by
//! them.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::DeviceError;

/// What runs when an event completes.
pub type EventCallback = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

/// Where an event stands. It leaves `Pending` once and then stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventStatus {
    /// Work before it is still queued or running.
    Pending,
    /// All work before it is complete.
    Complete,
    /// Work before it failed; the bytes that it should have written are undefined.
    Failed(DeviceError),
}

/// What implements an event: a driver's event, or the state of [`Event::completable`].
pub trait EventBackend: Send + Sync + Any {
    /// Current status, without blocking.
    fn query(&self) -> EventStatus;

    /// Blocks until the event leaves `Pending` or `deadline` passes, and returns the status then.
    fn wait(&self, deadline: Instant) -> EventStatus;

    /// Calls `callback` once, when the event leaves `Pending`, or at once if it has.
    fn on_complete(&self, callback: EventCallback);

    /// The implementation, for streams that know how to wait for it on the device.
    fn as_any(&self) -> &dyn Any;
}

/// A point in the work of a stream (or of anything else that completes). Clones are the same event.
#[derive(Clone)]
pub struct Event {
    backend: Arc<dyn EventBackend>,
}

impl Event {
    /// An event over another implementation.
    pub fn new(backend: Arc<dyn EventBackend>) -> Self {
        Self { backend }
    }

    /// An event that the host completes: dropping the [`Completer`] without completing fails the
    /// event, so no wait is endless. It can gate streams: [`Stream::wait`](crate::Stream::wait).
    pub fn completable() -> (Self, Completer) {
        let state = Arc::new(HostEvent {
            state: Mutex::new(EventState::Pending(Vec::new())),
            changed: Condvar::new(),
        });
        (Self::new(Arc::clone(&state) as Arc<dyn EventBackend>), Completer { event: Some(state) })
    }

    /// An event that is complete already.
    pub fn complete() -> Self {
        let (event, completer) = Self::completable();
        completer.complete(Ok(()));
        event
    }

    /// Current status, without blocking.
    pub fn query(&self) -> EventStatus {
        self.backend.query()
    }

    /// Blocks until complete.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if it is still pending at `deadline` (the work goes on), else the
    /// failure of the work.
    pub fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        match self.backend.wait(deadline) {
            EventStatus::Complete => Ok(()),
            EventStatus::Failed(error) => Err(error),
            EventStatus::Pending => Err(DeviceError::Deadline { what: "an event" }),
        }
    }

    /// Calls `callback` once with the result: at once on this thread
    /// if the event is complete, else on the thread that completes it. It must be short and must
    /// not block: the stream waits for it. A panic in it is caught.
    pub fn on_complete(&self, callback: impl FnOnce(Result<(), DeviceError>) + Send + 'static) {
        self.backend.on_complete(Box::new(callback));
    }

    /// The implementation.
    pub fn backend(&self) -> &dyn EventBackend {
        &*self.backend
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.query())
    }
}

enum EventState {
    Pending(Vec<EventCallback>),
    Done(Result<(), DeviceError>),
}

struct HostEvent {
    state: Mutex<EventState>,
    changed: Condvar,
}

impl HostEvent {
    fn finish(&self, result: Result<(), DeviceError>) {
        let previous = std::mem::replace(&mut *self.state.lock(), EventState::Done(result.clone()));
        self.changed.notify_all();
        // Callbacks run without the lock: they may ask this very event.
        if let EventState::Pending(callbacks) = previous {
            for callback in callbacks {
                call(callback, result.clone());
            }
        }
        drop(result);
    }
}

/// A panic of a callback must not take the completing thread with it.
fn call(callback: EventCallback, result: Result<(), DeviceError>) {
    let _contained = catch_unwind(AssertUnwindSafe(move || callback(result)));
}

fn status_of(state: &EventState) -> EventStatus {
    match state {
        EventState::Pending(_) => EventStatus::Pending,
        EventState::Done(Ok(())) => EventStatus::Complete,
        EventState::Done(Err(error)) => EventStatus::Failed(error.clone()),
    }
}

impl EventBackend for HostEvent {
    fn query(&self) -> EventStatus {
        status_of(&self.state.lock())
    }

    fn wait(&self, deadline: Instant) -> EventStatus {
        let mut state = self.state.lock();
        while matches!(*state, EventState::Pending(_)) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        status_of(&state)
    }

    fn on_complete(&self, callback: EventCallback) {
        let done = match &mut *self.state.lock() {
            EventState::Pending(callbacks) => {
                callbacks.push(callback);
                return;
            }
            EventState::Done(result) => result.clone(),
        };
        call(callback, done);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The other end of [`Event::completable`].
pub struct Completer {
    event: Option<Arc<HostEvent>>,
}

impl Completer {
    /// Completes the event and runs its callbacks on this thread.
    pub fn complete(mut self, result: Result<(), DeviceError>) {
        if let Some(event) = self.event.take() {
            event.finish(result);
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            event.finish(Err(DeviceError::Abandoned { what: "its completer" }));
        }
    }
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completer")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn completes_once_and_notifies_everybody() {
        let (event, completer) = Event::completable();
        assert_eq!(event.query(), EventStatus::Pending);
        let (sender, receiver) = crossbeam_channel::bounded(4);
        let early = sender.clone();
        event.on_complete(move |result| early.send(("early", result)).expect("receiver lives"));
        completer.complete(Ok(()));
        event.on_complete(move |result| sender.send(("late", result)).expect("receiver lives"));
        assert_eq!(receiver.iter().collect::<Vec<_>>(), vec![("early", Ok(())), ("late", Ok(()))]);
        assert_eq!(event.wait(Instant::now()), Ok(()));
    }

    #[test]
    fn dropped_completer_fails_the_event() {
        let (event, completer) = Event::completable();
        drop(completer);
        assert!(matches!(event.query(), EventStatus::Failed(DeviceError::Abandoned { .. })));
    }

    #[test]
    fn deadline_is_an_error_and_the_event_stays_pending() {
        let (event, completer) = Event::completable();
        let late = event.wait(Instant::now() + Duration::from_millis(1));
        assert_eq!(late, Err(DeviceError::Deadline { what: "an event" }));
        assert_eq!(event.query(), EventStatus::Pending);
        completer.complete(Ok(()));
        assert_eq!(event.query(), EventStatus::Complete);
    }

    #[test]
    fn panicking_callback_is_contained() {
        let (event, completer) = Event::completable();
        event.on_complete(|_| panic!("callback"));
        let (sender, receiver) = crossbeam_channel::bounded(1);
        event.on_complete(move |result| sender.send(result).expect("receiver lives"));
        completer.complete(Ok(()));
        assert_eq!(receiver.recv(), Ok(Ok(())));
    }
}
