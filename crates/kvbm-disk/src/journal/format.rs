//! Header and record, byte by byte. All integers are little-endian.

use crate::FormatError;
use crate::checksum::crc64;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};

pub(crate) const MAGIC: [u8; 8] = *b"KVBMG3\r\n";
/// Version of header and record together.
pub(crate) const VERSION: u32 = 2;
pub(crate) const HEADER_BYTES: usize = 4096;
/// Bytes of the fields before the geometry.
const NAMED_BYTES: usize = 68;
const GEOMETRY_AT: usize = 128;
const HEADER_CRC_AT: usize = HEADER_BYTES - 8;
pub(crate) const MAX_GEOMETRY_BYTES: usize = HEADER_CRC_AT - GEOMETRY_AT;
pub(crate) const RECORD_BYTES: usize = 80;
const RECORD_CRC_AT: usize = RECORD_BYTES - 8;

/// Which directory this is. Compared on opening, never used to size anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Random number of this journal file: records of another file do not verify here.
    pub(crate) journal_id: u64,
    pub(crate) namespace: [u8; 16],
    pub(crate) num_slots: u32,
    pub(crate) block_bytes: u64,
    pub(crate) slot_stride: u64,
    pub(crate) geometry: Vec<u8>,
}

impl Header {
    /// The header's bytes; `geometry` was checked to fit.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &(HEADER_BYTES as u32).to_le_bytes());
        put(&mut bytes, 16, &(RECORD_BYTES as u32).to_le_bytes());
        put(&mut bytes, 20, &self.num_slots.to_le_bytes());
        put(&mut bytes, 24, &self.journal_id.to_le_bytes());
        put(&mut bytes, 32, &self.namespace);
        put(&mut bytes, 48, &self.block_bytes.to_le_bytes());
        put(&mut bytes, 56, &self.slot_stride.to_le_bytes());
        put(&mut bytes, 64, &(self.geometry.len() as u32).to_le_bytes());
        put(&mut bytes, GEOMETRY_AT, &self.geometry);
        let crc = crc64(&bytes[..HEADER_CRC_AT]);
        put(&mut bytes, HEADER_CRC_AT, &crc.to_le_bytes());
        bytes
    }

    /// Reads a header from the first bytes of a file of `file_bytes` bytes. The version is judged before anything
    /// that a later version might have moved.
    pub(crate) fn decode(bytes: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        let need = HEADER_BYTES as u64;
        let truncated = FormatError::Truncated { len: file_bytes, need };
        let prefix = bytes.get(..12).ok_or(truncated.clone())?;
        if prefix[..8] != MAGIC {
            return Err(FormatError::Magic);
        }
        let found = u32_at(bytes, 8);
        if found != VERSION {
            return Err(FormatError::Version { found, supported: VERSION });
        }
        let bytes = bytes.get(..HEADER_BYTES).ok_or(truncated)?;
        if crc64(&bytes[..HEADER_CRC_AT]) != u64_at(bytes, HEADER_CRC_AT) {
            return Err(FormatError::HeaderChecksum);
        }
        expect("header_bytes", u32_at(bytes, 12), HEADER_BYTES as u32)?;
        expect("record_bytes", u32_at(bytes, 16), RECORD_BYTES as u32)?;
        let geometry_bytes = u32_at(bytes, 64);
        let geometry = bytes[GEOMETRY_AT..HEADER_CRC_AT]
            .get(..geometry_bytes as usize)
            .ok_or(FormatError::Field { field: "geometry_bytes", value: geometry_bytes.into() })?;
        let behind = GEOMETRY_AT + geometry.len();
        // What it says is all that is in it.
        let unnamed = bytes[NAMED_BYTES..GEOMETRY_AT].iter().chain(&bytes[behind..HEADER_CRC_AT]);
        if let Some(&byte) = unnamed.into_iter().find(|byte| **byte != 0) {
            return Err(FormatError::Field { field: "reserved bytes", value: byte.into() });
        }
        Ok(Self {
            journal_id: u64_at(bytes, 24),
            namespace: array_at(bytes, 32),
            num_slots: u32_at(bytes, 20),
            block_bytes: u64_at(bytes, 48),
            slot_stride: u64_at(bytes, 56),
            geometry: geometry.to_vec(),
        })
    }
}

fn expect(field: &'static str, value: u32, expected: u32) -> Result<(), FormatError> {
    if value == expected { Ok(()) } else { Err(FormatError::Field { field, value: value.into() }) }
}

/// What a slot holds from a generation on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordState {
    Present {
        identity: BlockIdentity,
        checksum: u64,
        bytes: u64,
    },
    Free,
    Quarantined,
    /// Of no slot: the engine was shut down, and no write was under way. Counts as the last record only.
    Clean,
}

/// One line of the journal. The highest generation of a slot wins, wherever it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: BlockId,
    pub(crate) generation: u64,
    pub(crate) state: RecordState,
}

