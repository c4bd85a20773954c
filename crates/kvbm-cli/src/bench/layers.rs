//! `kvbm bench layers`: how much of a copy hides behind computing, layer by layer.
//!
//! A manager with an emulated device, whose link has a bandwidth, and an engine whose layers take a
//! time to compute. `load`: a prefix comes up, the engine computes a layer as soon as it is there.
//! `save`: each layer goes down while the next is computed. The limit of both is a copy that hides
//! all: no time beside computing. What whole blocks take is measured in the same run.

use anyhow::{Result, ensure};
use clap::Args;
use kvbm::config::{Blocks, ModelConfig};
use kvbm::device::{Device, EmulatedConfig, EmulatedDevice, Link, TransferModel};
use kvbm::layout::{AxisOrder, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::storage::{BoundLayout, DeviceAllocator};
use kvbm::{BlockId, Engine, KvBlockManager, LoadOptions, Namespace, Owned, Tier, TokenSequence};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Rows;
use crate::args::Output;
use crate::number::whole;
use crate::progress::Progress;
use crate::table::Table;

const PATIENCE: Duration = Duration::from_secs(120);

/// Options of `kvbm bench layers`.
#[derive(Clone, Debug, Args)]
pub struct LayersArgs {
    /// Layers of the model, 2 to 256.
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = whole::<u32>(2..=256))]
    pub layers: u32,

    /// Blocks of 64 KiB a layer that are copied, 1 to 1024.
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = whole::<u32>(1..=1024))]
    pub blocks: u32,

    /// Bandwidth of the device's link, 1 to 100,000 (10^6 bytes a second).
    #[arg(long, value_name = "MB", default_value_t = 500, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100_000))]
    pub link_mb_per_s: u32,

    /// Time to compute a layer, in percent of the time to copy it, 100 to 10,000.
    #[arg(long, value_name = "PERCENT", default_value_t = 125, allow_negative_numbers = true, value_parser = whole::<u32>(100..=10_000))]
    pub compute_percent: u32,

    /// Times that everything is done; the best of each figure counts.
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `load` or `save`.
    pub name: &'static str,
    /// Layers of the model.
    pub layers: u32,
    /// Steps that they are copied in, at most.
    pub steps: u32,
    /// Time to compute all layers, in milliseconds.
    pub compute_ms: f64,
    /// Time to copy whole blocks, in milliseconds.
    pub copy_ms: f64,
    /// Time of both, layer by layer, in milliseconds.
    pub both_ms: f64,
    /// The part of the copy that computing hid: 1 is all of it.
    pub hidden: f64,
}

/// Measures, and says what was found.
pub fn run(args: &LayersArgs) -> Result<Rows> {
    let bytes = u64::from(args.layers) * u64::from(args.blocks) * LAYER_BYTES;
    let copy = Duration::try_from_secs_f64(bytes as f64 / (f64::from(args.link_mb_per_s) * 1e6))?;
    let layer = copy * args.compute_percent / 100 / args.layers;
    let manager = manager(args, bytes)?;
    let progress = Progress::new("rounds", u64::from(args.rounds));
    let mut best: [Option<Row>; 2] = [None, None];
    for round in 0..args.rounds {
        let chain = manager.sequence(&tokens(round, args.blocks), b"")?;
        let rows = [save(args, &manager, &chain, layer)?, load(args, &manager, &chain, layer)?];
        for (best, row) in best.iter_mut().zip(rows) {
            if best.as_ref().is_none_or(|best| best.hidden < row.hidden) {
                *best = Some(row);
            }
        }
        progress.advance(1);
    }
    progress.finish();
    let rows: Vec<Row> = best.into_iter().flatten().collect();
    Rows::new(&rows, table(args, &rows))
}

/// 2 x 16 tokens x 8 heads x 128 x bf16.
const LAYER_BYTES: u64 = 2 * 16 * 8 * 128 * 2;

fn tokens(start: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * 16).map(|token| token ^ (start << 24)).collect()
}

