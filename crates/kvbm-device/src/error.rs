//! What can go wrong on a device, and what to do about it.

use std::sync::Arc;

use crate::{DeviceId, Direction};

/// An error of a device, a stream or an event. Cheap to clone, because one failure is reported to
/// everybody who waits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no free range of this size.
    #[error(
        "device {device}: out of memory: asked for {asked} bytes, {free} of {total} are free (largest free range \
         {largest}); free device memory, ask for less, or give the device more memory"
    )]
    OutOfMemory {
        /// Device that was asked.
        device: DeviceId,
        /// Bytes asked for, after rounding up to the device's granularity.
        asked: u64,
        /// Bytes that are free in all.
        free: u64,
        /// Largest contiguous free range in bytes.
        largest: u64,
        /// Bytes the device has.
        total: u64,
    },
    /// A parameter breaks a rule.
    #[error("{what} is {value}, but {rule}")]
    Invalid {
        /// The parameter.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The rule it must obey.
        rule: &'static str,
    },
    /// A range does not lie inside its memory.
    #[error(
        "bytes {offset}..+{len} are outside of {memory}, which has {size} bytes; check the layout against the memory it is bound to"
    )]
    OutOfRange {
        /// The memory, in words.
        memory: String,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        size: u64,
    },
    /// Somebody else may be reading or writing the memory.
    #[error("{memory} is shared: drop every other part of it, and wait for the work that touches it")]
    Shared {
        /// The memory, in words.
        memory: String,
    },
    /// An address range is not inside one live allocation of the device.
    #[error(
        "device {device}: {len} bytes at {address:#x} are not inside a live allocation ({nearest}); was the memory freed, or does it belong to another device?"
    )]
    UnknownMemory {
        /// Device that was asked.
        device: DeviceId,
        /// First byte of the range.
        address: u64,
        /// Length of the range in bytes.
        len: u64,
        /// The closest allocation, in words.
        nearest: String,
    },
    /// Memory or stream of one device used with another.
    #[error(
        "memory of device {found} was given to device {expected}; use a stream of the device that owns the memory"
    )]
    WrongDevice {
        /// Device that was asked.
        expected: DeviceId,
        /// Device the argument belongs to.
        found: DeviceId,
    },
    /// A piece was pushed into a batch of another direction.
    #[error("a {found} piece was pushed into a {expected} batch; use one batch per direction")]
    WrongDirection {
        /// Direction of the batch.
        expected: Direction,
        /// Direction of the piece.
        found: Direction,
    },
    /// A batch has as many pieces as it may have.
    #[error("a copy batch takes at most {limit} pieces; submit this one and start another")]
    BatchFull {
        /// Most pieces in one batch.
        limit: usize,
    },
    /// The submission queue of a stream is full.
    #[error(
        "stream {stream}: {limit} operations are queued; wait for an event of this stream, then submit again"
    )]
    QueueFull {
        /// Stream that refused.
        stream: Arc<str>,
        /// Most operations queued at once.
        limit: usize,
    },
    /// An earlier operation of this stream failed, so what follows it is not run.
    #[error(
        "stream {stream} stopped after a failure: {cause}; create a new stream and repeat what was not completed"
    )]
    Poisoned {
        /// The stream.
        stream: Arc<str>,
        /// The first failure.
        cause: Arc<DeviceError>,
    },
    /// An operation failed on the device.
    #[error(
        "stream {stream}: {operation} failed on the device: {reason}; its destination bytes are undefined"
    )]
    OperationFailed {
        /// The stream.
        stream: Arc<str>,
        /// The operation, in words.
        operation: String,
        /// What the device said.
        reason: String,
    },
    /// The thread or driver behind a stream is gone.
    #[error("stream {stream} is closed: its thread has ended; create a new stream")]
    Closed {
        /// The stream.
        stream: Arc<str>,
    },
    /// An event can never complete: what should have completed it is gone.
    #[error(
        "an event was abandoned: {what} was dropped before it completed; treat the work before it as failed"
    )]
    Abandoned {
        /// What was dropped.
        what: &'static str,
    },
    /// A deadline passed. The work goes on; nothing was cancelled.
    #[error(
        "{what} was not complete at its deadline; the work goes on, so keep its memory until the event completes"
    )]
    Deadline {
        /// What was waited for.
        what: &'static str,
    },
    /// Host memory could not be page-locked because the process may not lock so much.
    #[error(
        "cannot page-lock {asked} bytes: the limit of locked memory is {limit} bytes; raise it (`ulimit -l`, or LimitMEMLOCK= in systemd), or use unpinned memory"
    )]
    PinLimit {
        /// Bytes to lock.
        asked: u64,
        /// `RLIMIT_MEMLOCK` of this process in bytes.
        limit: u64,
    },
    /// Host memory is registered already.
    #[error(
        "host bytes {address:#x}..+{len} overlap memory that is registered already; register each range once"
    )]
    AlreadyPinned {
        /// First byte of the range.
        address: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// The operating system refused.
    #[error("{operation} failed: {message} (errno {errno})")]
    Os {
        /// The system call and what it was for.
        operation: &'static str,
        /// `errno`.
        errno: i32,
        /// What the system says about it.
        message: String,
    },
    /// The device's driver refused a call.
    #[error("device {device}: {call} returned {name} ({code}); {way_out}")]
    Driver {
        /// The device.
        device: DeviceId,
        /// The driver's function.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// The driver's name of that.
        name: String,
        /// What to do about it.
        way_out: &'static str,
    },
    /// The device does not offer this.
    #[error("device {device} does not support {operation}")]
    Unsupported {
        /// The device, by name.
        device: String,
        /// The operation.
        operation: &'static str,
    },
}

impl DeviceError {
    /// The last error of the operating system, as the result of `operation`.
    pub fn last_os(operation: &'static str) -> Self {
        Self::from_io(operation, &std::io::Error::last_os_error())
    }

    /// An error of the operating system, as the result of `operation`.
    pub fn from_io(operation: &'static str, error: &std::io::Error) -> Self {
        Self::Os { operation, errno: error.raw_os_error().unwrap_or(0), message: error.to_string() }
    }
}
