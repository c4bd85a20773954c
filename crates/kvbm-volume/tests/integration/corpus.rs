//! Objects that are right, damaged, or lie with checksums that match (`corpus/make.py` writes them
//! from the description of the format), and whatever comes of changing them at random: each is
//! taken for what it is, without a panic and without memory that a number in it asks for.
//! `KVBM_FUZZ_ROUNDS` says how often they are changed.

use crate::random::Random;
use crc_fast::{CrcAlgorithm, checksum};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobSlice, DirectoryVolume, GetRequest, ObjectSeal, PayloadForm, PutRequest, StoredOrder,
    Volume, VolumeDescriptor, VolumeError, object,
};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LENGTH: usize = 20;
/// Rounds where `KVBM_FUZZ_ROUNDS` says nothing.
const ROUNDS: u64 = 20_000;
const WHOLE: PayloadForm = PayloadForm { order: StoredOrder::Opaque, pieces: 1 };
const HALVES: PayloadForm = PayloadForm { order: StoredOrder::Universal, pieces: 2 };

/// What reading says, in the form in which it is asked for.
enum Expected {
    Serves(PayloadForm),
    OtherForm,
    OtherLength,
    Corrupt(&'static str),
}
use Expected::{Corrupt, OtherForm, OtherLength, Serves};

const CORPUS: &[(&str, Expected)] = &[
    ("whole", Serves(WHOLE)),
    ("universal", Serves(HALVES)),
    ("padded", Serves(WHOLE)),
    ("no_payload", OtherLength),
    ("empty", Corrupt("0 bytes are too few")),
    ("magic_only", Corrupt("8 bytes are too few")),
    ("header_cut", Corrupt("95 bytes are too few")),
    ("table_cut", Corrupt("")),
    ("payload_cut", Corrupt("123 bytes long, its header says 124")),
    ("trailing", Corrupt("125 bytes long, its header says 124")),
    ("magic_flipped", Corrupt("not a kvbm object")),
    ("header_flipped", Corrupt("header checksum")),
    ("header_sum_flipped", Corrupt("header checksum")),
    ("table_flipped", Corrupt("header checksum")),
    ("payload_flipped", Corrupt("payload checksum")),
    ("version_0", Corrupt("version 0")),
    ("signed", Corrupt("signed with key 7a617600")),
    ("encrypted", Corrupt("payload is encrypted")),
    ("stamp_cut", Corrupt("")),
    ("compressed", Corrupt("payload is compressed")),
    ("version_9", Corrupt("version 9")),
    ("version_max", Corrupt("version 65535")),
    ("order_2", Corrupt("order out of range")),
    ("pieces_0", Corrupt("pieces out of range")),
    ("pieces_5000", Corrupt("pieces out of range")),
    ("pieces_max", Corrupt("pieces out of range")),
    ("more_pieces_than_table", Corrupt("header checksum")),
    ("uneven_pieces", Corrupt("payload length out of range")),
    ("offset_in_header", Corrupt("payload offset out of range")),
    ("offset_in_table", Corrupt("payload offset out of range")),
    ("offset_max", Corrupt("header checksum")),
    ("length_max", Corrupt("its header says 18446744073709551615")),
    ("length_beyond", Corrupt("its header says 1099511627880")),
    ("length_short", Corrupt("124 bytes long, its header says 123")),
    ("other_namespace", Corrupt("another key")),
    ("other_label", Corrupt("another key")),
    ("other_group", Corrupt("another key")),
    ("other_block", Corrupt("another key")),
    ("other_layers", Corrupt("another key")),
    ("other_heads", Corrupt("another key")),
    ("pieces_changed_places", OtherForm),
    ("sums_changed_places", OtherForm),
    ("unknown_bytes", Corrupt("reserved bytes out of range")),
];

fn key() -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xa1; 16]),
        label: NamespaceId(0x0807_0605),
        group: GroupId(3),
        hash: SequenceHash::from_bytes([0xb2; 16]),
        slice: BlobSlice { first_layer: 1, num_layers: 2, first_head: 3, num_heads: 4 },
    }
}

fn payload() -> Vec<u8> {
    (40..60).collect()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(name).with_extension("blob")).unwrap()
}

