//! Keys of encrypted directories: wrong ones, new ones, destroyed ones.

use crate::encrypted::{encrypting, encryption, operator};
use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, JOURNAL_FILE, KEY_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{
    DataKeyInfo, DataKeyState, DiskConfig, DiskEncryption, DiskEngine, DiskKeys, IoBatch, KeyFileError,
    OpError, OpOutcome, OpenError, OwnedBuffer, ReadTarget, offline,
};
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

const SLOTS: u32 = 8;
const OURS: NamespaceId = NamespaceId(1);
const OTHER: NamespaceId = NamespaceId(0xDEAD_BEEF);
/// Bytes of a key file before its entries, of an entry, and of an entry before its wrapped key.
const HEADER: usize = 64;
const ENTRY: usize = 128;
const WRAPPED_AT: usize = 56;

/// Writes a block of the other namespace.
fn write_other(engine: &DiskEngine, slot: u32, number: u64) -> OpOutcome {
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| done.send(outcomes).unwrap());
    let buffer = Arc::new(OwnedBuffer::from_slice(&pattern(number, BLOCK)));
    batch.write_buffer(BlockId(slot), of_other(number), &buffer);
    engine.submit(batch).unwrap();
    outcomes.recv_timeout(PATIENCE).unwrap().remove(0)
}

fn of_other(number: u64) -> BlockIdentity {
    BlockIdentity { namespace: OTHER, ..identity(number) }
}

fn is_other_served(engine: &DiskEngine, slot: u32, number: u64) -> bool {
    let (done, outcomes) = mpsc::channel();
    let target = ReadTarget::new(BLOCK);
    let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| done.send(outcomes).unwrap());
    assert!(batch.read_target(BlockId(slot), of_other(number), &target));
    engine.submit(batch).unwrap();
    let is_good = outcomes.recv_timeout(PATIENCE).unwrap().remove(0).is_ok();
    is_good && target.into_buffer().unwrap().as_slice() == pattern(number, BLOCK)
}

fn in_dir(dir: &Path, seed: u8) -> DiskConfig {
    encrypting(DiskConfig::new(dir, SLOTS, BLOCK as u64, [7; 16]), seed)
}

fn keys(dir: &Path) -> Vec<DataKeyInfo> {
    offline::inspect(&[dir.to_owned()], None).unwrap().encryption.unwrap().keys
}

fn files(medium: &SimMedium) -> [Vec<u8>; 3] {
    [JOURNAL_FILE, SLOT_FILE, KEY_FILE].map(|file| medium.bytes(file))
}

fn copy_of(files: &[Vec<u8>; 3]) -> SimMedium {
    let medium = SimMedium::new();
    for (name, bytes) in [JOURNAL_FILE, SLOT_FILE, KEY_FILE].into_iter().zip(files) {
        medium.edit(name, |file| file.clone_from(bytes));
    }
    medium
}

#[test]
fn a_wrong_key_none_and_one_too_many_are_refused_by_name_and_change_nothing() {
    let medium = SimMedium::new();
    drop(open(lazy_config(SLOTS), &medium));
    let plain = medium.bytes(JOURNAL_FILE);
    let error = DiskEngine::open_on(encrypting(lazy_config(SLOTS), 1), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::Encryption { encrypted: false, .. }), "{error}");
    assert!(error.to_string().contains("kvbm disk clear"), "{error}");
    assert!(medium.bytes(JOURNAL_FILE) == plain && medium.bytes(KEY_FILE).is_empty());

    let medium = SimMedium::new();
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let before = files(&medium);
    let error = DiskEngine::open_on(lazy_config(SLOTS), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::Encryption { encrypted: true, .. }), "{error}");
    assert!(error.to_string().contains("encryption.key_file"), "{error}");
    for previous in [None, Some(operator(3))] {
        let mut config = encrypting(lazy_config(SLOTS), 2);
        config.encryption = Some(DiskEncryption { previous, ..encryption(2) });
        let error = DiskEngine::open_on(config, medium.as_medium()).unwrap_err();
        assert!(
            matches!(error, OpenError::Keys { source: KeyFileError::Operator { .. }, .. })
                && error.to_string().contains(&operator(1).id().to_string())
                && error.to_string().contains(&operator(2).id().to_string()),
            "{error}"
        );
    }
    assert!(files(&medium) == before, "what is refused is left alone");

    // A damaged file is no reason to give its blocks up.
    medium.edit(KEY_FILE, |bytes| bytes[20] ^= 1);
    let error = DiskEngine::open_on(encrypting(lazy_config(SLOTS), 1), medium.as_medium()).unwrap_err();
    assert!(matches!(error, OpenError::Keys { source: KeyFileError::Unreadable(_), .. }), "{error}");
    // One that is gone is: there is nothing to decide any more.
    let medium = copy_of(&[before[0].clone(), before[1].clone(), Vec::new()]);
    medium.as_medium().remove(KEY_FILE).unwrap();
    let (engine, recovered) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (0, 1));
    assert_eq!((engine.stats().other_key_records, engine.info().quarantined_slots), (1, 0));
    assert!(all_good(&write(&engine, &[(0, 0)])) && is_served(&engine, 0, 0));
}

