//! Encrypted volumes: what lies in the store, what is opened with which key, and nodes that share
//! one.

use crate::random::Random;
use kvbm_keys::{DeploymentKey, OperatorKey};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, DirectoryVolume, EncryptedVolume, GetRequest, MemoryVolume,
    ObjectCorruption, ObjectSeal, PayloadForm, PutRequest, RegistryError, StoredOrder, Volume,
    VolumeCompression, VolumeDescriptor, VolumeEncryption, VolumeError, VolumeExt, VolumeKeysError,
    VolumeRegistry, VolumeTerms,
};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([0xa1; 16]);
const LABEL: NamespaceId = NamespaceId(7);
const BYTES: usize = 3000;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn operator(seed: u8) -> OperatorKey {
    OperatorKey::parse(&[&[seed; 31][..], b"!"].concat()).unwrap()
}

fn encryption(seed: u8) -> VolumeEncryption {
    VolumeEncryption { key: operator(seed), previous: None }
}

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NAMESPACE,
        label: LABEL,
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 3 },
    }
}

fn content(number: u8) -> Vec<u8> {
    let mut random = Random(u64::from(number) + 1);
    (0..BYTES).map(|_| random.next() as u8).collect()
}

fn memory() -> Arc<MemoryVolume> {
    Arc::new(MemoryVolume::open(VolumeDescriptor::new(VolumeId(1), "memory:")).unwrap())
}

fn over(store: &Arc<MemoryVolume>, seed: u8) -> EncryptedVolume {
    EncryptedVolume::open(store.clone(), NAMESPACE, encryption(seed)).unwrap()
}

const FORM: PayloadForm = PayloadForm { order: StoredOrder::Universal, pieces: 3 };

fn put(volume: &dyn Volume, seal: &ObjectSeal, number: u8) -> Result<(), VolumeError> {
    let bytes = content(number);
    let (head, tail) = bytes.split_at(700);
    let request = PutRequest { key: key(number), form: FORM, seal: seal.clone(), pieces: vec![head, tail] };
    volume.put(&[request], soon()).remove(0)
}

fn get(volume: &dyn Volume, seal: &ObjectSeal, key: BlobKey) -> Result<Vec<u8>, VolumeError> {
    let mut bytes = vec![0; BYTES];
    let (head, tail) = bytes.split_at_mut(1234);
    let request = GetRequest { key, form: FORM, seal: seal.clone(), pieces: vec![head, &mut [], tail] };
    volume.get(&mut [request], soon()).remove(0).map(|()| bytes)
}

fn is_served(volume: &dyn Volume, number: u8) -> bool {
    match get(volume, &ObjectSeal::default(), key(number)) {
        Ok(bytes) => bytes == content(number),
        Err(error) => {
            assert!(error.is_miss(), "{error}");
            false
        }
    }
}

