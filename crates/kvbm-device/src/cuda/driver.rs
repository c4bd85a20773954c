//! The driver's library: loaded at run time, with every function checked before the first call.

use std::error::Error;
use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::fmt;
use std::mem::{ManuallyDrop, transmute};
use std::sync::Arc;

use libloading::os::unix;

use super::functions::sys::CUresult;
use super::functions::{Address, CallResult, Functions, call};

use crate::{DeviceError, DeviceId};

/// Oldest driver that is known to do what is needed here: CUDA 12.0 (R525).
const OLDEST_VERSION: c_int = 12_000;

/// Why there is no CUDA device to work with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The library is not there, or the loader refuses it.
    #[error(
        "no CUDA driver: {reason}; install NVIDIA's driver, name its library in KVBM_CUDA_DRIVER, or use the emulated device"
    )]
    NoDriver {
        /// What the loader says.
        reason: String,
    },
    /// A function that every driver since CUDA 12.0 has is not in the library.
    #[error("the CUDA driver has no `{symbol}`: it is damaged, or older than CUDA 12.0 (R525); update it")]
    MissingSymbol {
        /// The function.
        symbol: String,
    },
    /// The driver is too old.
    #[error(
        "the CUDA driver is for CUDA {major}.{minor}, at least 12.0 (R525) is needed; update it",
        major = version / 1000, minor = version % 1000 / 10
    )]
    OldDriver {
        /// As the driver counts: 12040 is 12.4.
        version: i32,
    },
    /// The driver does not start.
    #[error(
        "the CUDA driver does not start: {call} returned {name} ({code}); see `dmesg`, and whether library and kernel module are of one version"
    )]
    Init {
        /// The driver's function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// Its name.
        name: String,
    },
    /// The driver works, and sees no device.
    #[error(
        "the CUDA driver finds no device; check CUDA_VISIBLE_DEVICES and what the container is given, or use the emulated device"
    )]
    NoDevice,
    /// There is no device of this number.
    #[error("there is no CUDA device {asked}: devices are numbered from 0, and there are {count}")]
    NoSuchDevice {
        /// The number asked for.
        asked: DeviceId,
        /// Devices there are.
        count: u32,
    },
    /// The device is there and cannot be used.
    #[error("{0}")]
    Device(DeviceError),
}

/// The version of CUDA whose `cuMemcpyBatchAsync` is called: that of 13.0 has one argument less.
const COPY_BATCH_VERSION: c_int = 12_080;

/// The driver of the CUDA devices of this machine.
pub struct CudaDriver {
    functions: Functions,
    copy_batch: Option<Address>,
    version: i32,
    devices: u32,
}

impl CudaDriver {
    /// The environment variable that names another library than `libcuda.so.1`: a path, or a name
    /// for the loader.
    pub const LIBRARY_VARIABLE: &str = "KVBM_CUDA_DRIVER";

    /// The library that [`CudaDriver::open`] loads.
    ///
    /// # Errors
    /// [`CudaUnavailable::NoDriver`] if the variable is empty.
    pub fn library() -> Result<OsString, CudaUnavailable> {
        let named = std::env::var_os(Self::LIBRARY_VARIABLE);
        let library = named.unwrap_or_else(|| "libcuda.so.1".into());
        if library.is_empty() {
            let reason = format!("{} is empty: unset it, or name a library", Self::LIBRARY_VARIABLE);
            return Err(CudaUnavailable::NoDriver { reason });
        }
        Ok(library)
    }

    /// Loads the driver of this machine, or the library that `KVBM_CUDA_DRIVER` names, and starts
    /// it. It tries nothing else: a named library that cannot be used is an error.
    ///
    /// # Errors
    /// [`CudaUnavailable`] says what is missing and what to do about it.
    pub fn open() -> Result<Arc<Self>, CudaUnavailable> {
        let library = Self::library()?;
        // SAFETY: a library of the driver's name is NVIDIA's driver, which every CUDA program loads
        // in the same way. The user who names another library vouches for it.
        unsafe { Self::open_library(&library) }
    }

    /// Loads a driver from a path, or by a name for the loader. It stays loaded.
    ///
    /// # Errors
    /// As for [`CudaDriver::open`].
    ///
    /// # Safety
    /// The library is a CUDA driver: its functions do what the driver's documentation says.
    pub unsafe fn open_library(path: impl AsRef<OsStr>) -> Result<Arc<Self>, CudaUnavailable> {
        // The default is to look functions up when they are first called, and to abort then.
        let flags = unix::RTLD_NOW | unix::RTLD_LOCAL;
        // SAFETY: the caller says that this is a driver, whose initialisers may run.
        let library = unsafe { unix::Library::open(Some(path.as_ref()), flags) };
        // It stays loaded: the driver runs threads of its own.
        let library = ManuallyDrop::new(library.map_err(|error| CudaUnavailable::NoDriver {
            reason: error.source().map_or_else(|| error.to_string(), ToString::to_string),
        })?);
        let lookup = |name: &str| {
            // SAFETY: what a driver has under the name of a function is this function, not null.
            let found = unsafe { library.get::<Option<Address>>(name) };
            found.ok().and_then(|address| *address)
        };
        // SAFETY: the functions are looked up in the driver, which stays loaded.
        unsafe { Self::start(&lookup) }
    }

