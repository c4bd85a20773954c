//! Ways of copying: many at a time or one by one, over host memory that is registered in parts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CopyEngine, CudaDevice, CudaStream, Device, DeviceError, Direction, Event, HostBuffer,
    PinParts, Stream,
};
use kvbm_test_driver::TestDriver;

use crate::library::{Engine, open_device, open_driver};
use crate::soon;

const PIECES: u64 = 9000;
const PIECE: u64 = 24;

/// Scattered pieces to the device and back by one way of copying; the calls that this took.
fn scattered(library: &TestDriver, device: &CudaDevice, engine: CopyEngine) -> [u32; 3] {
    let calls = || {
        [c"cuMemcpyBatchAsync", c"cuMemcpyHtoDAsync_v2", c"cuMemcpyDtoHAsync_v2"]
            .map(|call| library.calls(call))
    };
    let before = calls();
    let opened = device.create_stream("scattered").expect("a stream");
    let stream = CudaStream::of(&*opened).expect("it is one");
    let memory = device.allocate(PIECES * PIECE, 256).expect("memory");
    let bytes: Vec<u8> = (0..PIECES * PIECE).map(|at| ((at * 31) >> 3) as u8).collect();
    let (source, mut target) = (HostBuffer::from_bytes(&bytes), HostBuffer::zeroed(bytes.len()));
    let (mut into, mut out) =
        (CopyBatch::new(Direction::HostToDevice), CopyBatch::new(Direction::DeviceToHost));
    for piece in 0..PIECES {
        let (from, to) = (piece * PIECE, (PIECES - 1 - piece) * PIECE);
        into.push_host_to_device(&source, from, &memory, to, PIECE).expect("fits");
        out.push_device_to_host(&memory, to, &target, from, PIECE).expect("fits");
    }
    stream.copy_by(into, engine).expect("queued");
    stream.copy_by(out, engine).expect("queued").wait(soon()).expect("the copies complete");
    assert!(target.exclusive_bytes().expect("the work is over") == bytes, "{engine:?}");
    let after = calls();
    std::array::from_fn(|at| after[at] - before[at])
}

#[test]
fn copies_go_many_at_a_time_where_the_driver_takes_that() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(50));
    let device = open_device(&library);
    assert!(device.driver().has_batch_copies());
    let chunks = u32::try_from(2 * PIECES.div_ceil(4096)).expect("few");
    assert_eq!(scattered(&library, &device, CopyEngine::Auto), [chunks, 0, 0]);
    assert_eq!(scattered(&library, &device, CopyEngine::Batch), [chunks, 0, 0]);
    let single = u32::try_from(PIECES).expect("few");
    assert_eq!(scattered(&library, &device, CopyEngine::Single), [0, single, single]);
}

#[test]
fn drivers_without_batches_copy_one_by_one() {
    let single = u32::try_from(PIECES).expect("few");
    for way in ["older", "hidden", "refused"] {
        let Some(library) = TestDriver::new() else { return };
        match way {
            "older" => library.machine(1, 12_040),
            "hidden" => library.hide(c"cuMemcpyBatchAsync"),
            _ => library.fail(c"cuGetProcAddress_v2", 500, 0),
        }
        let device = open_device(&library);
        assert!(!device.driver().has_batch_copies(), "{way}");
        assert_eq!(scattered(&library, &device, CopyEngine::Auto), [0, single, single], "{way}");
        let opened = device.create_stream("refused").expect("a stream");
        let stream = CudaStream::of(&*opened).expect("it is one");
        let refused = stream.copy_by(CopyBatch::new(Direction::HostToDevice), CopyEngine::Batch);
        let error = refused.expect_err("there are no batches").error;
        assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("CUDA 12.8"), "{error}");
        assert_eq!(stream.status(), Ok(()), "what is refused stops nothing");
    }
}

#[test]
fn host_memory_is_registered_in_parts_and_copied_across_them() {
    const PART: u64 = 64 << 10;
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    let bytes: Vec<_> = (0..9 * PART / 2).map(|at| ((at * 7) >> 5) as u8).collect();
    let host = HostBuffer::from_bytes(&bytes);
    let (calls, most) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = |done: u64, total: u64| {
        assert!(done <= total && total == 9 * PART / 2, "{done} of {total}");
        calls.fetch_add(1, Ordering::Relaxed);
        most.fetch_max(done, Ordering::Relaxed);
    };
    let parts = PinParts { bytes: PART, threads: 3 };
    let pinned = device.register_host_in_parts(host.region().clone(), parts, &progress).expect("registered");
    assert_eq!((calls.into_inner(), most.into_inner()), (5, 9 * PART / 2));
    let again = device.register_host_in_parts(host.region().clone(), parts, &|_, _| {});
    assert!(matches!(again, Err(DeviceError::AlreadyPinned { .. })), "{again:?}");
    let memory = device.allocate(host.len(), 256).expect("memory");
    for engine in [CopyEngine::Auto, CopyEngine::Single] {
        let opened = device.create_stream("across").expect("a stream");
        let stream = CudaStream::of(&*opened).expect("it is one");
        let (mut into, mut out) =
            (CopyBatch::new(Direction::HostToDevice), CopyBatch::new(Direction::DeviceToHost));
        // Over all parts, up to a seam, from a seam on, around one.
        for (at, len) in [(0, PART), (PART, PART + 1), (2 * PART + 1, 2 * PART), (4 * PART + 1, PART / 2 - 1)]
        {
            into.push_host_to_device(pinned.region(), at, &memory, at, len).expect("fits");
        }
        let mut back = HostBuffer::zeroed(host.len() as usize);
        out.push_device_to_host(&memory, 0, &back, 0, host.len()).expect("fits");
        stream.copy_by(into, engine).expect("queued");
        stream.copy_by(out, engine).expect("queued").wait(soon()).expect("the copies complete");
        assert!(back.exclusive_bytes().expect("the work is over") == bytes, "{engine:?}");
    }
    drop((pinned, memory));
    // A part that is refused leaves none of the others behind.
    library.fail(c"cuMemHostRegister_v2", 2, 3);
    let refused = device.register_host_in_parts(host.region().clone(), parts, &|_, _| {});
    assert!(matches!(refused, Err(DeviceError::PinLimit { .. })), "{refused:?}");
    assert!(device.register_host(host.region().clone()).is_ok(), "all of it is free again");
    drop(device);
    library.assert_nothing_is_left();
}

