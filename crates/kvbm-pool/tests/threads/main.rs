//! Real threads on one registry: whatever they did, the events end with the truth and no slot is
//! lost.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]

#[path = "../shares/blind.rs"]
mod blind;
mod choosing;
mod scenario;
mod watched;
mod world;

use choosing::{Choosing, Policy};
use kvbm_plan::Tier;
use kvbm_pool::{ArrivalOutcome, Duplicates, PolicyKind, TierMask};
use scenario::Seed;
use std::sync::{Barrier, Mutex};
use world::{GROUP, World, hashes, identities};

const POLICIES: [PolicyKind; 2] = [PolicyKind::LruLeaf, PolicyKind::Hazard];

/// Set to a number of rounds for a long run (`cargo xtask test` has the short one).
const ROUNDS: &str = "KVBM_RACE_ROUNDS";

fn rounds() -> u64 {
    std::env::var(ROUNDS).ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2000)
}

#[test]
fn threads_with_random_operations_end_with_the_truth() {
    for seed in 0..rounds() / 10 {
        let _seed = Seed(seed);
        let policy = POLICIES[seed as usize % POLICIES.len()];
        let world = World::new([7, 5, 0], policy);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let world = world.clone();
                scope.spawn(move || scenario::work(&world, seed * 4 + thread, 40));
            }
        });
        world.check();
    }
}

/// The same where a policy chooses the victims.
#[test]
fn threads_under_a_policy_that_chooses_end_with_the_truth() {
    let mut chosen = [0; 3];
    // Fewer may choose nothing under one of the policies.
    for seed in 0..(rounds() / 20).max(60) {
        let _seed = Seed(seed);
        let which = seed as usize % 3;
        let policy = [Policy::Default, Policy::DefaultAhead, Policy::Blind][which];
        let choosing = Choosing::new(policy, [12, 6, 0], seed);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let world = choosing.world.clone();
                scope.spawn(move || scenario::work(&world, seed * 3 + thread, 40));
            }
        });
        chosen[which] += choosing.chosen();
        choosing.check();
    }
    assert!(chosen.iter().all(|&chosen| chosen > 0), "{chosen:?} victims were chosen while threads ran");
}

/// A parent of a block that is copied behind it is no victim.
#[test]
fn the_policy_knows_that_a_parent_awaits_a_copy() {
    let choosing = Choosing::new(Policy::Blind, [8, 8, 0], 0);
    let world = &choosing.world;
    let root = hashes(1, 1)[0];
    for end in 1..6 {
        let chain = [root, hashes(end, 2)[1]];
        drop(world.register(&chain, usize::from(end > 1), Duplicates::Reuse).expect("there is room"));
        for block in identities(&chain) {
            let mut copy = world.registry.begin_arrivals(Tier::G2, &[block]).expect("there is room");
            assert_eq!(copy.complete_all(), [ArrivalOutcome::Stored]);
        }
        choosing.check_policy();
        world.registry.remove_subtree(GROUP, root, TierMask::only(Tier::G2));
    }
    choosing.check();
}

/// The same block is registered, let go of and evicted at the same moment by different threads,
/// again and again.
#[test]
fn registering_races_the_last_drop_and_the_last_event_is_true() {
    let rounds = rounds();
    for policy in POLICIES {
        let world = World::new([3, 0, 0], policy);
        let chain = hashes(1, 1);
        let held = Mutex::new(None);
        let (start, end) = (Barrier::new(4), Barrier::new(4));
        std::thread::scope(|scope| {
            let thread = |work: fn(&World, &Mutex<Option<kvbm_pool::Cached<kvbm_pool::G1>>>)| {
                let (world, held, start, end) = (&world, &held, &start, &end);
                scope.spawn(move || {
                    for _ in 0..rounds {
                        start.wait();
                        work(world, held);
                        end.wait();
                    }
                });
            };
            thread(|_, held| drop(held.lock().map(|mut held| held.take())));
            thread(|world, _| drop(world.register(&hashes(1, 1), 0, Duplicates::Reuse)));
            thread(|world, _| drop(world.pool().get_mutable_blocks(3)));
            for _ in 0..rounds {
                // Whoever lost the race in the last round, the block has a user now.
                let again = world.register(&chain, 0, Duplicates::Reuse);
                *held.lock().expect("no thread panicked with it") = again;
                start.wait();
                end.wait();
                world.check_events();
            }
        });
        world.check();
    }
}
