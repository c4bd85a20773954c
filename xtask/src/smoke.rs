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
const RUNS: &[Run] = &[
    Run {
        args: &["replay", "--synthetic", "400", "--capacity", "400,1200,8000", "--json", "-"],
        holds: every_tier_serves,
    },
    Run {
        args: &[
            "replay",
            "--synthetic",
            "400",
            "--capacity",
            "400,1200,8000",
            "--concurrency",
            "4",
            "--offload",
            "drop",
            "--json",
            "-",
        ],
        // How many offloads keep up is the machine's business.
        holds: nothing_is_wrong,
    },
    Run {
        args: &[
            "replay",
            "--synthetic",
            "3000",
            "--capacity",
            "2000,6000,20000",
            "--metadata-only",
            "--json",
            "-",
        ],
        holds: half_is_found,
    },
    Run { args: &["doctor", "--json", "-"], holds: |json| ensure(!json.is_null(), "findings") },
];

fn hits(json: &Value) -> anyhow::Result<[u64; 3]> {
    let [g1, g2, g3] = ["g1", "g2", "g3"].map(|tier| count(&json["hits"][tier]));
    Ok([g1?, g2?, g3?])
}

fn nothing_is_wrong(json: &Value) -> anyhow::Result<()> {
    for nothing in ["corrupt_blocks", "failed_transfers"] {
        ensure(count(&json[nothing])? == 0, nothing)?;
    }
    ensure(count(&json["verified_blocks"])? == hits(json)?.iter().sum::<u64>(), "every hit verified")
}

fn every_tier_serves(json: &Value) -> anyhow::Result<()> {
    nothing_is_wrong(json)?;
    ensure(!hits(json)?.contains(&0), "hits on every tier")
}

fn half_is_found(json: &Value) -> anyhow::Result<()> {
    ensure(json["hit_ratio"].as_f64().is_some_and(|ratio| ratio > 0.5), "hit_ratio above 0.5")
}

fn count(value: &Value) -> anyhow::Result<u64> {
    value.as_u64().with_context(|| format!("{value} is not a count"))
}

fn ensure(holds: bool, what: &str) -> anyhow::Result<()> {
    anyhow::ensure!(holds, "expected: {what}");
    Ok(())
}

/// Runs every command and checks what it prints.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
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
