//! A CUDA driver without hardware: a `libcuda.so.1` for tests, with the functions that kvbm calls,
//! over host memory.
//!
//! Its streams run on threads of their own, after random delays if a test asks for them. It runs
//! the kernels of `kvbm-kernels`, compiled as C++. It checks contexts, handles and ranges, fails
//! where a test tells it to, and counts what is left behind. It is C++ (`driver/`), built by the
//! first test that needs it.
//!
//! **Knows:** the driver's interface, as far as kvbm calls it.
//! **Must never know:** what kvbm does with a device; no crate needs this one but for tests.

mod build;

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libloading::os::unix::Library;

pub use build::{CompileError, build, compile};

/// Calls a function of the library: `call!(self.kvbm_test_delay(us => c_int))`.
macro_rules! call {
    ($driver:ident.$name:ident($($argument:expr => $type:ty),*) $(-> $result:ty)?) => {{
        type Function = extern "C" fn($($type),*) $(-> $result)?;
        // SAFETY: the function has this type.
        let function = unsafe { $driver.function::<Function>(stringify!($name)) };
        function($($argument),*)
    }};
}

/// A driver in a machine of its own: two devices of 256 MiB.
#[derive(Debug)]
pub struct TestDriver {
    path: PathBuf,
    /// Never unloaded: streams of an engine may still run in it.
    library: ManuallyDrop<Library>,
}

impl TestDriver {
    /// `None`, with a note, where there is no C++ compiler and none is required (`REQUIRE_CXX=1`).
    ///
    /// # Panics
    /// If the driver cannot be built or loaded.
    pub fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let built = Self::library()?;
        // The loader identifies libraries by their files: a copy is another driver. Once loaded it
        // needs no file, but some tests let other processes load it as well.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = built.with_extension(format!("{}-{number}.so", std::process::id()));
        std::fs::copy(&built, &path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        // SAFETY: the library was just built; when it is loaded it maps memory of its own.
        let library = unsafe { Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
        Some(Self { path, library: ManuallyDrop::new(library) })
    }

    /// The library, for processes that load it by themselves (`KVBM_CUDA_DRIVER`). `None` as for
    /// [`TestDriver::new`].
    ///
    /// # Panics
    /// If it cannot be built.
    pub fn library() -> Option<PathBuf> {
        match build() {
            Ok(path) => Some(path),
            Err(error @ CompileError::NoCompiler(_)) => {
                assert!(std::env::var_os("REQUIRE_CXX").is_none(), "{error}");
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the machine has: devices, and the version of its driver (12040 is 12.4).
    pub fn machine(&self, devices: c_int, version: c_int) {
        call!(self.kvbm_test_machine(devices => c_int, version => c_int));
    }

    /// Lets a call fail once, after so many successes.
    pub fn fail(&self, call: &CStr, code: c_int, after: c_int) {
        let call = call.as_ptr();
        call!(self.kvbm_test_fail(call => *const c_char, code => c_int, after => c_int));
    }

    /// Lets the call of this number fail, counted from now, whichever it is; a negative number:
    /// none.
    pub fn fail_call(&self, number: c_int, code: c_int) {
        call!(self.kvbm_test_fail_call(number => c_int, code => c_int));
    }

    /// The call that failed by its number, if one has.
    pub fn failed(&self) -> Option<String> {
        let name = call!(self.kvbm_test_failed() -> *const c_char);
        // SAFETY: it ends with NUL and stays until this thread calls `fail_call` again.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        (!name.is_empty()).then_some(name)
    }

    /// Calls so far: of one function, or of all if the name is empty.
    pub fn calls(&self, name: &CStr) -> u32 {
        let calls = call!(self.kvbm_test_calls(name.as_ptr() => *const c_char) -> c_int);
        u32::try_from(calls).unwrap_or(0)
    }

    /// Hides a function that only newer drivers have.
    pub fn hide(&self, symbol: &CStr) {
        call!(self.kvbm_test_hide(symbol.as_ptr() => *const c_char));
    }

    /// A machine without a fabric between its nodes.
    pub fn no_fabric(&self) {
        call!(self.kvbm_test_no_fabric());
    }

    /// Lets an operation on a stream fail on the device, after so many that do not: its context is
    /// dead from then on.
    pub fn fail_on_device(&self, after: c_int) {
        call!(self.kvbm_test_fail_on_device(after => c_int));
    }

    /// Replaces a dead context by an empty one, as a restart of the process does. Nothing of the
    /// old one may be in use.
    pub fn revive(&self) {
        call!(self.kvbm_test_revive());
    }

    /// Longest delay before each operation on a stream.
    pub fn delay(&self, delay: Duration) {
        let us = c_int::try_from(delay.as_micros()).unwrap_or(c_int::MAX);
        call!(self.kvbm_test_delay(us => c_int));
    }

    /// Waits until nothing of the driver is in use any more; threads of streams end on their own.
    ///
    /// # Panics
    /// If something is left after a minute.
    pub fn assert_nothing_is_left(&self) {
        let left = || call!(self.kvbm_test_left() -> c_int);
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
    ///
    /// # Safety
    /// `F` is a pointer to a function of the type that the function of this name has.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller names its type.
        let function = unsafe { self.library.get::<F>(name) };
        *function.unwrap_or_else(|error| panic!("{name}: {error:?}"))
    }
}

impl Drop for TestDriver {
    fn drop(&mut self) {
        // It stays loaded without its file, and a file that is left does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}
