//! Several threads at once, in many of the orders that a scheduler can find (`--cfg kvbm_shuttle`). A failure names the
//! schedule that repeats it.
#![cfg(kvbm_shuttle)]

#[path = "threads/scenario.rs"]
mod scenario;
#[path = "threads/world.rs"]
mod world;

use kvbm_pool::PolicyKind;
use shuttle::thread;
use world::World;

const THREADS: u64 = 3;
const OPERATIONS: usize = 12;

fn threads_on_one_registry(policy: PolicyKind, shards: u32, seed: u64) {
    let world = World::sharded([7, 5, 0], policy, shards);
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let world = world.clone();
            thread::spawn(move || scenario::work(&world, seed * THREADS + thread, OPERATIONS))
        })
        .collect();
    for thread in threads {
        assert!(thread.join().is_ok());
    }
    world.check();
}

#[test]
fn random_schedules_end_with_the_truth() {
    for (seed, policy) in
        (0..30).zip([PolicyKind::LruLeaf, PolicyKind::S3Fifo, PolicyKind::Hazard].iter().cycle())
    {
        let policy = *policy;
        shuttle::check_random(move || threads_on_one_registry(policy, 1, seed), 60);
    }
}

/// Schedules with few switches at unlikely places (probabilistic concurrency testing).
#[test]
fn rare_schedules_end_with_the_truth() {
    for seed in 100..130 {
        shuttle::check_pct(move || threads_on_one_registry(PolicyKind::LruLeaf, 1, seed), 60, 4);
    }
}

#[test]
fn schedules_over_several_shards_end_with_the_truth() {
    for (seed, shards) in (200..230).zip([2, 3, 5].iter().cycle()) {
        let shards = *shards;
        let policy = if seed % 2 == 0 { PolicyKind::LruLeaf } else { PolicyKind::Hazard };
        shuttle::check_random(move || threads_on_one_registry(policy, shards, seed), 60);
        shuttle::check_pct(move || threads_on_one_registry(policy, shards, seed), 30, 4);
    }
}
