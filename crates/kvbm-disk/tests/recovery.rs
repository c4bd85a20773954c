//! What is found after a restart, a crash, and in directories that are not ours.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod support;

use kvbm_disk::fault::{Call, Fault, JOURNAL_FILE, JOURNAL_TEMP_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::medium::{Medium, OpenFile};
use kvbm_disk::{DiskEngine, FlushError, FormatError, IoBatch, OpError, OpenError, OwnedBuffer, offline};
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId};
use proptest::prelude::*;
use std::io::ErrorKind;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use support::*;

const HEADER: usize = 4096;
const RECORD: usize = 80;

#[test]
fn a_clean_restart_finds_everything_in_age_order() {
    let medium = SimMedium::new();
    let (engine, _) = open(config(8), &medium);
    for (slot, number) in [(5, 0), (2, 1), (7, 2), (1, 3)] {
        assert!(all_good(&write(&engine, &[(slot, number)])));
    }
    engine.release(&[BlockId(7), BlockId(6), BlockId(99)]);
    engine.quarantine(BlockId(1));
    engine.quarantine(BlockId(3));
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
    engine.quarantine(BlockId(9_999));
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
    engine.quarantine(BlockId(1));
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
        let found: Vec<u32> = recovered.blocks.iter().map(|block| block.slot.0).collect();
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
    assert!(all_good(&write(&engine, &[(10, 10), (11, 11)])));
    wait_until(|| engine.durable_blocks() == 3);
    let after = killed.crash(1);
    assert_eq!(recovered_numbers(&open(lazy_config(64), &after).1), [(0, 9), (10, 10), (11, 11)]);
}

/// A slot that was being overwritten at the crash is free; one that went bad is quarantined.
///
/// Mutation that makes it fail: `Table::refute` never takes a slot for unproven, or always; or `open` keeps the mark.
#[test]
fn slots_cut_short_by_a_crash_are_told_from_bad_ones() {
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
fn a_torn_tail_is_cut_and_a_damaged_middle_skipped() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(8), &medium);
    for number in 0..4 {
        assert!(all_good(&write(&engine, &[(number as u32, number)])));
        engine.flush(PATIENCE).unwrap();
    }
    drop(engine);
    medium.edit(JOURNAL_FILE, |bytes| {
        bytes[HEADER + RECORD + 20] ^= 1;
        bytes.truncate(HEADER + 4 * RECORD - 1);
    });
    let (engine, recovered) = open(lazy_config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0), (2, 2)]);
    assert_eq!(
        (recovered.dropped.damaged_records, recovered.dropped.torn_tail_bytes),
        (1, RECORD as u64 - 1)
    );
    // What is appended now stands where the torn record stood.
    assert!(all_good(&write(&engine, &[(5, 5)])));
    drop(engine);
    let (_, recovered) = open(lazy_config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0), (2, 2), (5, 5)]);
    assert_eq!(recovered.dropped.torn_tail_bytes, 0);
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
    assert!(all_good(&write(&engine, &[(0, 0), (3, 3)])));
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

