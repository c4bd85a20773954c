//! What is found after a restart or a crash.

use crate::support::*;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::medium::Medium;
use kvbm_disk::{DiskEngine, IoBatch, OpError, OwnedBuffer, SlotCorruption};
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId};
use std::sync::{Arc, mpsc};
use std::time::Duration;

#[test]
fn a_clean_restart_finds_everything_in_age_order() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(8), &medium);
    for (slot, number) in [(5, 0), (2, 1), (7, 2), (1, 3)] {
        assert!(all_good(&write(&engine, &[(slot, number)])));
    }
    engine.release(&[BlockId(7), BlockId(6), BlockId(99)]);
    engine.quarantine(&[BlockId(1)]);
    engine.quarantine(&[BlockId(3)]);
    drop(engine);
    let (engine, recovered) = open(config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(5, 0), (2, 1)]);
    assert_eq!(recovered.blocks[0].identity, identity(0));
    assert_eq!(recovered.blocks[0].checksum, engine.checksums().of(&identity(0), [&pattern(0, BLOCK)[..]]));
    assert_eq!(recovered.quarantined, [BlockId(1), BlockId(3)]);
    assert_eq!(recovered.dropped, kvbm_disk::Dropped::default());
    assert!(is_served(&engine, 5, 0) && is_served(&engine, 2, 1));
    assert_eq!((engine.info().present_blocks, engine.info().durable_blocks), (2, 2));
}

#[test]
fn a_namespace_is_released_wherever_its_blocks_are() {
    const SLOTS: u32 = 10_000;
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(SLOTS), &medium);
    let other = BlockIdentity { namespace: NamespaceId(2), ..identity(5) };
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    batch.write_buffer(BlockId(4_097), other, &Arc::new(OwnedBuffer::new(BLOCK)));
    engine.submit(batch).unwrap();
    assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()));
    assert!(all_good(&write(&engine, &[(0, 0), (4_096, 1), (9_999, 2)])));
    engine.flush(PATIENCE).unwrap();
    assert!(all_good(&write(&engine, &[(7, 3)])));
    engine.quarantine(&[BlockId(9_999)]);
    assert_eq!([1, 1].map(|namespace| engine.release_namespace(NamespaceId(namespace))), [3, 0]);
    engine.flush(PATIENCE).unwrap();
    let (_, recovered) = open(config(SLOTS), &medium.crash(1));
    assert_eq!(recovered_numbers(&recovered), [(4_097, 5)]);
    assert_eq!(recovered.quarantined, [BlockId(9_999)]);
}

/// A slot file that is not there, or cut, has lost what was in it: nothing is wrong with its slots.
#[test]
fn blocks_of_a_lost_slot_file_are_dropped_and_their_slots_are_good() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(8), &medium);
    let blocks: Vec<_> = (0..8).map(|slot| (slot, u64::from(slot))).collect();
    assert!(all_good(&write(&engine, &blocks)));
    engine.quarantine(&[BlockId(1)]);
    drop(engine);
    let (journal, slots) = (medium.bytes(JOURNAL_FILE), medium.bytes(SLOT_FILE));
    for keep in [0, 3 * BLOCK - 1, 8 * BLOCK] {
        let medium = SimMedium::new();
        medium.edit(JOURNAL_FILE, |bytes| bytes.clone_from(&journal));
        if keep > 0 {
            medium.edit(SLOT_FILE, |bytes| *bytes = slots[..keep].to_vec());
        }
        let there = if keep == 0 {
            vec![]
        } else if keep < 8 * BLOCK {
            vec![0]
        } else {
            vec![0, 2, 3, 4, 5, 6, 7]
        };
        let (engine, recovered) = open(config(8), &medium);
        let lost = 7 - there.len() as u64;
        assert_eq!((recovered.dropped.without_bytes, recovered.quarantined), (lost, vec![BlockId(1)]));
        // Blocks of one batch are recorded as their writes end, in any order.
        let mut found: Vec<u32> = recovered.blocks.iter().map(|block| block.slot.0).collect();
        found.sort_unstable();
        assert_eq!(found, there, "{keep} bytes are left");
        let again = medium.crash(3);
        for slot in (0..8).filter(|&slot| slot != 1) {
            assert_eq!(is_served(&engine, slot, slot.into()), there.contains(&slot));
            assert!(there.contains(&slot) || all_good(&write(&engine, &[(slot, 20)])), "slot {slot}");
        }
        assert_eq!(engine.info().quarantined_slots, 1);
        drop(engine);
        // Power failed right after the opening, when the file had its length back.
        let (engine, _) = open(config(8), &again);
        for slot in (0..8).filter(|&slot| slot != 1) {
            let _served = is_served(&engine, slot, slot.into());
        }
        assert_eq!(engine.info().quarantined_slots, 1, "{keep} bytes are left");
    }
}

