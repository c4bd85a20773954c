//! An engine whose bytes something else moves than system calls of its own.

use crate::encrypted::encryption;
use crate::fake_io::{FakeIo, Fate};
use crate::io::{Scattered, read_scattered, run, write_scattered};
use crate::support::*;
use kvbm_disk::fault::{SLOT_FILE, SimMedium};
use kvbm_disk::{
    DiskConfig, DiskEngine, EngineKind, EngineMode, IoBatch, IoMemory, OpError, OpenError, OwnedBuffer,
    Recovered, SlotCorruption,
};
use kvbm_plan::BlockId;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, mpsc};
use std::time::Duration;

fn config_over(io: &FakeIo, dir: &Path, slots: u32) -> DiskConfig {
    let mut config = config(slots);
    (config.dir, config.engine) = (dir.to_owned(), EngineMode::Custom);
    config.slot_io = Some(Arc::new(io.clone()));
    config
}

fn open_over(io: &FakeIo, dir: &Path, slots: u32) -> (DiskEngine, Recovered) {
    DiskEngine::open(config_over(io, dir, slots)).unwrap()
}

fn known(buffer: &Scattered) -> IoMemory {
    let mut memory = buffer.memory.lock().unwrap();
    let bytes = memory.as_mut_slice();
    let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
    // SAFETY: the memory stays allocated as long as its owner.
    unsafe { IoMemory::new(start, len, Arc::clone(&buffer.memory) as _) }
}

/// Registered memory goes as it is, all other through the buffer of a thread, which is registered:
/// the fake refuses everything else.
#[test]
fn registered_memory_goes_straight_and_other_memory_through_the_buffer() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let mut config = config_over(&io, dir.path(), 4);
    config.straight_bytes = 0;
    let (engine, _) = DiskEngine::open(config).unwrap();
    let choice = engine.info().engine;
    assert_eq!((choice.kind, choice.kind.name()), (EngineKind::Custom("fake"), "fake"));
    assert!(choice.reason.starts_with("system calls of a test"), "{}", choice.reason);
    // One request for each thread's probe.
    assert_eq!(io.state().requests, [1, 1]);

    let source = Scattered::new(&[4096, 4096], 4096, &pattern(1, BLOCK));
    write_scattered(&engine, 1, 1, &source).unwrap();
    assert_eq!((engine.stats().bounced, io.state().requests.last().copied()), (1, Some(1)));

    engine.register_memory(known(&source));
    assert_eq!(engine.info().engine.registered_bytes, 4 * 4096);
    write_scattered(&engine, 2, 1, &source).unwrap();
    assert_eq!((engine.stats().bounced, io.state().requests.last().copied()), (1, Some(2)));
    // Registered and not aligned.
    let odd = Scattered::new(&[100, BLOCK - 100], 4, &pattern(2, BLOCK));
    engine.register_memory(known(&odd));
    write_scattered(&engine, 3, 2, &odd).unwrap();
    let direct = engine.info().engine.alignment > 1;
    assert_eq!(engine.stats().bounced, if direct { 2 } else { 1 });

    io.state().registers = false;
    let target = Scattered::new(&[4096, 4096], 0, &[]);
    engine.register_memory(known(&target));
    assert_eq!(engine.info().engine.unregistered.as_deref(), Some("there is no room for it"));
    for (slot, number) in [(1, 1), (2, 1), (3, 2)] {
        read_scattered(&engine, slot, number, &target).unwrap();
        assert_eq!(target.gather(), pattern(number, BLOCK), "slot {slot}");
    }
}

