//! The conformance suite on a real GPU. Where there is none this says so, and fails only if one is
//! required (`KVBM_REQUIRE_GPU=1`, as `cargo xtask test-gpu` sets it).
#![cfg(not(miri))] // It asks the system's loader.

use std::sync::Arc;

use kvbm_device::{CudaDevice, CudaDriver, Device, DeviceId, DeviceKind, conformance};

fn device() -> Option<CudaDevice> {
    let found = CudaDriver::open().and_then(|driver| CudaDevice::open(&driver, DeviceId(0)));
    match found {
        Ok(device) => Some(device),
        Err(why) => {
            assert!(std::env::var_os("KVBM_REQUIRE_GPU").is_none(), "no CUDA device was found: {why}");
            eprintln!("skipped: no CUDA device was found: {why}");
            None
        }
    }
}

#[test]
fn gpu_conforms() {
    let Some(device) = device() else { return };
    assert_eq!(device.info().kind, DeviceKind::Cuda);
    conformance::run(&|| Arc::new(device.clone()));
}
