//! Slot files and their failures.
#![cfg(not(miri))] // fallocate and statvfs do not exist there.

use std::path::Path;

use kvbm_storage::{DiskStorage, FileRange, Preallocation, Storage, StorageError, StorageExt, StorageKind};

#[test]
fn a_file_keeps_its_bytes_over_reopening() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("slots");
    let created = DiskStorage::open_or_create(&path, 1 << 20).expect("created");
    assert_eq!((created.kind(), created.len(), created.address()), (StorageKind::Disk, 1 << 20, 0));
    assert_ne!(created.preallocation(), &Preallocation::Existing);
    assert_eq!(std::fs::metadata(&path).expect("it is there").len(), 1 << 20);
    // SAFETY: a file is no host memory.
    unsafe { created.write_at(4096, b"block") }.expect("inside");
    created.sync_data().expect("durable");
    drop(created);
    let opened = DiskStorage::open_or_create(&path, 1 << 20).expect("opened");
    assert_eq!(opened.preallocation(), &Preallocation::Existing);
    let mut bytes = [1; 7];
    // SAFETY: a file is no host memory.
    unsafe { opened.read_at(4095, &mut bytes) }.expect("inside");
    assert_eq!(&bytes, b"\0block\0");
}

/// Mutations that make it fail: no mode for a new file, none for an old one, links are followed.
#[test]
fn only_the_owner_has_access_and_no_link_is_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let directory = tempfile::tempdir().expect("a directory");
    let [path, link, pipe] = ["slots", "link", "pipe"].map(|name| directory.path().join(name));
    let mode = || std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o777;
    drop(DiskStorage::create(&path, 4096).expect("created"));
    assert_eq!(mode(), 0o600);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("ours");
    drop(DiskStorage::open(&path, 4096).expect("opened"));
    assert_eq!(mode(), 0o600, "as an earlier version left it");

    symlink(&path, &link).expect("a link");
    let error = DiskStorage::open_or_create(&link, 4096).expect_err("it is a link");
    assert!(matches!(error, StorageError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("symbolic link"), "{error}");
    symlink(directory.path().join("nowhere"), &pipe).expect("a link");
    let error = DiskStorage::open_or_create(&pipe, 4096).expect_err("a link to nothing");
    assert!(matches!(error, StorageError::Exists { .. }), "{error}");
    std::fs::remove_file(&pipe).expect("ours");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let error = DiskStorage::open(&pipe, 4096).expect_err("a pipe");
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

#[test]
fn space_is_really_reserved() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().expect("a directory");
    let storage = DiskStorage::create(&directory.path().join("slots"), 1 << 20).expect("created");
    match storage.preallocation() {
        Preallocation::Reserved => {
            assert!(storage.file().metadata().expect("open").blocks() * 512 >= 1 << 20);
        }
        Preallocation::Sparse { reason } => assert!(reason.contains("fallocate"), "{reason}"),
        Preallocation::Existing => panic!("it is new"),
    }
}

#[test]
fn failures_say_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("slots");
    let missing =
        DiskStorage::create(&directory.path().join("no/such/slots"), 4096).expect_err("no directory");
    assert!(
        matches!(&missing, StorageError::Directory { path, .. } if path.ends_with("no/such")),
        "{missing}"
    );
    let not_there = DiskStorage::open(&path, 4096).expect_err("no file");
    assert!(matches!(&not_there, StorageError::Io { operation: "open", .. }), "{not_there}");
    let empty = DiskStorage::create(&path, 0).expect_err("no bytes");
    assert!(matches!(empty, StorageError::Invalid { what: "length", .. }), "{empty}");
    assert!(!path.exists());

    DiskStorage::create(&path, 4096).expect("created");
    let exists = DiskStorage::create(&path, 4096).expect_err("exists");
    assert_eq!(exists, StorageError::Exists { path: path.clone() });
    let length = DiskStorage::open_or_create(&path, 8192).expect_err("another length");
    assert_eq!(length, StorageError::WrongLength { path: path.clone(), found: 4096, expected: 8192 });
    assert_eq!(std::fs::metadata(&path).expect("still there").len(), 4096, "never resized or overwritten");
}

#[test]
fn more_than_the_disk_has_is_refused_before_anything_is_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("slots");
    let refused = DiskStorage::create(&path, 1 << 60).expect_err("an exbibyte");
    assert!(matches!(&refused, StorageError::NoSpace { asked, .. } if *asked == 1 << 60), "{refused}");
    assert!(refused.to_string().contains("free space"), "{refused}");
    assert!(!path.exists(), "no file is left behind");
}

#[test]
fn a_file_that_was_cut_off_is_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let storage = DiskStorage::create(&directory.path().join("slots"), 8192).expect("created");
    storage.file().set_len(4096).expect("cut");
    // SAFETY: a file is no host memory.
    let error = unsafe { storage.read_at(4000, &mut [0; 200]) }.expect_err("the end is gone");
    assert!(matches!(&error, StorageError::Io { operation: "read", offset: 4000, .. }), "{error}");
}

#[test]
fn ranges_of_a_file_are_checked() {
    let directory = tempfile::tempdir().expect("a directory");
    let storage = DiskStorage::create(Path::new(&directory.path().join("slots")), 8192).expect("created");
    let range = FileRange::new(&storage, 4096, 4096).expect("inside");
    drop(storage);
    assert_eq!(range.position(4095, 1), Ok(8191));
    assert!(matches!(range.position(4096, 1), Err(StorageError::OutOfRange { size: 4096, .. })));
    let at = range.position(0, 3).expect("inside");
    // SAFETY: a file is no host memory.
    unsafe { range.file().write_at(at, b"abc") }.expect("the range keeps the file open");
    assert!(matches!(FileRange::new(range.file(), 1, 8192), Err(StorageError::OutOfRange { .. })));
}
