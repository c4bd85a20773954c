//! A CUDA driver without hardware: a `libcuda.so.1` for tests, with the functions that kvbm calls over host memory.
//!
//! Its streams run on threads of their own, after random delays if a test asks for them; it launches the kernels of
//! `kvbm-kernels`, compiled as C++; it is strict about contexts, handles and ranges, fails where a test tells it to, and
//! counts what is left behind. It is C++ (`driver/`), built by the first test that needs it.
//!
//! **Knows:** the driver's interface, as far as kvbm calls it.
//! **Must never know:** what kvbm does with a device; no crate needs this one but for tests.

mod build;

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use build::{BuildError, build};

/// A driver in a machine of its own: two devices of 256 MiB.
#[derive(Debug)]
pub struct TestDriver {
    path: CString,
    handle: *mut c_void,
}

// SAFETY: the handle of a library that is never unloaded is good on every thread; the driver locks.
unsafe impl Send for TestDriver {}
// SAFETY: as above.
unsafe impl Sync for TestDriver {}

impl TestDriver {
    /// `None`, with a note, where there is no C++ compiler and none is required (`REQUIRE_CXX=1`).
    ///
    /// # Panics
    /// If the driver cannot be built or loaded.
    pub fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let built = Self::library()?;
        // The loader knows libraries by their files: a copy is another driver. Loaded, it needs no name any more, but tests
        // let other processes load it as well.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let copy = built.with_extension(format!("{}-{number}.so", std::process::id()));
        std::fs::copy(&built, &copy).unwrap_or_else(|error| panic!("{}: {error}", copy.display()));
        let path = CString::new(copy.as_os_str().as_bytes()).expect("no NUL in a path of ours");
        // SAFETY: the library was just built; when it is loaded it maps memory of its own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} can be loaded", copy.display());
        Some(Self { path, handle })
    }

    /// The library, for processes that load it by themselves (`KVBM_CUDA_DRIVER`). `None` as for [`TestDriver::new`].
    ///
    /// # Panics
    /// If it cannot be built.
    pub fn library() -> Option<PathBuf> {
        match build() {
            Ok(path) => Some(path),
            Err(BuildError::NoCompiler(why)) => {
                assert!(std::env::var_os("REQUIRE_CXX").is_none(), "{why}");
                eprintln!("skipped: {why}");
                None
            }
            Err(BuildError::Failed(why)) => panic!("{why}"),
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(self.path.as_bytes()))
    }

    /// Its file, for the loader.
    pub fn c_path(&self) -> &CStr {
        &self.path
    }

    /// What the machine has: devices, and the version of its driver (12040 is 12.4).
    pub fn machine(&self, devices: c_int, version: c_int) {
        let function = self.symbol(c"kvbm_test_machine");
        // SAFETY: the function has this type.
        let set = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int, c_int)>(function) };
        set(devices, version);
    }

    /// Lets a call fail once, after so many successes.
    pub fn fail(&self, call: &CStr, code: c_int, after: c_int) {
        let function = self.symbol(c"kvbm_test_fail");
        // SAFETY: the function has this type.
        let set = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, c_int, c_int)>(function)
        };
        set(call.as_ptr(), code, after);
    }

    /// Lets the call of this number fail, counted from now, whichever it is; a negative number: none.
    pub fn fail_call(&self, number: c_int, code: c_int) {
        let function = self.symbol(c"kvbm_test_fail_call");
        // SAFETY: the function has this type.
        let set = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int, c_int)>(function) };
        set(number, code);
    }

    /// The call that failed by its number, if one has.
    pub fn failed(&self) -> Option<String> {
        let function = self.symbol(c"kvbm_test_failed");
        // SAFETY: the function has this type.
        let ask = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(function) };
        // SAFETY: it ends with NUL and stays until `fail_call` is called again, which needs this thread.
        let name = unsafe { CStr::from_ptr(ask()) }.to_string_lossy().into_owned();
        (!name.is_empty()).then_some(name)
    }

    /// Calls so far: of one function, or of all if the name is empty.
    pub fn calls(&self, name: &CStr) -> u32 {
        let function = self.symbol(c"kvbm_test_calls");
        // SAFETY: the function has this type.
        let ask =
            unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> c_int>(function) };
        u32::try_from(ask(name.as_ptr())).unwrap_or(0)
    }

    /// Hides a function that only newer drivers have.
    pub fn hide(&self, symbol: &CStr) {
        let function = self.symbol(c"kvbm_test_hide");
        // SAFETY: the function has this type.
        let hide = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char)>(function) };
        hide(symbol.as_ptr());
    }

    /// A machine without a fabric between its nodes.
    pub fn no_fabric(&self) {
        self.call(c"kvbm_test_no_fabric");
    }

    /// Lets an operation on a stream go astray, after so many that do not: its context is dead from then on.
    pub fn go_astray(&self, after: c_int) {
        self.set(c"kvbm_test_go_astray", after);
    }

    /// What a dead context becomes when its process starts anew: an empty one. Nothing of the old one may be in use.
    pub fn revive(&self) {
        self.call(c"kvbm_test_revive");
    }

    /// Longest delay before each operation on a stream.
    pub fn delay(&self, delay: Duration) {
        self.set(c"kvbm_test_delay", c_int::try_from(delay.as_micros()).unwrap_or(c_int::MAX));
    }

    /// Waits until nothing of the driver is in use any more; threads of streams end on their own.
    ///
    /// # Panics
    /// If something is left after a minute.
    pub fn assert_nothing_is_left(&self) {
        let function = self.symbol(c"kvbm_test_left");
        // SAFETY: the function has this type.
        let left = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(function) };
        let deadline = Instant::now() + Duration::from_secs(60);
        while left() != 0 {
            assert!(Instant::now() < deadline, "{} resources of the driver are left", left());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A function of the library, for tests that play an engine of their own.
    ///
    /// # Panics
    /// If there is none of this name.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is never unloaded, the name ends with NUL.
        let function = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?} is in the library");
        function
    }

    fn set(&self, name: &CStr, value: c_int) {
        // SAFETY: the functions that are named here have this type.
        let set = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(self.symbol(name)) };
        set(value);
    }

    fn call(&self, name: &CStr) {
        // SAFETY: the functions that are named here have this type.
        let call = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn()>(self.symbol(name)) };
        call();
    }
}

impl Drop for TestDriver {
    fn drop(&mut self) {
        // It stays loaded; its copy is not needed any more, and a file that is left does no harm.
        let _ = std::fs::remove_file(self.path());
    }
}
