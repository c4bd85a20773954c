//! Our side: events as a subscriber gets them, applied to a `KvIndex`.

use crate::clock::cpu_seconds;
use crate::workload::{LENGTH, Step, Workload, random};
use kvbm_events::{EventBlock, EventKind, KvEvent, KvIndex, Place, SourceId, StreamId};
use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier};
use std::hint::black_box;

fn hash(block: u64) -> SequenceHash {
    let (low, high) = (random(block), random(block ^ 1 << 63));
    SequenceHash::from_bytes((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
}

fn chain(work: &Workload, sequence: usize) -> Vec<SequenceHash> {
    (0..LENGTH).map(|at| hash(work.block(sequence, at))).collect()
}

/// The events of every sequence: the same for every worker.
pub struct Events {
    /// One of each block, as kvbm tells it.
    single: Vec<KvEvent>,
    /// The same blocks, for events of several at once, as engines tell them.
    hashes: Vec<SequenceHash>,
}

impl Events {
    pub fn new(work: &Workload) -> Self {
        let event = |sequence: usize, at: usize| {
            let identity = BlockIdentity {
                namespace: NamespaceId(1),
                group: GroupId(0),
                hash: hash(work.block(sequence, at)),
                parent: at.checked_sub(1).map(|before| hash(work.block(sequence, before))),
                position: at as u32,
            };
            let block = EventBlock {
                identity,
                prefix_hash: hash(work.block(sequence, 0)),
                local_hash: None,
                block_bytes: 2 << 20,
                block_tokens: 16,
                location: Location::on(NodeId(0), Tier::G1),
            };
            KvEvent::new(0, EventKind::Store(block))
        };
        let all = || (0..work.sequences()).flat_map(|s| (0..LENGTH).map(move |at| (s, at)));
        Self {
            single: all().map(|(s, at)| event(s, at)).collect(),
            hashes: all().map(|(s, at)| hash(work.block(s, at))).collect(),
        }
    }

    /// An index that has taken every event of `per_event` blocks, and the CPU seconds that this took.
    pub fn store(&self, work: &Workload, per_event: usize) -> (KvIndex, f64) {
        let mut index = KvIndex::default();
        let seconds = cpu_seconds(|| {
            work.steps(|Step { worker, sequence, from }| {
                let (first, end) = (sequence * LENGTH + from, (sequence + 1) * LENGTH);
                if per_event == 1 {
                    let stream = StreamId { source: SourceId(worker as u64), epoch: Epoch(1), shard: 0 };
                    for event in &self.single[first..end] {
                        index.apply(stream, std::slice::from_ref(event));
                    }
                    return;
                }
                let location = Location::on(NodeId(0), Tier::G1);
                let place = Place { source: SourceId(worker as u64), shard: 0, location };
                for at in (first..end).step_by(per_event) {
                    let parent = (at % LENGTH > 0).then(|| self.hashes[at - 1]);
                    index.store(place, GroupId(0), parent, &self.hashes[at..end.min(at + per_event)]);
                }
            });
        });
        let stats = index.stats();
        assert_eq!((stats.blocks, stats.refused), (work.blocks() as u64, 0), "everything was taken");
        (index, seconds)
    }
}

/// CPU seconds of `count` queries, each of which finds all its blocks on every worker.
pub fn find(work: &Workload, index: &KvIndex, count: usize) -> f64 {
    let chains: Vec<Vec<SequenceHash>> =
        (0..work.sequences()).map(|sequence| chain(work, sequence)).collect();
    let queries: Vec<usize> = work.queries(count).collect();
    let mut found = Vec::new();
    let mut blocks = 0;
    let seconds = cpu_seconds(|| {
        for &query in &queries {
            index.find(GroupId(0), black_box(&chains[query]), &mut found);
            blocks += found.iter().map(|worker| worker.blocks as usize).sum::<usize>();
        }
    });
    assert_eq!(blocks, count * work.workers() * LENGTH, "every query finds all of it everywhere");
    seconds
}
