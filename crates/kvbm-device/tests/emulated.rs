//! What only the emulated device does: memory out of the CPU's reach, modelled time, kernels,
//! bounded queues.
#![cfg(not(miri))] // memfd and mmap of shared memory do not exist there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CopyObserver, Device, DeviceError, DeviceId, DeviceMemory, Direction, EmulatedConfig,
    EmulatedDevice, EmulatedStream, Event, EventStatus, Fault, FaultRule, HostBuffer, ManualClock, ModelPath,
    RandomDelays, RowAxis, RowGrid, TransferModel,
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn device(config: EmulatedConfig) -> EmulatedDevice {
    EmulatedDevice::new(EmulatedConfig { memory_bytes: 64 << 20, ..config }).expect("address space")
}

fn h2d(host: &HostBuffer, memory: &DeviceMemory) -> CopyBatch {
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    batch.push_host_to_device(host, 0, memory, 0, memory.len()).expect("fits");
    batch
}

fn d2h(memory: &DeviceMemory, host: &HostBuffer) -> CopyBatch {
    let mut batch = CopyBatch::new(Direction::DeviceToHost);
    batch.push_device_to_host(memory, 0, host, 0, memory.len()).expect("fits");
    batch
}

#[test]
fn cpu_cannot_touch_device_memory() {
    use std::os::fd::AsRawFd;
    let device = device(EmulatedConfig::default());
    let memory = device.allocate(4096, 256).expect("memory");
    let stream = device.create_stream("s").expect("stream");
    stream.fill(&memory, 0, 4096, 7).expect("fill").wait(soon()).expect("fill");
    let sink = tempfile::tempfile().expect("a file");
    // SAFETY: the kernel reads the buffer for us and reports a fault as an error instead of a
    // signal.
    let written = unsafe { libc::write(sink.as_raw_fd(), memory.address() as *const libc::c_void, 1) };
    let error = std::io::Error::last_os_error();
    assert_eq!((written, error.raw_os_error()), (-1, Some(libc::EFAULT)));
}

/// One block of the tiering article: 16 tokens x 2 x 80 layers x 8 heads x 128 x 2 bytes.
const BLOCK: u64 = 5_242_880;

fn reference() -> (EmulatedDevice, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let config = EmulatedConfig {
        model: TransferModel::reference(),
        clock: Arc::clone(&clock) as Arc<dyn kvbm_device::Clock>,
        ..EmulatedConfig::default()
    };
    (device(config), clock)
}

fn now(clock: &ManualClock) -> f64 {
    kvbm_device::Clock::now(clock).as_secs_f64() * 1e6
}

#[test]
fn streams_take_the_time_of_the_model() {
    let (device, clock) = reference();
    let memory = device.allocate(BLOCK, 256).expect("memory");
    let host = HostBuffer::zeroed(BLOCK as usize);
    let stream = device.create_stream("s").expect("stream");
    stream.copy(h2d(&host, &memory)).expect("queued").wait(soon()).expect("complete");
    let onboard = now(&clock);
    assert!((onboard / 187.0 - 1.0).abs() < 0.05, "host to device took {onboard} us");
    stream.copy(d2h(&memory, &host)).expect("queued").wait(soon()).expect("complete");
    let offload = now(&clock) - onboard;
    assert!((offload / 187.0 - 1.0).abs() < 0.05, "device to host took {offload} us");
    let before = now(&clock);
    device.links().pass(ModelPath::DiskRead, BLOCK);
    stream.copy(h2d(&host, &memory)).expect("queued").wait(soon()).expect("complete");
    let restore = now(&clock) - before;
    assert!((restore / 936.0 - 1.0).abs() < 0.05, "disk to host to device took {restore} us");
}

#[test]
fn many_small_pieces_take_as_long_as_one_large() {
    let (device, clock) = reference();
    let memory = device.allocate(BLOCK, 256).expect("memory");
    let host = HostBuffer::zeroed(BLOCK as usize);
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    for piece in 0..1280 {
        batch.push_host_to_device(&host, piece * 4096, &memory, piece * 4096, 4096).expect("fits");
    }
    assert_eq!(batch.bytes(), BLOCK);
    let stream = device.create_stream("s").expect("stream");
    stream.copy(batch).expect("queued").wait(soon()).expect("complete");
    assert!((now(&clock) / 187.0 - 1.0).abs() < 0.05, "{} us", now(&clock));
}

