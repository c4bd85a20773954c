//! Blocks of several cache groups on volumes (G4).

use crate::support::store::{Store, registry};
use crate::support::{GROUPS, kept, model_of, namespace, serve, soon, unlimited};
use crate::{BLOCKS, FULL, STATE, WINDOW, arrived, compute, tokens};
use kvbm::config::{Blocks, LayoutKind, ModelConfig};
use kvbm::plan::{NamespaceTag, VolumeId};
use kvbm::volumes::{BlobKey, Volume};
use kvbm::{GroupId, KvBlockManager, Owned, Path, Tier, VolumeDescriptor};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Each rank has the latent, and a part of the state.
const LATENT: &str = "full layers=3 heads=1 head_dim=16 outer=1, state layers=4 bytes=1004";

fn open(groups: &str, ranks: u32, stores: &[(&str, &Arc<Store>)]) -> KvBlockManager<Owned> {
    let manager = KvBlockManager::<Owned>::builder()
        .model(model_of(groups))
        .namespace(namespace())
        .device(Blocks(64))
        .host(Blocks(64))
        .tensor_parallel(ranks)
        .volumes(registry(stores))
        .configure(|config| {
            unlimited(config);
            config.device.layout = LayoutKind::FullyContiguous;
            config.volumes.recheck = Duration::from_millis(1);
        })
        .build()
        .unwrap();
    for (id, (scheme, _)) in (0..).zip(stores) {
        manager.register_volume(VolumeDescriptor::new(VolumeId(id), format!("{scheme}:"))).unwrap();
    }
    manager
}

fn tag(manager: &KvBlockManager<Owned>) -> NamespaceTag {
    manager.namespace().tag()
}

/// Objects of the manager's deployment.
fn objects(store: &Store, manager: &KvBlockManager<Owned>) -> Vec<BlobKey> {
    store.keys_of(tag(manager))
}

/// Leaves what lies on volumes alone.
fn forget_above(manager: &KvBlockManager<Owned>) {
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).unwrap();
    }
}

/// Computes and keeps a request, on a volume too.
fn put(manager: &KvBlockManager<Owned>, model: &ModelConfig, blocks: usize) {
    let request = tokens(manager, blocks);
    for group in 0..model.cache_groups().len() {
        compute(manager, GroupId(group as u16), &request, 0);
    }
    assert!(manager.wait_offloads(soon()));
}

/// Mutation that makes it fail: a look-up asks volumes for blocks of the first group alone.
#[test]
fn all_groups_come_back_from_a_volume_and_after_a_restart() {
    for (groups, ranks) in [(GROUPS, 1), (GROUPS, 2), (LATENT, 2), (LATENT, 4)] {
        let (store, model) = (Store::new(), model_of(groups));
        let manager = open(groups, ranks, &[("one", &store)]);
        put(&manager, &model, BLOCKS);
        let request = tokens(&manager, BLOCKS);
        let blocks = kept(&model, BLOCKS);
        assert_eq!(objects(&store, &manager).len(), blocks * ranks as usize);
        forget_above(&manager);
        assert_eq!(arrived(&manager, &request), BLOCKS, "{groups} on {ranks} ranks");
        assert_eq!(manager.metrics().path(Path::G4_G1).blocks.get(), blocks as u64);
        drop(manager);

        let manager = open(groups, ranks, &[("one", &store)]);
        assert_eq!(arrived(&manager, &request), BLOCKS, "after a restart: {groups} on {ranks} ranks");
        assert_eq!(manager.metrics().path(Path::G4_G1).blocks.get(), blocks as u64);
        let longer = tokens(&manager, BLOCKS + 3);
        assert_eq!(arrived(&manager, &longer), BLOCKS, "goes on");
    }
}

/// Removes objects as volumes do: of full attention, the end of a chain. What is found is what
/// trying each length finds.
#[test]
fn a_prefix_is_what_every_group_can_serve_from_a_volume() {
    let mut state = 7_u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut lengths = BTreeSet::new();
    for round in 0..24 {
        let store = Store::new();
        let manager = open(GROUPS, 1, &[("one", &store)]);
        // Windows and states at several ends of one chain.
        for blocks in [3, 5, BLOCKS] {
            serve(&manager, &tokens(&manager, blocks));
        }
        assert!(manager.wait_offloads(soon()));
        let (request, keys) = (tokens(&manager, BLOCKS), objects(&store, &manager));
        let odds = [4, 12][usize::from(round % 2 == 0)];
        let cut = BLOCKS - random(3) as usize;
        let mut is_gone = |key: &&BlobKey| match key.group {
            FULL => request.hashes()[cut..].contains(&key.hash),
            _ => random(odds) == 0,
        };
        let gone: Vec<_> = keys.iter().filter(&mut is_gone).copied().collect();
        drop(manager);
        for result in store.memory.delete(&gone, soon()) {
            assert!(result.unwrap());
        }
        let has = |group: GroupId, at: usize| {
            let there = |key: &&BlobKey| key.group == group && key.hash == request.hashes()[at];
            keys.iter().filter(|key| !gone.contains(key)).any(|key| there(&key))
        };
        let serves = |length: &usize| {
            let all = |group, from: usize| (from..*length).all(|at| has(group, at));
            all(FULL, 0) && all(WINDOW, length.saturating_sub(2)) && all(STATE, length.saturating_sub(1))
        };
        let wanted = (0..=BLOCKS).rev().find(serves).unwrap_or(0);
        let manager = open(GROUPS, 1, &[("one", &store)]);
        assert_eq!(manager.match_groups(&request).len(), wanted, "round {round}: {gone:?}");
        assert_eq!(arrived(&manager, &request), wanted, "round {round}");
        lengths.insert(wanted);
    }
    assert!(lengths.len() >= 3, "prefixes of several lengths: {lengths:?}");
}

