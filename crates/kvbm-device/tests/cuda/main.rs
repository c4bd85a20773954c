//! The CUDA device on a driver without hardware: the same code that runs on a GPU, with failures at
//! every call.
#![cfg(not(miri))] // It builds and loads a library.

mod copies;
mod ending;
mod failures;
mod library;
mod sharing;

use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CudaDevice, CudaLaunch, CudaStream, CudaUnavailable, Device, DeviceError, DeviceId,
    DeviceKind, Direction, Event, EventStatus, HostBuffer, Stream, conformance,
};
use kvbm_test_driver::TestDriver;
use library::{Engine, open_device, open_driver};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn cuda_device_conforms() {
    let Some(library) = TestDriver::new() else { return };
    assert_eq!(open_device(&library).info().kind, DeviceKind::Cuda);
    conformance::run(&|| Arc::new(open_device(&library)));
    library.assert_nothing_is_left();
}

#[test]
fn cuda_device_conforms_under_random_delays() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(300));
    conformance::run(&|| Arc::new(open_device(&library)));
    library.assert_nothing_is_left();
}

#[test]
fn machines_without_a_usable_device_say_what_is_missing() {
    let Some(library) = TestDriver::new() else { return };
    library.machine(0, 12_040);
    assert_eq!(open_driver(&library).unwrap_err(), CudaUnavailable::NoDevice);
    library.machine(1, 11_080);
    assert_eq!(open_driver(&library).unwrap_err(), CudaUnavailable::OldDriver { version: 11_080 });
    library.machine(2, 12_000);
    let driver = open_driver(&library).expect("an old driver is good enough");
    assert_eq!((driver.devices(), driver.version()), (2, 12_000));
    let error = CudaDevice::open(&driver, DeviceId(2)).unwrap_err();
    assert_eq!(error, CudaUnavailable::NoSuchDevice { asked: DeviceId(2), count: 2 });

    for (call, code, expected) in [
        (c"cuInit", 100, "finds no device"),
        (c"cuInit", 999, "cuInit returned CUDA_ERROR_UNKNOWN (999)"),
        (c"cuDriverGetVersion", 1, "cuDriverGetVersion returned CUDA_ERROR_INVALID_VALUE (1)"),
        (c"cuDeviceGetCount", 100, "cuDeviceGetCount returned CUDA_ERROR_NO_DEVICE (100)"),
    ] {
        library.fail(call, code, 0);
        let error = open_driver(&library).unwrap_err().to_string();
        assert!(error.contains(expected), "{call:?}: {error}");
    }
    for call in [c"cuDeviceGet", c"cuDeviceGetName", c"cuDeviceTotalMem_v2", c"cuDevicePrimaryCtxRetain"] {
        library.fail(call, 46, 0);
        let error = CudaDevice::open(&driver, DeviceId(1)).unwrap_err().to_string();
        let name = call.to_string_lossy().trim_end_matches("_v2").to_owned();
        assert!(error.contains(&format!("device 1: {name} returned an unknown error (46)")), "{error}");
    }
    library.assert_nothing_is_left();
}

