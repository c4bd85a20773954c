//! A disk that is full: capacity is kept, what was acknowledged stays, what cannot be kept is said,
//! and all goes on when there is space again. On the simulated medium, and on a small tmpfs where
//! mounting one is permitted.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod support;

use kvbm_disk::fault::{Call, DiskFault, JOURNAL_FILE, JOURNAL_TEMP_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{Archive, DiskConfig, DiskEngine, EngineMode, FlushError, OpenError, offline};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::Command;
use support::*;

/// Slots, of which half are written before the disk is full: their records do not fit what is left
/// of a page.
const SLOTS: u32 = 256;
const BEFORE: u32 = SLOTS / 2;
/// Where the test inside a namespace of its own finds its file system.
const MOUNT: &str = "KVBM_TEST_TMPFS";
const TMPFS_BYTES: u64 = 4 << 20;

fn at(dir: &Path, slots: u32) -> DiskConfig {
    let mut config = lazy_config(slots);
    dir.clone_into(&mut config.dir);
    config
}

fn numbers(slots: std::ops::Range<u32>) -> Vec<(u32, u64)> {
    slots.map(|slot| (slot, u64::from(slot))).collect()
}

fn served(engine: &DiskEngine) -> u32 {
    (0..SLOTS).map(|slot| u32::from(is_served(engine, slot, slot.into()))).sum()
}

/// Half of the slots are durable; the disk is full while the others are written, and has space
/// again.
fn live_through(engine: &DiskEngine, fill: impl FnOnce(), copy: impl FnOnce() -> u32, free: impl FnOnce()) {
    assert!(all_good(&write(engine, &numbers(0..BEFORE))));
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(BEFORE));
    fill();
    // The slots have their space, so every write succeeds.
    assert!(all_good(&write(engine, &numbers(BEFORE..SLOTS))));
    for _ in 0..3 {
        match engine.flush(PATIENCE) {
            Err(error @ FlushError::Io { durable_blocks, .. }) => {
                let text = error.to_string();
                assert!(text.contains("write of the journal") && text.contains("free space"), "{text}");
                assert_eq!(durable_blocks, u64::from(BEFORE), "{text}");
            }
            other => panic!("nothing new can be durable: {other:?}"),
        }
    }
    assert_eq!(served(engine), SLOTS, "all are served meanwhile");
    assert!(copy() >= BEFORE, "what the end of the process would leave");
    free();
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(SLOTS));
    assert!(engine.stats().commit_failures >= 3);
}

fn all_back(engine: &DiskEngine, recovered: &kvbm_disk::Recovered) {
    assert_eq!((recovered.blocks.len(), recovered.clean), (SLOTS as usize, true));
    assert_eq!(served(engine), SLOTS);
}

#[test]
fn a_full_disk_loses_nothing_and_is_named() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(SLOTS), &medium);
    let fill =
        || medium.set_capacity(Some((medium.bytes(JOURNAL_FILE).len() + SLOTS as usize * BLOCK) as u64));
    let copy = || {
        let (engine, recovered) = open(lazy_config(SLOTS), &medium.crash(5));
        assert!(recovered.blocks.iter().all(|block| is_served(&engine, block.slot.0, block.slot.0.into())));
        recovered.blocks.len() as u32
    };
    live_through(&engine, fill, copy, || medium.set_capacity(None));
    drop(engine);
    let (engine, recovered) = open(lazy_config(SLOTS), &medium);
    all_back(&engine, &recovered);
}

