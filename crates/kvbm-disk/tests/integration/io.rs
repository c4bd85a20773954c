//! Moving bytes: fragments, alignment, short and failing I/O, the queue, deadlines.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, SLOT_FILE, SimMedium};
use kvbm_disk::{
    DiskEngine, EngineKind, EngineMode, IoBatch, IoFragments, OpError, OpOutcome, OpenError, OwnedBuffer,
    SubmitError,
};
use kvbm_plan::{BlockId, FailureKind};
use proptest::prelude::*;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// Memory of one block in runs of the given lengths, each followed by a gap that nobody may touch.
pub(crate) struct Scattered {
    pub(crate) memory: Arc<Mutex<OwnedBuffer>>,
    runs: Vec<(usize, usize)>,
}

const GAP: u8 = 0xEE;

impl Scattered {
    pub(crate) fn new(lens: &[usize], gap: usize, content: &[u8]) -> Self {
        let mut runs = Vec::new();
        let mut at = 0;
        for &len in lens {
            runs.push((at, len));
            at += len + gap;
        }
        let mut memory = OwnedBuffer::new(at);
        memory.as_mut_slice().fill(GAP);
        let mut rest = content;
        for &(at, len) in &runs {
            let (now, later) = rest.split_at(len.min(rest.len()));
            memory.as_mut_slice()[at..at + now.len()].copy_from_slice(now);
            rest = later;
        }
        Self { memory: Arc::new(Mutex::new(memory)), runs }
    }

    pub(crate) fn fragments(&self) -> IoFragments {
        let start = self.memory.lock().unwrap().as_mut_slice().as_mut_ptr();
        let runs = self.runs.iter().map(|&(at, len)| (start.wrapping_add(at), len));
        // SAFETY: the memory is given to the batch as a guard, and not touched before the batch
        // completes.
        unsafe { IoFragments::from_raw(runs) }.unwrap()
    }

    /// The block's bytes; asserts that the gaps are untouched.
    pub(crate) fn gather(&self) -> Vec<u8> {
        let memory = self.memory.lock().unwrap();
        let mut gathered = Vec::new();
        let mut at = 0;
        for &(start, len) in &self.runs {
            assert!(memory.as_slice()[at..start].iter().all(|&byte| byte == GAP));
            gathered.extend_from_slice(&memory.as_slice()[start..start + len]);
            at = start + len;
        }
        assert!(memory.as_slice()[at..].iter().all(|&byte| byte == GAP));
        gathered
    }
}

pub(crate) fn run(engine: &DiskEngine, fill: impl FnOnce(&mut IoBatch)) -> Vec<OpOutcome> {
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    fill(&mut batch);
    engine.submit(batch).unwrap();
    outcomes.recv_timeout(PATIENCE).unwrap()
}

pub(crate) fn write_scattered(engine: &DiskEngine, slot: u32, number: u64, source: &Scattered) -> OpOutcome {
    run(engine, |batch| {
        batch.guard(Arc::clone(&source.memory) as _);
        batch.write(BlockId(slot), identity(number), source.fragments());
    })
    .remove(0)
}

pub(crate) fn read_scattered(engine: &DiskEngine, slot: u32, number: u64, target: &Scattered) -> OpOutcome {
    run(engine, |batch| {
        batch.guard(Arc::clone(&target.memory) as _);
        batch.read(BlockId(slot), identity(number), target.fragments());
    })
    .remove(0)
}

