//! CUDA streams, each with a thread that issues operations and one that waits for them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::codes::is_fatal;
use super::copies::CopyEngine;
use super::event::CudaEvent;
use super::functions::sys::CUstream_flags;
use super::functions::{DriverHandle, EventHandle, StreamHandle, call};
use super::mark::{CudaMark, TimedEvent};
use super::module::{CudaFunction, CudaLaunch};
use super::{CudaContext, QUEUE_LIMIT};
use crate::submission::{Health, RefusedOperation, Submission};
use crate::{
    Completer, CopyBatch, CopyRejected, DeviceError, DeviceId, DeviceMemory, Event, EventStatus, Owner,
    Stream,
};

/// It never waits for the legacy default stream.
const NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

/// A stream of a [`CudaDevice`](super::CudaDevice).
pub struct CudaStream {
    state: Arc<StreamState>,
    queue: Submission<CudaOperation>,
}

/// What the threads and the handles of a stream share.
struct StreamState {
    context: Arc<CudaContext>,
    health: Health,
    stream: StreamHandle,
}

enum CudaOperation {
    Work(CudaWork, PendingEvent),
    Record(PendingEvent),
    Wait(Event),
    WaitEngine(EventHandle),
}

enum CudaWork {
    Copy(CopyBatch, CopyEngine),
    Mark(Arc<TimedEvent>),
    Fill { memory: DeviceMemory, offset: u64, len: u64, byte: u8 },
    Launch { function: CudaFunction, launch: CudaLaunch, _owners: Vec<Owner> },
}

/// An event on its way through the stream. If it is dropped, its event fails: no wait is endless.
struct PendingEvent {
    event: Arc<CudaEvent>,
    completer: Option<Completer>,
}

impl PendingEvent {
    fn new(context: &Arc<CudaContext>) -> (Event, Self) {
        let (event, completer) = CudaEvent::new(context);
        (Event::new(Arc::clone(&event) as _), Self { event, completer: Some(completer) })
    }

    fn complete(mut self, result: Result<(), DeviceError>) {
        if let Some(completer) = self.completer.take() {
            completer.complete(result);
        }
    }
}

impl Drop for PendingEvent {
    fn drop(&mut self) {
        self.event.abandon();
    }
}

/// What the device is working on.
struct Issued {
    work: Option<CudaWork>,
    pending: PendingEvent,
    event: EventHandle,
}

impl CudaStream {
    pub(super) fn start(context: &Arc<CudaContext>, name: &str) -> Result<Self, DeviceError> {
        let mut stream = std::ptr::null_mut();
        let into = &raw mut stream;
        // SAFETY: it writes a handle through a pointer to one.
        context.must(|driver| unsafe { call!(driver, cuStreamCreate(into, NON_BLOCKING)) })?;
        let health = Health::new(context.id, name);
        let state =
            Arc::new(StreamState { context: Arc::clone(context), health, stream: DriverHandle(stream) });
        let (queue, operations) = Submission::new(QUEUE_LIMIT);
        let (issued, pending) = bounded(QUEUE_LIMIT);
        let (issuer, waiter) = (Arc::clone(&state), Arc::clone(&state));
        state.health.spawn("issue", move || issuer.issue_all(&operations, &issued))?;
        state.health.spawn("wait", move || waiter.wait_all(&pending))?;
        Ok(Self { state, queue })
    }

    /// The CUDA stream behind a [`Stream`], if it is one.
    pub fn of(stream: &dyn Stream) -> Option<&Self> {
        stream.as_any().downcast_ref()
    }

    /// Makes everything submitted later start only after what an engine's event, recorded before,
    /// stands for.
    ///
    /// # Errors
    /// Full queue, poisoned stream.
    ///
    /// # Safety
    /// `event` is a `CUevent` of this process that is not destroyed before an event recorded behind
    /// it on this stream is complete.
    pub unsafe fn wait_engine(&self, event: usize) -> Result<(), DeviceError> {
        self.queue
            .submit(&self.state.health, CudaOperation::WaitEngine(EventHandle::from_engine(event)))
            .map_err(|refused| refused.0)
    }

