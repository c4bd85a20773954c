//! The form of an object: a header that names it, then its payload.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmblob"
//!      8    2  format version: 1, or 2 where sums are keyed; 3 and 4 the same, with an encrypted payload
//!     10    2  group
//!     12    4  payload offset: the end of the below, rounded up to the volume's alignment; zeros between
//!     16   16  namespace tag of the deployment
//!     32   16  sequence hash
//!     48   16  slice: first layer, number of layers, first head, number of heads
//!     64    8  payload length
//!     72    4  label: short name of the namespace that the hash is chained in
//!     76    2  order of the payload: 0 opaque, 1 universal (head, layer, outer, token, element)
//!     78    2  zero
//!     80    4  pieces: the payload is so many pieces of equal length
//!     84    4  versions 2 and 4: the beginning of the key's name; else zero
//!     88    8  sum of bytes 0..88 and of what follows to the payload, but the zeros
//!     96   8n  table of pieces: for each, the sum of bytes 0..88, its index (4 bytes) and its content
//! 96+8n   16  versions 3 and 4: id of the data key
//! 112+8n  16  versions 3 and 4: tag of the encryption
//! ```
//! A sum is CRC-64/NVME in versions 1 and 3, BLAKE3 with a key in 2 and 4 ([`ObjectSeal`]).
//! Integers are little-endian. Every piece's checksum covers the key, so an intact payload under
//! another's header fails, and so do pieces that changed places. In universal order with a piece
//! for each head, other ranks can verify the heads that they take.

use std::io;

use kvbm_keys::{KeyId, TAG_BYTES};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned, transmute_ref};

use crate::request::MAX_PIECES;
use crate::seal::CipherStamp;
use crate::{
    BlobKey, BlobSlice, GetRequest, ObjectCorruption, ObjectSeal, PayloadForm, PutRequest, StoredOrder,
    VolumeError,
};

/// Bytes of a header before its table of pieces.
pub const HEADER_BYTES: usize = 96;

/// The largest alignment of payloads in their objects.
pub const MAX_ALIGNMENT: u32 = 1 << 20;

/// Most bytes of a header with what follows it.
#[cfg(feature = "s3")]
pub(crate) const MAX_HEADER_BYTES: usize = HEADER_BYTES + 8 * MAX_PIECES as usize + STAMP_BYTES;

/// Bytes that an encrypted object has more than another one.
pub const STAMP_BYTES: usize = size_of::<StampLayout>();

const MAGIC: &[u8; 8] = b"kvbmblob";
const VERSION: u16 = 1;
const KEYED_VERSION: u16 = 2;
/// What is added to the version where the payload is encrypted.
const ENCRYPTED: u16 = 2;
/// Bytes before the header's checksum.
const IDENTITY_BYTES: usize = 88;

/// The header before its table of pieces, as it lies in the object.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    magic: [u8; 8],
    version: U16,
    group: U16,
    payload_offset: U32,
    namespace: [u8; 16],
    hash: [u8; 16],
    first_layer: U32,
    num_layers: U32,
    first_head: U32,
    num_heads: U32,
    payload_length: U64,
    label: U32,
    order: U16,
    zero: U16,
    pieces: U32,
    key_id: U32,
    sum: U64,
}

const _: () = assert!(size_of::<HeaderLayout>() == HEADER_BYTES);

/// How the payload is encrypted, behind the table of pieces.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct StampLayout {
    key: [u8; 16],
    tag: [u8; TAG_BYTES],
}

impl HeaderLayout {
    /// The bytes that every checksum covers.
    fn identity(&self) -> &[u8] {
        &self.as_bytes()[..IDENTITY_BYTES]
    }
}

/// The bytes of an object before its payload: what a volume writes, followed by the request's
/// pieces.
///
/// # Errors
/// [`VolumeError::BadForm`] where the payload cannot be cut into so many pieces;
/// [`VolumeError::Io`] where no descriptor has such an alignment.
pub fn seal(volume: VolumeId, request: &PutRequest<'_>, alignment: u32) -> Result<Vec<u8>, VolumeError> {
    Ok(Header::new(volume, request, alignment)?.encode())
}

