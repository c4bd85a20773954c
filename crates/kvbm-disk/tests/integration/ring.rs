//! The ring: the kernel's over a real file, and the same logic emulated over a medium that fails.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, SLOT_FILE, SimMedium};
use kvbm_disk::{
    DiskConfig, DiskEngine, EngineKind, IoBatch, IoFragments, IoMemory, OpError, OpOutcome, OwnedBuffer,
    ReadTarget, SlotCorruption,
};
use kvbm_plan::BlockId;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

fn ring_medium() -> SimMedium {
    let medium = SimMedium::new();
    medium.set_direct(true);
    medium.set_ring(true);
    medium
}

fn open_ring(config: DiskConfig, medium: &SimMedium) -> DiskEngine {
    let (engine, _) = open(config, medium);
    assert_eq!(engine.info().engine.kind, EngineKind::IoUring);
    engine
}

/// An engine with a ring of the kernel in `dir`; `None`, said, where the kernel refuses one.
fn kernel_ring(mut config: DiskConfig, dir: &tempfile::TempDir) -> Option<DiskEngine> {
    dir.path().clone_into(&mut config.dir);
    let (engine, _) = DiskEngine::open(config).unwrap();
    let choice = engine.info().engine;
    assert!(!choice.reason.is_empty());
    if choice.kind != EngineKind::IoUring {
        eprintln!("skipped: {}", choice.reason);
        return None;
    }
    Some(engine)
}

/// Blocks in one shared memory, each in `fragments` runs that lie a whole stripe apart.
struct Pool {
    memory: Arc<Mutex<OwnedBuffer>>,
    start: NonNull<u8>,
    blocks: usize,
    fragments: usize,
}

impl Pool {
    fn new(blocks: usize, fragments: usize) -> Self {
        let mut memory = OwnedBuffer::new(blocks * BLOCK);
        let start = NonNull::new(memory.as_mut_slice().as_mut_ptr()).unwrap();
        Self { memory: Arc::new(Mutex::new(memory)), start, blocks, fragments }
    }

    fn runs(&self, block: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let len = BLOCK / self.fragments;
        (0..self.fragments).map(move |fragment| ((fragment * self.blocks + block) * len, len))
    }

    fn fragments(&self, block: usize) -> IoFragments {
        let runs = self.runs(block).map(|(at, len)| (self.start.as_ptr().wrapping_add(at), len));
        // SAFETY: every batch gets the memory as a guard; no two running operations use the same
        // block.
        unsafe { IoFragments::from_raw(runs) }.unwrap()
    }

    fn set(&self, block: usize, bytes: &[u8]) {
        let mut memory = self.memory.lock().unwrap();
        for ((at, len), part) in self.runs(block).zip(bytes.chunks(BLOCK / self.fragments)) {
            memory.as_mut_slice()[at..at + len].copy_from_slice(part);
        }
    }

    fn get(&self, block: usize) -> Vec<u8> {
        let memory = self.memory.lock().unwrap();
        self.runs(block).flat_map(|(at, len)| memory.as_slice()[at..at + len].to_vec()).collect()
    }

    fn io_memory(&self) -> IoMemory {
        // SAFETY: the memory stays where it is while the owner lives.
        unsafe { IoMemory::new(self.start, self.blocks * BLOCK, Arc::clone(&self.memory) as _) }
    }

    fn submit(&self, engine: &DiskEngine, blocks: &[usize], is_read: bool) -> Vec<OpOutcome> {
        let (done, outcomes) = mpsc::channel();
        let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
        batch.guard(Arc::clone(&self.memory) as _);
        for &block in blocks {
            let (slot, identity) = (BlockId(block as u32), identity(block as u64));
            if is_read {
                batch.read(slot, identity, self.fragments(block));
            } else {
                batch.write(slot, identity, self.fragments(block));
            }
        }
        engine.submit(batch).unwrap();
        outcomes.recv_timeout(PATIENCE).unwrap()
    }
}

