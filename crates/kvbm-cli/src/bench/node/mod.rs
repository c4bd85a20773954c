//! `kvbm bench node`: what a node daemon costs, beside a manager inside the process.
//!
//! The daemon is a process of its own (`kvbm serve`). Engines run here, over host memory: no device
//! is involved. The same calls are made on a manager of this process whose every read of host
//! memory is verified, as the daemon's are.

mod fixture;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use kvbm::config::Bytes;
use serde::Serialize;

use super::Rows;
use crate::args::Output;
use crate::number::whole;
use crate::progress::Progress;
use crate::table::Table;
use fixture::{Daemon, DaemonEngine, Fixture, LocalEngine};

/// Blocks of the chain that a scheduler looks up.
const MATCHED: u32 = 1000;
/// Look-ups of the chain that are timed.
const LOOK_UPS: u32 = 2000;
/// Engines on one daemon.
const ENGINES: u16 = 8;
/// Host memory has room for so many times what is loaded at once: tickets pin a quarter at most.
const PINNED_SHARE: u32 = 4;
/// Chains that host memory has room for where copies are measured; the next one takes the place of
/// the oldest.
const RESIDENT: u32 = 3;
/// Prompts of a measurement in which nothing is reused.
const NEW_PROMPTS: u32 = 8;
/// Time in which the device computes one block of a prompt: 16 tokens at 64,000 tokens a second.
const COMPUTE: Duration = Duration::from_micros(250);

/// Options of `kvbm bench node`.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// Bytes of a block, a multiple of 64 KiB.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", allow_negative_numbers = true)]
    pub block: Bytes,

    /// Blocks that each copy moves.
    #[arg(long, value_name = "N", default_value_t = 128, allow_negative_numbers = true, value_parser = whole::<u32>(8..=4096))]
    pub blocks: u32,

    /// Times that each measurement is repeated; medians count.
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One figure. What does not apply to it is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeRow {
    /// `match_rpc`, `g1_g2_shared`, `g2_g1_shared`, `attach_s`, `zero_reuse_in_process`,
    /// `zero_reuse` or `engines_8`.
    pub name: &'static str,
    /// Speed through the daemon over speed inside the process. Of prompts that reuse nothing: speed
    /// with a cache over speed without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Speed through the daemon, in GB/s; of `attach_s`, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Half of the calls take no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99 of 100 calls take no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
}

/// Measures, and says what was found.
pub fn run(args: &NodeArgs) -> Result<Rows> {
    ensure!(
        args.block.get() >= 64 << 10 && args.block.get().is_multiple_of(64 << 10),
        "--block {}: give a multiple of 64 KiB",
        args.block
    );
    let progress = Progress::new("measurements", u64::from(args.rounds) + 3);
    let mut rows = vec![match_rpc(args)?];
    progress.advance(1);
    rows.extend(copies(args, &progress)?);
    rows.extend(zero_reuse(args)?);
    progress.advance(1);
    rows.push(engines(args)?);
    progress.advance(1);
    progress.finish();
    let mut table = Table::new(["figure", "ratio", "GB/s or s", "p50 us", "p99 us"]);
    let cell = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.3}"));
    for row in &rows {
        let NodeRow { name, ratio, value, p50_us, p99_us } = row;
        table.row([(*name).to_owned(), cell(*ratio), cell(*value), cell(*p50_us), cell(*p99_us)]);
    }
    Rows::new(&rows, table.render())
}

/// A scheduler's match of a long chain, through the socket.
fn match_rpc(args: &NodeArgs) -> Result<NodeRow> {
    // Small blocks: a look-up moves none.
    let fixture = Fixture::new(64 << 10, MATCHED, 1)?;
    let daemon = Daemon::start(&fixture)?;
    let engine = DaemonEngine::attach(&fixture, &daemon, "scheduler")?;
    let tokens = fixture.sequence(0);
    engine.save(&tokens)?;
    let mut times: Vec<Duration> = Vec::with_capacity(LOOK_UPS as usize);
    let count = LOOK_UPS / if args.rounds == 1 { 10 } else { 1 };
    for request in 0..count {
        let name = request.to_string();
        let begun = Instant::now();
        let found = engine.found(&name, &tokens)?;
        times.push(begun.elapsed());
        ensure!(found == MATCHED as usize, "{found} of {MATCHED} blocks were found");
        engine.abandon(&name)?;
    }
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    Ok(NodeRow { name: "match_rpc", p50_us: Some(at(0.5)), p99_us: Some(at(0.99)), ..NodeRow::default() })
}