/// Takes a whole object apart that was found under the request's key: compares everything, then
/// fills the request's pieces.
///
/// # Errors
/// [`VolumeError::Corrupt`], [`VolumeError::OtherForm`] or [`VolumeError::LengthMismatch`], each of
/// them a miss.
pub fn open(volume: VolumeId, object: &[u8], request: &mut GetRequest<'_>) -> Result<(), VolumeError> {
    open_of_length(volume, object, object.len() as u64, request)
}

/// Likewise, of an object of `length` bytes of which only the first ones were fetched, because it
/// is longer than what was asked for: its header says what it is.
pub(crate) fn open_of_length(
    volume: VolumeId,
    object: &[u8],
    length: u64,
    request: &mut GetRequest<'_>,
) -> Result<(), VolumeError> {
    let key = request.key;
    let corrupt = |reason| VolumeError::Corrupt { volume, key, reason };
    let short = || corrupt(ObjectCorruption::NoHeader(object.len() as u64));
    let (fixed, rest) = object.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
    let table = Header::table_bytes(fixed).map_err(corrupt)?;
    let table = rest.get(..table).ok_or_else(short)?;
    let header = Header::decode(fixed, table, &key, length, &request.seal).map_err(corrupt)?;
    header.check_request(volume, request)?;
    let mut payload = object.get(header.payload_offset as usize..).unwrap_or_default();
    // Of fewer bytes than `decode` has compared `length` with, too.
    header.verify([payload]).map_err(corrupt)?;
    for piece in &mut request.pieces {
        let (head, rest) = payload.split_at(piece.len());
        piece.copy_from_slice(head);
        payload = rest;
    }
    Ok(())
}

/// What a header says.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    pub(crate) key: BlobKey,
    pub(crate) form: PayloadForm,
    pub(crate) payload_offset: u32,
    pub(crate) payload_length: u64,
    seal: ObjectSeal,
    sums: Vec<u64>,
}

impl Header {
    /// The header of the object that a request writes.
    pub(crate) fn new(
        volume: VolumeId,
        request: &PutRequest<'_>,
        alignment: u32,
    ) -> Result<Self, VolumeError> {
        let PutRequest { key, form, seal, pieces } = request;
        let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if !(1..=MAX_PIECES).contains(&form.pieces) || !length.is_multiple_of(u64::from(form.pieces)) {
            return Err(VolumeError::BadForm { volume, key: *key, pieces: form.pieces, length });
        }
        if !(1..=MAX_ALIGNMENT).contains(&alignment) {
            let text = format!("alignment {alignment}: use a power of two from 1 to {MAX_ALIGNMENT} bytes");
            let source = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(VolumeError::Io { volume, operation: "put", key: *key, source });
        }
        let mut header = Self {
            key: *key,
            form: *form,
            payload_offset: head_bytes(form.pieces, seal.is_encrypted()).next_multiple_of(alignment),
            payload_length: length,
            seal: seal.clone(),
            sums: Vec::new(),
        };
        header.sums = header.piece_sums(pieces.iter().copied());
        Ok(header)
    }

    /// Bytes of the whole object.
    pub(crate) fn object_length(&self) -> u64 {
        u64::from(self.payload_offset).saturating_add(self.payload_length)
    }