fn reason(result: Result<Vec<u8>, VolumeError>) -> ObjectCorruption {
    match result {
        Err(VolumeError::Corrupt { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

fn object(store: &MemoryVolume, key: &BlobKey) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(store.tamper(key, |object| bytes.clone_from(object)));
    bytes
}

fn objects_of_keys(store: &MemoryVolume) -> Vec<BlobKey> {
    let scope = BlobScope { namespace: NAMESPACE, label: Some(NamespaceId(u32::MAX)) };
    store.list(&scope, None, 1000, soon()).unwrap()
}

#[test]
fn blocks_come_back_with_and_without_signatures_and_the_store_has_none_of_their_bytes() {
    let keyed = ObjectSeal::keyed(&DeploymentKey::from_secret(b"of the deployment"));
    for seal in [ObjectSeal::default(), keyed] {
        let store = memory();
        let volume = over(&store, 1);
        for number in 0..4 {
            put(&volume, &seal, number).unwrap();
            assert_eq!(get(&volume, &seal, key(number)).unwrap(), content(number));
        }
        // In one piece, too, which is decrypted where it lies; and an empty one.
        volume.put_one(&key(9), b"one piece", soon()).unwrap();
        assert_eq!(volume.get_one(&key(9), 9, soon()).unwrap(), b"one piece");
        volume.put_one(&key(8), b"", soon()).unwrap();
        assert_eq!(volume.get_one(&key(8), 0, soon()).unwrap(), b"");
        for number in 0..4 {
            let (stored, plain) = (object(&store, &key(number)), content(number));
            assert!(stored.windows(16).all(|part| !plain.windows(16).any(|window| window == part)));
            // Who reads it without a key has a miss.
            let found = reason(get(&*store, &seal, key(number)));
            assert_eq!(found, ObjectCorruption::Encryption { encrypted: true });
        }
        // Again by another life.
        assert_eq!(get(&over(&store, 1), &seal, key(2)).unwrap(), content(2));
        // The listing has blocks alone.
        let all = volume.list(&BlobScope { namespace: NAMESPACE, label: None }, None, 100, soon()).unwrap();
        assert!(all.len() == 6 && all.iter().all(|key| key.label == LABEL));
        assert_eq!(objects_of_keys(&store).len(), 2, "a data key, and which operator's key wraps it");
    }
}

/// The checksums are made right after each change, as who can write the store can do that.
#[test]
fn no_bit_of_an_object_passes_when_it_is_changed_and_none_under_another_name() {
    let store = memory();
    let volume = over(&store, 1);
    let plain = ObjectSeal::default();
    (1..4).for_each(|number| put(&volume, &plain, number).unwrap());
    let whole = object(&store, &key(1));
    let head = 96 + 3 * 8 + 32;
    let mut random = Random(3);
    let bits = (0..head * 8).step_by(5).chain((0..400).map(|_| (random.next() as usize) % (8 * whole.len())));
    for bit in bits {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        for mends_sums in [false, true] {
            if mends_sums {
                mend_sums(&mut damaged);
            }
            store.tamper(&key(1), |object| object.clone_from(&damaged));
            let found = get(&volume, &plain, key(1));
            // A sum that was damaged and mended is as it was.
            let is_same = damaged == whole;
            assert_eq!(found.is_ok(), is_same, "bit {bit}, {mends_sums}: {found:?}");
            assert!(is_same || found.is_err_and(|error| error.is_miss()), "bit {bit}");
        }
    }
    // Another block's object, renamed with sums that match.
    let mut other = object(&store, &key(2));
    other[32..48].copy_from_slice(&[3; 16]);
    mend_sums(&mut other);
    store.tamper(&key(3), |object| *object = other);
    assert!(matches!(reason(get(&volume, &plain, key(3))), ObjectCorruption::Tag(_)));
    // An object that was not encrypted.
    store.put_one(&key(3), b"forged", soon()).unwrap();
    let mut bytes = [0; 6];
    let form = PayloadForm::default();
    let mut forged = [GetRequest { key: key(3), form, seal: plain, pieces: vec![&mut bytes] }];
    let found = volume.get(&mut forged, soon()).remove(0).map(|()| Vec::new());
    assert_eq!(reason(found), ObjectCorruption::Encryption { encrypted: false });
}

/// Makes all sums of an object without signatures fit, as `docs/formats.md` says it.
fn mend_sums(object: &mut [u8]) {
    let crc = |parts: &[&[u8]]| {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &parts.concat()).to_le_bytes()
    };
    let head = 96 + 3 * 8 + 32;
    let (identity, payload) = (object[..88].to_vec(), object[head..].to_vec());
    for (index, piece) in payload.chunks_exact(BYTES / 3).enumerate() {
        let sum = crc(&[&identity, &(index as u32).to_le_bytes(), piece]);
        object[96 + 8 * index..][..8].copy_from_slice(&sum);
    }
    let sum = crc(&[&identity, &object[96..head]]);
    object[88..96].copy_from_slice(&sum);
}

#[test]
fn a_wrong_key_none_and_one_too_many_are_refused_by_name_and_change_nothing() {
    let terms = |seed: Option<u8>| VolumeTerms {
        namespace: NAMESPACE,
        encryption: seed.map(encryption),
        compression: VolumeCompression::Off,
        lossy: None,
    };
    let refused = |store: &Arc<MemoryVolume>, terms: VolumeTerms| {
        let registry = VolumeRegistry::new().for_deployment(terms).unwrap();
        match registry.register(store.clone()) {
            Err(RegistryError::Keys { source, .. }) => *source,
            other => panic!("{other:?}"),
        }
    };
    let store = memory();
    put(&over(&store, 1), &ObjectSeal::default(), 1).unwrap();
    let before = objects_of_keys(&store);
    let error = refused(&store, terms(None));
    let named = |error: &VolumeKeysError, seed| error.to_string().contains(&operator(seed).id().to_string());
    assert!(matches!(error, VolumeKeysError::Encrypted { .. }) && named(&error, 1), "{error}");
    let error = refused(&store, terms(Some(2)));
    assert!(
        matches!(error, VolumeKeysError::Operator { .. }) && named(&error, 1) && named(&error, 2),
        "{error}"
    );
    let previous = Some(operator(3));
    let both =
        VolumeTerms { encryption: Some(VolumeEncryption { previous, ..encryption(2) }), ..terms(None) };
    let error = refused(&store, both);
    assert!(named(&error, 1) && named(&error, 2) && named(&error, 3), "{error}");
    assert_eq!(objects_of_keys(&store), before);
    // Other deployments of the same store are not concerned.
    let other = VolumeTerms { namespace: NamespaceTag::from_bytes([2; 16]), ..terms(None) };
    VolumeRegistry::new().for_deployment(other).unwrap().register(store.clone()).unwrap();

    let plain = memory();
    put(&*plain, &ObjectSeal::default(), 1).unwrap();
    let error = refused(&plain, terms(Some(1)));
    assert!(matches!(error, VolumeKeysError::NotEncrypted { .. }), "{error}");
    assert_eq!(objects_of_keys(&plain), []);
    // Volumes that are known already are looked at, too.
    let registry = VolumeRegistry::new();
    registry.register(store).unwrap();
    assert!(matches!(registry.for_deployment(terms(Some(2))), Err(RegistryError::Keys { .. })));
}

#[test]
fn nodes_that_make_a_key_at_once_read_each_others_blocks_and_agree_on_one() {
    for round in 0..8 {
        let folder = tempfile::tempdir().unwrap();
        let open = || {
            let uri = format!("dir://{}", folder.path().display());
            let volume = DirectoryVolume::open(VolumeDescriptor::new(VolumeId(1), uri)).unwrap();
            EncryptedVolume::open(Arc::new(volume), NAMESPACE, encryption(1)).unwrap()
        };
        let (nodes, start) = ([open(), open(), open()], Barrier::new(6));
        std::thread::scope(|threads| {
            for (at, node) in nodes.iter().chain(&nodes).enumerate() {
                let start = &start;
                threads.spawn(move || {
                    start.wait();
                    put(node, &ObjectSeal::default(), at as u8).unwrap();
                });
            }
        });
        for node in &nodes {
            assert!((0..6).all(|number| is_served(node, number)), "round {round}");
        }
        // They know of all keys by now: what is written from here on has one and the same.
        let used = |node: &EncryptedVolume, number: u8| {
            put(node, &ObjectSeal::default(), number).unwrap();
            let path = folder.path().join(key(number).object_path());
            std::fs::read(path).unwrap()[96 + 24..][..16].to_vec()
        };
        let keys: Vec<_> = nodes.iter().zip(10..).map(|(node, number)| used(node, number)).collect();
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        assert!(is_served(&open(), 0) && is_served(&open(), 12));
    }
}

#[test]
fn what_is_forgotten_cannot_be_read_even_from_an_old_copy() {
    let store = memory();
    let volume = over(&store, 1);
    let other = |number: u8| BlobKey { label: NamespaceId(8), ..key(number) };
    put(&volume, &ObjectSeal::default(), 1).unwrap();
    volume.put_one(&other(2), b"of another tenant", soon()).unwrap();
    let destroyed = volume.destroy_keys(LABEL, soon()).unwrap();
    assert!(destroyed.len() == 1 && destroyed[0].1.is_ok(), "{destroyed:?}");
    assert_eq!(objects_of_keys(&store).len(), 2);
    // The object is still there, as a copy would be.
    for volume in [&volume, &over(&store, 1)] {
        let found = reason(get(volume, &ObjectSeal::default(), key(1)));
        assert_eq!(found, ObjectCorruption::NoKey(destroyed[0].0));
        assert_eq!(volume.get_one(&other(2), 17, soon()).unwrap(), b"of another tenant");
    }
    assert!(volume.destroy_keys(LABEL, soon()).unwrap().is_empty(), "once");
    // It begins anew, with another key.
    put(&volume, &ObjectSeal::default(), 1).unwrap();
    assert!(is_served(&over(&store, 1), 1));
}

#[test]
fn new_keys_encrypt_new_blocks_and_old_ones_stay_readable() {
    let store = memory();
    let (volume, node) = (over(&store, 1), over(&store, 1));
    put(&volume, &ObjectSeal::default(), 1).unwrap();
    assert_eq!(volume.rotate(Some(NamespaceId(99))).unwrap(), 0, "it has no blocks");
    assert_eq!(volume.rotate(None).unwrap(), 1);
    put(&volume, &ObjectSeal::default(), 2).unwrap();
    let key_of = |number: u8| object(&store, &key(number))[96 + 24..][..16].to_vec();
    assert_ne!(key_of(1), key_of(2));
    // A node that has not looked since finds what it needs.
    assert!(is_served(&node, 2) && is_served(&node, 1));
    put(&node, &ObjectSeal::default(), 3).unwrap();
    assert_eq!(key_of(3), key_of(2));
    assert_eq!(volume.destroy_keys(LABEL, soon()).unwrap().len(), 2, "old keys go with the new one");
}

#[test]
fn a_new_operators_key_takes_over_and_the_old_one_opens_nothing_any_more() {
    let store = memory();
    put(&over(&store, 1), &ObjectSeal::default(), 1).unwrap();
    let key_of = |number: u8| object(&store, &key(number))[96 + 24..][..16].to_vec();
    let both = VolumeEncryption { previous: Some(operator(1)), ..encryption(2) };
    let volume = EncryptedVolume::open(store.clone(), NAMESPACE, both.clone()).unwrap();
    assert!(is_served(&volume, 1));
    put(&volume, &ObjectSeal::default(), 2).unwrap();
    assert_ne!(key_of(1), key_of(2), "new blocks have new keys");
    drop(volume);
    let error = EncryptedVolume::open(store.clone(), NAMESPACE, encryption(1)).map(drop).unwrap_err();
    assert!(error.to_string().contains(&operator(2).id().to_string()), "{error}");
    let volume = over(&store, 2);
    assert!(is_served(&volume, 1) && is_served(&volume, 2));
    let again = EncryptedVolume::open(store.clone(), NAMESPACE, both).unwrap();
    assert!(is_served(&again, 1) && is_served(&again, 2));
    assert_eq!(objects_of_keys(&store).len(), 3, "two data keys, and one operator's");
}

/// The file was made by `docs/formats.md`.
#[test]
fn an_object_by_the_page_says_which_key_it_needs() {
    let store = memory();
    let volume = over(&store, 1);
    let slice = BlobSlice { first_layer: 1, num_layers: 2, first_head: 3, num_heads: 4 };
    let (label, group) = (NamespaceId(0x0807_0605), GroupId(3));
    let key =
        BlobKey { namespace: NAMESPACE, label, group, hash: SequenceHash::from_bytes([0xb2; 16]), slice };
    volume.put_one(&key, &[0; 20], soon()).unwrap();
    store.tamper(&key, |object| *object = include_bytes!("../corpus/encrypted.blob").to_vec());
    match volume.get_one(&key, 20, soon()) {
        Err(VolumeError::Corrupt { reason: ObjectCorruption::NoKey(id), .. }) => {
            assert_eq!(id.as_bytes(), &[0xc3; 16]);
        }
        other => panic!("{other:?}"),
    }
}

/// A key that is damaged in its store opens nothing, and does not stop the others.
#[test]
fn a_damaged_key_costs_its_blocks_alone() {
    let store = memory();
    put(&over(&store, 1), &ObjectSeal::default(), 1).unwrap();
    let marker = operator(1).id();
    let data: Vec<BlobKey> =
        objects_of_keys(&store).into_iter().filter(|key| key.hash.as_bytes() != marker.as_bytes()).collect();
    assert_eq!(data.len(), 1);
    store.tamper(&data[0], |object| *object.last_mut().unwrap() ^= 1);
    let volume = over(&store, 1);
    assert!(!is_served(&volume, 1));
    put(&volume, &ObjectSeal::default(), 2).unwrap();
    assert!(is_served(&over(&store, 1), 2));
}
