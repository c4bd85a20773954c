//! Lost and torn writes, power that fails in the middle of anything, on a file system that others
//! simulate: `turmoil-fs`. `cargo xtask crash-test` runs the same with thousands of seeds.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod medium;
mod restarts;
#[path = "../support/mod.rs"]
mod support;

const SEEDS: u64 = 300;

/// Mutations that make it fail within a few seeds: no sync of the slot files before their records;
/// none of the journal after an append; none of a snapshot before it is renamed; none of the
/// directory after that.
#[test]
fn what_is_durable_survives_power_that_fails_in_the_middle_of_anything() {
    let sum = restarts::run_all(0..SEEDS);
    assert!(
        sum.durable > SEEDS && sum.in_a_change > SEEDS / 2 && sum.in_an_opening > 0,
        "a weak test: {sum:?}"
    );
}
