//! The test driver (`driver.cpp`), built once and loaded as a library of its own for each test.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvbm_device::{CudaDevice, CudaDriver, CudaUnavailable, DeviceId};

/// A driver in a machine of its own.
pub(crate) struct Library {
    path: CString,
    handle: *mut c_void,
}

impl Library {
    /// `None`, with a note, where there is no C++ compiler and none is required (`KVBM_REQUIRE_CXX=1`).
    pub(crate) fn new() -> Option<Self> {
        static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let built = BUILT.get_or_init(build).as_ref()?;
        // The loader knows libraries by their files: a copy is another driver.
        let copy = built.with_extension(format!("{}.so", NUMBER.fetch_add(1, Ordering::Relaxed)));
        std::fs::copy(built, &copy).expect("a folder of our own");
        let path = CString::new(copy.as_os_str().as_bytes()).expect("no NUL");
        // SAFETY: the library was just built and does nothing when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "the library that was just built can be loaded");
        Some(Self { path, handle })
    }

    pub(crate) fn driver(&self) -> Result<Arc<CudaDriver>, CudaUnavailable> {
        // SAFETY: the library does what a driver does.
        unsafe { CudaDriver::open_library(&self.path) }
    }

    pub(crate) fn device(&self) -> CudaDevice {
        let driver = self.driver().expect("the driver starts");
        CudaDevice::open(&driver, DeviceId(0)).expect("there is a device")
    }

    /// What the machine has.
    pub(crate) fn machine(&self, devices: c_int, version: c_int) {
        let function = self.find(c"kvbm_test_machine");
        // SAFETY: the function has this type.
        let set = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int, c_int)>(function) };
        set(devices, version);
    }

    /// Lets a call fail once, after so many successes.
    pub(crate) fn fail(&self, call: &CStr, code: c_int, after: c_int) {
        let function = self.find(c"kvbm_test_fail");
        // SAFETY: the function has this type.
        let set = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, c_int, c_int)>(function)
        };
        set(call.as_ptr(), code, after);
    }

    /// Lets an operation on a stream go astray, after so many that do not.
    pub(crate) fn go_astray(&self, after: c_int) {
        self.set(c"kvbm_test_go_astray", after);
    }

    /// Longest delay before each operation on a stream.
    pub(crate) fn delay(&self, delay: Duration) {
        self.set(c"kvbm_test_delay", c_int::try_from(delay.as_micros()).expect("a short delay"));
    }

    fn set(&self, name: &CStr, value: c_int) {
        // SAFETY: the functions that are named here have this type.
        let set = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(self.find(name)) };
        set(value);
    }

    /// Waits until nothing of the driver is in use any more; threads of streams end on their own.
    pub(crate) fn assert_nothing_is_left(&self) {
        let function = self.find(c"kvbm_test_left");
        // SAFETY: the function has this type.
        let left = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(function) };
        let deadline = Instant::now() + Duration::from_secs(60);
        while left() != 0 {
            assert!(Instant::now() < deadline, "{} resources of the driver are left", left());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn find(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is never unloaded, the name ends with NUL.
        let function = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?} is in the library");
        function
    }
}

/// An engine that uses the driver by itself: memory, a stream and an event of its own.
pub(crate) struct Engine<'a> {
    library: &'a Library,
    pub(crate) memory: u64,
    stream: usize,
    pub(crate) event: usize,
}

type Context = extern "C" fn(usize) -> c_int;
type Create = extern "C" fn(*mut usize, u32) -> c_int;
type Destroy = extern "C" fn(usize) -> c_int;

impl<'a> Engine<'a> {
    /// In the primary context, which a device of the driver keeps alive.
    pub(crate) fn new(library: &'a Library, len: usize) -> Self {
        let mut engine = Self { library, memory: 0, stream: 0, event: 0 };
        engine.in_context(|engine| {
            let (memory, stream, event) =
                (&raw mut engine.memory, &raw mut engine.stream, &raw mut engine.event);
            // SAFETY: the function has this type.
            let allocate = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(*mut u64, usize) -> c_int>(
                    library.find(c"cuMemAlloc_v2"),
                )
            };
            // SAFETY: the function has this type.
            let create_stream =
                unsafe { std::mem::transmute::<*mut c_void, Create>(library.find(c"cuStreamCreate")) };
            // SAFETY: the function has this type.
            let create_event =
                unsafe { std::mem::transmute::<*mut c_void, Create>(library.find(c"cuEventCreate")) };
            assert_eq!((allocate(memory, len), create_stream(stream, 1), create_event(event, 2)), (0, 0, 0));
        });
        engine
    }

    /// Queues setting its memory to a byte, and records its event behind that.
    pub(crate) fn compute(&mut self, byte: u8, len: usize) {
        self.in_context(|engine| {
            // SAFETY: the function has this type.
            let set = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(u64, u8, usize, usize) -> c_int>(
                    engine.library.find(c"cuMemsetD8Async"),
                )
            };
            // SAFETY: the function has this type.
            let record = unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(usize, usize) -> c_int>(
                    engine.library.find(c"cuEventRecord"),
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
                    engine.library.find(c"cuMemFree_v2"),
                )
            };
            // SAFETY: the function has this type.
            let destroy_stream = unsafe {
                std::mem::transmute::<*mut c_void, Destroy>(engine.library.find(c"cuStreamDestroy_v2"))
            };
            // SAFETY: the function has this type.
            let destroy_event = unsafe {
                std::mem::transmute::<*mut c_void, Destroy>(engine.library.find(c"cuEventDestroy_v2"))
            };
            let results = (destroy_stream(engine.stream), destroy_event(engine.event), free(engine.memory));
            assert_eq!(results, (0, 0, 0));
        });
    }

    fn in_context(&mut self, run: impl FnOnce(&mut Self)) {
        // SAFETY: the function has this type.
        let push =
            unsafe { std::mem::transmute::<*mut c_void, Context>(self.library.find(c"cuCtxPushCurrent_v2")) };
        // SAFETY: the function has this type.
        let pop = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut usize) -> c_int>(
                self.library.find(c"cuCtxPopCurrent_v2"),
            )
        };
        // The only context of the test driver.
        assert_eq!(push(0xC0), 0);
        run(self);
        let mut popped = 0;
        assert_eq!(pop(&raw mut popped), 0);
    }
}

fn build() -> Option<PathBuf> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join("cuda").join("driver.cpp");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcuda-test.so");
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]);
    match command.arg(&source).arg("-o").arg(&library).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            let note = format!("no C++ compiler: `{compiler}` ({error}); name one in CXX");
            assert!(std::env::var_os("KVBM_REQUIRE_CXX").is_none(), "{note}");
            eprintln!("skipped: {note}");
            None
        }
    }
}
