//! Many seeds, several at a time.

use crate::entropy;
use crate::options::Options;
use kvbm_plan::simulation::Planted;
use kvbm_sim::{Counts, NodesRun, Outcome, SeedRun, note_panics};
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Every so many seeds one is run twice: both runs must be equal.
const TWICE: u64 = 50;

/// A planted bug must be found within so many steps, over all seeds.
const FOUND_WITHIN: u64 = 100_000;

/// The same of bugs of nodes: within so many seeds.
const FOUND_BY_SEEDS: u64 = 10;

/// Violations that are written down.
const MAX_VIOLATIONS: usize = 100;

/// What a seed does: a leader, or many nodes.
#[derive(Clone, Copy)]
enum Run {
    Leader(SeedRun),
    Nodes(NodesRun),
}

impl Run {
    fn of(options: &Options, seed: u64, planted: Option<Planted>) -> Self {
        let Options { steps, trace, .. } = *options;
        match options.nodes {
            Some(nodes) => Self::Nodes(NodesRun { seed, nodes, seconds: steps, planted, trace }),
            None => Self::Leader(SeedRun { seed, steps, planted, trace }),
        }
    }

    fn seed(&self) -> u64 {
        match self {
            Self::Leader(run) => run.seed,
            Self::Nodes(run) => run.seed,
        }
    }
}

/// Runs a seed on a new thread that draws nothing from the system.
fn run(run: Run) -> Outcome {
    let seed = run.seed();
    let begin = move || {
        entropy::seed(seed);
        match run {
            Run::Leader(run) => run.run(),
            Run::Nodes(run) => {
                let (outcome, counts) = run.run();
                if run.planted.is_none() {
                    say(seed, &counts);
                }
                outcome
            }
        }
    };
    let thread = std::thread::Builder::new().stack_size(8 << 20).spawn(begin);
    let ended = thread.map(std::thread::JoinHandle::join);
    match ended {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => broken(seed, "the simulator panicked"),
        Err(error) => broken(seed, &format!("no thread: {error}")),
    }
}

/// What happened among nodes.
fn say(seed: u64, counts: &Counts) {
    let Counts { messages, computed, found, leases, blocks, lapsed, damaged, failed, .. } = *counts;
    let Counts { events, starts, kills, stops, replaced, cuts, server_losses, .. } = *counts;
    eprintln!(
        "seed {seed}: {events} events, {messages} messages; {computed} blocks computed, {found} look-ups found some, \
         {leases} leases, {blocks} blocks served; reads: {lapsed} after their lease, {damaged} with wrong bits, \
         {failed} failed or late; {starts} starts, {kills} kills, {stops} stops ({replaced} replaced), {cuts} cuts, \
         {server_losses} losses of the server"
    );
}

fn broken(seed: u64, what: &str) -> Outcome {
    Outcome { seed, steps: 0, violation: Some(what.to_owned()), digest: 0 }
}

/// The same, twice where that is due.
fn run_checked(wanted: Run) -> Outcome {
    let mut outcome = run(wanted);
    if wanted.seed().is_multiple_of(TWICE) && outcome.violation.is_none() {
        let again = run(wanted);
        if again != outcome {
            outcome.violation = Some(format!("two runs differ: {:x} and {:x}", outcome.digest, again.digest));
        }
    }
    outcome
}

struct Totals {
    seeds: u64,
    steps: u64,
    violations: Vec<Outcome>,
}

/// Runs all seeds, or as many as there is time for.
fn run_all(options: &Options, planted: Option<Planted>) -> Totals {
    let next = AtomicU64::new(options.first);
    let totals = Mutex::new(Totals { seeds: 0, steps: 0, violations: Vec::new() });
    let begun = Instant::now();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_late = options.time.is_some_and(|time| begun.elapsed() >= time);
            if is_late || seed.wrapping_sub(options.first) >= options.seeds {
                return;
            }
            let outcome = run_checked(Run::of(options, seed, planted));
            let Ok(mut totals) = totals.lock() else { return };
            (totals.seeds, totals.steps) = (totals.seeds + 1, totals.steps + outcome.steps);
            if let Some(violation) = &outcome.violation {
                eprintln!("seed {seed}, step {}: {violation}", outcome.steps);
                if totals.violations.len() < MAX_VIOLATIONS {
                    totals.violations.push(outcome);
                }
            }
        }
    };
    std::thread::scope(|threads| {
        for _ in 0..options.jobs {
            threads.spawn(work);
        }
    });
    totals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The first seed, from 1 on, that finds a planted bug, and the steps until then over all seeds.