/// Both directions, through a daemon and inside the process, in turns; and how long an engine takes
/// to attach.
fn copies(args: &NodeArgs, progress: &Progress) -> Result<[NodeRow; 3]> {
    let fixture = Fixture::new(args.block.get(), args.blocks, RESIDENT)?;
    let daemon = Daemon::start(&fixture)?;
    let local = LocalEngine::start(&fixture)?;
    let mut samples: [Vec<f64>; 5] = Default::default();
    for round in 0..args.rounds {
        let begun = Instant::now();
        drop(DaemonEngine::attach(&fixture, &daemon, &format!("attaches {round}"))?);
        samples[4].push(begun.elapsed().as_secs_f64());
    }
    let attached = DaemonEngine::attach(&fixture, &daemon, "copies")?;
    for round in 0..RESIDENT + 1 + args.rounds {
        let tokens = fixture.sequence(round);
        let times =
            [attached.save(&tokens)?, local.save(&tokens)?, attached.load(&tokens)?, local.load(&tokens)?];
        // The first rounds touch all memory for the first time.
        if round > RESIDENT {
            for (times, time) in samples.iter_mut().zip(times.map(|time| time.as_secs_f64())) {
                times.push(time);
            }
            progress.advance(1);
        }
    }
    let [save, save_local, load, load_local, attach] = samples.map(median);
    let bytes = fixture.bytes() as f64;
    let row = |name, time: f64, local: f64| NodeRow {
        name,
        ratio: Some(local / time),
        value: Some(bytes / time / 1e9),
        ..NodeRow::default()
    };
    Ok([
        row("g1_g2_shared", save, save_local),
        row("g2_g1_shared", load, load_local),
        NodeRow { name: "attach_s", value: Some(attach), ..NodeRow::default() },
    ])
}

/// Prompts that nobody has computed before: without a cache, with one in this process, and through
/// a daemon, by turns. A device computes meanwhile, so the engine's thread waits for it.
fn zero_reuse(args: &NodeArgs) -> Result<[NodeRow; 2]> {
    let fixture = Fixture::new(args.block.get(), args.blocks, 4)?;
    let daemon = Daemon::start(&fixture)?;
    let (local, attached) =
        (LocalEngine::start(&fixture)?, DaemonEngine::attach(&fixture, &daemon, "prompts")?);
    let compute = || std::thread::sleep(COMPUTE * args.blocks);
    let mut samples: [Vec<f64>; 3] = Default::default();
    let mut next = 0;
    for round in 0..=args.rounds {
        for (kind, times) in samples.iter_mut().enumerate() {
            let begun = Instant::now();
            for _ in 0..NEW_PROMPTS {
                next += 1;
                let (tokens, half) = (fixture.sequence(next), next as usize % 2);
                match kind {
                    0 => compute(),
                    1 => local.prompt(&tokens, half, compute)?,
                    _ => attached.prompt(&tokens, half, compute)?,
                }
            }
            // The first round touches the memory.
            if round > 0 {
                times.push(begun.elapsed().as_secs_f64());
            }
        }
    }
    let [without, local, attached] = samples.map(median);
    let row = |name, time: f64| NodeRow { name, ratio: Some(without / time), ..NodeRow::default() };
    Ok([row("zero_reuse_in_process", local), row("zero_reuse", attached)])
}

/// Engines that all load at a time.
fn engines(args: &NodeArgs) -> Result<NodeRow> {
    let blocks = args.blocks.div_ceil(ENGINES.into()).max(8);
    let fixture = Fixture::new(args.block.get(), blocks, u32::from(ENGINES) * PINNED_SHARE)?;
    let daemon = Daemon::start(&fixture)?;
    let engines = (0..ENGINES).map(|at| DaemonEngine::attach(&fixture, &daemon, &format!("engine {at}")));
    let engines = engines.collect::<Result<Vec<_>>>()?;
    for (at, engine) in (0..).zip(&engines) {
        engine.save(&fixture.sequence(at))?;
    }
    let mut times = Vec::new();
    for _ in 0..args.rounds {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let fixture = &fixture;
            let load = |at: u32, engine: &'_ DaemonEngine| engine.load(&fixture.sequence(at));
            let loads: Vec<_> =
                (0..).zip(&engines).map(|(at, it)| scope.spawn(move || load(at, it))).collect();
            loads.into_iter().try_for_each(|load| match load.join() {
                Ok(done) => done.map(drop),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        times.push(begun.elapsed().as_secs_f64());
    }
    let bytes = (fixture.bytes() * u64::from(ENGINES)) as f64;
    Ok(NodeRow { name: "engines_8", value: Some(bytes / median(times) / 1e9), ..NodeRow::default() })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