#[test]
fn a_directory_is_looked_at_verified_and_mended_offline() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(8);
    dir.path().clone_into(&mut config.dir);
    config.geometry = b"what=test".to_vec();
    let quiet = &mut |_: u64, _: u64| ();
    let error = offline::inspect(&[dir.path().to_owned()]).unwrap_err();
    assert!(matches!(error, OpenError::NoJournal { .. }), "{error}");
    assert!(offline::verify(&[dir.path().to_owned()], quiet).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "looking creates nothing");

    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    // A chain of four, and one whose parent is not there.
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2), (3, 3), (4, 6)])));
    engine.flush(PATIENCE).unwrap();
    let open = offline::inspect(&[dir.path().to_owned()]).unwrap();
    assert_eq!((open.blocks, open.orphans, open.clean), (5, 1, false));
    assert_eq!(open.owner, Some(format!("process {}", std::process::id())));
    assert!(matches!(offline::verify(&[dir.path().to_owned()], quiet), Err(OpenError::Busy { .. })));
    drop(engine);

    let before = std::fs::read(dir.path().join(JOURNAL_FILE)).unwrap();
    let mut steps = Vec::new();
    let found = offline::verify(&[dir.path().to_owned()], &mut |done, all| steps.push((done, all))).unwrap();
    assert_eq!((found.verified, found.damaged.len(), found.inspection.clean), (5, 0, true));
    assert_eq!((found.inspection.geometry, found.inspection.num_slots), (b"what=test".to_vec(), 8));
    assert_eq!(steps.last(), Some(&(5, 5)));
    let slots = dir.path().join(SLOT_FILE);
    let mut bytes = std::fs::read(&slots).unwrap();
    bytes[BLOCK + 9] ^= 1;
    std::fs::write(&slots, bytes).unwrap();
    let found = offline::verify(&[dir.path().to_owned()], quiet).unwrap();
    assert_eq!((found.verified, found.damaged), (4, vec![BlockId(1)]));
    assert!(std::fs::read(dir.path().join(JOURNAL_FILE)).unwrap() == before, "nothing was changed");

    let repair = offline::repair(&[dir.path().to_owned()], quiet).unwrap();
    assert_eq!(repair.found.damaged, [BlockId(1)]);
    // Its two descendants go too, and the one that never had a parent.
    assert_eq!((repair.quarantined, repair.freed), (1, 3));
    let left = offline::inspect(&[dir.path().to_owned()]).unwrap();
    assert_eq!((left.blocks, left.orphans, left.quarantined_slots, left.clean), (1, 0, 1, true));
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
    assert!(is_served(&engine, 0, 0));
    drop(engine);
    std::fs::remove_file(&slots).unwrap();
    let lost = offline::inspect(&[dir.path().to_owned()]).unwrap();
    assert_eq!((lost.blocks, lost.dropped.beyond_capacity), (0, 5), "records of blocks");
    let error = offline::verify(&[dir.path().to_owned()], quiet).unwrap_err().to_string();
    assert!(error.contains("restore the file") && error.contains(slots.to_str().unwrap()), "{error}");
}

#[test]
fn foreign_directories_are_refused_and_left_alone() {
    let medium = SimMedium::new();
    let mut ours = config(4);
    ours.geometry = b"rank 0 of 2".to_vec();
    let (engine, _) = open(ours.clone(), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    drop(engine);
    let refuse = |config: &kvbm_disk::DiskConfig, names: &[&str]| {
        let before = (medium.bytes(JOURNAL_FILE), medium.bytes(SLOT_FILE));
        let error = DiskEngine::open_on(config.clone(), medium.as_medium()).unwrap_err();
        for name in names {
            assert!(error.to_string().contains(name), "{error} names {name}");
        }
        assert!(before == (medium.bytes(JOURNAL_FILE), medium.bytes(SLOT_FILE)));
        error
    };
    let mut other = ours.clone();
    other.namespace = [8; 16];
    refuse(&other, &["0808", "0707", "another directory"]);
    other = ours.clone();
    other.block_bytes -= 1;
    refuse(&other, &["block_bytes = 8192", "8191", "another directory"]);
    other = ours.clone();
    other.geometry = b"rank 1 of 2".to_vec();
    refuse(&other, &["rank 0 of 2", "rank 1 of 2"]);

    let good = medium.bytes(JOURNAL_FILE);
    medium.edit(JOURNAL_FILE, |bytes| bytes[8] = 3);
    let error = refuse(&ours, &["version 3", "reads 2", "clear"]);
    assert!(matches!(error, OpenError::Format { source: FormatError::Version { found: 3, .. }, .. }));
    medium.edit(JOURNAL_FILE, |bytes| bytes[0] = b'X');
    refuse(&ours, &["another directory"]);
    medium.edit(JOURNAL_FILE, |bytes| bytes.truncate(100));
    refuse(&ours, &["does not start"]);
    medium.edit(JOURNAL_FILE, |bytes| {
        bytes.clone_from(&good);
        bytes[40] ^= 1;
    });
    refuse(&ours, &["header is damaged"]);
    medium.edit(JOURNAL_FILE, |bytes| bytes.clone_from(&good));
    assert_eq!(open(ours, &medium).1.blocks.len(), 1);
}

#[test]
fn one_engine_per_directory() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(2);
    config.dir = dir.path().to_owned();
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    let error = DiskEngine::open(config.clone()).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    drop(engine);
    assert!(DiskEngine::open(config).is_ok());
}

#[test]
fn compaction_keeps_the_state_and_bounds_the_journal() {
    let medium = SimMedium::new();
    let mut config = lazy_config(4);
    config.compact_slack_records = 3;
    let (engine, _) = open(config.clone(), &medium);
    for number in 0..40 {
        assert!(all_good(&write(&engine, &[((number % 3) as u32, number)])));
        if number == 30 {
            engine.quarantine(BlockId(3));
        }
        engine.flush(PATIENCE).unwrap();
        assert!(medium.bytes(JOURNAL_FILE).len() <= HEADER + (4 + 3) * RECORD);
    }
    assert!(engine.stats().compactions >= 3);
    drop(engine);
    let (_, recovered) = open(config, &medium);
    assert_eq!(recovered_numbers(&recovered), [(1, 37), (2, 38), (0, 39)]);
    assert_eq!(recovered.quarantined, [BlockId(3)]);
}

