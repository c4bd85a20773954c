//! A key file of unknown history.

use super::input::{self, Input};
use crate::checksum::crc64;
use crate::fault::SimMedium;
use crate::keyring::{ENTRY_BYTES, HEADER_BYTES, KEY_FILE, KEY_TEMP_FILE, KeyFile, Keyring, MAGIC};
use crate::medium::Medium;
use crate::{DataKeyState, OpenError};
use kvbm_plan::NamespaceId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What is read of a key file is what is written again. A file that is refused is left alone. One
/// that is taken gives out no key that the operator's key has not wrapped, and what is destroyed is
/// gone. The input: a file, if it begins as one does, else the same with checksums that match,
/// whose operator is ours if the first byte is even.
pub fn keys(input: &[u8]) {
    let bytes = file_of(input);
    let decoded = KeyFile::decode(&bytes);
    if let Ok(file) = &decoded {
        is_written_again(file, &bytes);
    }
    let medium = SimMedium::new();
    medium.edit(KEY_FILE, |file| file.clone_from(&bytes));
    medium.edit(KEY_TEMP_FILE, |file| file.clone_from(&bytes));
    let seam = || Arc::new(medium.clone()) as Arc<dyn Medium>;
    let encryption = input::encryption();
    let open = || Keyring::open(seam(), &encryption, (&[1; 16], b"geometry"), 7);
    let keyring = match open() {
        Ok(keyring) => keyring,
        Err(error) => {
            assert!(matches!(error, OpenError::Keys { .. }) && !error.to_string().is_empty(), "{error}");
            let ours = decoded.is_ok_and(|file| file.operator == encryption.key.id());
            assert!(!ours, "a file of ours is taken: {error}");
            assert!(medium.bytes(KEY_FILE) == bytes, "what is refused is left alone");
            return;
        }
    };
    assert_eq!(keyring.info().data_keys, 0, "nobody wraps a key without the operator's");
    is_used(&keyring, &medium);
    keyring.doom_unused(&HashSet::new());
    assert!(keyring.destroy_doomed().is_ok() && keyring.info().pending == 0);
    drop(keyring);
    let again = open().unwrap_or_else(|error| panic!("it was opened before: {error}"));
    assert_eq!(again.info().data_keys, 0, "what was destroyed is gone");
}

fn is_written_again(file: &KeyFile, bytes: &[u8]) {
    let written = file.encode();
    assert_eq!(written.len(), HEADER_BYTES + file.entries.len() * ENTRY_BYTES);
    assert!(written[..HEADER_BYTES] == bytes[..HEADER_BYTES], "a header is all that it says");
    for (place, entry) in file.known() {
        let at = HEADER_BYTES + place * ENTRY_BYTES;
        assert!(entry.encode() == bytes[at..at + ENTRY_BYTES], "an entry is all that it says");
        assert!(entry.info.state != DataKeyState::Destroyed || entry.wrapped == [0; 48]);
    }
}

/// New keys come beside what is there, are found again by number and namespace alone, and go.
fn is_used(keyring: &Keyring, medium: &SimMedium) {
    let (one, two) = (NamespaceId(1), NamespaceId(2));
    let (Ok(first), Ok(second)) = (keyring.for_new(one, true), keyring.for_new(two, true)) else {
        assert!(decoded_has_last_number(medium), "a medium without faults");
        return;
    };
    assert!(first.number > 7 && second.number > first.number, "numbers of blocks are not used again");
    let number = u64::from(first.number);
    assert_eq!(keyring.key(one, number).map(|found| found.key.id()), Some(first.key.id()));
    assert!(keyring.key(two, number).is_none());
    let Ok(file) = KeyFile::decode(&medium.bytes(KEY_FILE)) else { panic!("it was just written") };
    let entry = file.known().find(|(_, entry)| entry.info.number == first.number);
    let wrapped = entry.map_or_else(|| panic!("it is there"), |(_, entry)| entry.wrapped);
    keyring.doom(one, &HashMap::from([(number, 3)]));
    assert!(keyring.key(one, number).is_none(), "forgotten at once");
    assert!(keyring.destroy_doomed().is_ok());
    let bytes = medium.bytes(KEY_FILE);
    assert!(bytes.windows(wrapped.len()).all(|part| part != wrapped), "overwritten");
    let receipt = KeyFile::decode(&bytes).ok().and_then(|file| {
        let found = file.known().find(|(_, entry)| entry.info.number == first.number)?.1.info.clone();
        Some((found.state, found.blocks))
    });
    assert_eq!(receipt, Some((DataKeyState::Destroyed, 3)));
}

/// Whether no number is left for a new key.
fn decoded_has_last_number(medium: &SimMedium) -> bool {
    let file = KeyFile::decode(&medium.bytes(KEY_FILE));
    file.is_ok_and(|file| file.known().any(|(_, entry)| entry.info.number >= u32::MAX - 2))
}

fn file_of(input: &[u8]) -> Vec<u8> {
    if input.starts_with(&MAGIC) {
        return input.to_vec();
    }
    let mut input = Input(input);
    let how = input.byte();
    let mut file = KeyFile::new(input::encryption().key.id());
    file.changes = u64::from(how);
    let mut bytes = file.encode_header().to_vec();
    if how & 1 != 0 {
        bytes[16..32].copy_from_slice(&input.take::<16>());
        let crc = crc64(&bytes[..HEADER_BYTES - 8]).to_le_bytes();
        bytes[HEADER_BYTES - 8..].copy_from_slice(&crc);
    }
    while !input.0.is_empty() {
        let mut entry = input.take::<{ ENTRY_BYTES - 8 }>().to_vec();
        entry.extend_from_slice(&crc64(&entry).to_le_bytes());
        bytes.extend_from_slice(&entry);
    }
    let cut = bytes.len() - usize::from(how >> 5);
    bytes.truncate(cut);
    bytes
}