#[test]
fn blocks_come_back_after_a_restart_with_any_engine() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let (dirs, more) = (tempfile::tempdir().unwrap(), 200_u32);
    let mut ours = config_over(&io, dir.path(), more);
    ours.more_dirs = vec![dirs.path().to_owned()];
    for encryption in [None, Some(encryption(1))] {
        ours.namespace = [u8::from(encryption.is_some()); 16];
        ours.dir = dir.path().join(format!("{}", encryption.is_some()));
        ours.more_dirs = vec![dirs.path().join(format!("{}", encryption.is_some()))];
        ours.encryption = encryption;
        let (engine, _) = DiskEngine::open(ours.clone()).unwrap();
        let blocks: Vec<_> = (0..more).map(|number| (number, u64::from(number))).collect();
        assert!(all_good(&write(&engine, &blocks)));
        assert!(engine.shutdown(PATIENCE));
        drop(engine);
        let mut theirs = ours.clone();
        (theirs.engine, theirs.slot_io) = (EngineMode::Auto, None);
        for config in [ours.clone(), theirs] {
            let (engine, recovered) = DiskEngine::open(config).unwrap();
            assert!(recovered.clean && recovered.blocks.len() == blocks.len());
            assert!(blocks.iter().all(|&(slot, number)| is_served(&engine, slot, number)));
        }
    }
}

#[test]
fn what_the_lane_says_of_its_moves_is_compared() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let (engine, _) = open_over(&io, dir.path(), 4);
    io.fates(&[Fate::Fail]);
    let error = write(&engine, &[(1, 1)]).remove(0).unwrap_err();
    assert!(
        matches!(&error, OpError::Io { op: "write", slot: BlockId(1), at: 0, message, .. } if message == "the fake fails"),
        "{error}"
    );
    assert!(matches!(read(&engine, 1, 1), Err(OpError::Missing { .. })), "what failed is not there");

    // A short move goes on; half a unit of direct I/O counts as nothing.
    io.fates(&[Fate::Short(4096), Fate::Short(100)]);
    assert!(all_good(&write(&engine, &[(1, 1)])));
    assert!(engine.stats().continued >= 1);
    io.fates(&[Fate::Short(4096)]);
    assert!(is_served(&engine, 1, 1));
    io.fates(&[Fate::TooMuch]);
    let error = read(&engine, 1, 1).unwrap_err();
    assert!(error.to_string().contains("8193 bytes moved, 8192 asked for"), "{error}");
    assert!(is_served(&engine, 1, 1), "a failed read leaves a good slot good");

    io.fates(&[Fate::WrongByte]);
    let error = read(&engine, 1, 1).unwrap_err();
    assert!(matches!(&error, OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. }), "{error}");
    assert!(matches!(read(&engine, 1, 1), Err(OpError::Quarantined { .. })));
    let stats = engine.stats();
    assert_eq!((stats.io_errors, stats.corrupt_checksum), (2, 1));
}

#[test]
fn a_file_that_was_cut_is_noticed() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let (engine, _) = open_over(&io, dir.path(), 4);
    assert!(all_good(&write(&engine, &[(0, 0), (3, 3)])));
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join(SLOT_FILE)).unwrap();
    file.set_len(2 * BLOCK as u64).unwrap();
    let error = read(&engine, 3, 3).unwrap_err();
    assert!(matches!(&error, OpError::Corrupt { cause: SlotCorruption::ShortFile { .. }, .. }), "{error}");
    assert!(is_served(&engine, 0, 0));
}

/// Mutation that makes it fail: `take` finishes the job before the lane has returned.
#[test]
fn a_move_that_does_not_end_keeps_its_memory_and_the_directory() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let (engine, _) = open_over(&io, dir.path(), 4);
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1)])));
    io.fates(&[Fate::Hang]);
    let target = Scattered::new(&[BLOCK], 0, &[]);
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    batch.guard(Arc::clone(&target.memory) as _);
    batch.read(BlockId(0), identity(0), target.fragments());
    engine.submit(batch).unwrap();
    wait_until(|| io.state().hanging == 1);
    // The other thread goes on.
    assert!(is_served(&engine, 1, 1));
    assert!(!engine.shutdown(Duration::from_millis(50)));
    assert!(outcomes.try_recv().is_err());
    assert_eq!(Arc::strong_count(&target.memory), 2, "the batch holds its memory");
    std::thread::scope(|scope| {
        scope.spawn(|| drop(engine));
        let busy = DiskEngine::open(config_over(&FakeIo::new(), dir.path(), 4)).map(drop);
        assert!(matches!(busy, Err(OpenError::Busy { .. })), "{busy:?}");
        io.let_go();
    });
    assert!(outcomes.recv_timeout(PATIENCE).unwrap()[0].is_ok());
    assert_eq!((target.gather(), Arc::strong_count(&target.memory)), (pattern(0, BLOCK), 1));
    let (engine, _) = open_over(&FakeIo::new(), dir.path(), 4);
    assert!(is_served(&engine, 0, 0));
}

