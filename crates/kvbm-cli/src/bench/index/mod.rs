//! `kvbm bench index`: how fast blocks become durable in the index of the disk tier, how fast it is
//! read back, how large it is.
//!
//! Blocks are written through the engine, as any caller does, on a medium whose slot file takes no
//! bytes: what remains is the index. Its limits, in the same directory: appending the same bytes
//! with a sync as often as the engine committed, and reading the file from front to back. How large
//! it becomes is told once for blocks that were only added, and once for its largest file while
//! every one of them was replaced. Records that are out of date take room until a snapshot drops
//! them. While a snapshot is written both files exist: `size_peak` is the most that was seen of
//! them together, by looking after each batch.

mod null_file;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvbm::plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use kvbm_disk::medium::DirMedium;
use kvbm_disk::{DiskConfig, DiskEngine, EngineMode, IoBatch, OwnedBuffer};
use serde::Serialize;

use super::Rows;
use crate::args::Output;
use crate::human;
use crate::number::whole;
use crate::progress::Progress;
use crate::rng::Rng;
use crate::scratch::Scratch;
use crate::table::Table;

/// Blocks written with one call, and calls under way at a time.
const BATCH: u32 = 1000;
const BATCHES: usize = 8;
const BLOCK_BYTES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// Options of `kvbm bench index`.
#[derive(Clone, Debug, Args)]
pub struct IndexArgs {
    /// Blocks in the index, 1000 to 100,000,000.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, allow_negative_numbers = true, value_parser = whole::<u32>(1000..=100_000_000))]
    pub entries: u32,

    /// Times that everything is done; the best of each figure and of its limit counts.
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// Directory for the index, removed afterwards [default: the system's temporary one].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One figure. What does not apply to it is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// `insert`, `recover`, `size`, `size_replaced` or `size_peak`.
    pub name: &'static str,
    /// Blocks in the index.
    pub entries: u32,
    /// Time that it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Time that the same bytes need without an index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_seconds: Option<f64>,
    /// Blocks per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries_per_s: Option<f64>,
    /// Blocks per second at the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_entries_per_s: Option<f64>,
    /// Figure over limit: 1 is all that the disk gives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Group commits, which are the syncs of the limit too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commits: Option<u64>,
    /// Bytes on disk for each block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_entry: Option<f64>,
}

/// What one round took.
struct Round {
    insert: Duration,
    insert_limit: Duration,
    commits: u64,
    recover: Duration,
    recover_limit: Duration,
    bytes: u64,
    replaced_bytes: u64,
    peak_bytes: u64,
}

/// Measures, and says what was found.
pub fn run(args: &IndexArgs) -> Result<Rows> {
    let base = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let progress = Progress::new("rounds", u64::from(args.rounds));
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let scratch = Scratch::create(&base, "bench-index")?;
        rounds.push(round(scratch.path(), args.entries)?);
        progress.advance(1);
    }
    progress.finish();
    let rows = rows(args.entries, &rounds)?;
    Rows::new(&rows, table(&base, &rows))
}

fn round(dir: &Path, entries: u32) -> Result<Round> {
    let config = config(dir, entries);
    let (insert, commits) = {
        let (engine, _) = open(&config)?;
        let took = write_all(&engine, entries, 0, &mut || Ok(()))?;
        (took, engine.stats().commits)
    };
    let insert_limit = append(dir, entries, commits)?;
    let started = Instant::now();
    let (engine, recovered) = open(&config)?;
    let recover = started.elapsed();
    ensure!(recovered.blocks.len() == entries as usize, "{} of {entries} came back", recovered.blocks.len());
    let (bytes, recover_limit) = read_back(dir)?;
    let (mut replaced_bytes, mut peak_bytes) = (0, 0);
    write_all(&engine, entries, entries, &mut || {
        let lengths = index_lengths(dir)?;
        replaced_bytes = lengths.iter().copied().fold(replaced_bytes, u64::max);
        peak_bytes = peak_bytes.max(lengths.iter().sum());
        Ok(())
    })?;
    Ok(Round { insert, insert_limit, commits, recover, recover_limit, bytes, replaced_bytes, peak_bytes })
}