#[test]
fn memory_that_the_driver_refuses_is_an_error_of_its_kind() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    for (call, code) in [(c"cuMemAlloc_v2", 2), (c"cuMemAlloc_v2", 700), (c"cuCtxPushCurrent_v2", 201)] {
        library.fail(call, code, 0);
        match device.allocate(4096, 256).unwrap_err() {
            DeviceError::OutOfMemory { asked, .. } => assert_eq!((code, asked), (2, 4096)),
            error => {
                let text = error.to_string();
                assert!(text.contains(&format!("({code})")) && text.contains("context is dead"), "{text}");
            }
        }
    }
    // The last one has killed the context, in which there was nothing.
    library.revive();
    let host = HostBuffer::zeroed(4096);
    library.fail(c"cuMemHostRegister_v2", 2, 0);
    let error = device.register_host(host.region().clone()).unwrap_err();
    assert!(matches!(error, DeviceError::PinLimit { asked: 4096.., .. }), "{error}");
    library.fail(c"cuMemHostRegister_v2", 1, 0);
    let error = device.register_host(host.region().clone()).unwrap_err().to_string();
    assert!(error.contains("cuMemHostRegister returned CUDA_ERROR_INVALID_VALUE"), "{error}");
    library.fail(c"cuStreamCreate", 2, 0);
    let error = device.create_stream("refused").unwrap_err().to_string();
    assert!(error.contains("cuStreamCreate returned CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    drop(device);
    library.assert_nothing_is_left();
}

/// Mutation that makes it undefined behaviour: results are read as `CUresult`.
#[test]
fn a_result_that_the_bindings_do_not_know_is_an_error_with_its_number() {
    const NEWER: i32 = 54_321;
    let Some(library) = TestDriver::new() else { return };
    library.fail(c"cuDriverGetVersion", NEWER, 0);
    let error = open_driver(&library).unwrap_err().to_string();
    assert!(error.contains("cuDriverGetVersion returned an unknown error (54321)"), "{error}");
    let device = open_device(&library);
    library.fail(c"cuMemAlloc_v2", NEWER, 0);
    let error = device.allocate(4096, 256).unwrap_err().to_string();
    assert!(error.contains("cuMemAlloc returned an unknown error (54321)"), "{error}");
    device.allocate(4096, 256).expect("the next call succeeds");
    drop(device);
    library.assert_nothing_is_left();
}

/// What begins like a fatbin: the test driver asks for no more.
const IMAGE: [u8; 12] = [0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 0, 0, 0, 0];

fn fill(address: u64, bytes: u32, byte: u32) -> CudaLaunch {
    let argument = [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &byte.to_le_bytes()].concat();
    CudaLaunch { grid: 3, threads: 256, shared_bytes: 0, argument }
}

#[test]
fn kernels_are_loaded_and_launched_in_the_order_of_their_stream() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(200));
    let device = open_device(&library);
    assert_eq!((device.multiprocessors(), device.compute_capability()), (Ok(4), Ok((9, 0))));
    // SAFETY: the test driver reads four bytes.
    let module = unsafe { device.load_module(&IMAGE) }.expect("an image");
    let error = module.function(c"nobody").unwrap_err().to_string();
    assert!(error.contains("cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND (500)"), "{error}");
    let function = module.function(c"kvbm_test_fill").expect("a kernel");
    drop(module);
    // SAFETY: as above.
    let error = unsafe { device.load_module(b"no image") }.unwrap_err().to_string();
    assert!(error.contains("cuModuleLoadData"), "{error}");

    let opened = device.create_stream("launches").expect("a stream");
    let stream = CudaStream::of(&*opened).expect("it is one");
    let memory = device.allocate(4096, 256).expect("memory");
    let owner: kvbm_device::Owner = Arc::new(());
    for round in 0..20_u8 {
        stream.fill(&memory, 0, 4096, 0).expect("queued");
        let launch = fill(memory.address() + 1000, 1000, u32::from(round));
        // SAFETY: the memory is held by the copy behind the launch.
        unsafe { stream.launch(&function, launch, vec![Arc::clone(&owner)]) }.expect("queued");
        let mut host = HostBuffer::zeroed(4096);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&memory, 0, &host, 0, 4096).expect("fits");
        stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
        let bytes = host.exclusive_bytes().expect("the work is over").to_vec();
        assert!(bytes[1000..2000].iter().all(|byte| *byte == round), "round {round}");
        assert!(
            bytes[..1000].iter().chain(&bytes[2000..]).all(|byte| *byte == 0),
            "round {round}: beside it"
        );
    }
    assert_eq!(Arc::strong_count(&owner), 1, "owners are let go with the launch");

    let elsewhere = open_device(&library);
    let other = elsewhere.create_stream("elsewhere").expect("a stream");
    let other = CudaStream::of(&*other).expect("it is one");
    // SAFETY: it is refused.
    let error = unsafe { other.launch(&function, fill(0, 0, 0), Vec::new()) }.unwrap_err();
    assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
    library.fail(c"cuLaunchKernel", 701, 0);
    // SAFETY: it is refused.
    let refused = unsafe { stream.launch(&function, fill(memory.address(), 1, 1), Vec::new()) };
    let error = refused.expect("queued").wait(soon()).unwrap_err().to_string();
    assert!(error.contains("cuLaunchKernel returned an unknown error (701)"), "{error}");
}

