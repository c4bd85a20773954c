//! Invariants 1, 3 and 5 of the design, as far as the disk keeps them.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, SLOT_FILE, SimMedium};
use kvbm_disk::{DiskEngine, IoBatch, OpError, OwnedBuffer, ReadTarget, SlotCorruption};
use kvbm_plan::{BlockId, FailureKind};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};

/// Mutation that makes it fail: `ops::read` takes every checksum for the right one; or
/// `Table::take_dirty` leaves quarantined slots out.
#[test]
fn invariant_5_a_thousand_random_bit_flips_are_never_served() {
    const SLOTS: u64 = 250;
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(SLOTS as u32);
    config.dir = dir.path().to_owned();
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    let blocks: Vec<_> = (0..SLOTS).map(|number| (number as u32, number)).collect();
    assert!(all_good(&write(&engine, &blocks)));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, SLOTS);

    let file = OpenOptions::new().read(true).write(true).open(dir.path().join(SLOT_FILE)).unwrap();
    let mut random = Random(1);
    let mut damaged = std::collections::BTreeMap::<u64, Vec<u64>>::new();
    for _ in 0..1000 {
        let bit = random.below(SLOTS * BLOCK as u64 * 8);
        let mut byte = [0];
        file.read_exact_at(&mut byte, bit / 8).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << (bit % 8))], bit / 8).unwrap();
        damaged.entry(bit / 8 / BLOCK as u64).or_default().push(bit);
    }
    file.sync_all().unwrap();
    // Two flips of one bit undo each other.
    damaged.retain(|_, bits| {
        bits.sort_unstable();
        bits.chunk_by(|a, b| a == b).any(|same| same.len() % 2 == 1)
    });
    for number in 0..SLOTS {
        assert_eq!(
            is_served(&engine, number as u32, number),
            !damaged.contains_key(&number),
            "block {number}"
        );
    }
    assert_eq!(engine.stats().corrupt_checksum, damaged.len() as u64);
    assert_eq!(engine.info().quarantined_slots, damaged.len() as u64);
    assert!(damaged.len() > 200);

    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered.quarantined.len(), damaged.len());
    assert_eq!(recovered.blocks.len() as u64, SLOTS - damaged.len() as u64);
    let first = *damaged.keys().next().unwrap();
    assert!(matches!(read(&engine, first as u32, first), Err(OpError::Quarantined { .. })));
    assert!(matches!(write(&engine, &[(first as u32, first)])[0], Err(OpError::Quarantined { .. })));
}

/// Mutation that makes it fail: `ops::read` takes every checksum for the right one.
#[test]
fn invariant_5_swapped_slots_are_never_served() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    medium.edit(SLOT_FILE, |bytes| {
        let (first, second) = bytes.split_at_mut(BLOCK);
        first.swap_with_slice(&mut second[..BLOCK]);
    });
    for slot in [0, 1] {
        let error = read(&engine, slot, u64::from(slot)).unwrap_err();
        assert!(matches!(error, OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. }), "{error}");
    }
    assert!(is_served(&engine, 2, 2));
    assert_eq!((engine.stats().corrupt_checksum, engine.info().quarantined_slots), (2, 2));
}

/// Mutation that makes it fail: `Table::begin_read` does not compare identities; or `ops::read`
/// takes every checksum for the right one.
#[test]
fn invariant_5_a_stale_slot_is_never_served() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    let stale = medium.bytes(SLOT_FILE);
    assert!(all_good(&write(&engine, &[(0, 1)])));

    // The caller's index is stale: the slot itself is good, and stays so.
    let error = read(&engine, 0, 0).unwrap_err();
    let OpError::Corrupt { cause: SlotCorruption::WrongIdentity { found }, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(found, identity(1));
    assert!(is_served(&engine, 0, 1));

    // The device went back to an earlier write.
    medium.edit(SLOT_FILE, |bytes| *bytes = stale);
    let error = read(&engine, 0, 1).unwrap_err();
    assert!(matches!(error, OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. }), "{error}");
    assert_eq!((engine.stats().corrupt_identity, engine.stats().corrupt_checksum), (1, 1));
    assert_eq!(engine.info().quarantined_slots, 1);
}

