//! Several volumes, that come and go while the manager runs.
#![cfg(feature = "worker")]

use crate::support::store::{Store, hashes, onboard, put, registry};
use crate::support::{model, namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::events_plane::{Delivery, EventKind, Subscriber};
use kvbm::metrics::EvictReason;
use kvbm::plan::{Epoch, Message, wire};
use kvbm::volumes::VolumeRegistry;
use kvbm::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm::{
    FailureKind, KvBlockManager, Owned, Path, Rank, Tier, TokenSequence, VolumeDescriptor, VolumeId,
    VolumeSetError,
};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const ONE: VolumeId = VolumeId(1);
const TWO: VolumeId = VolumeId(2);

/// A manager of `g1` and `g2` blocks that knows how to reach these stores.
fn manager(stores: VolumeRegistry, [g1, g2]: [u32; 2]) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .volumes(stores)
        .configure(|config| {
            unlimited(config);
            config.volumes.recheck = Duration::from_millis(1);
        })
        .build()
        .expect("a manager")
}

fn at(id: VolumeId, uri: &str) -> VolumeDescriptor {
    VolumeDescriptor::new(id, uri)
}

/// Chains of four blocks, by the volume that each went to.
fn spread(manager: &KvBlockManager<Owned>, first: &Store, second: &Store) -> [Vec<TokenSequence>; 2] {
    let mut on: [Vec<TokenSequence>; 2] = Default::default();
    for start in 1..9 {
        let sequence = tokens(manager, start, 4);
        put(manager, &sequence);
        let all: BTreeSet<_> = hashes(&sequence).into_iter().collect();
        let of = |store: &Store| store.keys().iter().filter(|key| all.contains(&key.hash)).count();
        match (of(first), of(second)) {
            (4, 0) => on[0].push(sequence),
            (0, 4) => on[1].push(sequence),
            parts => panic!("a chain lies on one volume, not {parts:?}"),
        }
    }
    on
}

/// Events of G4 until `removed` blocks left: which volumes stored and which removed how many.
fn on_volumes(told: &mut Subscriber, removed: usize) -> (Vec<VolumeId>, Vec<VolumeId>) {
    let (mut stored, mut gone) = (Vec::new(), Vec::new());
    while gone.len() < removed {
        let delivery = told.next(Duration::from_secs(30)).expect("the transport");
        let Some(Delivery::Events { events, .. }) = delivery else { panic!("{delivery:?}") };
        for event in events {
            let (block, list) = match event.kind {
                EventKind::Store(block) => (block, &mut stored),
                EventKind::Remove(block) => (block, &mut gone),
                EventKind::Cleared => continue,
            };
            if block.location.tier == Tier::G4 {
                list.push(block.location.volume.expect("G4 is volumes"));
            }
        }
    }
    (stored, gone)
}

/// A manager over two stores, with chains on both.
struct Two {
    first: Arc<Store>,
    manager: KvBlockManager<Owned>,
    told: Subscriber,
    /// Chains of four blocks, by volume.
    on: [Vec<TokenSequence>; 2],
}

impl Two {
    fn start() -> Self {
        let (first, second) = (Store::new(), Store::new());
        let manager = manager(registry(&[("first", &first), ("second", &second)]), [8, 64]);
        let told = manager.events().subscribe().expect("room");
        put(&manager, &tokens(&manager, 100, 4));
        assert!(manager.status().volumes.is_empty());
        manager.register_volume(at(ONE, "first:")).expect("it answers");
        manager.register_volume(at(TWO, "second:")).expect("it answers");
        let on = spread(&manager, &first, &second);
        assert!(!on[0].is_empty() && !on[1].is_empty(), "chains are spread over both");
        Self { first, manager, told, on }
    }

    fn blocks(&self, at: usize) -> usize {
        4 * self.on[at].len()
    }

    fn forget_above(&self) {
        for tier in [Tier::G1, Tier::G2] {
            self.manager.clear(tier).expect("a tier of ours");
        }
    }
}

