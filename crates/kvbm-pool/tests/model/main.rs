//! The pool against a naive model, over random operations on three tiers and three kinds of groups.
//!
//! A failure prints its seed: `KVBM_POOL_SEED=<seed> cargo test -p kvbm-pool --test model` repeats
//! it; `KVBM_POOL_SEEDS=<n>` runs n seeds instead of the default.

mod driver;
mod oracle;
mod spy;
mod universe;

use driver::{Driver, Setup, Tally, Victims};
use kvbm_pool::PolicyKind;

const SEEDS: u64 = 60;
const STEPS: usize = 1500;

fn run(seed: u64, setup: Setup) -> Tally {
    let outcome = std::panic::catch_unwind(|| {
        let mut driver = Driver::new(seed, setup);
        for _ in 0..STEPS {
            driver.step();
            driver.compare();
        }
        driver.finish()
    });
    outcome.unwrap_or_else(|panic| {
        eprintln!("the seed was {seed}, of {setup:?}: KVBM_POOL_SEED={seed} repeats it");
        std::panic::resume_unwind(panic);
    })
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run_all(policy: PolicyKind, victims: Victims) {
    let setup = Setup { policy, victims };
    if let Some(seed) = number("KVBM_POOL_SEED") {
        run(seed, setup);
        return;
    }
    let seeds = number("KVBM_POOL_SEEDS").unwrap_or(SEEDS);
    let Tally { pinned, pins_refused, unpinned, expired, replaced } =
        (0..seeds).map(|seed| run(seed, setup)).fold(Tally::default(), Tally::plus);
    let least = [pinned, pins_refused, unpinned, expired].into_iter().min();
    assert!(least >= Some(seeds), "hints meant something: {pinned}, {pins_refused}, {unpinned}, {expired}");
    assert!(victims != Victims::Told || replaced >= seeds / 4, "copies took over: {replaced}");
}

/// Every victim of the built-in policy is foretold.
#[test]
fn agrees_with_the_naive_model_over_random_operations() {
    run_all(PolicyKind::LruLeaf, Victims::Foretold);
}

/// What a policy is told at every moment is what the model knows to be evictable, and nothing else
/// goes.
#[test]
fn a_policy_knows_exactly_what_may_be_evicted() {
    run_all(PolicyKind::LruLeaf, Victims::Watched);
}

/// Whatever the policy, and with priorities, only blocks go that may, and as long as one may, there
/// is room.
#[test]
fn every_policy_agrees_with_the_naive_model() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        run_all(policy, Victims::Told);
    }
}
