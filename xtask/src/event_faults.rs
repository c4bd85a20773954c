//! `cargo xtask event-faults`: random kills, partitions, stalls and restarts under block managers
//! that publish; the index of a follower equals their pools after each.
//!
//! The work is done by `crates/kvbm/tests/event_faults`; this gives it a server and adds up what it
//! says.

use crate::json_report;
use crate::round_options::RoundOptions;
use crate::servers::nats_server;
use crate::test::workspace_tests;
use crate::workspace::{Workspace, succeed};
use anyhow::Context;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// How long snapshots over core NATS may take to set the index right when the last fault is over,
/// in milliseconds.
const WITHIN_MS: &str = "5000";

/// Parts of the report: runs with proxies between all ends, runs over a link to a network
/// namespace, and runs whose publishers are processes that are killed.
const PARTS: [&str; 3] = ["faults", "namespace", "killed"];

/// Runs them; whether the index was right after every one.
pub(crate) fn run(options: &RoundOptions) -> anyhow::Result<bool> {
    let workspace = Workspace::load()?;
    let server = nats_server(&workspace).context("there is no nats-server")?;
    let parts = workspace.target.join("event-faults.json");
    for part in PARTS {
        // Of an earlier call, which this one must not be taken for.
        let _ = std::fs::remove_file(part_of(&parts, part));
    }
    let mut tests = workspace_tests(&workspace);
    tests.args(["--test", "event_faults"]);
    tests.args(["--", "--nocapture", "--test-threads", "1"]);
    tests.env("KVBM_NATS_SERVER", server).env("KVBM_FAULT_WITHIN_MS", WITHIN_MS);
    tests.env("KVBM_FAULT_ROUNDS", options.rounds.to_string());
    tests.env("KVBM_FAULT_SEED", options.seed.to_string()).env("KVBM_FAULT_JSON", &parts);
    let ended = succeed(&mut tests);
    let report = report(options, &parts, ended.is_ok());
    json_report::deliver(options.json.as_deref(), &report)?;
    ended.map(|()| true)
}

fn part_of(parts: &Path, part: &str) -> PathBuf {
    parts.with_extension(format!("{part}.json"))
}

fn report(options: &RoundOptions, parts: &Path, passed: bool) -> Value {
    let read = |part| {
        let text = std::fs::read_to_string(part_of(parts, part)).ok()?;
        serde_json::from_str::<Value>(&text).ok()
    };
    let [faults, namespace, killed] = PARTS.map(read);
    json!({
        "rounds": options.rounds,
        "seed": options.seed,
        "passed": passed && faults.is_some(),
        "rows": faults.as_ref().map_or(Value::Null, |part| part["rows"].clone()),
        "failed": faults.as_ref().map_or(Value::Null, |part| part["failed"].clone()),
        "network_namespace": namespace,
        "killed_publishers": killed,
    })
}
