//! Result codes of the driver: which end a context, and what to do about them.

use std::ffi::c_int;

use super::functions::sys::CUresult;

/// Errors after which nothing works on the device before the process starts anew: a kernel failed,
/// the hardware failed, or the driver is being unloaded.
const FATAL: [CUresult; 13] = [
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
];

/// Whether the context is dead after this result.
pub(super) fn is_fatal(code: c_int) -> bool {
    is_one_of(code, &FATAL)
}

/// What to do about an error.
pub(super) fn way_out(code: c_int) -> &'static str {
    const IMAGES: [CUresult; 4] = [
        CUresult::CUDA_ERROR_INVALID_IMAGE,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    ];
    let is = |wanted| is_one_of(code, &[wanted]);
    if is_fatal(code) {
        "the device's context is dead: restart the process to use the device again"
    } else if is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        "free memory of the device, or give kvbm less of it"
    } else if is(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE) {
        "another process uses the device exclusively: see its compute mode in `nvidia-smi`"
    } else if is_one_of(code, &IMAGES) {
        "the driver accepts none of the kernels' images: update it, or build with CUDA_ARCHS for this device"
    } else if is(CUresult::CUDA_ERROR_STUB_LIBRARY) {
        "this is the stub of the CUDA toolkit: take its folder out of LD_LIBRARY_PATH, or name the driver in KVBM_CUDA_DRIVER"
    } else if is(CUresult::CUDA_ERROR_NOT_PERMITTED) {
        "the system does not permit it: check the container's devices and the driver's device files"
    } else if is(CUresult::CUDA_ERROR_NOT_SUPPORTED) {
        "this device or its driver does not support it; `kvbm doctor` lists what they support"
    } else if is(CUresult::CUDA_ERROR_UNKNOWN) {
        "see `dmesg` for the kernel module's message (Xid)"
    } else {
        "see the driver's documentation of this error"
    }
}

fn is_one_of(code: c_int, codes: &[CUresult]) -> bool {
    codes.iter().any(|known| *known as c_int == code)
}
