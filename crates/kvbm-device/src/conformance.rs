//! What every [`Device`] must do, as checks that any implementation can run.
//!
//! ```
//! use std::sync::Arc;
//! use kvbm_device::{conformance, EmulatedConfig, EmulatedDevice};
//!
//! conformance::run(&|| Arc::new(EmulatedDevice::new(EmulatedConfig::default()).expect("address space")));
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{
    CopyBatch, Device, DeviceError, DeviceMemory, Direction, Event, EventStatus, HostBuffer, Owner, Stream,
};

/// One check. It panics with the reason if the device does not conform.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// What is checked.
    pub name: &'static str,
    /// The check, on a fresh device.
    pub run: fn(&Arc<dyn Device>),
}

/// All checks. Each needs a device with at least 16 MiB of free memory.
pub const CHECKS: &[Check] = &[
    Check { name: "allocation", run: allocation },
    Check { name: "out of memory", run: out_of_memory },
    Check { name: "bad ranges", run: bad_ranges },
    Check { name: "scattered copies", run: scattered_copies },
    Check { name: "order in a stream", run: order_in_a_stream },
    Check { name: "order across streams", run: order_across_streams },
    Check { name: "events", run: events },
    Check { name: "many threads, many streams", run: many_threads },
    Check { name: "engine-owned memory", run: engine_owned_memory },
    Check { name: "pinned host memory", run: pinned_host_memory },
    Check { name: "drop with work in flight", run: drop_with_work_in_flight },
];

/// Runs all checks, each on a device of its own.
///
/// # Panics
/// If a check fails.
pub fn run(make: &dyn Fn() -> Arc<dyn Device>) {
    for check in CHECKS {
        (check.run)(&make());
    }
}

/// Nothing here takes long; a device that hangs fails instead of hanging the test.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn stream(device: &Arc<dyn Device>, name: &str) -> Arc<dyn Stream> {
    device.create_stream(name).expect("a stream can be created")
}

fn memory(device: &Arc<dyn Device>, len: u64) -> DeviceMemory {
    device.allocate(len, 256).expect("memory can be allocated")
}

fn submit(stream: &dyn Stream, mut batch: CopyBatch) -> Event {
    let deadline = soon();
    loop {
        match stream.copy(batch) {
            Ok(event) => return event,
            Err(rejected) => {
                assert!(matches!(rejected.error, DeviceError::QueueFull { .. }), "{}", rejected.error);
                assert!(Instant::now() < deadline, "a full queue must drain");
                batch = rejected.batch;
                std::thread::yield_now();
            }
        }
    }
}

fn upload(stream: &dyn Stream, memory: &DeviceMemory, bytes: &[u8]) -> Event {
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    let host = HostBuffer::from_bytes(bytes);
    batch.push_host_to_device(&host, 0, memory, 0, bytes.len() as u64).expect("the range fits");
    submit(stream, batch)
}

fn download(stream: &dyn Stream, memory: &DeviceMemory) -> (HostBuffer, Event) {
    let host = HostBuffer::zeroed(memory.len() as usize);
    let mut batch = CopyBatch::new(Direction::DeviceToHost);
    batch.push_device_to_host(memory, 0, &host, 0, memory.len()).expect("the range fits");
    let done = submit(stream, batch);
    (host, done)
}

fn read_all(stream: &dyn Stream, memory: &DeviceMemory) -> Vec<u8> {
    let (mut host, done) = download(stream, memory);
    done.wait(soon()).expect("the copy completes");
    host.exclusive_bytes().expect("the work is over").to_vec()
}

