//! The driver's library: loaded at run time, every function looked up by name, nothing taken for granted.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
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
        "the CUDA driver does not start: {call} says {name} ({code}); see `dmesg`, and whether library and kernel module are of one version"
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
            #[cfg(test)]
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
    device_bus: c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    context_retain: c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_release: c"cuDevicePrimaryCtxRelease_v2" (c_int);
    context_push: c"cuCtxPushCurrent_v2" (Handle);
    context_pop: c"cuCtxPopCurrent_v2" (*mut Handle);
    memory_info: c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    memory_alloc: c"cuMemAlloc_v2" (*mut u64, usize);
    memory_free: c"cuMemFree_v2" (u64);
    memory_range: c"cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64);
    handle_of: c"cuIpcGetMemHandle" (*mut Opaque, u64);
    handle_open: c"cuIpcOpenMemHandle_v2" (*mut u64, Opaque, c_uint);
    handle_close: c"cuIpcCloseMemHandle" (u64);
    object_granularity: c"cuMemGetAllocationGranularity" (*mut usize, *const Properties, c_uint);
    object_create: c"cuMemCreate" (*mut Handle, usize, *const Properties, u64);
    object_release: c"cuMemRelease" (Handle);
    object_at: c"cuMemRetainAllocationHandle" (*mut Handle, *mut c_void);
    object_properties: c"cuMemGetAllocationPropertiesFromHandle" (*mut Properties, Handle);
    object_export: c"cuMemExportToShareableHandle" (*mut c_void, Handle, c_uint, u64);
    object_import: c"cuMemImportFromShareableHandle" (*mut Handle, *mut c_void, c_uint);
    addresses_reserve: c"cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    addresses_free: c"cuMemAddressFree" (u64, usize);
    object_map: c"cuMemMap" (u64, usize, usize, Handle, u64);
    object_unmap: c"cuMemUnmap" (u64, usize);
    set_access: c"cuMemSetAccess" (u64, usize, *const Access, usize);
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
    event_elapsed: c"cuEventElapsedTime" (*mut f32, Handle, Handle);
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
    proc_address: c"cuGetProcAddress_v2" (*const c_char, *mut *mut c_void, c_int, u64, *mut c_int);
}

/// `cuMemcpyBatchAsync` of CUDA 12.8: destinations, sources, lengths, how many; attributes, where each begins, how many;
/// the copy that was refused; the stream.
pub(super) type CopyBatchCall = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    Handle,
) -> c_int;

/// The version of CUDA whose `cuMemcpyBatchAsync` is asked for: that of 13.0 has one argument less.
const COPY_BATCH_VERSION: c_int = 12_080;

/// `CUmemcpyAttributes`
#[repr(C)]
pub(super) struct CopyAttributes {
    /// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM` (1): sources are read in the order of the stream.
    pub(super) order: c_int,
    /// Hints for managed memory, of which there is none here: type and number of a place.
    pub(super) hints: [[c_int; 2]; 2],
    pub(super) flags: c_uint,
}

/// A handle that processes exchange: `CUipcMemHandle`, `CUmemFabricHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Opaque(pub(super) [u8; 64]);

/// `CUmemAllocationProp`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Properties {
    /// `CU_MEM_ALLOCATION_TYPE_PINNED` (1)
    pub(super) kind: c_int,
    /// Bits of `CUmemAllocationHandleType`.
    pub(super) handles: c_int,
    pub(super) location: [c_int; 2],
    pub(super) unused: usize,
    pub(super) flags: [u8; 8],
}

