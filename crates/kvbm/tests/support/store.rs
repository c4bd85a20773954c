//! A volume that outlives its managers, and an engine over it.

use super::{compute, holds, model, namespace, soon};
use kvbm::volumes::{
    BlobKey, BlobScope, GetRequest, MemoryVolume, PutRequest, Volume, VolumeDescriptor, VolumeError,
    VolumeRegistry,
};
use kvbm::{KvBlockManager, Owned, TokenSequence};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A memory volume that outlives its managers, counts its calls and fails when it is told to.
pub struct Store {
    pub memory: MemoryVolume,
    pub down: AtomicBool,
    pub probes: AtomicUsize,
    pub deleting: Gate,
    pub putting: Gate,
    /// Where reads wait when they have been done.
    pub got: Gate,
    /// Puts land, and are reported as failed.
    pub lost: AtomicBool,
    /// The store takes nothing more, for this reason.
    pub refuses: Mutex<Option<ErrorKind>>,
    /// So many calls to delete fail.
    pub undeleted: AtomicUsize,
}

/// Where calls wait while it is closed.
#[derive(Default)]
pub struct Gate {
    /// Whether it is closed, and how many came since it was.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    pub fn close(&self) {
        *self.state.lock().expect("sound") = (true, 0);
    }

    pub fn open(&self) {
        self.state.lock().expect("sound").0 = false;
        self.changed.notify_all();
    }

    /// Waits until so many calls wait here.
    pub fn wait_for(&self, calls: usize) {
        self.wait_while(|(_, came)| *came < calls);
    }

    fn pass(&self) {
        self.state.lock().expect("sound").1 += 1;
        self.changed.notify_all();
        self.wait_while(|(closed, _)| *closed);
    }

    fn wait_while(&self, condition: impl Fn(&(bool, usize)) -> bool) {
        let state = self.state.lock().expect("sound");
        let waited =
            self.changed.wait_timeout_while(state, Duration::from_secs(30), |state| condition(state));
        assert!(!waited.expect("sound").1.timed_out(), "nobody came");
    }
}

impl Store {
    pub fn new() -> Arc<Self> {
        let descriptor = VolumeDescriptor::new(kvbm::plan::VolumeId(0), "test:");
        let memory = MemoryVolume::open(descriptor).expect("a sound descriptor");
        Arc::new(Self {
            memory,
            down: AtomicBool::new(false),
            probes: AtomicUsize::new(0),
            deleting: Gate::default(),
            putting: Gate::default(),
            got: Gate::default(),
            lost: AtomicBool::new(false),
            refuses: Mutex::default(),
            undeleted: AtomicUsize::new(0),
        })
    }

    fn check<T>(
        &self,
        operation: &'static str,
        keys: &[BlobKey],
        work: impl FnOnce() -> Vec<Result<T, VolumeError>>,
    ) -> Vec<Result<T, VolumeError>> {
        if self.down.load(Ordering::Relaxed) { self.refuse(operation, keys) } else { work() }
    }

    fn refuse<T>(&self, operation: &'static str, keys: &[BlobKey]) -> Vec<Result<T, VolumeError>> {
        self.fail(ErrorKind::ConnectionRefused, operation, keys)
    }

    fn fail<T>(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        keys: &[BlobKey],
    ) -> Vec<Result<T, VolumeError>> {
        let refused = |key: &BlobKey| {
            let source = std::io::Error::from(kind);
            Err(VolumeError::Io { volume: self.memory.descriptor().id, operation, key: *key, source })
        };
        keys.iter().map(refused).collect()
    }

    /// Every object.
    pub fn keys(&self) -> Vec<BlobKey> {
        self.keys_of(namespace_tag())
    }

    /// The objects of a namespace.
    pub fn keys_of(&self, namespace: kvbm::plan::NamespaceTag) -> Vec<BlobKey> {
        let scope = BlobScope { namespace, label: None };
        self.memory.list(&scope, None, 1_000_000, soon()).expect("memory")
    }
}

pub fn namespace_tag() -> kvbm::plan::NamespaceTag {
    namespace().page_size(model().page_size).dtype(model().dtype.name()).tag()
}

/// What the registry hands out: the store lives on in the test.
pub struct Handle(Arc<Store>, VolumeDescriptor);

impl Volume for Handle {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.1
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys: Vec<BlobKey> = requests.iter().map(|request| request.key).collect();
        let got = self.0.check("get", &keys, || self.0.memory.get(requests, deadline));
        self.0.got.pass();
        got
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys: Vec<BlobKey> = requests.iter().map(|request| request.key).collect();
        self.0.putting.pass();
        if let Some(kind) = *self.0.refuses.lock().expect("sound") {
            return self.0.fail(kind, "put", &keys);
        }
        let written = self.0.check("put", &keys, || self.0.memory.put(requests, deadline));
        if self.0.lost.load(Ordering::Relaxed) { self.0.refuse("put", &keys) } else { written }
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.0.probes.fetch_add(1, Ordering::Relaxed);
        self.0.check("exists", keys, || self.0.memory.exists(keys, deadline))
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.0.deleting.pass();
        let fails = |left: usize| left.checked_sub(1);
        if !keys.is_empty()
            && self.0.undeleted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok()
        {
            return self.0.refuse("delete", keys);
        }
        self.0.check("delete", keys, || self.0.memory.delete(keys, deadline))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        self.0.memory.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.0.memory.used_bytes()
    }
}

/// A registry that opens each store under a scheme of its own.
pub fn registry(stores: &[(&str, &Arc<Store>)]) -> VolumeRegistry {
    let with = |registry: VolumeRegistry, (scheme, store): &(&str, &Arc<Store>)| {
        let store = Arc::clone(store);
        let open = move |descriptor| -> Result<Arc<dyn Volume>, _> {
            Ok(Arc::new(Handle(Arc::clone(&store), descriptor)))
        };
        registry.with_scheme(scheme, Box::new(open))
    };
    stores.iter().fold(VolumeRegistry::new(), with)
}

/// Computes and registers a sequence from its first block on, and waits until it is where it goes.
pub fn put(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) {
    let fresh = manager.allocate(sequence.num_blocks()).expect("room");
    for (block, hash) in fresh.block_ids().iter().zip(hashes(sequence)) {
        compute(manager, *block, hash);
    }
    let (done, _) = manager.commit(fresh, sequence, 0).expect("commit");
    drop(manager.register(done).expect("register"));
    assert!(manager.wait_offloads(soon()));
}

pub fn hashes(sequence: &TokenSequence) -> Vec<kvbm::SequenceHash> {
    kvbm::BlockChain::from(sequence).hashes().to_vec()
}

/// Onboards what is found of a sequence and compares every byte. How many blocks arrived.
pub fn onboard(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    let cached = match manager.onboard(manager.match_prefix(sequence)).wait() {
        Ok(cached) => cached,
        Err(error) => error.arrived,
    };
    for (block, hash) in cached.block_ids().iter().zip(hashes(sequence)) {
        assert!(holds(manager, *block, hash), "wrong bytes");
    }
    assert!(manager.wait_offloads(soon()));
    cached.len()
}