#[test]
fn blocks_of_any_fragments_go_through_registered_and_other_memory() {
    const BLOCKS: usize = 64;
    for fragments in [1, 2, 16] {
        for registered in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let mut straight = config(BLOCKS as u32);
            straight.straight_bytes = 0;
            let Some(engine) = kernel_ring(straight, &dir) else { return };
            let pool = Pool::new(BLOCKS, fragments);
            if registered {
                engine.register_memory(pool.io_memory());
                wait_until(|| {
                    let choice = engine.info().engine;
                    choice.registered_bytes > 0 || choice.unregistered.is_some()
                });
            }
            let all: Vec<usize> = (0..BLOCKS).collect();
            for &block in &all {
                pool.set(block, &pattern(block as u64, BLOCK));
            }
            assert!(all_good(&pool.submit(&engine, &all, false)));
            for &block in &all {
                pool.set(block, &[0; BLOCK]);
            }
            assert!(all_good(&pool.submit(&engine, &all, true)));
            for &block in &all {
                assert_eq!(pool.get(block), pattern(block as u64, BLOCK), "block {block}");
            }
            // 512 bytes a run: not every device takes that without a buffer.
            assert!(engine.stats().bounced == 0 || BLOCK / fragments < 4096);
            assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, BLOCKS as u64);
            let held = Arc::strong_count(&pool.memory);
            drop(engine);
            assert!(!registered || Arc::strong_count(&pool.memory) < held, "the ring gave the memory back");
        }
    }
}

#[test]
fn memory_in_several_registered_parts_is_found_in_each() {
    let dir = tempfile::tempdir().unwrap();
    let Some(engine) = kernel_ring(config(4), &dir) else { return };
    // Two pools beside one that the kernel does not know; a block of four runs from all three.
    let pools: Vec<_> = (0..3).map(|_| Pool::new(1, 1)).collect();
    engine.register_memory(pools[2].io_memory());
    engine.register_memory(pools[0].io_memory());
    let quarter = BLOCK / 4;
    let bytes = pattern(9, BLOCK);
    for (pool, at) in [(0, 0), (1, 1), (2, 2), (2, 3)] {
        let mut memory = pools[pool].memory.lock().unwrap();
        memory.as_mut_slice()[at * quarter..(at + 1) * quarter]
            .copy_from_slice(&bytes[at * quarter..(at + 1) * quarter]);
    }
    let run = |pool: usize, at: usize| (pools[pool].start.as_ptr().wrapping_add(at * quarter), quarter);
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    for pool in &pools {
        batch.guard(Arc::clone(&pool.memory) as _);
    }
    // SAFETY: the batch guards the memory, and nobody touches it before the completion.
    let fragments = unsafe { IoFragments::from_raw([run(0, 0), run(1, 1), run(2, 2), run(2, 3)]) }.unwrap();
    batch.write(BlockId(0), identity(9), fragments);
    engine.submit(batch).unwrap();
    assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()));
    assert_eq!(read(&engine, 0, 9).unwrap(), bytes);
}

/// Blocks that pass through the ring's buffer in turns with some that do not, with room for one of
/// them at a time: none waits for ever. Mutation that makes it fail: `Arena::new` makes a part for
/// every ring slot.
#[test]
fn blocks_that_need_the_rings_buffer_wait_for_each_other() {
    const BLOCKS: u64 = 48;
    let dir = tempfile::tempdir().unwrap();
    let few = || {
        let mut config = config(2 * BLOCKS as u32);
        (config.depth, config.bounce_bytes) = (8, 1);
        config
    };
    for engine in [Some(open_ring(few(), &ring_medium())), kernel_ring(few(), &dir)].into_iter().flatten() {
        assert_eq!(engine.info().engine.bounce_bytes, 0);
        // Every second slot, so that none share a request; 512 bytes a run are less than the device
        // gets straight.
        let pool = Pool::new(2 * BLOCKS as usize, 16);
        let slots: Vec<usize> = (0..2 * BLOCKS as usize).step_by(2).collect();
        for &slot in &slots {
            pool.set(slot, &pattern(slot as u64, BLOCK));
        }
        std::thread::scope(|scope| {
            let odd: Vec<(u32, u64)> =
                (0..BLOCKS).map(|block| (2 * block as u32 + 1, 2 * block + 1)).collect();
            let engine = &engine;
            scope.spawn(move || assert!(all_good(&write(engine, &odd))));
            assert!(all_good(&pool.submit(engine, &slots, false)));
        });
        for &slot in &slots {
            pool.set(slot, &[0; BLOCK]);
        }
        assert!(all_good(&pool.submit(&engine, &slots, true)));
        for &slot in &slots {
            assert_eq!(pool.get(slot), pattern(slot as u64, BLOCK), "block {slot}");
        }
        assert!((0..BLOCKS).all(|block| is_served(&engine, 2 * block as u32 + 1, 2 * block + 1)));
        assert_eq!(engine.stats().bounced, 2 * BLOCKS);
        assert_eq!(engine.info().engine.bounce_bytes, 512 << 10, "one part, not one for each of eight seats");
    }
}

