//! What a header says and what a reader makes of it.

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
    for (alignment, offset) in [(1, 104), (8, 104), (128, 128), (4096, 4096), (MAX_ALIGNMENT, MAX_ALIGNMENT)]
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