fn manager(args: &LayersArgs, bytes: u64) -> Result<KvBlockManager<Engine>> {
    let model =
        ModelConfig { num_layers: args.layers, num_kv_heads: 8, head_dim: 128, ..ModelConfig::default() };
    let host_link =
        Link { bytes_per_s: Some(u64::from(args.link_mb_per_s) * 1_000_000), latency: Duration::ZERO };
    let links = TransferModel { host_link, ..TransferModel::unlimited() };
    let defaults = EmulatedConfig::default();
    let memory_bytes = (bytes * 4).max(defaults.memory_bytes);
    let device: Arc<dyn Device> =
        Arc::new(EmulatedDevice::new(EmulatedConfig { model: links, memory_bytes, ..defaults })?);
    let shape = LayoutConfig::builder()
        .num_blocks(args.blocks * 2)
        .num_layers(model.num_layers)
        .outer_dim(model.outer_dim)
        .page_size(model.page_size)
        .inner_dim(model.num_kv_heads * model.head_dim)
        .num_heads(model.num_kv_heads)
        .dtype(model.dtype)
        .build()?;
    let layout = Arc::new(LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter)?);
    let memory = BoundLayout::allocate(layout, &DeviceAllocator::new(Arc::clone(&device)))?;
    let manager = KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(Namespace::new("bench-layers"))
        .engine_device(vec![(device, memory)])
        .host(Blocks(args.blocks * 2))
        .configure(|config| config.offload.g1_g2.queue_share = 1.0)
        .build()?;
    Ok(manager)
}

fn ids(first: u32, blocks: u32) -> Vec<BlockId> {
    (first..first + blocks).map(BlockId).collect()
}

/// Computes all layers, telling of each.
fn compute(args: &LayersArgs, layer: Duration, mut done: impl FnMut(u32) -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    for number in 0..args.layers {
        std::thread::sleep(layer);
        done(number)?;
    }
    Ok(began.elapsed())
}

fn wait_offloads(manager: &KvBlockManager<Engine>) -> Result<()> {
    ensure!(manager.wait_offloads(Instant::now() + PATIENCE), "copies to host memory do not end");
    Ok(())
}

fn save(
    args: &LayersArgs,
    manager: &KvBlockManager<Engine>,
    chain: &TokenSequence,
    layer: Duration,
) -> Result<Row> {
    let from = ids(0, args.blocks);
    let began = Instant::now();
    manager.offload(&from, chain, 0, None)?;
    wait_offloads(manager)?;
    let copy = began.elapsed();
    manager.clear(Tier::G2)?;
    let began = Instant::now();
    let started = manager.offload_by_layer(&from, chain, 0)?.started;
    ensure!(started == from.len(), "{started} of {} blocks are copied", from.len());
    let computed = compute(args, layer, |number| {
        manager.layer_done(number);
        Ok(())
    })?;
    manager.step();
    wait_offloads(manager)?;
    Ok(row(args, "save", computed, copy, began.elapsed()))
}

fn load(
    args: &LayersArgs,
    manager: &KvBlockManager<Engine>,
    chain: &TokenSequence,
    layer: Duration,
) -> Result<Row> {
    let to = ids(args.blocks, args.blocks);
    let began = Instant::now();
    manager.onboard(manager.match_prefix(chain), &to, None)?.wait()?;
    let copy = began.elapsed();
    let computed = compute(args, layer, |_| Ok(()))?;
    let began = Instant::now();
    let loading =
        manager.onboard_with(manager.match_prefix(chain), &to, LoadOptions::default().by_layer())?;
    for number in 0..args.layers {
        ensure!(loading.wait_layer(number, Instant::now() + PATIENCE), "layer {number} does not arrive");
        std::thread::sleep(layer);
    }
    loading.wait()?;
    Ok(row(args, "load", computed, copy, began.elapsed()))
}

fn row(args: &LayersArgs, name: &'static str, computed: Duration, copy: Duration, both: Duration) -> Row {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let shown = ms(both) - ms(computed);
    Row {
        name,
        layers: args.layers,
        steps: kvbm::config::TransferConfig::default().layer_steps.min(args.layers),
        compute_ms: ms(computed),
        copy_ms: ms(copy),
        both_ms: ms(both),
        hidden: 1.0 - shown / ms(copy),
    }
}

fn table(args: &LayersArgs, rows: &[Row]) -> String {
    let mut table = Table::new(["", "computing", "copy", "both", "hidden"]);
    for row in rows {
        table.row([
            row.name.to_owned(),
            format!("{:.1} ms", row.compute_ms),
            format!("{:.1} ms", row.copy_ms),
            format!("{:.1} ms", row.both_ms),
            format!("{:.0} %", row.hidden * 100.0),
        ]);
    }
    format!(
        "{} blocks of {} layers over a link of {} MB/s, an emulated device, best of {} rounds\n\n{}",
        args.blocks,
        args.layers,
        args.link_mb_per_s,
        args.rounds,
        table.render()
    )
}