#[test]
fn an_entry_takes_less_than_a_hundred_bytes_however_often_it_was_replaced() {
    const SLOTS: u32 = 500;
    let medium = SimMedium::new();
    let mut config = lazy_config(SLOTS);
    config.compact_slack_records = 10;
    config.queue_depth = SLOTS as usize;
    let (engine, _) = open(config, &medium);
    for round in 0..6 {
        for part in 0..10 {
            let slots = (part * 50..(part + 1) * 50).map(|slot| (slot, u64::from(slot + round * SLOTS)));
            assert!(all_good(&write(&engine, &slots.collect::<Vec<_>>())));
            engine.flush(PATIENCE).unwrap();
            if round > 0 {
                let entries = medium.bytes(JOURNAL_FILE).len() - HEADER;
                assert!(entries <= 100 * SLOTS as usize, "{} bytes an entry", entries / SLOTS as usize);
            }
        }
    }
    assert!((5..=50).contains(&engine.stats().compactions), "{}", engine.stats().compactions);
}

#[test]
fn a_failed_journal_is_replaced_and_nothing_is_called_durable_before() {
    let calls = [(JOURNAL_FILE, Call::Write), (JOURNAL_FILE, Call::Sync), (JOURNAL_TEMP_FILE, Call::Rename)];
    let faults = [Fault::Error(ErrorKind::StorageFull), Fault::Panic];
    for ((file, call), fault) in calls.into_iter().flat_map(|call| faults.map(|fault| (call, fault))) {
        let medium = SimMedium::new();
        let mut config = lazy_config(4);
        config.compact_slack_records = if call == Call::Rename { 0 } else { 100 };
        let (engine, _) = open(config.clone(), &medium);
        assert!(all_good(&write(&engine, &[(0, 0)])));
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
        medium.inject(file, call, 0, 1, fault);
        for number in 1..9 {
            assert!(all_good(&write(&engine, &[(1, number)])));
            match engine.flush(PATIENCE) {
                Err(FlushError::Io { message, durable_blocks }) => {
                    assert!(message.contains("journal") && durable_blocks == 1, "{message}");
                }
                outcome => assert_eq!(outcome.unwrap().durable_blocks, 2),
            }
        }
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 2);
        assert_eq!(engine.stats().commit_failures, 1, "{file} {call:?} {fault:?}");
        let after = medium.crash(1);
        drop(engine);
        let (engine, recovered) = open(config, &after);
        assert_eq!(recovered_numbers(&recovered), [(0, 0), (1, 8)]);
        assert!(is_served(&engine, 1, 8));
    }
}

#[test]
fn a_block_whose_sync_failed_is_durable_only_after_it_was_written_again() {
    for fault in [Fault::Error(ErrorKind::Other), Fault::Panic] {
        let medium = SimMedium::new();
        let (engine, _) = open(lazy_config(4), &medium);
        medium.inject(SLOT_FILE, Call::Sync, 0, 1, fault);
        assert!(all_good(&write(&engine, &[(0, 0)])));
        let error = engine.flush(PATIENCE).unwrap_err();
        assert!(error.to_string().contains("sync of the slot file"), "{error}");
        assert_eq!((engine.info().unsynced_blocks, engine.durable_blocks()), (1, 0));
        assert!(is_served(&engine, 0, 0));
        assert!(open(lazy_config(4), &medium.crash(1)).1.blocks.is_empty());
        assert!(all_good(&write(&engine, &[(1, 1)])));
        let report = engine.flush(PATIENCE).unwrap();
        assert_eq!((report.durable_blocks, report.pending_blocks), (2, 0));
        assert_eq!((engine.info().unsynced_blocks, engine.stats().renewed), (0, 1));
        for seed in 0..20 {
            let (after, recovered) = open(lazy_config(4), &medium.crash(seed));
            assert_eq!(recovered.blocks.len(), 2);
            assert!(is_served(&after, 0, 0) && is_served(&after, 1, 1), "seed {seed}");
        }
    }
}