#[test]
fn a_look_up_asks_for_what_groups_need_and_not_again_at_once() {
    let store = Store::new();
    let manager = open(GROUPS, 1, &[("one", &store)]);
    serve(&manager, &tokens(&manager, BLOCKS));
    assert!(manager.wait_offloads(soon()));
    drop(manager);
    let manager = open(GROUPS, 1, &[("one", &store)]);
    let asked = |call: &dyn Fn() -> usize| {
        let before = store.probes.load(Ordering::Relaxed);
        assert_eq!(call(), BLOCKS);
        store.probes.load(Ordering::Relaxed) - before
    };
    let request = tokens(&manager, BLOCKS);
    let first = asked(&|| manager.match_groups(&request).len());
    assert!(first <= 6, "the chain of full attention, then the ends of the others: {first}");
    assert_eq!(asked(&|| manager.match_groups(&request).len()), 0, "all of it is known");
}

/// Mutation that makes it fail: a rank removes only objects of the first group.
#[test]
fn forget_and_clear_reach_every_group_whatever_the_number_of_ranks() {
    for (groups, writers, ranks) in [(GROUPS, 1, 1), (GROUPS, 2, 1), (LATENT, 4, 2), (LATENT, 2, 4)] {
        for clears in [false, true] {
            let store = Store::new();
            let manager = open(groups, writers, &[("one", &store)]);
            put(&manager, &model_of(groups), BLOCKS);
            drop(manager);
            let manager = open(groups, ranks, &[("one", &store)]);
            assert!(!objects(&store, &manager).is_empty());
            if clears {
                manager.clear(Tier::G4).unwrap();
            } else {
                manager.forget(manager.namespace());
            }
            let report = manager.shutdown(Duration::from_secs(30));
            assert!(report.is_complete(), "{report:?}");
            let left = objects(&store, &manager);
            assert!(left.is_empty(), "{groups}, {writers} ranks to {ranks}, clear {clears}: {left:?}");
        }
    }
}

#[test]
fn damage_to_an_object_of_one_group_is_a_miss_for_all_and_is_computed_again() {
    for group in [WINDOW, FULL, STATE] {
        let store = Store::new();
        let manager = open(GROUPS, 1, &[("one", &store)]);
        let request = tokens(&manager, BLOCKS);
        serve(&manager, &request);
        assert!(manager.wait_offloads(soon()));
        forget_above(&manager);
        let last = request.hashes()[BLOCKS - 1];
        let keys = objects(&store, &manager);
        let key = keys.iter().find(|key| key.group == group && key.hash == last).unwrap();
        store.memory.tamper(key, |bytes| *bytes.last_mut().unwrap() ^= 1);
        let error = manager.onboard_groups(manager.match_groups(&request)).wait().unwrap_err();
        assert_eq!((error.arrived.len, error.failures.len()), (0, 1), "{group}: {error}");
        forget_above(&manager);
        assert_eq!(manager.match_groups(&request).len(), 0, "what a prefix needs is at its end alone");
        serve(&manager, &request);
        assert!(manager.wait_offloads(soon()));
        forget_above(&manager);
        assert_eq!(arrived(&manager, &request), BLOCKS, "{group}");
    }
}

/// A window may be on host memory in part, and on a volume for the rest; groups may be on different
/// volumes.
#[test]
fn parts_of_a_prefix_come_from_tiers_and_from_several_volumes() {
    let stores = [Store::new(), Store::new()];
    let both = [("one", &stores[0]), ("two", &stores[1])];
    let manager = open(GROUPS, 1, &both[..1]);
    let request = tokens(&manager, BLOCKS);
    compute(&manager, FULL, &request, 0);
    compute(&manager, WINDOW, &request, 0);
    assert!(manager.wait_offloads(soon()));
    forget_above(&manager);
    drop(manager);
    // The state is on the other volume, and the last block of the window in host memory.
    let manager = open(GROUPS, 1, &both[1..]);
    compute(&manager, STATE, &request, 0);
    assert!(manager.wait_offloads(soon()));
    drop(manager);
    let manager = open(GROUPS, 1, &both);
    compute(&manager, WINDOW, &request, BLOCKS - 1);
    assert!(manager.wait_offloads(soon()));
    let prefix = manager.match_groups(&request);
    assert_eq!(prefix.len(), BLOCKS);
    let tiers: Vec<Vec<Tier>> =
        prefix.parts().iter().map(|part| part.blocks().iter().map(|block| block.tier).collect()).collect();
    assert_eq!(tiers, [vec![Tier::G4, Tier::G1], vec![Tier::G4; BLOCKS], vec![Tier::G4]]);
    drop(prefix);
    assert_eq!(arrived(&manager, &request), BLOCKS);
}
