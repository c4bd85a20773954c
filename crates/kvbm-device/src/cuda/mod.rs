//! NVIDIA GPUs through their driver, which is loaded at run time: nothing of CUDA is needed to
//! build this.
//!
//! - *Streams* are the driver's. Each has a thread that issues operations in order, so that an
//!   operation can also wait for an event of the host. A second thread waits for issued
//!   operations, drops their memory and completes their events.
//! - *Errors* of the driver carry the call, the number and the name; one that the device does not
//!   recover from says so.
//! - *Order with an engine*: [`CudaDevice::engine_event`] makes an event of a `CUevent` that an
//!   engine has recorded, [`CudaDevice::let_engine_wait`] lets an engine's stream wait for an event
//!   of ours.
//! - *Copies* go to the driver many at a time where it takes that, else one by one
//!   ([`CopyEngine`]).
//! - *Host memory* is registered in parts on several threads; copies are divided where the parts
//!   meet.

mod codes;
mod copies;
mod driver;
mod event;
mod functions;
mod mark;
mod memory;
mod module;
mod pinning;
mod sharing;
mod stream;

use std::any::{Any, TypeId};
use std::collections::{BTreeSet, HashMap};
use std::ffi::{c_char, c_int};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use crate::{
    Device, DeviceError, DeviceId, DeviceInfo, DeviceKind, DeviceMemory, Event, HostRegion, Owner,
    PinnedHost, Stream,
};

pub use copies::CopyEngine;
pub use driver::{CudaDriver, CudaUnavailable};
use functions::sys::CUdevice_attribute;
use functions::{CallResult, ContextHandle, DriverHandle, EventHandle, Functions, StreamHandle, call};
pub use mark::CudaMark;
pub use module::{CudaFunction, CudaLaunch, CudaModule};
pub use pinning::PinParts;
pub use sharing::{SharedMemory, SharedVia};
pub use stream::CudaStream;

/// Most operations queued on a stream.
const QUEUE_LIMIT: usize = 1024;

/// Bytes that the driver aligns every allocation to.
const GRANULARITY: u64 = 256;

/// An NVIDIA GPU. Clones are the same device.
#[derive(Clone)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
}

/// An opened device with its primary context; streams, events and allocations keep it alive.
struct CudaContext {
    driver: Arc<CudaDriver>,
    id: DeviceId,
    handle: c_int,
    /// The primary context, which the engine's frameworks use too.
    primary: Option<ContextHandle>,
    name: String,
    total_bytes: u64,
    /// Host addresses where two registrations meet.
    boundaries: RwLock<BTreeSet<u64>>,
    /// Results of measurements, by their type.
    measured: Mutex<HashMap<TypeId, Owner>>,
}

impl CudaDevice {
    /// Opens a device of the driver.
    ///
    /// # Errors
    /// [`CudaUnavailable::NoSuchDevice`], or [`CudaUnavailable::Device`] with what the driver says.
    pub fn open(driver: &Arc<CudaDriver>, id: DeviceId) -> Result<Self, CudaUnavailable> {
        let ordinal = c_int::try_from(id.0).ok().filter(|_| id.0 < driver.devices());
        let ordinal = ordinal.ok_or(CudaUnavailable::NoSuchDevice { asked: id, count: driver.devices() })?;
        let mut context = CudaContext {
            driver: Arc::clone(driver),
            id,
            handle: 0,
            primary: None,
            name: String::new(),
            total_bytes: 0,
            boundaries: RwLock::default(),
            measured: Mutex::default(),
        };
        context.fill_in(ordinal).map_err(CudaUnavailable::Device)?;
        Ok(Self { context: Arc::new(context) })
    }

    /// Its driver.
    pub fn driver(&self) -> &Arc<CudaDriver> {
        &self.context.driver
    }

    /// What is measured once on a device, such as which way of copying is the fastest. The first
    /// result of its type stays for as long as the device is open.
    ///
    /// # Errors
    /// Those of `measure`; the next caller tries again.
    pub fn measured<T: Any + Send + Sync, E>(
        &self,
        measure: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let known = |device: &CudaContext| device.measured.lock().get(&TypeId::of::<T>()).cloned();
        // The lock is not held while the device works: two callers at the same time both
        // measure, and both get the first result.
        let found = if let Some(found) = known(&self.context) {
            found
        } else {
            let fresh: Owner = Arc::new(measure()?);
            Arc::clone(self.context.measured.lock().entry(TypeId::of::<T>()).or_insert(fresh))
        };
        Ok(found.downcast::<T>().unwrap_or_else(|_| unreachable!("entries have the type of their key")))
    }

