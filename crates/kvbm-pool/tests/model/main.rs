//! The pool against a naive model, over random operations on three tiers and three kinds of groups.
//!
//! A failure prints its seed: `KVBM_POOL_SEED=<seed> cargo test -p kvbm-pool --test model` repeats it;
//! `KVBM_POOL_SEEDS=<n>` runs n seeds instead of the default.

mod driver;
mod oracle;
mod spy;

use driver::Driver;

const SEEDS: u64 = 60;
const STEPS: usize = 1500;

fn run(seed: u64, watched: bool, shards: u32) {
    let outcome = std::panic::catch_unwind(|| {
        let mut driver = Driver::new(seed, watched, shards);
        for _ in 0..STEPS {
            driver.step();
            driver.compare();
        }
        driver.finish();
    });
    if let Err(panic) = outcome {
        eprintln!("the seed was {seed}: KVBM_POOL_SEED={seed} repeats it");
        std::panic::resume_unwind(panic);
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run_all(watched: bool, shards: u32) {
    if let Some(seed) = number("KVBM_POOL_SEED") {
        return run(seed, watched, shards);
    }
    for seed in 0..number("KVBM_POOL_SEEDS").unwrap_or(SEEDS) {
        run(seed, watched, shards);
    }
}

/// Every victim of the built-in policy is foretold.
#[test]
fn agrees_with_the_naive_model_over_random_operations() {
    run_all(false, 1);
}

/// What a policy is told at every moment is what the model knows to be evictable, and nothing else goes.
#[test]
fn a_policy_knows_exactly_what_may_be_evicted() {
    run_all(true, 1);
}

/// Over several shards, which share nothing but what goes on between parents and children: the same, and only blocks go
/// that may, and as long as one may, there is room.
#[test]
fn several_shards_agree_with_the_naive_model() {
    for shards in [2, 4] {
        run_all(false, shards);
    }
}
