//! The index against a naive one, and what it costs.

use super::*;
use crate::EventBlock;
use kvbm_plan::{BlockIdentity, Epoch, Location, NamespaceId, NodeId, VolumeId};
use proptest::prelude::*;
use std::collections::BTreeSet;

impl KvIndex {
    /// What must hold between any two calls.
    fn check(&self) {
        let mut entries = 0;
        for (index, run) in self.runs.iter().enumerate() {
            run.spans.check();
            entries += run.hashes().len();
            assert_eq!(self.free.contains(&(index as u32)), run.hashes().is_empty());
            for (block, hash) in run.hashes().iter().enumerate() {
                let at = At { run: index as u32, block: block as u8 };
                assert_eq!(self.table.find(&self.runs, run.group, hash), Some(at));
                assert_eq!(run.is_live(at.block), run.spans.hold(at.block));
            }
            let spans = run.spans.as_slice();
            assert!(spans.iter().all(|span| usize::from(span.last) < run.hashes().len()));
            assert!(run.hashes().is_empty() || !run.is_hollow(), "memory follows what is held");
        }
        assert_eq!(entries, self.table.len());
        for (worker, listed, num_runs) in self.workers.runs() {
            let held = (0..).zip(&self.runs).filter(|(_, run)| run.spans.has_worker(worker));
            let held: Vec<u32> = held.map(|(index, _)| index).collect();
            assert_eq!(held.len(), num_runs);
            assert!(held.iter().all(|run| listed.contains(run)), "clearing finds every run");
        }
    }
}

fn hash(node: usize) -> SequenceHash {
    SequenceHash::from_bytes(
        (node as u128 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).to_le_bytes(),
    )
}

fn place(source: u64, shard: u16, tier: usize) -> Place {
    // A second volume on G4, and G1 told by two shards.
    let volume = (tier >= 3).then_some(VolumeId(tier as u32));
    let location = Location { tier: Tier::ALL[tier.min(3)], node: NodeId(source as u32), volume };
    Place { source: SourceId(source), shard, location }
}

/// A forest: the parent of each node, or none for a root.
#[derive(Clone, Debug)]
struct Forest(Vec<Option<usize>>);

impl Forest {
    /// Mostly chains, as `forks` says.
    fn new(forks: &[(bool, usize)]) -> Self {
        let mut parents: Vec<Option<usize>> = vec![None];
        for &(fork, at) in forks {
            let len = parents.len();
            parents.push(match (fork, at % (len + 1)) {
                (false, _) => Some(len - 1),
                (true, at) if at < len => Some(at),
                (true, _) => None,
            });
        }
        Self(parents)
    }

