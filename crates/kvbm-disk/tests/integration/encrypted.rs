//! Encrypted blocks: what lies in the files, and what is served when somebody changes them.

use crate::support::*;
use kvbm_disk::fault::{Call, DiskFault, JOURNAL_FILE, KEY_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{
    Archive, ContentCrc, DiskConfig, DiskEncryption, DiskEngine, DiskKeys, EngineMode, FileAccess, OpError,
    Scrubbed, Scrubber, SlotCorruption, offline,
};
use kvbm_keys::{DeploymentKey, OperatorKey};
use kvbm_plan::BlockId;
use std::io::ErrorKind;

const HEADER: usize = 4096;
const RECORD: usize = 96;
const SLOTS: u32 = 8;

pub(crate) fn operator(seed: u8) -> OperatorKey {
    let bytes: [u8; 32] = std::array::from_fn(|at| seed.wrapping_add(at as u8));
    OperatorKey::parse(&bytes).unwrap()
}

pub(crate) fn encryption(seed: u8) -> DiskEncryption {
    DiskEncryption { key: operator(seed), previous: None }
}

pub(crate) fn encrypting(mut config: DiskConfig, seed: u8) -> DiskConfig {
    config.encryption = Some(encryption(seed));
    config
}

/// A directory with block `n` in slot `n`, whose engine was shut down.
fn directory(blocks: u32) -> SimMedium {
    let medium = SimMedium::new();
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    for slot in 0..blocks {
        assert!(all_good(&write(&engine, &[(slot, u64::from(slot))])));
        engine.flush(PATIENCE).unwrap();
    }
    drop(engine);
    medium
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// What must not be found: parts of blocks from 16 bytes on, at any place, and their checksums.
fn assert_says_nothing(bytes: &[u8], name: &str) {
    for number in 0..3 {
        let block = pattern(number, BLOCK);
        for part in block.chunks_exact(16).step_by(31) {
            assert!(!contains(bytes, part), "{name} has bytes of block {number}");
        }
        let mut crc = ContentCrc::new();
        crc.update(&block);
        assert!(!contains(bytes, &crc.finish().to_le_bytes()), "{name} has the CRC of block {number}");
    }
}

#[test]
fn blocks_come_back_and_no_file_has_their_bytes() {
    for (mode, sign) in [
        (EngineMode::Auto, false),
        (EngineMode::Auto, true),
        (EngineMode::Threads, false),
        (EngineMode::Buffered, true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = encrypting(DiskConfig::new(dir.path(), SLOTS, BLOCK as u64, [7; 16]), 1);
        config.engine = mode;
        config.key = sign.then(|| DeploymentKey::from_secret(b"a secret"));
        let Ok((engine, _)) = DiskEngine::open(config.clone()) else {
            assert_eq!(mode, EngineMode::Threads, "a file system without O_DIRECT");
            continue;
        };
        let outcomes = write(&engine, &[(0, 0), (1, 1), (5, 2)]);
        assert!(all_good(&outcomes), "{outcomes:?}");
        assert!([(0, 0), (1, 1), (5, 2)].into_iter().all(|(slot, number)| is_served(&engine, slot, number)));
        engine.flush(PATIENCE).unwrap();
        let info = engine.info().encryption.unwrap();
        assert_eq!((info.operator, info.data_keys, info.pending), (operator(1).id(), 1, 0));
        let checksums = engine.checksums();
        drop(engine);
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            assert_says_nothing(&bytes, &path.display().to_string());
            for outcome in &outcomes {
                let known = outcome.as_ref().unwrap().checksum.to_le_bytes();
                assert!(!contains(&bytes, &known), "{}: a checksum of plain bytes", path.display());
            }
        }
        let (engine, recovered) = DiskEngine::open(config.clone()).unwrap();
        assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (3, 0));
        assert!([(0, 0), (1, 1), (5, 2)].into_iter().all(|(slot, number)| is_served(&engine, slot, number)));
        assert_eq!(engine.checksums(), checksums);
        drop(engine);

        let keys = DiskKeys { signing: config.key.clone(), encryption: config.encryption.clone() };
        let dirs = [dir.path().to_owned()];
        let found = offline::repair(&dirs, Some(&keys), &mut |_, _| {}).unwrap().found;
        assert_eq!((found.verified, found.damaged.len()), (3, 0));
        let archive = Archive::open(&dirs, FileAccess::Owner, Some(&keys)).unwrap();
        let mut memory = vec![0; BLOCK];
        let block = archive.read(BlockId(5), &identity(2), &mut memory).unwrap();
        assert_eq!(block, Some(&pattern(2, BLOCK)[..]));
        // Blocks that look alike do not look alike on the disk.
        let slots = std::fs::read(dir.path().join(SLOT_FILE)).unwrap();
        assert_ne!(slots[..BLOCK], slots[BLOCK..2 * BLOCK]);
    }
}

/// Makes the record's checksum match what was changed in it.
fn forge_record(medium: &SimMedium, index: usize, change: impl Fn(&mut [u8])) {
    medium.edit(JOURNAL_FILE, |bytes| {
        let id = bytes[24..32].to_vec();
        let record = &mut bytes[HEADER + RECORD * index..][..RECORD];
        change(record);
        let mut crc = ContentCrc::new();
        crc.update(&id);
        crc.update(&record[..RECORD - 8]);
        record[RECORD - 8..].copy_from_slice(&crc.finish().to_le_bytes());
    });
}

#[test]
fn no_bit_of_a_block_its_tag_or_its_name_passes_when_it_is_changed() {
    let good = directory(2);
    let copy = || {
        let medium = SimMedium::new();
        for file in [JOURNAL_FILE, SLOT_FILE, KEY_FILE] {
            medium.edit(file, |bytes| *bytes = good.bytes(file));
        }
        medium
    };
    let mut random = Random(7);
    for turn in 0..200_usize {
        let medium = copy();
        let bit = random.next() as usize;
        let flip = |bytes: &mut [u8], from: usize, len: usize| bytes[from + bit / 8 % len] ^= 1 << (bit % 8);
        match turn % 4 {
            0 => medium.edit(SLOT_FILE, |bytes| flip(bytes, 0, BLOCK)),
            1 => forge_record(&medium, 0, |record| flip(record, 72, 16)),
            // The hash, and the number of the data key.
            2 => forge_record(&medium, 0, |record| flip(record, 16, 16)),
            _ => forge_record(&medium, 0, |record| flip(record, 56, 8)),
        }
        let (engine, recovered) = open(encrypting(lazy_config(SLOTS), 1), &medium);
        // Also under the name that it has now.
        for found in recovered.blocks.iter().filter(|found| found.slot == BlockId(0)) {
            let target = kvbm_disk::ReadTarget::new(BLOCK);
            let (done, outcomes) = std::sync::mpsc::channel();
            let mut batch = kvbm_disk::IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
            assert!(batch.read_target(BlockId(0), found.identity, &target));
            engine.submit(batch).unwrap();
            let outcomes: Vec<kvbm_disk::OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
            let error = outcomes[0].as_ref().unwrap_err();
            let is_tag = |cause: &SlotCorruption| matches!(cause, SlotCorruption::Tag { .. });
            assert!(matches!(error, OpError::Corrupt { cause, .. } if is_tag(cause)), "{turn}: {error}");
            assert_eq!((engine.stats().corrupt_checksum, engine.info().quarantined_slots), (1, 1), "{turn}");
            // Nothing of it came into the caller's memory, not even what decrypts to nothing.
            assert!(target.into_buffer().unwrap().as_slice().iter().all(|byte| *byte == 0));
        }
        let lost = recovered.dropped.without_key + recovered.blocks.len() as u64;
        assert_eq!((lost, engine.stats().other_key_records), (2, recovered.dropped.without_key));
        assert!(is_served(&engine, 1, 1));
    }
}

#[test]
fn swapped_slots_and_a_former_block_of_a_slot_are_found() {
    let medium = directory(3);
    let old = medium.bytes(SLOT_FILE);
    medium.edit(SLOT_FILE, |bytes| {
        let first = bytes[..BLOCK].to_vec();
        bytes.copy_within(BLOCK..2 * BLOCK, 0);
        bytes[BLOCK..2 * BLOCK].copy_from_slice(&first);
    });
    let config = encrypting(lazy_config(SLOTS), 1);
    let (engine, _) = open(config.clone(), &medium);
    assert!(!is_served(&engine, 0, 0) && !is_served(&engine, 1, 1) && is_served(&engine, 2, 2));
    let quarantined = engine.info().quarantined_slots;
    assert_eq!(quarantined, 2);
    // The same block with other bytes: what lay there before belongs to no record any more.
    let other = std::sync::Arc::new(kvbm_disk::OwnedBuffer::from_slice(&pattern(77, BLOCK)));
    let (done, outcomes) = std::sync::mpsc::channel();
    let mut batch =
        kvbm_disk::IoBatch::new(move |outcomes: Vec<kvbm_disk::OpOutcome>| done.send(outcomes).unwrap());
    batch.write_buffer(BlockId(2), identity(2), &other);
    engine.submit(batch).unwrap();
    assert!(all_good(&outcomes.recv_timeout(PATIENCE).unwrap()));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    medium.edit(SLOT_FILE, |bytes| {
        bytes[2 * BLOCK..3 * BLOCK].copy_from_slice(&old[2 * BLOCK..3 * BLOCK]);
    });
    let (engine, _) = open(config, &medium);
    let error = read(&engine, 2, 2).unwrap_err();
    assert!(matches!(error, OpError::Corrupt { cause: SlotCorruption::Tag { .. }, .. }), "{error}");
}

#[test]
fn scrubbing_finds_what_is_damaged_and_a_failed_sync_is_made_good() {
    let medium = directory(3);
    medium.edit(SLOT_FILE, |bytes| bytes[BLOCK + 9] ^= 4);
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &medium);
    let mut scrubber = Scrubber::default();
    let found: Vec<_> = (0..3).map(|_| engine.scrub(&mut scrubber)).collect();
    assert!(matches!(found[0], Scrubbed::Good { .. }) && matches!(found[2], Scrubbed::Good { .. }));
    assert!(matches!(&found[1], Scrubbed::Bad { slot: BlockId(1), .. }), "{:?}", found[1]);

    medium.inject(SLOT_FILE, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
    assert!(all_good(&write(&engine, &[(4, 1)])));
    assert!(engine.flush(PATIENCE).is_err());
    engine.flush(PATIENCE).unwrap();
    assert_eq!(engine.stats().renewed, 1);
    let after = medium.crash(1);
    drop(engine);
    assert_says_nothing(&after.bytes(SLOT_FILE), SLOT_FILE);
    let (engine, _) = open(encrypting(lazy_config(SLOTS), 1), &after);
    assert!(is_served(&engine, 0, 0) && is_served(&engine, 4, 1) && is_served(&engine, 2, 2));
}

#[test]
fn power_is_lost_and_what_was_flushed_is_there() {
    for seed in 0..20 {
        let medium = SimMedium::new();
        let config = encrypting(lazy_config(SLOTS), 1);
        let (engine, _) = open(config.clone(), &medium);
        assert!(all_good(&write(&engine, &[(0, 0), (1, 1)])));
        if seed % 2 == 0 {
            engine.flush(PATIENCE).unwrap();
        }
        assert!(all_good(&write(&engine, &[(2, 2)])));
        let after = medium.crash(seed);
        drop(engine);
        let (engine, recovered) = open(config, &after);
        let flushed = if seed % 2 == 0 { 2 } else { 0 };
        assert_eq!((recovered.blocks.len(), recovered.dropped.without_key), (flushed, 0), "seed {seed}");
        assert!((0..flushed as u32).all(|slot| is_served(&engine, slot, slot.into())));
        assert!(all_good(&write(&engine, &[(6, 6)])) && is_served(&engine, 6, 6));
    }
}

#[test]
fn a_rank_that_follows_reads_what_the_writer_encrypts() {
    let dir = tempfile::tempdir().unwrap();
    let config = encrypting(DiskConfig::new(dir.path(), SLOTS, BLOCK as u64, [7; 16]), 1);
    let (writer, _) = DiskEngine::open(config.clone()).unwrap();
    let (reader, _) = DiskEngine::follow(config.clone()).unwrap();
    // The first key of a namespace is the writer's to make.
    let early = write(&reader, &[(0, 0)]);
    assert!(matches!(early[0], Err(OpError::NoKey { .. })), "{early:?}");
    assert!(!is_served(&reader, 0, 0));
    assert!(all_good(&write(&writer, &[(0, 0), (3, 1)])));
    assert!(all_good(&write(&reader, &[(0, 0), (3, 1)])));
    assert!(is_served(&reader, 0, 0) && is_served(&reader, 3, 1));

    // Both forget, and go on with a new key.
    assert_eq!(writer.release_namespace(identity(0).namespace), 2);
    assert_eq!(reader.release_namespace(identity(0).namespace), 2);
    // The key is still in the file, and not for the reader.
    let early = write(&reader, &[(1, 5)]);
    assert!(matches!(early[0], Err(OpError::NoKey { .. })), "{early:?}");
    writer.flush(PATIENCE).unwrap();
    assert!(all_good(&write(&writer, &[(1, 5)])));
    assert!(all_good(&write(&reader, &[(1, 5)])));
    assert!(is_served(&writer, 1, 5) && is_served(&reader, 1, 5));
    writer.flush(PATIENCE).unwrap();
    let (late, recovered) = DiskEngine::follow(config).unwrap();
    assert_eq!(recovered_numbers(&recovered), [(1, 5)]);
    assert!(is_served(&late, 1, 5));
}
