//! G4 through the manager: blocks go to a volume, come back verified, and every fault of the volume is a miss.

mod support;

use kvbm::config::{Blocks, VolumeLookup, VolumeOffload};
use kvbm::metrics::DropReason;
use kvbm::volumes::{
    BlobKey, BlobScope, GetRequest, MemoryVolume, PutRequest, Volume, VolumeDescriptor, VolumeError,
    VolumeRegistry,
};
use kvbm::{KvBlockManager, Namespace, Owned, Path, Prefix, Tier, TokenSequence};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{compute, holds, model, namespace, soon, tokens, unlimited};

/// A memory volume that outlives its managers, counts its calls and fails when it is told to.
struct Store {
    memory: MemoryVolume,
    down: AtomicBool,
    probes: AtomicUsize,
}

impl Store {
    fn new() -> Arc<Self> {
        let descriptor = VolumeDescriptor::new(kvbm::plan::VolumeId(0), "test:");
        let memory = MemoryVolume::open(descriptor).expect("a sound descriptor");
        Arc::new(Self { memory, down: AtomicBool::new(false), probes: AtomicUsize::new(0) })
    }

    fn check<T>(
        &self,
        operation: &'static str,
        keys: &[BlobKey],
        work: impl FnOnce() -> Vec<Result<T, VolumeError>>,
    ) -> Vec<Result<T, VolumeError>> {
        if !self.down.load(Ordering::Relaxed) {
            return work();
        }
        let refused = |key: &BlobKey| {
            let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
            Err(VolumeError::Io { volume: self.memory.descriptor().id, operation, key: *key, source })
        };
        keys.iter().map(refused).collect()
    }

    /// Every object.
    fn keys(&self) -> Vec<BlobKey> {
        let scope = BlobScope { namespace: namespace_tag(), label: None };
        self.memory.list(&scope, None, 1_000_000, soon()).expect("memory")
    }
}

fn namespace_tag() -> kvbm::plan::NamespaceTag {
    namespace().page_size(model().page_size).dtype(model().dtype.name()).tag()
}

/// What the registry hands out: the store lives on in the test.
struct Handle(Arc<Store>);

impl Volume for Handle {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.0.memory.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys: Vec<BlobKey> = requests.iter().map(|request| request.key).collect();
        self.0.check("get", &keys, || self.0.memory.get(requests, deadline))
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys: Vec<BlobKey> = requests.iter().map(|request| request.key).collect();
        self.0.check("put", &keys, || self.0.memory.put(requests, deadline))
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.0.probes.fetch_add(1, Ordering::Relaxed);
        self.0.check("exists", keys, || self.0.memory.exists(keys, deadline))
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
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

type Manager = KvBlockManager<Owned>;

/// A manager of `g1` and `g2` blocks over `store`.
fn manager(
    store: &Arc<Store>,
    [g1, g2]: [u32; 2],
    configure: impl FnOnce(&mut kvbm::config::Config),
) -> Manager {
    let store = Arc::clone(store);
    let registry = VolumeRegistry::new()
        .with_scheme("test", Box::new(move |_| Ok(Arc::new(Handle(Arc::clone(&store))))));
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .volume("test:")
        .volumes(registry)
        .configure(|config| {
            unlimited(config);
            config.volume.queue_share = 1.0;
            config.volume.recheck = Duration::from_millis(1);
            config.volume.longest_pause = Duration::from_millis(50);
            configure(config);
        })
        .build()
        .expect("a manager")
}

/// Computes and registers a sequence from its first block on, and waits until it is where it goes.
fn put(manager: &Manager, sequence: &TokenSequence) {
    let fresh = manager.allocate(sequence.num_blocks()).expect("room");
    for (block, hash) in fresh.block_ids().iter().zip(hashes(sequence)) {
        compute(manager, *block, hash);
    }
    let (done, _) = manager.commit(fresh, sequence, 0).expect("commit");
    drop(manager.register(done).expect("register"));
    assert!(manager.wait_offloads(soon()));
}

fn hashes(sequence: &TokenSequence) -> Vec<kvbm::SequenceHash> {
    kvbm::BlockChain::from(sequence).hashes().to_vec()
}

fn on(prefix: &Prefix, tier: Tier) -> usize {
    prefix.count(tier)
}

/// Onboards what is found of a sequence and compares every byte. How many blocks arrived.
fn onboard(manager: &Manager, sequence: &TokenSequence) -> usize {
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

#[test]
fn blocks_go_to_a_volume_and_are_found_again_by_another_manager() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let sequence = tokens(&first, 1, 8);
    put(&first, &sequence);
    assert_eq!(store.keys().len(), 8);
    assert_eq!(first.metrics().path(Path::G2_G4).blocks.get(), 8);
    assert_eq!(first.status().volume.expect("configured").blocks, 8);
    assert!(first.shutdown(Duration::from_secs(30)).is_complete());
    drop(first);

    let second = manager(&store, [8, 16], |_| {});
    let prefix = second.match_prefix(&sequence);
    assert_eq!((prefix.len(), on(&prefix, Tier::G4)), (8, 8));
    assert!(store.probes.load(Ordering::Relaxed) <= 5, "not a round trip for each block");
    drop(prefix);
    assert_eq!(onboard(&second, &sequence), 8);
    assert_eq!(second.metrics().tier(Tier::G4).hits.get(), 8);
    assert_eq!(second.metrics().path(Path::G4_G1).blocks.get(), 8);
    assert!(second.wait_offloads(soon()));
    assert_eq!(second.metrics().path(Path::G1_G2).blocks.get(), 8, "they stay in host memory too");
    assert_eq!(second.metrics().path(Path::G2_G4).blocks.get(), 0, "and are not written again");
    assert_eq!(onboard(&second, &sequence), 8);
    assert_eq!(second.metrics().tier(Tier::G4).hits.get(), 8, "the second time they are in G1");
}

#[test]
fn ranks_keep_their_slices_and_a_block_needs_all_of_them() {
    let store = Store::new();
    let two = |config: &mut kvbm::config::Config| config.parallelism.tensor_parallel = 2;
    let first = manager(&store, [4, 8], two);
    let sequence = tokens(&first, 1, 4);
    put(&first, &sequence);
    assert_eq!(store.keys().len(), 8);
    drop(first);
    let of_rank_1 =
        store.keys().into_iter().find(|key| key.slice.first_head == 1 && key.hash == hashes(&sequence)[2]);
    let deleted = store.memory.delete(&[of_rank_1.expect("a slice of rank 1")], soon()).remove(0);
    assert!(deleted.expect("memory"));
    let second = manager(&store, [4, 8], two);
    assert_eq!(onboard(&second, &sequence), 2, "what every rank has");
    // More ranks than heads: of those with the same head, one writes.
    let store = Store::new();
    let four = manager(&store, [4, 8], |config| config.parallelism.tensor_parallel = 4);
    put(&four, &sequence);
    assert_eq!(store.keys().len(), 8);
    assert_eq!(four.status().volume.expect("configured").blocks, 4);
}

#[test]
fn invariant_5_damaged_and_missing_objects_are_misses_and_go() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let sequence = tokens(&first, 1, 8);
    put(&first, &sequence);
    drop(first);
    let of = |at: usize| {
        store.keys().into_iter().find(|key| key.hash == hashes(&sequence)[at]).expect("an object")
    };
    let bad = of(5);
    assert!(store.memory.tamper(&bad, |object| {
        let last = object.len() - 1;
        object[last] ^= 1;
    }));

