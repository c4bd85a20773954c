//! The peer's side: its three indexers, each fed as it wants to be.

use crate::clock::cpu_seconds;
use crate::workload::{LENGTH, PORTION, Step, Workload, random};
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData, KvCacheStoredBlockData,
    LocalBlockHash, OverlapScores, RouterEvent, compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};
use rustc_hash::FxHashMap;
use std::hint::black_box;

/// The hashes of every sequence, made as the peer makes them.
pub struct Chains {
    local: Vec<Vec<LocalBlockHash>>,
    sequence: Vec<Vec<u64>>,
}

impl Chains {
    pub fn new(work: &Workload) -> Self {
        let local = |sequence| -> Vec<LocalBlockHash> {
            (0..LENGTH).map(|at| LocalBlockHash(random(work.block(sequence, at)))).collect()
        };
        let local: Vec<_> = (0..work.sequences()).map(local).collect();
        let sequence = local.iter().map(|chain| compute_seq_hash_for_block(chain)).collect();
        Self { local, sequence }
    }
}

/// The events of one step, `per_event` blocks each.
fn events(chains: &Chains, step: Step, per_event: usize, out: &mut Vec<RouterEvent>) {
    let Step { worker, sequence, from } = step;
    for start in (from..LENGTH).step_by(per_event) {
        let blocks = (start..(start + per_event).min(LENGTH)).map(|at| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(chains.sequence[sequence][at]),
            tokens_hash: chains.local[sequence][at],
            mm_extra_info: None,
        });
        let data = KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: start
                .checked_sub(1)
                .map(|before| ExternalSequenceBlockHash(chains.sequence[sequence][before])),
            start_position: Some(start as u32),
            blocks: blocks.collect(),
        });
        let event = KvCacheEvent { event_id: out.len() as u64, data, dp_rank: 0 };
        out.push(RouterEvent::new(worker as u64, event));
    }
}

/// Feeds every event in portions that are made outside the clock.
fn portions(work: &Workload, chains: &Chains, per_event: usize, mut take: impl FnMut(Vec<RouterEvent>)) {
    let mut portion = Vec::new();
    work.steps(|step| {
        events(chains, step, per_event, &mut portion);
        if portion.len() >= PORTION {
            take(std::mem::take(&mut portion));
        }
    });
    take(portion);
}

fn queries(
    work: &Workload,
    chains: &Chains,
    count: usize,
    mut find: impl FnMut(&[LocalBlockHash]) -> OverlapScores,
) -> f64 {
    let queries: Vec<usize> = work.queries(count).collect();
    let mut blocks = 0;
    let seconds = cpu_seconds(|| {
        for &query in &queries {
            blocks +=
                find(black_box(&chains.local[query])).scores.values().map(|&n| n as usize).sum::<usize>();
        }
    });
    assert_eq!(blocks, count * work.workers() * LENGTH, "every query finds all of it everywhere");
    seconds
}

/// One of the peer's indexers.
pub trait Indexer {
    const NAME: &'static str;

    /// One that has taken every event, and the CPU seconds that this took.
    fn store(work: &Workload, chains: &Chains, per_event: usize) -> (Self, f64)
    where
        Self: Sized;

    /// CPU seconds of `count` queries.
    fn find(&self, work: &Workload, chains: &Chains, count: usize) -> f64;
}

impl Indexer for RadixTree {
    const NAME: &'static str = "radix_tree";

    fn store(work: &Workload, chains: &Chains, per_event: usize) -> (Self, f64) {
        let (mut tree, mut seconds) = (Self::new(), 0.0);
        portions(work, chains, per_event, |events| {
            seconds += cpu_seconds(|| {
                for event in events {
                    tree.apply_event(event).expect("the peer takes every event");
                }
            });
        });
        (tree, seconds)
    }

    fn find(&self, work: &Workload, chains: &Chains, count: usize) -> f64 {
        // It wants a vector of its own: the copy belongs to its price.
        queries(work, chains, count, |chain| self.find_matches(chain.to_vec(), false))
    }
}

/// The positional indexer with what a thread of its pool keeps beside it.
pub struct Positional {
    index: PositionalIndexer,
    /// Kept alive: the memory of an index is not complete without it.
    _blocks:
        FxHashMap<dynamo_kv_router::protocols::WorkerWithDpRank, dynamo_kv_router::nested_map::LevelIndex>,
}

impl Indexer for Positional {
    const NAME: &'static str = "positional";

    fn store(work: &Workload, chains: &Chains, per_event: usize) -> (Self, f64) {
        let (index, mut blocks, mut seconds) = (PositionalIndexer::new(32), FxHashMap::default(), 0.0);
        portions(work, chains, per_event, |events| {
            seconds += cpu_seconds(|| {
                for event in events {
                    index.apply_event(&mut blocks, event, None).expect("the peer takes every event");
                }
            });
        });
        (Self { index, _blocks: blocks }, seconds)
    }

    fn find(&self, work: &Workload, chains: &Chains, count: usize) -> f64 {
        queries(work, chains, count, |chain| self.index.find_matches(chain, false))
    }
}

impl Indexer for ConcurrentRadixTreeCompressed {
    const NAME: &'static str = "concurrent_compressed";

    /// It takes events through the channel of a thread of its pool only. The clock is that thread's
    /// CPU time. All events are in the channel before it starts, so that neither waiting nor
    /// contention counts.
    fn store(work: &Workload, chains: &Chains, per_event: usize) -> (Self, f64) {
        let tree = Self::new();
        let (sender, receiver) = flume::unbounded();
        let seconds = std::thread::scope(|scope| {
            let tree = &tree;
            let worker = scope.spawn(move || {
                while !receiver.is_disconnected() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                cpu_seconds(|| tree.worker(receiver, None).expect("its thread ends with its channel"))
            });
            portions(work, chains, per_event, |events| {
                for event in events {
                    sender.send(WorkerTask::Event(event)).expect("its thread lives as long as the channel");
                }
            });
            drop(sender);
            worker.join().expect("its thread does not panic")
        });
        (tree, seconds)
    }

    fn find(&self, work: &Workload, chains: &Chains, count: usize) -> f64 {
        queries(work, chains, count, |chain| SyncIndexer::find_matches(self, chain, false))
    }
}
