//! The same churn through `KvBlockManager`: what is registered in G1 is also copied to G2, by
//! workers that move no bytes.

use crate::clock::median;
use crate::rows::BATCH;
use crate::side::{block_number, mix};
use crate::{Options, Table};
use kvbm::config::{Blocks, EvictionPolicy, ModelConfig};
use kvbm::{BlockChain, KvBlockManager, Namespace, Owned, SequenceHash};
use std::time::{Duration, Instant};

/// Chains of [`BATCH`] blocks in one measurement.
const PART: usize = 400_000 / BATCH;

type Chain = Vec<SequenceHash>;

fn chain(seed: u64) -> Chain {
    let hash = |index| {
        let low = block_number(seed, index, 0);
        SequenceHash::from_bytes((u128::from(mix(low)) << 64 | u128::from(low)).to_le_bytes())
    };
    (0..BATCH).map(hash).collect()
}

/// A manager whose tiers are full, and a source of chains that it has not seen.
struct Managed {
    manager: KvBlockManager<Owned>,
    next: u64,
}

impl Managed {
    fn full(device: usize, host: usize, eviction: EvictionPolicy) -> Self {
        let mut builder = KvBlockManager::<Owned>::builder()
            .model(ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() })
            .namespace(Namespace::new("bench").weights("1"))
            .device(Blocks(device as u32));
        if host > 0 {
            builder = builder.host(Blocks(host as u32));
        }
        let built = builder.configure(|config| config.policy.eviction = eviction).build_metadata_only();
        let mut managed = Self { manager: built.expect("a valid configuration"), next: 0 };
        run(&managed.manager, &chains(&mut managed.next, device.max(host).div_ceil(BATCH)));
        managed
    }

    /// Million blocks per second of wall time. Copies that are asked for are over by then.
    fn churn(&mut self) -> f64 {
        let chains = chains(&mut self.next, PART);
        let start = Instant::now();
        run(&self.manager, &chains);
        let deadline = Instant::now() + Duration::from_secs(60);
        assert!(self.manager.wait_offloads(deadline), "copies take no time");
        (PART * BATCH) as f64 / 1e6 / start.elapsed().as_secs_f64()
    }
}

/// Chains that were not there yet; `next` is the number of the next.
fn chains(next: &mut u64, count: usize) -> Vec<Chain> {
    let first = *next;
    *next += count as u64;
    (first..*next).map(chain).collect()
}

/// Requests that find nothing: allocate, register, let go.
fn run(manager: &KvBlockManager<Owned>, chains: &[Chain]) {
    for chain in chains {
        let fresh = manager.allocate(BATCH).expect("enough is evictable");
        let committed = manager.commit(fresh, BlockChain::of_hashes(chain), 0);
        let (complete, _) = committed.expect("a whole chain");
        drop(manager.register(complete).expect("it begins a sequence"));
    }
}

pub fn rows(table: &mut Table, options: &Options) {
    for (suffix, host, eviction) in [
        ("", options.blocks, EvictionPolicy::LruLeaf),
        ("_g1_only", 0, EvictionPolicy::LruLeaf),
        ("_default", options.blocks, EvictionPolicy::Hazard),
    ] {
        let mut managed = Managed::full(options.blocks, host, eviction);
        managed.churn();
        let rates = (0..options.rounds).map(|_| managed.churn()).collect();
        table.row(&format!("manager_churn{suffix}"), "M/s", median(rates), None, None);
    }
}
