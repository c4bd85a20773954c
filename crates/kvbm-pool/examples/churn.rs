//! How fast the bookkeeping is on this machine: `cargo run --release -p kvbm-pool --example churn`.
//!
//! Every figure is thousands of blocks per second of one thread, the best of five rounds; events
//! are drained.

use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
use kvbm_pool::{BlockChain, BlockPool, Duplicates, EventRecord, G1, Registry, RegistryConfig};
use std::time::{Duration, Instant};

const GROUP: GroupId = GroupId(0);
const ROUNDS: usize = 5;

/// Chains of `length` blocks that share nothing.
struct Chains {
    hashes: Vec<SequenceHash>,
    length: usize,
}

impl Chains {
    fn new(blocks: usize, length: usize, seed: u64) -> Self {
        let mut random = seed;
        let mut next = || {
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (random ^ random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z ^ z >> 29
        };
        let hash =
            |_| SequenceHash::from_bytes((u128::from(next()) << 64 | u128::from(next())).to_le_bytes());
        Self { hashes: (0..blocks.div_ceil(length) * length).map(hash).collect(), length }
    }

    fn iter(&self) -> impl Iterator<Item = &[SequenceHash]> {
        self.hashes.chunks(self.length)
    }
}

struct Bench {
    registry: Registry,
    pool: BlockPool<G1>,
    events: Vec<EventRecord>,
}

impl Bench {
    fn new(capacity: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let registry = Registry::new(&RegistryConfig::new([capacity as u32, 0, 0]))?;
        let pool = registry.pool();
        Ok(Self { registry, pool, events: Vec::with_capacity(1 << 12) })
    }

    /// What a request costs that finds nothing: look up, allocate, fill, register, touch, let go.
    fn request(&mut self, chain: &[SequenceHash], touch: bool) -> Result<(), Box<dyn std::error::Error>> {
        let prefix = self.registry.match_prefix(GROUP, chain);
        let known = prefix.len();
        let fresh = self.pool.get_mutable_blocks(chain.len() - known)?;
        let partial = fresh.init_sequence(NamespaceId(0), GROUP, known as u32)?;
        let (complete, _) = partial.commit(BlockChain::of_hashes(chain))?;
        let cached = self.pool.register(complete, Duplicates::Reuse)?;
        if touch {
            self.registry.touch(GROUP, chain);
        }
        drop(cached);
        self.events.clear();
        self.registry.drain_events(&mut self.events, 1 << 12);
        Ok(())
    }
}

fn rate(blocks: usize, time: Duration) -> f64 {
    blocks as f64 / time.as_secs_f64() / 1e3
}

fn churn(capacity: usize, length: usize, touch: bool) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let mut bench = Bench::new(capacity)?;
    let fill = Chains::new(capacity, length, 1);
    let start = Instant::now();
    for chain in fill.iter() {
        bench.request(chain, touch)?;
    }
    let filled = rate(fill.hashes.len(), start.elapsed());
    let mut best = Duration::MAX;
    let blocks = capacity.max(200_000);
    for round in 0..ROUNDS {
        let chains = Chains::new(blocks, length, 100 + round as u64);
        let start = Instant::now();
        for chain in chains.iter() {
            bench.request(chain, touch)?;
        }
        best = best.min(start.elapsed());
    }
    Ok((filled, rate(blocks, best)))
}

/// Microseconds to match 10,000 cached blocks and let go, and to match them while somebody holds
/// them.
fn matching(capacity: usize) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let mut bench = Bench::new(capacity)?;
    let chains = Chains::new(capacity, 10_000, 1);
    for chain in chains.iter() {
        bench.request(chain, false)?;
    }
    let time = |bench: &Bench| {
        let mut best = Duration::MAX;
        for _ in 0..ROUNDS {
            for chain in chains.iter() {
                let start = Instant::now();
                let cached = bench.pool.match_sequence_hashes(GROUP, chain);
                best = best.min(start.elapsed());
                assert_eq!(cached.len(), chain.len());
            }
        }
        best.as_secs_f64() * 1e6
    };
    let cached = time(&bench);
    let _held: Vec<_> = chains.iter().map(|chain| bench.pool.match_sequence_hashes(GROUP, chain)).collect();
    Ok((cached, time(&bench)))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:>9} {:>7} {:>12} {:>12} {:>14}", "pool", "request", "fill k/s", "churn k/s", "touched k/s");
    for (capacity, length) in [(10_000, 24), (10_000, 128), (100_000, 128), (1_000_000, 128)] {
        let (fill, churned) = churn(capacity, length, false)?;
        let (_, touched) = churn(capacity, length, true)?;
        println!("{capacity:>9} {length:>7} {fill:>12.0} {churned:>12.0} {touched:>14.0}");
    }
    println!("{:>9} {:>20} {:>20}", "pool", "match cached 10k us", "match active 10k us");
    for capacity in [10_000, 100_000, 1_000_000] {
        let (cached, active) = matching(capacity)?;
        println!("{capacity:>9} {cached:>20.0} {active:>20.0}");
    }
    Ok(())
}
