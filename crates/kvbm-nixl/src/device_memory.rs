//! Bytes of device memory for the processor: digests need them, and so does the agent that moves
//! bytes without NIXL.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{CopyBatch, Device, DeviceId, DeviceMemory, Direction, HostBuffer, Owner, Stream};
use kvbm_plan::deadline_after;
use kvbm_storage::StorageError;
use parking_lot::Mutex;

/// How long a copy between a device and the host may take: a block needs less than a millisecond.
/// The thread that answers peers waits for it.
const COPY_DEADLINE: Duration = Duration::from_secs(1);

const STREAM: &str = "kvbm-remote";

/// A stream over which the processor reads and writes memory of a device.
pub struct DeviceAccess {
    device: Arc<dyn Device>,
    stream: Mutex<Arc<dyn Stream>>,
}

impl DeviceAccess {
    /// Makes a stream on `device`.
    ///
    /// # Errors
    /// Those of [`Device::create_stream`].
    pub fn new(device: Arc<dyn Device>) -> Result<Self, StorageError> {
        let stream = Mutex::new(device.create_stream(STREAM)?);
        Ok(Self { device, stream })
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.device.id()
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

    /// Writes `bytes` at `offset` of device memory. `keep` is held until the device is done, which
    /// may be after this has returned with an error.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn write(
        &self,
        memory: &DeviceMemory,
        offset: u64,
        bytes: &[u8],
        keep: &Owner,
    ) -> Result<(), StorageError> {
        let staging = HostBuffer::from_bytes(bytes);
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        batch.hold(keep);
        batch.push_host_to_device(&staging, 0, memory, offset, bytes.len() as u64)?;
        self.run(batch)
    }

    fn run(&self, batch: CopyBatch) -> Result<(), StorageError> {
        let done = self.stream()?.copy(batch).map_err(|rejected| rejected.error)?;
        // The batch holds the buffer, and what it was given to hold, until the device is done.
        Ok(done.wait(deadline_after(Instant::now(), COPY_DEADLINE))?)
    }

    /// A stream that works: the first failure makes one useless.
    fn stream(&self) -> Result<Arc<dyn Stream>, StorageError> {
        let mut stream = self.stream.lock();
        if stream.status().is_err() {
            *stream = self.device.create_stream(STREAM)?;
        }
        Ok(Arc::clone(&stream))
    }
}

impl fmt::Debug for DeviceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAccess({})", self.device.id())
    }
}
