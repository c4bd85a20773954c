//! An engine that follows another one: it reads what that one writes, and changes nothing.

use crate::support::*;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{DiskConfig, DiskEngine, EngineMode, OpError, OpenError, Recovered};
use kvbm_keys::DeploymentKey;
use kvbm_plan::BlockId;

fn follow(config: DiskConfig, medium: &impl CloneMedium) -> (DiskEngine, Recovered) {
    DiskEngine::follow_on(config, medium.as_medium()).unwrap()
}

#[test]
fn what_one_engine_writes_another_one_reads() {
    let key = Some(DeploymentKey::from_secret(b"a secret"));
    for (mode, key) in [
        (EngineMode::Auto, None),
        (EngineMode::Auto, key),
        (EngineMode::Threads, None),
        (EngineMode::Buffered, None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = DiskConfig::new(dir.path(), 8, BLOCK as u64, [7; 16]);
        (config.engine, config.key) = (mode, key);
        let Ok((writer, _)) = DiskEngine::open(config.clone()) else {
            assert_eq!(mode, EngineMode::Threads, "a file system without O_DIRECT");
            continue;
        };
        let (reader, recovered) = DiskEngine::follow(config.clone()).unwrap();
        assert!(recovered.blocks.is_empty());
        assert!(all_good(&write(&writer, &[(0, 0), (3, 1), (5, 2)])));
        assert!(!is_served(&reader, 3, 1), "nobody told it");
        let noted = write(&reader, &[(0, 0), (3, 1), (5, 2)]);
        assert!(noted.iter().all(|one| one.as_ref().is_ok_and(|done| done.bytes == 0)), "{noted:?}");
        assert!([(0, 0), (3, 1), (5, 2)].into_iter().all(|(slot, number)| is_served(&reader, slot, number)));
        assert_eq!((reader.stats().writes, reader.stats().written_bytes), (3, 0));
        let report = reader.flush(PATIENCE).unwrap();
        assert_eq!((report.durable_blocks, report.pending_blocks), (3, 0));

        // The slot is another block's, for both.
        assert!(all_good(&write(&writer, &[(3, 7)])));
        assert!(all_good(&write(&reader, &[(3, 7)])));
        assert!(is_served(&reader, 3, 7) && !is_served(&reader, 3, 1));

        // What is released here is there.
        reader.release(&[BlockId(0)]);
        assert!(!is_served(&reader, 0, 0) && is_served(&writer, 0, 0));
        writer.flush(PATIENCE).unwrap();
        drop(reader);
        let (reader, recovered) = DiskEngine::follow(config.clone()).unwrap();
        assert_eq!(recovered_numbers(&recovered).len(), 3);
        assert!([(0, 0), (3, 7), (5, 2)].into_iter().all(|(slot, number)| is_served(&reader, slot, number)));

        // It holds no lock, and the writer's successor needs none of it.
        drop(writer);
        let (writer, recovered) = DiskEngine::open(config).unwrap();
        assert_eq!(recovered_numbers(&recovered).len(), 3);
        assert!(recovered.clean && is_served(&writer, 5, 2) && is_served(&reader, 5, 2));
    }
}

#[test]
fn a_follower_changes_no_byte_and_trusts_none() {
    let medium = SimMedium::new();
    let (writer, _) = open(config(8), &medium);
    // One batch each: the blocks of a batch may end in any order.
    for block in [(0, 0), (1, 1), (2, 2)] {
        assert!(all_good(&write(&writer, &[block])));
    }
    drop(writer);
    let files = || (medium.bytes(JOURNAL_FILE), medium.bytes(SLOT_FILE));
    let before = files();
    let (reader, recovered) = follow(config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0), (1, 1), (2, 2)]);
    assert!(all_good(&write(&reader, &[(4, 4), (1, 5)])));
    reader.quarantine(&[BlockId(2)]);
    assert!(!is_served(&reader, 4, 4), "its writer never wrote it");
    assert!(!is_served(&reader, 1, 5) && !is_served(&reader, 1, 1));
    assert!(is_served(&reader, 0, 0));
    assert!(reader.shutdown(PATIENCE));
    drop(reader);
    assert!(files() == before);

    // Bytes that are not what the journal says, as while the writer is at the slot: a miss, and the
    // slot takes the next block.
    medium.edit(SLOT_FILE, |bytes| bytes[BLOCK + 9] ^= 1);
    let (reader, _) = follow(config(8), &medium);
    assert!(matches!(read(&reader, 1, 1), Err(OpError::CutShort { .. })), "{:?}", read(&reader, 1, 1));
    medium.edit(SLOT_FILE, |bytes| bytes[BLOCK..2 * BLOCK].copy_from_slice(&pattern(6, BLOCK)));
    assert!(all_good(&write(&reader, &[(1, 6)])));
    assert!(is_served(&reader, 1, 6));

    // A file that was cut.
    medium.edit(SLOT_FILE, |bytes| bytes.truncate(2 * BLOCK));
    let (_, recovered) = follow(config(8), &medium);
    assert_eq!((recovered_numbers(&recovered), recovered.dropped.without_bytes), (vec![(0, 0), (1, 1)], 1));
}

#[test]
fn there_is_nothing_to_follow_or_something_else() {
    let medium = SimMedium::new();
    let refused = |config: DiskConfig| DiskEngine::follow_on(config, medium.as_medium()).unwrap_err();
    assert!(matches!(refused(config(8)), OpenError::NoJournal { .. }));
    drop(open(config(8), &medium));
    let mut other = config(8);
    other.namespace = [8; 16];
    assert!(matches!(refused(other), OpenError::Namespace { .. }));
    let mut other = config(8);
    other.geometry = b"another".to_vec();
    assert!(matches!(refused(other), OpenError::Geometry { .. }));
    medium.edit(JOURNAL_FILE, |bytes| bytes.truncate(5));
    assert!(matches!(refused(config(8)), OpenError::Format { .. }));
}
