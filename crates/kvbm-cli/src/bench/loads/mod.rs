//! `kvbm bench loads`: what a cache costs where its disk is slow, or stalls.
//!
//! Requests whose blocks are on disk go through a real manager. The disk and the engine are models:
//! a block takes its time to be read, and its time to be computed. The manager knows neither; it
//! measures both. The limit is the same requests without a cache. What is waited for beyond it is
//! the price of finding out that the disk is slow, and of finding out, once in a while, whether it
//! still is.

mod tier;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvbm::config::{Blocks, ModelConfig};
use kvbm::metrics::LoadReason;
use kvbm::{KvBlockManager, Namespace, Owned, Tier, TokenSequence};
use serde::Serialize;
use std::time::{Duration, Instant};
use tier::SlowDisk;

use super::Rows;
use crate::args::Output;
use crate::number::whole;
use crate::progress::Progress;
use crate::table::Table;

const PAGE: u32 = 16;
const PATIENCE: Duration = Duration::from_secs(120);
/// Requests before the disk stalls.
const BEFORE_STALL: u32 = 3;

/// Options of `kvbm bench loads`.
#[derive(Clone, Debug, Args)]
pub struct LoadsArgs {
    /// Requests of each row, 4 to 10,000.
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true, value_parser = whole::<u32>(4..=10_000))]
    pub requests: u32,

    /// Blocks of a request, 1 to 4096.
    #[arg(long, value_name = "N", default_value_t = 512, allow_negative_numbers = true, value_parser = whole::<u32>(1..=4096))]
    pub blocks: u32,

    /// Microseconds in which the engine computes a block of 16 tokens, 10 to 100,000.
    #[arg(long, value_name = "US", default_value_t = 500, allow_negative_numbers = true, value_parser = whole::<u32>(10..=100_000))]
    pub compute_us: u32,

    /// How long the disk of the row `stall` does nothing, in milliseconds, 1 to 60,000.
    #[arg(long, value_name = "MS", default_value_t = 10_000, allow_negative_numbers = true, value_parser = whole::<u32>(1..=60_000))]
    pub stall_ms: u32,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `faster`, `slower` or `stall`.
    pub name: &'static str,
    /// Requests served.
    pub requests: u32,
    /// Time of a block on the disk, in microseconds.
    pub read_us: u32,
    /// Seconds that the requests took, computing included.
    pub seconds: f64,
    /// Seconds that they take without a cache.
    pub limit_seconds: f64,
    /// Seconds over limit: 1 is no gain and no loss.
    pub ratio: f64,
    /// Blocks that were loaded rather than computed.
    pub loaded: u64,
    /// Blocks that were computed because they would have arrived later.
    pub left_out: u64,
    /// Longest wait for a load, in milliseconds.
    pub longest_wait_ms: f64,
    /// What a request waits at most, by `policy.onboard_patience`.
    pub deadline_ms: f64,
}

/// A disk, relative to computing.
struct Scenario {
    name: &'static str,
    read_us: u32,
    stalls: bool,
}

/// Measures, and says what was found.
pub fn run(args: &LoadsArgs) -> Result<Rows> {
    let scenarios = [
        Scenario { name: "faster", read_us: args.compute_us.div_ceil(8), stalls: false },
        Scenario { name: "slower", read_us: args.compute_us * 4, stalls: false },
        Scenario { name: "stall", read_us: args.compute_us.div_ceil(8), stalls: true },
    ];
    let progress = Progress::new("requests", scenarios.len() as u64 * u64::from(args.requests));
    let rows =
        scenarios.iter().map(|scenario| measure(args, scenario, &progress)).collect::<Result<Vec<_>>>()?;
    progress.finish();
    Rows::new(&rows, table(args, &rows))
}

