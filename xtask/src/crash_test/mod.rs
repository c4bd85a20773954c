//! `cargo xtask crash-test`: nothing that was acknowledged as durable is lost, nothing corrupt is served.
//!
//! The work is done by `crates/kvbm-disk/examples/crash`; this builds it, gives it folders and adds up what it says.

use crate::steps::Outcome;
use crate::workspace::{Workspace, cargo, succeed};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How long an opening may take, in milliseconds: what `crash-test` holds it to, and what the step of `cargo xtask test` does, which
/// says nothing about the speed of a machine that it shares.
const OPEN_WITHIN_MS: u32 = 2000;
const OPEN_WITHIN_MS_OF_STEP: u32 = 60_000;
/// Rounds of the step of `cargo xtask test`.
const FEW: u64 = 10;
const DEFAULT_ROUNDS: u64 = 200;
/// Seeds of each simulation for each round, and rounds for each one with a real file system that is shut down.
const SEEDS: u64 = 20;
const POWER_SHARE: u64 = 10;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    rounds: u64,
    seed: u64,
    json: Option<PathBuf>,
}

impl Options {
    /// Reads `[--rounds N] [--seed N] [--json FILE]`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { rounds: DEFAULT_ROUNDS, seed: 1, json: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
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
    let report = crash(&Workspace::load()?, options.rounds, options.seed, OPEN_WITHIN_MS)?;
    let text = serde_json::to_string_pretty(&report)?;
    match &options.json {
        Some(file) if file != Path::new("-") => {
            std::fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
        }
        _ => println!("{text}"),
    }
    Ok(report["passed"] == true)
}

/// A few rounds, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let outcome = crash(workspace, FEW, 1, OPEN_WITHIN_MS_OF_STEP).and_then(|report| {
        ensure!(report["passed"] == true, "{report:#}");
        Ok(())
    });
    outcome.into()
}

fn crash(workspace: &Workspace, rounds: u64, seed: u64, open_within_ms: u32) -> anyhow::Result<Value> {
    let mut build = cargo(&workspace.root);
    succeed(build.args(["build", "--quiet", "--release", "-p", "kvbm-disk", "--example", "crash"]))?;
    let program = workspace.target.join("release").join("examples").join("crash");
    let dir = workspace.target.join("crash-test");
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot empty {}", dir.display()))?;
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let power_rounds = rounds.div_ceil(POWER_SHARE).to_string();
    let (rounds, seeds, seed) = (rounds.to_string(), (rounds * SEEDS).to_string(), seed.to_string());
    let shown = dir.to_string_lossy();
    let part = |args: &[&str]| {
        part(Command::new(&program).env("KVBM_CRASH_OPEN_WITHIN_MS", open_within_ms.to_string()), args)
    };
    let kill_dir = dir.join("g3");
    let (killed, kill) = part(&["kill", &rounds, &kill_dir.to_string_lossy(), &seed])?;
    let (lost_power, power) = part(&["power", &power_rounds, &shown, &seed])?;
    let (simulated, simulation) = part(&["simulate", &seeds, &seed])?;
    let (weathered, turmoil) = part(&["turmoil", &seeds, &seed])?;
    std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    match power["skipped"].as_str() {
        Some(why) => println!("the rounds with a file system that is shut down are SKIPPED: {why}"),
        None => println!("ext4 on a loop device was shut down without a sync {} times", power["rounds"]),
    }
    let sum = |field: &str| [&kill, &power].iter().filter_map(|part| part[field].as_u64()).sum::<u64>();
    let slowest =
        [&kill, &power].iter().filter_map(|part| part["slowest_open_s"].as_f64()).fold(0.0, f64::max);
    Ok(json!({
        "rounds": kill["rounds"],
        "passed": killed && lost_power && simulated && weathered,
        "acknowledged": sum("acknowledged"),
        "lost": sum("lost"),
        "corrupt_served": sum("corrupt_served"),
        "slowest_open_s": slowest,
        "kill_9": kill,
        "power_loss": power,
        "simulation": simulation,
        "turmoil_fs": turmoil,
    }))
}

/// Runs a part: whether it passed, and what it says.
fn part(program: &mut Command, args: &[&str]) -> anyhow::Result<(bool, Value)> {
    println!("crash {}", args.join(" "));
    let output = program
        .args(args)
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.get_program().display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or("null");
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
        assert_eq!(parse("").unwrap(), Options { rounds: DEFAULT_ROUNDS, seed: 1, json: None });
        let options = parse("--rounds 5 --json r.json --seed 9").unwrap();
        assert_eq!((options.rounds, options.seed, options.json), (5, 9, Some("r.json".into())));
        assert!(parse("--rounds").unwrap_err().contains("needs a value"));
        assert!(parse("--rounds 0").unwrap_err().contains("1 to 30000"));
        assert!(parse("--rounds many").unwrap_err().contains("expected a number"));
        assert!(parse("--fast 1").unwrap_err().contains("unknown argument"));
    }
}