    /// Nodes from the root to `node`.
    fn path(&self, node: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(node), |&node| self.0[node]).collect();
        path.reverse();
        path
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// The last `len` nodes of the path to `node`, tail included.
    Store {
        source: u64,
        shard: u16,
        tier: usize,
        node: usize,
        len: usize,
    },
    Remove {
        source: u64,
        shard: u16,
        tier: usize,
        node: usize,
        len: usize,
    },
    Clear {
        source: u64,
        shard: u16,
    },
    Forget {
        source: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let at = || (0u64..4, 0u16..2, 0usize..5, any::<usize>(), 1usize..400);
    prop_oneof![
        8 => at().prop_map(|(source, shard, tier, node, len)| Op::Store { source, shard, tier, node, len }),
        6 => at().prop_map(|(source, shard, tier, node, len)| Op::Remove { source, shard, tier, node, len: len % 20 }),
        1 => (0u64..4, 0u16..2).prop_map(|(source, shard)| Op::Clear { source, shard }),
        1 => (0u64..4).prop_map(|source| Op::Forget { source }),
    ]
}

/// Who holds what, without any cleverness.
#[derive(Default)]
struct Naive(BTreeSet<(u64, u16, usize, usize)>);

impl Naive {
    fn find(&self, path: &[usize]) -> Vec<(u64, u32, [u32; 4])> {
        let holds = |source, node| self.0.iter().filter(move |held| (held.0, held.3) == (source, node));
        let each = |source| {
            let len = path.iter().take_while(|&&node| holds(source, node).next().is_some()).count();
            let mut by_tier = [0; 4];
            for node in &path[..len] {
                holds(source, *node).for_each(|held| by_tier[held.2.min(3)] += 1);
            }
            (source, len as u32, by_tier)
        };
        (0..4).map(each).filter(|found| found.1 > 0).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Mutations that make it fail: `Part::add` without the break at a hole; `go_on` without its
    /// filter; `settle` without `set_dead` before it.
    #[test]
    fn the_index_agrees_with_a_naive_one(
        forks in prop::collection::vec((prop::bool::weighted(0.02), any::<usize>()), 0..600),
        ops in prop::collection::vec(op(), 1..60),
        probes in prop::collection::vec(any::<usize>(), 8),
    ) {
        let forest = Forest::new(&forks);
        let (mut index, mut naive) = (KvIndex::default(), Naive::default());
        for op in ops {
            match op {
                Op::Store { source, shard, tier, node, len } => {
                    let path = forest.path(node % forest.0.len());
                    let part = &path[path.len().saturating_sub(len)..];
                    let hashes: Vec<SequenceHash> = part.iter().map(|&node| hash(node)).collect();
                    let parent = forest.0[part[0]].map(hash);
                    index.store(place(source, shard, tier), GroupId(0), parent, &hashes);
                    naive.0.extend(part.iter().map(|&node| (source, shard, tier, node)));
                }
                Op::Remove { source, shard, tier, node, len } => {
                    let path = forest.path(node % forest.0.len());
                    let part = &path[path.len().saturating_sub(len)..];
                    let hashes: Vec<SequenceHash> = part.iter().rev().map(|&node| hash(node)).collect();
                    index.remove(place(source, shard, tier), GroupId(0), &hashes);
                    for &node in part {
                        naive.0.remove(&(source, shard, tier, node));
                    }
                }
                Op::Clear { source, shard } => {
                    index.clear(SourceId(source), shard);
                    naive.0.retain(|held| (held.0, held.1) != (source, shard));
                }
                Op::Forget { source } => {
                    index.forget(SourceId(source));
                    naive.0.retain(|held| held.0 != source);
                }
            }
            index.check();
            for probe in &probes {
                let path = forest.path(probe % forest.0.len());
                let chain: Vec<SequenceHash> = path.iter().map(|&node| hash(node)).collect();
                let mut found = Vec::new();
                index.find(GroupId(0), &chain, &mut found);
                let mut found: Vec<_> = found.iter().map(|m| (m.source.0, m.blocks, m.by_tier)).collect();
                found.sort_unstable();
                prop_assert_eq!(found, naive.find(&path));
            }
        }
        let held: BTreeSet<_> = index.holdings().map(|(place, group, hash)| {
            assert_eq!(group, GroupId(0));
            (place.source.0, place.shard, place.location.volume.map_or(place.location.tier.index(), |v| v.0 as usize), hash)
        }).collect();
        let naive_held: BTreeSet<_> = naive.0.iter().map(|&(w, s, t, node)| (w, s, t, hash(node))).collect();
        prop_assert_eq!(index.stats().blocks, naive_held.iter().map(|held| held.3).collect::<BTreeSet<_>>().len() as u64);
        for source in 0..4 {
            let total = naive.0.iter().filter(|held| held.0 == source).count() as u64;
            prop_assert_eq!(index.blocks(SourceId(source)).iter().sum::<u64>(), total);
        }
        prop_assert_eq!(held, naive_held);
        (0..4).for_each(|source| index.forget(SourceId(source)));
        index.check();
        let stats = index.stats();
        prop_assert_eq!((stats.blocks, stats.runs, stats.workers), (0, 0, 0));
    }
}

fn chain(name: usize, shared: usize, len: usize) -> Vec<SequenceHash> {
    (0..len)
        .map(|at| {
            if at < shared { hash(name / 8 * 1_000_000 + at) } else { hash((name + 7) * 1_000_000_000 + at) }
        })
        .collect()
}

/// Sequences of 128 blocks that share prefixes of 32, each block as an event of its own.
#[test]
fn a_block_costs_at_most_48_bytes_and_a_further_worker_two() {
    let mut index = KvIndex::default();
    let store = |index: &mut KvIndex, source| {
        for name in 0..1000 {
            let chain = chain(name, 32, 128);
            for (at, hash) in chain.iter().enumerate() {
                let parent = at.checked_sub(1).map(|before| chain[before]);
                index.store(place(source, 0, 0), GroupId(0), parent, &[*hash]);
            }
        }
    };
    store(&mut index, 0);
    let one = index.stats();
    assert_eq!(one.blocks, 1000 * 96 + 125 * 32);
    assert!(one.bytes as u64 <= 48 * one.blocks, "{one:?}: {} a block", one.bytes as u64 / one.blocks);
    (1..16).for_each(|source| store(&mut index, source));
    let all = index.stats();
    assert_eq!(all.blocks, one.blocks);
    assert!((all.bytes - one.bytes) as u64 <= 2 * 15 * one.blocks, "{all:?}");
    let mut found = Vec::new();
    index.find(GroupId(0), &chain(77, 32, 128), &mut found);
    assert_eq!(found.len(), 16);
    assert!(found.iter().all(|found| found.blocks == 128 && found.by_tier == [128, 0, 0, 0]));
}

#[test]
fn memory_is_given_back() {
    let mut index = KvIndex::default();
    for name in 0..1000 {
        index.store(place(0, 0, 0), GroupId(0), None, &chain(name, 0, 128));
    }
    let full = index.stats().bytes;
    for name in 0..1000 {
        let chain = chain(name, 0, 128);
        // Head first, against the order of eviction; every hundredth keeps its last block.
        index.remove(place(0, 0, 0), GroupId(0), &chain[..if name % 100 == 0 { 127 } else { 128 }]);
    }
    index.check();
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.runs), (10, 10));
    // What stays is the list of runs, for the next ones.
    assert!(stats.bytes < full / 10, "{} of {full}", stats.bytes);
}