#[test]
fn what_cannot_be_used_is_refused_at_the_opening() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let refused = |io: &FakeIo| {
        let error = DiskEngine::open(config_over(io, dir.path(), 4)).unwrap_err();
        assert!(matches!(error, OpenError::NoEngine { engine: EngineKind::Custom("fake"), .. }), "{error}");
        error.to_string()
    };
    for lanes in [0, 1] {
        io.state().lanes = Some(lanes);
        let error = refused(&io);
        assert!(error.contains("the engine fake is not possible here"), "{error}");
        assert!(error.contains("no lane is left; configure the engine auto"), "{error}");
    }
    let probes = [
        (Fate::Fail, "a probe failed: the fake fails"),
        (Fate::Short(100), "a probe read 100 of 4096 bytes"),
    ];
    for (fate, expected) in probes {
        // One of its own: another thread of the engine before may still probe.
        let io = FakeIo::new();
        io.fates(&[fate]);
        let error = refused(&io);
        assert!(error.contains(expected), "{error}");
    }
    io.state().lanes = None;
    drop(open_over(&io, dir.path(), 4));

    let mut without = config(1);
    (without.engine, without.slot_io) = (EngineMode::Custom, Some(Arc::new(io) as _));
    let error = DiskEngine::open_on(without.clone(), SimMedium::new().as_medium()).unwrap_err().to_string();
    assert!(error.contains("the medium has no file descriptor"), "{error}");
    without.engine = EngineMode::Auto;
    let error = DiskEngine::open_on(without, SimMedium::new().as_medium()).unwrap_err().to_string();
    assert!(error.contains("slot_io is given: give it with the engine Custom"), "{error}");
}

/// A full disk shows in a short write alone where space is not reserved.
#[test]
fn what_hides_short_writes_needs_reserved_space() {
    for (hides, reserves, expected) in [
        (true, false, "this file system does not reserve the space of slot files (fallocate)"),
        // They get further, to what this medium lacks.
        (true, true, "the medium has no file descriptor"),
        (false, false, "the medium has no file descriptor"),
    ] {
        let (io, medium) = (FakeIo::new(), SimMedium::new());
        io.state().hides_short_writes = hides;
        medium.set_reserves(reserves);
        let mut config = config(1);
        (config.engine, config.slot_io) = (EngineMode::Custom, Some(Arc::new(io) as _));
        let error = DiskEngine::open_on(config, medium.as_medium()).unwrap_err().to_string();
        assert!(error.contains(expected), "hides {hides}, reserves {reserves}: {error}");
    }
}

#[test]
fn an_engine_that_follows_reads_through_it() {
    let (io, dir) = (FakeIo::new(), tempfile::tempdir().unwrap());
    let (writer, _) = open_over(&io, dir.path(), 4);
    assert!(all_good(&write(&writer, &[(2, 2)])));
    assert!(writer.flush(PATIENCE).is_ok());
    let other = FakeIo::new();
    let (reader, recovered) = DiskEngine::follow(config_over(&other, dir.path(), 4)).unwrap();
    assert_eq!(recovered.blocks.len(), 1);
    assert!(is_served(&reader, 2, 2));
    assert_eq!(other.state().requests.len(), 3, "two probes and a read");
    let outcomes = run(&reader, |batch| {
        batch.write_buffer(BlockId(3), identity(3), &Arc::new(OwnedBuffer::from_slice(&pattern(3, BLOCK))));
    });
    assert_eq!((outcomes[0].as_ref().unwrap().bytes, other.state().requests.len()), (0, 3));
}
