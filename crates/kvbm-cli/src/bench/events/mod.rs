//! `kvbm bench events`: from the pool to a follower's index over each transport, and what events
//! cost the pool.
//!
//! A block manager registers and evicts blocks; its publisher reads the ring, encodes and
//! publishes; a follower in the same process receives, decodes and indexes. NATS is a real server,
//! a process of its own. At the end of every run the follower's index is compared with the manager:
//! a run that lost anything is no result.

mod cost;
mod pipeline;
mod server;
mod token_notes;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use super::Rows;
use crate::args::Output;
use crate::human;
use crate::number::whole;
use crate::progress::Progress;
use crate::table::Table;
use pipeline::PipelineRun;
use server::Server;

/// Options of `kvbm bench events`.
#[derive(Clone, Debug, Args)]
pub struct EventsArgs {
    /// Events of a run, 100,000 to 100,000,000.
    #[arg(long, value_name = "N", default_value_t = 4_000_000, allow_negative_numbers = true, value_parser = whole::<u32>(100_000..=100_000_000))]
    pub events: u32,

    /// Runs of each transport; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// The program `nats-server` [default: `KVBM_NATS_SERVER`, then PATH, then what `cargo xtask
    /// test --only test` has fetched].
    #[arg(long, value_name = "FILE")]
    pub nats_server: Option<PathBuf>,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One figure. What does not apply to it is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// `nats_core`, `jetstream_file`, `zmq`, `publisher_cost`, `noting_cost` or `noting_cost_vllm`.
    pub name: &'static str,
    /// Events per second from the pool into the follower's index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_per_s: Option<f64>,
    /// Encoded bytes of an event, its share of the batch included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_event: Option<f64>,
    /// Events of a batch, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_per_batch: Option<f64>,
    /// Events of a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<u64>,
    /// Time of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Events that the follower did not get.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<u64>,
    /// Blocks in the index at the end, the same as in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_blocks: Option<u64>,
    /// Time that an event costs whoever registers or evicts a block; of noting, what the block's
    /// tokens cost whoever commits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ns_per_event: Option<f64>,
    /// Why there is no figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Room for an event in a stream: more than it takes there, its share of the batch included.
const KEPT_BYTES: u64 = 100;

/// A transport's row, and how to reach it.
struct Case {
    name: &'static str,
    nats: bool,
    /// Of the server, where there is one, for so many events.
    url: fn(port: u16, events: u64) -> String,
}

const CASES: &[Case] = &[
    Case {
        name: "nats_core",
        nats: true,
        url: |port, _| format!("nats://127.0.0.1:{port}?subject=kvbm.bench"),
    },
    Case {
        name: "jetstream_file",
        nats: true,
        url: |port, events| {
            // The server reserves as much of its disk, and takes no stream that it has no room for.
            let room = events * KEPT_BYTES;
            format!("jetstream+nats://127.0.0.1:{port}?stream=kvbm-bench&storage=file&max_bytes={room}")
        },
    },
    Case { name: "zmq", nats: false, url: |_, _| "zmq+tcp://127.0.0.1:*?topic=kvbm-bench".into() },
];

/// Measures, and says what was found.
pub fn run(args: &EventsArgs) -> Result<Rows> {
    crate::features::require_transports("kvbm bench events")?;
    let program = server::find(args.nats_server.as_deref());
    let progress = Progress::new("runs", u64::from(args.rounds) * (CASES.len() as u64 + 2));
    let mut rows: Vec<Row> = CASES.iter().map(|case| transport(args, case, &program, &progress)).collect();
    rows.push(Row {
        name: "publisher_cost",
        ns_per_event: Some(cost::measure(args.rounds, &progress)?),
        ..Row::default()
    });
    let noting = token_notes::measure(args.rounds, &progress)?;
    for (name, cost) in ["noting_cost", "noting_cost_vllm"].into_iter().zip(noting) {
        rows.push(Row { name, ns_per_event: Some(cost), ..Row::default() });
    }
    progress.finish();
    let failed: Vec<String> =
        rows.iter().filter_map(|row| Some(format!("{}: {}", row.name, row.error.as_ref()?))).collect();
    let rows = Rows::new(&rows, table(&rows))?;
    Ok(if failed.is_empty() { rows } else { rows.but_failed(failed.join("; ")) })
}

/// The median of the rounds.
fn transport(args: &EventsArgs, case: &Case, program: &Result<PathBuf>, progress: &Progress) -> Row {
    let mut runs = Vec::new();
    for _ in 0..args.rounds {
        match one(case, program, u64::from(args.events)) {
            Ok(run) => runs.push(run),
            Err(error) => {
                return Row { name: case.name, error: Some(format!("{error:#}")), ..Row::default() };
            }
        }
        progress.advance(1);
    }
    runs.sort_by_key(|run| run.wall);
    row(case.name, &runs[runs.len() / 2])
}

/// One run, with a server of its own where it needs one: what a run leaves on the disk goes before
/// the next one.
fn one(case: &Case, program: &Result<PathBuf>, events: u64) -> Result<PipelineRun> {
    let server = match program {
        _ if !case.nats => None,
        Ok(program) => Some(Server::start(program)?),
        Err(error) => bail!("{error:#}"),
    };
    pipeline::run(&(case.url)(server.as_ref().map_or(0, Server::port), events), events)
}

fn row(name: &'static str, run: &PipelineRun) -> Row {
    let seconds = run.wall.max(Duration::from_nanos(1)).as_secs_f64();
    Row {
        name,
        events_per_s: Some(run.events as f64 / seconds),
        bytes_per_event: Some(run.bytes as f64 / run.events as f64),
        events_per_batch: Some(run.events as f64 / run.batches.max(1) as f64),
        events: Some(run.events),
        seconds: Some(seconds),
        missing: Some(run.missing),
        index_blocks: Some(run.index_blocks),
        ..Row::default()
    }
}

fn table(rows: &[Row]) -> String {
    let mut table =
        Table::new(["", "events/s", "bytes/event", "events/batch", "blocks in the index", "ns/event"]);
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1}"));
    for row in rows.iter().filter(|row| row.error.is_none()) {
        table.row([
            row.name.to_owned(),
            row.events_per_s.map_or_else(String::new, |rate| human::count(rate as u64)),
            number(row.bytes_per_event),
            number(row.events_per_batch),
            row.index_blocks.map_or_else(String::new, human::count),
            number(row.ns_per_event),
        ]);
    }
    let errors = rows.iter().filter_map(|row| Some(format!("  {}: {}\n", row.name, row.error.as_ref()?)));
    format!("Events, pool to index, on one machine:\n{}{}", table.render(), errors.collect::<String>())
}
