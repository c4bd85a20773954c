//! What every volume must do. Run [`check`] in the tests of an implementation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_keys::DeploymentKey;
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};

use crate::object::{self, HEADER_BYTES};
use crate::{
    BlobKey, BlobScope, BlobSlice, GetRequest, ObjectSeal, PayloadForm, PutRequest, StoredOrder, Volume,
    VolumeDescriptor, VolumeError, VolumeExt,
};

/// An implementation under test.
pub trait Subject {
    /// A new volume without objects, of this descriptor; its URI is the subject's to replace.
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume>;

    /// Changes an object's stored bytes behind the volume's back; `false` where the store cannot be
    /// reached so.
    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool;
}

/// Runs the whole suite.
///
/// # Panics
/// When the volume breaks the contract.
pub fn check(subject: &dyn Subject) {
    payloads_round_trip(subject);
    keys_are_apart(subject);
    batches_fail_one_by_one(subject);
    large_batches_keep_their_order(subject);
    puts_of_a_batch_fail_alone(subject);
    gets_of_a_batch_fail_alone(subject);
    puts_are_idempotent(subject);
    objects_are_replaced_and_deleted(subject);
    lengths_are_checked(subject);
    deadlines_are_kept(subject);
    capacity_is_kept(subject);
    no_namespace_takes_anothers_room(subject);
    objects_are_listed(subject);
    concurrent_puts_leave_a_whole_object(subject);
    damage_is_found(subject);
    nothing_forged_is_served(subject);
}

/// Bytes before the payload of an object in one piece.
const HEAD: usize = HEADER_BYTES + 8;

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xf0; 16]),
        label: NamespaceId(0xf0),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    }
}

fn payload(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i.wrapping_mul(31).wrapping_add(seed * 17) % 251) as u8).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn descriptor() -> VolumeDescriptor {
    VolumeDescriptor::new(VolumeId(7), "")
}

fn must<T>(result: Result<T, VolumeError>) -> T {
    result.unwrap_or_else(|error| panic!("the operation must succeed: {error}"))
}

fn payloads_round_trip(subject: &dyn Subject) {
    for alignment in [1, 4096] {
        let volume = subject.open(VolumeDescriptor { alignment, ..descriptor() });
        for (number, length) in [0, 1, 7, 4095, 4096, 4097, 300_000].into_iter().enumerate() {
            let bytes = payload(number, length);
            let pieces = if length.is_multiple_of(5) { 5 } else { 1 };
            let form = PayloadForm { order: StoredOrder::Universal, pieces };
            let (a, b) = bytes.split_at(length / 3);
            let request = PutRequest {
                key: key(number as u8),
                form,
                seal: ObjectSeal::default(),
                pieces: vec![a, &[], b],
            };
            volume.put(&[request], soon()).into_iter().for_each(must);

            let mut read = vec![0; length];
            let (a, b) = read.split_at_mut(length / 2);
            let request = GetRequest {
                key: key(number as u8),
                form,
                seal: ObjectSeal::default(),
                pieces: vec![a, b, &mut []],
            };
            volume.get(&mut [request], soon()).into_iter().for_each(must);
            assert_eq!(read, bytes, "{length} bytes at alignment {alignment}");
        }
    }
}

fn keys_are_apart(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let base = key(1);
    let slice = base.slice;
    let keys = [
        base,
        BlobKey { namespace: NamespaceTag::from_bytes([0xf1; 16]), ..base },
        BlobKey { label: NamespaceId(0xf1), ..base },
        BlobKey { group: GroupId(1), ..base },
        key(2),
        BlobKey { slice: BlobSlice { first_layer: 1, ..slice }, ..base },
        BlobKey { slice: BlobSlice { num_layers: 1, ..slice }, ..base },
        BlobKey { slice: BlobSlice { first_head: 1, ..slice }, ..base },
        BlobKey { slice: BlobSlice { num_heads: 2, ..slice }, ..base },
        BlobKey { slice: BlobSlice { first_layer: u32::MAX, ..slice }, group: GroupId(u16::MAX), ..base },
    ];
    for (i, key) in keys.iter().enumerate() {
        must(volume.put_one(key, &payload(i, 100), soon()));
    }
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(must(volume.get_one(key, 100, soon())), payload(i, 100), "{key}");
    }
}