#[test]
fn the_ring_answers_after_it_was_idle_and_from_many_threads() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(64);
    config.depth = 3;
    let Some(engine) = kernel_ring(config, &dir) else { return };
    std::thread::sleep(Duration::from_millis(20));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let engine = &engine;
            scope.spawn(move || {
                for round in 0..50 {
                    let number = thread * 16 + round % 16;
                    assert!(all_good(&write(engine, &[(number as u32, number)])));
                    assert!(is_served(engine, number as u32, number));
                }
            });
        }
    });
    assert_eq!(engine.stats().writes, 200);
}

#[test]
fn faults_on_the_ring_are_reported_one_by_one() {
    let medium = ring_medium();
    let engine = open_ring(config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    let fail = |call, fault| medium.inject(SLOT_FILE, call, 0, 1, fault);

    fail(Call::Read, DiskFault::Error(ErrorKind::Other));
    assert!(matches!(read(&engine, 0, 0), Err(OpError::Io { op: "read", at: 0, .. })));
    fail(Call::Read, DiskFault::Panic);
    let error = read(&engine, 0, 0).unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert!(is_served(&engine, 0, 0), "an error of the device condemns nothing");
    fail(Call::Read, DiskFault::Short(4096));
    assert!(is_served(&engine, 0, 0));
    assert_eq!(engine.stats().continued, 1);
    fail(Call::Read, DiskFault::Lose);
    assert!(matches!(
        read(&engine, 1, 1),
        Err(OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. })
    ));
    medium.edit(SLOT_FILE, |bytes| bytes.truncate(2 * BLOCK + 4096));
    assert!(matches!(
        read(&engine, 2, 2),
        Err(OpError::Corrupt { cause: SlotCorruption::ShortFile { missing: 4096 }, .. })
    ));
    fail(Call::Write, DiskFault::Error(ErrorKind::StorageFull));
    assert!(matches!(write(&engine, &[(3, 3)])[0], Err(OpError::Io { op: "write", .. })));
    assert!(matches!(read(&engine, 3, 3), Err(OpError::Missing { .. })));
    assert!(all_good(&write(&engine, &[(3, 3)])) && is_served(&engine, 3, 3));
}