#[test]
fn concurrent_copies_share_the_link() {
    let (device, clock) = reference();
    let streams = [device.create_stream("a").expect("stream"), device.create_stream("b").expect("stream")];
    let mut done = Vec::new();
    for stream in &streams {
        let memory = device.allocate(BLOCK, 256).expect("memory");
        done.push(stream.copy(h2d(&HostBuffer::zeroed(BLOCK as usize), &memory)).expect("queued"));
    }
    for event in done {
        event.wait(soon()).expect("complete");
    }
    let together = now(&clock);
    assert!(together >= 2.0 * 187.0 * 0.99, "two copies through one link took {together} us");
}

/// Parts of pieces, in the order in which they were shown.
type Parts = Vec<(usize, Vec<u8>)>;

#[derive(Default)]
struct Seen(Arc<std::sync::Mutex<Parts>>);

impl CopyObserver for Seen {
    fn passed(&mut self, piece: usize, bytes: &[u8]) {
        self.0.lock().expect("not poisoned").push((piece, bytes.to_vec()));
    }
}

#[test]
fn an_observer_sees_every_byte_of_the_source_in_order_or_nothing() {
    let delays = RandomDelays { seed: 3, max: Duration::from_micros(10) };
    for (random_delays, shown) in [(None, true), (Some(delays), false)] {
        let device = device(EmulatedConfig { random_delays, ..EmulatedConfig::default() });
        let memory = device.allocate(300_000, 256).expect("memory");
        let bytes: Vec<u8> = (0..300_000_u32).map(|index| (index % 251) as u8).collect();
        let host = HostBuffer::from_bytes(&bytes);
        let stream = device.create_stream("s").expect("stream");
        stream.copy(h2d(&host, &memory)).expect("queued").wait(soon()).expect("complete");
        let mut target = HostBuffer::zeroed(300_000);
        let seen = Seen::default();
        let kept = Arc::clone(&seen.0);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        for (start, len) in [(100_000, 200_000), (0, 100_000)] {
            batch.push_device_to_host(&memory, start, &target, start, len).expect("fits");
        }
        batch.observe(Box::new(seen));
        stream.copy(batch).expect("queued").wait(soon()).expect("complete");
        assert_eq!(target.exclusive_bytes().expect("the work is over").to_vec(), bytes);
        let parts = kept.lock().expect("not poisoned");
        assert_eq!(Arc::strong_count(&kept), 1, "the observer is gone before the event completes");
        let of =
            |piece| parts.iter().filter(|part| part.0 == piece).flat_map(|part| part.1.clone()).collect();
        let pieces: [Vec<u8>; 2] = [of(0), of(1)];
        let expected: [&[u8]; 2] = if shown { [&bytes[100_000..], &bytes[..100_000]] } else { [&[], &[]] };
        assert!(pieces == expected && parts.is_sorted_by_key(|part| part.0), "{random_delays:?}");
    }
}

/// Heads and tokens, of rows of 256 bytes, in the order of one side and of the other.
fn transposed(heads: u64, tokens: u64) -> [RowGrid; 2] {
    const ROW: u64 = 256;
    let axis = |count, src_stride, dst_stride| RowAxis { count, src_stride, dst_stride };
    let head = axis(heads, ROW, tokens * ROW);
    let token = axis(tokens, heads * ROW, ROW);
    let back = |RowAxis { count, src_stride, dst_stride }| axis(count, dst_stride, src_stride);
    [RowGrid { len: ROW, axes: [head, token] }, RowGrid { len: ROW, axes: [back(token), back(head)] }]
}