fn batches_fail_one_by_one(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let puts: Vec<Vec<u8>> = (0..5).map(|i| payload(i, 64)).collect();
    let requests: Vec<PutRequest<'_>> = [0, 2, 4]
        .map(|i| PutRequest {
            key: key(i),
            form: PayloadForm::default(),
            seal: ObjectSeal::default(),
            pieces: vec![&puts[usize::from(i)]],
        })
        .into();
    let results = volume.put(&requests, soon());
    assert_eq!(results.len(), 3);
    results.into_iter().for_each(must);

    let mut buffers = vec![vec![0; 64]; 5];
    let mut gets: Vec<GetRequest<'_>> = buffers
        .iter_mut()
        .zip(0..)
        .map(|(buffer, i)| GetRequest {
            key: key(i),
            form: PayloadForm::default(),
            seal: ObjectSeal::default(),
            pieces: vec![buffer],
        })
        .collect();
    let results = volume.get(&mut gets, soon());
    assert_eq!(results.len(), 5);
    for (i, result) in results.into_iter().enumerate() {
        match result {
            Ok(()) => assert!(i % 2 == 0, "object {i} was never put"),
            Err(error) => {
                assert!(i % 2 == 1 && matches!(error, VolumeError::NotFound { .. }), "{i}: {error}");
                assert!(error.is_miss() && !error.is_corrupt());
            }
        }
    }
    for i in [0, 2, 4] {
        assert_eq!(buffers[i], puts[i]);
    }
    let keys: Vec<BlobKey> = (0..5).map(key).collect();
    let found: Vec<bool> = volume.exists(&keys, soon()).into_iter().map(must).collect();
    assert_eq!(found, [true, false, true, false, true]);
    assert!(volume.get(&mut [], soon()).is_empty() && volume.put(&[], soon()).is_empty());
}

fn large_batches_keep_their_order(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let payloads: Vec<Vec<u8>> = (0..90).map(|i| payload(i, 100 + i)).collect();
    let form = PayloadForm::default();
    let even = || (0..90_u8).step_by(2);
    let puts: Vec<PutRequest<'_>> = even()
        .map(|i| PutRequest {
            key: key(i),
            form,
            seal: ObjectSeal::default(),
            pieces: vec![&payloads[usize::from(i)]],
        })
        .collect();
    let put = volume.put(&puts, soon());
    assert_eq!(put.len(), 45);
    put.into_iter().for_each(must);

    // Backwards, and every second one was never put.
    let mut buffers: Vec<Vec<u8>> = (0..90).rev().map(|i| vec![0; 100 + i]).collect();
    let mut gets: Vec<GetRequest<'_>> = buffers
        .iter_mut()
        .zip((0..90).rev())
        .map(|(buffer, i)| GetRequest {
            key: key(i),
            form,
            seal: ObjectSeal::default(),
            pieces: vec![buffer],
        })
        .collect();
    let got = volume.get(&mut gets, soon());
    assert_eq!(got.len(), 90);
    for (i, result) in (0..90_usize).rev().zip(got) {
        assert_eq!(result.is_ok(), i % 2 == 0, "{i}: {:?}", result.err());
    }
    for i in even().map(usize::from) {
        assert_eq!(buffers[89 - i], payloads[i], "{i}");
    }
    let keys: Vec<BlobKey> = (0..90).map(key).collect();
    let deleted: Vec<bool> = volume.delete(&keys, soon()).into_iter().map(must).collect();
    assert!((0..90).zip(&deleted).all(|(i, deleted)| *deleted == (i % 2 == 0)), "{deleted:?}");
}