/// Mutation that makes it fail: `Driver` keeps the port behind the ring slots, or drops a flight
/// before its completion.
#[test]
fn invariant_3_the_ring_owns_the_memory_until_the_hardware_is_done() {
    let medium = ring_medium();
    let mut config = config(4);
    config.drop_deadline = Duration::from_millis(50);
    let engine = open_ring(config, &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let target = ReadTarget::new(BLOCK);
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    assert!(batch.read_target(BlockId(0), identity(0), &target));
    let handle = engine.submit(batch).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    handle.cancel();
    let mut late = IoBatch::new(|_| ());
    late.write_buffer(BlockId(1), identity(1), &Arc::new(OwnedBuffer::new(BLOCK)));
    engine.submit(late).unwrap();
    drop(engine);
    let target = target.into_buffer().unwrap_err();
    assert!(outcomes.try_recv().is_err());
    medium.let_go();
    let outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(all_good(&outcomes));
    assert_eq!(target.into_buffer().unwrap().as_slice(), pattern(0, BLOCK));
}

/// Mutation that makes it fail: `Driver` asks `Queue::sleep` before it waits, though the queue is
/// closed.
#[test]
fn what_is_under_way_when_the_engine_shuts_down_comes_to_its_end() {
    let medium = ring_medium();
    let engine = open_ring(config(16), &medium);
    assert!(all_good(&write(&engine, &[(0, 0), (9, 9)])));
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    // Two requests: the slots do not adjoin.
    let targets = [0, 9].map(|number| (number, ReadTarget::new(BLOCK)));
    for (number, target) in &targets {
        assert!(batch.read_target(BlockId(*number as u32), identity(*number), target));
    }
    engine.submit(batch).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    // It closes the queue and does not wait.
    assert!(!engine.shutdown(Duration::ZERO));
    medium.let_go();
    let outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(all_good(&outcomes));
    assert!(engine.shutdown(PATIENCE));
    for (number, target) in targets {
        assert_eq!(target.into_buffer().unwrap().as_slice(), pattern(number, BLOCK));
    }
}

/// The same on a ring of the kernel, whose device takes a while for so much.
#[test]
fn a_kernel_ring_shuts_down_with_writes_under_way() {
    const BYTES: usize = 4 << 20;
    const WRITES: u32 = 16;
    let dir = tempfile::tempdir().unwrap();
    let mut config = DiskConfig::new("", WRITES * 2, BYTES as u64, [7; 16]);
    config.depth = WRITES as usize;
    let Some(engine) = kernel_ring(config, &dir) else { return };
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    let buffer = Arc::new(OwnedBuffer::new(BYTES));
    for slot in 0..WRITES {
        batch.write_buffer(BlockId(slot * 2), identity(slot.into()), &buffer);
    }
    engine.submit(batch).unwrap();
    wait_until(|| engine.stats().requests >= 2);
    assert!(engine.shutdown(PATIENCE), "all threads end");
    let outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    let good = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    let unstarted = outcomes.iter().filter(|outcome| matches!(outcome, Err(OpError::ShuttingDown { .. })));
    assert_eq!((outcomes.len(), good + unstarted.count()), (WRITES as usize, WRITES as usize));
    assert!(good >= 2);
}

/// From here on the system call `number` is refused in this thread and in those that it starts.
/// Whether that could be arranged.
fn forbid(number: libc::c_long) -> bool {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let mut filter = [
        // What a filter sees begins with the number of the call.
        step(BPF_LD | BPF_W | BPF_ABS, 0, 0),
        step(BPF_JMP | BPF_JEQ | BPF_K, 1, number as u32),
        step(BPF_RET | BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(BPF_RET | BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: a system call without memory.
    let alone = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel copies the program, which lives through the call.
    alone == 0
        && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } == 0
}

/// A sandbox that knows how rings are made, and not how they are used.
///
/// Mutation that makes it fail: `KernelPort::new` does not try the ring out.
#[test]
#[cfg_attr(miri, ignore = "Miri has no io_uring")]
fn a_ring_that_nobody_may_enter_is_found_out_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(4);
    dir.path().clone_into(&mut config.dir);
    let sandboxed = move || {
        if !forbid(libc::SYS_io_uring_enter) {
            return eprintln!("skipped: no filters of system calls");
        }
        // The second opening needs the lock that the first had.
        for opening in 0..2 {
            let (engine, _) = DiskEngine::open(config.clone()).unwrap();
            let choice = engine.info().engine;
            assert_ne!(choice.kind, EngineKind::IoUring);
            if choice.kind == EngineKind::Threads {
                assert!(choice.reason.contains("seccomp"), "opening {opening}: {}", choice.reason);
            }
            assert!(all_good(&write(&engine, &[(1, 1)])) && is_served(&engine, 1, 1));
            assert!(engine.shutdown(PATIENCE), "opening {opening}");
        }
    };
    std::thread::spawn(sandboxed).join().unwrap();
}

/// A sandbox that closes around a process whose ring is in use.
///
/// Mutation that makes it fail: `is_final` is always false.
#[test]
#[cfg_attr(miri, ignore = "Miri has no io_uring")]
fn a_ring_that_is_forbidden_in_mid_life_is_done_without() {
    let dir = tempfile::tempdir().unwrap();
    let mut few = config(64);
    few.depth = 4;
    let Some(engine) = kernel_ring(few, &dir) else { return };
    let (done, forbidden) = mpsc::channel();
    // Completions run on the ring's thread.
    let mut batch = IoBatch::new(move |outcomes| {
        assert!(all_good(&outcomes));
        done.send(forbid(libc::SYS_io_uring_enter)).unwrap();
    });
    batch.write_buffer(BlockId(0), identity(0), &Arc::new(OwnedBuffer::from_slice(&pattern(0, BLOCK))));
    engine.submit(batch).unwrap();
    if !forbidden.recv_timeout(PATIENCE).unwrap() {
        return eprintln!("skipped: no filters of system calls");
    }
    // More than there are ring slots, some of them beside each other.
    let blocks: Vec<(u32, u64)> =
        (1..40).filter(|slot| slot % 5 != 0).map(|slot| (slot, slot.into())).collect();
    assert!(all_good(&write(&engine, &blocks)));
    for (slot, number) in std::iter::once((0, 0)).chain(blocks) {
        assert!(is_served(&engine, slot, number), "block {number}");
    }
    assert!(engine.flush(PATIENCE).is_ok());
    let (depth, choice) = (engine.info().depth, engine.info().engine);
    assert_eq!((choice.kind, depth), (EngineKind::Threads, 1));
    assert!(choice.reason.contains("seccomp") && choice.reason.contains("in mid-life"), "{}", choice.reason);
    assert!(engine.shutdown(PATIENCE));
}

/// The same while the kernel has requests at all ring slots: it does them, and nobody has to enter
/// the ring to know.
///
/// Mutation that makes it fail: the ring is set up with `defer_taskrun`; `wait_outside` waits for
/// the wake event alone.
#[test]
#[cfg_attr(miri, ignore = "Miri has no io_uring")]
fn requests_that_a_forbidden_ring_has_end_as_others_do() {
    const BYTES: usize = 4 << 20;
    const DEPTH: u32 = 4;
    for straight_bytes in [0, u64::MAX] {
        let dir = tempfile::tempdir().unwrap();
        let mut few = DiskConfig::new("", 8 * DEPTH, BYTES as u64, [7; 16]);
        few.depth = DEPTH as usize;
        // Blocks of two pieces, which go straight or through the ring's buffer.
        few.straight_bytes = straight_bytes;
        let Some(engine) = kernel_ring(few, &dir) else { return };
        let memory = Arc::new(OwnedBuffer::new(2 * BYTES));
        let start = memory.as_slice().as_ptr().cast_mut();
        let write = |slot: u32, told: Box<dyn FnOnce(Vec<OpOutcome>) + Send>| {
            let mut batch = IoBatch::new(told);
            batch.guard(Arc::clone(&memory) as _);
            let piece = |at: usize| (start.wrapping_add(at), BYTES / 2);
            // SAFETY: the batch guards the memory, which nobody writes.
            let fragments = unsafe { IoFragments::from_raw([piece(0), piece(BYTES)]) }.unwrap();
            batch.write(BlockId(slot), identity(slot.into()), fragments);
            engine.submit(batch).unwrap();
        };
        let (done, forbidden) = mpsc::channel();
        write(0, Box::new(move |_| done.send(forbid(libc::SYS_io_uring_enter)).unwrap()));
        // These are at the device by then, or come when it is forbidden.
        let (done, outcomes) = mpsc::channel();
        for slot in 1..=2 * DEPTH {
            let done = done.clone();
            write(2 * slot, Box::new(move |outcomes| done.send(outcomes).unwrap()));
        }
        if !forbidden.recv_timeout(PATIENCE).unwrap() {
            return eprintln!("skipped: no filters of system calls");
        }
        for slot in 1..=2 * DEPTH {
            assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()), "number {slot}");
        }
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(2 * DEPTH) + 1);
        assert!(engine.shutdown(PATIENCE), "nothing is left with the kernel");
    }
}

