//! A tier that lost what it held: what was given out before never becomes visible.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]

use crate::world::{GROUP, World, hashes, identities};
use kvbm_plan::Tier;
use kvbm_pool::{
    Arrival, ArrivalOutcome, Duplicates, G1, G2, G3, Lost, PolicyKind, RegisterError, Removed, TierMask,
};
use std::sync::Barrier;

const POLICIES: [PolicyKind; 2] = [PolicyKind::LruLeaf, PolicyKind::Hazard];

const G1_LOST: RegisterError = RegisterError::Lost(Lost { tier: Tier::G1 });

fn memory() -> TierMask {
    TierMask::only(Tier::G1).with(Tier::G2)
}

#[test]
fn a_batch_from_before_a_loss_is_refused_and_comes_back() {
    for policy in POLICIES {
        let world = World::new([8, 4, 4], policy);
        let (pool, chain) = (world.pool(), hashes(1, 3));
        let before = world.complete::<G1>(&chain, 0).unwrap();
        assert!(!before.is_lost());
        assert_eq!(world.registry.lose(memory()), Removed::default(), "nothing was there");
        assert!(before.is_lost());
        let mut rejected = pool.register(before, Duplicates::Reuse).unwrap_err();
        assert_eq!(rejected.error, G1_LOST);
        for part in ["g1", "drop them", "compute them again"] {
            assert!(rejected.to_string().to_lowercase().contains(part), "{rejected} lacks {part}");
        }
        assert!(world.present(&chain).is_empty());
        // Neither a part of it nor the same slots in another state are any younger.
        let tail = rejected.batch.split_off(1);
        assert_eq!(pool.register(tail, Duplicates::Allow).unwrap_err().error, G1_LOST);
        assert!(rejected.batch.into_reset().is_lost());
        let counters = world.registry.counters(Tier::G1);
        assert_eq!((counters.registrations_lost, counters.lost, counters.stored), (2, 0, 0));
        let held = world.register(&chain, 0, Duplicates::Reuse).unwrap();
        assert!(!held.is_lost());
        drop(held);
        world.check();
    }
}

#[test]
fn what_is_there_goes_and_what_is_held_knows_it() {
    for policy in POLICIES {
        let world = World::new([300, 300, 300], policy);
        let chain = hashes(1, 200);
        let held = world.register(&chain, 0, Duplicates::Reuse).unwrap();
        drop(world.register_on::<G2>(&hashes(2, 50), 0, Duplicates::Reuse));
        let on_disk = world.register_on::<G3>(&chain[..100], 0, Duplicates::Reuse).unwrap();
        let prefix = world.registry.match_prefix(GROUP, &hashes(2, 50));
        let disk = world.registry.pool::<G3>().match_sequence_hashes(GROUP, &chain);
        assert_eq!((prefix.lost(), disk.len()), (None, 100));
        let lost = world.registry.lose(memory());
        assert_eq!(lost, Removed { blocks: 250, in_use: 250, cancelled: 0 });
        assert_eq!(world.registry.counters(Tier::G1).lost, 200);
        assert_eq!(world.registry.counters(Tier::G2).lost, 50);
        assert_eq!(prefix.lost(), Some(Lost { tier: Tier::G2 }));
        assert!(held.is_lost() && held.clone().is_lost() && !on_disk.is_lost() && !disk.is_lost());
        assert!(held.registered().into_iter().all(|there| !there));
        assert_eq!(world.registry.match_prefix(GROUP, &chain).len(), 100, "the disk keeps its blocks");
        // A handle of mixed age is as old as its oldest block.
        let mut mixed = world.register(&hashes(3, 1), 0, Duplicates::Reuse).unwrap();
        assert!(!mixed.is_lost());
        mixed.append(held).unwrap();
        assert!(mixed.is_lost());
        assert!(mixed.split_off(1).is_lost());
        let parts = prefix.into_parts();
        assert!(parts.g2.is_lost());
        drop((mixed, on_disk, disk, parts));
        world.check();
    }
}