/// Mutation that makes it fail: `flush` does not wait for a round where blocks are not synced.
#[test]
fn a_flush_is_true_though_a_commit_failed_before_it() {
    let medium = SimMedium::new();
    let mut config = config(8);
    config.commit.interval = Duration::from_millis(2);
    let (engine, _) = open(config, &medium);
    medium.inject(SLOT_FILE, Call::Sync, 0, u64::MAX, Fault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(0, 0)])));
    wait_until(|| engine.stats().commit_failures > 0);
    assert!(matches!(engine.flush(PATIENCE), Err(FlushError::Io { durable_blocks: 0, .. })));
    wait_until(|| engine.info().unsynced_blocks == 1);
    assert!(is_served(&engine, 0, 0));
    medium.heal();
    // A round that had begun may still fail.
    wait_until(|| {
        let flushed = engine.flush(PATIENCE);
        flushed.inspect(|report| assert_eq!((report.durable_blocks, report.pending_blocks), (1, 0))).is_ok()
    });
    assert_eq!(engine.info().unsynced_blocks, 0);
    assert!(is_served(&open(lazy_config(8), &medium.crash(1)).0, 0, 0));
}

#[test]
fn group_commits_write_what_they_could_not_sync_again_by_themselves() {
    let medium = SimMedium::new();
    let mut config = config(8);
    config.commit.interval = Duration::from_millis(2);
    let (engine, _) = open(config, &medium);
    medium.inject(SLOT_FILE, Call::Sync, 0, 3, Fault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(0, 0)])));
    wait_until(|| engine.durable_blocks() == 1);
    assert_eq!(engine.stats().commit_failures, 3);
}

/// Mutation that makes it fail: `commit::distrust_unsynced` does nothing, or only for blocks that are there already.
#[test]
fn what_was_written_while_a_sync_failed_is_not_durable_with_the_next() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(3, 3)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.inject(SLOT_FILE, Call::Sync, 0, 1, Fault::Error(ErrorKind::Other));
    medium.hold_syncs();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| engine.flush(PATIENCE));
        assert!(medium.wait_for_held(1, PATIENCE));
        // One that ends before the sync fails, and one that runs.
        assert!(all_good(&write(&engine, &[(1, 1)])));
        medium.hold();
        let running = scope.spawn(|| write(&engine, &[(2, 2)]));
        assert!(medium.wait_for_held(2, PATIENCE));
        medium.let_go_of_syncs();
        assert!(flush.join().unwrap().is_err());
        medium.let_go();
        assert!(all_good(&running.join().unwrap()));
    });
    assert_eq!((engine.info().unsynced_blocks, engine.durable_blocks()), (3, 1));
    let report = engine.flush(PATIENCE).unwrap();
    assert_eq!((report.durable_blocks, report.pending_blocks), (4, 0));
    let (after, recovered) = open(lazy_config(4), &medium.crash(1));
    assert_eq!(recovered.blocks.len(), 4);
    assert!((0..4).all(|number| is_served(&after, number, number.into())));
}

#[test]
fn a_block_whose_sync_failed_and_that_the_system_forgot_is_given_up() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    medium.inject(SLOT_FILE, Call::Sync, 0, 1, Fault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    engine.flush(PATIENCE).unwrap_err();
    medium.edit(SLOT_FILE, |bytes| bytes[..BLOCK].fill(0));
    engine.release(&[BlockId(2)]);
    let report = engine.flush(PATIENCE).unwrap();
    assert_eq!((report.durable_blocks, report.pending_blocks), (1, 0));
    let (info, stats) = (engine.info(), engine.stats());
    assert_eq!((info.unsynced_blocks, info.quarantined_slots, stats.renewed, stats.given_up), (0, 0, 1, 1));
    assert!(matches!(read(&engine, 0, 0), Err(OpError::Missing { .. })));
    assert!(is_served(&engine, 1, 1) && !is_served(&engine, 2, 2));
    // Its slot is as good as any.
    assert!(all_good(&write(&engine, &[(0, 7)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 2);
}

/// Mutation that makes it fail: `cycle` drops the records of blocks that were not synced.
#[test]
fn a_block_whose_sync_failed_does_not_bring_back_the_one_before_it() {
    for journal_fails in [false, true] {
        let medium = SimMedium::new();
        let (engine, _) = open(lazy_config(4), &medium);
        assert!(all_good(&write(&engine, &[(0, 0), (1, 1)])));
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 2);
        medium.inject(SLOT_FILE, Call::Sync, 0, 2, Fault::Error(ErrorKind::Other));
        if journal_fails {
            medium.inject(JOURNAL_FILE, Call::Write, 0, 1, Fault::Error(ErrorKind::StorageFull));
        }
        assert!(all_good(&write(&engine, &[(0, 7)])));
        // When it is written again its sync fails once more.
        for _ in 0..2 {
            assert!(matches!(engine.flush(PATIENCE), Err(FlushError::Io { durable_blocks: 1, .. })));
        }
        assert!(is_served(&engine, 0, 7));
        assert_eq!(recovered_numbers(&open(lazy_config(4), &medium.crash(1)).1), [(1, 1)]);
        let report = engine.flush(PATIENCE).unwrap();
        assert_eq!((report.durable_blocks, report.pending_blocks), (2, 0));
        drop(engine);
        let (engine, recovered) = open(lazy_config(4), &medium);
        assert!(recovered.clean);
        assert_eq!(recovered_numbers(&recovered), [(1, 1), (0, 7)]);
        assert!(is_served(&engine, 0, 7));
        // The slot is as good as any.
        assert!(all_good(&write(&engine, &[(0, 8)])));
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 2);
    }
}

#[test]
fn a_full_disk_is_named_at_open() {
    let medium = SimMedium::new();
    medium.set_capacity(Some(10_000));
    let error = DiskEngine::open_on(config(4), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::NoSpace { bytes: 32_768, .. }), "{error}");
    assert!(error.to_string().contains("lower the capacity"));
}

