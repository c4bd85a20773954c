//! Header and record of the journal, byte by byte. All integers are little-endian.

use crate::FormatError;
use crate::seal::{Recorded, Seal};
use kvbm_keys::{KeyId, TAG_BYTES};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) const MAGIC: [u8; 8] = *b"KVBMG3\r\n";
/// Version of header and record together, without a key.
pub(crate) const VERSION: u32 = 2;
/// The same with one: sums are keyed, and the header names the key.
pub(crate) const KEYED_VERSION: u32 = 3;
/// Where blocks are encrypted: records have tags. Without a key for sums, and with one.
pub(crate) const ENCRYPTED_VERSION: u32 = 4;
pub(crate) const ENCRYPTED_KEYED_VERSION: u32 = 5;
pub(crate) const HEADER_BYTES: usize = 4096;
const GEOMETRY_AT: usize = 128;
const HEADER_CRC_AT: usize = HEADER_BYTES - 8;
pub(crate) const MAX_GEOMETRY_BYTES: usize = HEADER_CRC_AT - GEOMETRY_AT;
/// Bytes of a record before its tag, if it has one, and its checksum.
const FIELD_BYTES: usize = 72;
const CRC_BYTES: usize = 8;

/// Bytes of a record.
pub(crate) const fn record_bytes(encrypted: bool) -> usize {
    FIELD_BYTES + if encrypted { TAG_BYTES } else { 0 } + CRC_BYTES
}

/// The header as it lies in the file.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    magic: [u8; 8],
    version: U32,
    header_bytes: U32,
    record_bytes: U32,
    num_slots: U32,
    journal_id: U64,
    namespace: [u8; 16],
    block_bytes: U64,
    slot_stride: U64,
    geometry_bytes: U32,
    key_id: [u8; 16],
    zero: [u8; 44],
    geometry: [u8; MAX_GEOMETRY_BYTES],
    crc: U64,
}

/// A record as it lies in the file. A tag may follow, and the checksum does.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RecordLayout {
    kind: u8,
    has_parent: u8,
    group: U16,
    slot: U32,
    generation: U64,
    hash: [u8; 16],
    parent: [u8; 16],
    position: U32,
    namespace: U32,
    checksum: U64,
    bytes: U64,
}

const _: () = assert!(size_of::<HeaderLayout>() == HEADER_BYTES && size_of::<RecordLayout>() == FIELD_BYTES);

/// Which directory this is. Compared on opening, never used to size anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Random number of this journal file: records of another file do not verify here.
    pub(crate) journal_id: u64,
    pub(crate) namespace: [u8; 16],
    /// Whether blocks are encrypted.
    pub(crate) encrypted: bool,
    pub(crate) num_slots: u32,
    pub(crate) block_bytes: u64,
    pub(crate) slot_stride: u64,
    pub(crate) geometry: Vec<u8>,
}

impl Header {
    /// The header's bytes; `geometry` was checked to fit.
    pub(crate) fn encode(&self, seal: &Seal) -> Vec<u8> {
        let mut layout = HeaderLayout::new_zeroed();
        layout.magic = MAGIC;
        layout.version.set(match (self.encrypted, seal.key_id()) {
            (false, None) => VERSION,
            (false, Some(_)) => KEYED_VERSION,
            (true, None) => ENCRYPTED_VERSION,
            (true, Some(_)) => ENCRYPTED_KEYED_VERSION,
        });
        if let Some(id) = seal.key_id() {
            layout.key_id = *id.as_bytes();
        }
        layout.header_bytes.set(HEADER_BYTES as u32);
        layout.record_bytes.set(record_bytes(self.encrypted) as u32);
        layout.num_slots.set(self.num_slots);
        layout.journal_id.set(self.journal_id);
        layout.namespace = self.namespace;
        layout.block_bytes.set(self.block_bytes);
        layout.slot_stride.set(self.slot_stride);
        layout.geometry_bytes.set(self.geometry.len() as u32);
        layout.geometry[..self.geometry.len()].copy_from_slice(&self.geometry);
        layout.crc.set(seal.journal(&layout.as_bytes()[..HEADER_CRC_AT]));
        layout.as_bytes().to_vec()
    }