    /// Queues a launch. `owners` live until it is complete.
    ///
    /// # Errors
    /// Full queue, poisoned stream, a kernel of another device.
    ///
    /// # Safety
    /// The argument is the kernel's. Until the launch is complete, the memory that it leads to
    /// stays allocated, and nobody else writes what the kernel reads or touches what it writes.
    pub unsafe fn launch(
        &self,
        function: &CudaFunction,
        launch: CudaLaunch,
        owners: Vec<Owner>,
    ) -> Result<Event, DeviceError> {
        if !function.is_of(&self.state.context) {
            let device = self.state.context.name.clone();
            return Err(DeviceError::Unsupported {
                device,
                operation: "launching a kernel of another device",
            });
        }
        let work = CudaWork::Launch { function: function.clone(), launch, _owners: owners };
        self.submit(work).map_err(|refused| refused.0)
    }

    /// As [`Stream::copy`], by the calls that `engine` names.
    ///
    /// # Errors
    /// As [`Stream::copy`], and [`DeviceError::Unsupported`] where the driver has no such call.
    pub fn copy_by(&self, batch: CopyBatch, engine: CopyEngine) -> Result<Event, Box<CopyRejected>> {
        let context = &self.state.context;
        let checked =
            self.state.health.check_device(batch.device()).and_then(|()| context.check_engine(engine));
        if let Err(error) = checked {
            return Err(Box::new(CopyRejected { batch, error }));
        }
        self.submit(CudaWork::Copy(batch, engine)).map_err(|refused| {
            let (error, op) = *refused;
            let CudaOperation::Work(CudaWork::Copy(batch, _), _) = op else {
                unreachable!("a refused operation comes back as it was")
            };
            Box::new(CopyRejected { batch, error })
        })
    }

    /// A point whose distance from another one the device measures.
    ///
    /// # Errors
    /// Full queue, poisoned stream, [`DeviceError::Driver`].
    pub fn mark(&self) -> Result<CudaMark, DeviceError> {
        let point = Arc::new(TimedEvent::new(&self.state.context)?);
        let passed = self.submit(CudaWork::Mark(Arc::clone(&point))).map_err(|refused| refused.0)?;
        Ok(CudaMark { point, passed })
    }

    fn submit(&self, work: CudaWork) -> Result<Event, RefusedOperation<CudaOperation>> {
        let (event, pending) = PendingEvent::new(&self.state.context);
        self.queue.submit(&self.state.health, CudaOperation::Work(work, pending)).map(|()| event)
    }
}

impl Stream for CudaStream {
    fn name(&self) -> &str {
        self.state.health.name()
    }

    fn device(&self) -> DeviceId {
        self.state.health.device()
    }

    fn copy(&self, batch: CopyBatch) -> Result<Event, Box<CopyRejected>> {
        self.copy_by(batch, CopyEngine::Auto)
    }

    fn fill(&self, memory: &DeviceMemory, offset: u64, len: u64, byte: u8) -> Result<Event, DeviceError> {
        self.state.health.check_device(Some(memory.device()))?;
        memory.address_of(offset, len)?;
        self.submit(CudaWork::Fill { memory: memory.clone(), offset, len, byte }).map_err(|refused| refused.0)
    }

    fn record(&self) -> Result<Event, DeviceError> {
        let (event, pending) = PendingEvent::new(&self.state.context);
        self.queue.send(&self.state.health, CudaOperation::Record(pending)).map_err(|refused| refused.0)?;
        Ok(event)
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        self.queue.submit(&self.state.health, CudaOperation::Wait(event.clone())).map_err(|refused| refused.0)
    }

    fn status(&self) -> Result<(), DeviceError> {
        self.state.health.status()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CudaStream({} of device {}, {} queued)",
            self.state.health.name(),
            self.state.health.device(),
            self.queue.len()
        )
    }
}

impl StreamState {
    /// Issues operations until every handle of the stream is gone and the queue is empty.
    fn issue_all(&self, queue: &Receiver<CudaOperation>, issued: &Sender<Issued>) {
        for op in queue {
            let (work, pending) = match op {
                CudaOperation::Work(work, pending) => (Some(work), pending),
                CudaOperation::Record(pending) => (None, pending),
                CudaOperation::Wait(event) => {
                    if let Err(error) = self.wait_for(&event) {
                        self.health.stop(&error);
                    }
                    continue;
                }
                CudaOperation::WaitEngine(event) => {
                    if let Err(error) = self.wait_on_device(event) {
                        self.health.stop(&error);
                    }
                    continue;
                }
            };
            match self.health.status().and_then(|()| self.issue(work.as_ref(), &pending)) {
                Ok(event) => {
                    // The other thread lives as long as this one.
                    let _never_refused = issued.send(Issued { work, pending, event });
                }
                Err(error) => {
                    self.health.stop(&error);
                    self.release_memory(work);
                    pending.complete(Err(error));
                }
            }
        }
    }

