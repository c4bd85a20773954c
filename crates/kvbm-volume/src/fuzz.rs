//! What must hold whatever a store gives back: the bodies of the fuzz targets `object`, `blob_key`
//! and `volume_key` (`cargo xtask fuzz`). They panic where it does not hold.

use crate::key_object::{KEY_OBJECT_BYTES, KeyName, WrappedKey};
use crate::object::{HEADER_BYTES, STAMP_BYTES, open, seal};
use crate::seal::CipherStamp;
use crate::{BlobKey, BlobScope, BlobSlice, GetRequest, ObjectSeal, PayloadForm, PutRequest, StoredOrder};
use crc_fast::{CrcAlgorithm, checksum};
use kvbm_keys::{DeploymentKey, KeyId, OperatorKey};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};

const VOLUME: VolumeId = VolumeId(1);

/// An object is served, byte for byte, or is a miss; what is served would be written the same, and
/// not with a bit flipped. So it is for the input as it is, with the header's checksum made right,
/// and with all of them made right: nobody guesses those.
pub fn object(input: &[u8]) {
    let mut object = input.to_vec();
    is_served_or_missed(&object);
    seal_header(&mut object);
    is_served_or_missed(&object);
    seal_pieces(&mut object);
    seal_header(&mut object);
    is_served_or_missed(&object);
}

/// Text that is the path of an object is the path of that object alone.
pub fn key(input: &[u8]) {
    let Ok(path) = std::str::from_utf8(input) else { return };
    let Some(key) = BlobKey::parse(path) else { return };
    assert_eq!(key.object_path(), path);
    assert!(path.len() <= 140, "{path}");
    for label in [None, Some(key.label)] {
        let scope = BlobScope { namespace: key.namespace, label };
        assert!(scope.contains(&key) && path.starts_with(&scope.prefix()), "{path} in {scope}");
    }
}

fn number<const N: usize>(object: &[u8], at: usize) -> u64 {
    object[at..at + N].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

fn small(object: &[u8], at: usize) -> u32 {
    number::<4>(object, at) as u32
}

fn sixteen(object: &[u8], at: usize) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&object[at..at + 16]);
    bytes
}

/// Who the object says that it is, `docs/formats.md` word by word, and how many pieces it has.
fn named(object: &[u8]) -> (BlobKey, PayloadForm) {
    let [first_layer, num_layers, first_head, num_heads] = [48, 52, 56, 60].map(|at| small(object, at));
    let key = BlobKey {
        namespace: NamespaceTag::from_bytes(sixteen(object, 16)),
        label: NamespaceId(small(object, 72)),
        group: GroupId(number::<2>(object, 10) as u16),
        hash: SequenceHash::from_bytes(sixteen(object, 32)),
        slice: BlobSlice { first_layer, num_layers, first_head, num_heads },
    };
    let order = if number::<2>(object, 76) == 1 { StoredOrder::Universal } else { StoredOrder::Opaque };
    (key, PayloadForm { order, pieces: small(object, 80) })
}

/// Pieces of the table, as far as the object has it.
fn pieces_of(object: &[u8]) -> usize {
    (small(object, 80) as usize).min((object.len() - HEADER_BYTES) / 8)
}

/// What the version says, 1 to 8: one more where it is signed, two where the payload is encrypted,
/// four where it is compressed. Nothing of another version.
fn says(object: &[u8], what: u8) -> bool {
    matches!(object.get(8..10), Some(&[version @ 1..=8, 0]) if (version - 1) & what != 0)
}

const SIGNED: u8 = 1;
const ENCRYPTED: u8 = 2;
const COMPRESSED: u8 = 4;

/// End of the table of pieces and the stamp of an encrypted payload, as far as the object has them.
fn head_bytes(object: &[u8]) -> usize {
    let stamp = if says(object, ENCRYPTED) { STAMP_BYTES } else { 0 };
    (HEADER_BYTES + 8 * pieces_of(object) + stamp).min(object.len())
}

/// The key of signed objects.
fn key_of(object: &[u8]) -> Option<DeploymentKey> {
    says(object, SIGNED).then(|| DeploymentKey::from_secret(b"of the fuzz target"))
}