#[test]
fn a_loss_of_one_tier_leaves_the_others_alone() {
    let world = World::new([4, 4, 4], PolicyKind::LruLeaf);
    let chain = hashes(1, 2);
    let [on_g1, later] = [(); 2].map(|()| world.complete::<G1>(&chain, 0).unwrap());
    let (on_g2, on_g3) = (world.complete::<G2>(&chain, 0).unwrap(), world.complete::<G3>(&chain, 0).unwrap());
    let since = world.registry.losses();
    world.registry.lose(TierMask::only(Tier::G2));
    assert_eq!(Tier::ALL.map(|tier| world.registry.is_lost(tier, since)), [false, true, false, false]);
    assert!(world.registry.pool::<G2>().register(on_g2, Duplicates::Reuse).is_err());
    drop(world.registry.pool::<G3>().register(on_g3, Duplicates::Reuse).unwrap());
    drop(world.pool().register(on_g1, Duplicates::Reuse).unwrap());
    // Of two losses of different tiers the second does not hide the first.
    world.registry.lose(TierMask::only(Tier::G1));
    world.registry.lose(TierMask::only(Tier::G3));
    assert_eq!(world.pool().register(later, Duplicates::Reuse).unwrap_err().error, G1_LOST);
    assert_eq!(Tier::ALL.map(|tier| world.registry.is_lost(tier, since)), [true, true, true, false]);
    world.check();
}

#[test]
fn what_was_on_its_way_does_not_arrive() {
    for policy in POLICIES {
        let world = World::new([8, 8, 8], policy);
        let chain = hashes(1, 2);
        let pool = world.registry.pool::<G2>();
        let mut arrivals = pool.begin_arrivals(&identities(&chain)).unwrap();
        assert_eq!(world.registry.lose(memory()).cancelled, 2);
        // It is asked for again, into other slots, and that arrives.
        let mut again = pool.begin_arrivals(&identities(&chain)).unwrap();
        assert_eq!(arrivals.complete(0), ArrivalOutcome::Removed);
        assert!(world.present(&chain).is_empty());
        assert_eq!(again.complete_all(), [ArrivalOutcome::Stored; 2]);
        let ArrivalOutcome::Existing { .. } = arrivals.complete(1) else {
            panic!("somebody else brought it")
        };
        assert_eq!(arrivals.arrivals()[0], Arrival::Failed);
        assert!(!again.erase().into_pinned().is_lost());
        assert!(arrivals.erase().into_pinned().is_lost(), "its arrivals began before");
        assert_eq!(world.present(&chain).len(), 2);
        world.check();
    }
}

/// A block that continues a parent keeps a place there, which is given back when the batch is
/// refused.
#[test]
fn a_refused_batch_leaves_no_trace_behind_its_parent() {
    let world = World::new([16, 0, 16], PolicyKind::LruLeaf);
    let chain = hashes(1, 2);
    let fork = |end: u64| vec![chain[0], hashes(end, 2)[1]];
    for end in 2..40 {
        let before = world.complete::<G1>(&fork(end), 1).unwrap();
        world.registry.lose(TierMask::only(Tier::G1));
        // The parent is there again, with a child, and on a tier that was not lost.
        let held = world.register(&chain, 0, Duplicates::Reuse).unwrap();
        drop(world.register_on::<G3>(&chain, 0, Duplicates::Reuse));
        assert_eq!(world.pool().register(before, Duplicates::Reuse).unwrap_err().error, G1_LOST);
        drop(held);
    }
    assert_eq!(world.pool().get_mutable_blocks(16).unwrap().len(), 16, "nothing keeps a block");
    world.check();
}

/// Threads register, also behind what others registered, while a tier is lost again and again:
/// nothing is there that was allocated before.
#[test]
fn registrations_that_race_a_loss_leave_nothing_from_before() {
    let rounds = 1000;
    let world = World::new([64, 0, 0], PolicyKind::LruLeaf);
    let start = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (world, start) = (&world, &start);
            scope.spawn(move || {
                for round in 0..rounds {
                    let chain = [hashes(9, 1), hashes(10 + (round + thread) % 2, 4)[1..].to_vec()].concat();
                    let before = world.complete::<G1>(&chain, 0).unwrap();
                    start.wait();
                    let held = world.pool().register(before, Duplicates::Reuse);
                    start.wait();
                    assert!(world.present(&chain).is_empty(), "round {round}");
                    if let Err(rejected) = &held {
                        assert_eq!(rejected.error, G1_LOST);
                    }
                    drop(held);
                    start.wait();
                }
            });
        }
        for _ in 0..rounds {
            start.wait();
            world.registry.lose(TierMask::only(Tier::G1));
            start.wait();
            start.wait();
            world.check_events();
        }
    });
    world.check();
    assert_eq!(world.registry.known_blocks(), 0);
}
