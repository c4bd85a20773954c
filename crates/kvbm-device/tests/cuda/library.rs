//! Devices of the test driver, and an engine beside us.

use std::ffi::c_int;
use std::sync::Arc;

use kvbm_device::{CudaDevice, CudaDriver, CudaUnavailable, DeviceId};
use kvbm_test_driver::TestDriver;

pub(crate) fn open_driver(library: &TestDriver) -> Result<Arc<CudaDriver>, CudaUnavailable> {
    // SAFETY: the library does what a driver does.
    unsafe { CudaDriver::open_library(library.path()) }
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

type SetContext = extern "C" fn(usize) -> c_int;
type PopContext = extern "C" fn(*mut usize) -> c_int;
type Allocate = extern "C" fn(*mut u64, usize) -> c_int;
type Free = extern "C" fn(u64) -> c_int;
type Create = extern "C" fn(*mut usize, u32) -> c_int;
type Destroy = extern "C" fn(usize) -> c_int;
type SetBytes = extern "C" fn(u64, u8, usize, usize) -> c_int;
type Record = extern "C" fn(usize, usize) -> c_int;

/// A function of the driver, which has this type.
macro_rules! function {
    ($library:expr, $name:literal as $type:ty) => {
        // SAFETY: the function has this type.
        unsafe { $library.function::<$type>($name) }
    };
}

impl<'a> Engine<'a> {
    /// In the primary context, which a device of the driver keeps alive.
    pub(crate) fn new(library: &'a TestDriver, len: usize) -> Self {
        let mut engine = Self { library, memory: 0, stream: 0, event: 0 };
        engine.in_context(|engine| {
            let results = (
                function!(library, "cuMemAlloc_v2" as Allocate)(&raw mut engine.memory, len),
                function!(library, "cuStreamCreate" as Create)(&raw mut engine.stream, 1),
                function!(library, "cuEventCreate" as Create)(&raw mut engine.event, 2),
            );
            assert_eq!(results, (0, 0, 0));
        });
        engine
    }

    pub(crate) fn stream(&self) -> usize {
        self.stream
    }

    /// Queues setting its memory to a byte, and records its event behind that.
    pub(crate) fn compute(&mut self, byte: u8, len: usize) {
        self.in_context(|engine| {
            let Self { library, memory, stream, event } = *engine;
            let results = (
                function!(library, "cuMemsetD8Async" as SetBytes)(memory, byte, len, stream),
                function!(library, "cuEventRecord" as Record)(event, stream),
            );
            assert_eq!(results, (0, 0));
        });
    }

    /// Gives everything back.
    pub(crate) fn end(mut self) {
        self.in_context(|engine| {
            let results = (
                function!(engine.library, "cuStreamDestroy_v2" as Destroy)(engine.stream),
                function!(engine.library, "cuEventDestroy_v2" as Destroy)(engine.event),
                function!(engine.library, "cuMemFree_v2" as Free)(engine.memory),
            );
            assert_eq!(results, (0, 0, 0));
        });
    }

    fn in_context(&mut self, run: impl FnOnce(&mut Self)) {
        // The only context of the test driver.
        assert_eq!(function!(self.library, "cuCtxPushCurrent_v2" as SetContext)(0xC0), 0);
        run(self);
        let mut popped = 0;
        assert_eq!(function!(self.library, "cuCtxPopCurrent_v2" as PopContext)(&raw mut popped), 0);
    }
}