    fn issue(&self, work: Option<&CudaWork>, pending: &PendingEvent) -> Result<EventHandle, DeviceError> {
        let _entered = self.context.enter()?;
        match work {
            Some(CudaWork::Copy(batch, engine)) => self.context.issue_copies(batch, *engine, self.stream)?,
            Some(CudaWork::Mark(point)) => point.record(self.stream)?,
            Some(CudaWork::Fill { memory, offset, len, byte }) => {
                let address = memory.address_of(*offset, *len)?;
                if *len > 0 {
                    let (functions, len) = (self.context.functions(), *len as usize);
                    // SAFETY: the range lies inside memory of this device, which the operation
                    // holds until it is complete.
                    self.context.check(unsafe {
                        call!(functions, cuMemsetD8Async(address, *byte, len, self.stream.0))
                    })?;
                }
            }
            Some(CudaWork::Launch { function, launch, .. }) => {
                // SAFETY: the caller that queued the launch guarantees its argument and the memory;
                // the operation holds the owners.
                unsafe { function.issue(launch, self.stream) }?;
            }
            None => {}
        }
        pending.event.record(self.stream)
    }

    /// Called after a failed call, which may have left copies behind that still run. Drops the
    /// memory of an operation when the device is done with it, or never, if that cannot be found
    /// out.
    fn release_memory(&self, work: Option<CudaWork>) {
        if !self.is_idle() {
            std::mem::forget(work);
        }
    }

    /// Waits until nothing of the stream runs any more; whether that is sure. In a dead context
    /// nothing does.
    fn is_idle(&self) -> bool {
        let result = self.context.in_context(|driver| {
            // SAFETY: the stream is alive.
            unsafe { call!(driver, cuStreamSynchronize(self.stream.0)) }
        });
        result.map_or(true, |result| result.code == 0 || is_fatal(result.code))
    }

    /// On the device for events of CUDA streams, in this thread for all others.
    fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        if let EventStatus::Failed(error) = event.query() {
            return Err(error);
        }
        let on_device = event.backend().as_any().downcast_ref::<CudaEvent>();
        loop {
            // An event that can no longer complete fails, so this ends.
            let deadline = Instant::now() + Duration::from_secs(60);
            match on_device.map(|event| event.recorded(deadline)) {
                Some(Ok(Some(recorded))) => return self.wait_on_device(recorded),
                Some(Err(_late)) => continue,
                Some(Ok(None)) | None => {}
            }
            match event.backend().wait(deadline) {
                EventStatus::Complete => return Ok(()),
                EventStatus::Failed(error) => return Err(error),
                EventStatus::Pending => {}
            }
        }
    }

    fn wait_on_device(&self, event: EventHandle) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        unsafe { self.context.stream_wait(self.stream, event) }
    }

    /// Waits for what was issued, one after the other.
    fn wait_all(&self, pending: &Receiver<Issued>) {
        let mut failed = false;
        for Issued { work, pending, event } in pending {
            let mut result = self.wait_issued(event).map_err(|error| {
                let operation = work.as_ref().map_or_else(|| "an event".to_owned(), CudaWork::describe);
                let stream = Arc::clone(self.health.name());
                DeviceError::OperationFailed { stream, operation, reason: error.to_string() }
            });
            // It may have been issued before an earlier operation failed. An event says that
            // everything before it is done, so it fails too, whatever the driver reports.
            if failed {
                result = result.and_then(|()| self.health.status());
            }
            // Its memory is dropped before anybody learns that it is complete.
            if let Err(error) = &result {
                failed = true;
                self.health.stop(error);
                self.release_memory(work);
            } else {
                drop(work);
            }
            pending.complete(result);
        }
    }

    fn wait_issued(&self, event: EventHandle) -> Result<(), DeviceError> {
        // SAFETY: the event is alive: its ticket holds it.
        self.context.must(|driver| unsafe { call!(driver, cuEventSynchronize(event.0)) })
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once, after both threads.
        self.context.release(|driver| unsafe { call!(driver, cuStreamDestroy_v2(self.stream.0)) });
    }
}

impl CudaWork {
    fn describe(&self) -> String {
        match self {
            Self::Mark(_) => "a mark".to_owned(),
            Self::Copy(batch, _) => {
                format!("{} copy of {} bytes in {} pieces", batch.direction(), batch.bytes(), batch.len())
            }
            Self::Fill { memory, offset, len, .. } => format!("fill of {len} bytes at {offset} of {memory}"),
            Self::Launch { launch, .. } => format!("launch of {} blocks of threads", launch.grid),
        }
    }
}