    /// Whether blocks of a journal that begins like this are encrypted; `None` where it is none
    /// that this build reads.
    pub(crate) fn says_encrypted(start: &[u8]) -> Option<bool> {
        let (magic, rest) = start.split_first_chunk::<8>()?;
        let (version, _) = U32::read_from_prefix(rest).ok()?;
        match version.get() {
            VERSION | KEYED_VERSION if *magic == MAGIC => Some(false),
            ENCRYPTED_VERSION | ENCRYPTED_KEYED_VERSION if *magic == MAGIC => Some(true),
            _ => None,
        }
    }

    /// Reads a header from the first bytes of a file of `file_bytes` bytes. The version is judged
    /// before anything that a later version might have moved.
    pub(crate) fn decode(bytes: &[u8], file_bytes: u64, seal: &Seal) -> Result<Self, FormatError> {
        let truncated = FormatError::Truncated { len: file_bytes, need: HEADER_BYTES as u64 };
        let (magic, rest) = bytes.split_first_chunk().ok_or(truncated.clone())?;
        let (version, _) = U32::read_from_prefix(rest).map_err(|_| truncated.clone())?;
        if *magic != MAGIC {
            return Err(FormatError::Magic);
        }
        let (encrypted, keyed) = match version.get() {
            VERSION => (false, false),
            KEYED_VERSION => (false, true),
            ENCRYPTED_VERSION => (true, false),
            ENCRYPTED_KEYED_VERSION => (true, true),
            found => return Err(FormatError::Version { found, supported: ENCRYPTED_KEYED_VERSION }),
        };
        let (layout, _) = HeaderLayout::ref_from_prefix(bytes).map_err(|_| truncated)?;
        let found = keyed.then(|| KeyId::from_bytes(layout.key_id));
        if found != seal.key_id() {
            return Err(FormatError::Key { found, ours: seal.key_id() });
        }
        if layout.crc != seal.journal(&layout.as_bytes()[..HEADER_CRC_AT]) {
            return Err(FormatError::HeaderChecksum);
        }
        let refuse = |field, value: u32| Err(FormatError::Field { field, value: value.into() });
        if layout.header_bytes != HEADER_BYTES as u32 {
            return refuse("header_bytes", layout.header_bytes.get());
        }
        if layout.record_bytes != record_bytes(encrypted) as u32 {
            return refuse("record_bytes", layout.record_bytes.get());
        }
        let geometry_bytes = layout.geometry_bytes.get();
        let Some(geometry) = layout.geometry.get(..geometry_bytes as usize) else {
            return refuse("geometry_bytes", geometry_bytes);
        };
        let not_used: &[u8] = if found.is_some() { &[] } else { &layout.key_id };
        let unused = layout.zero.iter().chain(not_used).chain(&layout.geometry[geometry.len()..]);
        if let Some(&byte) = unused.into_iter().find(|byte| **byte != 0) {
            return refuse("reserved bytes", byte.into());
        }
        Ok(Self {
            journal_id: layout.journal_id.get(),
            namespace: layout.namespace,
            encrypted,
            num_slots: layout.num_slots.get(),
            block_bytes: layout.block_bytes.get(),
            slot_stride: layout.slot_stride.get(),
            geometry: geometry.to_vec(),
        })
    }
}

/// What a slot holds from a generation on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordState {
    Present {
        identity: BlockIdentity,
        recorded: Recorded,
        bytes: u64,
    },
    Free,
    Quarantined,
    /// Of no slot: the engine was shut down, and no write was under way. Counts as the last record
    /// only.
    Clean,
}

/// One record of the journal. The highest generation of a slot wins, wherever the record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: BlockId,
    pub(crate) generation: u64,
    pub(crate) state: RecordState,
}

/// Why some bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordError {
    /// Torn or damaged.
    Checksum,
    /// Intact, but of a kind or with a field that this version does not write.
    Invalid,
}

/// The slot that a record names, intact or not.
#[cfg(any(test, kvbm_sim))]
pub(crate) fn slot_of(record: &[u8]) -> BlockId {
    RecordLayout::ref_from_prefix(record).map_or(BlockId(0), |(layout, _)| BlockId(layout.slot.get()))
}

const PRESENT: u8 = 1;
const FREE: u8 = 2;
const QUARANTINED: u8 = 3;
const CLEAN: u8 = 4;
const HAS_PARENT: u8 = 1;

impl Record {
    /// The last record of a journal that was closed in order.
    pub(crate) const CLEAN: Self = Self { slot: BlockId(0), generation: 0, state: RecordState::Clean };