fn puts_of_a_batch_fail_alone(subject: &dyn Subject) {
    let volume = subject.open(VolumeDescriptor { capacity_bytes: Some(10_000), ..descriptor() });
    let [small, large] = [payload(1, 3_000), payload(2, 9_000)];
    let put = |number, pieces, bytes| PutRequest {
        key: key(number),
        form: PayloadForm { order: StoredOrder::Opaque, pieces },
        seal: ObjectSeal::default(),
        pieces: vec![bytes],
    };
    let requests =
        [put(0, 1, &small[..]), put(1, 7, &small), put(2, 1, &large), put(3, 0, &small), put(4, 3, &small)];
    let mut results = volume.put(&requests, soon()).into_iter();
    let mut next = || results.next().unwrap_or_else(|| panic!("a result for each request"));
    must(next());
    let error = next().expect_err("3000 bytes have no seven equal pieces");
    assert!(matches!(error, VolumeError::BadForm { pieces: 7, .. }) && !error.is_miss(), "{error}");
    let error = next().expect_err("there is no room");
    assert!(matches!(error, VolumeError::Full { needed: 9_000.., .. }), "{error}");
    let error = next().expect_err("no pieces at all");
    assert!(matches!(error, VolumeError::BadForm { pieces: 0, .. }), "{error}");
    must(next());
    let found: Vec<bool> = volume.exists(&[0, 1, 2, 3, 4].map(key), soon()).into_iter().map(must).collect();
    assert_eq!(found, [true, false, false, false, true]);
    assert_eq!(must(volume.get_one(&key(0), 3_000, soon())), small);
}

fn gets_of_a_batch_fail_alone(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    for number in [0, 2, 3, 4, 5] {
        must(volume.put_one(&key(number), &payload(usize::from(number), 600), soon()));
    }
    let damaged = subject.tamper(&key(2), &mut |object| object[HEAD + 300] ^= 1);
    let lengths = [600, 600, 600, 500, 600, 600];
    let mut buffers = lengths.map(|length| vec![0; length]);
    let mut requests: Vec<GetRequest<'_>> = buffers
        .iter_mut()
        .zip(0..)
        .map(|(buffer, i)| GetRequest {
            key: key(i),
            form: PayloadForm::default(),
            seal: ObjectSeal::default(),
            pieces: vec![buffer],
        })
        .collect();
    requests[4].form.order = StoredOrder::Universal;
    let mut results = volume.get(&mut requests, soon()).into_iter();
    let mut next = || results.next().unwrap_or_else(|| panic!("a result for each request"));
    must(next());
    assert!(matches!(next(), Err(VolumeError::NotFound { .. })), "never put");
    assert_eq!(next().is_err_and(|error| error.is_corrupt()), damaged, "a flipped bit");
    assert!(matches!(next(), Err(VolumeError::LengthMismatch { stored: 600, asked: 500, .. })));
    assert!(matches!(next(), Err(VolumeError::OtherForm { .. })), "another order");
    must(next());
    for whole in [0, 5] {
        assert_eq!(buffers[whole], payload(whole, 600));
    }
}

fn puts_are_idempotent(subject: &dyn Subject) {
    let volume = subject.open(VolumeDescriptor { capacity_bytes: Some(1_000_000), ..descriptor() });
    let used =
        || volume.used_bytes().unwrap_or_else(|| panic!("a volume with a capacity must count its bytes"));
    let bytes = payload(1, 5_000);
    must(volume.put_one(&key(1), &bytes, soon()));
    let once = used();
    for _ in 0..3 {
        must(volume.put_one(&key(1), &bytes, soon()));
    }
    // Twice in one batch is once.
    let put = || PutRequest {
        key: key(1),
        form: PayloadForm::default(),
        seal: ObjectSeal::default(),
        pieces: vec![&bytes],
    };
    let results = volume.put(&[put(), put()], soon());
    assert_eq!(results.len(), 2);
    results.into_iter().for_each(must);
    assert_eq!(used(), once, "one object");
    assert_eq!(must(volume.get_one(&key(1), 5_000, soon())), bytes);
    // An object that was cut is no object: the same put heals it, whether or not somebody has read
    // it.
    if subject.tamper(&key(1), &mut |object| object.truncate(HEAD + 100)) {
        must(volume.put_one(&key(1), &bytes, soon()));
        assert_eq!(must(volume.get_one(&key(1), 5_000, soon())), bytes, "a torn object is replaced");
    }
}