/// Reads an object into two buffers.
fn read(object: &[u8], form: PayloadForm) -> Result<Vec<u8>, VolumeError> {
    let mut bytes = vec![0; LENGTH];
    let (a, b) = bytes.split_at_mut(7);
    object::open(
        VolumeId(1),
        object,
        &mut GetRequest { key: key(), form, seal: ObjectSeal::default(), pieces: vec![a, b] },
    )?;
    Ok(bytes)
}

fn assert_expected(name: &str, found: Result<Vec<u8>, VolumeError>, expected: &Expected) {
    match (found, expected) {
        (Ok(bytes), Serves(_)) => assert_eq!(bytes, payload(), "{name}"),
        (Err(VolumeError::OtherForm { .. }), OtherForm)
        | (Err(VolumeError::LengthMismatch { stored: 0, .. }), OtherLength) => {}
        (Err(error), Corrupt(why)) => {
            assert!(error.is_corrupt() && error.is_miss(), "{name}: {error}");
            assert!(error.to_string().contains(why), "{name}: {error} says {why}");
        }
        (found, _) => panic!("{name}: {found:?}"),
    }
}

#[test]
fn every_file_of_the_corpus_is_taken_for_what_it_is() {
    let root = tempfile::tempdir().unwrap();
    let descriptor = VolumeDescriptor::new(VolumeId(1), root.path().display().to_string());
    let volume = DirectoryVolume::open(descriptor).unwrap();
    let place = volume.object_file(&key());
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    for (name, expected) in CORPUS {
        let object = file(name);
        let form = if let Serves(form) = expected { *form } else { WHOLE };
        assert_expected(name, read(&object, form), expected);
        // By the reader that does not have all of it at once.
        std::fs::write(&place, &object).unwrap();
        let mut bytes = vec![0; LENGTH];
        let request = GetRequest { key: key(), form, seal: ObjectSeal::default(), pieces: vec![&mut bytes] };
        let soon = Instant::now() + Duration::from_secs(60);
        let found = volume.get(&mut [request], soon).pop().unwrap();
        assert_expected(name, found.map(|()| bytes), expected);
    }
    for swapped in ["pieces_changed_places", "sums_changed_places"] {
        let error = read(&file(swapped), HALVES).unwrap_err();
        assert!(error.is_corrupt() && error.to_string().contains("payload checksum"), "{swapped}: {error}");
    }
}

#[test]
fn what_we_write_is_what_the_description_says() {
    let written = payload();
    for (name, form, alignment) in [("whole", WHOLE, 1), ("universal", HALVES, 1), ("padded", WHOLE, 4096)] {
        let request = PutRequest {
            key: key(),
            form,
            seal: ObjectSeal::default(),
            pieces: vec![&written[..3], &written[3..]],
        };
        let mut object = object::seal(VolumeId(1), &request, alignment).unwrap();
        object.extend_from_slice(&written);
        assert!(object == file(name), "{name}");
    }
}

#[test]
fn the_corpus_is_complete() {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|extension| extension == "blob"))
        .map(|file| file.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort_unstable();
    let mut named: Vec<_> = CORPUS.iter().map(|(name, _)| (*name).to_owned()).collect();
    named.sort_unstable();
    assert_eq!(files, named);
}

fn crc(parts: &[&[u8]]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, &parts.concat())
}

fn number(object: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(object[at..at + 8].try_into().unwrap())
}

fn small_number(object: &[u8], at: usize) -> usize {
    u32::from_le_bytes(object[at..at + 4].try_into().unwrap()) as usize
}

