//! What somebody can do who may write the disk directory, knows the format and lacks the key:
//! delete, and nothing else. Without a key the same forgeries pass, so these tests can fail.

use crate::support::*;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::{ContentCrc, DiskConfig, FormatError, OpenError, Scrubbed, Scrubber};
use kvbm_keys::DeploymentKey;

const HEADER: usize = 4096;
const RECORD: usize = 80;
const SLOTS: u32 = 8;

fn with_key(secret: Option<&str>) -> DiskConfig {
    let mut config = lazy_config(SLOTS);
    config.key = secret.map(|secret| DeploymentKey::from_secret(secret.as_bytes()));
    config
}

/// A directory with block `n` in slot `n`, whose engine was shut down.
fn directory(secret: Option<&str>, blocks: u32) -> SimMedium {
    let medium = SimMedium::new();
    let (engine, _) = open(with_key(secret), &medium);
    for slot in 0..blocks {
        assert!(all_good(&write(&engine, &[(slot, u64::from(slot))])));
        engine.flush(PATIENCE).unwrap();
    }
    drop(engine);
    medium
}

fn crc(parts: &[&[u8]]) -> [u8; 8] {
    let mut crc = ContentCrc::new();
    for part in parts {
        crc.update(part);
    }
    crc.finish().to_le_bytes()
}

/// Changes the record at `index`, and makes its CRC match.
fn forge_record(medium: &SimMedium, index: usize, change: impl Fn(&mut [u8])) {
    medium.edit(JOURNAL_FILE, |bytes| {
        let id = bytes[24..32].to_vec();
        let record = &mut bytes[HEADER + RECORD * index..][..RECORD];
        change(record);
        let sum = crc(&[&id, &record[..RECORD - 8]]);
        record[RECORD - 8..].copy_from_slice(&sum);
    });
}

fn slot_bytes(slot: usize) -> std::ops::Range<usize> {
    slot * BLOCK..(slot + 1) * BLOCK
}

/// Content of the attacker's, with the sum that the record wants where there is no key: eight bytes
/// at its end give it any CRC.
fn content_with_crc_of(wanted: &[u8], forged: &mut [u8]) {
    let at = forged.len() - 8;
    forged[..at].fill(0x66);
    forged[at..].fill(0);
    let wanted = u64::from_le_bytes(crc(&[wanted]));
    // The CRC of a sum is the sum of CRCs: a linear system of 64 equations.
    let base = u64::from_le_bytes(crc(&[forged]));
    let column = |bit: usize| {
        let mut one = forged.to_vec();
        one[at + bit / 8] ^= 1 << (bit % 8);
        u64::from_le_bytes(crc(&[&one])) ^ base
    };
    let mut rows: Vec<(u64, u64)> = (0..64).map(|bit| (column(bit), 1 << bit)).collect();
    let (mut left, mut chosen) = (wanted ^ base, 0_u64);
    for bit in (0..64).rev() {
        let Some(pivot) = rows.iter().position(|row| row.0 >> bit == 1) else { continue };
        let (value, bits) = rows.swap_remove(pivot);
        for row in rows.iter_mut().filter(|row| row.0 >> bit & 1 == 1) {
            *row = (row.0 ^ value, row.1 ^ bits);
        }
        if left >> bit & 1 == 1 {
            (left, chosen) = (left ^ value, chosen ^ bits);
        }
    }
    forged[at..].copy_from_slice(&chosen.to_le_bytes());
    assert_eq!(u64::from_le_bytes(crc(&[forged])), wanted, "the attack works on a CRC");
}

#[test]
fn content_of_the_same_crc_passes_without_a_key_and_never_with_one() {
    for secret in [None, Some("secret")] {
        let medium = directory(secret, 2);
        medium.edit(SLOT_FILE, |bytes| {
            content_with_crc_of(&pattern(1, BLOCK), &mut bytes[slot_bytes(1)]);
        });
        let (engine, _) = open(with_key(secret), &medium);
        let read = read(&engine, 1, 1);
        assert_eq!(read.is_ok(), secret.is_none(), "{secret:?}");
        assert_eq!(engine.stats().corrupt_checksum, u64::from(secret.is_some()));
        assert!(is_served(&engine, 0, 0));
    }
}

#[test]
fn a_forged_record_is_no_record() {
    let other = crc(&[&pattern(9, BLOCK)]);
    for (secret, served) in [(None, true), (Some("secret"), false)] {
        let medium = directory(secret, 2);
        // The record's block is named anew: its content stays, and is said to be that of block 1.
        forge_record(&medium, 0, |record| {
            record[8] += 9;
            record[56] ^= other[0];
        });
        let (engine, recovered) = open(with_key(secret), &medium);
        let found = recovered_numbers(&recovered);
        assert_eq!(found.iter().any(|(slot, _)| *slot == 0), served, "{secret:?}");
        assert_eq!(recovered.dropped.damaged_records, u64::from(!served));
        assert!(is_served(&engine, 1, 1) && read(&engine, 0, 0).is_err());
    }
}