fn config(dir: &Path, entries: u32) -> DiskConfig {
    let mut config = DiskConfig::new(dir, entries, BLOCK_BYTES as u64, [7; 16]);
    config.engine = EngineMode::Buffered;
    config.threads = 1;
    config.queue_depth = BATCH as usize * BATCHES;
    config
}

fn open(config: &DiskConfig) -> Result<(DiskEngine, kvbm_disk::Recovered)> {
    let medium = DirMedium::lock(&config.dir)?;
    DiskEngine::open_on(config.clone(), Arc::new(null_file::IndexOnly(medium)))
        .context("cannot open the index")
}

/// Writes a block into every slot, from block `first_number` on, and flushes: how long that took.
/// Looks at the index with `look` from time to time.
fn write_all(
    engine: &DiskEngine,
    entries: u32,
    first_number: u32,
    look: &mut dyn FnMut() -> Result<()>,
) -> Result<Duration> {
    let buffer = Arc::new(OwnedBuffer::new(BLOCK_BYTES));
    let good = Arc::new(AtomicU64::new(0));
    let (room, over) = sync_channel(BATCHES);
    let started = Instant::now();
    let mut under_way = 0;
    for first in (0..entries).step_by(BATCH as usize) {
        if under_way == BATCHES {
            over.recv_timeout(PATIENCE).context("the engine does not answer")?;
            under_way -= 1;
            look()?;
        }
        let (good, room) = (Arc::clone(&good), room.clone());
        let mut batch = IoBatch::new(move |outcomes| {
            good.fetch_add(outcomes.iter().filter(|outcome| outcome.is_ok()).count() as u64, Relaxed);
            // There is room for every batch under way.
            let _ = room.try_send(());
        });
        for slot in first..entries.min(first + BATCH) {
            batch.write_buffer(BlockId(slot), identity(first_number.wrapping_add(slot)), &buffer);
        }
        engine.submit(batch).map_err(|rejected| rejected.error)?;
        under_way += 1;
    }
    let report = loop {
        if under_way == 0 {
            break engine.flush(PATIENCE)?;
        }
        over.recv_timeout(PATIENCE).context("the engine does not answer")?;
        under_way -= 1;
    };
    let took = started.elapsed();
    let (good, durable) = (good.load(Relaxed), report.durable_blocks);
    ensure!(
        (good, durable) == (u64::from(entries), u64::from(entries)),
        "{good} written and {durable} durable of {entries}"
    );
    look()?;
    Ok(took)
}

/// Block `number`, one of a chain, as most blocks are.
fn identity(number: u32) -> BlockIdentity {
    let hash = |number: u32| {
        let mut rng = Rng::new(u64::from(number));
        let (low, high) = (rng.between(0, u64::MAX - 1), rng.between(0, u64::MAX - 1));
        SequenceHash::from_bytes((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
    };
    let parent = number.checked_sub(1).map(hash);
    BlockIdentity {
        namespace: NamespaceId(1),
        group: GroupId(0),
        hash: hash(number),
        parent,
        position: number,
    }
}

/// Appends as many bytes as the index has, synced as often as it was.
fn append(dir: &Path, entries: u32, commits: u64) -> Result<Duration> {
    let bytes = index_bytes(dir)?;
    let part = vec![0xA5; usize::try_from(bytes / commits.max(1))?.max(1)];
    let path = dir.join("limit");
    let mut file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    let started = Instant::now();
    for _ in 0..commits.max(1) {
        file.write_all(&part)
            .and_then(|()| file.sync_data())
            .with_context(|| format!("cannot write {entries} entries to {}", path.display()))?;
    }
    Ok(started.elapsed())
}

/// Reads every file of the index from front to back: how many bytes, and how long that took.
fn read_back(dir: &Path) -> Result<(u64, Duration)> {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    let started = Instant::now();
    for path in index_files(dir)? {
        let mut file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                read => bytes += read as u64,
            }
        }
    }
    Ok((bytes, started.elapsed()))
}

fn index_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        // A snapshot that is being written loses its name when it is done.
        let name = entry.file_name();
        let is_index = name != "limit" && !null_file::is_null_file(&name.to_string_lossy());
        if is_index && entry.metadata().is_ok_and(|file| file.is_file()) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Lengths of the journal and of the snapshot that is about to take its place, in bytes.