fn objects_are_replaced_and_deleted(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    must(volume.put_one(&key(1), &payload(1, 500), soon()));
    must(volume.put_one(&key(1), &payload(1, 500), soon()));
    must(volume.put_one(&key(1), &payload(2, 300), soon()));
    assert_eq!(must(volume.get_one(&key(1), 300, soon())), payload(2, 300));

    let deleted: Vec<bool> = volume.delete(&[key(1), key(2), key(1)], soon()).into_iter().map(must).collect();
    assert_eq!(deleted, [true, false, false]);
    assert!(matches!(volume.get_one(&key(1), 300, soon()), Err(VolumeError::NotFound { .. })));
}

fn lengths_are_checked(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    must(volume.put_one(&key(1), &payload(1, 500), soon()));
    for asked in [0, 499, 501] {
        let error = volume.get_one(&key(1), asked, soon()).err();
        let error = error.unwrap_or_else(|| panic!("500 bytes must not be served as {asked}"));
        assert!(matches!(error, VolumeError::LengthMismatch { stored: 500, .. }), "{error}");
        assert!(error.is_miss());
    }
    // However much longer it is: it is sound, and somebody else's.
    must(volume.put_one(&key(2), &payload(2, 3 << 20), soon()));
    let error = volume.get_one(&key(2), 500, soon()).err();
    assert!(matches!(error, Some(VolumeError::LengthMismatch { stored: 3_145_728, .. })), "{error:?}");
}

fn deadlines_are_kept(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    must(volume.put_one(&key(1), &payload(1, 10), soon()));
    let past = Instant::now();
    let expired = |error: VolumeError, operation: &str| {
        assert!(error.is_late(), "{error}");
        assert!(error.to_string().contains(operation) && !error.is_miss(), "{error}");
    };
    let none = "an operation after its deadline must not succeed";
    expired(volume.get_one(&key(1), 10, past).expect_err(none), "get");
    expired(volume.put_one(&key(2), b"late", past).expect_err(none), "put");
    for result in volume.exists(&[key(1), key(2)], past) {
        expired(result.expect_err(none), "exists");
    }
    for result in volume.delete(&[key(1)], past) {
        expired(result.expect_err(none), "delete");
    }
    let scope = BlobScope { namespace: key(1).namespace, label: None };
    assert!(volume.list(&scope, None, 1, past).expect_err(none).is_late());
    let found: Vec<bool> = volume.exists(&[key(1), key(2)], soon()).into_iter().map(must).collect();
    assert_eq!(found, [true, false]);
}

