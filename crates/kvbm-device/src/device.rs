//! The trait that every device implements.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{DeviceError, DeviceMemory, HostRegion, PinnedHost, Stream};

/// Number of a device on this node (the CUDA ordinal, or the number given to an emulated device).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What stands behind a [`Device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Host memory out of the CPU's reach, streams on threads.
    Emulated,
    /// An NVIDIA GPU through its driver.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Emulated => "emulated",
            Self::Cuda => "cuda",
        })
    }
}

/// What a device says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number on this node.
    pub id: DeviceId,
    /// Its name, for people.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Memory in bytes.
    pub total_bytes: u64,
    /// Memory that is not allocated, in bytes.
    pub free_bytes: u64,
    /// Alignment in bytes that every allocation has at least; also the granularity of allocations.
    pub granularity_bytes: u64,
}

/// An accelerator: memory that the CPU does not touch, and streams that move bytes into, out of and
/// inside it.
///
/// Object safe; shared as `Arc<dyn Device>`. Allocations, streams and events keep alive what they
/// need of the device, so handles may be dropped in any order.
pub trait Device: Send + Sync + fmt::Debug {
    /// Number of this device.
    fn id(&self) -> DeviceId;

    /// Name, kind, total and free memory.
    fn info(&self) -> DeviceInfo;

    /// Allocates `len` bytes (more than zero), aligned to `alignment` (a power of two). The content
    /// is undefined.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Invalid`].
    fn allocate(&self, len: u64, alignment: u64) -> Result<DeviceMemory, DeviceError>;

    /// Makes memory that the engine allocated on this device usable here. It is
    /// never freed by us.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`] if the range is not inside one live allocation of this
    /// device.
    ///
    /// # Safety
    /// The range must stay allocated until the last clone of the returned handle is gone and all
    /// work on it is complete.
    unsafe fn register_external(&self, address: u64, len: u64) -> Result<DeviceMemory, DeviceError>;

    /// Creates a stream. `name` stands in errors and thread names; several streams may have the
    /// same one.
    ///
    /// # Errors
    /// [`DeviceError::Os`] if the system refuses a thread or a handle.
    fn create_stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError>;

    /// Page-locks host memory and registers it with the device, until the returned guard is
    /// dropped. The range is widened to whole pages; it must not overlap one that is registered
    /// already.
    ///
    /// # Errors
    /// [`DeviceError::PinLimit`], [`DeviceError::AlreadyPinned`], [`DeviceError::Os`].
    fn register_host(&self, region: HostRegion) -> Result<PinnedHost, DeviceError>;

    /// As [`Device::register_host`], telling how far it has come: bytes that are done, and bytes in
    /// all. Gigabytes take seconds. `progress` is called from several threads.
    ///
    /// # Errors
    /// As [`Device::register_host`].
    fn register_host_with(
        &self,
        region: HostRegion,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<PinnedHost, DeviceError> {
        let bytes = region.len();
        let pinned = self.register_host(region)?;
        progress(bytes, bytes);
        Ok(pinned)
    }

    /// The NUMA node that the device is attached to, where that is known: host memory of that node
    /// is the closest.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// The implementation, for code that only works on one kind of device.
    fn as_any(&self) -> &dyn Any;
}