/// Mutation that makes it fail: `ops::read` takes the end of the file for an error of the device;
/// or `Progress` takes an end within a unit of direct I/O for a device without progress.
#[test]
fn invariant_5_a_truncated_file_is_never_served() {
    for (direct, ring) in [(false, false), (true, false), (true, true)] {
        for (slot, gone) in [(1, BLOCK - 700), (2, BLOCK)] {
            let medium = SimMedium::new();
            medium.set_direct(direct);
            medium.set_ring(ring);
            let (engine, _) = open(config(3), &medium);
            assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
            medium.edit(SLOT_FILE, |bytes| bytes.truncate(BLOCK + 700));
            assert!(is_served(&engine, 0, 0));
            let error = read(&engine, slot, u64::from(slot)).unwrap_err();
            let expected = SlotCorruption::ShortFile { missing: gone as u64 };
            assert!(matches!(error, OpError::Corrupt { cause, .. } if cause == expected), "{error}");
            assert_eq!((engine.stats().corrupt_short_file, error.kind()), (1, FailureKind::Missing));
        }
    }
}

/// Mutation that makes it fail: `ops::read` takes every checksum for the right one.
#[test]
fn invariant_5_lost_and_misdirected_io_is_never_served() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(8), &medium);
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1)])));
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Misdirect(BLOCK as u64));
    assert!(!is_served(&engine, 0, 0));
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Lose);
    assert!(!is_served(&engine, 1, 1));
    medium.inject(SLOT_FILE, Call::Write, 0, 1, DiskFault::Lose);
    assert!(all_good(&write(&engine, &[(2, 2)])));
    assert!(!is_served(&engine, 2, 2));
    // The misdirected write also destroys a neighbour.
    assert!(all_good(&write(&engine, &[(4, 4)])));
    medium.inject(SLOT_FILE, Call::Write, 0, 1, DiskFault::Misdirect(BLOCK as u64));
    assert!(all_good(&write(&engine, &[(3, 3)])));
    assert!(!is_served(&engine, 3, 3));
    assert!(!is_served(&engine, 4, 4));
    assert_eq!(engine.stats().corrupt_checksum, 5);
}

/// Mutation that makes it fail: `ops::write` gives `Table::end_write` the content whatever came of
/// the write.
#[test]
fn invariant_1_a_failed_write_registers_nothing() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.inject(SLOT_FILE, Call::Write, 0, 1, DiskFault::Error(std::io::ErrorKind::Other));
    let error = write(&engine, &[(0, 1)]).remove(0).unwrap_err();
    assert!(matches!(error, OpError::Io { op: "write", slot: BlockId(0), at: 0, .. }), "{error}");
    for number in [0, 1] {
        assert!(matches!(read(&engine, 0, number), Err(OpError::Missing { .. })));
    }
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 0);
    drop(engine);
    assert!(open(config(2), &medium).1.blocks.is_empty());
}

/// Mutation that makes it fail: `Executor::submit` drops the guards of the batch.
#[test]
fn invariant_3_the_engine_owns_the_memory_until_the_hardware_is_done() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(2), &medium);
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let source = Arc::new(OwnedBuffer::from_slice(&pattern(5, BLOCK)));
    let alive = Arc::downgrade(&source);
    let seen_in_completion = alive.clone();
    let mut batch = IoBatch::new(move |outcomes| {
        done.send((outcomes, seen_in_completion.upgrade().is_some())).unwrap();
    });
    batch.write_buffer(BlockId(1), identity(5), &source);
    let handle = engine.submit(batch).unwrap();
    drop(source);
    assert!(medium.wait_for_held(1, PATIENCE));
    // The caller is gone, and a started operation is not cancelled: the memory must stay.
    handle.cancel();
    assert!(alive.upgrade().is_some());
    assert!(outcomes.try_recv().is_err());
    medium.let_go();
    let (outcomes, held) = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(all_good(&outcomes) && !held);
    assert!(is_served(&engine, 1, 5));
}

/// Mutation that makes it fail: `Executor::submit` drops the guards of the batch.
#[test]
fn invariant_3_dropping_the_engine_leaves_a_stuck_operation_its_memory() {
    let medium = SimMedium::new();
    let mut config = config(4);
    config.threads = 1;
    config.drop_deadline = std::time::Duration::from_millis(50);
    let (engine, _) = open(config, &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.hold();
    let (done, outcomes) = mpsc::channel();
    let target = ReadTarget::new(BLOCK);
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    assert!(batch.read_target(BlockId(0), identity(0), &target));
    assert!(batch.read_target(BlockId(0), identity(0), &ReadTarget::new(BLOCK)));
    engine.submit(batch).unwrap();
    assert!(medium.wait_for_held(1, PATIENCE));
    drop(engine);
    // Still the engine's, although the engine is gone.
    let target = target.into_buffer().unwrap_err();
    assert!(outcomes.try_recv().is_err());
    medium.let_go();
    let outcomes: Vec<_> = outcomes.recv_timeout(PATIENCE).unwrap();
    assert!(outcomes[0].is_ok());
    assert!(matches!(outcomes[1], Err(OpError::ShuttingDown { .. })));
    assert_eq!(target.into_buffer().unwrap().as_slice(), pattern(0, BLOCK));
}
