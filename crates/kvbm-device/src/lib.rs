//! The device seam of kvbm: memory of an accelerator, streams that run in order on it, events,
//! batched copies.
//!
//! **Knows:** how bytes get into and out of device memory, what order they move in, who keeps them
//! alive meanwhile.
//! **Must never know:** what the bytes mean: no blocks, no layouts, no hashes, no tiers.
//!
//! | concept | type |
//! |---|---|
//! | a device | [`Device`] (object safe; used as `Arc<dyn Device>`) |
//! | memory of the device, ours or the engine's | [`DeviceMemory`] |
//! | memory of the host that the device may read and write | [`HostRegion`], [`HostBuffer`], [`PinnedHost`] |
//! | work in order | [`Stream`], [`CopyBatch`] |
//! | "done up to here" | [`Event`] |
//!
//! Behind the seam stands the [`EmulatedDevice`], which needs no hardware and still keeps its
//! memory out of the CPU's reach: a stray access to an address that it hands out faults, bytes move
//! only through its streams, each stream runs on a thread of its own. A real device is one more
//! implementation of [`Device`], checked by the same [`conformance`] suite.
//!
//! Who may touch which bytes when is no matter of this crate: see [`HostRegion`] for the contract
//! of *shared bytes*.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use kvbm_device::{CopyBatch, Device, Direction, EmulatedConfig, EmulatedDevice, HostBuffer};
//!
//! let device = EmulatedDevice::new(EmulatedConfig::default())?;
//! let stream = device.create_stream("h2d")?;
//! let memory = device.allocate(4096, 256)?;
//! let host = HostBuffer::zeroed(4096);
//! host.write_at(0, b"keys and values")?;
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
mod stream;
mod submission;

pub use batch::{CopyBatch, CopyObserver, CopyPiece, CopyRejected, Direction};
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
pub use stream::Stream;

/// Whatever must stay alive while hardware may still touch bytes that it owns.
pub type Owner = std::sync::Arc<dyn std::any::Any + Send + Sync>;
