//! Bytes of the key file, drawn in `docs/formats.md`. All integers are little-endian.

use crate::KeyFileError;
use crate::checksum::crc64;
use kvbm_keys::{KeyId, WRAPPED_BYTES};
use kvbm_plan::NamespaceId;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) const MAGIC: [u8; 8] = *b"KVBMKEYS";
const VERSION: u32 = 1;
pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const ENTRY_BYTES: usize = 128;
const CRC_BYTES: usize = 8;

/// Entries of a file, destroyed keys included.
pub(crate) const MAX_ENTRIES: usize = 65_536;
/// Bytes of the longest file.
pub(crate) const MAX_BYTES: u64 = (HEADER_BYTES + MAX_ENTRIES * ENTRY_BYTES) as u64;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    magic: [u8; 8],
    version: U32,
    entry_bytes: U32,
    operator: [u8; 16],
    changes: U64,
    zero: [u8; 16],
    crc: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct EntryLayout {
    state: u8,
    zero: [u8; 3],
    namespace: U32,
    number: U32,
    zero_too: U32,
    created: U64,
    destroyed: U64,
    blocks: U64,
    id: [u8; 16],
    wrapped: [u8; WRAPPED_BYTES],
    zero_at_last: [u8; 16],
    crc: U64,
}

const _: () = assert!(size_of::<HeaderLayout>() == HEADER_BYTES && size_of::<EntryLayout>() == ENTRY_BYTES);

/// What a data key is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataKeyState {
    /// New blocks are encrypted with it.
    Current,
    /// Blocks that were encrypted with it are read.
    Old,
    /// It is gone, and with it every block that it encrypted.
    Destroyed,
}

/// One data key of a directory. What is public of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataKeyInfo {
    /// Number in the journal's records: never used again.
    pub number: u32,
    /// Name.
    pub id: KeyId,
    /// Whose blocks it encrypts.
    pub namespace: NamespaceId,
    /// What it is used for.
    pub state: DataKeyState,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// When it was destroyed, in seconds since 1970; 0 as long as it is there.
    pub destroyed: u64,
    /// Blocks that went out of use with it.
    pub blocks: u64,
}

/// An entry of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) info: DataKeyInfo,
    /// Zeros of a destroyed key.
    pub(crate) wrapped: [u8; WRAPPED_BYTES],
}

impl Entry {
    /// What is left of it once it is destroyed: a receipt.
    pub(crate) fn destroyed(&self, now: u64, blocks: u64) -> Self {
        let info =
            DataKeyInfo { state: DataKeyState::Destroyed, destroyed: now, blocks, ..self.info.clone() };
        Self { info, wrapped: [0; WRAPPED_BYTES] }
    }

    pub(crate) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut layout = EntryLayout::new_zeroed();
        layout.state = match self.info.state {
            DataKeyState::Current => 1,
            DataKeyState::Old => 2,
            DataKeyState::Destroyed => 3,
        };
        layout.namespace.set(self.info.namespace.0);
        layout.number.set(self.info.number);
        layout.created.set(self.info.created);
        layout.destroyed.set(self.info.destroyed);
        layout.blocks.set(self.info.blocks);
        layout.id = *self.info.id.as_bytes();
        layout.wrapped = self.wrapped;
        layout.crc.set(crc64(&layout.as_bytes()[..ENTRY_BYTES - CRC_BYTES]));
        zerocopy::transmute!(layout)
    }

    /// `None` where it is torn or damaged, or says something that this version does not write.
    pub(crate) fn decode(bytes: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let layout: &EntryLayout = zerocopy::transmute_ref!(bytes);
        let state = match layout.state {
            1 => DataKeyState::Current,
            2 => DataKeyState::Old,
            3 => DataKeyState::Destroyed,
            _ => return None,
        };
        let info = DataKeyInfo {
            number: layout.number.get(),
            id: KeyId::from_bytes(layout.id),
            namespace: NamespaceId(layout.namespace.get()),
            state,
            created: layout.created.get(),
            destroyed: layout.destroyed.get(),
            blocks: layout.blocks.get(),
        };
        let entry = Self { info, wrapped: layout.wrapped };
        // Also the checksum, and bytes that have no meaning yet.
        let is_destroyed = state != DataKeyState::Destroyed || entry.wrapped == [0; WRAPPED_BYTES];
        (entry.info.number > 0 && is_destroyed && entry.encode() == *bytes).then_some(entry)
    }
}

/// A key file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyFile {
    /// The key that wraps its data keys.
    pub(crate) operator: KeyId,
    /// Grows with every change of the file.
    pub(crate) changes: u64,
    /// By their place in the file; damaged ones are none.
    pub(crate) entries: Vec<Option<Entry>>,
}

impl KeyFile {
    pub(crate) fn new(operator: KeyId) -> Self {
        Self { operator, changes: 0, entries: Vec::new() }
    }

    pub(crate) fn encode_header(&self) -> [u8; HEADER_BYTES] {
        let mut layout = HeaderLayout::new_zeroed();
        layout.magic = MAGIC;
        layout.version.set(VERSION);
        layout.entry_bytes.set(ENTRY_BYTES as u32);
        layout.operator = *self.operator.as_bytes();
        layout.changes.set(self.changes);
        layout.crc.set(crc64(&layout.as_bytes()[..HEADER_BYTES - CRC_BYTES]));
        zerocopy::transmute!(layout)
    }