#[test]
fn grids_are_copied_both_ways_and_shown_row_by_row() {
    let delays = RandomDelays { seed: 5, max: Duration::from_micros(10) };
    // Below and above the size from which stores go past the caches.
    for (heads, random_delays) in [(3, None), (64, None), (64, Some(delays))] {
        let [grid, back] = transposed(heads, 16);
        let bytes = grid.bytes().expect("a grid");
        let content: Vec<u8> = (0..bytes).map(|index| (index * 7 + index / 256) as u8).collect();
        let row = |head: u64, token: u64| &content[((token * heads + head) * 256) as usize..][..256];
        let device = device(EmulatedConfig { random_delays, ..EmulatedConfig::default() });
        let memory = device.allocate(bytes, 256).expect("memory");
        let stream = device.create_stream("s").expect("stream");
        let (host, mut target) = (HostBuffer::from_bytes(&content), HostBuffer::zeroed(bytes as usize));
        let seen = Seen::default();
        let kept = Arc::clone(&seen.0);
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        batch.push_rows_to_device(&host, 0, &memory, 0, grid).expect("fits");
        assert_eq!((batch.len() as u64, batch.bytes()), (heads * 16, bytes));
        batch.observe(Box::new(seen));
        stream.copy(batch).expect("queued").wait(soon()).expect("complete");
        stream.copy(d2h(&memory, &target)).expect("queued").wait(soon()).expect("complete");
        let expected: Vec<u8> =
            (0..heads).flat_map(|head| (0..16).flat_map(move |token| row(head, token))).copied().collect();
        assert!(target.exclusive_bytes().expect("the work is over") == expected, "{heads} heads");
        let shown: Vec<u8> =
            kept.lock().expect("not poisoned").iter().flat_map(|part| part.1.clone()).collect();
        assert!(random_delays.is_some() || shown == expected, "rows are shown in the order of the grid");
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_rows_to_host(&memory, 0, &target, 0, back).expect("fits");
        stream.copy(batch).expect("queued").wait(soon()).expect("complete");
        assert!(target.exclusive_bytes().expect("the work is over") == content, "{heads} heads");
    }
}

#[test]
fn grids_that_do_not_fit_or_overlap_are_refused() {
    let device = device(EmulatedConfig::default());
    let (host, memory) = (HostBuffer::zeroed(4096), device.allocate(4096, 256).expect("memory"));
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    let rows = |len, count, src_stride, dst_stride| RowGrid {
        len,
        axes: [RowAxis::NONE, RowAxis { count, src_stride, dst_stride }],
    };
    let mut push = |grid| batch.push_rows_to_device(&host, 0, &memory, 0, grid);
    for (what, grid) in [
        ("source", rows(256, 17, 256, 0)),
        ("destination", rows(256, 9, 256, 512)),
        ("anything", rows(1, u64::MAX, u64::MAX, 1)),
    ] {
        assert!(matches!(push(grid), Err(DeviceError::OutOfRange { .. })), "beyond the {what}");
    }
    let overlap = push(rows(256, 4, 256, 255));
    assert!(
        matches!(overlap, Err(DeviceError::Invalid { what: "dst_stride", value: 255, .. })),
        "{overlap:?}"
    );
    assert_eq!((push(rows(256, 0, 256, 256)), push(rows(0, 7, 1, 1))), (Ok(()), Ok(())));
    assert!(batch.is_empty(), "nothing was added");
}

#[test]
fn half_of_a_grid_is_copied_where_that_is_the_fault() {
    let device = device(EmulatedConfig::default());
    let [grid, _] = transposed(4, 16);
    let bytes = grid.bytes().expect("a grid");
    let memory = device.allocate(bytes, 256).expect("memory");
    let host = HostBuffer::from_bytes(&vec![7; bytes as usize]);
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    batch.push_rows_to_device(&host, 0, &memory, 0, grid).expect("fits");
    device.faults().inject(FaultRule::next(Fault::FailHalfway));
    let stream = device.create_stream("s").expect("stream");
    let error = stream.copy(batch).expect("queued").wait(soon()).expect_err("it fails");
    assert!(matches!(error, DeviceError::OperationFailed { .. }), "{error}");
    let mut target = HostBuffer::zeroed(bytes as usize);
    let stream = device.create_stream("t").expect("stream");
    stream.copy(d2h(&memory, &target)).expect("queued").wait(soon()).expect("complete");
    let target = target.exclusive_bytes().expect("the work is over");
    let (copied, rest) = target.split_at(bytes as usize / 2);
    assert!(copied.iter().all(|byte| *byte == 7) && rest.iter().all(|byte| *byte == 0));
}

#[test]
fn streams_really_take_at_least_the_time_of_the_model() {
    let device = device(EmulatedConfig { model: TransferModel::reference(), ..EmulatedConfig::default() });
    let memory = device.allocate(BLOCK, 256).expect("memory");
    let host = HostBuffer::zeroed(BLOCK as usize);
    let stream = device.create_stream("s").expect("stream");
    let start = Instant::now();
    stream.copy(h2d(&host, &memory)).expect("queued").wait(soon()).expect("complete");
    assert!(start.elapsed() >= Duration::from_micros(187));
}