#[test]
fn a_block_of_1100_fragments_works_direct_and_buffered() {
    let collected = config(1).straight_bytes;
    let cases = [
        (EngineMode::Auto, 4096, 4096),
        (EngineMode::Threads, 4096, 0),
        (EngineMode::Buffered, 4096, collected),
        (EngineMode::Auto, 4096, collected),
        (EngineMode::Auto, 100, 0),
        (EngineMode::Threads, 100, collected),
    ];
    for (io, len, straight_bytes) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(2);
        (config.dir, config.engine, config.block_bytes) = (dir.path().to_owned(), io, 1100 * 4096);
        config.straight_bytes = straight_bytes;
        let (engine, _) = DiskEngine::open(config).unwrap();
        let bytes = pattern(1, 1100 * len);
        let source = Scattered::new(&vec![len; 1100], len, &bytes);
        let written = write_scattered(&engine, 1, 1, &source).unwrap();
        assert_eq!(written.checksum, engine.checksums().of(&identity(1), [&bytes[..]]));
        let target = Scattered::new(&vec![len; 1100], 2 * len, &[]);
        assert_eq!(read_scattered(&engine, 1, 1, &target).unwrap(), written);
        assert_eq!(target.gather(), bytes);
        let direct = engine.info().engine.kind != EngineKind::Buffered;
        assert_eq!(
            engine.stats().bounced,
            if direct && (len == 100 || straight_bytes > 4096) { 2 } else { 0 }
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Any fragments, with direct I/O's rules or without, with every call cut short: the same bytes
    /// come back through any other fragments.
    #[test]
    fn fragments_round_trip(
        lens in proptest::collection::vec(1_usize..1500, 1..6),
        gap in 0_usize..3,
        engine_kind in prop_oneof![
            Just(EngineKind::Buffered), Just(EngineKind::Threads), Just(EngineKind::IoUring)
        ],
        aligned in any::<bool>(),
        short in proptest::option::of(400_usize..3000),
    ) {
        let lens: Vec<usize> = lens.iter().map(|len| if aligned { len.next_multiple_of(512) } else { *len }).collect();
        let gap = if aligned { gap * 512 } else { gap };
        let total = lens.iter().sum();
        let medium = SimMedium::new();
        medium.set_direct(engine_kind != EngineKind::Buffered);
        medium.set_ring(engine_kind == EngineKind::IoUring);
        let (engine, _) = open(config(3), &medium);
        prop_assert_eq!(engine.info().engine.kind, engine_kind);
        if let Some(bytes) = short {
            // Below the alignment every third call makes no progress, which must not end the
            // transfer.
            medium.inject(SLOT_FILE, Call::Write, 0, 3, DiskFault::Short(bytes));
            medium.inject(SLOT_FILE, Call::Read, 0, 3, DiskFault::Short(bytes));
        }
        let bytes = pattern(4, total);
        let source = Scattered::new(&lens, gap, &bytes);
        write_scattered(&engine, 2, 4, &source).unwrap();
        let target = Scattered::new(&[total], 0, &[]);
        read_scattered(&engine, 2, 4, &target).unwrap();
        prop_assert_eq!(target.gather(), bytes.clone());
        let target = Scattered::new(&lens, gap, &[]);
        read_scattered(&engine, 2, 4, &target).unwrap();
        prop_assert_eq!(target.gather(), bytes);
    }
}

#[test]
fn interrupted_calls_are_repeated_and_a_device_without_progress_fails() {
    for not_now in [ErrorKind::Interrupted, ErrorKind::WouldBlock] {
        let medium = SimMedium::new();
        let (engine, _) = open(config(2), &medium);
        medium.inject(SLOT_FILE, Call::Write, 0, 3, DiskFault::Error(not_now));
        assert!(all_good(&write(&engine, &[(0, 0)])), "{not_now}");
        assert_eq!(engine.stats().continued, 3);
        medium.inject(SLOT_FILE, Call::Read, 0, u64::MAX, DiskFault::Error(not_now));
        let error = read(&engine, 0, 0).unwrap_err();
        assert!(matches!(error, OpError::Io { op: "read", .. }), "{error}");
        medium.heal();
        assert!(is_served(&engine, 0, 0));
    }
}

#[test]
fn device_errors_name_slot_and_byte_and_leave_a_good_slot_good() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    assert!(all_good(&write(&engine, &[(1, 0)])));
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Short(4096));
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Error(ErrorKind::TimedOut));
    let error = read(&engine, 1, 0).unwrap_err();
    assert!(
        matches!(error, OpError::Io { slot: BlockId(1), at: 4096, kind: ErrorKind::TimedOut, .. }),
        "{error}"
    );
    assert_eq!((error.kind(), engine.stats().io_errors), (FailureKind::Io, 1));
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Panic);
    assert!(matches!(read(&engine, 1, 0), Err(OpError::Io { .. })));
    assert!(is_served(&engine, 1, 0));
    assert!(all_good(&write(&engine, &[(1, 1)])));
}

