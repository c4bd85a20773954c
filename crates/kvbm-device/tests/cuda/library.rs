//! Devices of the test driver, and an engine beside us.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use kvbm_device::{CudaDevice, CudaDriver, CudaUnavailable, DeviceId};
use kvbm_test_driver::TestDriver;

pub(crate) fn open_driver(library: &TestDriver) -> Result<Arc<CudaDriver>, CudaUnavailable> {
    // SAFETY: the library does what a driver does.
    unsafe { CudaDriver::open_library(library.c_path()) }
}

pub(crate) fn open_device(library: &TestDriver) -> CudaDevice {
    let driver = open_driver(library).expect("the driver starts");
    CudaDevice::open(&driver, DeviceId(0)).expect("there is a device")
}

/// An engine that uses the driver by itself: memory, a stream and an event of its own.
pub(crate) struct Engine<'a> {
    library: &'a TestDriver,
    pub(crate) memory: u64,
    stream: usize,
    pub(crate) event: usize,
}

type Context = extern "C" fn(usize) -> c_int;
type Create = extern "C" fn(*mut usize, u32) -> c_int;
type Destroy = extern "C" fn(usize) -> c_int;

impl<'a> Engine<'a> {
    /// In the primary context, which a device of the driver keeps alive.
    pub(crate) fn new(library: &'a TestDriver, len: usize) -> Self {
        let mut engine = Self { library, memory: 0, stream: 0, event: 0 };
        engine.in_context(|engine| {
            let (memory, stream, event) =
                (&raw mut engine.memory, &raw mut engine.stream, &raw mut engine.event);
            // SAFETY: the function has this type.
            let allocate = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(*mut u64, usize) -> c_int>(
                    library.symbol(c"cuMemAlloc_v2"),
                )
            };
            // SAFETY: the function has this type.
            let create_stream =
                unsafe { std::mem::transmute::<*mut c_void, Create>(library.symbol(c"cuStreamCreate")) };
            // SAFETY: the function has this type.
            let create_event =
                unsafe { std::mem::transmute::<*mut c_void, Create>(library.symbol(c"cuEventCreate")) };
            assert_eq!((allocate(memory, len), create_stream(stream, 1), create_event(event, 2)), (0, 0, 0));
        });
        engine
    }

    pub(crate) fn stream(&self) -> usize {
        self.stream
    }

    /// Queues setting its memory to a byte, and records its event behind that.
    pub(crate) fn compute(&mut self, byte: u8, len: usize) {
        self.in_context(|engine| {
            // SAFETY: the function has this type.
            let set = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(u64, u8, usize, usize) -> c_int>(
                    engine.library.symbol(c"cuMemsetD8Async"),
                )
            };
            // SAFETY: the function has this type.
            let record = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(usize, usize) -> c_int>(
                    engine.library.symbol(c"cuEventRecord"),
                )
            };
            assert_eq!(set(engine.memory, byte, len, engine.stream), 0);
            assert_eq!(record(engine.event, engine.stream), 0);
        });
    }

    /// Gives everything back.
    pub(crate) fn end(mut self) {
        self.in_context(|engine| {
            // SAFETY: the function has this type.
            let free = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(u64) -> c_int>(
                    engine.library.symbol(c"cuMemFree_v2"),
                )
            };
            // SAFETY: the function has this type.
            let destroy_stream = unsafe {
                std::mem::transmute::<*mut c_void, Destroy>(engine.library.symbol(c"cuStreamDestroy_v2"))
            };
            // SAFETY: the function has this type.
            let destroy_event = unsafe {
                std::mem::transmute::<*mut c_void, Destroy>(engine.library.symbol(c"cuEventDestroy_v2"))
            };
            let results = (destroy_stream(engine.stream), destroy_event(engine.event), free(engine.memory));
            assert_eq!(results, (0, 0, 0));
        });
    }

    fn in_context(&mut self, run: impl FnOnce(&mut Self)) {
        // SAFETY: the function has this type.
        let push = unsafe {
            std::mem::transmute::<*mut c_void, Context>(self.library.symbol(c"cuCtxPushCurrent_v2"))
        };
        // SAFETY: the function has this type.
        let pop = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut usize) -> c_int>(
                self.library.symbol(c"cuCtxPopCurrent_v2"),
            )
        };
        // The only context of the test driver.
        assert_eq!(push(0xC0), 0);
        run(self);
        let mut popped = 0;
        assert_eq!(pop(&raw mut popped), 0);
    }
}
