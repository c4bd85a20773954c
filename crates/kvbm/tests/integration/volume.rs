//! G4 through the manager: blocks go to a volume, come back verified, and every fault of the volume
//! is a miss.
#![cfg(feature = "worker")]

use crate::support::store::{Store, hashes, onboard, put, registry};
use crate::support::{fill, model, namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, VolumeLookup, VolumeOffload};
use kvbm::metrics::DropReason;
use kvbm::volumes::{BlobKey, Volume, VolumeExt};
use kvbm::{KvBlockManager, Namespace, Owned, Path, Prefix, Tier};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

type Manager = KvBlockManager<Owned>;

fn on(prefix: &Prefix, tier: Tier) -> usize {
    prefix.count(tier)
}

/// A manager of `g1` and `g2` blocks over `store`.
fn manager(
    store: &Arc<Store>,
    [g1, g2]: [u32; 2],
    configure: impl FnOnce(&mut kvbm::config::Config),
) -> Manager {
    let registry = registry(&[("test", store)]);
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .volume("test:")
        .volumes(registry)
        .configure(|config| {
            unlimited(config);
            config.volumes.recheck = Duration::from_millis(1);
            config.volumes.longest_pause = Duration::from_millis(50);
            configure(config);
        })
        .build()
        .expect("a manager")
}

#[test]
fn blocks_go_to_a_volume_and_are_found_again_by_another_manager() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let sequence = tokens(&first, 1, 8);
    put(&first, &sequence);
    assert_eq!(store.keys().len(), 8);
    assert_eq!(first.metrics().path(Path::G2_G4).blocks.get(), 8);
    assert_eq!(first.status().volumes[0].blocks, 8);
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
    assert_eq!(four.status().volumes[0].blocks, 4);
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
    let removed = |damaged: &BlobKey| {
        let gone = Instant::now() + Duration::from_secs(30);
        while store.keys().contains(damaged) {
            assert!(Instant::now() < gone, "a damaged object is removed");
            std::thread::yield_now();
        }
    };
    removed(&bad);
    // Swapped objects: a sound one in another's place.
    let (from, to) = (of(1), of(2));
    let mut other = Vec::new();
    store.memory.tamper(&from, |object| other.clone_from(object));
    store.memory.tamper(&to, |object| object.clone_from(&other));
    let third = manager(&store, [8, 16], |_| {});
    assert_eq!(onboard(&third, &sequence), 2);
    removed(&to);
    // Computed again, it is written again, as soon as its removal is confirmed.
    until_stored(&third, &store, &sequence, 8);
    drop(third);
    assert_eq!(onboard(&manager(&store, [8, 16], |_| {}), &sequence), 8);
}

/// Offers a sequence again and again until the store has so many objects.
fn until_stored(manager: &Manager, store: &Store, sequence: &kvbm::TokenSequence, objects: usize) {
    let until = soon();
    while store.keys().len() < objects {
        assert!(Instant::now() < until, "it is written when nothing removes it any more");
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).expect("a tier of ours");
        }
        put(manager, sequence);
    }
}

/// Mutation that makes it fail: `Index::begin` does not ask what is on its way out.
#[test]
fn what_is_being_removed_is_not_written_until_it_is_gone() {
    let store = Store::new();
    let manager = manager(&store, [8, 16], |_| {});
    let sequence = tokens(&manager, 1, 4);
    put(&manager, &sequence);
    store.deleting.close();
    assert_eq!(manager.clear(Tier::G4).expect("a volume"), 4);
    store.deleting.wait_for(1);
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
    put(&manager, &sequence);
    assert_eq!(manager.status().volumes[0].blocks, 0, "the removal would take it");
    store.deleting.open();
    let until = soon();
    while !store.keys().is_empty() {
        assert!(Instant::now() < until, "everything is removed");
        std::thread::yield_now();
    }
    until_stored(&manager, &store, &sequence, 4);
    assert_eq!(manager.status().volumes[0].blocks, 4);
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
    assert_eq!(onboard(&manager, &sequence), 4);
}

