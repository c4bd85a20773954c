//! A process that writes, killed at a random moment.

use crate::ledger::Ledger;
use crate::process::{After, Process};
use crate::support::Random;
use crate::writer::ENGINES;
use std::path::Path;
use std::process::{ExitCode, Stdio};

pub(crate) fn run(rounds: u64, dir: &Path, seed: u64) -> ExitCode {
    let mut random = Random(seed);
    let mut ledger = Ledger::default();
    for round in 0..rounds {
        let engine = ENGINES[round as usize % ENGINES.len()];
        let mut process = Process::start(dir, round + 1, engine, Stdio::inherit());
        After::of_round(round).wait(&mut process, &mut random);
        let ended = process.kill();
        ledger.found.met_a_writer += u64::from(ended.by_the_kill);
        ledger.take(&ended.output);
        ledger.check(dir, engine);
    }
    println!("{}", ledger.found.json());
    if ledger.found.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