/// A journal with every kind of record, from an engine.
fn journal() -> Vec<u8> {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(8), &medium);
    for number in 0..6 {
        assert!(all_good(&write(&engine, &[(number as u32, number)])));
        engine.flush(PATIENCE).unwrap();
    }
    engine.release(&[BlockId(0)]);
    engine.quarantine(BlockId(1));
    drop(engine);
    medium.bytes(JOURNAL_FILE)
}

#[derive(Clone, Debug)]
enum Harm {
    Flip(usize),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Zero(usize, usize),
    Repeat(usize, usize),
}

fn harm() -> impl Strategy<Value = Harm> {
    let at = || prop_oneof![0_usize..200, HEADER - 16..HEADER + 10 * RECORD];
    prop_oneof![
        (0_usize..(HEADER + 10 * RECORD) * 8).prop_map(Harm::Flip),
        at().prop_map(Harm::Cut),
        (at(), proptest::collection::vec(any::<u8>(), 0..200))
            .prop_map(|(at, bytes)| Harm::Insert(at, bytes)),
        (at(), 0_usize..300).prop_map(|(at, len)| Harm::Zero(at, len)),
        (at(), 0_usize..300).prop_map(|(at, len)| Harm::Repeat(at, len)),
    ]
}

fn do_harm(bytes: &mut Vec<u8>, harm: &Harm) {
    let range = |at: usize, len: usize| at.min(bytes.len())..(at + len).min(bytes.len());
    match harm {
        Harm::Flip(bit) => {
            if let Some(byte) = bytes.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Harm::Cut(at) => bytes.truncate(*at),
        Harm::Insert(at, extra) => drop(bytes.splice(range(*at, 0), extra.iter().copied())),
        Harm::Zero(at, len) => {
            let range = range(*at, *len);
            bytes[range].fill(0);
        }
        Harm::Repeat(at, len) => bytes.extend_from_within(range(*at, *len)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Hostile bytes for a journal: no panic, and only blocks that were written come back.
    #[test]
    fn harmed_journals_never_panic_and_never_invent_blocks(harms in proptest::collection::vec(harm(), 1..6)) {
        static JOURNAL: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let mut bytes = JOURNAL.get_or_init(journal).clone();
        for harm in &harms {
            do_harm(&mut bytes, harm);
        }
        let medium = SimMedium::new();
        medium.edit(JOURNAL_FILE, |file| *file = bytes);
        if let Ok((engine, recovered)) = DiskEngine::open_on(lazy_config(8), Arc::new(medium)) {
            for block in &recovered.blocks {
                prop_assert_eq!(block.identity, identity(u64::from(block.slot.0)));
                prop_assert!(!is_served(&engine, block.slot.0, u64::from(block.slot.0)), "an empty slot file");
            }
        }
    }

    /// Arbitrary files are refused.
    #[test]
    fn garbage_is_no_journal(bytes in proptest::collection::vec(any::<u8>(), 0..6000)) {
        let medium = SimMedium::new();
        medium.edit(JOURNAL_FILE, |file| file.clone_from(&bytes));
        prop_assert!(DiskEngine::open_on(lazy_config(8), Arc::new(medium.clone())).is_err());
        prop_assert_eq!(medium.bytes(JOURNAL_FILE), bytes);
        prop_assert!(medium.open(SLOT_FILE, OpenFile::default()).is_err());
    }
}
