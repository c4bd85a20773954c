//! The driver's library: loaded at run time, every function looked up by name, nothing taken for granted.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use crate::{DeviceError, DeviceId};

/// Oldest driver that is known to do what is needed here: CUDA 12.0 (R525).
const OLDEST_VERSION: c_int = 12_000;

/// Why there is no CUDA device to work with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The library is not there, or the loader refuses it.
    #[error("no CUDA driver: {reason}; install NVIDIA's driver, or use the emulated device")]
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
        "the CUDA driver does not start: cuInit says {name} ({code}); see `dmesg`, and whether library and kernel module are of one version"
    )]
    Init {
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

/// Handles of the driver are pointers that nobody here follows.
pub(super) type Handle = usize;

macro_rules! functions {
    ($($field:ident: $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions that are used; all return a `CUresult`.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// Their names.
            const NAMES: &[&CStr] = &[$($symbol),*];

            /// # Safety
            /// What `lookup` gives for a name is the driver's function of that name, and stays loaded.
            unsafe fn load(
                lookup: &dyn Fn(&CStr) -> Option<*mut c_void>,
            ) -> Result<Self, CudaUnavailable> {
                Ok(Self {
                    $($field: {
                        let function = find(lookup, $symbol)?;
                        // SAFETY: the driver's function of this name has this type, and a pointer to it is not null.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(function)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    init: c"cuInit" (c_uint);
    driver_version: c"cuDriverGetVersion" (*mut c_int);
    error_name: c"cuGetErrorName" (c_int, *mut *const c_char);
    device_count: c"cuDeviceGetCount" (*mut c_int);
    device_get: c"cuDeviceGet" (*mut c_int, c_int);
    device_name: c"cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_total: c"cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute: c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain: c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_release: c"cuDevicePrimaryCtxRelease_v2" (c_int);
    context_push: c"cuCtxPushCurrent_v2" (Handle);
    context_pop: c"cuCtxPopCurrent_v2" (*mut Handle);
    memory_info: c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    memory_alloc: c"cuMemAlloc_v2" (*mut u64, usize);
    memory_free: c"cuMemFree_v2" (u64);
    memory_range: c"cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64);
    host_register: c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister: c"cuMemHostUnregister" (*mut c_void);
    stream_create: c"cuStreamCreate" (*mut Handle, c_uint);
    stream_destroy: c"cuStreamDestroy_v2" (Handle);
    stream_synchronize: c"cuStreamSynchronize" (Handle);
    stream_wait_event: c"cuStreamWaitEvent" (Handle, Handle, c_uint);
    event_create: c"cuEventCreate" (*mut Handle, c_uint);
    event_destroy: c"cuEventDestroy_v2" (Handle);
    event_record: c"cuEventRecord" (Handle, Handle);
    event_synchronize: c"cuEventSynchronize" (Handle);
    copy_host_to_device: c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    copy_device_to_host: c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
    copy_device_to_device: c"cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle);
    set_bytes: c"cuMemsetD8Async" (u64, u8, usize, Handle);
    module_load: c"cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload: c"cuModuleUnload" (Handle);
    module_function: c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    launch: c"cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

fn find(lookup: &dyn Fn(&CStr) -> Option<*mut c_void>, name: &CStr) -> Result<*mut c_void, CudaUnavailable> {
    let missing = || CudaUnavailable::MissingSymbol { symbol: name.to_string_lossy().into_owned() };
    lookup(name).filter(|function| !function.is_null()).ok_or_else(missing)
}

/// The driver of the CUDA devices of this machine.
pub struct CudaDriver {
    functions: Functions,
    version: i32,
    devices: u32,
}

impl CudaDriver {
    /// Loads the driver of this machine and starts it.
    ///
    /// # Errors
    /// [`CudaUnavailable`] says what is missing and what to do about it.
    pub fn open() -> Result<Arc<Self>, CudaUnavailable> {
        // SAFETY: whatever has this name is NVIDIA's driver, which every CUDA program loads in the same way.
        unsafe { Self::open_library(c"libcuda.so.1") }
    }

    /// Loads a driver from a path, or by a name for the loader. It stays loaded.
    ///
    /// # Errors
    /// As for [`CudaDriver::open`].
    ///
    /// # Safety
    /// The library is a CUDA driver: its functions do what the driver's documentation says of their names.
    pub unsafe fn open_library(path: &CStr) -> Result<Arc<Self>, CudaUnavailable> {
        // SAFETY: the caller says that this is a driver, whose initialisers may run.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(CudaUnavailable::NoDriver { reason: loader_error() });
        }
        let lookup = |name: &CStr| {
            // SAFETY: the handle is of a library that is never unloaded, the name ends with NUL.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        // SAFETY: the functions are looked up in the driver, which stays loaded.
        unsafe { Self::start(&lookup) }
    }

    /// # Safety
    /// As for [`Functions::load`].
    unsafe fn start(lookup: &dyn Fn(&CStr) -> Option<*mut c_void>) -> Result<Arc<Self>, CudaUnavailable> {
        // SAFETY: the caller answers for `lookup`.
        let functions = unsafe { Functions::load(lookup) }?;
        let mut driver = Self { functions, version: 0, devices: 0 };
        // SAFETY: takes a number.
        match unsafe { (driver.functions.init)(0) } {
            0 => {}
            NO_DEVICE => return Err(CudaUnavailable::NoDevice),
            code => return Err(CudaUnavailable::Init { code, name: driver.name_of(code) }),
        }
        // SAFETY: writes a number through a pointer to one.
        let code = unsafe { (driver.functions.driver_version)(&raw mut driver.version) };
        driver.started(code)?;
        if driver.version < OLDEST_VERSION {
            return Err(CudaUnavailable::OldDriver { version: driver.version });
        }
        let mut count = 0;
        // SAFETY: writes a number through a pointer to one.
        let code = unsafe { (driver.functions.device_count)(&raw mut count) };
        driver.started(code)?;
        driver.devices = u32::try_from(count).unwrap_or(0);
        if driver.devices == 0 { Err(CudaUnavailable::NoDevice) } else { Ok(Arc::new(driver)) }
    }

    fn started(&self, code: c_int) -> Result<(), CudaUnavailable> {
        if code == 0 { Ok(()) } else { Err(CudaUnavailable::Init { code, name: self.name_of(code) }) }
    }

    /// Version of CUDA that the driver is for: 12040 is 12.4.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Devices there are; at least one.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Names of the functions that a driver has to have.
    pub fn required_symbols() -> impl Iterator<Item = &'static CStr> {
        Functions::NAMES.iter().copied()
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The driver's name of an error.
    pub(super) fn name_of(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to a constant through a pointer to one.
        let known = unsafe { (self.functions.error_name)(code, &raw mut name) };
        if known != 0 || name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: what the driver names ends with NUL and is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDriver(version {}, {} devices)", self.version, self.devices)
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(super) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NO_DEVICE`
pub(super) const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`
pub(super) const ALREADY_REGISTERED: c_int = 712;

/// Errors after which nothing works on the device before the process starts anew: a kernel went astray, the hardware failed,
/// or the driver is being unloaded.
pub(super) fn is_fatal(code: c_int) -> bool {
    matches!(code, 4 | 201 | 214 | 700 | 702 | 709 | 710 | 714..=719)
}

fn loader_error() -> String {
    // SAFETY: gives a message of this thread, or null.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: it ends with NUL and stays until the loader's next call on this thread.
    unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it asks the system's loader")]
    fn a_library_that_is_not_there_is_an_error_with_a_way_out() {
        // SAFETY: there is no such library, so nothing runs.
        let error = unsafe { CudaDriver::open_library(c"libcuda-of-nobody.so.1") }.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("no CUDA driver: libcuda-of-nobody.so.1"), "{text}");
        assert!(text.contains("emulated device"), "{text}");
    }

    #[test]
    fn every_missing_function_is_named() {
        extern "C" fn never() -> c_int {
            unreachable!("loading calls nothing")
        }
        for missing in CudaDriver::required_symbols() {
            let lookup =
                |name: &CStr| (name != missing).then_some(never as extern "C" fn() -> c_int as *mut c_void);
            // SAFETY: one function is missing, so none is called.
            let error = unsafe { CudaDriver::start(&lookup) }.unwrap_err();
            let symbol = missing.to_string_lossy().into_owned();
            assert_eq!(error, CudaUnavailable::MissingSymbol { symbol });
        }
        assert!(CudaDriver::required_symbols().count() > 20);
    }

    #[test]
    fn versions_are_told_as_people_write_them() {
        let text = CudaUnavailable::OldDriver { version: 11_080 }.to_string();
        assert!(text.contains("for CUDA 11.8,"), "{text}");
    }
}