#[test]
fn the_device_measures_the_time_between_marks() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    let opened = device.create_stream("timed").expect("a stream");
    let stream = CudaStream::of(&*opened).expect("it is one");
    let memory = device.allocate(1 << 20, 256).expect("memory");
    let start = stream.mark().expect("queued");
    for _ in 0..8 {
        stream.fill(&memory, 0, 1 << 20, 3).expect("queued");
    }
    let end = stream.mark().expect("queued");
    let forth = end.since(&start, soon()).expect("measured");
    assert!(forth > Duration::ZERO, "{forth:?}");
    assert_eq!(start.since(&end, soon()), Ok(Duration::ZERO), "nothing takes less than no time");
    drop((start, end, opened, memory, device));
    library.assert_nothing_is_left();
}

#[test]
fn what_is_measured_once_stays_with_the_device() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    assert_eq!(device.measured::<u32, &str>(|| Err("not yet")), Err("not yet"));
    assert_eq!(device.measured::<u32, ()>(|| Ok(7)).as_deref(), Ok(&7));
    assert_eq!(device.clone().measured::<u32, ()>(|| unreachable!("it is known")).as_deref(), Ok(&7));
    assert_eq!(device.measured::<u64, ()>(|| Ok(8)).as_deref(), Ok(&8), "another type, another measurement");
}

#[test]
fn an_engine_s_stream_waits_for_ours() {
    const LEN: usize = 64 << 10;
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(300));
    let device = open_device(&library);
    let stream = device.create_stream("onboard").expect("a stream");
    let mut engine = Engine::new(&library, LEN);
    // SAFETY: the engine keeps its memory until the end of this test, after all work on it.
    let memory =
        unsafe { device.register_external(engine.memory, LEN as u64) }.expect("memory of the engine");
    for round in 0..20_u8 {
        // What arrives must not overwrite what the engine computes behind it.
        let written = stream.fill(&memory, 0, LEN as u64, 200).expect("queued");
        // SAFETY: the engine keeps its stream until the end of this test.
        unsafe { device.let_engine_wait(engine.stream(), &written, soon()) }.expect("the engine waits");
        engine.compute(round, LEN);
        // SAFETY: the engine keeps its event until the end of this test.
        let computed = unsafe { device.engine_event(engine.event) }.expect("queued");
        computed.wait(soon()).expect("computed");
        let mut host = HostBuffer::zeroed(LEN);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&memory, 0, &host, 0, LEN as u64).expect("fits");
        stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
        assert!(
            host.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == round),
            "round {round}: the engine did not wait"
        );
    }
    let (foreign, completer) = Event::completable();
    // SAFETY: it is refused before the stream is used.
    let error = unsafe { device.let_engine_wait(engine.stream(), &foreign, soon()) }.unwrap_err();
    assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
    // Our stream waits for something that has not come: who calls for the engine does not.
    stream.wait(&foreign).expect("queued");
    let later = stream.record().expect("queued");
    // SAFETY: the engine keeps its stream until the end of this test.
    let error = unsafe { device.let_engine_wait(engine.stream(), &later, Instant::now()) }.unwrap_err();
    assert!(matches!(error, DeviceError::Deadline { .. }), "{error}");
    completer.complete(Ok(()));
    // SAFETY: as before.
    unsafe { device.let_engine_wait(engine.stream(), &later, soon()) }.expect("it has come");
    drop((stream, memory, later));
    engine.end();
    drop(device);
    library.assert_nothing_is_left();
}

#[test]
fn a_test_driver_is_named_by_a_variable_and_never_replaced_by_another() {
    let Some(library) = TestDriver::new() else { return };
    let variable = kvbm_device::CudaDriver::LIBRARY_VARIABLE;
    for (value, expected) in [
        (library.path().to_str().expect("plain"), "found 2 devices"),
        ("/no/such/libcuda.so.1", "/no/such/libcuda.so.1"),
        ("", "KVBM_CUDA_DRIVER is empty"),
    ] {
        let program = std::env::current_exe().expect("this test");
        let output = std::process::Command::new(program)
            .args(["--exact", "copies::the_driver_of_the_environment", "--nocapture"])
            .env(variable, value)
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(expected), "{value}: {text}");
    }
    assert!(open_driver(&library).is_ok());
}

/// Run by the test above, each time in a process of its own; on its own it tells of this machine.
#[test]
fn the_driver_of_the_environment() {
    let found = kvbm_device::CudaDriver::open();
    match &found {
        Ok(driver) => println!("found {} devices", driver.devices()),
        Err(error) => println!("{error}"),
    }
    assert!(found.is_err() || found.is_ok_and(|driver| driver.devices() > 0), "a driver has a device");
}
