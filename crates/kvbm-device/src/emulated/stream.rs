//! The handle of an emulated stream: a bounded queue to its thread.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Sender, TrySendError, bounded};

use super::Shared;
use super::delays::Disorder;
use super::queue::{Op, Runner, StreamState, Work};
use super::work::KernelMemory;
use crate::{CopyBatch, CopyRejected, DeviceError, DeviceId, DeviceMemory, Event, Owner, Stream};

/// A stream of an [`EmulatedDevice`](crate::EmulatedDevice). Besides what every [`Stream`] does, it runs host closures over
/// device memory: the kernels of a device without hardware.
pub struct EmulatedStream {
    device: DeviceId,
    state: Arc<StreamState>,
    queue: Sender<Op>,
    queue_limit: usize,
}

/// Why an operation was not queued, and the operation.
type Refused = Box<(DeviceError, Op)>;

impl EmulatedStream {
    pub(super) fn start(device: &Arc<Shared>, name: &str, number: u64) -> Result<Self, DeviceError> {
        let (queue, operations) = bounded(device.queue_limit);
        let state = Arc::new(StreamState::new(name));
        device.streams_alive.fetch_add(1, Ordering::AcqRel);
        let runner = Runner {
            device: Arc::clone(device),
            state: Arc::clone(&state),
            disorder: device.random_delays.map(|delays| Disorder::new(delays, number)),
        };
        // The system takes no NUL in the name of a thread, and the standard library would panic.
        let thread = format!("kvbm-dev{}-{}", device.id, name.replace('\0', "_"));
        std::thread::Builder::new()
            .name(thread)
            .spawn(move || runner.run(&operations))
            .map_err(|error| DeviceError::from_io("creating the thread of a stream", &error))?;
        Ok(Self { device: device.id, state, queue, queue_limit: device.queue_limit })
    }

    /// The emulated stream behind a [`Stream`], if it is one.
    pub fn of(stream: &dyn Stream) -> Option<&Self> {
        stream.as_any().downcast_ref()
    }

    /// Queues a closure over device memory. `owners` (and what the closure captures) live until it has run.
    /// A panic in it, or an error from it, fails the operation and poisons the stream.
    ///
    /// # Errors
    /// Full queue, poisoned stream.
    pub fn launch(
        &self,
        name: &'static str,
        owners: Vec<Owner>,
        kernel: impl FnOnce(&mut KernelMemory<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<Event, DeviceError> {
        self.submit(Work::Launch { name, kernel: Box::new(kernel), owners }).map_err(|refused| refused.0)
    }

    /// A refused operation comes back as it was.
    fn submit(&self, work: Work) -> Result<Event, Refused> {
        let (event, done) = Event::completable();
        let op = Op::Work(work, done);
        match self.state.status() {
            Ok(()) => self.send(op).map(|()| event),
            Err(error) => Err(Box::new((error, op))),
        }
    }

    fn send(&self, op: Op) -> Result<(), Refused> {
        let stream = Arc::clone(&self.state.name);
        self.queue.try_send(op).map_err(|refused| {
            Box::new(match refused {
                TrySendError::Full(op) => (DeviceError::QueueFull { stream, limit: self.queue_limit }, op),
                TrySendError::Disconnected(op) => (DeviceError::Closed { stream }, op),
            })
        })
    }

    fn check_device(&self, found: Option<DeviceId>) -> Result<(), DeviceError> {
        match found {
            Some(found) if found != self.device => {
                Err(DeviceError::WrongDevice { expected: self.device, found })
            }
            _ => Ok(()),
        }
    }
}

impl Stream for EmulatedStream {
    fn name(&self) -> &str {
        &self.state.name
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn copy(&self, batch: CopyBatch) -> Result<Event, Box<CopyRejected>> {
        if let Err(error) = self.check_device(batch.device()) {
            return Err(Box::new(CopyRejected { batch, error }));
        }
        self.submit(Work::Copy(batch)).map_err(|refused| {
            let (error, op) = *refused;
            let Op::Work(Work::Copy(batch), _) = op else {
                unreachable!("a refused operation comes back as it was")
            };
            Box::new(CopyRejected { batch, error })
        })
    }

    fn fill(&self, memory: &DeviceMemory, offset: u64, len: u64, byte: u8) -> Result<Event, DeviceError> {
        self.check_device(Some(memory.device()))?;
        memory.address_of(offset, len)?;
        self.submit(Work::Fill { memory: memory.clone(), offset, len, byte }).map_err(|refused| refused.0)
    }

    fn record(&self) -> Result<Event, DeviceError> {
        let (event, done) = Event::completable();
        self.send(Op::Record(done)).map_err(|refused| refused.0)?;
        Ok(event)
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        self.state.status()?;
        self.send(Op::Wait(event.clone())).map_err(|refused| refused.0)
    }

    fn status(&self) -> Result<(), DeviceError> {
        self.state.status()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for EmulatedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "EmulatedStream({} of device {}, {} queued)",
            self.state.name,
            self.device,
            self.queue.len()
        )
    }
}
