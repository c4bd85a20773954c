//! The product as a user runs it: `cargo run --release -- ...`, its exit status and its JSON.

use crate::steps::Outcome;
use crate::workspace::{Workspace, cargo, output_of};
use anyhow::Context;
use serde_json::Value;

/// One command: its arguments, and what must hold of the JSON that it prints.
struct Run {
    args: &'static [&'static str],
    holds: fn(&Value) -> anyhow::Result<()>,
}

/// Small enough to run on every change; the figures of a release are measured elsewhere.
const RUNS: &[Run] = &[];

/// Runs every command and checks what it prints.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    if RUNS.is_empty() {
        return Outcome::Skipped("no command is listed in xtask/src/smoke.rs".into());
    }
    RUNS.iter().try_for_each(|run| run_one(workspace, run)).into()
}

fn run_one(workspace: &Workspace, run: &Run) -> anyhow::Result<()> {
    let line = format!("kvbm {}", run.args.join(" "));
    println!("{line}");
    let mut command = cargo(&workspace.root);
    command.args(["run", "--quiet", "--release", "--"]).args(run.args);
    let printed = output_of(&mut command)?;
    let json: Value =
        serde_json::from_str(&printed).with_context(|| format!("`{line}` printed no JSON:\n{printed}"))?;
    (run.holds)(&json).with_context(|| format!("`{line}` printed {json:#}"))
}
