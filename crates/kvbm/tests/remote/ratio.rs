//! Three nodes that share what they have find as much as one that has all of it.

use crate::support::{serve, tokens};
use crate::world::{World, meet};

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

/// Conversations of six turns, eight at a time: each turn asks for the conversation so far and two
/// blocks more. (number of the conversation, blocks)
fn conversations() -> Vec<(u32, u32)> {
    let mut numbers = Numbers(7);
    let mut live: Vec<(u32, u32)> = (1..=8).map(|number| (number, 0)).collect();
    let (mut requests, mut next) = (Vec::new(), 9);
    for _ in 0..REQUESTS {
        let of = &mut live[numbers.below(8) as usize];
        of.1 += 1;
        requests.push((of.0, 2 + 2 * of.1));
        if of.1 == 6 {
            *of = (next, 0);
            next += 1;
        }
    }
    requests
}

/// Which of 24 sequences, all of which together fill the memory of three nodes; eight of them,
/// which fill one node, are asked for twice as often as the others.
fn sequences() -> Vec<(u32, u32)> {
    let mut numbers = Numbers(7);
    let request = |_| {
        let often = numbers.below(3) > 0;
        let sequence = if often { numbers.below(8) } else { 8 + numbers.below(16) };
        (sequence + 1, 4 + numbers.below(9))
    };
    (0..REQUESTS).map(request).collect()
}

/// Hits of one node with three times the memory, and of three nodes among which the same requests
/// are divided at random.
fn hits(requests: &[(u32, u32)]) -> [usize; 2] {
    let one = crate::support::two_tiers(16, 3 * G2);
    let (mut of_one, mut of_three) = (0, 0);
    for &(start, blocks) in requests {
        of_one += serve(&one, &tokens(&one, start, blocks));
        assert!(one.wait_offloads(crate::support::soon()));
    }
    let world = World::new();
    let nodes = [1, 2, 3].map(|id| world.node(id, [16, G2], |_| {}));
    meet(&nodes.each_ref().map(|node| &node.manager));
    let mut numbers = Numbers(11);
    for &(start, blocks) in requests {
        let manager = &nodes[numbers.below(3) as usize].manager;
        of_three += serve(manager, &tokens(manager, start, blocks));
        assert!(manager.wait_offloads(crate::support::soon()));
    }
    let counted = |manager: &kvbm::KvBlockManager<kvbm::Owned>, peer| {
        manager.metrics().peer(kvbm::plan::NodeId(peer)).hits.get()
    };
    let read: u64 = nodes.iter().flat_map(|node| (1..=3).map(|peer| counted(&node.manager, peer))).sum();
    let asked: u32 = requests.iter().map(|(_, blocks)| blocks).sum();
    println!("{asked} blocks asked for, {of_one} hits of one node, {of_three} of three, {read} from peers");
    assert!(read > 0 && of_one > asked as usize / 2, "the trace has something to find");
    [of_one, of_three]
}

#[test]
fn three_nodes_find_what_one_with_all_of_their_memory_finds() {
    let [of_one, of_three] = hits(&conversations());
    assert!(of_three as f64 >= 0.95 * of_one as f64, "{of_three} of {of_one}");
}

/// A node keeps what it reads, so copies on several nodes take room: the worst is a hot set as
/// large as a node.
#[test]
fn copies_on_several_nodes_cost_some_hits_where_memory_is_short() {
    let [of_one, of_three] = hits(&sequences());
    assert!(of_three as f64 >= 0.85 * of_one as f64, "{of_three} of {of_one}");
}