fn objects_are_listed(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let whole = BlobScope { namespace: key(0).namespace, label: None };
    let list = |scope: &BlobScope, after: Option<&BlobKey>, max| must(volume.list(scope, after, max, soon()));
    assert_eq!(list(&whole, None, 10), []);
    let mut keys: Vec<BlobKey> = (0..12).map(key).collect();
    keys.push(BlobKey { group: GroupId(12), ..key(3) });
    keys.push(BlobKey { slice: BlobSlice { first_head: 1, ..key(3).slice }, ..key(3) });
    let tenant: Vec<BlobKey> = (0..3).map(|i| BlobKey { label: NamespaceId(5), ..key(i) }).collect();
    keys.extend(&tenant);
    let elsewhere = BlobKey { namespace: NamespaceTag::from_bytes([0xf2; 16]), ..key(0) };
    for key in keys.iter().chain([&elsewhere]) {
        must(volume.put_one(key, b"listed", soon()));
    }
    keys.sort_unstable_by_key(BlobKey::object_path);
    assert_eq!(list(&whole, None, 1000), keys);
    let mut paged: Vec<BlobKey> = Vec::new();
    loop {
        let page = list(&whole, paged.last(), 4);
        assert!(page.len() <= 4, "a page of 4 has {} keys", page.len());
        let last = page.len() < 4;
        paged.extend(page);
        if last {
            break;
        }
    }
    assert_eq!(paged, keys, "page by page");
    assert_eq!(list(&BlobScope { label: Some(NamespaceId(5)), ..whole }, None, 1000), tenant);
    assert_eq!(list(&BlobScope { label: Some(NamespaceId(6)), ..whole }, None, 1000), []);
    volume.delete(&tenant, soon()).into_iter().for_each(|deleted| assert!(must(deleted)));
    assert_eq!(list(&whole, None, 1000).len(), keys.len() - 3);
}

fn capacity_is_kept(subject: &dyn Subject) {
    let volume = subject.open(VolumeDescriptor { capacity_bytes: Some(10_000), ..descriptor() });
    let used =
        || volume.used_bytes().unwrap_or_else(|| panic!("a volume with a capacity must count its bytes"));
    assert_eq!(used(), 0);
    must(volume.put_one(&key(1), &payload(1, 6_000), soon()));
    assert!((6_000..7_000).contains(&used()), "{}", used());
    let error = volume.put_one(&key(2), &payload(2, 6_000), soon()).err();
    assert!(matches!(error, Some(VolumeError::Full { needed: 6_000.., free: ..4_000, .. })), "{error:?}");
    // A full volume still takes the same object again, and smaller ones.
    must(volume.put_one(&key(1), &payload(1, 6_000), soon()));
    must(volume.put_one(&key(3), &payload(3, 2_000), soon()));
    volume.delete(&[key(1), key(3)], soon()).into_iter().for_each(|deleted| assert!(must(deleted)));
    assert_eq!(used(), 0);
    must(volume.put_one(&key(2), &payload(2, 6_000), soon()));
}

fn no_namespace_takes_anothers_room(subject: &dyn Subject) {
    let volume = subject.open(VolumeDescriptor { capacity_bytes: Some(10_000), ..descriptor() });
    let elsewhere = |number| BlobKey { namespace: NamespaceTag::from_bytes([0xf3; 16]), ..key(number) };
    must(volume.put_one(&key(1), &payload(1, 8_000), soon()));
    must(volume.put_one(&elsewhere(1), &payload(2, 8_000), soon()));
    let full = |key| {
        let error = volume.put_one(&key, &payload(3, 8_000), soon()).err();
        assert!(matches!(error, Some(VolumeError::Full { free: ..2_000, .. })), "{error:?}");
    };
    full(key(2));
    full(elsewhere(2));
    volume.delete(&[key(1)], soon()).into_iter().for_each(|deleted| assert!(must(deleted)));
    full(elsewhere(2));
    must(volume.put_one(&key(2), &payload(4, 8_000), soon()));
    assert_eq!(must(volume.get_one(&elsewhere(1), 8_000, soon())), payload(2, 8_000));
}

fn concurrent_puts_leave_a_whole_object(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    must(volume.put_one(&key(1), &payload(0, 5_000), soon()));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let volume = &volume;
            scope.spawn(move || {
                for _ in 0..10 {
                    must(volume.put_one(&key(1), &payload(seed, 5_000), soon()));
                    let read = must(volume.get_one(&key(1), 5_000, soon()));
                    assert!((0..4).any(|seed| read == payload(seed, 5_000)), "a mixture of two objects");
                }
            });
        }
    });
    assert!(must(volume.get_one(&key(1), 5_000, soon())).len() == 5_000);
}