fn find(planted: Planted, options: &Options) -> Option<(Outcome, u64)> {
    let mut steps = 0;
    for seed in 1.. {
        let outcome = run(Run::of(options, seed, Some(planted)));
        steps += outcome.steps;
        if outcome.violation.is_some() {
            return Some((outcome, steps));
        }
        let is_enough = if options.nodes.is_some() { seed >= FOUND_BY_SEEDS } else { steps >= FOUND_WITHIN };
        if is_enough {
            return None;
        }
    }
    None
}

/// What may be planted.
fn bugs(options: &Options) -> &'static [Planted] {
    if options.nodes.is_some() { &Planted::OF_NODES } else { &Planted::OF_LEADER }
}

/// Looks for every planted bug. One entry for each.
fn find_all(options: &Options) -> Vec<(Planted, Option<(Outcome, u64)>)> {
    let found = Mutex::new(Vec::new());
    let next = AtomicU64::new(0);
    std::thread::scope(|threads| {
        for _ in 0..options.jobs {
            threads.spawn(|| {
                while let Some(&planted) = bugs(options).get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let result = find(planted, options);
                    match &result {
                        Some((outcome, steps)) => eprintln!(
                            "{planted:?}: found by seed {} after {steps} steps: {}",
                            outcome.seed,
                            outcome.violation.as_deref().unwrap_or_default()
                        ),
                        None => eprintln!("{planted:?}: NOT FOUND"),
                    }
                    if let Ok(mut found) = found.lock() {
                        found.push((planted, result));
                    }
                }
            });
        }
    });
    found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn write(file: Option<&Path>, report: &Value) -> Result<(), String> {
    let text = serde_json::to_string_pretty(report).map_err(|error| error.to_string())? + "\n";
    match file {
        Some(file) if file != Path::new("-") => {
            std::fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
        }
        _ => {
            print!("{text}");
            Ok(())
        }
    }
}

pub(crate) fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let by_name = |name: &String| bugs(&options).iter().copied().find(|bug| format!("{bug:?}") == *name);
    let planted = options.plant.as_ref().map(|name| by_name(name).ok_or(name)).transpose();
    let planted = match planted {
        Ok(planted) => planted,
        Err(name) => {
            eprintln!("error: --plant {name}: expected one of {:?}", bugs(&options));
            return ExitCode::from(2);
        }
    };
    note_panics();
    let begun = Instant::now();
    let totals = run_all(&options, planted);
    let found = if options.mutants { find_all(&options) } else { Vec::new() };
    let missed = found.iter().filter(|(_, found)| found.is_none()).count();
    let violations: Vec<Value> = totals
        .violations
        .iter()
        .map(|outcome| json!({ "seed": outcome.seed, "step": outcome.steps, "rule": outcome.violation }))
        .collect();
    let found: Vec<Value> = found
        .iter()
        .map(|(planted, found)| match found {
            Some((outcome, steps)) => json!({
                "bug": format!("{planted:?}"), "seed": outcome.seed, "step": outcome.steps, "steps": steps,
                "rule": outcome.violation,
            }),
            None => json!({ "bug": format!("{planted:?}"), "seed": null }),
        })
        .collect();
    let report = json!({
        "seeds": totals.seeds, "first_seed": options.first, "steps": totals.steps,
        "violations": violations, "planted_found": found,
        "wall_s": begun.elapsed().as_secs_f64(),
    });
    if let Err(error) = write(options.json.as_deref(), &report) {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let is_good = missed == 0 && (totals.violations.is_empty() || planted.is_some());
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