/// How it is summed, and what it says of its encryption, by its version.
fn seal_of(object: &[u8]) -> ObjectSeal {
    let seal = key_of(object).map_or_else(ObjectSeal::default, |key| ObjectSeal::keyed(&key));
    let seal = if says(object, COMPRESSED) { seal.framed() } else { seal };
    if object.len() < HEADER_BYTES || !says(object, ENCRYPTED) {
        return seal;
    }
    let stamp = HEADER_BYTES + 8 * pieces_of(object);
    let mut words = [0; STAMP_BYTES];
    words.iter_mut().zip(&object[stamp..]).for_each(|(word, byte)| *word = *byte);
    let key = KeyId::from_bytes(sixteen(&words, 0));
    seal.stamped(CipherStamp { key, tag: sixteen(&words, 16) })
}

/// By the page: `what` is `headers` or `pieces`.
fn sum(object: &[u8], what: &str, parts: &[&[u8]]) -> [u8; 8] {
    let sum = match key_of(object) {
        None => checksum(CrcAlgorithm::Crc64Nvme, &parts.concat()),
        Some(key) if what == "headers" => key.derive("kvbm 2026-11-25 volumes: headers of objects").of(parts),
        Some(key) => key.derive_bulk("kvbm 2026-11-25 volumes: pieces of objects").of(parts),
    };
    sum.to_le_bytes()
}

fn seal_header(object: &mut [u8]) {
    if object.len() >= HEADER_BYTES {
        let end = head_bytes(object);
        if let Some(key) = key_of(object) {
            object[84..88].copy_from_slice(&key.id().as_bytes()[..4]);
        }
        let sum = sum(object, "headers", &[&object[..88], &object[HEADER_BYTES..end]]);
        object[88..HEADER_BYTES].copy_from_slice(&sum);
    }
}

fn seal_pieces(object: &mut [u8]) {
    if object.len() < HEADER_BYTES {
        return;
    }
    if let Some(key) = key_of(object) {
        object[84..88].copy_from_slice(&key.id().as_bytes()[..4]);
    }
    let (end, pieces) = (head_bytes(object), pieces_of(object));
    let payload = object[(small(object, 12) as usize).clamp(end, object.len())..].to_vec();
    let length = payload.len() / pieces.max(1);
    for index in 0..pieces {
        let piece = &payload[index * length..][..length];
        let sum = sum(object, "pieces", &[&object[..88], &(index as u32).to_le_bytes(), piece]);
        object[HEADER_BYTES + 8 * index..][..8].copy_from_slice(&sum);
    }
}

fn is_served_or_missed(object: &[u8]) {
    if object.len() < HEADER_BYTES {
        let (key, form) = named(&[0; HEADER_BYTES]);
        assert!(read(object, key, form).is_none());
        return;
    }
    let (key, form) = named(object);
    let Some(payload) = read(object, key, form) else { return };
    let offset = small(object, 12);
    assert!(object.ends_with(&payload) && object.len() == offset as usize + payload.len());
    // An alignment of the whole offset, so that the payload goes where it is.
    let request = PutRequest {
        key,
        form,
        seal: seal_of(object),
        pieces: vec![&payload[..payload.len() / 2], &payload[payload.len() / 2..]],
    };
    let written = seal(VOLUME, &request, offset).unwrap_or_else(|error| panic!("{error}"));
    let head = head_bytes(object);
    assert_eq!(
        (written.len(), &written[..head]),
        (offset as usize, &object[..head]),
        "it is all that it says"
    );
    let other = BlobKey { group: GroupId(!key.group.0), ..key };
    assert!(read(object, other, form).is_none(), "another block has none of it");
    is_damaged_by_a_bit(object, key, form, offset as usize);
}

/// Any bit but those between table and payload, which nobody reads.
fn is_damaged_by_a_bit(object: &[u8], key: BlobKey, form: PayloadForm, offset: usize) {
    let head = head_bytes(object);
    let covered = head + object.len() - offset;
    let bit = number::<8>(object, 88) as usize % (8 * covered);
    let at = if bit / 8 < head { bit / 8 } else { bit / 8 - head + offset };
    let mut damaged = object.to_vec();
    damaged[at] ^= 1 << (bit % 8);
    assert!(read(&damaged, key, form).is_none(), "byte {at}");
}

