//! Losses and ends of those that are listened to.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use advisor::{Advisor, Following, Policy};
use kvbm_events::{
    EventBatch, EventBlock, EventKind, EventTransport, InProcessTransport, KvEvent, Snapshot, SnapshotSource,
    SourceId, StreamId, Subscriber, wire,
};
use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier};
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 20;

fn stream(source: u64) -> StreamId {
    StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 }
}

fn block(name: u8) -> EventBlock {
    let hash = SequenceHash::from_bytes([name; 16]);
    EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(1),
            group: GroupId(0),
            hash,
            parent: None,
            position: 0,
        },
        prefix_hash: hash,
        local_hash: None,
        block_bytes: BYTES,
        block_tokens: 16,
        location: Location::on(NodeId(0), Tier::G3),
    }
}

fn store(number: u64, name: u8) -> KvEvent {
    KvEvent::new(number, EventKind::Store(block(name)))
}

fn remove(number: u64, name: u8) -> KvEvent {
    KvEvent::new(number, EventKind::Remove(block(name)))
}

fn publish(transport: &InProcessTransport, source: u64, events: Vec<KvEvent>) {
    let next = events.last().map_or(0, |event| event.sequence + 1);
    let batch = EventBatch::new(stream(source), next, events);
    transport.publish(&wire::encode(&batch).unwrap().into(), Duration::ZERO).unwrap();
}

fn following<S: SnapshotSource>(transport: &InProcessTransport, snapshots: S) -> Following<S> {
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    Following::new(subscriber, snapshots, Advisor::new(Policy::default()))
}

/// Listens until it is so: on a busy machine not everything that waits is taken in within a moment.
fn listen_until<S: SnapshotSource>(following: &mut Following<S>, done: impl Fn(&Following<S>) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(following) && Instant::now() < deadline {
        following.listen(Duration::from_millis(20)).unwrap();
    }
}

/// Mutation that makes it fail: a `take` that applies events below `covered`.
#[test]
fn what_a_newer_snapshot_covers_is_not_applied_again() {
    let transport = InProcessTransport::default();
    // Block 1 went with event 4 and came back with event 5, which is in the snapshot as well.
    let snapshot = Snapshot { next_sequence: 6, blocks: vec![block(1), block(2)] };
    let mut following = following(&transport, |_| Some(snapshot.clone()));
    publish(&transport, 1, vec![store(0, 1), remove(4, 1)]);
    publish(&transport, 1, vec![store(5, 1), remove(6, 2)]);
    let known = |following: &Following<_>| (following.advisor.blocks(), following.suspects());
    listen_until(&mut following, |following| known(following) == (1, 0));
    assert_eq!(known(&following), (1, 0));
    assert_eq!(following.advisor.bytes_on(Tier::G3), BYTES, "block 1, and not 2");
    publish(&transport, 1, vec![remove(7, 1)]);
    listen_until(&mut following, |following| following.advisor.blocks() == 0);
    assert_eq!(following.advisor.blocks(), 0, "what comes after is applied");
}

#[test]
fn a_source_that_is_silent_for_too_long_is_forgotten() {
    let transport = InProcessTransport::default();
    let unanswered = |_| None;
    let mut patient = following(&transport, unanswered);
    let mut forever = following(&transport, unanswered).forget_after(Duration::ZERO);
    let mut hasty = following(&transport, unanswered).forget_after(Duration::from_millis(1));
    publish(&transport, 1, vec![store(0, 1)]);
    publish(&transport, 2, vec![store(7, 2)]);
    let known = |following: &Following<_>| (following.advisor.blocks(), following.suspects());
    listen_until(&mut patient, |following| known(following) == (2, 1));
    listen_until(&mut forever, |following| known(following) == (2, 1));
    // Nothing waits any more when this has listened so often, and nothing is left of what it heard.
    for _ in 0..5 {
        hasty.listen(Duration::from_millis(20)).unwrap();
    }
    assert_eq!([known(&patient), known(&forever), known(&hasty)], [(2, 1), (2, 1), (0, 0)]);
    // Whoever speaks again is heard again, from where it is.
    publish(&transport, 1, vec![store(1, 3)]);
    let mut hasty = hasty.forget_after(Duration::from_secs(600));
    listen_until(&mut hasty, |following| known(following) == (1, 1));
    assert_eq!(known(&hasty), (1, 1), "the rest has to come by a snapshot");
}