/// Bytes that depend on a seed and on their position.
fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn allocation(device: &Arc<dyn Device>) {
    let info = device.info();
    assert_eq!(info.id, device.id());
    assert!(!info.name.is_empty() && info.granularity_bytes.is_power_of_two());
    assert!(info.free_bytes <= info.total_bytes);
    for alignment in [1, 256, 4096, 1 << 20] {
        let held: Vec<_> = [1, 255, 4097, 100_000].map(|len| device.allocate(len, alignment)).into();
        let held: Vec<_> = held.into_iter().map(|memory| memory.expect("memory can be allocated")).collect();
        let mut ends: Vec<_> = held.iter().map(|memory| (memory.address(), memory.len())).collect();
        assert!(ends.iter().all(|(address, _)| address.is_multiple_of(alignment)), "alignment {alignment}");
        ends.sort_unstable();
        assert!(
            ends.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
            "allocations overlap: {ends:x?}"
        );
    }
    assert_eq!(device.info().free_bytes, info.free_bytes, "dropped memory is free again");
    for (len, alignment) in [(0, 256), (4096, 0), (4096, 3)] {
        let refused = device.allocate(len, alignment);
        assert!(matches!(refused, Err(DeviceError::Invalid { .. })), "{len} bytes aligned to {alignment}");
    }
}

fn out_of_memory(device: &Arc<dyn Device>) {
    for asked in [device.info().total_bytes + 1, u64::MAX] {
        match device.allocate(asked, 256) {
            Err(DeviceError::OutOfMemory { asked: reported, free, total, .. }) => {
                assert!(
                    reported >= asked && free <= total,
                    "the error names what was asked and what is free"
                );
            }
            other => panic!("allocating {asked} bytes gave {other:?}"),
        }
    }
    assert!(device.allocate(4096, 256).is_ok(), "a refused allocation changes nothing");
}

fn bad_ranges(device: &Arc<dyn Device>) {
    let on_device = memory(device, 4096);
    let host = HostBuffer::zeroed(4096);
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    for (host_offset, device_offset, len) in [(1, 0, 4096), (0, 1, 4096), (u64::MAX, 0, 2), (0, u64::MAX, 2)]
    {
        let refused = batch.push_host_to_device(&host, host_offset, &on_device, device_offset, len);
        assert!(matches!(refused, Err(DeviceError::OutOfRange { .. })), "{refused:?}");
    }
    let wrong_way = batch.push_device_to_host(&on_device, 0, &host, 0, 16);
    assert!(matches!(wrong_way, Err(DeviceError::WrongDirection { .. })), "{wrong_way:?}");
    assert!(batch.is_empty(), "refused pieces leave no trace");
    let stream = stream(device, "ranges");
    let refused = stream.fill(&on_device, 4000, 97, 0);
    assert!(matches!(refused, Err(DeviceError::OutOfRange { .. })), "{refused:?}");
    let empty = submit(&*stream, batch);
    empty.wait(soon()).expect("an empty batch completes");
}

/// Host -> device -> device -> host with pieces of odd sizes at odd places, against the same copies
/// done by the host.
fn scattered_copies(device: &Arc<dyn Device>) {
    const LEN: u64 = 1 << 18;
    let stream = stream(device, "scattered");
    let bytes = pattern(1, LEN);
    let source = HostBuffer::from_bytes(&bytes);
    let (first, second, mut back) =
        (memory(device, LEN), memory(device, LEN), HostBuffer::zeroed(LEN as usize));
    stream.fill(&first, 0, LEN, 0xa5).expect("fill");
    stream.fill(&second, 0, LEN, 0x5a).expect("fill");
    let (mut one, mut two, mut three) =
        (vec![0xa5; LEN as usize], vec![0x5a; LEN as usize], vec![0; LEN as usize]);
    let mut into = CopyBatch::new(Direction::HostToDevice);
    let mut within = CopyBatch::new(Direction::DeviceToDevice);
    let mut out = CopyBatch::new(Direction::DeviceToHost);
    // Piece i goes to slot 7 i mod 61 of 61 slots, so order is scrambled and nothing overlaps.
    let slot = LEN / 61;
    for index in 0..61_u64 {
        let (from, to) = (index * slot, (index * 7 % 61) * slot);
        let len = 1 + index * 67 % slot;
        let cut = |at: u64| at as usize..(at + len) as usize;
        into.push_host_to_device(&source, from, &first, to, len).expect("fits");
        one[cut(to)].copy_from_slice(&bytes[cut(from)]);
        within.push_device_to_device(&first, to, &second, from + slot - len, len).expect("fits");
        out.push_device_to_host(&second, from, &back, to, slot).expect("fits");
    }
    for index in 0..61_u64 {
        let (from, to) = (index * slot, (index * 7 % 61) * slot);
        let len = 1 + index * 67 % slot;
        let target = from + slot - len;
        two[target as usize..(target + len) as usize].copy_from_slice(&one[to as usize..(to + len) as usize]);
    }
    for index in 0..61_u64 {
        let (from, to) = ((index * slot) as usize, ((index * 7 % 61) * slot) as usize);
        three[to..to + slot as usize].copy_from_slice(&two[from..from + slot as usize]);
    }
    submit(&*stream, into);
    submit(&*stream, within);
    submit(&*stream, out).wait(soon()).expect("the copies complete");
    assert!(back.exclusive_bytes().expect("the work is over") == three, "scattered copies changed bytes");
    assert!(read_all(&*stream, &second) == two, "scattered copies changed bytes beside their destinations");
}