#[test]
fn full_queue_gives_the_batch_back() {
    let device = device(EmulatedConfig { queue_limit: 2, ..EmulatedConfig::default() });
    let stream = device.create_stream("short").expect("stream");
    let memory = device.allocate(4096, 256).expect("memory");
    let host = HostBuffer::zeroed(4096);
    let (gate, open) = Event::completable();
    stream.wait(&gate).expect("queued");
    // The thread stands at the gate or is about to: at most two more fit behind it.
    let rejected = (0..4).find_map(|_| stream.copy(h2d(&host, &memory)).err()).expect("the queue is bounded");
    assert!(matches!(rejected.error, DeviceError::QueueFull { limit: 2, .. }), "{}", rejected.error);
    assert_eq!(rejected.batch.bytes(), 4096);
    open.complete(Ok(()));
    let deadline = soon();
    let mut batch = rejected.batch;
    let done = loop {
        match stream.copy(batch) {
            Ok(done) => break done,
            Err(again) => batch = again.batch,
        }
        assert!(Instant::now() < deadline, "the queue drains");
        std::thread::yield_now();
    };
    assert_eq!(done.wait(soon()), Ok(()));
}

#[test]
fn a_stream_waits_for_an_event_of_the_host() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("gated").expect("stream");
    let memory = device.allocate(4096, 256).expect("memory");
    let host = HostBuffer::zeroed(4096);
    let (gate, open) = Event::completable();
    stream.wait(&gate).expect("queued");
    let done = stream.copy(h2d(&host, &memory)).expect("queued");
    let (other, elsewhere) = (device.create_stream("other").expect("stream"), device.allocate(4096, 256));
    let elsewhere = elsewhere.expect("memory");
    for _ in 0..200 {
        other.fill(&elsewhere, 0, 4096, 1).expect("queued").wait(soon()).expect("other streams go on");
    }
    assert_eq!(done.query(), EventStatus::Pending);
    // SAFETY: the test alone touches these bytes now.
    unsafe { host.fill(0, 4096, 9) }.expect("inside");
    open.complete(Ok(()));
    let mut back = HostBuffer::zeroed(4096);
    stream.copy(d2h(&memory, &back)).expect("queued").wait(soon()).expect("complete");
    assert!(
        back.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == 9),
        "the copy ran before its gate"
    );
}

#[test]
fn a_failed_event_stops_who_waits_for_it() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("gated").expect("stream");
    let memory = device.allocate(4096, 256).expect("memory");
    let (gate, open) = Event::completable();
    stream.wait(&gate).expect("queued");
    let done = stream.fill(&memory, 0, 4096, 1).expect("queued");
    drop(open);
    let error = done.wait(soon()).expect_err("nothing runs behind a failed event");
    assert!(
        matches!(&error, DeviceError::Poisoned { cause, .. } if matches!(**cause, DeviceError::Abandoned { .. }))
    );
    assert!(stream.record().expect("queued").wait(soon()).is_err(), "a marker tells the failure too");
    assert!(matches!(stream.wait(&Event::complete()), Err(DeviceError::Poisoned { .. })));
}

#[test]
fn kernels_run_in_order_over_checked_memory() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("compute").expect("stream");
    let compute = EmulatedStream::of(&*stream).expect("an emulated stream");
    let (a, b) = (device.allocate(4096, 256).expect("memory"), device.allocate(4096, 256).expect("memory"));
    stream.fill(&a, 0, 4096, 20).expect("queued");
    let (from, to) = (a.address(), b.address());
    let owners: Vec<kvbm_device::Owner> = vec![Arc::new((a.clone(), b.clone()))];
    compute
        .launch("double", owners, move |memory| {
            let mut bytes = [0; 4096];
            memory.read(from, &mut bytes)?;
            memory.write(to, &bytes.map(|byte| byte * 2))?;
            memory.copy(to, from, 2048)
        })
        .expect("queued");
    let mut back = HostBuffer::zeroed(4096);
    stream.copy(d2h(&a, &back)).expect("queued").wait(soon()).expect("complete");
    let expected: Vec<u8> = [[40; 2048], [20; 2048]].concat();
    assert_eq!(back.exclusive_bytes().expect("the work is over").to_vec(), expected);

    let beyond = compute.launch("beyond", Vec::new(), move |memory| memory.write(to + 4090, &[0; 7]));
    let error = beyond.expect("queued").wait(soon()).expect_err("the write leaves its allocation");
    assert!(matches!(error, DeviceError::UnknownMemory { .. }), "{error}");
    assert!(matches!(stream.status(), Err(DeviceError::Poisoned { .. })));
}