#[test]
fn what_is_beyond_the_limit_is_refused_and_counted() {
    let mut index = KvIndex::new(100);
    index.store(place(0, 0, 0), GroupId(0), None, &chain(0, 0, 128));
    assert_eq!((index.stats().blocks, index.stats().refused), (100, 28));
    index.store(place(1, 0, 0), GroupId(0), None, &chain(0, 0, 128));
    assert_eq!(index.blocks(SourceId(1)), [100, 0, 0, 0], "known blocks cost nothing");
    for node in 0..300 {
        let mut place = place(2, 0, 0);
        place.location.node = NodeId(node);
        index.store(place, GroupId(0), None, &chain(0, 0, 1));
    }
    assert_eq!((index.blocks(SourceId(2)), index.stats().refused), ([256, 0, 0, 0], 28 + 28 + 44));
    index.check();
}

#[test]
fn groups_do_not_mix() {
    let mut index = KvIndex::default();
    index.store(place(0, 0, 0), GroupId(0), None, &chain(0, 0, 10));
    index.store(place(0, 0, 0), GroupId(1), None, &chain(0, 0, 4));
    index.check();
    let mut found = Vec::new();
    for (group, blocks) in [(0, 10), (1, 4)] {
        index.find(GroupId(group), &chain(0, 0, 10), &mut found);
        assert_eq!(found[0].blocks, blocks);
    }
    index.find(GroupId(2), &chain(0, 0, 10), &mut found);
    assert_eq!(found, []);
}

#[test]
fn events_are_applied_in_their_order() {
    let chain = chain(0, 0, 6);
    let stream = StreamId { source: SourceId(9), epoch: Epoch(1), shard: 3 };
    let block = |at: usize, tier| EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: chain[at],
            parent: at.checked_sub(1).map(|before| chain[before]),
            position: at as u32,
        },
        prefix_hash: chain[0],
        local_hash: None,
        block_bytes: 1,
        block_tokens: 16,
        location: Location::on(NodeId(0), tier),
    };
    let (store, remove) = (EventKind::Store, EventKind::Remove);
    let mut kinds: Vec<EventKind> = (0..6).map(|at| store(block(at, Tier::G1))).collect();
    kinds.extend([
        store(block(0, Tier::G2)),
        store(block(1, Tier::G2)),
        remove(block(5, Tier::G1)),
        remove(block(1, Tier::G1)),
    ]);
    let mut events: Vec<KvEvent> =
        kinds.into_iter().zip(0..).map(|(kind, n)| KvEvent::new(n, kind)).collect();
    let mut index = KvIndex::default();
    index.apply(stream, &events);
    index.check();
    assert_eq!(index.blocks(stream.source), [4, 2, 0, 0]);
    let mut found = Vec::new();
    index.find(GroupId(0), &chain, &mut found);
    assert_eq!((found[0].blocks, found[0].by_tier), (5, [4, 2, 0, 0]));
    index.remove(
        Place { source: stream.source, shard: 3, location: Location::on(NodeId(0), Tier::G2) },
        GroupId(0),
        &chain[1..2],
    );
    index.find(GroupId(0), &chain, &mut found);
    assert_eq!((found[0].blocks, found[0].by_tier), (1, [1, 1, 0, 0]), "a hole ends the prefix");

    events.clear();
    events.push(KvEvent::new(10, EventKind::Cleared));
    index.apply(StreamId { shard: 2, ..stream }, &events);
    assert_eq!(index.blocks(stream.source), [4, 1, 0, 0], "another shard");
    index.apply(stream, &events);
    assert_eq!(index.stats().blocks, 0);
    assert_eq!(index.sources().collect::<Vec<_>>(), [stream.source], "cleared, not forgotten");
}

/// Mutation that makes it fail: `drop_spans` that walks every run.
#[test]
fn clearing_a_source_costs_what_it_holds() {
    // The shortest of some times: other work on the machine only adds to it.
    let time = |chains: usize| {
        let mut index = KvIndex::default();
        (0..chains).for_each(|node| index.store(place(1, 0, 0), GroupId(0), None, &[hash(node)]));
        let once = |_| {
            index.store(place(2, 0, 0), GroupId(0), None, &[hash(chains)]);
            let start = std::time::Instant::now();
            index.clear(SourceId(2), 0);
            (0..20).for_each(|_| index.clear(SourceId(2), 0));
            index.forget(SourceId(2));
            start.elapsed()
        };
        (0..10).map(once).min().unwrap()
    };
    let (few, many) = (time(1_000), time(100_000));
    let limit = 20 * few.max(std::time::Duration::from_micros(10));
    assert!(many < limit, "{few:?} beside 1,000 chains, {many:?} beside 100,000");
}

#[test]
fn the_list_of_runs_stays_short_where_blocks_come_and_go() {
    let mut index = KvIndex::default();
    index.store(place(1, 0, 0), GroupId(0), None, &[hash(0)]);
    for _ in 0..1000 {
        index.store(place(2, 0, 0), GroupId(0), None, &[hash(0)]);
        index.remove(place(2, 0, 0), GroupId(0), &[hash(0)]);
    }
    index.check();
    assert!(index.workers.runs().all(|(_, listed, _)| listed.len() <= 66));
}