#[test]
fn a_source_that_lost_its_bytes_is_refused() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(1), &medium);
    for (checksum, good) in
        [(0xBAD, false), (engine.checksums().of(&identity(0), [&pattern(0, 64)[..]]), true)]
    {
        let source = Scattered::new(&[64], 0, &pattern(0, 64));
        let outcome = run(&engine, |batch| {
            batch.guard(Arc::clone(&source.memory) as _);
            batch.write_checked(BlockId(0), identity(0), source.fragments(), checksum);
        });
        assert_eq!(outcome[0].is_ok(), good);
        assert!(good || matches!(outcome[0], Err(OpError::Source { expected: 0xBAD, .. })));
    }
    assert_eq!(engine.stats().corrupt_source, 1);
    // A trusted checksum that is wrong is found out by the read.
    let source = Scattered::new(&[64], 0, &pattern(0, 64));
    let outcome = run(&engine, |batch| {
        batch.guard(Arc::clone(&source.memory) as _);
        batch.write_trusted(BlockId(0), identity(0), source.fragments(), 0xBAD);
    });
    assert!(matches!(outcome[0], Ok(done) if done.checksum == 0xBAD));
    let error = read_scattered(&engine, 0, 0, &source).unwrap_err();
    assert!(matches!(error, OpError::Corrupt { .. }), "{error}");
}

#[test]
fn a_stale_handle_of_a_network_mount_is_a_miss() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(1), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    for (kind, means) in
        [(ErrorKind::StaleNetworkFileHandle, FailureKind::Missing), (ErrorKind::Other, FailureKind::Io)]
    {
        medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Error(kind));
        assert_eq!(read(&engine, 0, 0).unwrap_err().kind(), means);
    }
    assert!(is_served(&engine, 0, 0));
}

#[test]
fn bad_arguments_are_errors() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    let empty = Arc::new(OwnedBuffer::new(0));
    let long = Arc::new(OwnedBuffer::new(BLOCK + 1));
    let outcomes = run(&engine, |batch| {
        batch.write_buffer(BlockId(0), identity(0), &empty);
        batch.write_buffer(BlockId(0), identity(0), &long);
    });
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(OpError::Length { max: 8192, .. }))));
    assert!(matches!(write(&engine, &[(2, 0)])[0], Err(OpError::NoSuchSlot { num_slots: 2, .. })));
    assert!(matches!(read(&engine, 2, 0), Err(OpError::NoSuchSlot { .. })));
    assert!(matches!(read(&engine, 0, 0), Err(OpError::Missing { .. })));
    let rejected = engine.submit(IoBatch::new(|_| ())).unwrap_err();
    assert_eq!(rejected.error, SubmitError::Empty);
    // A block shorter than the slot keeps its length.
    let short = Scattered::new(&[100], 0, &pattern(3, 100));
    write_scattered(&engine, 1, 3, &short).unwrap();
    assert!(read(&engine, 1, 3).unwrap_err().to_string().contains("100 bytes, 8192"));
    read_scattered(&engine, 1, 3, &short).unwrap();
}

#[test]
fn a_full_queue_gives_the_batch_back_and_reads_overtake_writes() {
    let medium = SimMedium::new();
    let mut config = config(8);
    (config.threads, config.queue_depth) = (1, 4);
    let (engine, _) = open(config, &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.hold();
    let (done, order) = mpsc::channel();
    let submit = |slot: u32, number: u64, is_read: bool| {
        let done = done.clone();
        let mut batch = IoBatch::new(move |outcomes| done.send((number, all_good(&outcomes))).unwrap());
        let buffer = Scattered::new(&[BLOCK], 0, &pattern(number, BLOCK));
        batch.guard(Arc::clone(&buffer.memory) as _);
        let fragments = buffer.fragments();
        if is_read {
            batch.read(BlockId(slot), identity(number), fragments);
        } else {
            batch.write(BlockId(slot), identity(number), fragments);
        }
        engine.submit(batch)
    };
    submit(1, 1, false).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    submit(2, 2, false).unwrap();
    submit(3, 3, false).unwrap();
    submit(0, 0, true).unwrap();
    let rejected = submit(4, 4, false).unwrap_err();
    assert_eq!(rejected.error, SubmitError::QueueFull { queued: 4, depth: 4 });
    assert_eq!((rejected.batch.len(), engine.info().queued_ops), (1, 4));
    medium.let_go();
    let finished: Vec<_> = (0..4).map(|_| order.recv_timeout(PATIENCE).unwrap()).collect();
    assert_eq!(finished, [(1, true), (0, true), (2, true), (3, true)]);
    engine.submit(rejected.batch).unwrap();
    assert_eq!(order.recv_timeout(PATIENCE).unwrap(), (4, true));
}

#[test]
fn what_has_not_started_can_be_cancelled_and_has_a_deadline() {
    let medium = SimMedium::new();
    let mut config = config(8);
    config.threads = 1;
    let (engine, _) = open(config, &medium);
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let submit = |slot: u32, deadline: Option<Instant>| {
        let done = done.clone();
        let mut batch =
            IoBatch::new(move |mut outcomes: Vec<OpOutcome>| done.send(outcomes.remove(0)).unwrap());
        batch.write_buffer(BlockId(slot), identity(0), &Arc::new(OwnedBuffer::new(BLOCK)));
        if let Some(deadline) = deadline {
            batch.deadline(deadline);
        }
        engine.submit(batch).unwrap()
    };
    submit(0, None);
    assert!(medium.wait_for_held(1, PATIENCE));
    submit(1, None).cancel();
    submit(2, Some(Instant::now()));
    medium.let_go();
    assert!(outcomes.recv_timeout(PATIENCE).unwrap().is_ok());
    assert!(matches!(outcomes.recv_timeout(PATIENCE).unwrap(), Err(OpError::Cancelled { slot: BlockId(1) })));
    let late = outcomes.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(late, OpError::Deadline { slot: BlockId(2) }), "{late}");
    assert_eq!(late.kind(), FailureKind::PathBusy, "the device was not asked");
    assert_eq!(engine.info().present_blocks, 1);
}