#[test]
fn a_panicking_kernel_is_a_failed_operation() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("compute").expect("stream");
    let compute = EmulatedStream::of(&*stream).expect("an emulated stream");
    let done = compute.launch("bug", Vec::new(), |_| panic!("a bug in a kernel")).expect("queued");
    let error = done.wait(soon()).expect_err("it failed");
    assert!(
        matches!(&error, DeviceError::OperationFailed { operation, .. } if operation == "kernel bug"),
        "{error}"
    );
}

#[test]
fn a_stream_may_have_any_name() {
    let device = device(EmulatedConfig::default());
    let memory = device.allocate(16, 256).expect("memory");
    for name in ["", "a\0b", "a name of a stream that is longer than the system lets the name of a thread be"]
    {
        let stream = device.create_stream(name).expect("stream");
        assert_eq!(stream.name(), name);
        stream.fill(&memory, 0, 16, 1).expect("queued").wait(soon()).expect("complete");
    }
}

#[test]
fn memory_of_another_device_is_refused() {
    let one = device(EmulatedConfig::default());
    let two = device(EmulatedConfig { id: DeviceId(1), ..EmulatedConfig::default() });
    let stream = one.create_stream("s").expect("stream");
    let memory = two.allocate(4096, 256).expect("memory");
    let host = HostBuffer::zeroed(4096);
    let rejected = stream.copy(h2d(&host, &memory)).expect_err("another device");
    assert_eq!(rejected.error, DeviceError::WrongDevice { expected: DeviceId(0), found: DeviceId(1) });
    // SAFETY: refused; nothing is done with it.
    let external = unsafe { one.register_external(memory.address(), 4096) };
    assert!(matches!(external, Err(DeviceError::UnknownMemory { .. })), "{external:?}");
    let mut batch = CopyBatch::new(Direction::DeviceToDevice);
    let here = one.allocate(4096, 256).expect("memory");
    let mixed = batch.push_device_to_device(&memory, 0, &here, 0, 16);
    assert!(matches!(mixed, Err(DeviceError::WrongDevice { .. })), "{mixed:?}");
}

#[test]
fn engine_memory_freed_too_early_is_an_error_not_a_wrong_byte() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("s").expect("stream");
    let engine = device.allocate(8192, 256).expect("memory");
    let address = engine.address();
    // SAFETY: broken below on purpose; the emulated device looks every range up again before it
    // touches it.
    let ours = unsafe { device.register_external(address, 8192) }.expect("registered");
    drop(engine);
    let error = stream.fill(&ours, 0, 16, 1).expect("queued").wait(soon()).expect_err("freed");
    assert!(matches!(error, DeviceError::UnknownMemory { address: told, .. } if told == address), "{error}");
}

#[test]
fn threads_end_with_their_streams() {
    let device = device(EmulatedConfig::default());
    let streams: Vec<_> = (0..4).map(|_| device.create_stream("s").expect("stream")).collect();
    assert_eq!(device.streams_alive(), 4);
    drop(streams);
    let deadline = soon();
    while device.streams_alive() > 0 {
        assert!(Instant::now() < deadline, "a stream without handles ends");
        std::thread::yield_now();
    }
}

#[test]
fn handles_outlive_the_device() {
    let device = device(EmulatedConfig::default());
    let stream = device.create_stream("s").expect("stream");
    let memory = device.allocate(4096, 256).expect("memory");
    drop(device);
    stream.fill(&memory, 0, 4096, 3).expect("queued");
    let mut back = HostBuffer::zeroed(4096);
    stream.copy(d2h(&memory, &back)).expect("queued").wait(soon()).expect("complete");
    assert!(back.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == 3));
}

#[test]
fn bad_configurations_name_the_field() {
    let no_memory = EmulatedDevice::new(EmulatedConfig { memory_bytes: 0, ..EmulatedConfig::default() });
    assert!(matches!(no_memory, Err(DeviceError::Invalid { what: "memory_bytes", .. })));
    let no_queue = EmulatedDevice::new(EmulatedConfig { queue_limit: 0, ..EmulatedConfig::default() });
    assert!(matches!(no_queue, Err(DeviceError::Invalid { what: "queue_limit", .. })));
    let too_much =
        EmulatedDevice::new(EmulatedConfig { memory_bytes: u64::MAX, ..EmulatedConfig::default() });
    assert!(matches!(too_much, Err(DeviceError::Invalid { .. } | DeviceError::Os { .. })), "{too_much:?}");
}
