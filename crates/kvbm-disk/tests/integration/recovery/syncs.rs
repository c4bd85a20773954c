//! Syncs that fail: what is called durable, and what becomes of blocks that are not.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, JOURNAL_FILE, JOURNAL_TEMP_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{FlushError, OpError};
use kvbm_plan::BlockId;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_failed_journal_is_replaced_and_nothing_is_called_durable_before() {
    let calls = [(JOURNAL_FILE, Call::Write), (JOURNAL_FILE, Call::Sync), (JOURNAL_TEMP_FILE, Call::Rename)];
    let faults = [DiskFault::Error(ErrorKind::StorageFull), DiskFault::Panic];
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
    for fault in [DiskFault::Error(ErrorKind::Other), DiskFault::Panic] {
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
    medium.inject(SLOT_FILE, Call::Sync, 0, u64::MAX, DiskFault::Error(ErrorKind::Other));
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
    medium.inject(SLOT_FILE, Call::Sync, 0, 3, DiskFault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(0, 0)])));
    wait_until(|| engine.durable_blocks() == 1);
    assert_eq!(engine.stats().commit_failures, 3);
}

/// Mutation that makes it fail: `commit::distrust_unsynced` does nothing, or only for blocks that
/// are there already.
#[test]
fn what_was_written_while_a_sync_failed_is_not_durable_with_the_next() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(3, 3)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    medium.inject(SLOT_FILE, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
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

/// Mutation that makes it fail: an opening does not sync the slot files.
#[test]
fn a_block_that_was_written_over_its_own_record_is_durable_after_the_next_opening() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
    // Another block takes its slot, and then it comes back. The journal has no record of that yet.
    for number in [1, 0] {
        engine.release(&[BlockId(0)]);
        assert!(all_good(&write(&engine, &[(0, number)])));
    }
    let later = medium.restart();
    drop(engine);
    let (engine, recovered) = open(lazy_config(4), &later);
    assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
    assert!(is_served(&engine, 0, 0));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, 1);
    for seed in 0..20 {
        let (after, recovered) = open(lazy_config(4), &later.crash(seed));
        assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
        assert!(is_served(&after, 0, 0), "seed {seed}");
    }
}

#[test]
fn a_block_whose_sync_failed_and_that_the_system_forgot_is_given_up() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(4), &medium);
    medium.inject(SLOT_FILE, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2)])));
    engine.flush(PATIENCE).unwrap_err();
    medium.edit(SLOT_FILE, |bytes| bytes[..BLOCK].fill(0));
    engine.release(&[BlockId(2)]);
    let told = Arc::new(Mutex::new(Vec::new()));
    let tells = Arc::clone(&told);
    engine.on_given_up(move |slot, identity| tells.lock().unwrap().push((slot, identity)));
    let report = engine.flush(PATIENCE).unwrap();
    assert_eq!((report.durable_blocks, report.pending_blocks), (1, 0));
    let (info, stats) = (engine.info(), engine.stats());
    assert_eq!((info.unsynced_blocks, info.quarantined_slots, stats.renewed, stats.given_up), (0, 0, 1, 1));
    assert_eq!(*told.lock().unwrap(), [(BlockId(0), identity(0))], "whoever thinks that it is there");
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
        medium.inject(SLOT_FILE, Call::Sync, 0, 2, DiskFault::Error(ErrorKind::Other));
        if journal_fails {
            medium.inject(JOURNAL_FILE, Call::Write, 0, 1, DiskFault::Error(ErrorKind::StorageFull));
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