/// The same where the file is cut while it is in use: one read tells of all that is gone, before a
/// write brings the length back.
///
/// Mutation that makes it fail: `ops::end_read` does not forget what was cut, or takes the slot out
/// of use.
#[test]
fn blocks_of_a_slot_file_that_is_cut_in_use_are_dropped_and_their_slots_are_good() {
    for ring in [false, true] {
        let medium = SimMedium::new();
        medium.set_direct(ring);
        medium.set_ring(ring);
        let (engine, _) = open(config(8), &medium);
        let blocks: Vec<_> = (0..8).map(|slot| (slot, u64::from(slot))).collect();
        assert!(all_good(&write(&engine, &blocks)));
        engine.quarantine(&[BlockId(1)]);
        engine.flush(PATIENCE).unwrap();
        medium.edit(SLOT_FILE, |bytes| bytes.truncate(3 * BLOCK));
        let error = read(&engine, 5, 5).unwrap_err();
        assert!(matches!(error, OpError::Corrupt { cause: SlotCorruption::ShortFile { .. }, .. }), "{error}");
        assert_eq!((engine.info().present_blocks, engine.info().quarantined_slots), (2, 1));
        // The last slot: the file has its length back.
        assert!(all_good(&write(&engine, &[(7, 17)])));
        for slot in [3, 4, 5, 6] {
            assert!(matches!(read(&engine, slot, slot.into()), Err(OpError::Missing { .. })));
        }
        assert!(is_served(&engine, 0, 0) && is_served(&engine, 2, 2) && is_served(&engine, 7, 17));
        drop(engine);
        let (engine, recovered) = open(config(8), &medium);
        // The blocks of one batch are recorded in the order in which their writes ended.
        let mut numbers = recovered_numbers(&recovered);
        numbers.sort_unstable();
        assert_eq!(numbers, [(0, 0), (2, 2), (7, 17)]);
        assert_eq!((recovered.dropped.without_bytes, engine.info().quarantined_slots), (0, 1));
    }
}