#[test]
fn bytes_of_another_slot_are_not_served_and_counted() {
    let medium = directory(Some("secret"), 3);
    medium.edit(SLOT_FILE, |bytes| {
        let (first, second) = (bytes[slot_bytes(0)].to_vec(), bytes[slot_bytes(1)].to_vec());
        bytes[slot_bytes(0)].copy_from_slice(&second);
        bytes[slot_bytes(1)].copy_from_slice(&first);
    });
    let (engine, recovered) = open(with_key(Some("secret")), &medium);
    assert_eq!(recovered.blocks.len(), 3);
    assert!(!is_served(&engine, 0, 0) && !is_served(&engine, 1, 1) && is_served(&engine, 2, 2));
    assert_eq!((engine.stats().corrupt_checksum, engine.info().quarantined_slots), (2, 2));
}

/// Records of another rank or an older life are signed too, with that journal's number.
#[test]
fn records_of_another_journal_and_older_ones_are_not_taken() {
    let (medium, other) = (directory(Some("secret"), 3), directory(Some("secret"), 4));
    let foreign = other.bytes(JOURNAL_FILE)[HEADER + 3 * RECORD..][..RECORD].to_vec();
    let own = medium.bytes(JOURNAL_FILE)[HEADER..][..RECORD].to_vec();
    let (engine, _) = open(with_key(Some("secret")), &medium);
    assert!(all_good(&write(&engine, &[(0, 5)])));
    engine.flush(PATIENCE).unwrap();
    drop(engine);
    let end = medium.bytes(JOURNAL_FILE).len() - RECORD;
    medium.edit(JOURNAL_FILE, |bytes| {
        // Before the mark of the shutdown: behind it, they would be a torn tail.
        bytes.splice(end..end, [foreign, own].concat());
    });
    let (engine, recovered) = open(with_key(Some("secret")), &medium);
    assert_eq!(recovered_numbers(&recovered), [(1, 1), (2, 2), (0, 5)]);
    assert_eq!(recovered.dropped.damaged_records, 1, "that of the other journal");
    assert!(is_served(&engine, 0, 5) && read(&engine, 0, 0).is_err() && read(&engine, 3, 3).is_err());
}

#[test]
fn a_changed_header_is_refused_and_left_alone() {
    let medium = directory(Some("secret"), 2);
    medium.edit(JOURNAL_FILE, |bytes| {
        bytes[20] = 5;
        let sum = crc(&[&bytes[..HEADER - 8]]);
        bytes[HEADER - 8..HEADER].copy_from_slice(&sum);
    });
    let before = medium.bytes(JOURNAL_FILE);
    let refused = kvbm_disk::DiskEngine::open_on(with_key(Some("secret")), medium.as_medium());
    assert!(matches!(refused, Err(OpenError::Format { source: FormatError::HeaderChecksum, .. })));
    assert!(medium.bytes(JOURNAL_FILE) == before);
}

#[test]
fn what_was_written_without_the_key_or_with_another_is_counted_and_not_found() {
    for (before, after) in [(None, "secret"), (Some("older secret"), "secret")] {
        let medium = directory(before, 3);
        let (engine, recovered) = open(with_key(Some(after)), &medium);
        // With the mark of the shutdown.
        assert_eq!((recovered.dropped.other_key, recovered.blocks.len()), (4, 0));
        assert_eq!(engine.stats().other_key_records, 4);
        for number in 0..3 {
            assert!(!is_served(&engine, number, u64::from(number)), "{before:?}");
        }
        assert!(all_good(&write(&engine, &[(2, 7)])) && is_served(&engine, 2, 7));
        drop(engine);
        let (engine, recovered) = open(with_key(Some(after)), &medium);
        assert_eq!((recovered.dropped, recovered.clean), (kvbm_disk::Dropped::default(), true));
        assert!(is_served(&engine, 2, 7));
    }
}

/// Without the secret, nothing says which block is right: the engine does not open, and nothing is
/// lost.
#[test]
fn a_signed_journal_is_refused_without_the_secret() {
    let medium = directory(Some("secret"), 3);
    let before = medium.bytes(JOURNAL_FILE);
    let error = kvbm_disk::DiskEngine::open_on(with_key(None), medium.as_medium()).err().unwrap();
    assert!(error.to_string().contains("namespace.deployment_secret"), "{error}");
    assert!(medium.bytes(JOURNAL_FILE) == before);
    let (engine, recovered) = open(with_key(Some("secret")), &medium);
    assert_eq!(recovered.blocks.len(), 3);
    assert!((0..3).all(|number| is_served(&engine, number, u64::from(number))));
}

#[test]
fn scrubbing_finds_what_is_forged() {
    let medium = directory(Some("secret"), 3);
    medium.edit(SLOT_FILE, |bytes| content_with_crc_of(&pattern(1, BLOCK), &mut bytes[slot_bytes(1)]));
    let (engine, _) = open(with_key(Some("secret")), &medium);
    let mut scrubber = Scrubber::default();
    let bad: Vec<_> = (0..3)
        .filter_map(|_| match engine.scrub(&mut scrubber) {
            Scrubbed::Bad { slot, .. } => Some(slot.0),
            Scrubbed::Good { .. } => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!((bad, engine.stats().scrubbed), (vec![1], 2));
    assert!(is_served(&engine, 0, 0) && !is_served(&engine, 1, 1) && is_served(&engine, 2, 2));
}
