//! The process that is killed: writes, releases and flushes at random, and says what it did.

use crate::process::{FLUSHED, READY};
use crate::support::{BLOCK, PATIENCE, Random, all_good, write};
use kvbm_disk::{DiskConfig, DiskEngine, EngineMode};
use kvbm_plan::BlockId;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

pub(crate) const SLOTS: u32 = 192;
/// Numbers of the blocks of one life of the writer.
pub(crate) const NUMBERS: u64 = 1 << 16;

pub(crate) const ENGINES: [&str; 3] = ["auto", "threads", "buffered"];

pub(crate) fn config(dir: &Path, engine: &str) -> DiskConfig {
    let mut config = DiskConfig::new(dir, SLOTS, BLOCK as u64, [7; 16]);
    config.engine = match engine {
        "threads" => EngineMode::Threads,
        "buffered" => EngineMode::Buffered,
        _ => EngineMode::Auto,
    };
    config.commit.interval = Duration::from_millis(3);
    // Snapshots come often, so that some are killed.
    config.compact_slack_records = 64;
    config
}

pub(crate) fn run(dir: &Path, seed: u64, engine: &str) -> ExitCode {
    let mut random = Random(seed);
    let (engine, _) = DiskEngine::open(config(dir, engine)).unwrap();
    let mut out = std::io::stdout();
    // One call each: what was said before the kill is whole.
    let mut say = |lines: &[String]| out.write_all(lines.concat().as_bytes()).unwrap();
    say(&[format!("{READY}\n")]);
    // Since the last flush something was written: each has something to make durable.
    let mut is_dirty = false;
    let mut next = seed % (1 << 15) * NUMBERS;
    let last = next + NUMBERS - 16;
    while next < last {
        match random.below(8) {
            0 if !is_dirty => {}
            0 => {
                engine.flush(PATIENCE).unwrap();
                say(&[format!("{FLUSHED}\n")]);
                is_dirty = false;
            }
            1 => {
                let slot = random.below(SLOTS.into()) as u32;
                say(&[format!("begin {slot}\n")]);
                engine.release(&[BlockId(slot)]);
            }
            _ => {
                let first = random.below(u64::from(SLOTS) - 8) as u32;
                let blocks: Vec<_> = (first..=first + random.below(8) as u32).zip(next + 1..).collect();
                next += 8;
                let begun: Vec<_> = blocks.iter().map(|(slot, _)| format!("begin {slot}\n")).collect();
                say(&begun);
                is_dirty = true;
                assert!(all_good(&write(&engine, &blocks)));
                let wrote = |(slot, number): &(u32, u64)| format!("wrote {slot} {number}\n");
                say(&blocks.iter().map(wrote).collect::<Vec<_>>());
            }
        }
    }
    ExitCode::SUCCESS
}
