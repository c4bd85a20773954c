//! `kvbm bench`: what this machine reaches, each figure beside its own limit in the same run.
//!
//! A benchmark is a module with its options (`clap::Args`), a row type that serializes, and a
//! function from options to [`Rows`]; [`run`] shows and writes them.

#[cfg(feature = "compress")]
pub mod compression;
pub mod events;
pub mod index;
pub mod layers;
pub mod loads;
pub mod node;
pub mod transfer;

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;

use crate::args::Output;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// How much shorter blocks become by compression, what it costs, and below which bandwidth it
    /// is a gain.
    #[cfg(feature = "compress")]
    Compression(compression::CompressionArgs),
    /// The index of the disk tier: inserts with group commit, recovery, size on disk.
    Index(index::IndexArgs),
    /// Events from the pool into a follower's index, over each transport, and what they cost the
    /// pool.
    Events(events::EventsArgs),
    /// How much of a copy hides behind computing, layer by layer, on an emulated device.
    Layers(layers::LayersArgs),
    /// What a cache costs where its disk is slower than computing, or stalls, beside no cache.
    Loads(loads::LoadsArgs),
    /// What a node daemon costs, beside a manager inside the process.
    Node(node::NodeArgs),
    /// Every path between the tiers of a worker, beside a bare memcpy or a bare io_uring loop.
    Transfer(transfer::TransferArgs),
}

/// What a benchmark found: `{"rows": [{"name": ...}, ...]}` for programs, a table for people.
#[derive(Debug)]
pub struct Rows {
    table: String,
    json: String,
    failed: Option<String>,
}

impl Rows {
    /// `rows` for programs, `table` for people.
    pub fn new<R: Serialize>(rows: &[R], table: String) -> Result<Self> {
        let json = serde_json::to_string_pretty(&serde_json::json!({ "rows": rows }))?;
        Ok(Self { table, json, failed: None })
    }

    /// The same, of which a part could not be measured.
    #[must_use]
    pub fn but_failed(self, why: String) -> Self {
        Self { failed: Some(why), ..self }
    }
}

/// Runs a benchmark, prints its table and writes its rows where they are wanted.
pub fn run(command: &BenchCommand) -> Result<()> {
    match command {
        #[cfg(feature = "compress")]
        BenchCommand::Compression(args) => deliver(args.json.as_ref(), || compression::run(args)),
        BenchCommand::Index(args) => deliver(args.json.as_ref(), || index::run(args)),
        BenchCommand::Events(args) => deliver(args.json.as_ref(), || events::run(args)),
        BenchCommand::Layers(args) => deliver(args.json.as_ref(), || layers::run(args)),
        BenchCommand::Loads(args) => deliver(args.json.as_ref(), || loads::run(args)),
        BenchCommand::Node(args) => deliver(args.json.as_ref(), || node::run(args)),
        BenchCommand::Transfer(args) => deliver(args.json.as_ref(), || transfer::run(args)),
    }
}

fn deliver(json: Option<&Output>, bench: impl FnOnce() -> Result<Rows>) -> Result<()> {
    // Found out now rather than after minutes of measuring.
    json.and_then(Output::file).map_or(Ok(()), crate::writable::expect)?;
    let rows = bench()?;
    crate::show(&rows.table, json == Some(&Output::Stdout))?;
    json.map_or(Ok(()), |output| crate::write_json(output, &rows.json))?;
    rows.failed.map_or(Ok(()), |why| Err(anyhow::anyhow!("{why}")))
}
