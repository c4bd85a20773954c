//! Files from the fuzzer's bytes, with checksums that match: nobody guesses those.

use crate::DiskEncryption;
use crate::record::{
    ENCRYPTED_KEYED_VERSION, ENCRYPTED_VERSION, HEADER_BYTES, KEYED_VERSION, MAGIC, Record, record_bytes,
};
use crate::seal::Seal;
use kvbm_keys::{DeploymentKey, OperatorKey};

/// Bytes from the front of an input; zeros behind its end.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        self.0 = later;
        let mut bytes = [0; N];
        bytes[..now.len()].copy_from_slice(now);
        bytes
    }

    fn take_some(&mut self, bytes: usize) -> Vec<u8> {
        let (now, later) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = later;
        let mut taken = now.to_vec();
        taken.resize(bytes, 0);
        taken
    }

    pub(super) fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }
}

/// The key of a journal of such a beginning, where its version is that of keyed ones.
pub(super) fn key(journal: &[u8]) -> Option<DeploymentKey> {
    let keyed = [KEYED_VERSION, ENCRYPTED_KEYED_VERSION].map(u32::to_le_bytes);
    let keyed = journal.get(8..12).is_some_and(|version| keyed.iter().any(|keyed| keyed == version));
    keyed.then(|| DeploymentKey::from_secret(b"of the fuzz target"))
}

/// Whether its version is one of those whose blocks are encrypted.
pub(super) fn is_encrypted(journal: &[u8]) -> bool {
    let versions = [ENCRYPTED_VERSION, ENCRYPTED_KEYED_VERSION].map(u32::to_le_bytes);
    journal.get(8..12).is_some_and(|found| versions.iter().any(|version| version == found))
}

/// The keys of directories whose blocks are encrypted.
pub(super) fn encryption() -> DiskEncryption {
    let key = OperatorKey::parse(b"the operator's key of the target").unwrap_or_else(|bad| panic!("{bad}"));
    DiskEncryption { key, previous: None }
}

/// How its records are summed.
pub(super) fn seal(journal: &[u8]) -> Seal {
    Seal::new([0; 16], key(journal).as_ref()).encrypting(is_encrypted(journal))
}

/// A journal: the input itself, if it begins as one does. Else it says one in few bytes:
///
/// | bytes | what |
/// |---|---|
/// | 1 | bit 0: the header's checksum is wrong; bit 1: a mark of a shutdown follows the records; the other bits: so many bytes are cut off |
/// | 68 | the beginning of the header; of a keyed one the name of the key follows |
/// | 1, n | so many bytes of geometry |
/// | 73 each | a record: what its checksum is changed by, and its first 72 bytes; 16 more where records have tags |
/// | rest | the torn tail |
pub(super) fn journal(input: &[u8]) -> Vec<u8> {
    if input.starts_with(&MAGIC) {
        return input.to_vec();
    }
    let mut input = Input(input);
    let how = input.byte();
    let (mut bytes, seal) = header(&mut input, how & 1);
    let mut id = [0; 8];
    id.copy_from_slice(&bytes[24..32]);
    let covered = record_bytes(seal.encrypts()) - 8;
    while input.0.len() > covered {
        let changed = input.byte();
        let record = input.take_some(covered);
        let crc = seal.journal(&[&id[..], &record].concat()) ^ u64::from(changed);
        bytes.extend_from_slice(&record);
        bytes.extend_from_slice(&crc.to_le_bytes());
    }
    bytes.extend_from_slice(input.0);
    if how & 2 != 0 {
        bytes.extend_from_slice(&Record::CLEAN.encode(u64::from_le_bytes(id), &seal));
    }
    bytes.truncate(bytes.len() - usize::from(how >> 2));
    bytes
}

fn header(input: &mut Input<'_>, changed: u8) -> (Vec<u8>, Seal) {
    let mut bytes = input.take::<68>().to_vec();
    let seal = seal(&bytes);
    if let Some(id) = seal.key_id() {
        bytes.extend_from_slice(id.as_bytes());
    }
    bytes.resize(128, 0);
    let length = usize::from(input.byte());
    let (geometry, rest) = input.0.split_at(length.min(input.0.len()));
    bytes.extend_from_slice(geometry);
    input.0 = rest;
    bytes.resize(HEADER_BYTES - 8, 0);
    let crc = seal.journal(&bytes) ^ u64::from(changed);
    bytes.extend_from_slice(&crc.to_le_bytes());
    (bytes, seal)
}
