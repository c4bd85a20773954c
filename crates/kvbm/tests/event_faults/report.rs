//! What the runs came to.

use crate::run::{Mode, Outcome};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Default)]
pub(crate) struct Report {
    rows: BTreeMap<&'static str, Row>,
    /// Runs that ended with an index that is not right, and why.
    pub(crate) failed: Vec<String>,
}

#[derive(Default)]
struct Row {
    runs: u64,
    equal: u64,
    slowest: Duration,
    events: u64,
    gaps: u64,
    missing: u64,
    resyncs: u64,
    source_restarts: u64,
    blocks: u64,
    on_volumes: u64,
    faults: BTreeMap<&'static str, u64>,
}

impl Report {
    pub(crate) fn add(&mut self, outcome: Outcome) {
        let row = self.rows.entry(outcome.mode.name()).or_default();
        row.runs += 1;
        row.equal += u64::from(outcome.wrong.is_none());
        row.slowest = row.slowest.max(outcome.took);
        row.events += outcome.tracker.events;
        row.gaps += outcome.follow.gaps;
        row.missing += outcome.tracker.missing;
        row.resyncs += outcome.follow.resyncs;
        row.source_restarts += outcome.follow.restarts;
        row.blocks += outcome.blocks;
        row.on_volumes += outcome.on_volumes;
        for (fault, times) in outcome.faults {
            *row.faults.entry(fault).or_default() += times;
        }
        let within = Duration::from_millis(crate::number("KVBM_FAULT_WITHIN_MS", 60_000));
        if outcome.mode == Mode::Core && outcome.took > within {
            self.failed.push(format!("{}: right only after {:?}", outcome.name, outcome.took));
        }
        self.failed.extend(outcome.wrong.map(|wrong| format!("{}: {wrong}", outcome.name)));
    }

    pub(crate) fn merge(&mut self, other: Self) {
        for (name, row) in other.rows {
            let sum = self.rows.entry(name).or_default();
            sum.runs += row.runs;
            sum.equal += row.equal;
            sum.slowest = sum.slowest.max(row.slowest);
            sum.events += row.events;
            sum.gaps += row.gaps;
            sum.missing += row.missing;
            sum.resyncs += row.resyncs;
            sum.source_restarts += row.source_restarts;
            sum.blocks += row.blocks;
            sum.on_volumes += row.on_volumes;
            for (fault, times) in row.faults {
                *sum.faults.entry(fault).or_default() += times;
            }
        }
        self.failed.extend(other.failed);
    }

    pub(crate) fn runs(&self, mode: Mode) -> u64 {
        self.rows.get(mode.name()).map_or(0, |row| row.runs)
    }

    /// Blocks on volumes that were compared.
    pub(crate) fn on_volumes(&self) -> u64 {
        self.rows.values().map(|row| row.on_volumes).sum()
    }

    pub(crate) fn resyncs(&self, mode: Mode) -> u64 {
        self.rows.get(mode.name()).map_or(0, |row| row.resyncs)
    }

    /// Prints the rows, and writes them to a file where one is named.
    pub(crate) fn print(&self, part: &str, rounds: u64) {
        for (name, row) in &self.rows {
            println!(
                "{part}: {name}: equal after {} of {} runs, right within {:?}; {} events, {} gaps, {} snapshots",
                row.equal, row.runs, row.slowest, row.events, row.gaps, row.resyncs
            );
        }
        write(part, &self.json(rounds));
    }

    fn json(&self, rounds: u64) -> Value {
        let row = |(name, row): (&&str, &Row)| {
            json!({
                "name": name,
                "runs": row.runs,
                "equal": row.equal,
                "slowest_right_s": row.slowest.as_secs_f64(),
                "events": row.events,
                "blocks_compared": row.blocks,
                "of_these_on_volumes": row.on_volumes,
                "gaps": row.gaps,
                "events_missing": row.missing,
                "resyncs": row.resyncs,
                "source_restarts": row.source_restarts,
                "faults": row.faults,
            })
        };
        json!({
            "rounds": rounds,
            "passed": self.failed.is_empty(),
            "failed": self.failed,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

/// A part that this system does not permit.
pub(crate) fn skipped(part: &str, reason: &str) {
    write(part, &json!({ "skipped": reason }));
}

/// Each part of the report is a file of its own beside the one that is named.
fn write(part: &str, json: &Value) {
    if let Some(file) = std::env::var_os("KVBM_FAULT_JSON") {
        let file = std::path::PathBuf::from(file).with_extension(format!("{part}.json"));
        std::fs::write(file, format!("{json:#}\n")).unwrap();
    }
}