fn order_in_a_stream(device: &Arc<dyn Device>) {
    let stream = stream(device, "order");
    let on_device = memory(device, 64 << 10);
    let mut snapshots = Vec::new();
    for round in 0..50_u8 {
        stream.fill(&on_device, 0, on_device.len(), round).expect("fill");
        snapshots.push(download(&*stream, &on_device));
    }
    for (round, (mut host, done)) in (0_u8..).zip(snapshots) {
        done.wait(soon()).expect("the copy completes");
        assert!(
            host.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == round),
            "round {round} saw another round's bytes"
        );
    }
}

fn order_across_streams(device: &Arc<dyn Device>) {
    let (writer, reader) = (stream(device, "writer"), stream(device, "reader"));
    let on_device = memory(device, 256 << 10);
    for round in 0..30_u8 {
        writer.fill(&on_device, 0, on_device.len(), 255).expect("fill");
        writer.fill(&on_device, 0, on_device.len(), round).expect("fill");
        reader.wait(&writer.record().expect("record")).expect("wait");
        let (mut host, done) = download(&*reader, &on_device);
        writer.wait(&reader.record().expect("record")).expect("wait");
        done.wait(soon()).expect("the copy completes");
        assert!(
            host.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == round),
            "round {round}: read before it was written"
        );
    }
}

fn events(device: &Arc<dyn Device>) {
    let stream = stream(device, "events");
    stream.record().expect("record").wait(soon()).expect("nothing before it");
    let on_device = memory(device, 1 << 20);
    let done = upload(&*stream, &on_device, &pattern(2, 1 << 20));
    let after = stream.record().expect("record");
    let (sender, receiver) = crossbeam_channel::bounded(1);
    after.on_complete(move |result| {
        let _receiver_waits = sender.send(result);
    });
    let result = receiver.recv_timeout(Duration::from_secs(60)).expect("the callback comes once");
    assert_eq!(result, Ok(()));
    assert_eq!(done.query(), EventStatus::Complete, "an event includes everything before it");
    assert_eq!(after.wait(Instant::now()), Ok(()), "a complete event meets any deadline");
    let again = receiver.recv_timeout(Duration::from_secs(60));
    let ended = Err(crossbeam_channel::RecvTimeoutError::Disconnected);
    assert_eq!(again, ended, "the callback is called once and dropped");
    assert_eq!(stream.status(), Ok(()));
}

fn many_threads(device: &Arc<dyn Device>) {
    const PART: u64 = 16 << 10;
    let shared = stream(device, "shared");
    let on_device = memory(device, PART * 32);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (shared, on_device) = (&shared, &on_device);
            scope.spawn(move || {
                let own = stream(device, "own");
                for part in (0..8).map(|index| index * 4 + thread) {
                    let slice = on_device.slice(part * PART, PART).expect("inside");
                    let stream = if part % 8 < 4 { shared } else { &own };
                    upload(&**stream, &slice, &pattern(part, PART));
                    assert!(read_all(&**stream, &slice) == pattern(part, PART), "part {part}");
                }
            });
        }
    });
    let all: Vec<u8> = (0..32).flat_map(|part| pattern(part, PART)).collect();
    assert!(read_all(&*shared, &on_device) == all, "threads disturbed each other");
}