    /// # Safety
    /// What `lookup` finds for a name is the driver's function of that name, and stays loaded.
    unsafe fn start(lookup: &dyn Fn(&str) -> Option<Address>) -> Result<Arc<Self>, CudaUnavailable> {
        let functions = Functions::load(lookup)?;
        let mut driver = Self { functions, copy_batch: None, version: 0, devices: 0 };
        // SAFETY: it takes a number.
        let initialised = unsafe { call!(driver.functions, cuInit(0)) };
        if initialised.is(CUresult::CUDA_ERROR_NO_DEVICE) {
            return Err(CudaUnavailable::NoDevice);
        }
        driver.started(initialised)?;
        // SAFETY: it writes a number through a pointer to one.
        let result = unsafe { call!(driver.functions, cuDriverGetVersion(&raw mut driver.version)) };
        driver.started(result)?;
        if driver.version < OLDEST_VERSION {
            return Err(CudaUnavailable::OldDriver { version: driver.version });
        }
        let mut count = 0;
        // SAFETY: it writes a number through a pointer to one.
        let result = unsafe { call!(driver.functions, cuDeviceGetCount(&raw mut count)) };
        driver.started(result)?;
        driver.devices = u32::try_from(count).unwrap_or(0);
        driver.copy_batch = driver.find_copy_batch();
        if driver.devices == 0 { Err(CudaUnavailable::NoDevice) } else { Ok(Arc::new(driver)) }
    }

    /// `cuMemcpyBatchAsync`, where the driver has it. Without it, drivers return an error, or set
    /// the status, or neither.
    fn find_copy_batch(&self) -> Option<Address> {
        let name = c"cuMemcpyBatchAsync".as_ptr();
        let mut address: Option<Address> = None;
        // The status is an enumeration that newer drivers may extend: it is read as a number.
        let mut status: c_int = 0;
        let (found, result) = ((&raw mut address).cast(), (&raw mut status).cast());
        // SAFETY: it writes an address and a number through pointers to them; the name ends with
        // NUL. A null pointer to a function is `None`.
        let result =
            unsafe { call!(self.functions, cuGetProcAddress_v2(name, found, COPY_BATCH_VERSION, 0, result)) };
        address.filter(|_| result.code == 0 && status == 0)
    }

    fn started(&self, CallResult { call, code }: CallResult) -> Result<(), CudaUnavailable> {
        if code == 0 { Ok(()) } else { Err(CudaUnavailable::Init { call, code, name: self.name_of(code) }) }
    }

    /// Version of CUDA that the driver is for: 12040 is 12.4.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Devices there are; at least one.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Whether it takes many copies in one call (`cuMemcpyBatchAsync`, since CUDA 12.8).
    pub fn has_batch_copies(&self) -> bool {
        self.copy_batch.is_some()
    }

    /// `cuMemcpyBatchAsync` as of CUDA 12.8, if the driver has it.
    pub(super) fn copy_batch(&self) -> Option<Address> {
        self.copy_batch
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The driver's name of an error.
    pub(super) fn name_of(&self, code: c_int) -> String {
        type GetErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        // `cudarc` declares the argument as `CUresult`, which cannot hold a code that it does not
        // know.
        // SAFETY: the driver's function of this name takes an `int` and a pointer to a string.
        let get_name = unsafe { transmute::<Address, GetErrorName>(self.functions.cuGetErrorName) };
        let mut name = std::ptr::null();
        // SAFETY: it writes a pointer to a constant through a pointer to one.
        let failed = unsafe { get_name(code, &raw mut name) };
        if failed != 0 || name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: a name of the driver ends with NUL and is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDriver(version {}, {} devices)", self.version, self.devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it asks the system's loader")]
    fn a_library_that_is_not_there_is_an_error_with_a_way_out() {
        // SAFETY: there is no such library, so nothing runs.
        let error = unsafe { CudaDriver::open_library("libcuda-of-nobody.so.1") }.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("no CUDA driver: libcuda-of-nobody.so.1"), "{text}");
        assert!(text.contains("emulated device"), "{text}");
    }

    #[test]
    fn every_missing_function_is_named() {
        unsafe extern "C" fn never() {
            unreachable!("loading calls nothing")
        }
        for &missing in Functions::NAMES {
            let lookup = |name: &str| (name != missing).then_some(never as Address);
            // SAFETY: one function is missing, so none is called.
            let error = unsafe { CudaDriver::start(&lookup) }.unwrap_err();
            assert_eq!(error, CudaUnavailable::MissingSymbol { symbol: missing.to_owned() });
        }
        assert!(Functions::NAMES.len() > 20);
    }

    #[test]
    fn versions_are_shown_as_people_write_them() {
        let text = CudaUnavailable::OldDriver { version: 11_080 }.to_string();
        assert!(text.contains("for CUDA 11.8,"), "{text}");
    }
}
