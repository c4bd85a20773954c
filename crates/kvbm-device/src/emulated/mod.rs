//! The emulated device: everything a device does, on any computer.
//!
//! - *Memory* is one memfd mapped twice. The address shown to users is a reservation without access
//!   rights, so a stray access by the CPU faults at once instead of working by luck. Only the
//!   stream threads know the second, usable mapping.
//! - *Streams* run in order, each on a thread of its own.
//! - *Time* follows a [`TransferModel`](crate::TransferModel): memcpy speed by default, or the
//!   figures of real hardware.
//! - *Faults* and *random delays* are injected in tests through [`FaultHandle`] and
//!   [`RandomDelays`].

mod arena;
mod delays;
mod faults;
mod mapping;
mod pin;
mod queue;
mod stream;
mod streaming;
mod work;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{
    Clock, Device, DeviceError, DeviceId, DeviceInfo, DeviceKind, DeviceMemory, HostRegion, PinnedHost,
    SharedLinks, Stream, SystemClock, TransferModel,
};

use arena::Arena;
pub use delays::RandomDelays;
pub use faults::{Fault, FaultHandle, FaultRule, FaultTicket, OpKind};
pub use stream::EmulatedStream;
pub use streaming::{StreamingCopy, copy_streaming};
pub use work::KernelMemory;

/// How an [`EmulatedDevice`] is made.
#[derive(Clone, Debug)]
pub struct EmulatedConfig {
    /// Number of the device on this node.
    pub id: DeviceId,
    /// Memory in bytes. Host memory is used only for what is written.
    pub memory_bytes: u64,
    /// Most operations queued on a stream.
    pub queue_limit: usize,
    /// How long copies take.
    pub model: TransferModel,
    /// The clock of the model.
    pub clock: Arc<dyn Clock>,
    /// Random delays and random order of the pieces of a batch, for tests that look for races.
    pub random_delays: Option<RandomDelays>,
}

impl Default for EmulatedConfig {
    fn default() -> Self {
        Self {
            id: DeviceId(0),
            memory_bytes: 1 << 30,
            queue_limit: 1024,
            model: TransferModel::unlimited(),
            clock: Arc::new(SystemClock::new()),
            random_delays: None,
        }
    }
}

/// A device without hardware. Clones are the same device.
#[derive(Clone)]
pub struct EmulatedDevice {
    state: Arc<EmulatedState>,
}

/// What streams and allocations keep alive of a device.
struct EmulatedState {
    id: DeviceId,
    name: String,
    arena: Arc<Arena>,
    links: SharedLinks,
    faults: FaultHandle,
    pins: Arc<pin::PinTable>,
    queue_limit: usize,
    random_delays: Option<RandomDelays>,
    streams_created: AtomicU64,
    streams_alive: AtomicUsize,
}

impl EmulatedDevice {
    /// Reserves the address space of a device.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a memory or queue of size zero, [`DeviceError::Os`] if the
    /// system refuses the mappings.
    pub fn new(config: EmulatedConfig) -> Result<Self, DeviceError> {
        if config.queue_limit == 0 {
            return Err(DeviceError::Invalid {
                what: "queue_limit",
                value: 0,
                rule: "it must be at least 1",
            });
        }
        let name = format!("emulated device {}", config.id);
        let state = EmulatedState {
            id: config.id,
            arena: Arena::new(config.id, config.memory_bytes)?,
            links: SharedLinks::new(config.model, config.clock),
            faults: FaultHandle::new(),
            pins: Arc::default(),
            queue_limit: config.queue_limit,
            random_delays: config.random_delays,
            streams_created: AtomicU64::new(0),
            streams_alive: AtomicUsize::new(0),
            name,
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Fault injection into this device.
    pub fn faults(&self) -> &FaultHandle {
        &self.state.faults
    }

    /// The links that this device's copies share, for an emulated disk or network beside it.
    pub fn links(&self) -> &SharedLinks {
        &self.state.links
    }

    /// Streams whose thread still runs: dropped streams count until their queue is empty.
    pub fn streams_alive(&self) -> usize {
        self.state.streams_alive.load(Ordering::Acquire)
    }
}

impl Device for EmulatedDevice {
    fn id(&self) -> DeviceId {
        self.state.id
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            id: self.state.id,
            name: self.state.name.clone(),
            kind: DeviceKind::Emulated,
            total_bytes: self.state.arena.total_bytes(),
            free_bytes: self.state.arena.free_bytes(),
            granularity_bytes: arena::GRANULARITY,
        }
    }

    fn allocate(&self, len: u64, alignment: u64) -> Result<DeviceMemory, DeviceError> {
        if self.state.faults.take_allocation_failure() {
            return Err(self.state.arena.out_of_memory(len));
        }
        self.state.arena.allocate(len, alignment)
    }

    unsafe fn register_external(&self, address: u64, len: u64) -> Result<DeviceMemory, DeviceError> {
        self.state.arena.external(address, len)
    }

    fn create_stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        let number = self.state.streams_created.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(EmulatedStream::start(&self.state, name, number)?))
    }

    fn register_host(&self, region: HostRegion) -> Result<PinnedHost, DeviceError> {
        if let Some(limit) = self.state.faults.take_pin_failure() {
            return Err(DeviceError::PinLimit { asked: region.len(), limit });
        }
        pin::register(&self.state.pins, region)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for EmulatedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatedDevice").field("info", &self.info()).finish_non_exhaustive()
    }
}
