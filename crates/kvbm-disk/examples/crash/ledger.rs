//! What the writer said, and whether the directory agrees.

use crate::process::{FLUSHED, READY};
use crate::support::{BLOCK, pattern, read};
use crate::writer::{SLOTS, config};
use kvbm_disk::DiskEngine;
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time that an opening may take: as the variable says, in milliseconds, else long enough
/// for any disk.
fn max_open() -> Duration {
    let named = std::env::var("KVBM_CRASH_OPEN_WITHIN_MS").ok().and_then(|text| text.parse().ok());
    Duration::from_millis(named.unwrap_or(60_000))
}

/// Slots and the numbers of blocks.
#[derive(Default)]
pub(crate) struct Ledger {
    /// Written, and not touched since.
    written: HashMap<u32, u64>,
    /// Of these, what a flush covered.
    durable: HashMap<u32, u64>,
    pub(crate) found: Findings,
}

/// Sums over all rounds.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) rounds: u64,
    /// Ends that met a process that ran.
    pub(crate) met_a_writer: u64,
    /// Lives that had opened the directory, and those that had flushed it.
    pub(crate) ready: u64,
    pub(crate) flushed: u64,
    pub(crate) flushes: u64,
    /// Blocks that a flush covered for the first time.
    pub(crate) made_durable: u64,
    /// Blocks that were checked because a flush had covered them.
    pub(crate) acknowledged: u64,
    pub(crate) lost: u64,
    pub(crate) corrupt_served: u64,
    /// Slots that were being overwritten at the end of a life.
    pub(crate) cut_short: u64,
    pub(crate) slowest_open: Duration,
}

impl Findings {
    pub(crate) fn passed(&self) -> bool {
        self.lost == 0 && self.corrupt_served == 0 && self.slowest_open < max_open()
    }

    pub(crate) fn json(&self) -> String {
        let Self { rounds, met_a_writer, ready, flushed, flushes, made_durable, .. } = self;
        let Self { acknowledged, lost, corrupt_served, cut_short, slowest_open, .. } = self;
        let slowest_open_s = slowest_open.as_secs_f64();
        format!(
            "{{\"rounds\": {rounds}, \"met_a_writer\": {met_a_writer}, \"ready\": {ready}, \"flushed\": {flushed}, \
             \"flushes\": {flushes}, \"made_durable\": {made_durable}, \"acknowledged\": {acknowledged}, \"lost\": {lost}, \
             \"corrupt_served\": {corrupt_served}, \"cut_short\": {cut_short}, \"slowest_open_s\": {slowest_open_s:.4}}}"
        )
    }
}

impl Ledger {
    /// Takes what the writer said until it was killed. The last line may be cut.
    pub(crate) fn take(&mut self, output: &str) {
        let flushes = self.found.flushes;
        for line in output.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["begin", slot] => {
                    let slot = slot.parse().unwrap();
                    self.written.remove(&slot);
                    self.durable.remove(&slot);
                }
                ["wrote", slot, number] => {
                    let slot = slot.parse().unwrap();
                    self.written.insert(slot, number.parse().unwrap());
                }
                [READY] => self.found.ready += 1,
                [FLUSHED] => self.flushed(),
                _ => panic!("the writer said: {line}"),
            }
        }
        self.found.flushed += u64::from(self.found.flushes > flushes);
    }

    fn flushed(&mut self) {
        let is_new = |(slot, number): &(&u32, &u64)| self.durable.get(slot) != Some(number);
        self.found.made_durable += self.written.iter().filter(is_new).count() as u64;
        self.found.flushes += 1;
        self.durable.clone_from(&self.written);
    }

    /// Opens the directory and compares; what is left is what the next life begins with.
    pub(crate) fn check(&mut self, dir: &Path, engine: &str) {
        let start = Instant::now();
        let (engine, recovered) = DiskEngine::open(config(dir, engine)).unwrap();
        self.found.slowest_open = self.found.slowest_open.max(start.elapsed());
        self.found.rounds += 1;
        let mut served = HashMap::new();
        for block in &recovered.blocks {
            let (slot, number) = (block.slot.0, u64::from(block.identity.position));
            match read(&engine, slot, number) {
                Ok(bytes) if bytes == pattern(number, BLOCK) => drop(served.insert(slot, number)),
                Ok(_) => {
                    eprintln!(
                        "round {}: slot {slot} serves wrong bytes for block {number}",
                        self.found.rounds
                    );
                    self.found.corrupt_served += 1;
                }
                Err(_) => {}
            }
        }
        for (slot, number) in &self.durable {
            self.found.acknowledged += 1;
            if served.get(slot) != Some(number) {
                eprintln!(
                    "round {}: block {number} of slot {slot} was flushed and is lost",
                    self.found.rounds
                );
                self.found.lost += 1;
            }
        }
        self.found.cut_short += engine.stats().cut_short;
        assert!(served.keys().all(|slot| *slot < SLOTS));
        self.durable.clone_from(&served);
        self.written = served;
    }
}
