//! The workloads, each measured on both sides in turn.

use crate::clock::{cpu_seconds, involuntary_switches, median, quantile, thread_time};
use crate::heap;
use crate::ours::Ours;
use crate::side::{Side, TOKENS_PER_BLOCK};
use kvbm_plan::Tier;
use kvbm_pool::measure_holds;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Blocks of a sequence in the throughput rows.
pub const BATCH: usize = 128;
/// Blocks of a sequence in the rows that match.
const LONG: usize = 10_000;

/// A side with its pool full, and a source of chains that it has not seen.
pub struct Full<S: Side> {
    pub side: S,
    next: u64,
}

/// Where the numbers of further chains begin.
const FURTHER: u64 = 1 << 32;

impl<S: Side> Full<S> {
    /// A side that others fill.
    pub fn by_others(side: S) -> Self {
        Self { side, next: FURTHER }
    }

    /// Fills the pool of `side`, which is empty; says how many seconds that took.
    pub fn fill(side: S, capacity: usize, length: usize) -> (Self, f64) {
        let chains: Vec<_> = (0..capacity.div_ceil(length) as u64).map(|n| S::chain(n, length, 0)).collect();
        let seconds = cpu_seconds(|| chains.iter().for_each(|chain| side.churn(chain, length)));
        (Self { side, next: FURTHER }, seconds)
    }

    pub fn chains(&mut self, count: usize, length: usize, shared: usize) -> Vec<S::Chain> {
        chains::<S>(&mut self.next, count, length, shared)
    }

    /// Million blocks per second: every block evicts one.
    pub fn churn(&mut self, blocks: usize) -> f64 {
        let chains = self.chains(blocks.div_ceil(BATCH), BATCH, 0);
        let seconds = cpu_seconds(|| chains.iter().for_each(|chain| self.side.churn(chain, BATCH)));
        (chains.len() * BATCH) as f64 / seconds / 1e6
    }

    /// Million blocks per second of evicting and allocating alone, `at_once` in a call.
    pub fn evict(&mut self, at_once: usize, blocks: usize) -> f64 {
        let rounds = blocks.div_ceil(at_once.max(BATCH) * 16);
        let (mut seconds, mut evicted) = (0.0, 0);
        for _ in 0..rounds {
            let calls = (at_once.max(BATCH) * 16) / at_once;
            let chains = self.chains(calls, at_once, 0);
            let mut fresh = Vec::with_capacity(calls);
            // An eviction is over when its event is out of the ring.
            seconds += cpu_seconds(|| {
                for _ in 0..calls {
                    fresh.push(self.side.allocate(at_once));
                    self.side.keep_house();
                }
            });
            for (fresh, chain) in fresh.into_iter().zip(&chains) {
                drop(self.side.register(fresh, chain, 0));
            }
            self.side.keep_house();
            evicted += calls * at_once;
        }
        evicted as f64 / seconds / 1e6
    }

    /// Million blocks per second, one at a time: look up, allocate, register, as decoding does.
    pub fn single(&mut self, blocks: usize) -> f64 {
        let chains = self.chains(blocks.div_ceil(BATCH), BATCH, 0);
        let seconds = cpu_seconds(|| {
            for chain in &chains {
                let held: Vec<_> =
                    (0..BATCH).map(|at| self.side.register(self.side.allocate(1), chain, at)).collect();
                drop(held);
                self.side.keep_house();
            }
        });
        (chains.len() * BATCH) as f64 / seconds / 1e6
    }

    /// Microseconds to look up a chain of which nothing is there.
    pub fn miss(&mut self) -> f64 {
        let chains = self.chains(2000, BATCH, 0);
        let seconds = cpu_seconds(|| {
            for chain in &chains {
                assert_eq!(S::len(&self.side.lookup(chain)), 0);
            }
        });
        seconds / chains.len() as f64 * 1e6
    }

    /// Calls of the allocator per block over `blocks` of steady churn.
    pub fn allocations(&mut self, blocks: usize) -> f64 {
        let chains = self.chains(blocks.div_ceil(BATCH), BATCH, 0);
        heap::count(true);
        let before = heap::calls();
        chains.iter().for_each(|chain| self.side.churn(chain, BATCH));
        let calls = heap::calls() - before;
        heap::count(false);
        calls as f64 / (chains.len() * BATCH) as f64
    }
}

/// Chains that were not there yet; `next` is the number of the next.
fn chains<S: Side>(next: &mut u64, count: usize, length: usize, shared: usize) -> Vec<S::Chain> {
    let first = *next;
    *next += count as u64;
    (first..*next).map(|seed| S::chain(seed, length, shared)).collect()
}