/// What an object in `form` has to hold for its payload to be served: docs/formats.md, word by
/// word.
fn served(object: &[u8], form: PayloadForm) -> Option<&[u8]> {
    let pieces = form.pieces as usize;
    let head = 96 + 8 * pieces;
    if object.len() < head || &object[..10] != b"kvbmblob\x01\x00" || object[10..12] != [3, 0] {
        return None;
    }
    let named = [[0xa1; 16], [0xb2; 16]].concat();
    let slice = [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0];
    if object[16..48] != named || object[48..64] != slice || object[72..76] != [5, 6, 7, 8] {
        return None;
    }
    if object[76..78] != (form.order as u16).to_le_bytes() || small_number(object, 80) != pieces {
        return None;
    }
    // Of reserved bytes nothing is said but that they are zero.
    if object[78..80] != [0; 2] || object[84..88] != [0; 4] {
        return None;
    }
    if number(object, 88) != crc(&[&object[..88], &object[96..head]]) {
        return None;
    }
    let offset = small_number(object, 12);
    let fits = (head..=1 << 20).contains(&offset) && offset + LENGTH == object.len();
    if !fits || number(object, 64) != LENGTH as u64 || !LENGTH.is_multiple_of(pieces) {
        return None;
    }
    let payload = &object[offset..];
    let sound = (0_u32..).zip(payload.chunks(LENGTH / pieces)).all(|(index, piece)| {
        let sum = number(object, 96 + 8 * index as usize);
        sum == crc(&[&object[..88], &index.to_le_bytes(), piece])
    });
    sound.then_some(payload)
}

/// Makes the checksums fit what was changed: of the pieces too where `all`.
fn reseal(object: &mut [u8], all: bool) {
    if object.len() < 104 {
        return;
    }
    let pieces = small_number(object, 80).min((object.len() - 96) / 8);
    let head = 96 + 8 * pieces;
    let offset = small_number(object, 12).clamp(head, object.len());
    if all && pieces > 0 {
        let piece_bytes = ((object.len() - offset) / pieces).max(1);
        for index in 0..pieces {
            let start = (offset + index * piece_bytes).min(object.len());
            let end = (start + piece_bytes).min(object.len());
            let sum = crc(&[&object[..88], &(index as u32).to_le_bytes(), &object[start..end]]);
            object[96 + 8 * index..104 + 8 * index].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let sum = crc(&[&object[..88], &object[96..head]]);
    object[88..96].copy_from_slice(&sum.to_le_bytes());
}

/// One change of an object.
fn change(object: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    const ODD: [u64; 10] = [0, 1, 2, 19, 20, 4096, 4097, 1 << 20, u32::MAX as u64, u64::MAX];
    let length = object.len();
    let at = random.below(length);
    match random.below(7) {
        0 if length > 0 => object[at] ^= 1 << random.below(8),
        1 if length > 0 => object[at] = random.next() as u8,
        2 => object.truncate(at),
        3 => object.resize(length + random.below(40), random.next() as u8),
        4 if length >= 96 => {
            // A field, as a whole.
            let (at, width) =
                [(8, 2), (10, 2), (12, 4), (64, 8), (72, 4), (76, 2), (80, 4), (84, 4)][random.below(8)];
            let value = ODD[random.below(ODD.len())].to_le_bytes();
            object[at..at + width].copy_from_slice(&value[..width]);
        }
        5 => {
            let other = &seeds[random.below(seeds.len())];
            let end = (at + random.below(64)).min(other.len()).min(length);
            if at < end {
                object[at..end].copy_from_slice(&other[at..end]);
            }
        }
        _ if length > 0 => {
            object.remove(at);
        }
        _ => {}
    }
}

#[test]
fn whatever_is_changed_is_served_only_where_the_description_allows_it() {
    let rounds = std::env::var("KVBM_FUZZ_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let seeds: Vec<Vec<u8>> = CORPUS.iter().map(|(name, _)| file(name)).collect();
    let mut random = Random(1);
    let mut served_count = 0;
    for round in 0..rounds {
        let mut object = seeds[random.below(seeds.len())].clone();
        for _ in 0..random.below(4) {
            change(&mut object, &seeds, &mut random);
        }
        match random.below(4) {
            0 => reseal(&mut object, false),
            1 | 2 => reseal(&mut object, true),
            _ => {}
        }
        for form in [WHOLE, HALVES] {
            let expected = served(&object, form);
            match (read(&object, form), expected) {
                (Ok(bytes), Some(payload)) => {
                    assert_eq!(bytes, payload, "round {round}");
                    served_count += 1;
                }
                (Err(error), None) => assert!(error.is_miss(), "round {round}: {error}"),
                (found, expected) => panic!("round {round}: {found:?}, not {expected:?}: {object:?}"),
            }
        }
    }
    assert!(served_count > rounds / 50, "{served_count} of {rounds} rounds were objects");
}