#[test]
fn a_slot_in_use_is_busy_and_a_released_write_is_not_kept() {
    let medium = SimMedium::new();
    let mut config = config(2);
    config.threads = 2;
    let (engine, _) = open(config, &medium);
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    batch.write_buffer(BlockId(0), identity(0), &Arc::new(OwnedBuffer::new(BLOCK)));
    engine.submit(batch).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    assert!(matches!(write(&engine, &[(0, 1)])[0], Err(OpError::Busy { .. })));
    assert!(matches!(read(&engine, 0, 0), Err(OpError::Missing { .. })));
    engine.release(&[BlockId(0)]);
    medium.let_go();
    let outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(outcomes[0], Err(OpError::Released { .. })));
    assert_eq!(engine.info().present_blocks, 0);
}

#[test]
fn a_completion_may_panic_submit_and_own_the_engine() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(4), &medium);
    let engine = Arc::new(engine);
    let mut batch = IoBatch::new(|_| panic!("expected by this test"));
    batch.write_buffer(BlockId(0), identity(0), &Arc::new(OwnedBuffer::new(BLOCK)));
    engine.submit(batch).unwrap();
    let (done, outcomes) = mpsc::channel();
    let last = Arc::clone(&engine);
    let mut batch = IoBatch::new(move |_| {
        let mut next = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
        next.write_buffer(BlockId(2), identity(2), &Arc::new(OwnedBuffer::new(BLOCK)));
        last.submit(next).unwrap();
        // Perhaps the last handle: dropped on the engine's own thread, which must not wait for
        // itself.
        drop(last);
    });
    batch.write_buffer(BlockId(1), identity(1), &Arc::new(OwnedBuffer::new(BLOCK)));
    engine.submit(batch).unwrap();
    drop(engine);
    let outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(outcomes[0], Ok(_) | Err(OpError::ShuttingDown { .. })));
}

/// Something that a batch keeps alive, with a bug in its `Drop`.
struct Unruly;

impl Drop for Unruly {
    fn drop(&mut self) {
        panic!("expected by this test");
    }
}

#[test]
fn a_guard_that_panics_does_not_take_the_completion_with_it() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(1), &medium);
    let buffer = Arc::new(OwnedBuffer::from_slice(&pattern(0, BLOCK)));
    let alive = Arc::downgrade(&buffer);
    let outcomes = run(&engine, |batch| {
        batch.guard(Arc::new(Unruly));
        batch.write_buffer(BlockId(0), identity(0), &buffer);
        drop(buffer);
    });
    assert!(all_good(&outcomes));
    assert!(alive.upgrade().is_none(), "the other guards are dropped");
    assert!(is_served(&engine, 0, 0), "the thread goes on");
    assert_eq!(engine.stats().callback_panics, 1);
}

#[test]
fn after_shutdown_nothing_is_taken() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    assert!(engine.shutdown(PATIENCE));
    assert_eq!(engine.durable_blocks(), 1);
    let mut batch = IoBatch::new(|_| ());
    batch.write_buffer(BlockId(0), identity(0), &Arc::new(OwnedBuffer::new(BLOCK)));
    assert_eq!(engine.submit(batch).unwrap_err().error, SubmitError::ShuttingDown);
    assert!(engine.flush(PATIENCE).is_ok());
    assert!(engine.shutdown(PATIENCE));
}

