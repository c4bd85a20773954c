//! `cargo xtask crash-test`: nothing that was acknowledged as durable is lost, nothing corrupt is
//! served.
//!
//! The work is done by `crates/kvbm-disk/examples/crash`; this builds it, gives it folders and adds
//! up what it says.

mod floors;

use crate::json_report;
use crate::steps::Outcome;
use crate::workspace::{Profile, Workspace, compile};
use anyhow::Context;
use floors::Floor;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How long an opening may take, in milliseconds: what `crash-test` holds it to, and what the step
/// of `cargo xtask test` does, which says nothing about the speed of a machine that it shares.
const OPEN_WITHIN_MS: u32 = 2000;
const OPEN_WITHIN_MS_OF_STEP: u32 = 60_000;
/// Rounds of the step of `cargo xtask test`.
const FEW: u64 = 10;
const DEFAULT_ROUNDS: u64 = 200;
/// Seeds of each simulation for each round, and rounds for each one with a real file system that is
/// shut down.
const SEEDS: u64 = 20;
const POWER_SHARE: u64 = 10;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    rounds: u64,
    seed: u64,
    json: Option<PathBuf>,
    /// A part that the machine cannot run is a failure.
    require_all: bool,
}

impl Options {
    /// Reads `[--rounds N] [--seed N] [--json FILE] [--require-all]`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { rounds: DEFAULT_ROUNDS, seed: 1, json: None, require_all: false };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            if name == "--require-all" {
                options.require_all = true;
                continue;
            }
            let value = args.next().ok_or_else(|| format!("`{name}` of `crash-test` needs a value"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{name} {value}: expected a number"));
            match name.as_str() {
                "--rounds" => options.rounds = number()?,
                "--seed" => options.seed = number()?,
                "--json" => options.json = Some(value.into()),
                other => return Err(format!("unknown argument `{other}` of `crash-test`")),
            }
        }
        // Numbers of blocks count the rounds.
        if !(1..=30_000).contains(&options.rounds) {
            return Err(format!("--rounds {}: expected 1 to 30000", options.rounds));
        }
        Ok(options)
    }
}

/// Runs it; whether all rounds passed.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let run = crash(&Workspace::load()?, Profile::Release, options.rounds, options.seed, OPEN_WITHIN_MS)?;
    let faults = run.faults(options.require_all);
    json_report::deliver(options.json.as_deref(), &run.report(&faults))?;
    for fault in &faults {
        eprintln!("{fault}");
    }
    Ok(faults.is_empty())
}

/// A few rounds, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let run = match crash(workspace, Profile::Dev, FEW, 1, OPEN_WITHIN_MS_OF_STEP) {
        Ok(run) => run,
        Err(error) => return Err(error).into(),
    };
    let faults = run.faults(false);
    if !faults.is_empty() {
        let why = format!("{}\n{:#}", faults.join("\n"), run.report(&faults));
        return Outcome::Failed { why, tests: 0, failed: 0 };
    }
    match run.skipped().join("; ") {
        none if none.is_empty() => Outcome::Passed { tests: 0 },
        skipped => Outcome::Passed { tests: 0 }.and(Outcome::Skipped(skipped)),
    }
}

/// A part that is over.
struct Part {
    name: &'static str,
    /// It lost nothing and served nothing wrong.
    passed: bool,
    report: Value,
    floors: Vec<Floor>,
}

/// All parts.
struct Run {
    parts: Vec<Part>,
}

impl Part {
    /// Why it was not run, if the machine cannot.
    fn skipped(&self) -> Option<&str> {
        self.report["skipped"].as_str()
    }

    fn faults(&self) -> Vec<String> {
        let failed = (!self.passed).then(|| format!("{} failed: {}", self.name, self.report));
        let missed = match self.skipped() {
            Some(_) => Vec::new(),
            None => floors::missed(self.name, &self.report, &self.floors),
        };
        failed.into_iter().chain(missed).collect()
    }
}

impl Run {
    /// Parts that were not run, and why.
    fn skipped(&self) -> Vec<String> {
        let skipped = |part: &Part| Some(format!("{}: {}", part.name, part.skipped()?));
        self.parts.iter().filter_map(skipped).collect()
    }

    /// All that keeps it from having passed.
    fn faults(&self, require_all: bool) -> Vec<String> {
        let mut faults: Vec<String> = self.parts.iter().flat_map(Part::faults).collect();
        if require_all {
            let unwanted = |why| format!("--require-all, and this machine cannot run {why}");
            faults.extend(self.skipped().into_iter().map(unwanted));
        }
        faults
    }