#[test]
fn data_keys_open_in_no_other_directory() {
    let medium = SimMedium::new();
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    // The same files where slots have another meaning, as a forged header says.
    let files = files(&medium);
    let [mut journal, slots, keys] = files;
    journal[128..136].copy_from_slice(b"geometry");
    journal[64] = 8;
    let mut crc = kvbm_disk::ContentCrc::new();
    crc.update(&journal[..4088]);
    journal[4088..4096].copy_from_slice(&crc.finish().to_le_bytes());
    let mut config = encrypting(lazy_config(SLOTS), 1);
    config.geometry = b"geometry".to_vec();
    let (_engine, recovered) = open(config, &copy_of(&[journal, slots, keys]));
    assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (0, 1));
}

#[test]
fn a_new_operators_key_takes_over_and_the_old_one_opens_nothing_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0)])) && write_other(&engine, 1, 1).is_ok());
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let before = keys(dir.path());
    let wrapped = std::fs::read(dir.path().join(KEY_FILE)).unwrap()[HEADER + WRAPPED_AT..][..48].to_vec();

    let mut config = in_dir(dir.path(), 2);
    config.encryption = Some(DiskEncryption { previous: Some(operator(1)), ..encryption(2) });
    let (engine, recovered) = DiskEngine::open(config).unwrap();
    assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (2, 0));
    assert!(is_served(&engine, 0, 0) && is_other_served(&engine, 1, 1));
    // New blocks have new keys.
    assert!(all_good(&write(&engine, &[(2, 2)])) && is_served(&engine, 2, 2));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let after = keys(dir.path());
    let states: Vec<_> = after.iter().map(|key| (key.number, key.namespace, key.state)).collect();
    let (old, current) = (DataKeyState::Old, DataKeyState::Current);
    assert_eq!(states, [(1, OURS, old), (2, OTHER, old), (3, OURS, current)]);
    assert_eq!(after[..2].iter().map(|key| key.id).collect::<Vec<_>>(), [before[0].id, before[1].id]);
    let file = std::fs::read(dir.path().join(KEY_FILE)).unwrap();
    assert!(!file.windows(48).any(|part| part == wrapped));

    let error = DiskEngine::open(in_dir(dir.path(), 1)).unwrap_err().to_string();
    assert!(error.contains(&operator(2).id().to_string()), "{error}");
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 2)).unwrap();
    assert!(is_served(&engine, 0, 0) && is_other_served(&engine, 1, 1) && is_served(&engine, 2, 2));
    // The last block of an old key is evicted: the next opening destroys the key.
    assert!(all_good(&write(&engine, &[(0, 5)])));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    drop(DiskEngine::open(in_dir(dir.path(), 2)).unwrap());
    assert_eq!(keys(dir.path())[0].state, DataKeyState::Destroyed);
}

#[test]
fn keys_of_one_namespace_are_changed_alone() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = [dir.path().to_owned()];
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0)])) && write_other(&engine, 1, 1).is_ok());
    engine.flush(PATIENCE).unwrap();
    let ours = DiskKeys { encryption: Some(encryption(1)), ..DiskKeys::default() };
    let busy = offline::rotate(&dirs, &ours, None).unwrap_err();
    assert!(matches!(busy, OpenError::Busy { .. }), "{busy}");
    drop(engine);
    assert_eq!(offline::rotate(&dirs, &ours, Some(OTHER)).unwrap(), 1);
    assert_eq!(offline::rotate(&dirs, &ours, Some(OTHER)).unwrap(), 0);
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert!(all_good(&write(&engine, &[(2, 2)])) && write_other(&engine, 3, 3).is_ok());
    assert!(is_other_served(&engine, 1, 1) && is_other_served(&engine, 3, 3) && is_served(&engine, 0, 0));
    let numbers: Vec<_> = keys(dir.path()).iter().map(|key| (key.number, key.namespace)).collect();
    assert_eq!(numbers, [(1, OURS), (2, OTHER), (3, OTHER)]);
}