/// A copy of 8 pieces to the device and back.
fn round_trip(device: &CudaDevice, stream: &dyn Stream) -> Result<Vec<Event>, DeviceError> {
    let memory = device.allocate(8 * 512, 256)?;
    let (source, target) = (HostBuffer::from_bytes(&[7; 8 * 512]), HostBuffer::zeroed(8 * 512));
    let (mut into, mut out) =
        (CopyBatch::new(Direction::HostToDevice), CopyBatch::new(Direction::DeviceToHost));
    for piece in 0..8 {
        into.push_host_to_device(&source, piece * 512, &memory, piece * 512, 512)?;
        out.push_device_to_host(&memory, piece * 512, &target, piece * 512, 512)?;
    }
    let first = stream.fill(&memory, 0, 8 * 512, 1)?;
    let second = stream.copy(into).map_err(DeviceError::from)?;
    let third = stream.copy(out).map_err(DeviceError::from)?;
    Ok(vec![first, second, third])
}

/// Every call on the way of an operation, failing at its first, a middle and a late time: the
/// stream stops, says which call it was, every event fails or completes, and nothing is left
/// behind.
#[test]
fn a_call_that_fails_stops_its_stream_and_leaves_nothing_behind() {
    let Some(library) = TestDriver::new() else { return };
    let calls: [&CStr; 8] = [
        c"cuMemsetD8Async",
        c"cuMemcpyBatchAsync",
        c"cuMemcpyHtoDAsync_v2",
        c"cuMemcpyDtoHAsync_v2",
        c"cuEventCreate",
        c"cuEventRecord",
        c"cuEventSynchronize",
        c"cuCtxPushCurrent_v2",
    ];
    for call in calls {
        // An old driver copies one by one.
        library.machine(1, if call.to_bytes().starts_with(b"cuMemcpyHtoD") { 12_040 } else { 12_080 });
        for after in [0, 1, 5] {
            let device = open_device(&library);
            let stream = device.create_stream("failing").expect("a stream");
            library.delay(Duration::from_micros(50));
            library.fail(call, 999, after);
            let queued = round_trip(&device, &*stream);
            // The stream may have stopped before the last operation came to it.
            let stopped = if queued.is_err() { stream.status().err() } else { None };
            let events = queued.unwrap_or_default();
            let results: Vec<_> = events.iter().map(|event| event.wait(soon())).collect();
            let failed = results.iter().find_map(|result| result.as_ref().err()).or(stopped.as_ref());
            if let Some(error) = failed {
                let text = error.to_string();
                assert!(text.contains("CUDA_ERROR_UNKNOWN (999)"), "{call:?} after {after}: {text}");
                assert!(stream.status().is_err(), "{call:?}: a failed operation stops the stream");
                let event = stream.record().expect("events are recorded on a stopped stream");
                assert!(event.wait(soon()).is_err(), "{call:?}: and fail");
            }
            let whole_round_fails = ["Memset", "Batch", "HtoD", "EventCreate", "EventRecord", "Synchronize"];
            let name = call.to_string_lossy();
            if after == 0 && whole_round_fails.iter().any(|part| name.contains(part)) {
                assert!(failed.is_some(), "{call:?}: the failure was not seen: {results:?}");
            }
            // What was not met is not left for the next round.
            library.fail(c"", 0, 0);
            drop((stream, events, device));
            library.assert_nothing_is_left();
            library.revive();
        }
    }
}