/// Mutation that makes it fail: `open_slots` does not sync the directories.
#[test]
fn what_is_flushed_to_a_slot_file_made_anew_survives_power_loss() {
    let medium = SimMedium::new();
    drop(open(config(4), &medium));
    medium.remove(SLOT_FILE).unwrap();
    medium.sync_dir().unwrap();
    let (engine, _) = open(config(4), &medium);
    assert!(all_good(&write(&engine, &[(2, 2)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
    for seed in 0..8 {
        let (engine, recovered) = open(config(4), &medium.crash(seed));
        assert_eq!(recovered_numbers(&recovered), [(2, 2)]);
        assert!(is_served(&engine, 2, 2));
    }
}

#[test]
fn power_loss_keeps_everything_that_was_flushed() {
    let durable: usize = (0..400).map(crash_and_recover).sum();
    assert!(durable > 400, "{durable} blocks are a weak test");
}

/// Mutation that makes it fail: `commit::work` waits before it has looked at the table.
#[test]
fn what_an_opening_changes_is_committed_and_so_is_what_comes_after_it() {
    let medium = SimMedium::new();
    let mut config = config(64);
    config.commit.interval = Duration::from_millis(2);
    let (engine, _) = open(config.clone(), &medium);
    // The same block twice: of those the opening drops the older, which is a change.
    assert!(all_good(&write(&engine, &[(3, 9)])) && all_good(&write(&engine, &[(0, 9)])));
    drop(engine);
    let killed = medium.crash(1);
    let (engine, recovered) = open(config.clone(), &medium);
    assert_eq!(recovered.dropped.duplicates, 1);
    wait_until(|| engine.stats().commits == 1);
    drop(engine);
    let (engine, recovered) = open(config, &killed);
    assert_eq!(recovered.dropped.duplicates, 1);
    assert!(all_good(&write(&engine, &[(10, 10)])) && all_good(&write(&engine, &[(11, 11)])));
    wait_until(|| engine.durable_blocks() == 3);
    let after = killed.crash(1);
    assert_eq!(recovered_numbers(&open(lazy_config(64), &after).1), [(0, 9), (10, 10), (11, 11)]);
}

/// A slot that was being overwritten at the crash is free; one that went bad is quarantined.
///
/// Mutation that makes it fail: `Table::refute` never takes a slot for unproven, or always; or
/// `open` keeps the mark.
#[test]
fn slots_cut_short_by_a_crash_are_distinguished_from_bad_ones() {
    let medium = SimMedium::new();
    let (engine, recovered) = open(lazy_config(3), &medium);
    assert!(recovered.clean);
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    engine.flush(PATIENCE).unwrap();
    // Overwritten, and never recorded.
    assert!(all_good(&write(&engine, &[(0, 7)])));
    let torn = SimMedium::new();
    for file in [SLOT_FILE, JOURNAL_FILE] {
        torn.edit(file, |bytes| *bytes = medium.bytes(file));
    }
    drop(engine);
    let (engine, recovered) = open(lazy_config(3), &torn);
    assert!(!recovered.clean && recovered.blocks.len() == 3);
    assert!(matches!(read(&engine, 0, 0), Err(OpError::CutShort { slot: BlockId(0) })));
    assert!(matches!(read(&engine, 0, 0), Err(OpError::Missing { .. })));
    assert!(is_served(&engine, 1, 1) && is_served(&engine, 2, 2));
    assert_eq!((engine.stats().cut_short, engine.info().quarantined_slots), (1, 0));
    // What was read well once and is bad later is bad; what is written is trusted.
    torn.edit(SLOT_FILE, |bytes| bytes[BLOCK] ^= 1);
    assert!(matches!(read(&engine, 1, 1), Err(OpError::Corrupt { .. })));
    assert!(all_good(&write(&engine, &[(0, 8)])));
    torn.edit(SLOT_FILE, |bytes| bytes[0] ^= 1);
    assert!(matches!(read(&engine, 0, 8), Err(OpError::Corrupt { .. })));
    drop(engine);

    // After a shutdown there is no excuse.
    let (engine, recovered) = open(lazy_config(3), &torn);
    assert!(recovered.clean);
    torn.edit(SLOT_FILE, |bytes| bytes[2 * BLOCK] ^= 1);
    assert!(matches!(read(&engine, 2, 2), Err(OpError::Corrupt { .. })));
    // The mark is gone as soon as the directory is opened.
    let killed = torn.crash(1);
    drop(engine);
    assert!(!open(lazy_config(3), &killed).1.clean);
    assert!(open(lazy_config(3), &torn).1.clean);
}

/// Mutation that makes it fail: `Table::refute_taken` does not look at the generation.
#[test]
fn a_slot_cut_short_by_a_crash_is_free_after_two_reads_at_a_time() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(3), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    engine.flush(PATIENCE).unwrap();
    let torn = medium.crash(1);
    torn.edit(SLOT_FILE, |bytes| bytes[0] ^= 1);
    let (engine, _) = open(lazy_config(3), &torn);
    torn.hold();
    std::thread::scope(|scope| {
        let reads = [(); 2].map(|()| scope.spawn(|| read(&engine, 0, 0)));
        assert!(torn.wait_for_held(2, PATIENCE));
        torn.let_go();
        for read in reads {
            let outcome = read.join().unwrap();
            assert!(matches!(outcome, Err(OpError::CutShort { slot: BlockId(0) })), "{outcome:?}");
        }
    });
    assert_eq!((engine.stats().cut_short, engine.info().quarantined_slots), (2, 0));
    assert!(all_good(&write(&engine, &[(0, 7)])) && is_served(&engine, 0, 7));
}

#[test]
fn killed_without_a_last_commit() {
    let from = tempfile::tempdir().unwrap();
    let to = tempfile::tempdir().unwrap();
    let mut config = lazy_config(8);
    config.dir = from.path().to_owned();
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 3);
    assert!(all_good(&write(&engine, &[(3, 3)])));
    for entry in std::fs::read_dir(from.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    config.dir = to.path().to_owned();
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered.blocks.len(), 3);
    assert!((0..3).all(|number| is_served(&engine, number as u32, number)));
    assert!(matches!(read(&engine, 3, 3), Err(OpError::Missing { .. })));
}

#[test]
fn of_two_copies_the_newest_wins() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(4), &medium);
    assert!(all_good(&write(&engine, &[(3, 9)])));
    assert!(all_good(&write(&engine, &[(0, 9)])));
    assert!(is_served(&engine, 3, 9) && is_served(&engine, 0, 9));
    drop(engine);
    for dropped in [1, 0] {
        let (engine, recovered) = open(config(4), &medium);
        assert_eq!(recovered_numbers(&recovered), [(0, 9)]);
        assert_eq!(recovered.dropped.duplicates, dropped);
        assert!(matches!(read(&engine, 3, 9), Err(OpError::Missing { .. })));
    }
}

#[test]
fn capacity_may_change() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(4), &medium);
    // Several records of a slot are one block, or none.
    for number in [3, 13, 23] {
        assert!(all_good(&write(&engine, &[(0, 0), (2, 2), (3, number)])));
        engine.flush(PATIENCE).unwrap();
    }
    engine.release(&[BlockId(2)]);
    drop(engine);
    let (engine, recovered) = open(config(2), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
    assert_eq!(recovered.dropped.beyond_capacity, 1);
    drop(engine);
    assert_eq!(medium.bytes(SLOT_FILE).len(), 2 * BLOCK);
    let (engine, recovered) = open(config(9), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
    assert!(all_good(&write(&engine, &[(8, 8)])) && is_served(&engine, 8, 8));
}
