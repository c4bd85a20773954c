//! A step that runs beside others: in a process of its own, whose output is shown when it ends.

use crate::steps::{Ended, Outcome};
use crate::workspace::Workspace;
use anyhow::Context;
use std::fs::{self, File};
use std::process::Command;
use std::time::Instant;

/// Runs `xtask test --only NAME` with further arguments.
pub(crate) fn run(workspace: &Workspace, name: &'static str, arguments: &[&str]) -> Ended {
    let start = Instant::now();
    let (outcome, output) = match output_of(workspace, name, arguments) {
        Ok((passed, output)) => (outcome(name, passed, &output), output),
        Err(error) => (Err(error).into(), String::new()),
    };
    Ended { name, outcome, took: start.elapsed(), output }
}

/// Whether the step passed, and what it printed.
fn output_of(workspace: &Workspace, name: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    // The path that this program was started by: a build may have replaced the file since.
    let program = std::env::args_os().next().context("this program has no name")?;
    let path = workspace.target.join(format!("step-{name}.log"));
    let log = File::create(&path).with_context(|| format!("{} cannot be created", path.display()))?;
    let errors = log.try_clone().context("the step's output cannot be shared")?;
    let mut step = Command::new(program);
    step.args(["test", "--only", name]).args(arguments).stdout(log).stderr(errors);
    let status = step.status().with_context(|| format!("the step `{name}` cannot be started"))?;
    let output = fs::read(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    Ok((status.success(), String::from_utf8_lossy(&output).into_owned()))
}

/// The outcome of a step, from the summary behind its output.
fn outcome(name: &str, passed: bool, output: &str) -> Outcome {
    let last = output.lines().next_back().unwrap_or_default();
    let count = |word: &str| {
        let before = last.split(", ").find_map(|part| part.strip_suffix(word))?;
        before.trim().parse::<u64>().ok()
    };
    let tests = count("passed").unwrap_or(0);
    if !passed {
        let prefix = format!("{name}: ");
        let why: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let why = if why.is_empty() { "it ended without a summary".to_owned() } else { why.join("\n") };
        return Outcome::Failed { why, tests, failed: count("failed").unwrap_or(1) };
    }
    let skipped = output.lines().rev().find_map(|line| line.strip_prefix(name)?.split_once("SKIPPED: "));
    match skipped {
        Some((_, why)) => Outcome::Skipped(why.to_owned()),
        None => Outcome::Passed { tests },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_of_a_step_is_read() {
        let good = "noise\nengine           7.0 s  ok, 40 tests\n\n40 passed, 0 failed";
        assert_eq!(outcome("engine", true, good), Outcome::Passed { tests: 40 });
        let skipped = "engine           0.0 s  SKIPPED: no Python\n\n0 passed, 0 failed, skipped: engine";
        assert_eq!(outcome("engine", true, skipped), Outcome::Skipped("no Python".into()));
        let bad = "engine           7.0 s  FAILED\n\nengine: two tests\n\n5 passed, 2 failed";
        let failed = Outcome::Failed { why: "two tests".into(), tests: 5, failed: 2 };
        assert_eq!(outcome("engine", false, bad), failed);
        let killed = Outcome::Failed { why: "it ended without a summary".into(), tests: 0, failed: 1 };
        assert_eq!(outcome("engine", false, "noise"), killed);
    }
}