fn measure(args: &LoadsArgs, scenario: &Scenario, progress: &Progress) -> Result<Row> {
    let disk = SlowDisk::default();
    let manager = manager(args, &disk)?;
    let chains = store(args, &manager)?;
    let compute = Duration::from_micros(u64::from(args.compute_us));
    // Prompts that nobody knows: the manager learns what computing costs.
    for _ in 0..4 {
        prefill(&manager, compute, args.blocks);
    }
    disk.set_time_of_block(Duration::from_micros(u64::from(scenario.read_us)));
    let (mut loaded, mut longest) = (0, Duration::ZERO);
    let began = Instant::now();
    for (at, chain) in (0..).zip(&chains) {
        if scenario.stalls && at == BEFORE_STALL {
            disk.stall(Duration::from_millis(u64::from(args.stall_ms)));
        }
        let asked = Instant::now();
        let cached = match manager.onboard(manager.match_prefix(chain)).wait() {
            Ok(cached) => cached,
            Err(late) => late.arrived,
        };
        longest = longest.max(asked.elapsed());
        loaded += cached.len() as u64;
        prefill(&manager, compute, args.blocks - cached.len() as u32);
        progress.advance(1);
    }
    let seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    for _ in &chains {
        sleep(compute * args.blocks);
    }
    let limit_seconds = began.elapsed().as_secs_f64();
    let reasons = [LoadReason::Slower, LoadReason::Queue];
    let metrics = manager.metrics().tier(Tier::G3);
    let deadline = (compute * args.blocks).max(Duration::from_millis(250));
    Ok(Row {
        name: scenario.name,
        requests: args.requests,
        read_us: scenario.read_us,
        seconds,
        limit_seconds,
        ratio: seconds / limit_seconds,
        loaded,
        left_out: reasons.map(|reason| metrics.loads(reason).get()).iter().sum(),
        longest_wait_ms: longest.as_secs_f64() * 1e3,
        deadline_ms: deadline.as_secs_f64() * 1e3,
    })
}

fn manager(args: &LoadsArgs, disk: &SlowDisk) -> Result<KvBlockManager<Owned>> {
    let all = args.requests * args.blocks;
    let manager = KvBlockManager::<Owned>::builder()
        .model(ModelConfig {
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 16,
            page_size: PAGE,
            ..ModelConfig::default()
        })
        .namespace(Namespace::new("bench-loads"))
        // What an onboard brought is not evicted during the next.
        .device(Blocks(4 * args.blocks))
        .host(Blocks(4 * args.blocks))
        .disk("never-opened", Blocks(all.max(1)))
        .configure(|config| {
            config.disk.drive_writes_per_day = 0.0;
            config.offload.g1_g2.queue_share = 1.0;
            config.offload.g2_g3.queue_share = 1.0;
            config.offload.g2_g3.write_through = true;
        })
        .build_with_workers(|rank, epoch, sink| disk.connect(rank, epoch, sink))?;
    Ok(manager)
}

/// Sequences that the disk alone has.
fn store(args: &LoadsArgs, manager: &KvBlockManager<Owned>) -> Result<Vec<TokenSequence>> {
    let mut chains = Vec::new();
    for request in 0..args.requests {
        let tokens: Vec<u32> = (0..args.blocks * PAGE).map(|token| token ^ (request << 20)).collect();
        let chain = manager.sequence(&tokens, b"")?;
        let fresh = manager.allocate(chain.num_blocks()).context("room for a request")?;
        let (done, _) = manager.commit(fresh, &chain, 0)?;
        drop(manager.register(done)?);
        ensure!(manager.wait_offloads(Instant::now() + PATIENCE), "copies to the modelled disk do not end");
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier)?;
        }
        chains.push(chain);
    }
    Ok(chains)
}

/// Computes so many blocks, and tells the manager.
fn prefill(manager: &KvBlockManager<Owned>, compute: Duration, blocks: u32) {
    if blocks > 0 {
        let began = Instant::now();
        sleep(compute * blocks);
        manager.prefilled(u64::from(blocks * PAGE), began.elapsed());
    }
}

fn sleep(time: Duration) {
    std::thread::sleep(time);
}

fn table(args: &LoadsArgs, rows: &[Row]) -> String {
    let mut table =
        Table::new(["disk", "read", "time", "no cache", "ratio", "loaded", "left out", "longest wait"]);
    for row in rows {
        table.row([
            row.name.to_owned(),
            format!("{} us", row.read_us),
            format!("{:.2} s", row.seconds),
            format!("{:.2} s", row.limit_seconds),
            format!("{:.3}", row.ratio),
            row.loaded.to_string(),
            row.left_out.to_string(),
            format!("{:.0} of {:.0} ms", row.longest_wait_ms, row.deadline_ms),
        ]);
    }
    format!(
        "{} requests of {} blocks on a modelled disk, {} us to compute a block\n\n{}",
        args.requests,
        args.blocks,
        args.compute_us,
        table.render()
    )
}