/// Why 80 bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordError {
    /// Torn or damaged.
    Checksum,
    /// Intact, but of a kind or with a field that this version does not write.
    Invalid,
}

const PRESENT: u8 = 1;
const FREE: u8 = 2;
const QUARANTINED: u8 = 3;
const CLEAN: u8 = 4;
const HAS_PARENT: u8 = 1;

impl Record {
    /// The last record of a journal that was closed in order.
    pub(crate) const CLEAN: Self = Self { slot: BlockId(0), generation: 0, state: RecordState::Clean };

    pub(crate) fn encode(&self, journal_id: u64) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = match self.state {
            RecordState::Present { .. } => PRESENT,
            RecordState::Free => FREE,
            RecordState::Quarantined => QUARANTINED,
            RecordState::Clean => CLEAN,
        };
        put(&mut bytes, 4, &self.slot.0.to_le_bytes());
        put(&mut bytes, 8, &self.generation.to_le_bytes());
        if let RecordState::Present { identity, checksum, bytes: length } = &self.state {
            put(&mut bytes, 2, &identity.group.0.to_le_bytes());
            put(&mut bytes, 16, identity.hash.as_bytes());
            if let Some(parent) = &identity.parent {
                bytes[1] = HAS_PARENT;
                put(&mut bytes, 32, parent.as_bytes());
            }
            put(&mut bytes, 48, &identity.position.to_le_bytes());
            put(&mut bytes, 52, &identity.namespace.0.to_le_bytes());
            put(&mut bytes, 56, &checksum.to_le_bytes());
            put(&mut bytes, 64, &length.to_le_bytes());
        }
        let crc = record_crc(journal_id, &bytes);
        put(&mut bytes, RECORD_CRC_AT, &crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(journal_id: u64, bytes: &[u8; RECORD_BYTES]) -> Result<Self, RecordError> {
        if record_crc(journal_id, bytes) != u64_at(bytes, RECORD_CRC_AT) {
            return Err(RecordError::Checksum);
        }
        // What a record says is all that is in it: of the bytes that its kind does not fill, none is set.
        let is_empty = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let says_no_block = is_empty(&bytes[1..4]) && is_empty(&bytes[16..RECORD_CRC_AT]);
        let state = match (bytes[0], bytes[1]) {
            (PRESENT, parent @ 0..=HAS_PARENT) if parent == HAS_PARENT || is_empty(&bytes[32..48]) => {
                RecordState::Present {
                    identity: BlockIdentity {
                        namespace: NamespaceId(u32_at(bytes, 52)),
                        group: GroupId(u16::from_le_bytes(array_at(bytes, 2))),
                        hash: SequenceHash::from_bytes(array_at(bytes, 16)),
                        parent: (parent == HAS_PARENT).then(|| SequenceHash::from_bytes(array_at(bytes, 32))),
                        position: u32_at(bytes, 48),
                    },
                    checksum: u64_at(bytes, 56),
                    bytes: u64_at(bytes, 64),
                }
            }
            (FREE, _) if says_no_block => RecordState::Free,
            (QUARANTINED, _) if says_no_block => RecordState::Quarantined,
            (CLEAN, _) if is_empty(&bytes[1..RECORD_CRC_AT]) => RecordState::Clean,
            _ => return Err(RecordError::Invalid),
        };
        Ok(Self { slot: BlockId(u32_at(bytes, 4)), generation: u64_at(bytes, 8), state })
    }
}

fn record_crc(journal_id: u64, bytes: &[u8; RECORD_BYTES]) -> u64 {
    // In one piece: short pieces cost more than their bytes.
    let mut covered = [0; 8 + RECORD_CRC_AT];
    put(&mut covered, 0, &journal_id.to_le_bytes());
    put(&mut covered, 8, &bytes[..RECORD_CRC_AT]);
    crc64(&covered)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOLDEN: &[u8] = include_bytes!("../../tests/golden/journal_v2.kvbm");

    fn header() -> Header {
        Header {
            journal_id: 0x0123_4567_89AB_CDEF,
            namespace: *b"namespace-tag-16",
            num_slots: 1000,
            block_bytes: 5000,
            slot_stride: 8192,
            geometry: b"model=m; rank=0/2; order=NHD; layers=0..32/32; outer=2; tokens=16; heads=0..4/8; head_dim=128; dtype=bf16; pieces=1".to_vec(),
        }
    }

    fn records() -> [Record; 5] {
        let identity = BlockIdentity {
            namespace: NamespaceId(0xA1A2_A3A4),
            group: GroupId(0xB1B2),
            hash: SequenceHash::from_bytes(*b"hash-of-block-01"),
            parent: None,
            position: 0,
        };
        let child = BlockIdentity {
            hash: SequenceHash::from_bytes(*b"hash-of-block-02"),
            parent: Some(identity.hash),
            position: 1,
            ..identity
        };
        let present =
            |identity| RecordState::Present { identity, checksum: 0xC1C2_C3C4_C5C6_C7C8, bytes: 5000 };
        [
            Record { slot: BlockId(7), generation: 1, state: present(identity) },
            Record { slot: BlockId(8), generation: 2, state: present(child) },
            Record { slot: BlockId(7), generation: 3, state: RecordState::Free },
            Record { slot: BlockId(9), generation: 4, state: RecordState::Quarantined },
            Record::CLEAN,
        ]
    }

    fn journal() -> Vec<u8> {
        let mut bytes = header().encode();
        bytes.extend(records().iter().flat_map(|record| record.encode(header().journal_id)));
        bytes
    }

    /// After a deliberate change of format: raise [`VERSION`], write a new golden file, keep the old one refused.
    #[test]
    fn the_golden_journal_is_written_and_read_byte_for_byte() {
        assert_eq!(VERSION, 2);
        assert!(journal() == GOLDEN, "the journal's bytes changed");
        let decoded = Header::decode(GOLDEN, GOLDEN.len() as u64).unwrap();
        assert_eq!(decoded, header());
        let (written, rest) = GOLDEN[HEADER_BYTES..].as_chunks::<RECORD_BYTES>();
        assert!(rest.is_empty());
        for (bytes, record) in written.iter().zip(records()) {
            assert_eq!(Record::decode(decoded.journal_id, bytes), Ok(record));
        }
    }

    #[test]
    fn the_golden_journal_of_version_1_is_refused() {
        let old = include_bytes!("../../tests/golden/journal_v1.kvbm");
        let refused = FormatError::Version { found: 1, supported: VERSION };
        assert_eq!(Header::decode(old, old.len() as u64), Err(refused));
    }

    #[test]
    fn a_record_of_another_journal_does_not_verify() {
        let bytes = records()[0].encode(1);
        assert_eq!(Record::decode(2, &bytes), Err(RecordError::Checksum));
    }

    #[test]
    fn an_intact_record_of_unknown_kind_is_invalid() {
        let mut bytes = records()[2].encode(5);
        bytes[0] = 9;
        let crc = record_crc(5, &bytes);
        put(&mut bytes, RECORD_CRC_AT, &crc.to_le_bytes());
        assert_eq!(Record::decode(5, &bytes), Err(RecordError::Invalid));
    }

    #[test]
    fn a_geometry_length_beyond_the_header_is_refused() {
        let mut bytes = header().encode();
        put(&mut bytes, 64, &u32::MAX.to_le_bytes());
        let crc = crc64(&bytes[..HEADER_CRC_AT]);
        put(&mut bytes, HEADER_CRC_AT, &crc.to_le_bytes());
        let refused = FormatError::Field { field: "geometry_bytes", value: u32::MAX.into() };
        assert_eq!(Header::decode(&bytes, HEADER_BYTES as u64), Err(refused));
    }

    /// Made to match, the checksum says nothing about bytes that no field has.
    #[test]
    fn what_no_field_names_is_not_passed_over() {
        for at in [68, 127, header().geometry.len() + 128, HEADER_CRC_AT - 1] {
            let mut bytes = header().encode();
            bytes[at] = 3;
            let crc = crc64(&bytes[..HEADER_CRC_AT]);
            put(&mut bytes, HEADER_CRC_AT, &crc.to_le_bytes());
            let refused = FormatError::Field { field: "reserved bytes", value: 3 };
            assert_eq!(Header::decode(&bytes, HEADER_BYTES as u64), Err(refused), "byte {at}");
        }
        // A first block has no parent, the others have no block, a mark of a shutdown has neither slot nor generation.
        for (record, at) in [(0, 32), (0, 47), (2, 2), (2, 16), (3, 71), (3, 1), (4, 4), (4, 15), (4, 71)] {
            let mut bytes = records()[record].encode(5);
            bytes[at] = 1;
            let crc = record_crc(5, &bytes);
            put(&mut bytes, RECORD_CRC_AT, &crc.to_le_bytes());
            assert_eq!(Record::decode(5, &bytes), Err(RecordError::Invalid), "byte {at} of record {record}");
        }
    }

    proptest! {
        #[test]
        fn any_flip_of_a_record_or_header_is_noticed(bit in 0_usize..(HEADER_BYTES + RECORD_BYTES) * 8) {
            let mut bytes = journal();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if bit / 8 < HEADER_BYTES {
                prop_assert!(Header::decode(&bytes, HEADER_BYTES as u64).is_err());
            } else {
                let record = bytes[HEADER_BYTES..].first_chunk().unwrap();
                prop_assert_eq!(Record::decode(header().journal_id, record), Err(RecordError::Checksum));
            }
        }
    }
}
