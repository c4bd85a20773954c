//! The handle of an emulated stream: a bounded queue to its thread.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::EmulatedState;
use super::delays::Disorder;
use super::queue::{EmulatedOperation, EmulatedWork, Runner};
use super::work::KernelMemory;
use crate::submission::{Health, RefusedOperation, Submission};
use crate::{CopyBatch, CopyRejected, DeviceError, DeviceId, DeviceMemory, Event, Owner, Stream};

/// A stream of an [`EmulatedDevice`](crate::EmulatedDevice). Besides what every [`Stream`] does, it
/// runs host closures over device memory: the kernels of a device without hardware.
pub struct EmulatedStream {
    health: Arc<Health>,
    queue: Submission<EmulatedOperation>,
}

impl EmulatedStream {
    pub(super) fn start(device: &Arc<EmulatedState>, name: &str, number: u64) -> Result<Self, DeviceError> {
        let (queue, operations) = Submission::new(device.queue_limit);
        let health = Arc::new(Health::new(device.id, name));
        device.streams_alive.fetch_add(1, Ordering::AcqRel);
        let runner = Runner {
            device: Arc::clone(device),
            health: Arc::clone(&health),
            disorder: device.random_delays.map(|delays| Disorder::new(delays, number)),
        };
        health.spawn("dev", move || runner.run(&operations))?;
        Ok(Self { health, queue })
    }

    /// The emulated stream behind a [`Stream`], if it is one.
    pub fn of(stream: &dyn Stream) -> Option<&Self> {
        stream.as_any().downcast_ref()
    }

    /// Queues a closure over device memory. `owners` (and what the closure captures) live until it
    /// has run. A panic in it, or an error from it, fails the operation and poisons the stream.
    ///
    /// # Errors
    /// Full queue, poisoned stream.
    pub fn launch(
        &self,
        name: &'static str,
        owners: Vec<Owner>,
        kernel: impl FnOnce(&mut KernelMemory<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<Event, DeviceError> {
        self.submit(EmulatedWork::Launch { name, kernel: Box::new(kernel), owners })
            .map_err(|refused| refused.0)
    }

    fn submit(&self, work: EmulatedWork) -> Result<Event, RefusedOperation<EmulatedOperation>> {
        let (event, done) = Event::completable();
        self.queue.submit(&self.health, EmulatedOperation::Work(work, done)).map(|()| event)
    }
}

impl Stream for EmulatedStream {
    fn name(&self) -> &str {
        self.health.name()
    }

    fn device(&self) -> DeviceId {
        self.health.device()
    }

    fn copy(&self, batch: CopyBatch) -> Result<Event, Box<CopyRejected>> {
        if let Err(error) = self.health.check_device(batch.device()) {
            return Err(Box::new(CopyRejected { batch, error }));
        }
        self.submit(EmulatedWork::Copy(batch)).map_err(|refused| {
            let (error, op) = *refused;
            let EmulatedOperation::Work(EmulatedWork::Copy(batch), _) = op else {
                unreachable!("a refused operation comes back as it was")
            };
            Box::new(CopyRejected { batch, error })
        })
    }

    fn fill(&self, memory: &DeviceMemory, offset: u64, len: u64, byte: u8) -> Result<Event, DeviceError> {
        self.health.check_device(Some(memory.device()))?;
        memory.address_of(offset, len)?;
        self.submit(EmulatedWork::Fill { memory: memory.clone(), offset, len, byte })
            .map_err(|refused| refused.0)
    }

    fn record(&self) -> Result<Event, DeviceError> {
        let (event, done) = Event::completable();
        self.queue.send(&self.health, EmulatedOperation::Record(done)).map_err(|refused| refused.0)?;
        Ok(event)
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        self.queue.submit(&self.health, EmulatedOperation::Wait(event.clone())).map_err(|refused| refused.0)
    }

    fn status(&self) -> Result<(), DeviceError> {
        self.health.status()
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
            self.health.name(),
            self.health.device(),
            self.queue.len()
        )
    }
}