fn index_lengths(dir: &Path) -> Result<Vec<u64>> {
    let lengths = index_files(dir)?.into_iter().filter_map(|path| std::fs::metadata(path).ok());
    Ok(lengths.map(|file| file.len()).collect())
}

fn index_bytes(dir: &Path) -> Result<u64> {
    index_files(dir)?.iter().try_fold(0, |sum, path| Ok(sum + std::fs::metadata(path)?.len()))
}

/// The best round of each figure, and of each limit.
fn rows(entries: u32, rounds: &[Round]) -> Result<Vec<Row>> {
    let best = |of: fn(&Round) -> Duration| rounds.iter().map(of).min().map(|time| time.as_secs_f64());
    let fastest = rounds.iter().min_by_key(|round| round.insert).context("no round")?;
    let timed = |name, seconds: Option<f64>, limit_seconds: Option<f64>| {
        let rate = |seconds: Option<f64>| seconds.map(|seconds| f64::from(entries) / seconds);
        let (entries_per_s, limit_entries_per_s) = (rate(seconds), rate(limit_seconds));
        let ratio = seconds.zip(limit_seconds).map(|(seconds, limit)| limit / seconds);
        Row {
            name,
            entries,
            seconds,
            limit_seconds,
            entries_per_s,
            limit_entries_per_s,
            ratio,
            ..Row::default()
        }
    };
    let insert = timed("insert", best(|round| round.insert), best(|round| round.insert_limit));
    let recover = timed("recover", best(|round| round.recover), best(|round| round.recover_limit));
    let size = |name, bytes: u64| {
        let bytes_per_entry = Some(bytes as f64 / f64::from(entries));
        Row { name, entries, bytes_per_entry, ..Row::default() }
    };
    let most = |of: fn(&Round) -> u64| rounds.iter().map(of).max().unwrap_or(0);
    Ok(vec![
        Row { commits: Some(fastest.commits), ..insert },
        recover,
        size("size", fastest.bytes),
        size("size_replaced", most(|round| round.replaced_bytes)),
        size("size_peak", most(|round| round.peak_bytes)),
    ])
}

fn table(dir: &Path, rows: &[Row]) -> String {
    let mut table = Table::new(["index", "time", "blocks/s", "limit", "of it", "bytes/block"]);
    let cell = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(String::new, text);
    for row in rows {
        table.row([
            row.name.to_owned(),
            cell(row.seconds, |seconds| human::micros(seconds * 1e6)),
            cell(row.entries_per_s, |rate| human::count(rate as u64)),
            cell(row.limit_seconds, |seconds| human::micros(seconds * 1e6)),
            cell(row.ratio, human::percent),
            cell(row.bytes_per_entry, |bytes| format!("{bytes:.1}")),
        ]);
    }
    let entries = rows.first().map_or(0, |row| u64::from(row.entries));
    format!(
        "index of {} blocks in {}; the limit is writing (reading) the same bytes with the same syncs\n\n{}",
        human::count(entries),
        dir.display(),
        table.render()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_found_again_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let args = IndexArgs { entries: 2500, rounds: 2, dir: Some(dir.path().to_owned()), json: None };
        let rows = run(&args).unwrap();
        let json: serde_json::Value = serde_json::from_str(&rows.json).unwrap();
        let names: Vec<&str> =
            json["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["insert", "recover", "size", "size_replaced", "size_peak"]);
        for (row, field) in
            [(0, "entries_per_s"), (0, "limit_entries_per_s"), (1, "seconds"), (1, "limit_seconds")]
        {
            assert!(json["rows"][row][field].as_f64().is_some_and(|value| value > 0.0), "{json}");
        }
        let bytes = json["rows"][2]["bytes_per_entry"].as_f64().unwrap();
        assert!((80.0..100.0).contains(&bytes), "{bytes}");
        let replaced = json["rows"][3]["bytes_per_entry"].as_f64().unwrap();
        // Few blocks: there is no snapshot before tens of thousands of records are out of date.
        assert!((bytes..=2.0 * bytes).contains(&replaced), "{replaced}");
        assert!(rows.table.contains("2,500 blocks"), "{}", rows.table);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays behind");
    }
}
