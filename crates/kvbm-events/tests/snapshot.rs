//! A late joiner, and one who lost something, get the whole truth by asking for it.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use kvbm_events::{
    Answer, EventManager, EventTransport, InProcessTransport, IndexFollower, KvIndex, PublisherConfig,
    Question, RemoteSnapshots, Snapshot, SnapshotServer, SnapshotSource, SourceId, StreamId, Subscriber,
};
use kvbm_plan::Epoch;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{World, block};

fn stream(epoch: u64) -> StreamId {
    StreamId { source: SourceId(5), epoch: Epoch(epoch), shard: 0 }
}

#[test]
fn a_late_joiner_reaches_the_full_truth() {
    let transport = Arc::new(InProcessTransport::default());
    let world = World::new(10_000);
    (0..400).for_each(|number| world.toggle(number, number as usize % 4));
    let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager = EventManager::new(config, SourceId(5), Epoch(1), transport.clone()).unwrap();
    manager.add_shard(0, world.clone()).unwrap();
    manager.pump(Instant::now()).unwrap();
    let source = world.clone();
    let server = SnapshotServer::new(move |of| (of == stream(1)).then(|| source.snapshot()));
    let _answering = server.serve(transport.as_ref(), SourceId(5)).unwrap();
    let snapshots = RemoteSnapshots::new(transport.clone());
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let mut follower = IndexFollower::new(subscriber, snapshots, KvIndex::default());
    (100..150).for_each(|number| world.toggle(number, number as usize % 4));
    manager.pump(Instant::now()).unwrap();
    while follower.poll(Duration::ZERO).unwrap() {}
    assert!(world.is_mirrored_by(follower.index()), "{:?}", follower.stats());
    assert_eq!((follower.stats().resyncs, follower.suspects().count()), (1, 0));
}

#[test]
fn a_large_snapshot_comes_in_parts_of_one_state() {
    let transport = Arc::new(InProcessTransport::default());
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let server = SnapshotServer::new(move |_| {
        let next_sequence = 10 + count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence, blocks: (0..20_000).map(block).collect() })
    });
    let _answering = server.serve(transport.as_ref(), SourceId(5)).unwrap();
    let mut snapshots = RemoteSnapshots::new(transport);
    let snapshot = snapshots.snapshot(stream(1), 5).unwrap();
    assert_eq!((snapshot.next_sequence, snapshot.blocks.len()), (10, 20_000));
    assert!(snapshot.blocks.iter().zip(0..).all(|(found, n)| *found == block(n)));
    assert_eq!(taken.load(Ordering::SeqCst), 1);
    // It was fetched to its end, so the next one is new; one that cannot reach far enough is none.
    assert_eq!(snapshots.snapshot(stream(1), 5).unwrap().next_sequence, 11);
    assert_eq!(snapshots.snapshot(stream(1), 1_000), None);
}

#[test]
fn followers_share_a_snapshot_and_a_bounded_number_is_kept() {
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let server = SnapshotServer::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence: 100, blocks: (0..10_000).map(block).collect() })
    });
    let ask = |epoch, ticket, part| {
        let question = Question { stream: stream(epoch), reach: 50, ticket, part };
        match Answer::decode(&server.answer(&question.encode())).unwrap() {
            Answer::Part(part) => Some(part.ticket),
            Answer::Nothing => None,
        }
    };
    let first = ask(1, 0, 0);
    assert_eq!(ask(1, 0, 0), first, "the second follower gets the same");
    assert_eq!(taken.load(Ordering::SeqCst), 1);
    let others: Vec<_> = (2..6).map(|epoch| ask(epoch, 0, 0)).collect();
    assert_eq!(ask(1, first.unwrap(), 1), None, "newer ones took its place");
    assert_eq!(ask(5, others[3].unwrap(), 1), others[3]);
    assert_eq!(ask(5, others[3].unwrap(), 1), None, "fetched to the end");
    assert_eq!(server.answer(b"what?").as_ref(), Answer::Nothing.encode());
}
