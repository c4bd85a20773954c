//! The form of an object: a header that names it, then its payload.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmblob"
//!      8    2  format version: 1, or 2 where sums are keyed; 2 more where the payload is encrypted, and 4 more
//!              where it is compressed
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
//!     84    4  even versions: the beginning of the key's name; else zero
//!     88    8  sum of bytes 0..88 and of what follows to the payload, but the zeros
//!     96   8n  table of pieces: for each, the sum of bytes 0..88, its index (4 bytes) and its content
//! 96+8n   16  where the payload is encrypted: id of the data key
//! 112+8n  16  where the payload is encrypted: tag
//! ```
//! A sum is CRC-64/NVME in odd versions, BLAKE3 with a key in even ones ([`ObjectSeal`]).
//! Integers are little-endian. Every piece's checksum covers the key, so an intact payload under
//! another's header fails, and so do pieces that changed places. In universal order with a piece
//! for each head, other ranks can verify the heads that they take. A compressed payload is a frame
//! of `kvbm-codec`, with zeros behind it so that its length is a multiple of the pieces; it is
//! compressed, then encrypted, then summed.

use std::io;

use kvbm_keys::{KeyId, TAG_BYTES};
use kvbm_plan::simulation::{Planted, planted};
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
/// What is added to the version where the payload is compressed.
const FRAMED: u16 = 4;
const LAST_VERSION: u16 = KEYED_VERSION + ENCRYPTED + FRAMED;
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

    fn key(&self) -> BlobKey {
        BlobKey {
            namespace: NamespaceTag::from_bytes(self.namespace),
            label: NamespaceId(self.label.get()),
            group: GroupId(self.group.get()),
            hash: SequenceHash::from_bytes(self.hash),
            slice: BlobSlice {
                first_layer: self.first_layer.get(),
                num_layers: self.num_layers.get(),
                first_head: self.first_head.get(),
                num_heads: self.num_heads.get(),
            },
        }
    }

    /// Whether the object is keyed, encrypted and compressed as `seal` does it, and its header and
    /// `table` have the right sum.
    fn check_seal(&self, traits: Traits, table: &[u8], seal: &ObjectSeal) -> Result<(), ObjectCorruption> {
        let found = traits.is_keyed.then(|| self.key_id.get());
        if found != seal.key_id() {
            return Err(ObjectCorruption::OtherSeal { found, ours: seal.key_id() });
        }
        if traits.is_encrypted != seal.is_encrypted() {
            return Err(ObjectCorruption::Encryption { encrypted: traits.is_encrypted });
        }
        if traits.is_framed && !seal.takes_frames() {
            return Err(ObjectCorruption::Compressed);
        }
        if self.sum != seal.header(self.identity(), table) {
            return Err(ObjectCorruption::HeaderChecksum);
        }
        Ok(())
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
    for part in header.filled(request) {
        let (head, rest) = payload.split_at(part.len());
        part.copy_from_slice(head);
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
    is_framed: bool,
    seal: ObjectSeal,
    sums: Vec<u64>,
}

/// What a version says.
#[derive(Debug, Clone, Copy)]
struct Traits {
    is_keyed: bool,
    is_encrypted: bool,
    is_framed: bool,
}

impl Traits {
    fn of(version: u16) -> Result<Self, ObjectCorruption> {
        if !(VERSION..=LAST_VERSION).contains(&version) {
            return Err(ObjectCorruption::Version(version));
        }
        let has = |bit: u16| (version - VERSION) & bit != 0;
        Ok(Self { is_keyed: has(1), is_encrypted: has(ENCRYPTED), is_framed: has(FRAMED) })
    }
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
            is_framed: seal.is_framed(),
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
        let traits = Traits::of(layout.version.get())?;
        let pieces = layout.pieces.get();
        if !(1..=MAX_PIECES).contains(&pieces) {
            return Err(ObjectCorruption::HeaderField("pieces"));
        }
        Ok(head_bytes(pieces, traits.is_encrypted) as usize - HEADER_BYTES)
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
        let traits = Traits::of(layout.version.get())?;
        layout.check_seal(traits, table, seal)?;
        let order = match layout.order.get() {
            0 => StoredOrder::Opaque,
            1 => StoredOrder::Universal,
            _ => return Err(ObjectCorruption::HeaderField("order")),
        };
        let bad_table = || ObjectCorruption::HeaderField("pieces");
        let (sums, stamp) = table.split_at_checked(8 * layout.pieces.get() as usize).ok_or_else(bad_table)?;
        let sums = <[U64]>::ref_from_bytes(sums).map_err(|_| bad_table())?;
        let header = Self {
            key: layout.key(),
            form: PayloadForm { order, pieces: layout.pieces.get() },
            payload_offset: layout.payload_offset.get(),
            payload_length: layout.payload_length.get(),
            is_framed: traits.is_framed,
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
        if self.key != *key && !planted(Planted::TrustOtherObject) {
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
        if self.is_framed && stored <= asked {
            request.seal.found_frame(stored);
            return Ok(());
        }
        if stored == asked { Ok(()) } else { Err(VolumeError::LengthMismatch { volume, key, stored, asked }) }
    }

    /// Where the payload goes, by a request that was checked: all of its buffers, or the first
    /// bytes of them where the payload is compressed.
    pub(crate) fn filled<'a, 'b>(
        &self,
        request: &'a mut GetRequest<'b>,
    ) -> impl Iterator<Item = &'a mut [u8]> + use<'a, 'b> {
        let mut left = self.payload_length;
        request.pieces.iter_mut().map(move |piece| {
            let now = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            left -= now as u64;
            &mut piece[..now]
        })
    }

    /// Whether the payload that was read is the one written.
    pub(crate) fn verify<'a>(
        &self,
        buffers: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(), ObjectCorruption> {
        if self.piece_sums(buffers) == self.sums || planted(Planted::TrustPayload) {
            Ok(())
        } else {
            Err(ObjectCorruption::PayloadChecksum)
        }
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
        if self.is_framed {
            layout.version.set(layout.version.get() + FRAMED);
        }
        layout
    }
}

/// Bytes of a header with what follows it.
const fn head_bytes(pieces: u32, is_encrypted: bool) -> u32 {
    HEADER_BYTES as u32 + 8 * pieces + if is_encrypted { STAMP_BYTES as u32 } else { 0 }
}

#[cfg(test)]
mod tests;
