//! Lossy volumes: what comes back, who reads it, and that it changes once.
#![cfg(feature = "compress")]

use crate::random::Random;
use kvbm_codec::FrameError;
use kvbm_keys::{DeploymentKey, OperatorKey};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobSlice, CompressedVolume, EncryptedVolume, GetRequest, LossyCodes, LossyNumbers, LossyTerms,
    MemoryVolume, ObjectCorruption, ObjectSeal, PayloadForm, PutRequest, StoredOrder, Volume,
    VolumeCompression, VolumeDescriptor, VolumeEncryption, VolumeError,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([0xa1; 16]);
/// Three heads of 1,600 numbers of two bytes.
const BYTES: usize = 3 * 1600 * 2;
const FORM: PayloadForm = PayloadForm { order: StoredOrder::Universal, pieces: 3 };
const CODES: [LossyCodes; 3] = [LossyCodes::Fp8E4m3, LossyCodes::Int8, LossyCodes::Int4];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn key(number: u8, group: u16) -> BlobKey {
    BlobKey {
        namespace: NAMESPACE,
        label: NamespaceId(7),
        group: GroupId(group),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 3 },
    }
}

/// Numbers of a few magnitudes, which are finite as bf16 and as f16.
fn content(number: u8) -> Vec<u8> {
    let mut random = Random(u64::from(number) + 1);
    (0..BYTES)
        .map(|at| if at % 2 == 0 { random.next() as u8 } else { 0x38 | random.next() as u8 & 0x83 })
        .collect()
}

fn memory() -> Arc<MemoryVolume> {
    Arc::new(MemoryVolume::open(VolumeDescriptor::new(VolumeId(1), "memory:")).unwrap())
}

fn encrypted(store: Arc<dyn Volume>) -> Arc<dyn Volume> {
    let key = OperatorKey::parse(&[&[7; 31][..], b"!"].concat()).unwrap();
    let encryption = VolumeEncryption { key, previous: None };
    Arc::new(EncryptedVolume::open(store, NAMESPACE, encryption).unwrap())
}

/// Groups 0 and 1 are of these numbers; group 2 has no lossy form.
fn over(store: Arc<dyn Volume>, setting: VolumeCompression, codes: LossyCodes) -> CompressedVolume {
    let numbers = vec![LossyNumbers::Bf16, LossyNumbers::F16];
    CompressedVolume::new(store, setting).with_lossy(&LossyTerms { codes, numbers })
}

fn put(volume: &dyn Volume, seal: &ObjectSeal, key: BlobKey, bytes: &[u8]) {
    let (head, tail) = bytes.split_at(701);
    let request = PutRequest { key, form: FORM, seal: seal.clone(), pieces: vec![head, tail] };
    volume.put(&[request], soon()).remove(0).unwrap();
}

fn get(volume: &dyn Volume, seal: &ObjectSeal, key: BlobKey) -> Result<Vec<u8>, VolumeError> {
    let mut bytes = vec![0; BYTES];
    let (head, tail) = bytes.split_at_mut(1235);
    let request = GetRequest { key, form: FORM, seal: seal.clone(), pieces: vec![head, &mut [], tail] };
    volume.get(&mut [request], soon()).remove(0).map(|()| bytes)
}

fn object(store: &MemoryVolume, key: BlobKey) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(store.tamper(&key, |object| bytes.clone_from(object)));
    bytes
}

fn reason(result: Result<Vec<u8>, VolumeError>) -> ObjectCorruption {
    match result {
        Err(error @ VolumeError::Corrupt { reason, .. }) => {
            assert!(error.is_miss(), "{error}");
            reason
        }
        other => panic!("{other:?}"),
    }
}

/// Signed, encrypted and compressed after it or not. Mutations that make it fail: an object that is
/// written again has other bytes; a group has the numbers of another one.
#[test]
fn blocks_are_shorter_come_back_nearly_and_change_once() {
    use VolumeCompression::{Lz4, Off, Zstd};
    let keyed = ObjectSeal::keyed(&DeploymentKey::from_secret(b"of the deployment"));
    for (seal, encrypts) in [(ObjectSeal::default(), false), (keyed.clone(), false), (keyed, true)] {
        for codes in CODES {
            let (store, bytes) = (memory(), content(1));
            let below = || if encrypts { encrypted(store.clone()) } else { store.clone() };
            let mut first: Option<[Vec<u8>; 2]> = None;
            for setting in [Off, Zstd, Lz4] {
                let volume = over(below(), setting, codes);
                let found = [0, 1].map(|group| {
                    put(&volume, &seal, key(1, group), &bytes);
                    let found = get(&volume, &seal, key(1, group)).unwrap();
                    let kept = if codes == LossyCodes::Int4 { 17 } else { 33 };
                    // A header of the object, one of the frame, padding.
                    let most = BYTES * kept / 64 + 200;
                    let stored = object(&store, key(1, group));
                    assert!(stored.len() < most, "{codes:?}: {} of {BYTES}", stored.len());
                    // What came back is written again, and read by who compresses otherwise.
                    put(&volume, &seal, key(2, group), &found);
                    let again = get(&over(below(), Zstd, codes), &seal, key(2, group)).unwrap();
                    assert!(again == found, "{codes:?} {setting:?}");
                    assert!(encrypts || object(&store, key(2, group)).len() == stored.len());
                    found
                });
                assert!(found[0] != bytes && found[0] != found[1], "{codes:?}");
                assert!(first.get_or_insert_with(|| found.clone()) == &found, "{codes:?} {setting:?}");
                let stats = volume.compression().unwrap();
                assert!(stats.compresses && stats.written == 4 * BYTES as u64);
                assert!(stats.written_stored * 100 < stats.written * 53, "{stats:?}");
                assert!(stats.read_stored * 100 < stats.read * 53, "{stats:?}");
            }
        }
    }
}