/// `CUmemAccessDesc`
#[repr(C)]
pub(super) struct Access {
    pub(super) location: [c_int; 2],
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE` (3)
    pub(super) flags: c_int,
}

fn find(lookup: &dyn Fn(&CStr) -> Option<*mut c_void>, name: &CStr) -> Result<*mut c_void, CudaUnavailable> {
    let missing = || CudaUnavailable::MissingSymbol { symbol: name.to_string_lossy().into_owned() };
    lookup(name).filter(|function| !function.is_null()).ok_or_else(missing)
}

/// The driver of the CUDA devices of this machine.
pub struct CudaDriver {
    functions: Functions,
    copy_batch: Option<CopyBatchCall>,
    version: i32,
    devices: u32,
}

impl CudaDriver {
    /// The environment variable that names another library than `libcuda.so.1`: a path, or a name for the loader.
    pub const LIBRARY_VARIABLE: &str = "KVBM_CUDA_DRIVER";

    /// The library that [`CudaDriver::open`] loads.
    ///
    /// # Errors
    /// [`CudaUnavailable::NoDriver`] if the variable holds nothing that the loader can take.
    pub fn library() -> Result<CString, CudaUnavailable> {
        let Some(named) = std::env::var_os(Self::LIBRARY_VARIABLE) else { return Ok(c"libcuda.so.1".into()) };
        let reason = |what: &str| format!("{} {what}", Self::LIBRARY_VARIABLE);
        if named.is_empty() {
            return Err(CudaUnavailable::NoDriver {
                reason: reason("is empty: unset it, or name a library"),
            });
        }
        CString::new(named.into_encoded_bytes())
            .map_err(|_| CudaUnavailable::NoDriver { reason: reason("holds a NUL") })
    }

    /// Loads the driver of this machine, or what `KVBM_CUDA_DRIVER` names, and starts it. There is no second try: a
    /// library that was named and cannot be used is an error.
    ///
    /// # Errors
    /// [`CudaUnavailable`] says what is missing and what to do about it.
    pub fn open() -> Result<Arc<Self>, CudaUnavailable> {
        let library = Self::library()?;
        // SAFETY: whatever has the driver's name is NVIDIA's driver, which every CUDA program loads in the same way; who names
        // another library says that it is one, as with the loader's own variables.
        unsafe { Self::open_library(&library) }
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
        let mut driver = Self { functions, copy_batch: None, version: 0, devices: 0 };
        // SAFETY: takes a number.
        match unsafe { (driver.functions.init)(0) } {
            0 => {}
            NO_DEVICE => return Err(CudaUnavailable::NoDevice),
            code => driver.started("cuInit", code)?,
        }
        // SAFETY: writes a number through a pointer to one.
        let code = unsafe { (driver.functions.driver_version)(&raw mut driver.version) };
        driver.started("cuDriverGetVersion", code)?;
        if driver.version < OLDEST_VERSION {
            return Err(CudaUnavailable::OldDriver { version: driver.version });
        }
        let mut count = 0;
        // SAFETY: writes a number through a pointer to one.
        let code = unsafe { (driver.functions.device_count)(&raw mut count) };
        driver.started("cuDeviceGetCount", code)?;
        driver.devices = u32::try_from(count).unwrap_or(0);
        driver.copy_batch = driver.find_copy_batch();
        if driver.devices == 0 { Err(CudaUnavailable::NoDevice) } else { Ok(Arc::new(driver)) }
    }

    /// `cuMemcpyBatchAsync`, where the driver has it. What it lacks it says by its result, by the status, or by neither.
    fn find_copy_batch(&self) -> Option<CopyBatchCall> {
        let (mut function, mut status) = (std::ptr::null_mut(), 0);
        let (name, found) = (c"cuMemcpyBatchAsync".as_ptr(), &raw mut function);
        // SAFETY: writes an address and a number through pointers to them; the name ends with NUL.
        let code =
            unsafe { (self.functions.proc_address)(name, found, COPY_BATCH_VERSION, 0, &raw mut status) };
        if code != 0 || status != 0 || function.is_null() {
            return None;
        }
        // SAFETY: the driver's function of this name and version has this type, and a pointer to it is not null.
        Some(unsafe { std::mem::transmute::<*mut c_void, CopyBatchCall>(function) })
    }

    fn started(&self, call: &'static str, code: c_int) -> Result<(), CudaUnavailable> {
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

    pub(super) fn copy_batch(&self) -> Option<CopyBatchCall> {
        self.copy_batch
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

/// What to do about an error.
pub(super) fn way_out(code: c_int) -> &'static str {
    match code {
        code if is_fatal(code) => {
            "the device's context is dead: nothing works on it before the process starts anew"
        }
        OUT_OF_MEMORY => "free memory of the device, or give kvbm less of it",
        46 => "another process has the device for itself: see its compute mode in `nvidia-smi`",
        200 | 209 | 218 | 222 => {
            "the driver takes none of the kernels' images: update it, or build with CUDA_ARCHS for this device"
        }
        800 => {
            "the system does not permit it: see what the container is given, and the driver's device files"
        }
        801 => "this device or its driver does not offer it; `kvbm doctor` tells what they offer",
        999 => "see `dmesg` for what the kernel module says (Xid)",
        _ => "see the driver's documentation of this error",
    }
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
        for &missing in Functions::NAMES {
            let lookup =
                |name: &CStr| (name != missing).then_some(never as extern "C" fn() -> c_int as *mut c_void);
            // SAFETY: one function is missing, so none is called.
            let error = unsafe { CudaDriver::start(&lookup) }.unwrap_err();
            let symbol = missing.to_string_lossy().into_owned();
            assert_eq!(error, CudaUnavailable::MissingSymbol { symbol });
        }
        assert!(Functions::NAMES.len() > 20);
    }

    #[test]
    fn versions_are_told_as_people_write_them() {
        let text = CudaUnavailable::OldDriver { version: 11_080 }.to_string();
        assert!(text.contains("for CUDA 11.8,"), "{text}");
    }
}
