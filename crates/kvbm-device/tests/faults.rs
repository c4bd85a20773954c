//! Injected faults: what code above must survive, and that each is reported as what it is.
#![cfg(not(miri))] // memfd and mmap of shared memory do not exist there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, Device, DeviceError, DeviceMemory, Direction, EmulatedConfig, EmulatedDevice, EventStatus,
    Fault, FaultRule, HostBuffer, OpKind, Owner, Stream,
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

struct Bench {
    device: EmulatedDevice,
    stream: Arc<dyn Stream>,
    memory: DeviceMemory,
}

fn bench() -> Bench {
    let config = EmulatedConfig { memory_bytes: 16 << 20, ..EmulatedConfig::default() };
    let device = EmulatedDevice::new(config).expect("address space");
    let stream = device.create_stream("d2h").expect("stream");
    let memory = device.allocate(8192, 256).expect("memory");
    stream.fill(&memory, 0, 8192, 1).expect("queued").wait(soon()).expect("complete");
    Bench { device, stream, memory }
}

impl Bench {
    fn out(&self, host: &HostBuffer) -> CopyBatch {
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&self.memory, 0, host, 0, 4096).expect("fits");
        batch.push_device_to_host(&self.memory, 4096, host, 4096, 4096).expect("fits");
        batch
    }
}

#[test]
fn nth_operation_fails_and_poisons_its_stream_only() {
    let bench = bench();
    let other = bench.device.create_stream("other").expect("stream");
    let ticket = bench.device.faults().inject(FaultRule::next(Fault::Fail).on_stream("d2h").after(2));
    let host = HostBuffer::zeroed(8192);
    other.fill(&bench.memory, 0, 1, 1).expect("queued").wait(soon()).expect("another stream does not count");
    let events: Vec<_> = (0..4).filter_map(|_| bench.stream.copy(bench.out(&host)).ok()).collect();
    let results: Vec<_> = events.iter().map(|event| event.wait(soon())).collect();
    assert!(results[0].is_ok() && results[1].is_ok());
    let failed = results[2].as_ref().expect_err("the third fails");
    assert!(
        failed.to_string().contains("d2h: device-to-host copy of 8192 bytes in 2 pieces failed"),
        "{failed}"
    );
    if let Some(after) = results.get(3) {
        assert!(matches!(after, Err(DeviceError::Poisoned { cause, .. }) if **cause == *failed));
    }
    assert!(ticket.wait_struck(soon()).is_ok());
    assert_eq!(bench.device.faults().armed(), 0);

    let rejected = bench.stream.copy(bench.out(&host)).expect_err("the stream is poisoned");
    assert!(matches!(rejected.error, DeviceError::Poisoned { .. }));
    assert!(other.copy(bench.out(&host)).expect("queued").wait(soon()).is_ok());
    let fresh = bench.device.create_stream("d2h").expect("stream");
    assert!(fresh.copy(rejected.batch).expect("queued").wait(soon()).is_ok(), "a new stream goes on");
}

#[test]
fn failing_halfway_leaves_a_torn_destination() {
    let bench = bench();
    bench.device.faults().inject(FaultRule::next(Fault::FailHalfway));
    let mut host = HostBuffer::zeroed(8192);
    let torn = bench.stream.copy(bench.out(&host)).expect("queued").wait(soon());
    assert!(matches!(torn, Err(DeviceError::OperationFailed { .. })));
    assert_eq!(host.exclusive_bytes().expect("the work is over").to_vec(), [[1; 4096], [0; 4096]].concat());
}