/// Mutation that makes it fail: `open` keeps what was taken before it failed.
#[test]
fn an_opening_that_fails_takes_no_space() {
    let medium = SimMedium::new();
    let mut config = lazy_config(SLOTS);
    // For the slots, and not for the journal.
    medium.set_capacity(Some(config.slot_file_bytes().unwrap() + 100));
    let error = DiskEngine::open_on(config.clone(), medium.as_medium()).unwrap_err();
    assert!(error.to_string().contains("lower the capacity, or free space"), "{error}");
    assert!(medium.bytes(SLOT_FILE).is_empty());
    medium.set_capacity(None);
    // There is no direct I/O.
    config.engine = EngineMode::IoUring;
    let error = DiskEngine::open_on(config.clone(), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::NoEngine { .. }), "{error}");
    assert!(medium.bytes(SLOT_FILE).is_empty());
    // What was there before stays.
    config.engine = EngineMode::Auto;
    let (engine, _) = open(config.clone(), &medium);
    assert!(all_good(&write(&engine, &[(SLOTS - 1, 1)])));
    drop(engine);
    config.num_slots = 2 * SLOTS;
    config.engine = EngineMode::IoUring;
    assert!(DiskEngine::open_on(config.clone(), medium.as_medium()).is_err());
    assert_eq!(medium.bytes(SLOT_FILE).len(), SLOTS as usize * BLOCK);
    config.engine = EngineMode::Auto;
    assert!(is_served(&open(config, &medium).0, SLOTS - 1, 1));
}

/// Too little space for a snapshot, and enough for some records: those are appended, and the
/// snapshot waits until there is more to gain.
///
/// Mutation that makes it fail: `Journal::persist` returns the snapshot's error, or forgets to
/// postpone the next one; `write_new_file` changes the journal's own header.
#[test]
fn a_snapshot_that_does_not_fit_keeps_nothing_from_becoming_durable() {
    const RECORD: usize = 80;
    let medium = SimMedium::new();
    let mut config = lazy_config(SLOTS);
    config.compact_slack_records = 8;
    config.queue_depth = SLOTS as usize;
    let (engine, _) = open(config.clone(), &medium);
    let round = |slots: std::ops::Range<u32>, round: u64| -> Vec<_> {
        slots.map(|slot| (slot, u64::from(slot) + round * u64::from(SLOTS))).collect()
    };
    let room = |records: usize| {
        let used = medium.bytes(JOURNAL_FILE).len() + SLOTS as usize * BLOCK;
        medium.set_capacity(Some((used + records * RECORD) as u64));
    };
    assert!(all_good(&write(&engine, &round(0..SLOTS, 0))));
    engine.flush(PATIENCE).unwrap();
    // A fifth of the slots more is what the journal may have; from here on it has too many.
    assert!(all_good(&write(&engine, &round(0..SLOTS / 5, 0))));
    engine.flush(PATIENCE).unwrap();
    room(100);
    // One attempt writes the header and fails with the records; another would be noticed.
    medium.inject(JOURNAL_TEMP_FILE, Call::Write, 2, 1, DiskFault::Panic);
    for slot in 0..50 {
        assert!(all_good(&write(&engine, &round(slot..slot + 1, 1))));
        assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(SLOTS));
    }
    medium.heal();
    assert!(medium.bytes(JOURNAL_TEMP_FILE).is_empty());
    assert_eq!((engine.stats().compactions, engine.stats().commit_failures), (0, 0));
    assert_eq!(engine.stats().failed_snapshots, 1);
    let all_found = |medium: &SimMedium, rounds: &dyn Fn(u32) -> u64| {
        let (engine, recovered) = open(config.clone(), medium);
        assert_eq!(recovered.blocks.len(), SLOTS as usize);
        assert!((0..SLOTS).all(|slot| is_served(&engine, slot, round(slot..slot + 1, rounds(slot))[0].1)));
    };
    all_found(&medium.crash(5), &|slot| u64::from(slot < 50));

    // No space for these records; later for them, and still not for a snapshot.
    room(10);
    assert!(all_good(&write(&engine, &round(60..80, 2))));
    assert!(matches!(engine.flush(PATIENCE), Err(FlushError::Io { .. })));
    room(30);
    assert_eq!(engine.flush(PATIENCE).unwrap().durable_blocks, u64::from(SLOTS));
    let rounds = |slot: u32| if (60..80).contains(&slot) { 2 } else { u64::from(slot < 50) };
    all_found(&medium.crash(6), &rounds);

    // With space again the journal becomes short, though not at once.
    medium.set_capacity(None);
    assert!(all_good(&write(&engine, &round(0..50, 1))) && engine.flush(PATIENCE).is_ok());
    assert!(all_good(&write(&engine, &round(0..50, 1))) && engine.flush(PATIENCE).is_ok());
    assert!(engine.stats().compactions >= 1);
    drop(engine);
    all_found(&medium, &rounds);
}