#[test]
fn status_and_look_ups_say_which_volume_has_what() {
    let two = Two::start();
    let (manager, on) = (&two.manager, &two.on);
    let status = manager.status();
    for (at, volume) in status.volumes.iter().enumerate() {
        assert_eq!((volume.descriptor.id, volume.blocks), ([ONE, TWO][at], two.blocks(at)));
        assert_eq!(volume.bytes, 8192 * two.blocks(at) as u64, "8 KiB a block");
    }

    let g4 = status.tiers[3];
    let known = (two.blocks(0) + two.blocks(1)) as u32;
    assert_eq!((g4.tier, g4.capacity, g4.free, g4.inactive), (Tier::G4, known, 0, known), "no limits");
    for (chains, id) in on.iter().zip([ONE, TWO]) {
        let places = manager.look_up(&chains[0]);
        assert_eq!(places.iter().map(|at| at.volume).collect::<Vec<_>>(), [Some(id); 4]);
        assert!(places.iter().all(|at| at.contains(Tier::G2) && at.contains(Tier::G4)));
    }
}

#[test]
fn chains_are_found_on_the_volume_that_they_lie_on() {
    let two = Two::start();
    let (manager, on) = (&two.manager, &two.on);
    two.forget_above();
    for sequence in on.iter().flatten() {
        let places = manager.look_up(sequence);
        assert!(places.len() == 4 && places.iter().all(|at| at.nearest() == Some(Tier::G4)));
        let prefix = manager.match_prefix(sequence);
        assert_eq!((prefix.len(), prefix.count(Tier::G4)), (4, 4));
        drop(prefix);
        assert_eq!(onboard(manager, sequence), 4);
    }
    for (at, volume) in manager.status().volumes.iter().enumerate() {
        assert_eq!((volume.hits, volume.misses, volume.errors), (two.blocks(at) as u64, 0, 0));
    }
    let metrics = manager.metrics().encode();
    for (id, chains) in [(1, on[0].len()), (2, on[1].len())] {
        for name in ["hit_blocks_total", "stored_blocks_total", "blocks"] {
            let line = format!("kvbm_volume_{name}{{volume=\"{id}\"}} {}\n", 4 * chains);
            assert!(metrics.contains(&line), "{line} in {metrics}");
        }
    }
}

#[test]
fn a_volume_that_goes_takes_its_chains_along_and_brings_them_back() {
    let two = Two::start();
    two.forget_above();
    let [gone, stays] = [0, 1].map(|at| two.blocks(at));
    let Two { first, manager, mut told, on } = two;
    let old = manager.match_prefix(&on[0][0]);
    assert_eq!(manager.unregister_volume(ONE).expect("it is registered"), gone as u64);
    assert!(manager.events().pump());
    let (stored, removed) = on_volumes(&mut told, gone);
    let of = |id: VolumeId| stored.iter().filter(|stored| **stored == id).count();
    assert_eq!((of(ONE), of(TWO)), (gone, stays));
    assert!(removed.iter().all(|id| *id == ONE));
    assert_eq!(manager.onboard(old).wait().expect_err("it is gone").arrived.len(), 0);
    assert_eq!(manager.match_prefix(&on[0][0]).len(), 0);
    assert_eq!(onboard(&manager, &on[1][0]), 4);
    assert_eq!(first.keys().len(), gone, "its objects stay");

    assert_eq!(manager.look_up(&on[0][0]), []);
    assert!(manager.metrics().encode().contains("kvbm_volume_blocks{volume=\"1\"} 0\n"));

    // Back under another id, what it holds is found by asking.
    manager.register_volume(at(VolumeId(7), "first:")).expect("it answers");
    assert_eq!(onboard(&manager, &on[0][0]), 4);
}

/// Mutation that makes it fail: `unregister_volume` closes whatever has the id.
#[test]
fn a_volume_that_somebody_else_opened_stays_open() {
    let store = Store::new();
    let stores = registry(&[("first", &store)]);
    stores.register_volume(at(ONE, "first:")).expect("a store");
    let manager = manager(stores, [8, 16]);
    let is_open = |id| manager.workers().volumes().expect("volumes").get(id).is_ok();
    for id in [ONE, TWO] {
        manager.register_volume(at(id, "first:")).expect("it answers");
        assert!(is_open(id));
        manager.unregister_volume(id).expect("it is registered");
    }
    assert_eq!((is_open(ONE), is_open(TWO)), (true, false));
    // Nor is it closed where it could not be registered.
    store.down.store(true, Ordering::Relaxed);
    for id in [ONE, TWO] {
        manager.register_volume(at(id, "first:")).expect_err("it does not answer");
    }
    assert_eq!((is_open(ONE), is_open(TWO)), (true, false));
}