#[test]
fn a_flipped_bit_is_reported_as_success() {
    let bench = bench();
    let kind = OpKind::Copy(Direction::DeviceToHost);
    bench.device.faults().inject(FaultRule::next(Fault::FlipBit).of_kind(kind));
    let mut host = HostBuffer::zeroed(8192);
    bench.stream.fill(&bench.memory, 0, 8192, 2).expect("queued");
    bench.stream.copy(bench.out(&host)).expect("queued").wait(soon()).expect("it says success");
    let wrong: u32 = host
        .exclusive_bytes()
        .expect("the work is over")
        .to_vec()
        .iter()
        .map(|byte| (byte ^ 2).count_ones())
        .sum();
    assert_eq!(wrong, 1);

    let source = HostBuffer::from_bytes(&[4; 8192]);
    let mut into = CopyBatch::new(Direction::HostToDevice);
    into.push_host_to_device(&source, 0, &bench.memory, 0, 8192).expect("fits");
    bench.device.faults().inject(FaultRule::next(Fault::FlipBit));
    bench.stream.copy(into).expect("queued").wait(soon()).expect("it says success");
    bench.stream.copy(bench.out(&host)).expect("queued").wait(soon()).expect("complete");
    let wrong: u32 = host
        .exclusive_bytes()
        .expect("the work is over")
        .to_vec()
        .iter()
        .map(|byte| (byte ^ 4).count_ones())
        .sum();
    assert_eq!(wrong, 1);
}

#[test]
fn a_bit_that_cannot_be_flipped_is_a_failure() {
    for fault in [Fault::FlipBit, Fault::FailHalfway] {
        let bench = bench();
        bench.device.faults().inject(FaultRule::next(fault));
        let nothing =
            bench.stream.copy(CopyBatch::new(Direction::DeviceToHost)).expect("queued").wait(soon());
        assert!(matches!(nothing, Err(DeviceError::OperationFailed { .. })), "{fault:?}: {nothing:?}");
    }
}

/// Mutation that makes it fail: `CopyBatch::hold` holds nothing.
#[test]
fn invariant_3_memory_is_held_until_the_hardware_is_done() {
    let bench = bench();
    let ticket = bench.device.faults().inject(FaultRule::next(Fault::Stall));
    let mut host = HostBuffer::zeroed(8192);
    let owner: Owner = Arc::new(());
    let mut batch = bench.out(&host);
    batch.hold(&owner);
    let done = bench.stream.copy(batch).expect("queued");
    ticket.wait_struck(soon()).expect("the copy is on the hardware");
    let late = done.wait(Instant::now() + Duration::from_millis(5));
    assert!(matches!(late, Err(DeviceError::Deadline { .. })), "a deadline passes, the work stays");
    let Bench { device, stream, memory } = bench;
    drop((stream, memory));
    let free = device.info().free_bytes;
    assert!(Arc::strong_count(&owner) > 1, "the batch holds its owners while the hardware works");
    assert_eq!(done.query(), EventStatus::Pending);
    ticket.release();
    assert_eq!(done.wait(soon()), Ok(()));
    assert_eq!(Arc::strong_count(&owner), 1, "let go before the event completes");
    assert!(device.info().free_bytes > free, "and so is the memory");
    assert!(host.exclusive_bytes().expect("the work is over").iter().all(|byte| *byte == 1));
}

#[test]
fn a_dropped_ticket_releases_its_stall() {
    let bench = bench();
    let ticket = bench.device.faults().inject(FaultRule::next(Fault::Stall));
    let host = HostBuffer::zeroed(8192);
    let done = bench.stream.copy(bench.out(&host)).expect("queued");
    drop(ticket);
    assert_eq!(done.wait(soon()), Ok(()));
}

#[test]
fn allocations_and_pins_fail_on_request() {
    let bench = bench();
    bench.device.faults().fail_allocations(1);
    let refused = bench.device.allocate(4096, 256).expect_err("injected");
    assert!(matches!(refused, DeviceError::OutOfMemory { asked: 4096, .. }), "{refused}");
    assert!(bench.device.allocate(4096, 256).is_ok());

    let host = HostBuffer::zeroed(8192);
    bench.device.faults().fail_pins(1, 65536);
    let refused = bench.device.register_host(host.region().clone()).expect_err("injected");
    assert_eq!(refused, DeviceError::PinLimit { asked: 8192, limit: 65536 });
    assert!(refused.to_string().contains("ulimit -l"), "the error says the way out");
    assert!(bench.device.register_host(host.region().clone()).is_ok());
}
