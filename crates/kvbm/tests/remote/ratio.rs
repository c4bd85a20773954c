//! Three nodes that share what they have find as much as one that has all of it.

use crate::support::{serve, tokens, unlimited};
use crate::world::{World, meet};
use kvbm::config::EvictionPolicy;

const G2: u32 = 96;
const REQUESTS: u32 = 360;

/// A small generator: the same numbers everywhere.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % end
    }
}

/// Which of 24 sequences a request is of, and how long: a few are asked for often.
fn requests() -> Vec<(u32, u32)> {
    let mut numbers = Numbers(7);
    let request = |_| {
        let often = numbers.below(3) > 0;
        let sequence = if often { numbers.below(8) } else { 8 + numbers.below(16) };
        (sequence + 1, 4 + numbers.below(9))
    };
    (0..REQUESTS).map(request).collect()
}

#[test]
fn three_nodes_find_what_one_with_all_of_their_memory_finds() {
    let one = crate::support::two_tiers(16, 3 * G2);
    let (mut hits_of_one, mut asked) = (0, 0);
    for (start, blocks) in requests() {
        let sequence = tokens(&one, start, blocks);
        hits_of_one += serve(&one, &sequence);
        asked += blocks as usize;
        assert!(one.wait_offloads(crate::support::soon()));
    }

    let world = World::new();
    let nodes = [1, 2, 3].map(|id| {
        world.node(id, [16, G2], |config| {
            unlimited(config);
            config.policy.eviction = EvictionPolicy::LruLeaf;
        })
    });
    meet(&nodes.each_ref().map(|node| &node.manager));
    let (mut numbers, mut hits) = (Numbers(11), 0);
    for (start, blocks) in requests() {
        let manager = &nodes[numbers.below(3) as usize].manager;
        hits += serve(manager, &tokens(manager, start, blocks));
        assert!(manager.wait_offloads(crate::support::soon()));
    }
    let read: u64 = nodes
        .iter()
        .flat_map(|node| (1..=3).map(|peer| node.manager.metrics().peer(kvbm::plan::NodeId(peer)).hits.get()))
        .sum();
    println!("{asked} blocks asked for, {hits_of_one} hits of one node, {hits} of three, {read} from peers");
    assert!(read > 0 && hits_of_one > asked / 2, "the trace has something to find");
    assert!(hits as f64 >= 0.95 * hits_of_one as f64, "{hits} of {hits_of_one}");
}