#[test]
fn a_volume_that_is_down_costs_no_more_than_misses_and_comes_back() {
    let store = Store::new();
    let first = manager(&store, [8, 16], |_| {});
    let (known, fresh) = (tokens(&first, 1, 4), tokens(&first, 2, 4));
    put(&first, &known);
    drop(first);
    // Longer than eight questions take, on a busy machine too.
    let second = manager(&store, [4, 16], |config| config.volumes.longest_pause = Duration::from_secs(3));
    store.down.store(true, Ordering::Relaxed);
    for _ in 0..8 {
        assert_eq!(onboard(&second, &known), 0);
    }
    assert!(second.status().volumes[0].down);
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
    assert!(!second.status().volumes[0].down);
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

/// Mutation that makes it fail: `Index::learn` does not ask what went since the read began.
#[test]
fn what_was_read_and_then_removed_is_not_known_to_be_there() {
    let store = Store::new();
    let manager = manager(&store, [8, 16], |_| {});
    let [sequence, other] = [1, 100].map(|start| tokens(&manager, start, 1));
    put(&manager, &sequence);
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
    store.got.close();
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    store.got.wait_for(1);
    assert_eq!(manager.clear(Tier::G4).expect("a volume"), 1);
    // Once the removal is confirmed others are looked for again.
    let (until, before) = (soon(), store.probes.load(Ordering::Relaxed));
    while store.probes.load(Ordering::Relaxed) == before {
        assert!(Instant::now() < until, "the removal is confirmed");
        assert!(manager.match_prefix(&other).is_empty());
    }
    assert!(store.keys().is_empty());
    store.got.open();
    assert_eq!(onboarding.wait().expect("it had been read").len(), 1);
    assert!(manager.wait_offloads(soon()));
    // It went on to host memory, and from there to the volume, which was not thought to have it.
    assert_eq!((store.keys().len(), manager.status().volumes[0].blocks), (1, 1));
}

/// Mutations that make it fail: a purge is over when it succeeded, whatever may land; or it is not
/// asked for again where it failed.
#[test]
fn an_object_that_lands_after_it_was_forgotten_is_deleted() {
    for (lost, all) in [(false, false), (true, false), (true, true)] {
        let store = Store::new();
        let manager = manager(&store, [8, 16], |_| {});
        let tenant = Namespace::new("tenant").page_size(16).dtype(model().dtype.name());
        let prompt: Vec<u32> = (0..64).collect();
        let theirs = manager.sequence_in(&tenant, &prompt, b"").expect("a sequence");
        store.putting.close();
        store.deleting.close();
        drop(fill(&manager, &theirs, 0));
        store.putting.wait_for(1);
        if all {
            manager.clear(Tier::G4).expect("a volume");
            for tier in [Tier::G1, Tier::G2] {
                manager.clear(tier).expect("a tier of ours");
            }
        } else {
            manager.forget(&tenant);
        }
        // What is there has been listed, and nothing of theirs was.
        store.deleting.wait_for(1);
        store.lost.store(lost, Ordering::Relaxed);
        store.undeleted.store(1, Ordering::Relaxed);
        store.putting.open();
        assert!(manager.wait_offloads(soon()));
        assert!(!store.keys().is_empty(), "it landed");
        store.deleting.open();
        let until = soon();
        while store.undeleted.load(Ordering::Relaxed) > 0 || !store.keys().is_empty() {
            assert!(Instant::now() < until, "what landed is removed, lost {lost}, all {all}");
            if !all {
                assert!(manager.match_prefix(&theirs).is_empty(), "lost {lost}: it is found again");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Mutation that makes it fail: `Index::fail` does not note that the block may land.
#[test]
fn what_failed_before_it_was_forgotten_and_lands_behind_the_removal_goes() {
    let store = Store::new();
    let manager = manager(&store, [8, 16], |config| config.volume[0].deadline = Duration::from_secs(3));
    let tenant = Namespace::new("tenant").page_size(16).dtype(model().dtype.name());
    let theirs = manager.sequence_in(&tenant, &[7; 16], b"").expect("a sequence");
    store.lost.store(true, Ordering::Relaxed);
    drop(fill(&manager, &theirs, 0));
    assert!(manager.wait_offloads(soon()));
    // The store gave up on it, and has not written it yet.
    let late = store.keys();
    assert_eq!((late.len(), manager.status().volumes[0].blocks), (1, 0));
    assert!(store.memory.delete(&late, soon()).remove(0).expect("memory"));
    store.deleting.close();
    manager.forget(&tenant);
    store.deleting.wait_for(1);
    store.memory.put_one(&late[0], b"late", soon()).expect("memory");
    store.deleting.open();
    let until = soon();
    while !store.keys().is_empty() {
        assert!(Instant::now() < until, "it is removed");
        assert!(manager.match_prefix(&theirs).is_empty(), "it is found again");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Mutation that makes it fail: `shut_down` does not wait for removals.
#[test]
fn a_shutdown_waits_for_what_was_forgotten_to_be_removed() {
    let store = Store::new();
    let manager = manager(&store, [8, 16], |_| {});
    let sequence = tokens(&manager, 1, 4);
    put(&manager, &sequence);
    store.undeleted.store(1, Ordering::Relaxed);
    for tier in [Tier::G4, Tier::G2, Tier::G1] {
        manager.clear(tier).expect("a tier of ours");
    }
    assert!(manager.shutdown(Duration::from_secs(30)).is_complete());
    assert!(store.keys().is_empty(), "it was asked for again");
}

#[test]
fn offload_modes_choose_what_goes() {
    let store = Store::new();
    let explicit = manager(&store, [4, 8], |config| config.volumes.offload = VolumeOffload::Explicit);
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
        config.volumes.offload = VolumeOffload::Victims;
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
        config.volume[0].capacity = Blocks(6).into();
        config.volumes.lookup = VolumeLookup::Known;
    });
    for start in 1..4 {
        put(&small, &tokens(&small, start, 4));
    }
    let kept = Instant::now() + Duration::from_secs(30);
    while store.keys().len() > 6 {
        assert!(Instant::now() < kept, "what is beyond the capacity is removed");
        std::thread::yield_now();
    }
    assert_eq!(small.status().volumes[0].blocks, 6);
    assert_eq!(store.probes.load(Ordering::Relaxed), 0);
    drop(small);
    let stranger = manager(&store, [4, 16], |config| config.volumes.lookup = VolumeLookup::Known);
    assert_eq!(stranger.match_prefix(&tokens(&stranger, 3, 4)).len(), 0);
}

#[test]
fn events_say_what_is_on_the_volume() {
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