/// Runs the test below in a namespace where it may mount a file system.
#[test]
fn a_full_file_system_loses_nothing_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size={TMPFS_BYTES} tmpfs \"${MOUNT}\" || exit 77; exec \"$0\" --exact inside_a_small_file_system"
    );
    let test = std::env::current_exe().unwrap();
    let output = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", &script])
        .arg(test)
        .env(MOUNT, dir.path())
        .output();
    match output {
        Err(error) => println!("SKIPPED: unshare cannot be run: {error}"),
        Ok(output) => {
            let printed = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
            if printed.contains("1 passed") || printed.contains("panicked") {
                assert!(output.status.success(), "{printed}");
            } else {
                println!("SKIPPED: no namespace with a tmpfs of its own: {}", printed.trim());
            }
        }
    }
}

#[test]
fn inside_a_small_file_system() {
    let Some(mount) = std::env::var_os(MOUNT) else {
        return println!("run by `a_full_file_system_loses_nothing_and_is_named`, where the file system is");
    };
    let mount = Path::new(&mount);
    let config = |name: &str, slots: u32| at(&mount.join(name), slots);
    let used = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    // More than the file system has: refused at once, and nothing is kept of the attempt.
    let error = DiskEngine::open(config("large", 1024)).unwrap_err();
    assert!(matches!(error, OpenError::NoSpace { bytes: 8_388_608, .. }), "{error}");
    assert!(error.to_string().contains("lower the capacity, or free space"), "{error}");
    assert_eq!(used(&mount.join("large").join("slots.kvbm")), 0);

    let (engine, _) = DiskEngine::open(config("g3", SLOTS)).unwrap();
    assert!(engine.info().preallocated);
    let ballast = mount.join("ballast");
    let fill = || {
        let mut file = std::fs::File::create(&ballast).unwrap();
        let full = loop {
            if let Err(error) = file.write_all(&[0xBA; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull);
    };
    let copy = || {
        let elsewhere = tempfile::tempdir().unwrap();
        for name in ["journal.kvbm", "slots.kvbm"] {
            std::fs::copy(mount.join("g3").join(name), elsewhere.path().join(name)).unwrap();
        }
        assert!(!mount.join("g3/journal.kvbm.tmp").exists(), "a snapshot that did not fit takes no space");
        let (engine, recovered) = DiskEngine::open(at(elsewhere.path(), SLOTS)).unwrap();
        assert!(recovered.blocks.iter().all(|block| is_served(&engine, block.slot.0, block.slot.0.into())));
        recovered.blocks.len() as u32
    };
    live_through(&engine, fill, copy, || std::fs::remove_file(&ballast).unwrap());
    let kind = engine.info().engine.kind;
    drop(engine);
    let (engine, recovered) = DiskEngine::open(config("g3", SLOTS)).unwrap();
    all_back(&engine, &recovered);
    drop(engine);
    // A start while others have filled the disk: the slots have their space, and their blocks are
    // moved as before.
    fill();
    let (engine, recovered) = DiskEngine::open(config("g3", SLOTS)).unwrap();
    all_back(&engine, &recovered);
    let choice = engine.info().engine;
    assert_eq!(choice.kind, kind, "{}", choice.reason);
    drop(engine);

    // As after errors of the device: an engine cannot have the directory, and who only looks still
    // sees what is there. The kernel gives the files of a ring back a moment after it is gone.
    let remounted = || Command::new("mount").args(["-o", "remount,ro"]).arg(mount).status().unwrap();
    wait_until(|| remounted().success());
    let error = DiskEngine::open(config("g3", SLOTS)).unwrap_err().to_string();
    assert!(error.contains("/g3: Read-only file system") && error.contains("name a directory"), "{error}");
    let dirs = [mount.join("g3")];
    let found = offline::verify(&dirs, None, &mut |_, _| {}).unwrap();
    assert_eq!((found.verified, found.damaged.len()), (SLOTS.into(), 0));
    let looking = Archive::open(&dirs, kvbm_plan::FileAccess::Owner, None).unwrap();
    assert!(matches!(offline::verify(&dirs, None, &mut |_, _| {}), Err(OpenError::Busy { .. })));
    drop(looking);
}