#[test]
fn every_configured_volume_is_used() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let text = format!(
        "[[volume]]\nuri = \"dir://{}\"\nid = 1\ncapacity = 40\n[[volume]]\nuri = \"dir://{}\"\nid = 2\ncapacity = 24\n\
         [volumes]\nqueue_share = 1\n",
        folders[0].path().display(),
        folders[1].path().display()
    );
    let given = Config::from_toml(&text, "kvbm.toml").expect("sound");
    let start = || {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let builder = builder.device(Blocks(8)).host(Blocks(64)).configure(|config| {
            unlimited(config);
            (config.volume, config.volumes) = (given.volume.clone(), given.volumes.clone());
        });
        builder.build().expect("a manager")
    };
    let manager = start();
    for start in 1..9 {
        put(&manager, &tokens(&manager, start, 2));
    }
    let status = manager.status();
    assert!(status.volumes.iter().all(|volume| volume.blocks > 0), "{:?}", status.volumes);
    let g4 = status.tiers[3];
    assert_eq!((g4.capacity, g4.inactive, g4.free), (64, 16, 48), "both together");
    drop(manager);
    let again = start();
    for start in 1..9 {
        assert_eq!(onboard(&again, &tokens(&again, start, 2)), 2, "found by asking");
    }
}

#[test]
fn what_a_volume_that_went_was_doing_ends() {
    let store = Store::new();
    let manager = manager(registry(&[("test", &store)]), [16, 64]);
    manager.register_volume(at(ONE, "test:")).expect("it answers");
    let sequence = tokens(&manager, 1, 16);
    put(&manager, &sequence);
    let clear = || [Tier::G1, Tier::G2].map(|tier| manager.clear(tier).expect("a tier of ours"));
    for _ in 0..20 {
        clear();
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        assert_eq!(manager.unregister_volume(ONE).expect("it is registered"), 16);
        let arrived = match onboarding.wait_until(soon()) {
            Ok(cached) => cached.len(),
            Err(error) => error.arrived.len(),
        };
        assert!(arrived <= 16 && manager.wait_offloads(soon()));
        assert!(manager.status().volumes.is_empty());
        manager.register_volume(at(ONE, "test:")).expect("it answers");
    }
    // Copies that were on their way when the volume went are nobody's knowledge, and the objects
    // stay.
    clear();
    for start in 2..6 {
        let sequence = tokens(&manager, start, 4);
        let fresh = manager.allocate(4).expect("room");
        let (done, _) = manager.commit(fresh, &sequence, 0).expect("commit");
        drop(manager.register(done).expect("register"));
    }
    manager.unregister_volume(ONE).expect("it is registered");
    assert!(manager.wait_offloads(soon()));
    assert!(manager.status().paths.iter().all(|path| path.plans == 0));
    assert!(store.keys().len() >= 16);
}

#[test]
fn a_volume_that_cannot_be_used_is_refused_with_the_reason() {
    let store = Store::new();
    let stores = registry(&[("test", &store)]);
    let with = manager(stores, [4, 8]);
    with.register_volume(at(ONE, "test:")).expect("it answers");
    let refused = |descriptor: VolumeDescriptor| with.register_volume(descriptor).expect_err("refused");
    let says = |error: VolumeSetError, what: &str| {
        assert!(error.to_string().contains(what), "{error}");
    };
    says(refused(at(ONE, "memory:")), "volume 1 is already registered as \"test:\"");
    says(refused(at(TWO, "s4://bucket")), "known schemes");
    says(refused(at(TWO, "/no/such/directory")), "mount it first");
    says(refused(VolumeDescriptor { alignment: 3, ..at(TWO, "memory:") }), "alignment 3");
    says(refused(VolumeDescriptor { deadline: Duration::ZERO, ..at(TWO, "memory:") }), "deadline of 0ns");
    says(refused(VolumeDescriptor { deadline: Duration::MAX, ..at(TWO, "memory:") }), "at most an hour");
    says(refused(VolumeDescriptor { capacity_bytes: Some(100), ..at(TWO, "memory:") }), "holds no block");
    store.down.store(true, Ordering::Relaxed);
    let error = refused(at(TWO, "test:"));
    assert!(matches!(error, VolumeSetError::Unreachable { id: TWO, .. }), "{error}");
    store.down.store(false, Ordering::Relaxed);
    with.register_volume(at(TWO, "test:")).expect("a refused volume left nothing behind");
    let error = with.unregister_volume(VolumeId(9)).expect_err("it was never there");
    says(error, "volume 9 is not registered; registered: [VolumeId(1), VolumeId(2)]");

    let without = crate::support::two_tiers(4, 8);
    says(without.register_volume(at(ONE, "memory:")).expect_err("no paths"), "VolumeRegistry::new()");
    drop(with.shutdown(Duration::from_secs(30)));
    says(refused(at(VolumeId(3), "memory:")), "shutting down");
}

