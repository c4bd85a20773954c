//! The index of kvbm-disk, behind its engine.

use crate::blocks::{first, identity, later};
use crate::null_file::IndexOnly;
use crate::{Outcome, Round, length};
use kvbm_disk::medium::DirMedium;
use kvbm_disk::{DiskConfig, DiskEngine, EngineMode, IoBatch, OwnedBuffer, Recovered};
use kvbm_plan::BlockId;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// Blocks written with one call, and calls under way at a time.
const BATCH: usize = 1000;
const BATCHES: usize = 8;
const BLOCK_BYTES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);
const JOURNAL: &str = "journal.kvbm";

/// Measures once in `dir`: what it took, and how many commits the first writing was.
pub fn round(dir: &Path, entries: u32) -> Outcome<(Round, u64)> {
    let (engine, _) = open(dir, entries)?;
    let insert = write(&engine, first(entries))?;
    let commits = engine.stats().commits;
    let bytes = length(&dir.join(JOURNAL))?;
    let replace = write(&engine, later(entries))?;
    // What the end of the process would leave now.
    let killed = dir.with_extension("killed");
    std::fs::create_dir(&killed)?;
    std::fs::copy(dir.join(JOURNAL), killed.join(JOURNAL))?;
    engine.shutdown(PATIENCE);
    drop(engine);
    let bytes_replaced = length(&dir.join(JOURNAL))?;
    let recover = read_back(dir, entries)?;
    let recover_killed = read_back(&killed, entries)?;
    Ok((Round { insert, replace, recover, recover_killed, bytes, bytes_replaced }, commits))
}

fn read_back(dir: &Path, entries: u32) -> Outcome<Duration> {
    let started = Instant::now();
    let (_engine, recovered) = open(dir, entries)?;
    let took = started.elapsed();
    match recovered.blocks.len() {
        all if all == entries as usize => Ok(took),
        some => Err(format!("{some} of {entries} came back").into()),
    }
}

fn open(dir: &Path, entries: u32) -> Outcome<(DiskEngine, Recovered)> {
    let mut config = DiskConfig::new(dir, entries, BLOCK_BYTES as u64, [7; 16]);
    config.engine = EngineMode::Buffered;
    config.threads = 1;
    config.queue_depth = BATCH * BATCHES;
    let medium = DirMedium::lock(dir)?;
    Ok(DiskEngine::open_on(config, Arc::new(IndexOnly(medium)))?)
}

/// Writes (slot, block) in turn and flushes.
fn write(engine: &DiskEngine, blocks: impl Iterator<Item = (u32, u32)>) -> Outcome<Duration> {
    let blocks: Vec<(u32, u32)> = blocks.collect();
    let buffer = Arc::new(OwnedBuffer::new(BLOCK_BYTES));
    let good = Arc::new(AtomicU64::new(0));
    let (over, done) = sync_channel(BATCHES);
    let started = Instant::now();
    let mut under_way = 0;
    for part in blocks.chunks(BATCH) {
        if under_way == BATCHES {
            done.recv_timeout(PATIENCE)?;
            under_way -= 1;
        }
        let (good, over) = (Arc::clone(&good), over.clone());
        let mut batch = IoBatch::new(move |outcomes| {
            good.fetch_add(outcomes.iter().filter(|outcome| outcome.is_ok()).count() as u64, Relaxed);
            // There is room for every batch under way.
            let _ = over.try_send(());
        });
        for (slot, block) in part {
            batch.write_buffer(BlockId(*slot), identity(*block), &buffer);
        }
        engine.submit(batch).map_err(|rejected| rejected.error)?;
        under_way += 1;
    }
    for _ in 0..under_way {
        done.recv_timeout(PATIENCE)?;
    }
    engine.flush(PATIENCE)?;
    let took = started.elapsed();
    let good = good.load(Relaxed);
    if good == blocks.len() as u64 {
        Ok(took)
    } else {
        Err(format!("{good} of {} written", blocks.len()).into())
    }
}
