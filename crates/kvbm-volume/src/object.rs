//! The form of an object: a header that names it, then its payload.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmblob"
//!      8    2  format version: 1
//!     10    2  group
//!     12    4  payload offset: HEADER_BYTES rounded up to the volume's alignment; zeros between
//!     16   16  namespace tag
//!     32   16  sequence hash
//!     48   16  slice: first layer, number of layers, first head, number of heads
//!     64    8  payload length
//!     72    8  CRC-64/NVME of bytes 0..72, then the payload
//!     80    8  CRC-64/NVME of bytes 0..80
//! ```
//! Integers are little-endian. The payload's checksum covers the key, so an intact payload under another's header fails.

use crc_fast::{CrcAlgorithm, Digest, checksum};
use kvbm_plan::{GroupId, NamespaceTag, SequenceHash};

use crate::{BlobKey, BlobSlice, Corruption};

/// Bytes of a header, before padding.
pub const HEADER_BYTES: usize = 88;

/// The largest alignment of payloads in their objects.
pub const MAX_ALIGNMENT: u32 = 1 << 20;

const MAGIC: &[u8; 8] = b"kvbmblob";
const VERSION: u16 = 1;
/// Bytes before the payload's checksum.
const IDENTITY_BYTES: usize = 72;

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) key: BlobKey,
    pub(crate) payload_offset: u32,
    pub(crate) payload_length: u64,
    payload_checksum: u64,
}

impl Header {
    /// The header of an object that holds these pieces.
    pub(crate) fn new(key: BlobKey, alignment: u32, pieces: &[&[u8]]) -> Self {
        let header = Self {
            key,
            payload_offset: (HEADER_BYTES as u32).next_multiple_of(alignment),
            payload_length: pieces.iter().map(|piece| piece.len() as u64).sum(),
            payload_checksum: 0,
        };
        let mut digest = header.start_checksum();
        for piece in pieces {
            digest.update(piece);
        }
        Self { payload_checksum: digest.finalize(), ..header }
    }

    /// Bytes of the whole object.
    pub(crate) fn object_length(&self) -> u64 {
        u64::from(self.payload_offset).saturating_add(self.payload_length)
    }

    /// The bytes before the payload, padding included.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.payload_offset as usize];
        bytes[..IDENTITY_BYTES].copy_from_slice(&self.identity());
        bytes[72..80].copy_from_slice(&self.payload_checksum.to_le_bytes());
        let header_checksum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..80]);
        bytes[80..88].copy_from_slice(&header_checksum.to_le_bytes());
        bytes
    }

    /// Reads the header of an object that was found under `key` and is `object_length` bytes long.
    pub(crate) fn decode(
        bytes: &[u8; HEADER_BYTES],
        key: &BlobKey,
        object_length: u64,
    ) -> Result<Self, Corruption> {
        if &bytes[..8] != MAGIC {
            return Err(Corruption::Magic);
        }
        let version = u16::from_le_bytes(take(bytes, 8));
        if version != VERSION {
            return Err(Corruption::Version(version));
        }
        if u64::from_le_bytes(take(bytes, 80)) != checksum(CrcAlgorithm::Crc64Nvme, &bytes[..80]) {
            return Err(Corruption::HeaderChecksum);
        }
        let number = |at| u32::from_le_bytes(take(bytes, at));
        let header = Self {
            key: BlobKey {
                namespace: NamespaceTag::from_bytes(take(bytes, 16)),
                group: GroupId(u16::from_le_bytes(take(bytes, 10))),
                hash: SequenceHash::from_bytes(take(bytes, 32)),
                slice: BlobSlice {
                    first_layer: number(48),
                    num_layers: number(52),
                    first_head: number(56),
                    num_heads: number(60),
                },
            },
            payload_offset: number(12),
            payload_length: u64::from_le_bytes(take(bytes, 64)),
            payload_checksum: u64::from_le_bytes(take(bytes, 72)),
        };
        header.check(key, object_length)?;
        Ok(header)
    }

    fn check(&self, key: &BlobKey, object_length: u64) -> Result<(), Corruption> {
        if self.key != *key {
            return Err(Corruption::OtherKey);
        }
        if !(HEADER_BYTES as u32..=MAX_ALIGNMENT).contains(&self.payload_offset) {
            return Err(Corruption::HeaderField("payload offset"));
        }
        let expected = self.object_length();
        if expected != object_length {
            return Err(Corruption::Length { expected, actual: object_length });
        }
        Ok(())
    }

    /// Whether the payload that was read is the one written.
    pub(crate) fn verify<'a>(&self, pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<(), Corruption> {
        let mut digest = self.start_checksum();
        pieces.into_iter().for_each(|piece| digest.update(piece));
        if digest.finalize() == self.payload_checksum { Ok(()) } else { Err(Corruption::PayloadChecksum) }
    }

    fn start_checksum(&self) -> Digest {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.identity());
        digest
    }

    fn identity(&self) -> [u8; IDENTITY_BYTES] {
        let mut bytes = [0; IDENTITY_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.key.group.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.payload_offset.to_le_bytes());
        bytes[16..32].copy_from_slice(self.key.namespace.as_bytes());
        bytes[32..48].copy_from_slice(self.key.hash.as_bytes());
        let slice = &self.key.slice;
        for (place, number) in bytes[48..64].chunks_exact_mut(4).zip([
            slice.first_layer,
            slice.num_layers,
            slice.first_head,
            slice.num_heads,
        ]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes[64..72].copy_from_slice(&self.payload_length.to_le_bytes());
        bytes
    }
}