    /// The bytes before the payload, padding included.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut layout = self.layout();
        let table: Vec<U64> = self.sums.iter().copied().map(U64::new).collect();
        let mut rest = table.as_bytes().to_vec();
        if let Some(CipherStamp { key, tag }) = self.seal.stamp() {
            rest.extend_from_slice(StampLayout { key: *key.as_bytes(), tag }.as_bytes());
        }
        layout.sum.set(self.seal.header(layout.identity(), &rest));
        let mut bytes = [layout.as_bytes(), &rest].concat();
        bytes.resize(self.payload_offset as usize, 0);
        bytes
    }

    /// Bytes of the table and the stamp that follow, by a header that is not verified yet.
    pub(crate) fn table_bytes(fixed: &[u8; HEADER_BYTES]) -> Result<usize, ObjectCorruption> {
        let layout: &HeaderLayout = transmute_ref!(fixed);
        if layout.magic != *MAGIC {
            return Err(ObjectCorruption::Magic);
        }
        let version = layout.version.get();
        if !(VERSION..=KEYED_VERSION + ENCRYPTED).contains(&version) {
            return Err(ObjectCorruption::Version(version));
        }
        let pieces = layout.pieces.get();
        if !(1..=MAX_PIECES).contains(&pieces) {
            return Err(ObjectCorruption::HeaderField("pieces"));
        }
        Ok(head_bytes(pieces, version > KEYED_VERSION) as usize - HEADER_BYTES)
    }

    /// Reads the header of an object that was found under `key`, is `object_length` bytes long and
    /// must be summed as `seal` does it.
    pub(crate) fn decode(
        fixed: &[u8; HEADER_BYTES],
        table: &[u8],
        key: &BlobKey,
        object_length: u64,
        seal: &ObjectSeal,
    ) -> Result<Self, ObjectCorruption> {
        if Self::table_bytes(fixed)? != table.len() {
            return Err(ObjectCorruption::HeaderField("pieces"));
        }
        let layout: &HeaderLayout = transmute_ref!(fixed);
        let encrypted = layout.version.get() > KEYED_VERSION;
        let is_keyed = layout.version == KEYED_VERSION || layout.version == KEYED_VERSION + ENCRYPTED;
        let found = is_keyed.then(|| layout.key_id.get());
        if found != seal.key_id() {
            return Err(ObjectCorruption::OtherSeal { found, ours: seal.key_id() });
        }
        if encrypted != seal.is_encrypted() {
            return Err(ObjectCorruption::Encryption { encrypted });
        }
        if layout.sum != seal.header(layout.identity(), table) {
            return Err(ObjectCorruption::HeaderChecksum);
        }
        let order = match layout.order.get() {
            0 => StoredOrder::Opaque,
            1 => StoredOrder::Universal,
            _ => return Err(ObjectCorruption::HeaderField("order")),
        };
        let bad_table = || ObjectCorruption::HeaderField("pieces");
        let (sums, stamp) = table.split_at_checked(8 * layout.pieces.get() as usize).ok_or_else(bad_table)?;
        let sums = <[U64]>::ref_from_bytes(sums).map_err(|_| bad_table())?;
        let header = Self {
            key: BlobKey {
                namespace: NamespaceTag::from_bytes(layout.namespace),
                label: NamespaceId(layout.label.get()),
                group: GroupId(layout.group.get()),
                hash: SequenceHash::from_bytes(layout.hash),
                slice: BlobSlice {
                    first_layer: layout.first_layer.get(),
                    num_layers: layout.num_layers.get(),
                    first_head: layout.first_head.get(),
                    num_heads: layout.num_heads.get(),
                },
            },
            form: PayloadForm { order, pieces: layout.pieces.get() },
            payload_offset: layout.payload_offset.get(),
            payload_length: layout.payload_length.get(),
            seal: seal.clone(),
            sums: sums.iter().map(|sum| sum.get()).collect(),
        };
        header.check(key, object_length)?;
        // Bytes without a field are zero: a later version may give them a meaning.
        if header.layout().identity() != layout.identity() {
            return Err(ObjectCorruption::HeaderField("reserved bytes"));
        }
        if let Ok(StampLayout { key, tag }) = StampLayout::ref_from_bytes(stamp) {
            seal.found(CipherStamp { key: KeyId::from_bytes(*key), tag: *tag });
        }
        Ok(header)
    }

    fn check(&self, key: &BlobKey, object_length: u64) -> Result<(), ObjectCorruption> {
        if self.key != *key {
            return Err(ObjectCorruption::OtherKey);
        }
        let head = head_bytes(self.form.pieces, self.seal.is_encrypted());
        if !(head..=MAX_ALIGNMENT).contains(&self.payload_offset) {
            return Err(ObjectCorruption::HeaderField("payload offset"));
        }
        if !self.payload_length.is_multiple_of(u64::from(self.form.pieces)) {
            return Err(ObjectCorruption::HeaderField("payload length"));
        }
        let expected = self.object_length();
        if expected != object_length {
            return Err(ObjectCorruption::Length { expected, actual: object_length });
        }
        Ok(())
    }

    /// Whether the payload is what the caller expects and fits into its buffers.
    pub(crate) fn check_request(
        &self,
        volume: VolumeId,
        request: &GetRequest<'_>,
    ) -> Result<(), VolumeError> {
        let key = request.key;
        if self.form != request.form {
            return Err(VolumeError::OtherForm { volume, key, stored: self.form, asked: request.form });
        }
        let asked = request.pieces.iter().map(|piece| piece.len() as u64).sum();
        let stored = self.payload_length;
        if stored == asked { Ok(()) } else { Err(VolumeError::LengthMismatch { volume, key, stored, asked }) }
    }

    /// Whether the payload that was read is the one written.
    pub(crate) fn verify<'a>(
        &self,
        buffers: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(), ObjectCorruption> {
        if self.piece_sums(buffers) == self.sums { Ok(()) } else { Err(ObjectCorruption::PayloadChecksum) }
    }

    /// A checksum for each piece of a payload that lies in `buffers`, wherever these are cut.
    fn piece_sums<'a>(&self, buffers: impl IntoIterator<Item = &'a [u8]>) -> Vec<u64> {
        let layout = self.layout();
        let start = |index: u32| {
            let mut sum = self.seal.piece();
            sum.update(layout.identity());
            sum.update(&index.to_le_bytes());
            sum
        };
        let piece_bytes = self.payload_length / u64::from(self.form.pieces);
        if piece_bytes == 0 {
            return (0..self.form.pieces).map(|index| start(index).finish()).collect();
        }
        let mut sums = Vec::with_capacity(self.form.pieces as usize);
        let (mut sum, mut left) = (start(0), piece_bytes);
        for mut buffer in buffers {
            while !buffer.is_empty() {
                let (now, later) =
                    buffer.split_at(buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
                sum.update(now);
                buffer = later;
                left -= now.len() as u64;
                if left == 0 {
                    sums.push(sum.finish());
                    (sum, left) = (start(sums.len() as u32), piece_bytes);
                }
            }
        }
        sums
    }

    /// All fields but the checksum.
    fn layout(&self) -> HeaderLayout {
        let mut layout = HeaderLayout::new_zeroed();
        layout.magic = *MAGIC;
        layout.version.set(VERSION);
        layout.group.set(self.key.group.0);
        layout.payload_offset.set(self.payload_offset);
        layout.namespace = *self.key.namespace.as_bytes();
        layout.hash = *self.key.hash.as_bytes();
        layout.first_layer.set(self.key.slice.first_layer);
        layout.num_layers.set(self.key.slice.num_layers);
        layout.first_head.set(self.key.slice.first_head);
        layout.num_heads.set(self.key.slice.num_heads);
        layout.payload_length.set(self.payload_length);
        layout.label.set(self.key.label.0);
        layout.order.set(self.form.order as u16);
        layout.pieces.set(self.form.pieces);
        if let Some(id) = self.seal.key_id() {
            layout.version.set(KEYED_VERSION);
            layout.key_id.set(id);
        }
        if self.seal.is_encrypted() {
            layout.version.set(layout.version.get() + ENCRYPTED);
        }
        layout
    }
}