    /// Multiprocessors of the device.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn multiprocessors(&self) -> Result<u32, DeviceError> {
        self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Compute capability: 9 and 0 for H100 and H200.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn compute_capability(&self) -> Result<(u32, u32), DeviceError> {
        let [major, minor] = [
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ];
        Ok((self.context.attribute(major)?, self.context.attribute(minor)?))
    }

    /// Loads an image of kernels: a fatbin, a cubin or PTX.
    ///
    /// # Errors
    /// [`DeviceError::Driver`]: no code for this device, out of memory.
    ///
    /// # Safety
    /// The image is complete: the driver does not get its length.
    pub unsafe fn load_module(&self, image: &[u8]) -> Result<Arc<CudaModule>, DeviceError> {
        // SAFETY: the caller has a whole image.
        unsafe { CudaModule::load(&self.context, image) }.map(Arc::new)
    }

    /// An event that completes when an engine's event, as it was recorded last, is complete.
    ///
    /// # Errors
    /// [`DeviceError::Os`] if the system refuses a thread, [`DeviceError::Driver`].
    ///
    /// # Safety
    /// `event` is a `CUevent` of this process that is not destroyed before the returned event is
    /// complete.
    pub unsafe fn engine_event(&self, event: usize) -> Result<Event, DeviceError> {
        let stream = CudaStream::start(&self.context, "engine event")?;
        // SAFETY: the caller keeps the event.
        unsafe { stream.wait_engine(event) }?;
        stream.record()
    }

    /// Lets everything that an engine queues on its stream from now on start only after `event`,
    /// one of a stream of this device, is complete. Returns when the engine's stream knows of it,
    /// which is when ours has issued what the event stands for: at the deadline at the latest.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for an event of something else than a CUDA stream,
    /// [`DeviceError::Abandoned`] if its stream has failed before, or [`DeviceError::Driver`].
    /// [`DeviceError::Deadline`] if it still waits for something else; the engine's stream then
    /// waits for nothing.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of this device's primary context, and stays alive during the call.
    pub unsafe fn let_engine_wait(
        &self,
        stream: usize,
        event: &Event,
        deadline: Instant,
    ) -> Result<(), DeviceError> {
        let Some(event) = event.backend().as_any().downcast_ref::<event::CudaEvent>() else {
            let device = self.context.name.clone();
            let operation = "waiting on an engine's stream for an event that is none of a CUDA stream";
            return Err(DeviceError::Unsupported { device, operation });
        };
        let Some(recorded) = event.recorded(deadline)? else {
            return Err(DeviceError::Abandoned { what: "what an engine's stream was to wait for" });
        };
        // SAFETY: the event is alive; the caller answers for the stream.
        unsafe { self.context.stream_wait(StreamHandle::from_engine(stream), recorded) }
    }
}

impl CudaContext {
    fn fill_in(&mut self, ordinal: c_int) -> Result<(), DeviceError> {
        let driver = Arc::clone(&self.driver);
        let functions = driver.functions();
        let handle = &raw mut self.handle;
        // SAFETY: it writes a number through a pointer to one.
        self.check(unsafe { call!(functions, cuDeviceGet(handle, ordinal)) })?;
        self.name = self.text(|text, bytes| {
            // SAFETY: it writes at most as many bytes as it is told there are, a NUL among them.
            unsafe { call!(functions, cuDeviceGetName(text, bytes, self.handle)) }
        })?;
        let mut total = 0_usize;
        // SAFETY: it writes a number through a pointer to one.
        self.check(unsafe { call!(functions, cuDeviceTotalMem_v2(&raw mut total, self.handle)) })?;
        self.total_bytes = total as u64;
        let mut primary = std::ptr::null_mut();
        let retained = &raw mut primary;
        // SAFETY: it writes a handle through a pointer to one.
        self.check(unsafe { call!(functions, cuDevicePrimaryCtxRetain(retained, self.handle)) })?;
        self.primary = Some(DriverHandle(primary));
        Ok(())
    }

