//! Our side: events as a subscriber gets them, applied to a `KvIndex`.

use crate::clock::cpu_seconds;
use crate::workload::{LENGTH, PORTION, Step, Workload, random};
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

/// The chain of every sequence: the same for every worker.
pub struct Chains(Vec<Vec<SequenceHash>>);

/// What a subscriber gets: events of its own, which it frees when they are applied. Each holds one
/// piece of heap memory, as each of the peer's does.
enum Event {
    /// One block, as kvbm tells it.
    Single(StreamId, Vec<KvEvent>),
    /// Several blocks of a chain, as engines tell them.
    Run { place: Place, parent: Option<SequenceHash>, hashes: Vec<SequenceHash> },
}

impl Event {
    fn apply(self, index: &mut KvIndex) {
        match self {
            Self::Single(stream, events) => {
                index.apply(stream, &events);
            }
            Self::Run { place, parent, hashes } => {
                index.store(place, GroupId(0), parent, &hashes);
            }
        }
    }
}

impl Chains {
    pub fn new(work: &Workload) -> Self {
        Self((0..work.sequences()).map(|sequence| chain(work, sequence)).collect())
    }

    fn block(&self, sequence: usize, at: usize) -> EventBlock {
        let chain = &self.0[sequence];
        EventBlock {
            identity: BlockIdentity {
                namespace: NamespaceId(1),
                group: GroupId(0),
                hash: chain[at],
                parent: at.checked_sub(1).map(|before| chain[before]),
                position: at as u32,
            },
            prefix_hash: chain[0],
            local_hash: None,
            block_bytes: 2 << 20,
            block_tokens: 16,
            location: Location::on(NodeId(0), Tier::G1),
        }
    }

    /// The events of one step, `per_event` blocks each.
    fn events(&self, step: Step, per_event: usize, out: &mut Vec<Event>) {
        let Step { worker, sequence, from } = step;
        let source = SourceId(worker as u64);
        for start in (from..LENGTH).step_by(per_event) {
            out.push(if per_event == 1 {
                let stream = StreamId { source, epoch: Epoch(1), shard: 0 };
                let event = KvEvent::new(out.len() as u64, EventKind::Store(self.block(sequence, start)));
                Event::Single(stream, vec![event])
            } else {
                let chain = &self.0[sequence];
                let place = Place { source, shard: 0, location: Location::on(NodeId(0), Tier::G1) };
                let parent = start.checked_sub(1).map(|before| chain[before]);
                let hashes = chain[start..LENGTH.min(start + per_event)].to_vec();
                Event::Run { place, parent, hashes }
            });
        }
    }

    /// An index that has taken every event of `per_event` blocks, and the CPU seconds that this
    /// took. Events are made in portions outside the clock and freed inside it, as the peer's are.
    pub fn store(&self, work: &Workload, per_event: usize) -> (KvIndex, f64) {
        let (mut index, mut seconds) = (KvIndex::default(), 0.0);
        let mut take = |events: Vec<Event>| {
            seconds += cpu_seconds(|| events.into_iter().for_each(|event| event.apply(&mut index)));
        };
        let mut portion = Vec::new();
        work.steps(|step| {
            self.events(step, per_event, &mut portion);
            if portion.len() >= PORTION {
                take(std::mem::take(&mut portion));
            }
        });
        take(portion);
        let stats = index.stats();
        assert_eq!((stats.blocks, stats.refused), (work.blocks() as u64, 0), "everything was taken");
        (index, seconds)
    }
}

/// CPU seconds of `count` queries, each of which finds all its blocks on every worker.
pub fn find(work: &Workload, chains: &Chains, index: &KvIndex, count: usize) -> f64 {
    let queries: Vec<usize> = work.queries(count).collect();
    let mut found = Vec::new();
    let mut blocks = 0;
    let seconds = cpu_seconds(|| {
        for &query in &queries {
            index.find(GroupId(0), black_box(&chains.0[query]), &mut found);
            blocks += found.iter().map(|worker| worker.blocks as usize).sum::<usize>();
        }
    });
    assert_eq!(blocks, count * work.workers() * LENGTH, "every query finds all of it everywhere");
    seconds
}
