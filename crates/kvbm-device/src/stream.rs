//! Work in order.

use std::any::Any;
use std::fmt;

use crate::{CopyBatch, CopyRejected, DeviceError, DeviceId, DeviceMemory, Event};

/// A queue of operations that the device runs one after the other, concurrently with other streams
/// and with the host.
///
/// - *Order*: an operation starts after every earlier one of its stream is complete; pieces of one
///   [`CopyBatch`] have no order among themselves. Streams are unordered against each other except
///   through [`Stream::wait`].
/// - *Ownership*: what an operation touches is held by the queue until the hardware is done,
///   even if all handles are dropped. Dropping a stream neither waits nor cancels: queued work
///   completes.
/// - *Races*: source and destination are *shared bytes* ([`HostRegion`](crate::HostRegion)):
///   between submission and completion the caller must leave them alone. Work that overlaps without
///   order leaves unspecified bytes, as on real hardware; the pool's block states exclude it.
/// - *Failure*: the first operation that fails poisons the stream. Everything after it is not run
///   and fails with [`DeviceError::Poisoned`]; create a new stream to go on.
/// - *Bound*: the queue is bounded; submission never blocks but fails with
///   [`DeviceError::QueueFull`].
pub trait Stream: Send + Sync + fmt::Debug {
    /// Name given at creation.
    fn name(&self) -> &str;

    /// Device it belongs to.
    fn device(&self) -> DeviceId;

    /// Queues a batch of copies. The event completes after the last byte, when the batch has
    /// dropped its memory.
    ///
    /// # Errors
    /// Gives the batch back with the reason: full queue, poisoned stream, memory of another device.
    fn copy(&self, batch: CopyBatch) -> Result<Event, Box<CopyRejected>>;

    /// Queues setting `len` bytes at `offset` of `memory` to `byte`.
    ///
    /// # Errors
    /// As for [`Stream::copy`], and [`DeviceError::OutOfRange`].
    fn fill(&self, memory: &DeviceMemory, offset: u64, len: u64, byte: u8) -> Result<Event, DeviceError>;

    /// An event that completes when everything submitted so far is complete.
    ///
    /// # Errors
    /// Full queue. On a poisoned stream the event comes back failed, not as an error here.
    fn record(&self) -> Result<Event, DeviceError>;

    /// Makes everything submitted later start only after `event` is complete. A failed event
    /// poisons this stream.
    ///
    /// # Errors
    /// Full queue, poisoned stream.
    fn wait(&self, event: &Event) -> Result<(), DeviceError>;

    /// Whether the stream still works.
    ///
    /// # Errors
    /// [`DeviceError::Poisoned`] with the first failure.
    fn status(&self) -> Result<(), DeviceError>;

    /// The implementation, for code that only works on one kind of device.
    fn as_any(&self) -> &dyn Any;
}