fn damage_is_found(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let write = |number| must(volume.put_one(&key(number), &payload(usize::from(number), 1_000), soon()));
    write(1);
    if !subject.tamper(&key(1), &mut |_| {}) {
        return;
    }
    let damaged = |what: &str| {
        let error = volume.get_one(&key(1), 1_000, soon()).err();
        let error = error.unwrap_or_else(|| panic!("{what}: served"));
        assert!(error.is_corrupt() && error.is_miss(), "{what}: {error}");
        assert!(error.to_string().contains(&key(1).to_string()), "{error}");
    };
    for length in [0, 1, 95, 96, HEAD, 500, HEAD + 999, HEAD + 1_001, 5_000] {
        write(1);
        subject.tamper(&key(1), &mut |object| object.resize(length, 0));
        damaged("a cut or grown object");
    }
    for place in (0..HEAD + 1_000).step_by(13) {
        write(1);
        subject.tamper(&key(1), &mut |object| object[place] ^= 0x10);
        damaged("a flipped bit");
    }
    // Another block's object in this one's place, whole and sound.
    write(1);
    write(2);
    let mut other = Vec::new();
    subject.tamper(&key(2), &mut |object| other.clone_from(object));
    subject.tamper(&key(1), &mut |object| object.clone_from(&other));
    damaged("a swapped object");
    // Another block's payload under this one's header.
    write(1);
    subject.tamper(&key(1), &mut |object| object[HEAD..].copy_from_slice(&other[HEAD..]));
    damaged("a swapped payload");
    write(1);
    assert_eq!(must(volume.get_one(&key(1), 1_000, soon())), payload(1, 1_000), "a new put heals");
}

/// Objects that somebody made who may write the store and lacks the deployment's key.
fn nothing_forged_is_served(subject: &dyn Subject) {
    let volume = subject.open(descriptor());
    let keyed = |secret: &[u8]| ObjectSeal::keyed(&DeploymentKey::from_secret(secret));
    let (ours, payloads) = (keyed(b"ours"), [1, 2].map(|seed| payload(seed, 1_000)));
    let request = |number: u8, seal: &ObjectSeal| PutRequest {
        key: key(number),
        form: PayloadForm::default(),
        seal: seal.clone(),
        pieces: vec![&payloads[usize::from(number - 1)]],
    };
    let put = |number: u8| volume.put(&[request(number, &ours)], soon()).into_iter().for_each(must);
    let get = |number: u8| {
        let mut bytes = vec![0; 1_000];
        let (form, seal) = (PayloadForm::default(), ours.clone());
        let mut asked = [GetRequest { key: key(number), form, seal, pieces: vec![&mut bytes] }];
        let result = volume.get(&mut asked, soon()).remove(0);
        result.map(|()| bytes)
    };
    put(1);
    put(2);
    if !subject.tamper(&key(1), &mut |_| {}) {
        return;
    }
    let mut other = Vec::new();
    subject.tamper(&key(2), &mut |object| other.clone_from(object));
    for seal in [ObjectSeal::default(), keyed(b"theirs")] {
        let mut forged = must(object::seal(VolumeId(7), &request(1, &seal), 1));
        forged.extend_from_slice(&payloads[0]);
        subject.tamper(&key(1), &mut |object| object.clone_from(&forged));
        let error = get(1).err().unwrap_or_else(|| panic!("served: {seal:?}"));
        assert!(error.is_corrupt() && error.to_string().contains("it is signed with"), "{error}");
        // A moved one is signed by us.
        subject.tamper(&key(1), &mut |object| object.clone_from(&other));
        assert!(get(1).is_err_and(|error| error.is_corrupt()), "a moved object");
        put(1);
        assert_eq!(must(get(1)), payloads[0], "a new put heals");
    }
    assert_eq!(must(get(2)), payloads[1]);
}
