//! A process that writes, killed at a random moment.

use crate::ledger::Ledger;
use crate::support::Random;
use crate::writer::ENGINES;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

/// The latest moment of a kill, from the start of the process on.
const LATEST: u64 = 120;

pub(crate) fn run(rounds: u64, dir: &Path, seed: u64) -> ExitCode {
    let mut random = Random(seed);
    let mut ledger = Ledger::default();
    for round in 0..rounds {
        let engine = ENGINES[round as usize % ENGINES.len()];
        let mut child = start(dir, round + 1, engine, Stdio::inherit());
        std::thread::sleep(Duration::from_millis(random.below(LATEST)));
        child.kill().unwrap();
        ledger.hear(&said(&mut child));
        ledger.check(dir, engine);
    }
    println!("{}", ledger.found.json());
    if ledger.found.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Starts a writer.
pub(crate) fn start(dir: &Path, seed: u64, engine: &str, errors: Stdio) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .arg("write")
        .arg(dir)
        .args([&seed.to_string(), engine])
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .unwrap()
}

/// All that a writer said, once it is gone.
pub(crate) fn said(child: &mut Child) -> String {
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    child.wait().unwrap();
    said
}