impl Full<Ours> {
    /// The 99.9th percentile of how long a lock is held while 1,024 blocks are evicted in a call,
    /// in microseconds. A second thread wants the lock all the time. Holds of calls in which the
    /// thread lost its CPU do not count.
    pub fn hold(&mut self, samples: usize) -> f64 {
        self.hold_between(samples, |_| {})
    }

    /// The same, while something else goes on between those calls.
    pub fn hold_between(&mut self, samples: usize, mut between: impl FnMut(&Ours)) -> f64 {
        let mut times = Vec::with_capacity(samples);
        let done = AtomicBool::new(false);
        let registry = self.side.registry.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    black_box(registry.occupancy(Tier::G1));
                }
            });
            while times.len() < samples {
                let chains = self.chains(1, 1024, 0);
                let switches = involuntary_switches();
                let (fresh, holds) = measure_holds(|| self.side.allocate(1024));
                if involuntary_switches() == switches {
                    times.extend(holds.iter().map(|hold| hold.as_secs_f64() * 1e6));
                }
                drop(self.side.register(fresh, &chains[0], 0));
                self.side.keep_house();
                between(&self.side);
            }
            done.store(true, Relaxed);
        });
        quantile(times, 0.999)
    }
}

/// Microseconds to match 10,000 cached blocks, to match them while another holds them, and to let
/// go of them.
pub struct Matching {
    pub cached: f64,
    pub active: f64,
    pub dropped: f64,
}

/// Blocks come to the pool of `side`, which is empty, `at_once` in a batch.
pub fn matching<S: Side>(side: S, capacity: usize, at_once: usize) -> Matching {
    let chains: Vec<_> = (0..(capacity / LONG) as u64).map(|seed| S::chain(seed, LONG, 0)).collect();
    // The blocks of a chain must not lie in one row: its parts are registered in turn with those of
    // the others.
    for from in (0..LONG).step_by(at_once) {
        for chain in &chains {
            let blocks = at_once.min(LONG - from);
            drop(side.register(side.allocate(blocks), chain, from));
        }
        side.keep_house();
    }
    let looked_up = |chain: &S::Chain| {
        let start = thread_time();
        let held = side.lookup(chain);
        let time = (thread_time() - start).as_secs_f64() * 1e6;
        assert_eq!(S::len(&held), LONG);
        (held, time)
    };
    let (mut cached, mut active, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    let mut holders = VecDeque::new();
    for chain in &chains {
        let (held, time) = looked_up(chain);
        cached.push(time);
        holders.push_back(held);
    }
    for chain in &chains {
        active.push(looked_up(chain).1);
    }
    while let Some(held) = holders.pop_front() {
        dropped.push(cpu_seconds(|| drop(held)) * 1e6);
    }
    Matching { cached: median(cached), active: median(active), dropped: median(dropped) }
}

/// Tokens of a prompt in the rows from tokens to the answer, and prompts.
const PROMPT: u32 = 8192;
const PROMPTS: u32 = 64;

/// Microseconds from a prompt's tokens to its cached prefix, which is all of it.
pub fn answer<S: Side>(side: &S) -> f64 {
    let prompts: Vec<Vec<u32>> = (0..PROMPTS)
        .map(|prompt| {
            (0..PROMPT).map(|at| (prompt * PROMPT + at).wrapping_mul(2_654_435_761) >> 15).collect()
        })
        .collect();
    for prompt in &prompts {
        let chain = S::chain_of_tokens(prompt);
        drop(side.register(side.allocate((PROMPT / TOKENS_PER_BLOCK) as usize), &chain, 0));
        side.keep_house();
    }
    let mut times = Vec::new();
    for prompt in &prompts {
        let mut held = None;
        times.push(cpu_seconds(|| held = Some(side.answer(black_box(prompt)))) * 1e6);
        assert_eq!(held.as_ref().map_or(0, S::len), (PROMPT / TOKENS_PER_BLOCK) as usize);
    }
    median(times)
}

/// Heap bytes per block of a full pool.
pub fn heap_bytes<S: Side>(capacity: usize, new: impl FnOnce() -> S) -> f64 {
    let chains: Vec<_> = (0..(capacity / BATCH) as u64).map(|seed| S::chain(seed, BATCH, 0)).collect();
    heap::count(true);
    let before = heap::live_bytes();
    let side = new();
    for chain in &chains {
        side.churn(chain, BATCH);
    }
    let bytes = heap::live_bytes() - before;
    heap::count(false);
    drop(side);
    bytes as f64 / (chains.len() * BATCH) as f64
}
