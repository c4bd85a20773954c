//! Random calls: one after the other against a naive model, and from several threads at once.
//!
//! `KVBM_FUZZ_ROUNDS=1000 cargo test -p kvbm-volume --test integration model` for longer.

use crate::random::Random;
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, DirectoryVolume, MemoryVolume, ObjectSeal, PayloadForm, PutRequest,
    Volume, VolumeDescriptor, VolumeError, VolumeExt, object,
};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Objects of each namespace: few, so that calls meet.
const KEYS: usize = 6;
const LENGTHS: [usize; 4] = [200, 500, 800, 1100];
/// Room of each namespace, for about four objects.
const CAPACITY: u64 = 4_000;

fn random_key(random: &mut Random) -> BlobKey {
    key(random.below(2) as u8, random.below(KEYS) as u8)
}

/// Of one of four lengths; the content says which key it is of.
fn random_payload(random: &mut Random, key: &BlobKey) -> Vec<u8> {
    payload(key, LENGTHS[random.below(LENGTHS.len())])
}

fn key(namespace: u8, number: u8) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xa0 + namespace; 16]),
        label: NamespaceId(u32::from(number % 2)),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    }
}

fn payload(key: &BlobKey, length: usize) -> Vec<u8> {
    let name = key.hash.as_bytes()[0] ^ key.namespace.as_bytes()[0];
    (0..length).map(|at| (at % 251) as u8 ^ name).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn descriptor(uri: String) -> VolumeDescriptor {
    VolumeDescriptor {
        capacity_bytes: Some(CAPACITY),
        alignment: 64,
        ..VolumeDescriptor::new(VolumeId(3), uri)
    }
}

/// An empty volume of each kind, and the folder of the second.
fn volumes() -> ([Box<dyn Volume>; 2], tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("the test's own set-up");
    let uri = format!("dir://{}", folder.path().display());
    let memory = MemoryVolume::open(descriptor("memory:".into())).expect("the test's own set-up");
    let directory = DirectoryVolume::open(descriptor(uri)).expect("the test's own set-up");
    ([Box::new(memory), Box::new(directory)], folder)
}

fn rounds() -> u64 {
    std::env::var("KVBM_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(8)
}

fn object_bytes(key: BlobKey, payload: &[u8]) -> u64 {
    let request =
        PutRequest { key, form: PayloadForm::default(), seal: ObjectSeal::default(), pieces: vec![payload] };
    let head = object::seal(VolumeId(3), &request, 64).expect("it can be cut into one piece");
    (head.len() + payload.len()) as u64
}

/// What a volume must hold.
#[derive(Default)]
struct Model(BTreeMap<String, (BlobKey, Vec<u8>)>);

impl Model {
    fn used(&self, of: impl Fn(&BlobKey) -> bool) -> u64 {
        self.0.values().filter(|(key, _)| of(key)).map(|(key, bytes)| object_bytes(*key, bytes)).sum()
    }

    /// Whether there is room.
    fn put(&mut self, key: BlobKey, bytes: Vec<u8>) -> bool {
        let others = self.used(|other| other.namespace == key.namespace && *other != key);
        let fits = others + object_bytes(key, &bytes) <= CAPACITY;
        if fits {
            self.0.insert(key.object_path(), (key, bytes));
        }
        fits
    }

    fn get(&self, key: &BlobKey) -> Option<&Vec<u8>> {
        self.0.get(&key.object_path()).map(|(_, bytes)| bytes)
    }

    fn list(&self, scope: &BlobScope, after: Option<&BlobKey>, max: usize) -> Vec<BlobKey> {
        let after = after.map(BlobKey::object_path);
        let later = self.0.iter().filter(|(path, _)| after.as_ref().is_none_or(|after| *path > after));
        let scoped = later.map(|(_, (key, _))| *key).filter(|key| {
            key.namespace == scope.namespace && scope.label.is_none_or(|label| label == key.label)
        });
        scoped.take(max).collect()
    }
}

#[test]
fn random_calls_do_what_a_naive_model_does() {
    let (mut full, mut missing) = (0, 0);
    for seed in 0..rounds() {
        let ([memory, directory], _folder) = volumes();
        for volume in [&memory, &directory] {
            let (mut random, mut model) = (Random(seed), Model::default());
            for step in 0..60 {
                let key = random_key(&mut random);
                let at = format!("seed {seed}, step {step}, {key}");
                match random.below(8) {
                    0..3 => {
                        let bytes = random_payload(&mut random, &key);
                        let put = volume.put_one(&key, &bytes, soon());
                        if model.put(key, bytes) {
                            put.unwrap_or_else(|error| panic!("{at}: {error}"));
                        } else {
                            assert!(matches!(put, Err(VolumeError::Full { .. })), "{at}: {put:?}");
                            full += 1;
                        }
                    }
                    3 | 4 => {
                        let length = model.get(&key).map_or(200, Vec::len);
                        let found = volume.get_one(&key, length, soon());
                        if let Some(bytes) = model.get(&key) {
                            assert_eq!(&found.expect(&at), bytes, "{at}");
                        } else {
                            assert!(matches!(found, Err(VolumeError::NotFound { .. })), "{at}: {found:?}");
                            missing += 1;
                        }
                    }
                    5 => {
                        let deleted = volume.delete(&[key], soon()).remove(0).expect(&at);
                        assert_eq!(deleted, model.0.remove(&key.object_path()).is_some(), "{at}");
                    }
                    6 => {
                        let there = volume.exists(&[key], soon()).remove(0).expect(&at);
                        assert_eq!(there, model.get(&key).is_some(), "{at}");
                    }
                    _ => {
                        let label = (random.below(2) == 0).then_some(key.label);
                        let scope = BlobScope { namespace: key.namespace, label };
                        let after = (random.below(2) == 0).then(|| random_key(&mut random));
                        let after = after.filter(|after| after.namespace == key.namespace);
                        let max = random.below(5);
                        let listed = volume.list(&scope, after.as_ref(), max, soon()).expect(&at);
                        assert_eq!(listed, model.list(&scope, after.as_ref(), max), "{at}");
                    }
                }
                assert_eq!(volume.used_bytes(), Some(model.used(|_| true)), "{at}");
            }
        }
    }
    assert!(full > 0 && missing > 0, "{full} times full, {missing} misses");
}

/// Puts, deletes and gets of a few keys until the thread's calls are over. What is read is what
/// somebody put.
fn meddle(volume: &dyn Volume, mut random: Random) {
    for _ in 0..40 {
        let key = random_key(&mut random);
        match random.below(4) {
            0 | 1 => {
                let bytes = random_payload(&mut random, &key);
                match volume.put_one(&key, &bytes, soon()) {
                    Ok(()) | Err(VolumeError::Full { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            2 => drop(volume.delete(&[key], soon()).remove(0).expect("an answer")),
            _ => {
                let asked = random_payload(&mut random, &key);
                match volume.get_one(&key, asked.len(), soon()) {
                    Ok(found) => assert!(found == asked, "{key}: a mixture of two objects"),
                    Err(VolumeError::NotFound { .. } | VolumeError::LengthMismatch { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// Mutation that makes it fail: `DirectoryVolume::place` measures what it replaces before it takes
/// the turn of the key.
#[test]
fn calls_from_several_threads_leave_whole_objects_and_a_count_that_is_right() {
    for seed in 0..rounds() {
        let ([memory, directory], _folder) = volumes();
        for volume in [&memory, &directory] {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    scope.spawn(move || meddle(&**volume, Random(1000 * seed + thread)));
                }
            });
            let mut all = 0;
            for namespace in [0, 1] {
                let scope = BlobScope { namespace: key(namespace, 0).namespace, label: None };
                let mut used = 0;
                for key in volume.list(&scope, None, 100, soon()).expect("a list") {
                    let length = LENGTHS.into_iter().find(|&length| {
                        volume.get_one(&key, length, soon()).is_ok_and(|found| found == payload(&key, length))
                    });
                    let length = length.unwrap_or_else(|| panic!("seed {seed}: {key} is not whole"));
                    used += object_bytes(key, &payload(&key, length));
                }
                assert!(used <= CAPACITY, "seed {seed}: {used} bytes in namespace {namespace}");
                all += used;
            }
            assert_eq!(volume.used_bytes(), Some(all), "seed {seed}");
        }
    }
}
