//! Requests through a registry of one tier, as an engine makes them.

use kvbm_plan::{GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{BlockChain, Duplicates, G1, PolicyKind, Registry, RegistryConfig};

pub(crate) const GROUP: GroupId = GroupId(0);

pub(crate) fn hash(id: u64) -> SequenceHash {
    SequenceHash::from_bytes((u128::from(id) + 1).to_le_bytes())
}

pub(crate) fn registry(policy: PolicyKind, capacity: u32, seed: u64) -> Registry {
    let mut config = RegistryConfig::new([capacity, 0, 0]);
    config.policy = policy;
    config.policy_seed = seed;
    Registry::new(&config).unwrap()
}

/// What an engine says at the end of request `index`, if it says anything.
pub(crate) type EndHint<'a> = &'a dyn Fn(usize) -> bool;

/// Of every request, the blocks whose whole prefix was there.
pub(crate) fn hits(requests: &[Vec<u64>], registry: &Registry, ends: EndHint<'_>) -> Vec<usize> {
    let pool = registry.pool::<G1>();
    let capacity = registry.capacity(Tier::G1) as usize;
    let mut hits = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        let chain: Vec<SequenceHash> = request.iter().take(capacity).map(|&id| hash(id)).collect();
        let prefix = registry.match_prefix(GROUP, &chain);
        hits.push(prefix.len());
        registry.touch(GROUP, &chain);
        let fresh = pool.get_mutable_blocks(chain.len() - prefix.len()).unwrap();
        if !fresh.is_empty() {
            let partial = fresh.init_sequence(NamespaceId(0), GROUP, prefix.len() as u32).unwrap();
            let (complete, _) = partial.commit(BlockChain::of_hashes(&chain)).unwrap();
            drop(pool.register(complete, Duplicates::Reuse).unwrap());
        }
        drop(prefix);
        if ends(index) {
            registry.branch_ends(GROUP, &chain);
        }
    }
    assert_eq!(registry.occupancy(Tier::G1).active, 0);
    hits
}

/// Share of all blocks that were hits.
pub(crate) fn hit_ratio(requests: &[Vec<u64>], registry: &Registry, ends: EndHint<'_>) -> f64 {
    let blocks: usize = requests.iter().map(Vec::len).sum();
    hits(requests, registry, ends).iter().sum::<usize>() as f64 / blocks as f64
}