    pub(crate) fn encode(&self, journal_id: u64, seal: &Seal) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(record_bytes(seal.encrypts()));
        self.encode_fields(seal.encrypts(), &mut bytes);
        let crc = crc(journal_id, &bytes, seal);
        bytes.extend_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// All but the checksum.
    fn encode_fields(&self, encrypted: bool, into: &mut Vec<u8>) {
        into.extend_from_slice(self.layout().as_bytes());
        if encrypted {
            let tag = match &self.state {
                RecordState::Present { recorded, .. } => recorded.tag,
                _ => [0; TAG_BYTES],
            };
            into.extend_from_slice(&tag);
        }
    }

    fn layout(&self) -> RecordLayout {
        let mut layout = RecordLayout::new_zeroed();
        layout.slot.set(self.slot.0);
        layout.generation.set(self.generation);
        layout.kind = match self.state {
            RecordState::Present { .. } => PRESENT,
            RecordState::Free => FREE,
            RecordState::Quarantined => QUARANTINED,
            RecordState::Clean => CLEAN,
        };
        if let RecordState::Present { identity, recorded, bytes } = &self.state {
            layout.group.set(identity.group.0);
            layout.hash = *identity.hash.as_bytes();
            if let Some(parent) = &identity.parent {
                layout.has_parent = HAS_PARENT;
                layout.parent = *parent.as_bytes();
            }
            layout.position.set(identity.position);
            layout.namespace.set(identity.namespace.0);
            layout.checksum.set(recorded.word);
            layout.bytes.set(*bytes);
        }
        layout
    }

    pub(crate) fn decode(journal_id: u64, bytes: &[u8], seal: &Seal) -> Result<Self, RecordError> {
        let Some((covered, sum)) = bytes.split_last_chunk() else { return Err(RecordError::Checksum) };
        let is_intact = u64::from_le_bytes(*sum) == crc(journal_id, covered, seal);
        if !is_intact && !planted(Planted::TrustDamagedRecord) {
            return Err(RecordError::Checksum);
        }
        let (layout, tag) = RecordLayout::ref_from_prefix(covered).map_err(|_| RecordError::Checksum)?;
        let tag =
            if seal.encrypts() { *tag.first_chunk().ok_or(RecordError::Checksum)? } else { [0; TAG_BYTES] };
        let state = match layout.kind {
            PRESENT => RecordState::Present {
                identity: BlockIdentity {
                    namespace: NamespaceId(layout.namespace.get()),
                    group: GroupId(layout.group.get()),
                    hash: SequenceHash::from_bytes(layout.hash),
                    parent: (layout.has_parent == HAS_PARENT)
                        .then(|| SequenceHash::from_bytes(layout.parent)),
                    position: layout.position.get(),
                },
                recorded: Recorded { word: layout.checksum.get(), tag },
                bytes: layout.bytes.get(),
            },
            FREE => RecordState::Free,
            QUARANTINED => RecordState::Quarantined,
            CLEAN => RecordState::Clean,
            _ => return Err(RecordError::Invalid),
        };
        let slot = BlockId(layout.slot.get());
        let record = match state {
            RecordState::Clean => Self::CLEAN,
            state => Self { slot, generation: layout.generation.get(), state },
        };
        // Bytes that a record's kind does not use are zero: a later version may give them a
        // meaning.
        let mut meant = Vec::with_capacity(covered.len());
        record.encode_fields(seal.encrypts(), &mut meant);
        if meant == covered { Ok(record) } else { Err(RecordError::Invalid) }
    }
}

