//! Images of kernels, and launches of them.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use super::CudaContext;
use super::functions::{DriverHandle, StreamHandle, call, sys};
use crate::DeviceError;

/// The next entry of a launch's list is the address of the argument.
const ARGUMENT: usize = sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize;
/// The next entry of a launch's list is the address of the argument's length in bytes.
const ARGUMENT_BYTES: usize = sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize;

/// A loaded image; unloaded when it and all its functions are dropped.
pub struct CudaModule {
    context: Arc<CudaContext>,
    module: DriverHandle<sys::CUmod_st>,
}

/// A kernel of a module.
#[derive(Clone)]
pub struct CudaFunction {
    module: Arc<CudaModule>,
    function: DriverHandle<sys::CUfunc_st>,
}

/// How a kernel is launched: one-dimensional, with one argument by value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaLaunch {
    /// Blocks of threads.
    pub grid: u32,
    /// Threads of each.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The bytes of the argument.
    pub argument: Vec<u8>,
}

impl CudaModule {
    /// # Safety
    /// The image is whole.
    pub(super) unsafe fn load(context: &Arc<CudaContext>, image: &[u8]) -> Result<Self, DeviceError> {
        // The driver reads words.
        let mut aligned = vec![0_u64; image.len().div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut module = std::ptr::null_mut();
        let (into, image) = (&raw mut module, aligned.as_ptr().cast());
        // SAFETY: the caller has a whole image, which the driver does not need after the call.
        context.must(|driver| unsafe { call!(driver, cuModuleLoadData(into, image)) })?;
        Ok(Self { context: Arc::clone(context), module: DriverHandle(module) })
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if there is none.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<CudaFunction, DeviceError> {
        let mut function = std::ptr::null_mut();
        let (into, name) = (&raw mut function, name.as_ptr());
        self.context.must(|driver| {
            // SAFETY: the module is loaded, the name ends with NUL.
            unsafe { call!(driver, cuModuleGetFunction(into, self.module.0, name)) }
        })?;
        Ok(CudaFunction { module: Arc::clone(self), function: DriverHandle(function) })
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; launches hold it until they are complete.
        self.context.release(|driver| unsafe { call!(driver, cuModuleUnload(self.module.0)) });
    }
}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaModule(of device {})", self.context.id)
    }
}

impl CudaFunction {
    /// Whether it is a kernel of this device.
    pub(super) fn is_of(&self, context: &Arc<CudaContext>) -> bool {
        Arc::ptr_eq(&self.module.context, context)
    }

    /// Issues a launch; the context must be entered.
    ///
    /// # Safety
    /// The argument is the kernel's, and the memory that it leads to is as the kernel needs it
    /// until the launch is complete.
    pub(super) unsafe fn issue(&self, launch: &CudaLaunch, stream: StreamHandle) -> Result<(), DeviceError> {
        let mut size = launch.argument.len();
        let mut extra: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(ARGUMENT),
            launch.argument.as_ptr().cast_mut().cast(),
            std::ptr::without_provenance_mut(ARGUMENT_BYTES),
            (&raw mut size).cast(),
            std::ptr::null_mut(),
        ];
        let context = &self.module.context;
        let (grid, threads, bytes) = (launch.grid, launch.threads, launch.shared_bytes);
        let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
        let (function, stream) = (self.function.0, stream.0);
        // SAFETY: function and stream are alive, and the driver copies the argument during the
        // call. The caller answers for its meaning.
        context.check(unsafe {
            call!(
                context.functions(),
                cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, bytes, stream, none, extra)
            )
        })
    }
}

impl fmt::Debug for CudaFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaFunction(of device {})", self.module.context.id)
    }
}