    /// All of it; places of damaged entries become zeros.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.encode_header().to_vec();
        for entry in &self.entries {
            bytes.extend_from_slice(&entry.as_ref().map_or([0; ENTRY_BYTES], Entry::encode));
        }
        bytes
    }

    /// What a file says. An entry that was cut short at its end counts as none.
    ///
    /// # Errors
    /// [`KeyFileError::Unreadable`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, KeyFileError> {
        let unreadable = |why: &str| Err(KeyFileError::Unreadable(why.to_owned()));
        if bytes.len() as u64 > MAX_BYTES {
            return unreadable("the file is longer than a key file can be");
        }
        let Ok((layout, rest)) = HeaderLayout::ref_from_prefix(bytes) else {
            return unreadable("the file is shorter than its header of 64 bytes");
        };
        if layout.magic != MAGIC {
            return unreadable("the file does not start as a key file of kvbm");
        }
        if layout.version != VERSION {
            let found = layout.version;
            return unreadable(&format!("the file has format version {found}, this build reads {VERSION}"));
        }
        let entries = rest.as_chunks::<ENTRY_BYTES>().0.iter().map(Entry::decode).collect();
        let operator = KeyId::from_bytes(layout.operator);
        let file = Self { operator, changes: layout.changes.get(), entries };
        if file.encode_header() != bytes[..HEADER_BYTES] {
            return unreadable("the file's header is damaged");
        }
        Ok(file)
    }

    /// Where an entry lies, in bytes.
    pub(crate) fn offset(place: usize) -> u64 {
        (HEADER_BYTES + place * ENTRY_BYTES) as u64
    }

    /// Entries that are not damaged, with their places.
    pub(crate) fn known(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().filter_map(|(place, entry)| Some((place, entry.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(state: DataKeyState) -> Entry {
        let gone = state == DataKeyState::Destroyed;
        let info = DataKeyInfo {
            number: 0x0102_0304,
            id: KeyId::from_bytes(*b"name-of-data-key"),
            namespace: NamespaceId(0xA1A2_A3A4),
            state,
            created: 5,
            destroyed: if gone { 6 } else { 0 },
            blocks: if gone { 7 } else { 0 },
        };
        Entry { info, wrapped: if gone { [0; WRAPPED_BYTES] } else { [9; WRAPPED_BYTES] } }
    }

    fn file() -> KeyFile {
        let states = [DataKeyState::Current, DataKeyState::Old, DataKeyState::Destroyed];
        let entries = states.map(|state| Some(entry(state))).to_vec();
        KeyFile { operator: KeyId::from_bytes(*b"operator-key-id!"), changes: 3, entries }
    }

    /// Step by step as `docs/formats.md` has it.
    #[test]
    fn the_file_is_that_of_the_page() {
        let mut page = b"KVBMKEYS\x01\0\0\0\x80\0\0\0operator-key-id!\x03\0\0\0\0\0\0\0".to_vec();
        page.extend_from_slice(&[0; 16]);
        page.extend_from_slice(&crc64(&page).to_le_bytes());
        for (state, destroyed, blocks, wrapped) in [(1, 0, 0, 9), (2, 0, 0, 9), (3, 6, 7, 0)] {
            let mut entry = vec![state, 0, 0, 0, 0xA4, 0xA3, 0xA2, 0xA1, 4, 3, 2, 1, 0, 0, 0, 0];
            for number in [5_u64, destroyed, blocks] {
                entry.extend_from_slice(&number.to_le_bytes());
            }
            entry.extend_from_slice(b"name-of-data-key");
            entry.extend_from_slice(&[wrapped; 48]);
            entry.extend_from_slice(&[0; 16]);
            entry.extend_from_slice(&crc64(&entry).to_le_bytes());
            page.extend_from_slice(&entry);
        }
        assert!(file().encode() == page);
        assert_eq!(KeyFile::decode(&page), Ok(file()));
        // The end of a crash.
        assert_eq!(KeyFile::decode(&[&page[..], &[1; 127]].concat()), Ok(file()));
    }

    #[test]
    fn what_is_no_key_file_is_refused_with_the_way_out() {
        let good = file().encode();
        let edited = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        let long = vec![0; MAX_BYTES as usize + 1];
        for (bad, why) in [
            (good[..63].to_vec(), "64 bytes"),
            (edited(0, 0), "does not start"),
            (edited(8, 2), "version 2"),
            (edited(16, 0), "damaged"),
            (edited(50, 1), "damaged"),
            (long, "longer"),
        ] {
            let error = KeyFile::decode(&bad).expect_err(why).to_string();
            assert!(error.contains(why) && error.contains("kvbm disk clear"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_flip_takes_one_entry_or_the_file(bit in 0_usize..(HEADER_BYTES + 3 * ENTRY_BYTES) * 8) {
            let mut bytes = file().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            match KeyFile::decode(&bytes) {
                Err(_) => prop_assert!(bit / 8 < HEADER_BYTES),
                Ok(found) => {
                    let damaged = (bit / 8 - HEADER_BYTES) / ENTRY_BYTES;
                    let mut expected = file();
                    expected.entries[damaged] = None;
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }
}