#[test]
fn what_has_no_lossy_form_is_exact() {
    for codes in CODES {
        let (store, seal) = (memory(), ObjectSeal::default());
        let volume = over(store.clone(), VolumeCompression::Zstd, codes);
        let mut infinite = content(3);
        infinite[501] = 0xff;
        infinite[500] = 0x80;
        for (key, bytes) in [(key(1, 2), content(1)), (key(3, 0), infinite)] {
            put(&volume, &seal, key, &bytes);
            assert!(get(&volume, &seal, key).unwrap() == bytes, "{codes:?} {key}");
            assert!(object(&store, key).len() < BYTES, "compressed without loss");
            let plain = over(store.clone(), VolumeCompression::Off, codes);
            put(&plain, &seal, key, &bytes);
            assert!(get(&volume, &seal, key).unwrap() == bytes, "{codes:?} {key}");
        }
    }
}

/// Mutation that makes it fail: the form of a frame is taken as it says.
#[test]
fn an_object_of_another_form_is_damaged() {
    let seal = ObjectSeal::default();
    for codes in CODES {
        let store = memory();
        put(&over(store.clone(), VolumeCompression::Off, codes), &seal, key(1, 0), &content(1));
        let exact = CompressedVolume::new(store.clone(), VolumeCompression::Zstd);
        let is_lossy =
            |reason| matches!(reason, ObjectCorruption::Frame(FrameError::Lossy { element: 1, .. }));
        assert!(is_lossy(reason(get(&exact, &seal, key(1, 0)))), "{codes:?}");
        for other in CODES.into_iter().filter(|other| *other != codes) {
            let other = over(store.clone(), VolumeCompression::Off, other);
            assert!(is_lossy(reason(get(&other, &seal, key(1, 0)))), "{codes:?}");
        }
        assert_eq!(reason(get(&*store, &seal, key(1, 0))), ObjectCorruption::Compressed);
    }
}

/// As who can write the store without a key: all sums are made right after a change.
fn mend(object: &mut [u8]) {
    let crc = |parts: &[&[u8]]| {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &parts.concat()).to_le_bytes()
    };
    let head = 96 + 3 * 8;
    let (identity, payload) = (object[..88].to_vec(), object[head..].to_vec());
    for (index, piece) in payload.chunks_exact(payload.len() / 3).enumerate() {
        let sum = crc(&[&identity, &(index as u32).to_le_bytes(), piece]);
        object[96 + 8 * index..][..8].copy_from_slice(&sum);
    }
    let sum = crc(&[&identity, &object[96..head]]);
    object[88..96].copy_from_slice(&sum);
}

/// Mutation that makes it fail: the checksum of what comes back is not compared.
#[test]
fn no_changed_bit_is_served() {
    for codes in CODES {
        let (store, seal) = (memory(), ObjectSeal::default());
        let volume = over(store.clone(), VolumeCompression::Off, codes);
        put(&volume, &seal, key(1, 0), &content(1));
        let whole = object(&store, key(1, 0));
        let sound = get(&volume, &seal, key(1, 0)).unwrap();
        let mut random = Random(3);
        let (mut frames, mut harmless) = (0, 0);
        for round in 0..1000 {
            let mut damaged = whole.clone();
            let most = if round % 2 == 0 { 8 * (96 + 24 + 24 + 8) } else { 8 * whole.len() };
            let bit = random.below(most);
            damaged[bit / 8] ^= 1 << (bit % 8);
            if round % 4 > 0 {
                mend(&mut damaged);
            }
            store.tamper(&key(1, 0), |object| object.clone_from(&damaged));
            match get(&volume, &seal, key(1, 0)) {
                Ok(bytes) => {
                    assert!(bytes == sound, "{codes:?} bit {bit}");
                    harmless += 1;
                }
                Err(error) => {
                    assert!(error.is_miss() && !error.to_string().is_empty(), "{error}");
                    frames += usize::from(error.to_string().contains("its payload: "));
                }
            }
        }
        assert!(frames > 200 && harmless < 350, "{codes:?}: {frames} by the frame, {harmless} harmless");
    }
}
