//! Devices: memory of an accelerator, streams that run in order on it, events, batched copies.
//!
//! **Knows:** how bytes get into and out of device memory, in which order, and what keeps the
//! memory alive until then.
//! **Must never know:** what the bytes mean: blocks, layouts, hashes, tiers.
//!
//! | concept | type |
//! |---|---|
//! | a device | [`Device`] (object safe; used as `Arc<dyn Device>`) |
//! | memory of the device, ours or the engine's | [`DeviceMemory`] |
//! | host memory that the device may read and write | [`HostRegion`], [`HostBuffer`], [`PinnedHost`] |
//! | a queue of operations in order | [`Stream`], [`CopyBatch`] |
//! | "complete up to here" | [`Event`] |
//!
//! [`CudaDevice`] is an NVIDIA GPU. [`EmulatedDevice`] needs no hardware. It also keeps its memory
//! out of the CPU's reach: an access to one of its addresses faults. Bytes move only through its
//! streams, and each stream runs on a thread of its own. The suite [`conformance`] checks both.
//!
//! This crate does not decide who may touch which bytes when: [`HostRegion`] has the contract of
//! *shared bytes*.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use kvbm_device::{CopyBatch, Device, Direction, EmulatedConfig, EmulatedDevice, HostBuffer};
//!
//! let device = EmulatedDevice::new(EmulatedConfig::default())?;
//! let stream = device.create_stream("h2d")?;
//! let memory = device.allocate(4096, 256)?;
//! let mut host = HostBuffer::zeroed(4096);
//! host.exclusive_bytes()?[..15].copy_from_slice(b"keys and values");
//!
//! let mut batch = CopyBatch::new(Direction::HostToDevice);
//! batch.push_host_to_device(&host, 0, &memory, 1024, 15)?;
//! let done = stream.copy(batch)?;
//! done.wait(Instant::now() + Duration::from_secs(10))?;
//! # Ok::<(), kvbm_device::DeviceError>(())
//! ```

mod batch;
mod clock;
pub mod conformance;
mod cuda;
mod device;
mod emulated;
mod error;
mod event;
mod host;
mod memory;
mod model;
mod rows;
mod stream;
mod submission;

pub use batch::{CopyBatch, CopyObserver, CopyPiece, CopyRejected, CopyRows, Direction};
pub use clock::{Clock, ManualClock, SystemClock};
pub use cuda::{
    CopyEngine, CudaDevice, CudaDriver, CudaFunction, CudaLaunch, CudaMark, CudaModule, CudaStream,
    CudaUnavailable, PinParts, SharedMemory, SharedVia,
};
pub use device::{Device, DeviceId, DeviceInfo, DeviceKind};
pub use emulated::{
    EmulatedConfig, EmulatedDevice, EmulatedStream, Fault, FaultHandle, FaultRule, FaultTicket, KernelMemory,
    OpKind, RandomDelays, StreamingCopy, copy_streaming,
};
pub use error::DeviceError;
pub use event::{Completer, Event, EventBackend, EventCallback, EventStatus};
pub use host::{HostBuffer, HostRegion, PinnedHost};
pub use memory::DeviceMemory;
pub use model::{Link, ModelPath, SharedLinks, TransferModel};
pub use rows::{RowAxis, RowGrid};
pub use stream::Stream;

/// Keeps memory alive while hardware may still access it.
pub type Owner = std::sync::Arc<dyn std::any::Any + Send + Sync>;