/// `N` bytes at a fixed place of a header; every use lies within it.
fn take<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut taken = [0; N];
    taken.copy_from_slice(&bytes[at..at + N]);
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> BlobKey {
        BlobKey {
            namespace: NamespaceTag::from_bytes([0xa1; 16]),
            group: GroupId(0x0102),
            hash: SequenceHash::from_bytes([0xb2; 16]),
            slice: BlobSlice { first_layer: 1, num_layers: 2, first_head: 3, num_heads: 4 },
        }
    }

    fn first(bytes: &[u8]) -> [u8; HEADER_BYTES] {
        take_header(bytes).expect("a whole header")
    }

    fn take_header(bytes: &[u8]) -> Option<[u8; HEADER_BYTES]> {
        bytes.get(..HEADER_BYTES)?.try_into().ok()
    }

    #[test]
    fn golden_header() {
        let encoded = Header::new(key(), 1, &[b"pay", b"load"]).encode();
        let mut expected = b"kvbmblob\x01\x00\x02\x01\x58\x00\x00\x00".to_vec();
        expected.extend([0xa1; 16]);
        expected.extend([0xb2; 16]);
        expected.extend(b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x07\0\0\0\0\0\0\0");
        let payload_checksum = checksum(CrcAlgorithm::Crc64Nvme, &[&expected[..], b"payload"].concat());
        expected.extend(payload_checksum.to_le_bytes());
        let header_checksum = checksum(CrcAlgorithm::Crc64Nvme, &expected);
        expected.extend(header_checksum.to_le_bytes());
        assert_eq!(encoded, expected);
        assert_eq!(
            checksum(CrcAlgorithm::Crc64Nvme, b"123456789"),
            0xae8b_1486_0a79_9888,
            "the catalogue's check value"
        );
    }

    #[test]
    fn padding_follows_the_alignment() {
        for (alignment, offset) in
            [(1, 88), (8, 88), (128, 128), (4096, 4096), (MAX_ALIGNMENT, MAX_ALIGNMENT)]
        {
            let header = Header::new(key(), alignment, &[b"payload"]);
            let encoded = header.encode();
            assert_eq!(encoded.len(), offset as usize);
            assert_eq!(Header::decode(&first(&encoded), &key(), u64::from(offset) + 7), Ok(header));
        }
    }

    #[test]
    fn a_sound_header_with_absurd_fields_is_refused() {
        let header = Header::new(key(), 1, &[b"payload"]);
        for payload_offset in [0, 87, MAX_ALIGNMENT + 1, u32::MAX] {
            let mut bytes = first(&header.encode());
            bytes[12..16].copy_from_slice(&payload_offset.to_le_bytes());
            let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..80]);
            bytes[80..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(Header::decode(&bytes, &key(), 95), Err(Corruption::HeaderField("payload offset")));
        }
        let huge = Header { payload_length: u64::MAX, ..header };
        let decoded = Header::decode(&first(&huge.encode()), &key(), 95);
        assert_eq!(decoded, Err(Corruption::Length { expected: u64::MAX, actual: 95 }));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_found(bit in 0..(HEADER_BYTES + 40) * 8, payload in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 8]>()) {
            let header = Header::new(key(), 1, &[&payload, &tail]);
            let mut object = [&header.encode()[..], &payload, &tail].concat();
            object[bit / 8] ^= 1 << (bit % 8);
            let read = Header::decode(&first(&object), &key(), object.len() as u64);
            let read = read.and_then(|header| header.verify([&object[HEADER_BYTES..]]));
            prop_assert!(read.is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), HEADER_BYTES), length in any::<u64>()) {
            prop_assert!(Header::decode(&first(&bytes), &key(), length).is_err());
        }
    }
}
