//! Damage is found by reading what nobody asked for.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, SLOT_FILE, SimMedium};
use kvbm_disk::{DiskEngine, IoBatch, OpError, OwnedBuffer, Scrubbed, Scrubber, SlotCorruption};
use kvbm_plan::BlockId;
use std::io::ErrorKind;
use std::sync::{Arc, mpsc};

/// One step once nothing else is under way: an outcome is told just before its thread is done with
/// it.
fn step(engine: &DiskEngine, scrubber: &mut Scrubber) -> Scrubbed {
    loop {
        match engine.scrub(scrubber) {
            Scrubbed::Busy => std::thread::yield_now(),
            scrubbed => return scrubbed,
        }
    }
}

/// Mutation that makes it fail: `scrub::judge` does not refute.
#[test]
fn invariant_5_planted_bit_flips_are_found_and_stay_found() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(64), &medium);
    let mut scrubber = Scrubber::default();
    assert!(matches!(step(&engine, &mut scrubber), Scrubbed::Empty));
    // Every second slot, so that the walk has gaps to pass.
    let blocks: Vec<_> = (0..32).map(|number| (2 * number as u32, number)).collect();
    assert!(all_good(&write(&engine, &blocks)));
    engine.flush(PATIENCE).unwrap();
    let mut random = Random(3);
    let planted = [0, 10, 62];
    for slot in planted {
        let bit = u64::from(slot) * BLOCK as u64 * 8 + random.below(BLOCK as u64 * 8);
        medium.edit(SLOT_FILE, |bytes| bytes[bit as usize / 8] ^= 1 << (bit % 8));
    }
    let mut found = Vec::new();
    for _ in 0..32 {
        match step(&engine, &mut scrubber) {
            Scrubbed::Bad { slot, identity: named, bytes, error } => {
                assert_eq!((named, bytes), (identity(u64::from(slot.0 / 2)), BLOCK as u64));
                assert!(matches!(error, OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. }));
                found.push(slot.0);
            }
            Scrubbed::Good { bytes } => assert_eq!(bytes, BLOCK as u64),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found, planted, "one round, in order");
    let stats = engine.stats();
    assert_eq!((stats.scrubbed, stats.scrub_failures, stats.reads), (29, 3, 0));
    for _ in 0..29 {
        assert!(matches!(step(&engine, &mut scrubber), Scrubbed::Good { .. }), "the second round");
    }
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let (_engine, recovered) = open(lazy_config(64), &medium);
    assert_eq!(recovered.quarantined, planted.map(BlockId));
    assert_eq!(recovered.blocks.len(), 29);
}

#[test]
fn a_slot_that_changes_while_it_is_scrubbed_is_not_condemned() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(1, 1)])));
    medium.edit(SLOT_FILE, |bytes| bytes[BLOCK] ^= 1);
    medium.hold();
    std::thread::scope(|scope| {
        let scrubbed = scope.spawn(|| step(&engine, &mut Scrubber::default()));
        assert!(medium.wait_for_held(1, PATIENCE));
        engine.release(&[BlockId(1)]);
        medium.let_go();
        assert!(matches!(scrubbed.join().unwrap(), Scrubbed::Changed { .. }));
    });
    assert_eq!(engine.info().quarantined_slots, 0);
    assert!(all_good(&write(&engine, &[(1, 2)])), "and it is used again");
    assert!(is_served(&engine, 1, 2));
}

/// Mutation that makes it fail: `DiskEngine::scrub` takes the slot for its read.
#[test]
fn neither_a_write_nor_a_read_waits_for_scrubbing() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 1)])));
    medium.hold();
    std::thread::scope(|scope| {
        let scrubbed = scope.spawn(|| step(&engine, &mut Scrubber::default()));
        assert!(medium.wait_for_held(1, PATIENCE));
        let (done, outcomes) = mpsc::channel();
        let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
        let bytes = Arc::new(OwnedBuffer::from_slice(&pattern(2, BLOCK)));
        batch.write_buffer(BlockId(0), identity(2), &bytes);
        engine.submit(batch).unwrap();
        assert!(medium.wait_for_held(2, PATIENCE), "the write is at the device beside it");
        assert!(matches!(engine.scrub(&mut Scrubber::default()), Scrubbed::Busy), "it gives way");
        medium.let_go();
        assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()));
        assert!(matches!(scrubbed.join().unwrap(), Scrubbed::Changed { .. }));
    });
    assert!(is_served(&engine, 0, 2));
}

#[test]
fn a_short_file_is_a_loss_and_a_failing_device_is_neither_that_nor_damage() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(2, 1)])));
    let mut scrubber = Scrubber::default();
    medium.inject(SLOT_FILE, Call::Read, 0, 1, DiskFault::Error(ErrorKind::Other));
    let failed = step(&engine, &mut scrubber);
    assert!(matches!(failed, Scrubbed::Bad { slot: BlockId(2), error: OpError::Io { .. }, .. }));
    assert!(matches!(step(&engine, &mut scrubber), Scrubbed::Good { .. }), "it may have been the cable");
    medium.edit(SLOT_FILE, |bytes| bytes.truncate(2 * BLOCK + BLOCK / 2));
    let Scrubbed::Bad { error: OpError::Corrupt { cause, .. }, .. } = step(&engine, &mut scrubber) else {
        panic!("half a block is no block");
    };
    assert!(matches!(cause, SlotCorruption::ShortFile { .. }), "{cause}");
    assert_eq!((engine.info().quarantined_slots, engine.info().present_blocks), (0, 0));
}

#[test]
fn a_write_that_a_crash_cut_short_is_no_damage_of_the_slot() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 1)])));
    engine.flush(PATIENCE).unwrap();
    let after_crash = medium.crash(1);
    after_crash.edit(SLOT_FILE, |bytes| bytes[7] ^= 1);
    let (engine, recovered) = open(lazy_config(4), &after_crash);
    assert!(!recovered.clean);
    let scrubbed = step(&engine, &mut Scrubber::default());
    assert!(matches!(scrubbed, Scrubbed::Bad { error: OpError::CutShort { .. }, .. }), "{scrubbed:?}");
    assert_eq!((engine.info().quarantined_slots, engine.info().present_blocks), (0, 0));
}
