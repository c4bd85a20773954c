//! Slots over several directories.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, SimMedium};
use kvbm_disk::{DiskConfig, DiskEngine, OpError, OpenError, offline};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SLOTS: u32 = 600;

/// Block `n` in slot `n`.
fn all() -> Vec<(u32, u64)> {
    (0..SLOTS).map(|slot| (slot, u64::from(slot))).collect()
}

/// `count` directories in `root`, and an engine's configuration over them.
fn striped(root: &Path, count: usize) -> (DiskConfig, Vec<PathBuf>) {
    let dirs: Vec<PathBuf> = (0..count).map(|n| root.join(format!("disk-{n}"))).collect();
    let mut config = config(SLOTS);
    config.dir.clone_from(&dirs[0]);
    config.more_dirs = dirs[1..].to_vec();
    (config, dirs)
}

fn refused(config: &DiskConfig) -> String {
    match DiskEngine::open(config.clone()) {
        Err(error @ OpenError::Stripe { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it opened"),
    }
}

#[test]
fn blocks_are_spread_over_directories_and_come_back() {
    let root = tempfile::tempdir().unwrap();
    let (config, dirs) = striped(root.path(), 3);
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    assert!(all_good(&write(&engine, &all())));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(SLOTS));
    assert_eq!(engine.info().dirs.len(), 3);
    // Each directory is locked.
    for dir in &dirs {
        let mut other = config.clone();
        (other.dir, other.more_dirs) = (dir.clone(), Vec::new());
        assert!(matches!(DiskEngine::open(other), Err(OpenError::Busy { .. })));
    }
    drop(engine);
    let bytes: Vec<u64> =
        dirs.iter().map(|dir| std::fs::metadata(dir.join("slots.kvbm")).unwrap().len()).collect();
    assert!(bytes.iter().all(|bytes| *bytes > 0), "{bytes:?}");
    assert_eq!(bytes.iter().sum::<u64>(), config.slot_file_bytes().unwrap());
    let found = offline::verify(&dirs, None, &mut |_, _| {}).unwrap();
    assert_eq!((found.verified, found.damaged.len()), (u64::from(SLOTS), 0));
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered.blocks.len(), SLOTS as usize);
    for (slot, number) in all() {
        assert!(is_served(&engine, slot, number), "block {number}");
    }
}

#[test]
fn a_directory_that_is_lost_or_out_of_place_is_named_and_nothing_is_changed() {
    let root = tempfile::tempdir().unwrap();
    let (config, dirs) = striped(root.path(), 2);
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    assert!(all_good(&write(&engine, &all())));
    engine.flush(PATIENCE).unwrap();
    drop(engine);

    let mut fewer = config.clone();
    fewer.more_dirs.clear();
    assert!(refused(&fewer).contains("number 1 of 2"), "{}", refused(&fewer));
    let mut swapped = config.clone();
    (swapped.dir, swapped.more_dirs) = (dirs[1].clone(), vec![dirs[0].clone()]);
    assert!(refused(&swapped).contains("number 2 of 2"), "{}", refused(&swapped));
    let mut more = config.clone();
    more.more_dirs.push(root.path().join("disk-2"));
    assert!(refused(&more).contains("number 1 of 2"), "{}", refused(&more));
    assert!(
        offline::verify(&dirs[..1], None, &mut |_, _| {}).unwrap_err().to_string().contains("number 1 of 2")
    );

    // Its device is not there: an empty folder in its place.
    for lost in [0, 1] {
        let elsewhere = root.path().join("elsewhere");
        std::fs::rename(&dirs[lost], &elsewhere).unwrap();
        let error = refused(&config);
        assert!(error.contains(&dirs[lost].display().to_string()) && error.contains("mounted"), "{error}");
        std::fs::remove_dir_all(&dirs[lost]).unwrap();
        std::fs::rename(&elsewhere, &dirs[lost]).unwrap();
    }
    // One that belongs to somebody else is not taken.
    let (other, others) = striped(&root.path().join("other"), 2);
    drop(DiskEngine::open(other).unwrap());
    let mut mixed = config.clone();
    mixed.more_dirs = others[1..].to_vec();
    assert!(refused(&mixed).contains("another set"), "{}", refused(&mixed));

    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered.blocks.len(), SLOTS as usize, "nothing was harmed");
    read(&engine, 0, 0).unwrap();
}

