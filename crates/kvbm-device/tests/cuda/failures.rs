//! Every call of a whole scenario, failing once each: an error that names the call, nothing left
//! behind, nobody waits.

use std::time::Duration;

use kvbm_device::{
    CopyBatch, CopyEngine, CudaStream, Device, DeviceError, Direction, HostBuffer, PinParts, Stream,
};
use kvbm_test_driver::TestDriver;

use crate::library::open_driver;
use crate::{IMAGE, fill, soon};

/// Everything that a device is used for, up to the first error.
fn scenario(library: &TestDriver) -> Result<(), String> {
    let driver = open_driver(library).map_err(|error| error.to_string())?;
    let device = kvbm_device::CudaDevice::open(&driver, kvbm_device::DeviceId(0));
    let device = device.map_err(|error| error.to_string())?;
    let used = || -> Result<(), DeviceError> {
        let (_, _, _) = (device.info(), device.numa_node(), device.multiprocessors()?);
        let memory = device.allocate(1 << 16, 256)?;
        let host = HostBuffer::zeroed(1 << 16);
        let parts = PinParts { bytes: 1 << 15, threads: 2 };
        let pinned = device.register_host_in_parts(host.region().clone(), parts, &|_, _| {})?;
        // SAFETY: `memory` outlives it.
        let part = unsafe { device.register_external(memory.address() + 256, 1024) }?;
        // SAFETY: the test driver reads four bytes.
        let module = unsafe { device.load_module(&IMAGE) }?;
        let function = module.function(c"kvbm_test_fill")?;
        let opened = device.create_stream("scenario")?;
        let other = device.create_stream("other")?;
        let stream = CudaStream::of(&*opened).expect("it is one");
        let start = stream.mark()?;
        stream.fill(&memory, 0, 1 << 16, 1)?;
        for engine in [CopyEngine::Auto, CopyEngine::Single] {
            let mut into = CopyBatch::new(Direction::HostToDevice);
            for piece in 0..4 {
                into.push_host_to_device(pinned.region(), piece << 14, &memory, piece << 14, 1 << 14)?;
            }
            stream.copy_by(into, engine).map_err(DeviceError::from)?;
        }
        let owner: kvbm_device::Owner = std::sync::Arc::new(memory.clone());
        // SAFETY: the launch holds the memory.
        unsafe { stream.launch(&function, fill(part.address(), 1024, 9), vec![owner]) }?;
        let mut within = CopyBatch::new(Direction::DeviceToDevice);
        within.push_device_to_device(&memory, 0, &memory, 1 << 15, 4096)?;
        let written = stream.copy(within).map_err(DeviceError::from)?;
        other.wait(&written)?;
        let back = HostBuffer::zeroed(1 << 16);
        let mut out = CopyBatch::new(Direction::DeviceToHost);
        out.push_device_to_host(&memory, 0, &back, 0, 1 << 16)?;
        other.copy(out).map_err(DeviceError::from)?.wait(soon())?;
        stream.mark()?.since(&start, soon())?;
        drop(device.share(&memory)?);
        drop(device.share(&device.allocate_shareable(4096, false)?)?);
        drop(device.share(&device.allocate_shareable(4096, true)?)?);
        Ok(())
    };
    used().map_err(|error| error.to_string())
}

/// Calls whose failure changes nothing that a caller would have to know: what is given back, what
/// is only asked for.
const HARMLESS: [&str; 17] = [
    "cuCtxPopCurrent_v2",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuGetErrorName",
    "cuGetProcAddress_v2",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    // On the way to one of the others.
    "cuCtxPushCurrent_v2",
];

/// Errors that say what is wrong rather than which call said so.
const KINDS: [&str; 3] = ["out of memory", "page-lock", "not inside a live allocation"];

#[test]
fn every_call_fails_once_and_says_so() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(30));
    let before = library.calls(c"");
    assert_eq!(scenario(&library), Ok(()));
    library.assert_nothing_is_left();
    let calls = library.calls(c"") - before;
    assert!(calls > 100, "{calls} calls");
    let mut seen = std::collections::BTreeSet::new();
    for code in [999, 2, 700] {
        for number in 0..i32::try_from(calls).expect("few") {
            library.fail_call(number, code);
            let result = scenario(&library);
            // Threads of streams may meet the failing call after the scenario is over.
            library.assert_nothing_is_left();
            if let Some(call) = library.failed() {
                let plain = call.trim_end_matches("_v2");
                match &result {
                    Ok(()) => assert!(HARMLESS.contains(&call.as_str()), "{call} ({code}) was not noticed"),
                    Err(text) => {
                        // A context that cannot be entered any more makes whatever is next fail
                        // alike.
                        let alike = call == "cuCtxPushCurrent_v2" && text.contains(&format!("({code})"));
                        let by_kind = KINDS.iter().any(|kind| text.contains(kind));
                        assert!(alike || by_kind || text.contains(plain), "{call} ({code}): {text}");
                        assert!(text.contains("; "), "{call} ({code}) without a way out: {text}");
                    }
                }
                seen.insert(call);
            }
            library.fail_call(-1, 0);
            library.revive();
        }
    }
    println!("{calls} calls a scenario, {} functions: {seen:?}", seen.len());
    assert!(seen.len() > 40, "only {seen:?}");
}