    let second = manager(&store, [8, 16], |_| {});
    assert_eq!(onboard(&second, &sequence), 5, "the part before it");
    assert_eq!(second.metrics().tier(Tier::G4).corrupt.get(), 1);
    let gone = Instant::now() + Duration::from_secs(30);
    while store.keys().contains(&bad) {
        assert!(Instant::now() < gone, "a damaged object is removed");
        std::thread::yield_now();
    }
    // Swapped objects: a sound one in another's place.
    let (from, to) = (of(1), of(2));
    let mut other = Vec::new();
    store.memory.tamper(&from, |object| other.clone_from(object));
    store.memory.tamper(&to, |object| object.clone_from(&other));
    let third = manager(&store, [8, 16], |_| {});
    assert_eq!(onboard(&third, &sequence), 2);
    // Computed again, it is written again.
    put(&third, &sequence);
    assert_eq!(store.keys().len(), 8);
    drop(third);
    assert_eq!(onboard(&manager(&store, [8, 16], |_| {}), &sequence), 8);
}

#[test]
fn a_volume_that_is_down_costs_no_more_than_misses_and_comes_back() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let (known, fresh) = (tokens(&first, 1, 4), tokens(&first, 2, 4));
    put(&first, &known);
    drop(first);
    let second = manager(&store, [4, 16], |_| {});
    store.down.store(true, Ordering::Relaxed);
    for _ in 0..8 {
        assert_eq!(onboard(&second, &known), 0);
    }
    assert!(second.status().volume.expect("configured").down);
    assert!(store.probes.load(Ordering::Relaxed) < 8, "left alone");
    put(&second, &fresh);
    let dropped = second.metrics().path(Path::G2_G4);
    let lost = dropped.dropped(DropReason::VolumeDown).get() + dropped.dropped(DropReason::Failed).get();
    assert_eq!(lost, 4, "counted");
    store.down.store(false, Ordering::Relaxed);
    let back = Instant::now() + Duration::from_secs(30);
    while onboard(&second, &known) != 4 {
        assert!(Instant::now() < back, "it is tried again after a pause");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!second.status().volume.expect("configured").down);
}

