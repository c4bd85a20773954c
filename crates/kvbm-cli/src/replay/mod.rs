//! `kvbm replay`: requests through a real block manager.
//!
//! Each request matches its prefix, onboards the hits, computes the misses (a pattern that depends
//! on hash, rank, layer, outer index and offset) and registers them. Every onboarded byte is
//! compared.

mod engine;
mod groups;
mod models;
mod permits;
mod requests;
mod serve;
mod setup;
mod tenants;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::metrics::{DropReason, EvictReason};
use kvbm::{FailureKind, KvBlockManager, Owned, Path as TransferPath, Tier};

use crate::args::{OffloadMode, ReplayArgs};
use crate::note::note;
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::summary::{
    DiskWrites, EventFigures, Evictions, Hits, PathFigures, ReplayResult, Summary, Timeline,
};
use crate::trace::{self, Trace};
use crate::{human, interrupt};
use engine::Engine;
use permits::Permits;
use requests::Requests;
use serve::{Served, Server};
use tenants::Tenants;

/// Requests of the workload that is made up when no trace is given.
const DEFAULT_REQUESTS: u32 = 2000;
/// Time to write down what is not on disk yet, where the disk is kept.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(300);
/// Time for the transport to take the last events.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);
/// Requests between two updates of the gauges that `--metrics` shows.
const METRICS_EVERY: usize = 64;

/// Replays what `args` ask for.
pub fn run(args: &ReplayArgs) -> Result<ReplayResult> {
    let (workload, trace) = workload(args)?;
    // From here on there is something to clean up.
    interrupt::catch();
    let scratch = scratch(args)?;
    let dir = args.dir.first().map(AsRef::as_ref).or(scratch.as_ref().map(Scratch::path));
    let manager = setup::manager(args, dir)?;
    let tenants = Tenants::new(&manager, &trace)?;
    let requests = Requests::new(&trace, tenants.hashers()?);
    let _metrics = args.metrics.map(|addr| crate::serve_metrics(manager.metrics(), addr)).transpose()?;
    let replayed = replay(args, &manager, &requests, tenants);
    if !args.dir.is_empty() || args.volume.is_some() {
        save(&manager);
    }
    let (served, wall) = replayed?;
    let mut result = result(args, workload, &manager, &requests, &served, wall);
    if args.model.is_some() {
        groups::add_figures(&mut result.summary, &manager, &requests, &served);
    }
    result.summary.tenants = tenants::figures(&manager, &trace, &requests, &served);
    result.summary.events = args.events.is_some().then(|| publish_remaining_events(&manager));
    Ok(result)
}

fn workload(args: &ReplayArgs) -> Result<(String, Trace)> {
    if let Some(path) = &args.trace {
        return Ok((path.display().to_string(), trace::read(path)?));
    }
    let requests = args.synthetic.unwrap_or(DEFAULT_REQUESTS);
    let name = format!("{requests} made-up multi-turn requests, seed {}", args.seed);
    let mut trace = trace::generate(requests, args.seed);
    trace.deal(args.tenants.as_slice().iter().map(|(name, _)| name.clone()));
    Ok((name, trace))
}