/// Bytes of a header with what follows it.
const fn head_bytes(pieces: u32, is_encrypted: bool) -> u32 {
    HEADER_BYTES as u32 + 8 * pieces + if is_encrypted { STAMP_BYTES as u32 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::{CrcAlgorithm, checksum};
    use kvbm_keys::DeploymentKey;
    use proptest::prelude::*;

    const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;
    const VOLUME: VolumeId = VolumeId(7);

    fn key() -> BlobKey {
        BlobKey {
            namespace: NamespaceTag::from_bytes([0xa1; 16]),
            label: NamespaceId(0x0807_0605),
            group: GroupId(0x0102),
            hash: SequenceHash::from_bytes([0xb2; 16]),
            slice: BlobSlice { first_layer: 1, num_layers: 2, first_head: 3, num_heads: 4 },
        }
    }

    fn put<'a>(pieces: u32, payload: &[&'a [u8]]) -> PutRequest<'a> {
        let form = PayloadForm { order: StoredOrder::Universal, pieces };
        PutRequest { key: key(), form, seal: ObjectSeal::default(), pieces: payload.to_vec() }
    }

    fn object(pieces: u32, alignment: u32, payload: &[&[u8]]) -> Vec<u8> {
        let mut object = seal(VOLUME, &put(pieces, payload), alignment).unwrap();
        for piece in payload {
            object.extend_from_slice(piece);
        }
        object
    }

    fn read(object: &[u8], pieces: u32, length: usize) -> Result<Vec<u8>, VolumeError> {
        let mut bytes = vec![0; length];
        let (a, b) = bytes.split_at_mut(length / 3);
        let form = PayloadForm { order: StoredOrder::Universal, pieces };
        open(
            VOLUME,
            object,
            &mut GetRequest { key: key(), form, seal: ObjectSeal::default(), pieces: vec![a, b] },
        )?;
        Ok(bytes)
    }

    /// Makes the header's own checksum fit what was changed in it.
    fn reseal(object: &mut [u8], pieces: usize) {
        let sum = checksum(ALGORITHM, &[&object[..88], &object[96..96 + 8 * pieces]].concat());
        object[88..96].copy_from_slice(&sum.to_le_bytes());
    }

    /// A vendor's volume may hand over what nobody has checked.
    #[test]
    fn an_alignment_that_cannot_be_is_refused() {
        for alignment in [0, MAX_ALIGNMENT + 1, u32::MAX] {
            let error = seal(VOLUME, &put(1, &[b"payload"]), alignment).unwrap_err().to_string();
            assert!(error.contains(&format!("alignment {alignment}: use a power of two")), "{error}");
        }
    }

    #[test]
    fn golden_object() {
        let object = object(2, 1, &[b"pay", b"load!"]);
        let mut expected = b"kvbmblob\x01\x00\x02\x01\x70\x00\x00\x00".to_vec();
        expected.extend([0xa1; 16]);
        expected.extend([0xb2; 16]);
        expected.extend(b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x08\0\0\0\0\0\0\0");
        expected.extend(b"\x05\x06\x07\x08\x01\0\0\0\x02\0\0\0\0\0\0\0");
        let piece = |index: u8, content: &[u8]| {
            checksum(ALGORITHM, &[&expected[..], &[index, 0, 0, 0], content].concat()).to_le_bytes()
        };
        let table = [piece(0, b"payl"), piece(1, b"oad!")].concat();
        let sum = checksum(ALGORITHM, &[&expected[..], &table].concat());
        expected.extend(sum.to_le_bytes());
        expected.extend(table);
        expected.extend(b"payload!");
        assert_eq!(object, expected);
        assert_eq!(checksum(ALGORITHM, b"123456789"), 0xae8b_1486_0a79_9888, "the catalogue's check value");
        assert_eq!(read(&object, 2, 8).unwrap(), b"payload!");
    }

    #[test]
    fn padding_follows_the_alignment() {
        for (alignment, offset) in
            [(1, 104), (8, 104), (128, 128), (4096, 4096), (MAX_ALIGNMENT, MAX_ALIGNMENT)]
        {
            let object = object(1, alignment, &[b"payload"]);
            assert_eq!(object.len(), offset as usize + 7);
            assert_eq!(read(&object, 1, 7).unwrap(), b"payload");
        }
    }

    #[test]
    fn forms_that_make_no_sense_or_differ_are_refused() {
        for (pieces, length) in [(0, 4), (3, 4), (MAX_PIECES + 1, 4 * (MAX_PIECES as usize + 1))] {
            let error = seal(VOLUME, &put(pieces, &[&vec![0; length]]), 1).unwrap_err();
            assert!(matches!(error, VolumeError::BadForm { .. }) && !error.is_miss(), "{error}");
        }
        let empty = object(3, 1, &[]);
        assert_eq!(read(&empty, 3, 0).unwrap(), b"");
        let error = read(&object(2, 1, &[b"1234"]), 4, 4).unwrap_err();
        assert!(matches!(error, VolumeError::OtherForm { .. }) && error.is_miss(), "{error}");
    }

    #[test]
    fn a_sound_header_with_absurd_fields_is_refused() {
        let sound = object(2, 1, &[b"payload!"]);
        for (at, value, what) in [
            (12, 111_u32, "payload offset"),
            (12, MAX_ALIGNMENT + 1, "payload offset"),
            (12, u32::MAX, "payload offset"),
            (64, 7, "payload length"),
            (76, 9, "order"),
            (80, 0, "pieces"),
            (80, u32::MAX, "pieces"),
        ] {
            let mut bytes = sound.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            reseal(&mut bytes, 2);
            let error = read(&bytes, 2, 8).unwrap_err();
            assert!(error.is_corrupt() && error.to_string().contains(what), "{what}: {error}");
        }
        let mut huge = sound.clone();
        huge[64..72].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
        reseal(&mut huge, 2);
        assert!(read(&huge, 2, 8).unwrap_err().to_string().contains("120 bytes long"));
    }

    #[test]
    fn pieces_that_changed_places_are_found() {
        let mut object = object(2, 1, &[b"abcdefgh"]);
        let at = object.len() - 8;
        object[at..].copy_from_slice(b"efghabcd");
        let (first, second) = (object[96..104].to_vec(), object[104..112].to_vec());
        object[96..104].copy_from_slice(&second);
        object[104..112].copy_from_slice(&first);
        reseal(&mut object, 2);
        assert!(read(&object, 2, 8).unwrap_err().is_corrupt());
    }

    /// Everything but the key is known to the forger.
    #[test]
    fn only_objects_of_the_own_key_are_served() {
        let keyed = |secret: &[u8]| ObjectSeal::keyed(&DeploymentKey::from_secret(secret));
        let seals = [ObjectSeal::default(), keyed(b"ours"), keyed(b"theirs")];
        let sealed = |seal: &ObjectSeal| {
            let payload = b"payload!";
            let mut object =
                super::seal(VOLUME, &PutRequest { seal: seal.clone(), ..put(2, &[payload]) }, 1).unwrap();
            object.extend_from_slice(payload);
            object
        };
        let read = |object: &[u8], seal: &ObjectSeal| {
            let (mut bytes, form) = ([0; 8], PayloadForm { order: StoredOrder::Universal, pieces: 2 });
            let mut request = GetRequest { key: key(), form, seal: seal.clone(), pieces: vec![&mut bytes] };
            open(VOLUME, object, &mut request).map(|()| bytes)
        };
        for (at, written) in seals.iter().enumerate() {
            for (other, reader) in seals.iter().enumerate() {
                match read(&sealed(written), reader) {
                    Ok(bytes) => assert!(at == other && bytes == *b"payload!"),
                    Err(error) => {
                        let signed = error.to_string().contains("it is signed with");
                        assert!(at != other && error.is_corrupt() && signed, "{error}");
                    }
                }
            }
        }
        // Its own key's name under sums of another kind: what the forger can compute.
        let mut forged = sealed(&seals[1]);
        forged[96 + 16..].copy_from_slice(b"attacked");
        let plain = sealed(&seals[0]);
        forged[96..112].copy_from_slice(&plain[96..112]);
        reseal(&mut forged, 2);
        let error = read(&forged, &seals[1]).unwrap_err();
        assert!(error.to_string().contains("header checksum"), "{error}");
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_found(bit in 0..(HEADER_BYTES + 32 + 40) * 8, payload in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 8]>()) {
            let mut object = object(4, 1, &[&payload, &tail]);
            object[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(read(&object, 4, 40).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..3 * HEADER_BYTES), sealed in any::<bool>(), pieces in 0..5_u8) {
            let mut bytes = bytes;
            if sealed && bytes.len() >= HEADER_BYTES + 32 {
                bytes[..8].copy_from_slice(MAGIC);
                bytes[8..10].copy_from_slice(&[1, 0]);
                bytes[80..84].copy_from_slice(&[pieces, 0, 0, 0]);
                reseal(&mut bytes, usize::from(pieces.min(4)));
            }
            prop_assert!(read(&bytes, 1, 16).is_err());
        }
    }
}