/// Mutation that makes it fail: `DiskEngine::shutdown` has the mark written whatever is under way.
#[test]
fn a_shutdown_that_does_not_wait_for_operations_leaves_no_mark_of_order() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.hold();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| read(&engine, 0, 0));
        assert!(medium.wait_for_held(1, PATIENCE));
        assert!(!engine.shutdown(Duration::ZERO));
        medium.let_go();
        assert!(late.join().unwrap().is_ok());
    });
    drop(engine);
    let (engine, recovered) = open(config(2), &medium);
    assert!(!recovered.clean);
    assert!(is_served(&engine, 0, 0) && engine.shutdown(PATIENCE));
    assert!(open(config(2), &medium).1.clean);
}

#[test]
fn the_choice_of_the_engine_is_reported_and_can_be_forced() {
    let medium = SimMedium::new();
    let choose = |mode: EngineMode| {
        let mut config = config(1);
        config.engine = mode;
        DiskEngine::open_on(config, medium.as_medium()).map(|(engine, _)| engine.info().engine)
    };
    let chosen = |mode| {
        let choice = choose(mode).unwrap();
        (choice.kind, choice.reason)
    };
    let refused = |mode| {
        let error = choose(mode).unwrap_err();
        assert!(matches!(error, OpenError::NoEngine { .. }), "{error}");
        error.to_string()
    };
    let configured = |kind| (kind, "configured".to_owned());

    let (kind, reason) = chosen(EngineMode::Auto);
    assert!(kind == EngineKind::Buffered && reason.contains("O_DIRECT"), "{reason}");
    assert!(refused(EngineMode::Threads).contains("threads is not possible here: open with O_DIRECT"));
    assert!(refused(EngineMode::IoUring).contains("io_uring is not possible here: open with O_DIRECT"));

    medium.set_direct(true);
    let (kind, reason) = chosen(EngineMode::Auto);
    assert!(kind == EngineKind::Threads && reason.contains("no io_uring: the medium"), "{reason}");
    assert!(refused(EngineMode::IoUring).contains("no file descriptor"));
    assert_eq!(chosen(EngineMode::Threads), configured(EngineKind::Threads));

    medium.set_ring(true);
    assert_eq!(chosen(EngineMode::Auto), (EngineKind::IoUring, "a ring could be set up".to_owned()));
    assert_eq!(chosen(EngineMode::IoUring), configured(EngineKind::IoUring));
    assert_eq!(chosen(EngineMode::Threads), configured(EngineKind::Threads));
    assert_eq!(chosen(EngineMode::Buffered), configured(EngineKind::Buffered));
}

/// Neighbours go in one request, and each keeps its own fate.
#[test]
fn neighbouring_slots_share_requests_and_not_their_fates() {
    const BLOCKS: u32 = 24;
    for straight_bytes in [0, u64::MAX] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(BLOCKS + 1);
        (config.dir, config.block_bytes, config.straight_bytes) =
            (dir.path().to_owned(), 64 << 10, straight_bytes);
        let (engine, _) = DiskEngine::open(config).unwrap();
        let all = |n: u32| pattern(u64::from(n), 64 << 10);
        let layout = [16 << 10; 4];
        let sources: Vec<_> = (0..BLOCKS).map(|n| Scattered::new(&layout, 4096, &all(n))).collect();
        let outcomes = run(&engine, |batch| {
            // One slot is left out, and the end comes first.
            for n in (12..BLOCKS).chain(0..11) {
                batch.guard(Arc::clone(&sources[n as usize].memory) as _);
                batch.write(BlockId(n), identity(u64::from(n)), sources[n as usize].fragments());
            }
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        let ring = engine.info().engine.kind == EngineKind::IoUring;
        assert_eq!(engine.stats().requests, if ring { 4 } else { 0 });
        let targets: Vec<_> = (0..BLOCKS).map(|_| Scattered::new(&layout, 8192, &[])).collect();
        let outcomes = run(&engine, |batch| {
            for n in 0..BLOCKS {
                batch.guard(Arc::clone(&targets[n as usize].memory) as _);
                // Slot 3 holds another block than this, slot 11 none.
                let name = if n == 3 { 99 } else { u64::from(n) };
                batch.read(BlockId(n), identity(name), targets[n as usize].fragments());
            }
        });
        for (n, outcome) in (0..BLOCKS).zip(outcomes) {
            match n {
                3 => assert!(matches!(outcome, Err(OpError::Corrupt { .. })), "{outcome:?}"),
                11 => assert!(matches!(outcome, Err(OpError::Missing { .. })), "{outcome:?}"),
                _ => {
                    outcome.unwrap();
                    assert_eq!(targets[n as usize].gather(), all(n), "block {n}");
                }
            }
        }
    }
}