/// The payload, asked for as all that there may be.
fn read(object: &[u8], key: BlobKey, form: PayloadForm) -> Option<Vec<u8>> {
    let offset = if object.len() < HEADER_BYTES { 0 } else { small(object, 12) as usize };
    let mut payload = vec![0; object.len().saturating_sub(offset)];
    let (first, second) = payload.split_at_mut(object.len() % 7 % (1 + object.len().saturating_sub(offset)));
    match open(
        VOLUME,
        object,
        &mut GetRequest { key, form, seal: seal_of(object), pieces: vec![first, second] },
    ) {
        Ok(()) => Some(payload),
        Err(error) => {
            assert!(error.is_miss() && !error.to_string().is_empty(), "{error}");
            None
        }
    }
}

/// An object of a data key: whatever it says is written again, and opens for nobody without the
/// operator's key. Its name is read back, and is none of a block. The input: 16 bytes of name, then
/// the payload.
pub fn volume_key(input: &[u8]) {
    let (name, payload) = input.split_at(input.len().min(16));
    let mut words = [0; 16];
    words[..name.len()].copy_from_slice(name);
    let slice = BlobSlice {
        first_layer: small(&words, 0),
        num_layers: small(&words, 4),
        first_head: small(&words, 8),
        num_heads: small(&words, 12),
    };
    let namespace = NamespaceTag::from_bytes([1; 16]);
    let marker = KeyName::Operator(KeyId::from_bytes(words)).object(namespace);
    let object = BlobKey { slice, ..marker };
    let parsed = KeyName::parse(&object).map(|name| name.object(namespace));
    assert_eq!(parsed, Some(object), "a name says all that it has");
    assert_eq!(KeyName::parse(&BlobKey { group: GroupId(0), ..object }), None);
    let Some(key) = WrappedKey::decode(payload) else { return };
    assert!(payload.len() == KEY_OBJECT_BYTES && key.encode() == *payload, "it is all that it says");
    let Ok(operator) = OperatorKey::parse(b"operator's key of a fuzz target!") else { return };
    assert!(key.unwrap(&operator, namespace).is_none(), "nobody wraps a key without the operator's");
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signed_object_is_served_and_damaged_by_a_bit() {
        let key = DeploymentKey::from_secret(b"of the fuzz target");
        let (name, form) = named(&[0; HEADER_BYTES]);
        let form = PayloadForm { pieces: 3, ..form };
        let request =
            PutRequest { key: name, form, seal: ObjectSeal::keyed(&key), pieces: vec![b"payload!!"] };
        let mut signed = seal(VOLUME, &request, 1).unwrap();
        signed.extend_from_slice(b"payload!!");
        assert!(read(&signed, name, form).is_some());
        object(&signed);
    }

    #[test]
    fn an_encrypted_or_compressed_object_is_served_and_damaged_by_a_bit() {
        let (name, form) = named(&[0; HEADER_BYTES]);
        let form = PayloadForm { pieces: 3, ..form };
        let stamp = CipherStamp { key: KeyId::from_bytes([5; 16]), tag: [6; 16] };
        let keyed = ObjectSeal::keyed(&DeploymentKey::from_secret(b"of the fuzz target"));
        let plain = ObjectSeal::default();
        for seal_of_it in
            [plain.stamped(stamp), keyed.stamped(stamp), plain.framed(), keyed.stamped(stamp).framed()]
        {
            let request = PutRequest { key: name, form, seal: seal_of_it, pieces: vec![b"payload!!"] };
            let mut object = seal(VOLUME, &request, 1).unwrap();
            object.extend_from_slice(b"payload!!");
            assert!(read(&object, name, form).is_some());
            super::object(&object);
        }
    }

    #[test]
    fn the_corpora_hold() {
        assert!(corpus::run("object", &["tests/corpus"], object) > 0);
        assert!(corpus::run("blob_key", &[], key) > 0);
        assert!(corpus::run("volume_key", &[], volume_key) > 0);
    }
}