#[test]
fn what_is_forgotten_cannot_be_read_even_from_an_old_copy_of_the_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0), (4, 4)])) && write_other(&engine, 1, 1).is_ok());
    engine.flush(PATIENCE).unwrap();
    let read_file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let (slots, journal, former) = (read_file(SLOT_FILE), read_file(JOURNAL_FILE), read_file(KEY_FILE));
    assert_eq!(engine.release_namespace(OURS), 2);
    assert_eq!(engine.info().encryption.unwrap().pending, 1);
    assert!(!is_served(&engine, 0, 0) && is_other_served(&engine, 1, 1));
    engine.flush(PATIENCE).unwrap();
    assert_eq!(engine.info().encryption.unwrap().pending, 0);
    // Overwritten where it lay, in the same file.
    let now = read_file(KEY_FILE);
    assert_eq!(now[HEADER + WRAPPED_AT..][..48], [0; 48]);
    assert_ne!(former[HEADER + WRAPPED_AT..][..48], [0; 48]);
    assert_eq!(former[HEADER + ENTRY..], now[HEADER + ENTRY..], "the other key stays as it is");
    let receipts = keys(dir.path());
    assert_eq!((receipts[0].state, receipts[0].blocks), (DataKeyState::Destroyed, 2));
    assert!(receipts[0].destroyed >= receipts[0].created && receipts[0].created > 0);
    // It begins anew, with a key of another number.
    assert!(all_good(&write(&engine, &[(0, 0)])) && is_served(&engine, 0, 0));
    assert_eq!(keys(dir.path())[2].number, 3);
    drop(engine);

    // Somebody puts the old blocks back.
    std::fs::write(dir.path().join(SLOT_FILE), &slots).unwrap();
    std::fs::write(dir.path().join(JOURNAL_FILE), &journal).unwrap();
    let (engine, recovered) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (1, 2));
    assert!(is_other_served(&engine, 1, 1));
}

#[test]
fn a_key_that_cannot_be_overwritten_is_tried_again_and_not_confirmed() {
    let medium = SimMedium::new();
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    assert!(all_good(&write(&engine, &[(0, 0)])));
    engine.flush(PATIENCE).unwrap();
    medium.inject(KEY_FILE, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
    engine.release_namespace(OURS);
    let error = engine.flush(PATIENCE).unwrap_err().to_string();
    assert!(error.contains("key file"), "{error}");
    assert_eq!(engine.info().encryption.unwrap().pending, 1);
    assert!(!is_served(&engine, 0, 0), "gone for this engine at once");
    let notices = || -> Vec<_> {
        engine.take_key_notices().iter().map(|key| (key.namespace, key.is_destroyed)).collect()
    };
    assert_eq!([notices(), notices()], [[(OURS, false)], [(OURS, false)]], "as long as it is there");
    engine.flush(PATIENCE).unwrap();
    assert_eq!(engine.info().encryption.unwrap().pending, 0);
    assert_eq!([notices(), notices()], [vec![(OURS, true)], vec![]]);
    let after = medium.crash(3);
    assert_eq!(after.bytes(KEY_FILE)[HEADER + WRAPPED_AT..][..48], [0; 48]);
}

#[test]
fn without_a_durable_key_nothing_is_written() {
    for fault in [DiskFault::Error(ErrorKind::StorageFull), DiskFault::Panic] {
        for call in [Call::Write, Call::Sync] {
            let medium = SimMedium::new();
            let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
            medium.inject(KEY_FILE, call, 0, 1, fault);
            let refused = write(&engine, &[(0, 0)]);
            assert!(matches!(refused[0], Err(OpError::NoKey { .. })), "{refused:?}");
            assert!(medium.bytes(SLOT_FILE).iter().all(|byte| *byte == 0));
            assert!(all_good(&write(&engine, &[(0, 0)])) && is_served(&engine, 0, 0), "it goes on");
            engine.flush(PATIENCE).unwrap();
            let (engine, recovered) = open(encrypting(lazy_config(SLOTS), 1), &medium.crash(5));
            assert_eq!(recovered.blocks.len(), 1);
            assert!(is_served(&engine, 0, 0));
        }
    }
}

#[test]
fn a_key_without_blocks_does_not_outlive_the_crash_before_the_first_block() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = DiskEngine::open(in_dir(dir.path(), 1)).unwrap();
    assert!(all_good(&write(&engine, &[(0, 0)])));
    let names = [JOURNAL_FILE, KEY_FILE, SLOT_FILE];
    let copies = names.map(|name| std::fs::read(dir.path().join(name)).unwrap());
    drop(engine);
    // The journal as it was before the commit.
    let mut journal = copies[0].clone();
    journal.truncate(4096);
    let crashed = tempfile::tempdir().unwrap();
    for (name, bytes) in names.into_iter().zip([&journal, &copies[1], &copies[2]]) {
        std::fs::write(crashed.path().join(name), bytes).unwrap();
    }
    let (engine, recovered) = DiskEngine::open(in_dir(crashed.path(), 1)).unwrap();
    assert!(recovered.blocks.is_empty() && recovered.dropped.without_key == 0);
    assert_eq!(keys(crashed.path())[0].state, DataKeyState::Destroyed);
    assert!(all_good(&write(&engine, &[(0, 0)])) && is_served(&engine, 0, 0));
    assert_eq!(keys(crashed.path())[1].number, 2);
}

#[test]
fn the_key_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    drop(DiskEngine::open(in_dir(dir.path(), 1)).unwrap());
    let path: PathBuf = dir.path().join(KEY_FILE);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    let error = DiskEngine::open(in_dir(dir.path(), 1)).unwrap_err().to_string();
    assert!(error.contains(KEY_FILE), "{error}");
}