/// A worker that says nothing but what the test says for it.
struct Mute;

impl WorkerLink for Mute {
    fn send(&self, _lane: Lane, _command: &[u8]) -> Result<(), LinkError> {
        Ok(())
    }
}

/// Mutation that makes it fail: `register_volume` asks ranks that have not said that they take
/// volumes.
#[test]
fn a_worker_that_does_not_know_of_volumes_is_named() {
    let mut sinks: Vec<(Epoch, MessageSink)> = Vec::new();
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let manager =
        builder.device(Blocks(4)).host(Blocks(8)).tensor_parallel(2).build_with_workers(|_, epoch, sink| {
            sinks.push((epoch, sink));
            Box::new(Mute)
        });
    let manager = manager.expect("a manager");
    let hello = |rank: u16| {
        let epoch = sinks[usize::from(rank)].0;
        wire::encode_message(&Message::Ready { rank: Rank(rank), epoch, volumes: true }).expect("sound")
    };
    let refused = |deadline| {
        let descriptor = VolumeDescriptor { deadline, ..at(ONE, "memory:") };
        manager.register_volume(descriptor).expect_err("nobody opens it").to_string()
    };
    sinks[0].1(hello(0));
    let error = refused(Duration::from_millis(1));
    assert!(error.contains("rank 1 has not reported that it takes volumes: start its worker"), "{error}");
    // One of an older version says so with whatever it says. Nobody waits for it.
    let mut old = hello(1);
    old[1] = 1;
    sinks[1].1(old);
    let error = refused(VolumeDescriptor::MAX_DEADLINE);
    assert!(error.contains("rank 1 speaks version 1") && error.contains("run the same kvbm"), "{error}");
}

#[test]
fn a_volume_that_fails_leaves_new_chains_to_the_others() {
    let (first, second) = (Store::new(), Store::new());
    let stores = registry(&[("first", &first), ("second", &second)]);
    let manager = manager(stores, [8, 128]);
    manager.register_volume(at(ONE, "first:")).expect("it answers");
    manager.register_volume(at(TWO, "second:")).expect("it answers");
    first.down.store(true, Ordering::Relaxed);
    let mut start = 0;
    while !manager.status().volumes[0].down {
        start += 1;
        assert!(start < 60, "it fails soon");
        put(&manager, &tokens(&manager, start, 1));
    }
    assert!(manager.status().volumes[0].errors >= 2);
    let before = second.keys().len();
    for start in 100..108 {
        put(&manager, &tokens(&manager, start, 2));
    }
    assert!(second.keys().len() >= before + 14, "at most one chain tries the one that fails");
}

/// Mutation that makes it fail: a store that takes nothing more counts as one that fails.
#[test]
fn a_volume_whose_store_takes_nothing_more_serves_what_it_holds() {
    for (kind, full) in
        [(ErrorKind::StorageFull, 8), (ErrorKind::ReadOnlyFilesystem, 0), (ErrorKind::PermissionDenied, 0)]
    {
        let store = Store::new();
        let manager = manager(registry(&[("test", &store)]), [8, 128]);
        manager.register_volume(at(ONE, "test:")).expect("it answers");
        let kept = tokens(&manager, 1, 4);
        put(&manager, &kept);
        *store.refuses.lock().expect("sound") = Some(kind);
        for start in 100..108 {
            put(&manager, &tokens(&manager, start, 1));
        }
        let volume = &manager.status().volumes[0];
        assert_eq!((volume.full, volume.errors, volume.blocks), (full, 0, 4), "{kind}");
        assert!(!volume.down && volume.failure.is_none(), "{kind}");
        // What lets nobody write is tried once; what is full may have room for the next.
        assert!(volume.refusal.as_ref().is_none_or(|failure| failure.to_string().contains("let it write")));
        let refusal = volume.refusal.as_ref().map(|failure| failure.kind);
        assert_eq!(refusal, (full == 0).then_some(FailureKind::Unsupported), "{kind}");
        let encoded = manager.metrics().encode();
        let count = |name: &str| encoded.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let failed = count("kvbm_transfer_failed_blocks_total{path=\"g2_g4\",reason=\"unsupported\"} ");
        let dropped = count("kvbm_offload_dropped_blocks_total{path=\"g2_g4\",reason=\"volume_down\"} ");
        let expected = if full == 0 { ["1", "7"] } else { ["0", "0"] };
        assert_eq!([failed.as_deref(), dropped.as_deref()], expected.map(Some), "{kind}");

        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).expect("a tier of ours");
        }
        assert_eq!(onboard(&manager, &kept), 4, "{kind}");
    }
}