fn engine_owned_memory(device: &Arc<dyn Device>) {
    let stream = stream(device, "engine");
    let engine = memory(device, 64 << 10);
    upload(&*stream, &engine, &pattern(3, engine.len())).wait(soon()).expect("the copy completes");
    // SAFETY: `engine` lives until the end of this function, after the last use of what is
    // registered.
    let ours = unsafe { device.register_external(engine.address() + 4096, 8192) };
    let ours = ours.expect("a range inside a live allocation can be registered");
    assert!(ours.is_external() && !engine.is_external());
    assert!(read_all(&*stream, &ours) == pattern(3, engine.len())[4096..4096 + 8192]);
    let free = device.info().free_bytes;
    drop(ours);
    assert_eq!(device.info().free_bytes, free, "engine-owned memory is never freed by us");
    assert!(read_all(&*stream, &engine) == pattern(3, engine.len()));
    for (address, len) in [(0, 16), (engine.address(), u64::MAX - engine.address()), (u64::MAX, 1)] {
        // SAFETY: the range is not memory; nothing is done with it.
        let refused = unsafe { device.register_external(address, len) };
        assert!(matches!(refused, Err(DeviceError::UnknownMemory { .. })), "{address:#x}: {refused:?}");
    }
}

fn pinned_host_memory(device: &Arc<dyn Device>) {
    let stream = stream(device, "pinned");
    let host = HostBuffer::from_bytes(&pattern(4, 16 << 10));
    let pinned = match device.register_host(host.region().clone()) {
        Ok(pinned) => pinned,
        // A machine where four pages cannot be locked is not checked further; the error is the
        // one it should be.
        Err(error) => return assert!(matches!(error, DeviceError::PinLimit { .. }), "{error}"),
    };
    let again = device.register_host(host.slice(4096, 4096).expect("inside"));
    assert!(matches!(again, Err(DeviceError::AlreadyPinned { .. })), "{again:?}");
    let on_device = memory(device, host.len());
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    batch.push_host_to_device(pinned.region(), 0, &on_device, 0, host.len()).expect("fits");
    submit(&*stream, batch).wait(soon()).expect("the copy completes");
    assert!(read_all(&*stream, &on_device) == pattern(4, 16 << 10));
    drop(pinned);
    assert!(
        device.register_host(host.region().clone()).is_ok(),
        "unregistered memory can be registered again"
    );
}

/// Sends a message when it is dropped.
struct Notice(crossbeam_channel::Sender<()>);

impl Drop for Notice {
    fn drop(&mut self) {
        let _receiver_may_be_gone = self.0.send(());
    }
}

fn drop_with_work_in_flight(device: &Arc<dyn Device>) {
    const PARTS: u64 = 64;
    const PART: u64 = 32 << 10;
    let free = device.info().free_bytes;
    let (sender, dropped) = crossbeam_channel::bounded(1);
    let notice: Owner = Arc::new(Notice(sender));
    let mut result = HostBuffer::zeroed((PARTS * PART) as usize);
    {
        let stream = stream(device, "doomed");
        let on_device = memory(device, PARTS * PART);
        upload(&*stream, &on_device, &pattern(5, PARTS * PART));
        for part in 0..PARTS {
            let mut batch = CopyBatch::new(Direction::DeviceToHost);
            batch.push_device_to_host(&on_device, part * PART, &result, part * PART, PART).expect("fits");
            batch.hold(&notice);
            submit(&*stream, batch);
        }
        drop(notice);
    }
    dropped.recv_timeout(Duration::from_secs(60)).expect("owners are let go when the work is complete");
    assert!(
        result.exclusive_bytes().expect("the work is over") == pattern(5, PARTS * PART),
        "queued work completes after its handles are gone"
    );
    let deadline = soon();
    while device.info().free_bytes != free {
        assert!(Instant::now() < deadline, "memory held by finished work is freed");
        std::thread::yield_now();
    }
}