/// Mutation that makes it fail: an operation that was issued before an earlier one failed
/// completes.
#[test]
fn operations_behind_a_failed_one_fail_although_they_were_issued_before() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    let stream = device.create_stream("in order").expect("a stream");
    let memory = device.allocate(4096, 256).expect("memory");
    // All three are issued while the device delays the first.
    library.delay(Duration::from_millis(50));
    library.fail(c"cuEventSynchronize", 999, 1);
    let first = stream.fill(&memory, 0, 4096, 1).expect("queued");
    let second = stream.fill(&memory, 0, 4096, 2).expect("queued");
    let third = stream.record().expect("queued");
    first.wait(soon()).expect("it completes before the failure");
    let error = second.wait(soon()).unwrap_err();
    assert!(matches!(error, DeviceError::OperationFailed { .. }), "{error}");
    let error = third.wait(soon()).unwrap_err();
    assert!(matches!(error, DeviceError::Poisoned { .. }), "{error}");
    drop((first, second, third, stream, memory, device));
    library.assert_nothing_is_left();
}

#[test]
fn an_operation_that_fails_on_the_device_kills_the_context_and_says_so() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    let stream = device.create_stream("failing").expect("a stream");
    library.fail_on_device(1);
    let events = round_trip(&device, &*stream).expect("it is queued");
    let errors: Vec<_> = events.iter().filter_map(|event| event.wait(soon()).err()).collect();
    let text = errors.first().expect("the copy fails").to_string();
    assert!(
        text.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)") && text.contains("restart the process"),
        "{text}"
    );
    let error = device.create_stream("another").unwrap_err().to_string();
    assert!(error.contains("context is dead"), "{error}");
}

#[test]
fn streams_wait_for_the_host() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(200));
    let device = open_device(&library);
    let stream = device.create_stream("gated").expect("a stream");
    let memory = device.allocate(4096, 256).expect("memory");
    let (gate, completer) = Event::completable();
    stream.wait(&gate).expect("queued");
    let done = stream.fill(&memory, 0, 4096, 9).expect("queued");
    assert_eq!(done.query(), EventStatus::Pending, "it waits for the host");
    completer.complete(Ok(()));
    done.wait(soon()).expect("the gate is open");

    let (gate, completer) = Event::completable();
    stream.wait(&gate).expect("queued");
    let never = stream.fill(&memory, 0, 4096, 1).expect("queued");
    drop(completer);
    let error = never.wait(soon()).unwrap_err();
    assert!(matches!(error, DeviceError::Poisoned { .. }), "a gate that fails stops the stream: {error}");
    assert!(stream.record().expect("queued").wait(soon()).is_err());
    drop((stream, memory, done, never, device));
    library.assert_nothing_is_left();
}

#[test]
fn engines_and_streams_are_ordered_by_events() {
    const LEN: usize = 256 << 10;
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(500));
    let device = open_device(&library);
    let stream = device.create_stream("offload").expect("a stream");
    let mut engine = Engine::new(&library, LEN);
    // SAFETY: the engine keeps its memory until the end of this test, after all work on it.
    let memory =
        unsafe { device.register_external(engine.memory, LEN as u64) }.expect("memory of the engine");
    for round in 0..20_u8 {
        engine.compute(255, LEN);
        engine.compute(round, LEN);
        let written = if round % 2 == 0 {
            let stream = kvbm_device::CudaStream::of(&*stream).expect("it is one");
            // SAFETY: the engine keeps its event until the end of this test.
            unsafe { stream.wait_engine(engine.event) }.expect("queued");
            None
        } else {
            // SAFETY: the engine keeps its event until the end of this test.
            let written = unsafe { device.engine_event(engine.event) }.expect("queued");
            stream.wait(&written).expect("queued");
            Some(written)
        };
        let mut host = HostBuffer::zeroed(LEN);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&memory, 0, &host, 0, LEN as u64).expect("fits");
        stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
        assert!(
            host.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == round),
            "round {round}: read before it was written"
        );
        if let Some(written) = written {
            written.wait(soon()).expect("what the engine did is done");
        }
    }
    drop((stream, memory));
    engine.end();
    drop(device);
    library.assert_nothing_is_left();
}
