//! Images of kernels, and launches of them.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use super::Shared;
use super::driver::Handle;
use crate::DeviceError;

/// `CU_LAUNCH_PARAM_BUFFER_POINTER`
const ARGUMENT: usize = 1;
/// `CU_LAUNCH_PARAM_BUFFER_SIZE`
const ARGUMENT_BYTES: usize = 2;

/// A loaded image; unloaded when it and all its functions are dropped.
pub struct CudaModule {
    shared: Arc<Shared>,
    module: Handle,
}

/// A kernel of a module.
#[derive(Clone)]
pub struct CudaFunction {
    module: Arc<CudaModule>,
    function: Handle,
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
    pub(super) unsafe fn load(shared: &Arc<Shared>, image: &[u8]) -> Result<Self, DeviceError> {
        // The driver reads words.
        let mut aligned = vec![0_u64; image.len().div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let entered = shared.enter()?;
        let mut module = 0;
        // SAFETY: the caller has a whole image, which is not needed any more after this.
        let code = unsafe { (shared.functions().module_load)(&raw mut module, aligned.as_ptr().cast()) };
        drop(entered);
        shared.check("cuModuleLoadData", code)?;
        Ok(Self { shared: Arc::clone(shared), module })
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if there is none.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<CudaFunction, DeviceError> {
        let entered = self.shared.enter()?;
        let mut function = 0;
        // SAFETY: the module is loaded, the name ends with NUL.
        let code = unsafe {
            (self.shared.functions().module_function)(&raw mut function, self.module, name.as_ptr())
        };
        drop(entered);
        self.shared.check("cuModuleGetFunction", code)?;
        Ok(CudaFunction { module: Arc::clone(self), function })
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.enter() {
            // SAFETY: loaded once, unloaded once; launches hold it until they are complete.
            let _nothing_to_do_about_it = unsafe { (self.shared.functions().module_unload)(self.module) };
        }
    }
}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaModule(of device {})", self.shared.id)
    }
}

impl CudaFunction {
    /// Whether it is a kernel of this device.
    pub(super) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.module.shared, shared)
    }

    /// Issues a launch; the context must be entered.
    ///
    /// # Safety
    /// The argument is the kernel's, and the memory that it leads to is as the kernel needs it until the launch is complete.
    pub(super) unsafe fn issue(&self, launch: &CudaLaunch, stream: Handle) -> Result<(), DeviceError> {
        let mut size = launch.argument.len();
        let mut extra: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(ARGUMENT),
            launch.argument.as_ptr().cast_mut().cast(),
            std::ptr::without_provenance_mut(ARGUMENT_BYTES),
            (&raw mut size).cast(),
            std::ptr::null_mut(),
        ];
        let shared = &self.module.shared;
        let (grid, threads, bytes) = (launch.grid, launch.threads, launch.shared_bytes);
        let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
        // SAFETY: function and stream are alive, the argument is read during the call; the caller answers for its meaning.
        let code = unsafe {
            (shared.functions().launch)(self.function, grid, 1, 1, threads, 1, 1, bytes, stream, none, extra)
        };
        shared.check("cuLaunchKernel", code)
    }
}

impl fmt::Debug for CudaFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaFunction(of device {})", self.module.shared.id)
    }
}