/// The checksum of a record of one journal; `covered` are all bytes before it.
fn crc(journal_id: u64, covered: &[u8], seal: &Seal) -> u64 {
    // One call over one buffer: a digest over two parts costs more than the copy.
    let mut summed = [0; CRC_BYTES + record_bytes(true)];
    let bytes = covered.len().min(record_bytes(true));
    summed[..CRC_BYTES].copy_from_slice(&journal_id.to_le_bytes());
    summed[CRC_BYTES..CRC_BYTES + bytes].copy_from_slice(&covered[..bytes]);
    seal.journal(&summed[..CRC_BYTES + bytes])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::crc64;
    use kvbm_keys::DeploymentKey;
    use proptest::prelude::*;

    const GOLDEN: &[u8] = include_bytes!("../tests/golden/journal_v2.kvbm");
    const KEYED_GOLDEN: &[u8] = include_bytes!("../tests/golden/journal_v3.kvbm");

    fn plain() -> Seal {
        Seal::new([0; 16], None)
    }

    fn keyed(secret: &[u8]) -> Seal {
        Seal::new([0; 16], Some(&DeploymentKey::from_secret(secret)))
    }

    /// Makes the record's checksum fit what was changed in it.
    fn reseal(journal_id: u64, bytes: &mut [u8]) {
        let end = bytes.len() - CRC_BYTES;
        let sum = crc(journal_id, &bytes[..end], &plain());
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
    }

    /// Makes the header's checksum fit what was changed in it.
    fn reseal_header(bytes: &mut [u8]) {
        let crc = crc64(&bytes[..HEADER_CRC_AT]);
        bytes[HEADER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    fn header() -> Header {
        Header {
            journal_id: 0x0123_4567_89AB_CDEF,
            namespace: *b"namespace-tag-16",
            encrypted: false,
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
        let recorded = Recorded::sum(0xC1C2_C3C4_C5C6_C7C8);
        let present = |identity| RecordState::Present { identity, recorded, bytes: 5000 };
        [
            Record { slot: BlockId(7), generation: 1, state: present(identity) },
            Record { slot: BlockId(8), generation: 2, state: present(child) },
            Record { slot: BlockId(7), generation: 3, state: RecordState::Free },
            Record { slot: BlockId(9), generation: 4, state: RecordState::Quarantined },
            Record::CLEAN,
        ]
    }

    fn journal(seal: &Seal) -> Vec<u8> {
        let mut bytes = header().encode(seal);
        bytes.extend(records().iter().flat_map(|record| record.encode(header().journal_id, seal)));
        bytes
    }

    /// After a deliberate change of format: raise [`VERSION`], write a new golden file, keep the
    /// old one refused.
    #[test]
    fn the_golden_journals_are_written_and_read_byte_for_byte() {
        assert_eq!((VERSION, KEYED_VERSION), (2, 3));
        for (golden, seal) in [(GOLDEN, plain()), (KEYED_GOLDEN, keyed(b"golden secret"))] {
            assert!(journal(&seal) == golden, "the journal's bytes changed");
            let decoded = Header::decode(golden, golden.len() as u64, &seal).unwrap();
            assert_eq!(decoded, header());
            let (written, rest) = golden[HEADER_BYTES..].as_chunks::<{ record_bytes(false) }>();
            assert!(rest.is_empty());
            for (bytes, record) in written.iter().zip(records()) {
                assert_eq!(Record::decode(decoded.journal_id, bytes, &seal), Ok(record));
            }
        }
    }

    #[test]
    fn a_journal_of_another_key_or_of_none_is_distinguished_from_a_damaged_one() {
        let seals = [plain(), keyed(b"one"), keyed(b"two")];
        for written in &seals {
            for read in &seals {
                let decoded = Header::decode(&header().encode(written), HEADER_BYTES as u64, read);
                let record = Record::decode(5, &records()[0].encode(5, written), read);
                if written.key_id() == read.key_id() {
                    assert_eq!((decoded, record), (Ok(header()), Ok(records()[0])));
                } else {
                    let other = FormatError::Key { found: written.key_id(), ours: read.key_id() };
                    assert_eq!((decoded, record), (Err(other), Err(RecordError::Checksum)));
                }
            }
        }
    }

    /// Who knows all but the key can make every CRC match, and no signature.
    #[test]
    fn nothing_that_is_changed_passes_without_the_key() {
        let ours = keyed(b"ours");
        let mut header = header().encode(&ours);
        header[20] ^= 1;
        reseal_header(&mut header);
        assert_eq!(Header::decode(&header, HEADER_BYTES as u64, &ours), Err(FormatError::HeaderChecksum));
        let mut record = records()[0].encode(5, &ours);
        record[4] ^= 1;
        reseal(5, &mut record);
        assert_eq!(Record::decode(5, &record, &ours), Err(RecordError::Checksum));
    }

    #[test]
    fn the_golden_journal_of_version_1_is_refused() {
        let old = include_bytes!("../tests/golden/journal_v1.kvbm");
        let refused = FormatError::Version { found: 1, supported: ENCRYPTED_KEYED_VERSION };
        assert_eq!(Header::decode(old, old.len() as u64, &plain()), Err(refused));
    }

    /// Written by `tests/corpus/make.py`, from the page alone.
    #[test]
    fn records_of_encrypted_blocks_have_tags() {
        let page = include_bytes!("../tests/corpus/encrypted.kvbm");
        let seal = plain().encrypting(true);
        let header = Header::decode(page, page.len() as u64, &seal).unwrap();
        assert!(header.encrypted && header.encode(&seal) == page[..HEADER_BYTES]);
        let (written, rest) = page[HEADER_BYTES..].as_chunks::<{ record_bytes(true) }>();
        assert!(rest.is_empty() && written.len() == 3);
        for bytes in written {
            let record = Record::decode(header.journal_id, bytes, &seal).unwrap();
            let RecordState::Present { recorded, .. } = record.state else { panic!("a block") };
            assert_eq!(recorded, Recorded::sealed(5, std::array::from_fn(|at| at as u8)));
            assert_eq!(record.encode(header.journal_id, &seal), bytes);
            assert!(Record::decode(header.journal_id, bytes, &plain()).is_err());
            for bit in 0..bytes.len() * 8 {
                let mut flipped = *bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(Record::decode(header.journal_id, &flipped, &seal).is_err());
            }
        }
        // A record without a block has no tag.
        let mut free = records()[2].encode(5, &seal);
        free[FIELD_BYTES] = 1;
        let end = free.len() - CRC_BYTES;
        let sum = crc(5, &free[..end], &seal);
        free[end..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(Record::decode(5, &free, &seal), Err(RecordError::Invalid));
        // With a key as well.
        let both = keyed(b"one").encrypting(true);
        let encoded = Header { encrypted: true, ..self::header() }.encode(&both);
        assert_eq!(U32::ref_from_bytes(&encoded[8..12]).unwrap().get(), ENCRYPTED_KEYED_VERSION);
        assert!(Header::decode(&encoded, HEADER_BYTES as u64, &both).unwrap().encrypted);
    }

    #[test]
    fn a_record_of_another_journal_does_not_verify() {
        let bytes = records()[0].encode(1, &plain());
        assert_eq!(Record::decode(2, &bytes, &plain()), Err(RecordError::Checksum));
    }

    #[test]
    fn an_intact_record_of_unknown_kind_is_invalid() {
        let mut bytes = records()[2].encode(5, &plain());
        bytes[0] = 9;
        reseal(5, &mut bytes);
        assert_eq!(Record::decode(5, &bytes, &plain()), Err(RecordError::Invalid));
    }

    #[test]
    fn a_geometry_length_beyond_the_header_is_refused() {
        let mut bytes = header().encode(&plain());
        bytes[64..68].copy_from_slice(&u32::MAX.to_le_bytes());
        reseal_header(&mut bytes);
        let refused = FormatError::Field { field: "geometry_bytes", value: u32::MAX.into() };
        assert_eq!(Header::decode(&bytes, HEADER_BYTES as u64, &plain()), Err(refused));
    }

    /// Made to match, the checksum says nothing about bytes that no field has.
    #[test]
    fn what_no_field_names_is_not_passed_over() {
        for at in [68, 83, 127, header().geometry.len() + 128, HEADER_CRC_AT - 1] {
            let mut bytes = header().encode(&plain());
            bytes[at] = 3;
            reseal_header(&mut bytes);
            let refused = FormatError::Field { field: "reserved bytes", value: 3 };
            assert_eq!(Header::decode(&bytes, HEADER_BYTES as u64, &plain()), Err(refused), "byte {at}");
        }
        // A first block has no parent, the others have no block, a mark of a shutdown has neither
        // slot nor generation.
        for (record, at) in [(0, 32), (0, 47), (2, 2), (2, 16), (3, 71), (3, 1), (4, 4), (4, 15), (4, 71)] {
            let mut bytes = records()[record].encode(5, &plain());
            bytes[at] = 1;
            reseal(5, &mut bytes);
            assert_eq!(
                Record::decode(5, &bytes, &plain()),
                Err(RecordError::Invalid),
                "byte {at} of record {record}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_flip_of_a_record_or_header_is_noticed(bit in 0_usize..(HEADER_BYTES + record_bytes(false)) * 8) {
            let mut bytes = journal(&plain());
            bytes[bit / 8] ^= 1 << (bit % 8);
            if bit / 8 < HEADER_BYTES {
                prop_assert!(Header::decode(&bytes, HEADER_BYTES as u64, &plain()).is_err());
            } else {
                let record = &bytes[HEADER_BYTES..][..record_bytes(false)];
                prop_assert_eq!(Record::decode(header().journal_id, record, &plain()), Err(RecordError::Checksum));
            }
        }
    }
}