/// Mutation that makes it fail: a mark is written under its own name.
#[test]
fn a_set_whose_first_opening_was_cut_short_is_opened_by_the_next() {
    let (config, _) = striped(Path::new("sim"), 3);
    let open_fails =
        |medium: &SimMedium| DiskEngine::open_on(config.clone(), medium.as_medium()).unwrap_err();
    // The disk is full, and has space again.
    let medium = SimMedium::new();
    medium.set_capacity(Some(0));
    let error = open_fails(&medium).to_string();
    assert!(error.contains("write stripe.kvbm in sim/disk-0"), "{error}");
    medium.set_capacity(None);
    assert!(all_good(&write(&open(config.clone(), &medium).0, &[(0, 0)])));
    // A device fails, and then the power.
    for mark in ["stripe.kvbm", "stripe.kvbm.tmp", "1/stripe.kvbm", "1/stripe.kvbm.tmp", "2/stripe.kvbm.tmp"]
    {
        let medium = SimMedium::new();
        medium.inject(mark, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
        if mark.ends_with("tmp") {
            open_fails(&medium);
        }
        for seed in 0..8 {
            assert!(all_good(&write(&open(config.clone(), &medium.crash(seed)).0, &[(0, 0)])), "{mark}");
        }
    }
}

/// Mutation that makes it fail: `lock_each` does not look whose the lock is.
#[test]
fn a_directory_with_two_names_is_none_of_two() {
    let root = tempfile::tempdir().unwrap();
    let (config, dirs) = striped(root.path(), 2);
    std::fs::create_dir(&dirs[0]).unwrap();
    std::os::unix::fs::symlink(&dirs[0], &dirs[1]).unwrap();
    let error = refused(&config);
    assert!(
        error.contains("disk-1, directory 2 of 2") && error.contains("name each directory once"),
        "{error}"
    );
    assert!(!dirs[0].join("stripe.kvbm").exists());
    // A directory may well be a link.
    std::fs::remove_file(&dirs[1]).unwrap();
    std::fs::create_dir(root.path().join("far")).unwrap();
    std::os::unix::fs::symlink(root.path().join("far"), &dirs[1]).unwrap();
    let (engine, _) = DiskEngine::open(config).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0), (128, 1)])) && is_served(&engine, 128, 1));
}

/// Offline, as at an opening: which blocks a file has lost depends on that file alone, and nothing
/// is wrong with their slots.
///
/// Mutation that makes it fail: `archive::read_journal` takes the files for one.
#[test]
fn a_file_that_was_cut_loses_its_own_blocks_offline_too() {
    let root = tempfile::tempdir().unwrap();
    let (config, dirs) = striped(root.path(), 2);
    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    assert!(all_good(&write(&engine, &all())));
    drop(engine);
    let slots = std::fs::OpenOptions::new().write(true).open(dirs[1].join("slots.kvbm")).unwrap();
    slots.set_len(100 * BLOCK as u64 + 1).unwrap();
    // A unit of 128 slots lies in the second directory, of which 100 are left; all others of it are
    // behind them.
    let left = (0..SLOTS).filter(|slot| slot / 128 % 2 == 0 || *slot < 128 + 100).count() as u64;
    let found = offline::verify(&dirs, None, &mut |_, _| {}).unwrap();
    assert_eq!((found.verified, found.damaged.len()), (left, 0));
    assert_eq!(
        (found.inspection.blocks, found.inspection.dropped.without_bytes),
        (left, u64::from(SLOTS) - left)
    );
    let repaired = offline::repair(&dirs, None, &mut |_, _| {}).unwrap();
    assert_eq!(repaired.quarantined, 0);
    let (_, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered.quarantined, []);
}

/// Mutation that makes it fail: `reserve` gives back only what the file took that met the end of
/// the space.
#[test]
fn a_set_that_does_not_fit_takes_no_space_in_the_directories_where_it_would() {
    let (config, _) = striped(Path::new("sim"), 2);
    let medium = SimMedium::new();
    medium.set_capacity(Some(config.slot_file_bytes().unwrap() - 1));
    let error = DiskEngine::open_on(config, medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::NoSpace { .. }), "{error}");
    assert_eq!((medium.bytes("slots.kvbm").len(), medium.bytes("1/slots.kvbm").len()), (0, 0));
}

#[test]
fn a_directory_that_fails_costs_its_blocks_only_and_is_named() {
    const SECOND: &str = "1/slots.kvbm";
    let medium = SimMedium::new();
    medium.set_direct(true);
    medium.set_ring(true);
    let (mut config, _) = striped(Path::new("sim"), 2);
    // Nothing is committed before it is asked for.
    config.commit.interval = Duration::from_secs(3600);
    let (engine, _) = open(config, &medium);
    assert!(all_good(&write(&engine, &all())));
    medium.inject(SECOND, Call::Sync, 0, u64::MAX, DiskFault::Error(ErrorKind::Other));
    let error = engine.flush(PATIENCE).unwrap_err().to_string();
    assert!(error.contains("sim/disk-1"), "{error}");
    let durable = engine.durable_blocks();
    assert!((1..u64::from(SLOTS)).contains(&durable), "{durable} of the first directory");

    medium.inject(SECOND, Call::Read, 0, u64::MAX, DiskFault::Error(ErrorKind::Other));
    let mut failed = 0;
    for (slot, number) in all() {
        match read(&engine, slot, number) {
            Ok(_) => {}
            Err(OpError::Io { message, .. }) => {
                assert!(message.contains("sim/disk-1"), "{message}");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(failed, u64::from(SLOTS) - durable, "every block of the second, and no other");
    let [first, second] = &engine.info().dirs[..] else { panic!("two directories") };
    assert_eq!((first.io_errors, &first.last_error), (0, &None));
    assert!(second.io_errors >= failed && second.last_error.is_some(), "{second:?}");
    medium.heal();
    read(&engine, SLOTS / 2, u64::from(SLOTS / 2)).unwrap();
}
