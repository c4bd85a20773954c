//! The driver's functions: argument types from `cudarc`, addresses from the library.
//!
//! No function of `cudarc` is called. Each returns `CUresult`, an exhaustive Rust enum: a result
//! that a newer driver adds would be undefined behaviour. [`call`] takes the argument types of
//! `cudarc`'s declaration and reads the result as a plain number. The addresses come from the
//! opened library, all before the first call. `cudarc`'s own loader would panic where one is
//! missing, prefers `libcuda.so` (a stub, where the CUDA toolkit is installed) to `libcuda.so.1`,
//! and cannot take the library that `KVBM_CUDA_DRIVER` names.

use std::ffi::c_int;
use std::mem::transmute;

pub(super) use cudarc::driver::sys;

use super::CudaUnavailable;

/// Where a function of the driver begins. It is called only as [`Declared::at`] types it.
pub(super) type Address = unsafe extern "C" fn();

/// A function as `cudarc` declares it.
pub(super) trait Declared {
    /// The driver's function: the same arguments, and the result as a number.
    type Function;

    /// The driver's function of this declaration at an address.
    fn at(self, address: Address) -> Self::Function;
}

macro_rules! declared {
    ($($argument:ident)*) => {
        impl<$($argument),*> Declared for unsafe fn($($argument),*) -> sys::CUresult {
            type Function = unsafe extern "C" fn($($argument),*) -> c_int;

            fn at(self, address: Address) -> Self::Function {
                // SAFETY: both are pointers to functions, and the call of the result, which is
                // unsafe, vouches for its type. C returns an enumeration as an `int`.
                unsafe { transmute::<Address, Self::Function>(address) }
            }
        }
    };
}

declared!(A);
declared!(A B);
declared!(A B C);
declared!(A B C D);
declared!(A B C D E);
declared!(A B C D E F G H I);
declared!(A B C D E F G H I J K);

/// What a call of the driver returned.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(super) struct CallResult {
    /// The driver's function.
    pub(super) call: &'static str,
    /// A `CUresult`, known to the bindings or not.
    pub(super) code: c_int,
}

impl CallResult {
    pub(super) fn is(self, code: sys::CUresult) -> bool {
        self.code == code as c_int
    }
}

/// Calls a function of the driver: `call!(functions, cuEventSynchronize(event))`, or one at an
/// address: `call!(at address, cuMemcpyBatchAsync(...))`. Unsafe as the function itself.
macro_rules! call {
    (at $address:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        use $crate::cuda::functions::{CallResult, Declared, sys};
        let declared: unsafe fn($(call!(type of $argument)),*) -> _ = sys::$name;
        CallResult {
            call: stringify!($name),
            code: Declared::at(declared, $address)($($argument),*),
        }
    }};
    (type of $argument:expr) => { _ };
    ($functions:expr, $name:ident($($argument:expr),* $(,)?)) => {
        call!(at $functions.$name, $name($($argument),*))
    };
}
pub(super) use call;

macro_rules! functions {
    ($($name:ident)*) => {
        /// The addresses of the functions that are called.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Functions {
            $(pub(super) $name: Address,)*
        }

        impl Functions {
            /// Their names.
            #[cfg(test)]
            pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Looks up every function.
            ///
            /// # Errors
            /// [`CudaUnavailable::MissingSymbol`] for the first that is missing.
            pub(super) fn load(
                lookup: &dyn Fn(&str) -> Option<Address>,
            ) -> Result<Self, CudaUnavailable> {
                let find = |name: &str| {
                    lookup(name)
                        .ok_or_else(|| CudaUnavailable::MissingSymbol { symbol: name.to_owned() })
                };
                Ok(Self { $($name: find(stringify!($name))?,)* })
            }
        }
    };
}

functions! {
    cuInit cuDriverGetVersion cuGetErrorName cuGetProcAddress_v2
    cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem_v2 cuDeviceGetAttribute
    cuDeviceGetPCIBusId
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
    cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemGetAddressRange_v2
    cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
    cuMemGetAllocationGranularity cuMemCreate cuMemRelease cuMemRetainAllocationHandle
    cuMemGetAllocationPropertiesFromHandle cuMemExportToShareableHandle
    cuMemImportFromShareableHandle
    cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess
    cuMemHostRegister_v2 cuMemHostUnregister
    cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent
    cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventSynchronize cuEventElapsedTime
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemsetD8Async
    cuModuleLoadData cuModuleUnload cuModuleGetFunction cuLaunchKernel
}

/// An object of the driver: a pointer that only the driver follows.
#[derive(Debug)]
pub(super) struct DriverHandle<T>(pub(super) *mut T);

// SAFETY: only the driver follows the pointer, and its functions take it on every thread.
unsafe impl<T> Send for DriverHandle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for DriverHandle<T> {}

impl<T> Clone for DriverHandle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DriverHandle<T> {}

impl<T> PartialEq for DriverHandle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for DriverHandle<T> {}

impl<T> DriverHandle<T> {
    /// Of a handle that an engine passes as a number.
    pub(super) fn from_engine(handle: usize) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(handle))
    }
}

pub(super) type ContextHandle = DriverHandle<sys::CUctx_st>;
pub(super) type StreamHandle = DriverHandle<sys::CUstream_st>;
pub(super) type EventHandle = DriverHandle<sys::CUevent_st>;
