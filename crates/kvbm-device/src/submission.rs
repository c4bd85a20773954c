//! The caller's side of every stream: its name, its first failure, and the bounded queue to its
//! thread.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::Mutex;

use crate::{DeviceError, DeviceId};

/// A stream's name and device, and its first failure, after which it does nothing more.
pub(crate) struct Health {
    name: Arc<str>,
    device: DeviceId,
    poison: Mutex<Option<Arc<DeviceError>>>,
}

impl Health {
    pub(crate) fn new(device: DeviceId, name: &str) -> Self {
        Self { name: Arc::from(name), device, poison: Mutex::new(None) }
    }

    pub(crate) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) const fn device(&self) -> DeviceId {
        self.device
    }

    /// [`DeviceError::Poisoned`] once something failed.
    pub(crate) fn status(&self) -> Result<(), DeviceError> {
        match &*self.poison.lock() {
            None => Ok(()),
            Some(cause) => {
                Err(DeviceError::Poisoned { stream: Arc::clone(&self.name), cause: Arc::clone(cause) })
            }
        }
    }

    /// From now on the stream is poisoned. Only the first cause counts.
    pub(crate) fn stop(&self, cause: &DeviceError) {
        self.poison.lock().get_or_insert_with(|| Arc::new(cause.clone()));
    }

    /// Whether memory of `found` may be used here; host memory is of no device.
    pub(crate) fn check_device(&self, found: Option<DeviceId>) -> Result<(), DeviceError> {
        match found.filter(|found| *found != self.device) {
            Some(found) => Err(DeviceError::WrongDevice { expected: self.device, found }),
            None => Ok(()),
        }
    }

    /// Starts a thread of the stream, detached.
    pub(crate) fn spawn(&self, role: &str, run: impl FnOnce() + Send + 'static) -> Result<(), DeviceError> {
        // The system takes no NUL in the name of a thread, and the standard library would panic.
        let name = format!("kvbm-{role}{}-{}", self.device, self.name.replace('\0', "_"));
        let spawned = std::thread::Builder::new().name(name).spawn(run);
        spawned
            .map(|_detached| ())
            .map_err(|error| DeviceError::from_io("creating a thread of a stream", &error))
    }
}

/// Why an operation was not queued, and the operation, unchanged.
pub(crate) type RefusedOperation<Op> = Box<(DeviceError, Op)>;

/// The queue to a stream's thread. Dropped, the thread ends when it is empty.
pub(crate) struct Submission<Op> {
    queue: Sender<Op>,
    limit: usize,
}

impl<Op> Submission<Op> {
    /// A queue of at most `limit` operations, and the receiver for the stream's thread.
    pub(crate) fn new(limit: usize) -> (Self, Receiver<Op>) {
        let (queue, operations) = bounded(limit);
        (Self { queue, limit }, operations)
    }

    /// Operations that wait for the thread.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Queues an operation, unless the stream has failed.
    pub(crate) fn submit(&self, health: &Health, op: Op) -> Result<(), RefusedOperation<Op>> {
        match health.status() {
            Ok(()) => self.send(health, op),
            Err(error) => Err(Box::new((error, op))),
        }
    }

    /// Queues an operation, even on a stream that has failed.
    pub(crate) fn send(&self, health: &Health, op: Op) -> Result<(), RefusedOperation<Op>> {
        let stream = Arc::clone(&health.name);
        self.queue.try_send(op).map_err(|refused| {
            Box::new(match refused {
                TrySendError::Full(op) => (DeviceError::QueueFull { stream, limit: self.limit }, op),
                TrySendError::Disconnected(op) => (DeviceError::Closed { stream }, op),
            })
        })
    }
}
