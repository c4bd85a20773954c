//! Several threads at once, in many of the orders that a scheduler can find (`--cfg kvbm_shuttle`).
//! A failure prints its seed and its schedule: with these as `KVBM_SHUTTLE_SEED` and
//! `KVBM_SHUTTLE_SCHEDULE` it alone runs again.
#![cfg(kvbm_shuttle)]

#[path = "shares/blind.rs"]
mod blind;
#[path = "threads/choosing.rs"]
mod choosing;
#[path = "threads/scenario.rs"]
mod scenario;
#[path = "threads/watched.rs"]
mod watched;
#[path = "threads/world.rs"]
mod world;

use choosing::{Choosing, Policy};
use kvbm_pool::PolicyKind;
use scenario::Seed;
use shuttle::thread;
use std::sync::atomic::{AtomicUsize, Ordering};
use world::World;

const THREADS: u64 = 3;
const OPERATIONS: usize = 12;

/// Set to a seed: no other runs.
const ONLY: &str = "KVBM_SHUTTLE_SEED";

/// Runs `model` in so many schedules drawn at random, and in so many with few switches at unlikely
/// places (probabilistic concurrency testing).
fn check(seed: u64, random: usize, rare: usize, model: impl Fn() + Copy + Send + Sync + 'static) {
    if std::env::var(ONLY).is_ok_and(|only| only != seed.to_string()) {
        return;
    }
    let _seed = Seed(seed);
    match std::env::var("KVBM_SHUTTLE_SCHEDULE") {
        Ok(schedule) => shuttle::replay(model, &schedule),
        Err(_) => {
            shuttle::check_random(model, random);
            shuttle::check_pct(model, rare, 4);
        }
    }
}

fn threads_on(world: &World, seed: u64) {
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let world = world.clone();
            thread::spawn(move || scenario::work(&world, seed * THREADS + thread, OPERATIONS))
        })
        .collect();
    for thread in threads {
        assert!(thread.join().is_ok());
    }
}

fn threads_on_one_registry(policy: PolicyKind, seed: u64) {
    let world = World::new([7, 5, 0], policy);
    threads_on(&world, seed);
    world.check();
}

#[test]
fn schedules_end_with_the_truth() {
    for (seed, policy) in (0..30).zip([PolicyKind::LruLeaf, PolicyKind::Hazard].iter().cycle()) {
        let policy = *policy;
        check(seed, 60, 60, move || threads_on_one_registry(policy, seed));
    }
}

/// Victims that policies chose while threads ran.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);

/// A policy chooses the victims, the default one or another.
#[test]
fn schedules_in_which_a_policy_chooses_end_with_the_truth() {
    for (seed, policy) in (300..330).zip([Policy::Default, Policy::Blind].iter().cycle()) {
        let policy = *policy;
        check(seed, 60, 30, move || {
            let choosing = Choosing::new(policy, [7, 5, 0], seed);
            threads_on(&choosing.world, seed);
            CHOSEN.fetch_add(choosing.chosen(), Ordering::Relaxed);
            choosing.check();
        });
    }
    // One seed alone may be of another test, or choose none.
    if std::env::var(ONLY).is_err() {
        assert!(CHOSEN.load(Ordering::Relaxed) > 0, "no victim was chosen while threads ran");
    }
}