/// Random writes and reads on few slots, with faults, against what a map remembers.
#[test]
fn random_work_with_faults_agrees_with_a_map() {
    let mut random = Random(42);
    for _ in 0..20 {
        let medium = ring_medium();
        let mut config = config(6);
        config.depth = 1 + random.below(4) as usize;
        let engine = open_ring(config, &medium);
        let mut held: HashMap<u32, u64> = HashMap::new();
        for number in 1..60_u64 {
            let slot = random.below(6) as u32;
            let fault = match random.below(6) {
                0 => Some(DiskFault::Error(ErrorKind::Other)),
                1 => Some(DiskFault::Short(512 * (1 + random.below(15)) as usize)),
                2 => Some(DiskFault::Error(ErrorKind::Interrupted)),
                _ => None,
            };
            let is_write = random.below(2) == 0;
            if let Some(fault) = fault {
                medium.inject(SLOT_FILE, if is_write { Call::Write } else { Call::Read }, 0, 1, fault);
            }
            let fails = fault == Some(DiskFault::Error(ErrorKind::Other));
            if is_write {
                held.remove(&slot);
                if all_good(&write(&engine, &[(slot, number)])) {
                    assert!(!fails);
                    held.insert(slot, number);
                }
            } else if let Some(&number) = held.get(&slot) {
                assert_eq!(is_served(&engine, slot, number), !fails);
            }
            medium.heal();
        }
        for (slot, number) in held {
            assert!(is_served(&engine, slot, number));
        }
    }
}