#[test]
fn what_is_forgotten_is_gone_from_the_volume() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let ours = tokens(&first, 1, 4);
    let tenant = Namespace::new("tenant").page_size(16).dtype(model().dtype.name());
    let prompt: Vec<u32> = (0..64).collect();
    let theirs = first.sequence_in(&tenant, &prompt, b"").expect("a sequence");
    put(&first, &ours);
    put(&first, &theirs);
    assert_eq!(store.keys().len(), 8);
    assert!(first.forget(&tenant) >= 4);
    let gone = Instant::now() + Duration::from_secs(30);
    while store.keys().len() > 4 {
        assert!(Instant::now() < gone, "its objects are removed");
        std::thread::yield_now();
    }
    assert_eq!(first.match_prefix(&theirs).len(), 0);
    drop(first);
    let second = manager(&store, [8, 16], |_| {});
    assert_eq!(second.match_prefix(&theirs).len(), 0);
    assert_eq!(second.match_prefix(&ours).len(), 4);
    assert_eq!(second.clear(Tier::G4).expect("a volume"), 4);
    while !store.keys().is_empty() {
        assert!(Instant::now() < gone, "everything is removed");
        std::thread::yield_now();
    }
}

#[test]
fn offload_modes_choose_what_goes() {
    let store = Store::new();
    let explicit = manager(&store, [4, 8], |config| config.volume.offload = VolumeOffload::Explicit);
    let sequence = tokens(&explicit, 1, 4);
    put(&explicit, &sequence);
    assert_eq!(store.keys().len(), 0);
    assert_eq!(explicit.clear(Tier::G1).expect("G1"), 4);
    let in_host = explicit.match_prefix(&sequence).into_parts();
    explicit.offload(&in_host.g2, Tier::G4).expect("a path");
    assert!(explicit.wait_offloads(soon()));
    assert_eq!(store.keys().len(), 4);
    drop(in_host);
    drop(explicit);

    let store = Store::new();
    let victims = manager(&store, [4, 8], |config| {
        config.volume.offload = VolumeOffload::Victims;
        config.offload.g2_g3.ahead_share = 1.0;
        config.policy.eviction = kvbm::config::EvictionPolicy::LruLeaf;
    });
    for start in 1..6 {
        put(&victims, &tokens(&victims, start, 4));
    }
    for start in 1..6 {
        assert_eq!(
            onboard(&victims, &tokens(&victims, start, 4)),
            4,
            "what left host memory is on the volume"
        );
    }
    assert!(victims.metrics().tier(Tier::G4).hits.get() > 0);
}

#[test]
fn a_capacity_is_kept_and_only_what_is_known_is_found_without_asking() {
    let store = Store::new();
    let small = manager(&store, [4, 16], |config| {
        config.volume.capacity = Blocks(6).into();
        config.volume.lookup = VolumeLookup::Known;
    });
    for start in 1..4 {
        put(&small, &tokens(&small, start, 4));
    }
    let kept = Instant::now() + Duration::from_secs(30);
    while store.keys().len() > 6 {
        assert!(Instant::now() < kept, "what is beyond the capacity is removed");
        std::thread::yield_now();
    }
    assert_eq!(small.status().volume.expect("configured").blocks, 6);
    assert_eq!(store.probes.load(Ordering::Relaxed), 0);
    drop(small);
    let stranger = manager(&store, [4, 16], |config| config.volume.lookup = VolumeLookup::Known);
    assert_eq!(stranger.match_prefix(&tokens(&stranger, 3, 4)).len(), 0);
}

#[test]
fn the_world_is_told_what_is_on_the_volume() {
    use kvbm::events_plane::{Delivery, EventKind};
    let store = Store::new();
    let first = manager(&store, [4, 8], |_| {});
    let mut told = first.events().subscribe().expect("room");
    let sequence = tokens(&first, 1, 4);
    put(&first, &sequence);
    assert_eq!(first.clear(Tier::G4).expect("a volume"), 4);
    assert!(first.events().pump());
    let (mut stored, mut removed) = (Vec::new(), Vec::new());
    while removed.len() < 4 {
        let delivery = told.next(Duration::from_secs(30)).expect("the transport");
        let Some(Delivery::Events { events, .. }) = delivery else { panic!("{delivery:?}") };
        for event in events {
            let (block, list) = match event.kind {
                EventKind::Store(block) => (block, &mut stored),
                EventKind::Remove(block) => (block, &mut removed),
                EventKind::Cleared => continue,
            };
            if block.location.tier == Tier::G4 {
                assert_eq!(block.location.volume, Some(kvbm::plan::VolumeId(0)));
                assert_eq!(block.prefix_hash, hashes(&sequence)[0]);
                list.push(block.identity.hash);
            }
        }
    }
    assert_eq!(stored, hashes(&sequence));
    removed.reverse();
    assert_eq!(removed, hashes(&sequence), "what continues a block goes before it");
}