#[test]
fn a_capacity_in_bytes_alignment_and_the_own_objects_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let uri = format!("dir://{}", folder.path().display());
    let manager = manager(VolumeRegistry::new(), [4, 64]);
    // 8 KiB, a header of 96 bytes and a checksum for each of two heads; padded to 4 KiB.
    let limited = VolumeDescriptor {
        capacity_bytes: Some(6 * (4096 + 8192)),
        alignment: 4096,
        deadline: Duration::from_secs(30),
        ..at(ONE, &uri)
    };
    manager.register_volume(limited).expect("it answers");
    let volume = manager.workers().volumes().expect("given").get(ONE).expect("registered");
    let used = || volume.used_bytes().expect("limited");
    for start in 1..6 {
        put(&manager, &tokens(&manager, start, 4));
        assert!(used() <= 6 * (4096 + 8192));
    }
    // A block that comes before another's removal is refused, and counted; asked for again it finds
    // room.
    let (last, until) = (tokens(&manager, 6, 4), soon());
    loop {
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).expect("a tier of ours");
        }
        if onboard(&manager, &last) == 4 {
            break;
        }
        assert!(Instant::now() < until, "what is used least makes room");
        put(&manager, &last);
    }
    let status = &manager.status().volumes[0];
    assert!(status.blocks <= 6 && used() <= 6 * (4096 + 8192));
    let evicted = manager.metrics().tier(Tier::G4).evictions(EvictReason::Capacity).get();
    assert!(
        evicted > 0 && manager.metrics().path(Path::G2_G4).failures(FailureKind::Full).get() == status.full
    );
    assert!(manager.metrics().path(Path::G2_G4).blocks.get() >= 6);
}

/// Mutation that makes it fail: `reclaim_on_volume` goes to `yield_on_volume` at once.
#[test]
fn a_volume_that_an_earlier_life_filled_makes_room_for_what_is_new() {
    let folder = tempfile::tempdir().expect("a folder");
    let uri = format!("dir://{}", folder.path().display());
    let limited = || VolumeDescriptor { capacity_bytes: Some(16 * (112 + 8192 + 1)), ..at(ONE, &uri) };
    let first = manager(VolumeRegistry::new(), [4, 64]);
    first.register_volume(limited()).expect("it answers");
    for start in 1..9 {
        put(&first, &tokens(&first, start, 2));
    }
    drop(first);
    let second = manager(VolumeRegistry::new(), [4, 64]);
    second.register_volume(limited()).expect("it answers");
    let volume = second.workers().volumes().expect("given").get(ONE).expect("registered");
    let until = soon();
    let forget = || [Tier::G1, Tier::G2].map(|tier| second.clear(tier).expect("a tier of ours"));
    // Twelve blocks, as many as are kept beside the room for what comes: none of these takes
    // another's place.
    let own: Vec<_> = (100..106).map(|start| tokens(&second, start, 2)).collect();
    for sequence in &own {
        loop {
            forget();
            if onboard(&second, sequence) == 2 {
                break;
            }
            assert!(Instant::now() < until, "strangers make room");
            put(&second, sequence);
        }
    }
    assert!(volume.used_bytes().expect("limited") <= 16 * (112 + 8192 + 1));
    forget();
    for sequence in &own {
        assert_eq!(onboard(&second, sequence), 2, "what is known stays");
    }
    assert!(second.status().volumes[0].full > 0, "it was full");
}
