//! Kills the disk engine and looks at what is left: `cargo xtask crash-test` runs it.
//!
//! ```text
//! crash kill ROUNDS DIR SEED       a process that writes, killed by SIGKILL at a random moment, ROUNDS times
//! crash power ROUNDS DIR SEED      the same on an ext4 image, whose file system is shut down without writing anything
//! crash simulate SEEDS SEED        lost and torn writes of a simulated medium
//! crash turmoil SEEDS SEED         the same, and power that fails in the middle of anything, over turmoil-fs
//! crash write DIR SEED ENGINE      the process that writes: says on standard output what it did
//! ```
//! All but the last print one line of JSON. Exit status 1: something that was acknowledged as
//! durable is gone, or something was served that is not what was written, or an opening took too
//! long.
#![allow(clippy::unwrap_used, reason = "a program for tests: a panic is a failed test")]

mod kill;
mod ledger;
#[path = "../../tests/turmoil/medium.rs"]
mod medium;
mod power;
mod process;
#[path = "../../tests/turmoil/restarts.rs"]
mod restarts;
#[path = "../../tests/support/mod.rs"]
mod support;
mod writer;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{text} is no number"));
    match words[..] {
        ["kill", rounds, dir, seed] => kill::run(number(rounds), Path::new(dir), number(seed)),
        ["power", rounds, dir, seed] => power::run(number(rounds), Path::new(dir), number(seed)),
        ["simulate", seeds, seed] => simulate(number(seeds), number(seed)),
        ["turmoil", seeds, seed] => turmoil(number(seeds), number(seed)),
        ["write", dir, seed, engine] => writer::run(Path::new(dir), number(seed), engine),
        _ => {
            eprintln!(
                "usage: crash kill|power ROUNDS DIR SEED | simulate|turmoil SEEDS SEED | write DIR SEED ENGINE"
            );
            ExitCode::from(2)
        }
    }
}

/// Panics at the first seed that loses or serves what it must not.
fn simulate(seeds: u64, first: u64) -> ExitCode {
    let acknowledged: usize = (first..first.saturating_add(seeds)).map(support::crash_and_recover).sum();
    println!("{{\"seeds\": {seeds}, \"acknowledged\": {acknowledged}}}");
    ExitCode::SUCCESS
}

/// The same over turmoil-fs.
fn turmoil(seeds: u64, first: u64) -> ExitCode {
    let restarts::Sum { durable, failures, in_a_change, in_an_opening } =
        restarts::run_all(first..first.saturating_add(seeds));
    println!(
        "{{\"seeds\": {seeds}, \"acknowledged\": {durable}, \"power_failures\": {failures}, \"in_a_change\": {in_a_change}, \
         \"in_an_opening\": {in_an_opening}}}"
    );
    ExitCode::SUCCESS
}
