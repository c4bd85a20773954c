//! Device memory.

use std::sync::Arc;
use std::time::Instant;

use kvbm_device::{CopyBatch, Device, DeviceMemory, Direction, HostBuffer, Owner, Stream};

use crate::{Backing, Storage, StorageAllocator, StorageError, StorageExt, StorageKind};

/// Memory of a device: ours, or the engine's.
#[derive(Debug)]
pub struct DeviceStorage {
    memory: DeviceMemory,
    alignment: u64,
}

impl DeviceStorage {
    /// Allocates `len` bytes on `device`, aligned to `alignment`; freed when dropped.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn new(device: &dyn Device, len: u64, alignment: u64) -> Result<Self, StorageError> {
        let memory = device.allocate(len, alignment)?;
        let alignment = alignment_of(memory.address());
        Ok(Self { memory, alignment })
    }

    /// Memory that the engine allocated: `len` bytes at `address` of `device`. Never freed by us.
    /// `owner` keeps it allocated: it is dropped after this storage, all bound layouts over it, and
    /// all work on them.
    ///
    /// # Errors
    /// As [`Device::register_external`].
    ///
    /// # Safety
    /// The range stays allocated until the last clone of `owner` is dropped.
    pub unsafe fn from_external(
        address: u64,
        len: u64,
        device: &dyn Device,
        owner: Owner,
    ) -> Result<Self, StorageError> {
        // SAFETY: the caller promises that the owner keeps the range, and the owner lives as long
        // as the memory below, which holds it.
        let memory = unsafe { device.register_external(address, len) }?;
        let owner: Owner = Arc::new((memory.clone(), owner));
        // SAFETY: the device knows the range, and both of its owners live as long as this.
        let memory = unsafe { DeviceMemory::from_raw(memory.device(), address, len, true, owner) };
        Ok(Self { memory, alignment: alignment_of(address) })
    }

    /// The memory.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Whether the engine owns it.
    pub fn is_external(&self) -> bool {
        self.memory.is_external()
    }

    /// Copies bytes in through `stream`, and waits. For set-up and checks; transfers batch and do
    /// not wait.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`], errors of the stream, or its deadline.
    pub fn upload(
        &self,
        stream: &dyn Stream,
        offset: u64,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), StorageError> {
        self.check_range(offset, bytes.len() as u64)?;
        let staging = HostBuffer::from_bytes(bytes);
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        batch.push_host_to_device(&staging, 0, &self.memory, offset, staging.len())?;
        run(stream, batch, deadline)
    }

    /// Copies bytes out through `stream`, and waits. For checks.
    ///
    /// # Errors
    /// As [`DeviceStorage::upload`].
    pub fn download(
        &self,
        stream: &dyn Stream,
        offset: u64,
        len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, StorageError> {
        self.check_range(offset, len)?;
        let mut staging = HostBuffer::zeroed(len as usize);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&self.memory, offset, &staging, 0, len)?;
        run(stream, batch, deadline)?;
        Ok(staging.exclusive_bytes()?.to_vec())
    }
}

fn run(stream: &dyn Stream, batch: CopyBatch, deadline: Instant) -> Result<(), StorageError> {
    let done = stream.copy(batch).map_err(|rejected| rejected.error)?;
    Ok(done.wait(deadline)?)
}

/// The largest power of two, up to 1 GiB, that an address is a multiple of.
fn alignment_of(address: u64) -> u64 {
    1 << address.trailing_zeros().min(30)
}

impl Storage for DeviceStorage {
    fn kind(&self) -> StorageKind {
        StorageKind::Device
    }

    fn backing(&self) -> Backing<'_> {
        Backing::Device(&self.memory)
    }

    fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// Makes [`DeviceStorage`] that we own.
#[derive(Clone, Debug)]
pub struct DeviceAllocator {
    device: Arc<dyn Device>,
}

impl DeviceAllocator {
    /// Allocates on `device`.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device }
    }
}

impl StorageAllocator for DeviceAllocator {
    fn allocate(&self, len: u64, alignment: u64) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(Arc::new(DeviceStorage::new(&*self.device, len, alignment)?))
    }
}