/// What each request found, by its number, and how long all of them took.
fn replay(
    args: &ReplayArgs,
    manager: &KvBlockManager<Owned>,
    requests: &Requests,
    tenants: Tenants,
) -> Result<(Vec<Served>, Duration)> {
    let permits = Permits::new(blocks_for_requests(args, manager));
    let ends = args.hint_accuracy.map(|accuracy| requests.endings(accuracy, args.seed));
    let server = Server::new(manager, requests, &permits, tenants, args.offload, ends);
    let progress = Progress::new("requests", requests.len() as u64);
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let served = Mutex::new(vec![Served::default(); requests.len()]);
    let work = || -> Result<()> {
        let mut engine = if args.metadata_only { None } else { Some(Engine::new(manager)?) };
        let mut mine = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= requests.len() {
                break;
            }
            anyhow::ensure!(!interrupt::asked(), "interrupted at request {index} of {}", requests.len());
            mine.push((index, server.serve(index, engine.as_mut())?));
            progress.advance(1);
            if args.flush_every.is_some_and(|every| (index + 1).is_multiple_of(every as usize)) {
                flush(manager, index + 1)?;
            }
            if index.is_multiple_of(METRICS_EVERY) && args.metrics.is_some() {
                manager.metrics();
            }
        }
        let mut all = served.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (index, served) in mine {
            all[index] = served;
        }
        Ok(())
    };
    let start = Instant::now();
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let guarded = || work().inspect_err(|_| failed.store(true, Ordering::Relaxed));
        let threads = (args.concurrency as usize).min(requests.len());
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(guarded)).collect();
        let crashed = || Err(anyhow::anyhow!("a replay thread panicked; please report this"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| crashed())).collect()
    });
    let wall = start.elapsed();
    progress.finish();
    outcomes.into_iter().collect::<Result<()>>()?;
    Ok((served.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner), wall))
}

/// Blocks of G1 that requests may hold: all, or what background offloads leave them.
fn blocks_for_requests(args: &ReplayArgs, manager: &KvBlockManager<Owned>) -> usize {
    let g1 = setup::capacity_blocks(manager)[0] as usize;
    match args.offload {
        OffloadMode::Wait => g1,
        OffloadMode::Drop => {
            let offloads = (g1 as f64 * manager.config().offload.g1_g2.queue_share).ceil() as usize;
            g1.saturating_sub(offloads).max(1)
        }
    }
}

/// Publishes the last events; what became of all of them.
fn publish_remaining_events(manager: &KvBlockManager<Owned>) -> EventFigures {
    let before = manager.events().status();
    // A server that took nothing during the whole replay is not waited for.
    let was_reached = before.published > 0 || before.unavailable == 0;
    manager.events().flush(if was_reached { EVENTS_TIMEOUT } else { Duration::ZERO });
    let (status, stats) = (manager.events().status(), manager.events().stats());
    let held = manager.events().snapshot().blocks;
    let on = |tier| held.iter().filter(|block| block.location.tier == tier).count() as u64;
    EventFigures {
        source: manager.events().source().to_string(),
        published: status.published,
        lost: status.lost,
        gaps: status.gaps,
        unpublished: status.waiting,
        bytes: stats.bytes,
        batches: stats.batches,
        held: Tier::SLOTTED.map(on),
        trouble: manager.events().trouble(),
    }
}

/// Makes durable what is on disk.
fn flush(manager: &KvBlockManager<Owned>, requests: usize) -> Result<()> {
    let report = manager.flush(SHUTDOWN_TIMEOUT)?;
    note(&format!("flushed after {requests} requests: {} blocks are durable", report.durable_blocks));
    Ok(())
}

/// Leaves the directory or the volume so that another run finds everything.
fn save(manager: &KvBlockManager<Owned>) {
    let report = manager.shutdown(SHUTDOWN_TIMEOUT);
    if !report.is_complete() {
        let why = match report.flush_error {
            Some(error) => error.to_string(),
            None if !report.drained => "copies were still under way".to_owned(),
            None => "where the last tier is full, give it more room with --capacity".to_owned(),
        };
        note(&format!(
            "kvbm: {} blocks are not saved, and the next run will not find them; {why}",
            report.not_saved
        ));
    }
}

