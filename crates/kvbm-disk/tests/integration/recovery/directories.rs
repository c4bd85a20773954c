//! Directories from outside: looked at, refused, of one engine alone, full.

use crate::support::*;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{DiskEngine, FormatError, OpenError, offline};
use kvbm_plan::BlockId;

#[test]
fn a_directory_is_looked_at_verified_and_mended_offline() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(8);
    dir.path().clone_into(&mut config.dir);
    config.geometry = b"what=test".to_vec();
    let quiet = &mut |_: u64, _: u64| ();
    let error = offline::inspect(&[dir.path().to_owned()], None).unwrap_err();
    assert!(matches!(error, OpenError::NoJournal { .. }), "{error}");
    assert!(offline::verify(&[dir.path().to_owned()], None, quiet).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "looking creates nothing");

    let (engine, _) = DiskEngine::open(config.clone()).unwrap();
    // A chain of four, and one whose parent is not there.
    assert!(all_good(&write(&engine, &[(0, 0), (1, 1), (2, 2), (3, 3), (4, 6)])));
    engine.flush(PATIENCE).unwrap();
    let open = offline::inspect(&[dir.path().to_owned()], None).unwrap();
    assert_eq!((open.blocks, open.orphans, open.clean), (5, 1, false));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let owner = format!("process {} on {}", std::process::id(), host.trim());
    assert_eq!(open.owner, Some(owner.clone()));
    let error = DiskEngine::open(config.clone()).unwrap_err().to_string();
    assert!(error.contains(&format!("in use by {owner}")), "{error}");
    assert!(matches!(offline::verify(&[dir.path().to_owned()], None, quiet), Err(OpenError::Busy { .. })));
    drop(engine);

    let before = std::fs::read(dir.path().join(JOURNAL_FILE)).unwrap();
    let mut steps = Vec::new();
    let found =
        offline::verify(&[dir.path().to_owned()], None, &mut |done, all| steps.push((done, all))).unwrap();
    assert_eq!((found.verified, found.damaged.len(), found.inspection.clean), (5, 0, true));
    assert_eq!((found.inspection.geometry, found.inspection.num_slots), (b"what=test".to_vec(), 8));
    assert_eq!(steps.last(), Some(&(5, 5)));
    let slots = dir.path().join(SLOT_FILE);
    let mut bytes = std::fs::read(&slots).unwrap();
    bytes[BLOCK + 9] ^= 1;
    std::fs::write(&slots, bytes).unwrap();
    let found = offline::verify(&[dir.path().to_owned()], None, quiet).unwrap();
    assert_eq!((found.verified, found.damaged), (4, vec![BlockId(1)]));
    assert!(std::fs::read(dir.path().join(JOURNAL_FILE)).unwrap() == before, "nothing was changed");

    let repair = offline::repair(&[dir.path().to_owned()], None, quiet).unwrap();
    assert_eq!(repair.found.damaged, [BlockId(1)]);
    // Its two descendants go too, and the one that never had a parent.
    assert_eq!((repair.quarantined, repair.freed), (1, 3));
    let left = offline::inspect(&[dir.path().to_owned()], None).unwrap();
    assert_eq!((left.blocks, left.orphans, left.quarantined_slots, left.clean), (1, 0, 1, true));
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!(recovered_numbers(&recovered), [(0, 0)]);
    assert!(is_served(&engine, 0, 0));
    drop(engine);
    std::fs::remove_file(&slots).unwrap();
    let lost = offline::inspect(&[dir.path().to_owned()], None).unwrap();
    assert_eq!((lost.blocks, lost.dropped.without_bytes), (0, 1));
    let error = offline::verify(&[dir.path().to_owned()], None, quiet).unwrap_err().to_string();
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
    medium.edit(JOURNAL_FILE, |bytes| bytes[8] = 6);
    let error = refuse(&ours, &["version 6", "reads 2 to 5", "clear"]);
    assert!(matches!(error, OpenError::Format { source: FormatError::Version { found: 6, .. }, .. }));
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
fn a_file_in_the_place_of_a_directory_is_named_with_the_way_out() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut config = config(2);
    file.path().clone_into(&mut config.dir);
    let error = DiskEngine::open(config).unwrap_err().to_string();
    assert!(error.contains(file.path().to_str().unwrap()) && error.contains("name a directory"), "{error}");
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
fn a_full_disk_is_named_at_open() {
    let medium = SimMedium::new();
    medium.set_capacity(Some(10_000));
    let error = DiskEngine::open_on(config(4), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::NoSpace { bytes: 32_768, .. }), "{error}");
    assert!(error.to_string().contains("lower the capacity"));
}
