//! Leaf-first LRU: hits against a naive simulation, and the known hit ratio of a real trace where
//! it is at hand.

use super::replay::{hits, registry};
use super::{CONVERSATION, NO_HINTS, SYNTHETIC, lru, requests_of};
use kvbm_pool::PolicyKind;
use std::collections::HashMap;

/// Prefix hits of every request, by a scan over all cached blocks for the least recent leaf.
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
        let found = hits(&requests, &registry(PolicyKind::LruLeaf, capacity, 0), NO_HINTS);
        assert_eq!(found, simulate(&requests, capacity as usize), "capacity {capacity}");
    }
}

/// FIELD notes: 0.212 and 0.424 at 10,000 blocks.
#[test]
fn known_hit_ratios_of_the_traces() {
    for (name, expected) in [(CONVERSATION, 0.212), (SYNTHETIC, 0.424)] {
        let Some(requests) = requests_of(name) else { continue };
        let ratio = lru(&requests, 10_000);
        assert!((ratio - expected).abs() <= 0.003, "{name}: {ratio}");
        eprintln!("{name}: hit ratio {ratio:.4}");
    }
}