    fn report(&self, faults: &[String]) -> Value {
        let numbers = |field: &str| -> Vec<&Value> {
            self.parts
                .iter()
                .filter(|part| part.report["rounds"].is_u64())
                .map(|part| &part.report[field])
                .collect()
        };
        let sum = |field: &str| numbers(field).into_iter().filter_map(Value::as_u64).sum::<u64>();
        let slowest = numbers("slowest_open_s").into_iter().filter_map(Value::as_f64).fold(0.0, f64::max);
        let mut report = json!({
            "rounds": self.parts.first().map(|part| &part.report["rounds"]),
            "passed": faults.is_empty(),
            "faults": faults,
            "skipped": self.skipped(),
            "acknowledged": sum("acknowledged"),
            "lost": sum("lost"),
            "corrupt_served": sum("corrupt_served"),
            "slowest_open_s": slowest,
        });
        for part in &self.parts {
            report[part.name] = part.report.clone();
        }
        report
    }
}

fn crash(
    workspace: &Workspace,
    profile: Profile,
    rounds: u64,
    seed: u64,
    open_within_ms: u32,
) -> anyhow::Result<Run> {
    let program = compile(workspace, profile, &["--example", "crash"])?.join("examples").join("crash");
    let dir = workspace.target.join("crash-test");
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot empty {}", dir.display()))?;
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let part = |name, what: &str, times: u64, place: Option<&Path>, floors| {
        println!("crash {what} {times}");
        let mut command = Command::new(&program);
        command.env("KVBM_CRASH_OPEN_WITHIN_MS", open_within_ms.to_string());
        let (passed, report) =
            say(command.args([what, &times.to_string()]).args(place).arg(seed.to_string()))?;
        anyhow::Ok(Part { name, passed, report, floors })
    };
    let (powers, seeds) = (rounds.div_ceil(POWER_SHARE), rounds * SEEDS);
    let parts = vec![
        part("kill_9", "kill", rounds, Some(&dir.join("g3")), floors::of_kills(rounds))?,
        part("power_loss", "power", powers, Some(&dir), floors::of_kills(powers))?,
        part("simulation", "simulate", seeds, None, floors::of_simulation(seeds))?,
        part("turmoil_fs", "turmoil", seeds, None, floors::of_power_failures(seeds))?,
    ];
    std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    let run = Run { parts };
    for why in run.skipped() {
        println!("SKIPPED {why}");
    }
    Ok(run)
}

/// Runs the program: whether it passed, and what it says.
fn say(program: &mut Command) -> anyhow::Result<(bool, Value)> {
    let output = program
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.get_program().display()))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let last = stdout.lines().last().unwrap_or("null");
    let report = serde_json::from_str(last).unwrap_or_else(|_| json!({ "ended": output.status.to_string() }));
    Ok((output.status.success(), report))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_have_defaults_and_bounds() {
        assert_eq!(
            parse("").unwrap(),
            Options { rounds: DEFAULT_ROUNDS, seed: 1, json: None, require_all: false }
        );
        let options = parse("--rounds 5 --json r.json --require-all --seed 9").unwrap();
        assert!(options.require_all);
        assert_eq!((options.rounds, options.seed, options.json), (5, 9, Some("r.json".into())));
        assert!(parse("--rounds").unwrap_err().contains("needs a value"));
        assert!(parse("--rounds 0").unwrap_err().contains("1 to 30000"));
        assert!(parse("--rounds many").unwrap_err().contains("expected a number"));
        assert!(parse("--fast 1").unwrap_err().contains("unknown argument"));
    }

    #[test]
    fn what_a_machine_cannot_run_is_named_and_may_be_demanded() {
        let part = |report| Part { name: "power_loss", passed: true, report, floors: floors::of_kills(1) };
        let skipped = Run { parts: vec![part(json!({ "skipped": "mount: permission denied" }))] };
        assert_eq!(skipped.skipped(), ["power_loss: mount: permission denied"]);
        assert_eq!(skipped.faults(false), [""; 0]);
        let faults = skipped.faults(true);
        assert_eq!(faults.len(), 1);
        assert!(faults[0].contains("--require-all") && faults[0].contains("permission denied"), "{faults:?}");
        let report = skipped.report(&faults);
        assert_eq!((&report["passed"], &report["skipped"]), (&false.into(), &json!(skipped.skipped())));

        let nothing = json!({ "rounds": 1, "met_a_writer": 1, "ready": 1, "flushed": 0, "flushes": 0, "acknowledged": 0 });
        let weak = Run { parts: vec![part(nothing)] };
        assert_eq!(weak.faults(false).len(), 4, "{:?}", weak.faults(false));
        assert_eq!(weak.report(&weak.faults(false))["passed"], false);
    }
}