#[test]
fn a_request_that_fails_fails_only_the_block_whose_fault_it_was() {
    const BLOCKS: usize = 8;
    for fragments in [1, 4] {
        let medium = ring_medium();
        let engine = open_ring(config(BLOCKS as u32), &medium);
        let pool = Pool::new(BLOCKS, fragments);
        let all: Vec<usize> = (0..BLOCKS).collect();
        for &block in &all {
            pool.set(block, &pattern(block as u64, BLOCK));
        }
        assert!(all_good(&pool.submit(&engine, &all, false)));
        assert_eq!(engine.stats().requests, 1, "neighbours go together");
        // The request of all fails, and then one of those of each.
        medium.inject(SLOT_FILE, Call::Read, 0, 2, DiskFault::Error(ErrorKind::Other));
        let outcomes = pool.submit(&engine, &all, true);
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 1, "{outcomes:?}");
        assert_eq!(engine.stats().io_errors, 1);
        // The file ends in the middle of the sixth block.
        medium.edit(SLOT_FILE, |bytes| bytes.truncate(5 * BLOCK + BLOCK / 2));
        for &block in &all {
            pool.set(block, &[0; BLOCK]);
        }
        let outcomes = pool.submit(&engine, &all, true);
        for (block, outcome) in outcomes.iter().enumerate() {
            if block < 5 {
                assert!(outcome.is_ok(), "{outcome:?}");
                assert_eq!(pool.get(block), pattern(block as u64, BLOCK));
            } else {
                let short =
                    matches!(outcome, Err(OpError::Corrupt { cause: SlotCorruption::ShortFile { .. }, .. }));
                assert!(short, "{outcome:?}");
            }
        }
    }
}

/// Mutation that makes it fail: `Queue` tells `joins` of the operations in both directions.
#[test]
fn writes_under_way_do_not_make_requests_of_reads_longer() {
    const WRITES: u32 = 1024;
    const READS: u32 = 128;
    let medium = ring_medium();
    let mut config = config(WRITES + READS);
    config.straight_bytes = 0;
    let engine = open_ring(config, &medium);
    let read_slots: Vec<_> = (WRITES..WRITES + READS).map(|slot| (slot, u64::from(slot))).collect();
    assert!(all_good(&write(&engine, &read_slots)));
    let before = engine.stats().requests;
    let (done, outcomes) = mpsc::channel();
    let batch = || {
        let done = done.clone();
        IoBatch::new(move |outcomes| done.send(outcomes).unwrap())
    };
    medium.hold();
    let buffer = Arc::new(OwnedBuffer::from_slice(&pattern(0, BLOCK)));
    let mut writes = batch();
    for slot in 0..WRITES {
        writes.write_buffer(BlockId(slot), identity(0), &buffer);
    }
    engine.submit(writes).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    let targets: Vec<_> = read_slots.iter().map(|_| ReadTarget::new(BLOCK)).collect();
    let mut reads = batch();
    for (&(slot, number), target) in read_slots.iter().zip(&targets) {
        assert!(reads.read_target(BlockId(slot), identity(number), target));
    }
    engine.submit(reads).unwrap();
    medium.let_go();
    for _ in 0..2 {
        assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()));
    }
    // Of 1 MiB, an eighth of what is under way, and of 512 KiB: so little is under way that none is
    // longer.
    assert_eq!(engine.stats().requests - before, 8 + 2);
}
