//! Leaf-first LRU: hits against a naive simulation, and the known hit ratio of a real trace where it is at hand.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{BlockChain, Duplicates, G1, Registry, RegistryConfig};
use std::collections::HashMap;
use std::path::PathBuf;

fn hash(id: u64) -> SequenceHash {
    SequenceHash::from_bytes((u128::from(id) + 1).to_le_bytes())
}

/// Prefix hits of every request: match, compute the rest, touch once tail to head, let go.
fn replay(requests: &[Vec<u64>], capacity: u32) -> Vec<usize> {
    let registry = Registry::new(&RegistryConfig::new([capacity, 0, 0])).unwrap();
    let pool = registry.pool::<G1>();
    let group = GroupId(0);
    let mut hits = Vec::new();
    for request in requests {
        let chain: Vec<SequenceHash> = request.iter().map(|&id| hash(id)).collect();
        let prefix = registry.match_prefix(group, &chain);
        hits.push(prefix.len());
        if let Ok(fresh) = pool.get_mutable_blocks(chain.len() - prefix.len()) {
            let partial = fresh.init_sequence(NamespaceId(0), group, prefix.len() as u32).unwrap();
            let (complete, _) = partial.commit(BlockChain::of_hashes(&chain)).unwrap();
            let cached = pool.register(complete, Duplicates::Reuse).unwrap();
            registry.touch(group, &chain);
            drop(cached);
        }
    }
    assert_eq!(registry.occupancy(Tier::G1).active, 0);
    hits
}

/// The same by a scan over all cached blocks for the least recent leaf.
fn simulate(requests: &[Vec<u64>], capacity: usize) -> Vec<usize> {
    let mut cached: HashMap<u64, (Option<u64>, u64)> = HashMap::new();
    let mut clock = 0;
    let mut hits = Vec::new();
    for request in requests {
        let hit = request.iter().take_while(|id| cached.contains_key(id)).count();
        hits.push(hit);
        for (index, &id) in request.iter().enumerate().skip(hit) {
            if cached.len() == capacity {
                let is_leaf = |id: &u64| cached.values().all(|(parent, _)| *parent != Some(*id));
                let candidates = cached.iter().filter(|(id, _)| !request.contains(id) && is_leaf(id));
                let victim = candidates.min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id);
                cached.remove(&victim.expect("a request fits into the pool"));
            }
            cached.insert(id, (index.checked_sub(1).map(|before| request[before]), clock));
        }
        for id in request.iter().rev() {
            clock += 1;
            if let Some((_, used)) = cached.get_mut(id) {
                *used = clock;
            }
        }
    }
    hits
}

/// Conversations that grow turn by turn behind one of three shared system prompts.
fn conversations(count: u64) -> Vec<Vec<u64>> {
    let mut random = 5_u64;
    let mut open: Vec<Vec<u64>> = Vec::new();
    let mut fresh = 100;
    let mut requests = Vec::new();
    for _ in 0..count {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = (random >> 33) as usize;
        if open.is_empty() || pick.is_multiple_of(3) {
            let system = (pick / 3 % 3) as u64 * 10;
            open.push((system..system + 3).collect());
        }
        let index = pick / 16 % open.len();
        for _ in 0..=(pick / 256 % 4) {
            open[index].push(fresh);
            fresh += 1;
        }
        requests.push(open[index].clone());
        if open[index].len() > 20 || open.len() > 12 {
            open.swap_remove(index);
        }
    }
    requests
}

#[test]
fn hits_equal_those_of_a_naive_simulation() {
    let requests = conversations(700);
    for capacity in [30, 64, 110] {
        assert_eq!(
            replay(&requests, capacity),
            simulate(&requests, capacity as usize),
            "capacity {capacity}"
        );
    }
}

/// `KVBM_TRACES`, or `shared/traces` beside the repository.
fn trace(name: &str) -> Option<Vec<Vec<u64>>> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("KVBM_TRACES").map_or_else(beside, PathBuf::from);
    let text = std::fs::read_to_string(folder.join(name)).ok()?;
    let ids = |line: &str| {
        let request: serde_json::Value = serde_json::from_str(line).unwrap();
        let ids = request["hash_ids"].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap()).collect()
    };
    Some(text.lines().map(ids).collect())
}

/// FIELD notes: 0.212 and 0.424 at 10,000 blocks.
#[test]
fn known_hit_ratios_of_the_traces() {
    for (name, expected) in [("conversation_trace.jsonl", 0.212), ("synthetic_trace.jsonl", 0.424)] {
        let Some(requests) = trace(name) else {
            eprintln!("skipped: {name} is not there; KVBM_TRACES names its folder");
            continue;
        };
        let blocks: usize = requests.iter().map(Vec::len).sum();
        let ratio = replay(&requests, 10_000).iter().sum::<usize>() as f64 / blocks as f64;
        assert!((ratio - expected).abs() <= 0.003, "{name}: {ratio}");
        eprintln!("{name}: {blocks} blocks, hit ratio {ratio:.4}");
    }
}