    /// A text of at most 255 bytes, which `write` writes to an address with room for so many bytes.
    fn text(&self, write: impl FnOnce(*mut c_char, c_int) -> CallResult) -> Result<String, DeviceError> {
        let mut text = [0_u8; 256];
        self.check(write(text.as_mut_ptr().cast(), 256))?;
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        let (functions, into) = (self.functions(), &raw mut value);
        // SAFETY: it writes a number through a pointer to one.
        self.check(unsafe { call!(functions, cuDeviceGetAttribute(into, attribute, self.handle)) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn functions(&self) -> &Functions {
        self.driver.functions()
    }

    fn check(&self, result: CallResult) -> Result<(), DeviceError> {
        let CallResult { call, code } = result;
        if code == 0 {
            return Ok(());
        }
        let (call, way_out) = (call.trim_end_matches("_v2"), codes::way_out(code));
        Err(DeviceError::Driver { device: self.id, call, code, name: self.driver.name_of(code), way_out })
    }

    /// Makes the device's context that of this thread, until the returned guard is dropped.
    fn enter(&self) -> Result<Entered<'_>, DeviceError> {
        let primary = self.primary.map_or(std::ptr::null_mut(), |primary| primary.0);
        // SAFETY: the context is retained while this lives.
        self.check(unsafe { call!(self.functions(), cuCtxPushCurrent_v2(primary)) })?;
        Ok(Entered { context: self })
    }

    /// Makes a call in the device's context.
    fn in_context(&self, make: impl FnOnce(&Functions) -> CallResult) -> Result<CallResult, DeviceError> {
        let _entered = self.enter()?;
        Ok(make(self.functions()))
    }

    /// Makes a call in the device's context, which must succeed.
    fn must(&self, make: impl FnOnce(&Functions) -> CallResult) -> Result<(), DeviceError> {
        self.check(self.in_context(make)?)
    }

    /// Gives something back to the driver. A context that cannot be entered is dead, and what was
    /// in it is gone; a call that fails leaves nothing to do.
    fn release(&self, make: impl FnOnce(&Functions) -> CallResult) {
        let _nothing_to_do = self.in_context(make);
    }

    /// Lets a stream wait on the device for an event.
    ///
    /// # Safety
    /// The stream and the event are alive.
    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps both alive.
        self.must(|driver| unsafe { call!(driver, cuStreamWaitEvent(stream.0, event.0, 0)) })
    }

    fn free_bytes(&self) -> Result<u64, DeviceError> {
        let (mut free, mut total) = (0_usize, 0_usize);
        let into = (&raw mut free, &raw mut total);
        // SAFETY: it writes numbers through pointers to them.
        self.must(|driver| unsafe { call!(driver, cuMemGetInfo_v2(into.0, into.1)) })?;
        Ok(free as u64)
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        if self.primary.is_some() {
            // SAFETY: it was retained once, and nothing in it is in use any more.
            let _nothing_to_do =
                unsafe { call!(self.functions(), cuDevicePrimaryCtxRelease_v2(self.handle)) };
        }
    }
}

/// While this lives, the device's context is that of this thread.
struct Entered<'a> {
    context: &'a CudaContext,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        let functions = self.context.functions();
        // SAFETY: it was pushed on this thread, which the guard does not leave.
        let _nothing_to_do = unsafe { call!(functions, cuCtxPopCurrent_v2(&raw mut popped)) };
    }
}

impl Device for CudaDevice {
    fn id(&self) -> DeviceId {
        self.context.id
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            id: self.context.id,
            name: self.context.name.clone(),
            kind: DeviceKind::Cuda,
            total_bytes: self.context.total_bytes,
            // A device that does not even answer has nothing to give.
            free_bytes: self.context.free_bytes().unwrap_or(0),
            granularity_bytes: GRANULARITY,
        }
    }

    fn allocate(&self, len: u64, alignment: u64) -> Result<DeviceMemory, DeviceError> {
        memory::allocate(&self.context, len, alignment)
    }

    unsafe fn register_external(&self, address: u64, len: u64) -> Result<DeviceMemory, DeviceError> {
        // SAFETY: the caller keeps the range allocated.
        unsafe { memory::register_external(&self.context, address, len) }
    }

    fn create_stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        Ok(Arc::new(CudaStream::start(&self.context, name)?))
    }

    fn register_host(&self, region: HostRegion) -> Result<PinnedHost, DeviceError> {
        self.register_host_in_parts(region, PinParts::default(), &|_, _| {})
    }

    fn register_host_with(
        &self,
        region: HostRegion,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<PinnedHost, DeviceError> {
        self.register_host_in_parts(region, PinParts::default(), progress)
    }

    fn numa_node(&self) -> Option<u32> {
        pinning::numa_node(&self.context)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}, {})", self.context.id, self.context.name)
    }
}