fn result(
    args: &ReplayArgs,
    workload: String,
    manager: &KvBlockManager<Owned>,
    requests: &Requests,
    served: &[Served],
    wall: Duration,
) -> ReplayResult {
    let metrics = manager.metrics();
    let mut timeline = Timeline::new(served.len() as u64);
    for (index, request) in served.iter().enumerate() {
        timeline.record(index as u64, request.blocks, request.hits);
    }
    let sum = |read: fn(&Served) -> u64| served.iter().map(read).sum::<u64>();
    let hits = hits_by_tier(served);
    let used = TransferPath::ALL.into_iter().map(|path| (path.to_string(), metrics.path(path)));
    let used: Vec<_> = used.filter(|(_, path)| path.summary().blocks > 0).collect();
    let evicted = |tier: Tier| metrics.tier(tier).evictions(EvictReason::Capacity).get();
    let failures = |path| FailureKind::ALL.iter().map(move |&kind| metrics.path(path).failures(kind).get());
    let dropped = |path| DropReason::ALL.iter().map(move |&reason| metrics.path(path).dropped(reason).get());
    let onboarded = [TransferPath::G2_G1, TransferPath::G3_G1, TransferPath::G4_G1]
        .map(|path| metrics.path(path).blocks.get());
    let quarantined = Tier::SLOTTED.map(|tier| metrics.tier(tier).quarantined.get());
    let summary = Summary {
        requests: requests.len() as u64,
        blocks: requests.num_blocks(),
        hits: Hits::from(hits),
        hit_ratio: hit_ratio(served),
        hit_ratio_first_10pct: hit_ratio(&served[..served.len().div_ceil(10)]),
        onboarded_blocks: onboarded.iter().sum(),
        verified_blocks: sum(|served| served.verified),
        verified_onboarded_blocks: sum(|served| served.verified_onboarded),
        corrupt_blocks: sum(|served| served.corrupt),
        failed_transfers: TransferPath::ALL.into_iter().flat_map(failures).sum(),
        quarantined_blocks: quarantined.iter().sum(),
        offload_dropped: TransferPath::ALL.into_iter().flat_map(dropped).sum(),
        wall_s: wall.as_secs_f64(),
        paths: used.iter().map(|(name, path)| (name.clone(), PathFigures::from(path.summary()))).collect(),
        evictions: Evictions { g1: evicted(Tier::G1), g2: evicted(Tier::G2), g3: evicted(Tier::G3) },
        g3: DiskWrites::new(bytes_to_disk(manager), hits[Tier::G3.index()]),
        policy: args.policy.as_str().to_owned(),
        capacity: setup::capacity_blocks(manager),
        seed: args.seed,
        oracle_hit_ratio: None,
        groups: Vec::new(),
        tenants: BTreeMap::new(),
        events: None,
    };
    let latencies = used.iter().map(|(name, path)| (name.clone(), path.latencies())).collect();
    ReplayResult { workload, summary, timeline, latencies, left_out: sum(|served| served.left_out) }
}

fn hits_by_tier(served: &[Served]) -> [u64; 4] {
    served.iter().fold([0; 4], |mut sum, request| {
        sum.iter_mut().zip(request.hits).for_each(|(sum, hits)| *sum += hits);
        sum
    })
}

fn hit_ratio(served: &[Served]) -> f64 {
    let blocks = served.iter().map(|request| request.blocks).sum();
    human::share(hits_by_tier(served).iter().sum(), blocks)
}

/// Bytes that were written to G3, on all ranks together.
fn bytes_to_disk(manager: &KvBlockManager<Owned>) -> u64 {
    let config = manager.config();
    let to_disk = [TransferPath::G2_G3, TransferPath::G1_G3].map(|path| manager.metrics().path(path));
    // Blocks of several groups have several lengths.
    if config.model.groups.as_slice().len() > 1 {
        return to_disk.iter().map(|path| path.bytes.get()).sum();
    }
    let blocks: u64 = to_disk.iter().map(|path| path.blocks.get()).sum();
    blocks * config.rank_block_bytes() * config.writers().count() as u64
}

/// A directory for G3 that goes away with the replay; none where it needs no disk or one was named.
fn scratch(args: &ReplayArgs) -> Result<Option<Scratch>> {
    if args.metadata_only || !args.dir.is_empty() || args.capacity.0[2].is_none() {
        return Ok(None);
    }
    Scratch::create(&std::env::temp_dir(), "replay").map(Some)
}
