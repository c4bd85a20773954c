//! Bytes of device memory for the processor: digests need them, and so does the agent that moves
//! bytes without NIXL.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{CopyBatch, Device, DeviceId, DeviceMemory, Direction, HostBuffer, Stream};
use kvbm_plan::deadline_after;
use kvbm_storage::StorageError;

/// How long a copy between a device and the host may take: a block needs less than a millisecond.
const COPY_DEADLINE: Duration = Duration::from_secs(5);

/// A stream over which the processor reads and writes memory of a device.
pub struct DeviceAccess {
    device: DeviceId,
    stream: Arc<dyn Stream>,
}

impl DeviceAccess {
    /// Makes a stream on `device`.
    ///
    /// # Errors
    /// Those of [`Device::create_stream`].
    pub fn new(device: &dyn Device) -> Result<Self, StorageError> {
        Ok(Self { device: device.id(), stream: device.create_stream("kvbm-remote")? })
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The bytes of these ranges of device memory (memory, offset, length), one after the other.
    ///
    /// # Errors
    /// A range outside its memory; memory of another device; errors of the stream, and its
    /// deadline.
    pub(crate) fn read(&self, ranges: &[(&DeviceMemory, u64, u64)]) -> Result<Vec<u8>, StorageError> {
        let bytes: u64 = ranges.iter().map(|(_, _, len)| len).sum();
        let mut staging = HostBuffer::zeroed(bytes as usize);
        let mut batch = CopyBatch::with_capacity(Direction::DeviceToHost, ranges.len());
        let mut at = 0;
        for (memory, offset, len) in ranges {
            batch.push_device_to_host(memory, *offset, &staging, at, *len)?;
            at += len;
        }
        self.run(batch)?;
        Ok(staging.exclusive_bytes()?.to_vec())
    }

    /// Writes `bytes` at `offset` of device memory.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn write(&self, memory: &DeviceMemory, offset: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let staging = HostBuffer::from_bytes(bytes);
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        batch.push_host_to_device(&staging, 0, memory, offset, bytes.len() as u64)?;
        self.run(batch)
    }

    fn run(&self, batch: CopyBatch) -> Result<(), StorageError> {
        let done = self.stream.copy(batch).map_err(|rejected| rejected.error)?;
        // The batch holds the buffer until the device is done, so one that is late harms nobody.
        Ok(done.wait(deadline_after(Instant::now(), COPY_DEADLINE))?)
    }
}

impl fmt::Debug for DeviceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAccess({})", self.device)
    }
}
