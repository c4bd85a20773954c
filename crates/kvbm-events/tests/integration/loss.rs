//! Invariant 4: whatever is lost, wherever, is noticed.

use crate::support::{Fate, Faulty, Ring};
use kvbm_events::{
    Delivery, EventManager, EventTransport, PublisherConfig, SourceId, StreamId, Subscriber, TransportError,
};
use kvbm_plan::Epoch;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SOURCE: SourceId = SourceId(7);

/// For each number of a stream: delivered (true) or reported missing (false); a number told twice
/// fails the test.
#[derive(Default)]
struct Told(Vec<bool>);

impl Told {
    fn take(&mut self, delivery: &Delivery, shard: u16) {
        let mut tell = |stream: &StreamId, number: u64, present: bool| {
            if stream.shard == shard {
                assert_eq!(number, self.0.len() as u64, "{stream}: every number once and in order");
                self.0.push(present);
            }
        };
        match delivery {
            Delivery::Events { stream, events } => {
                assert!(!events.is_empty());
                for event in events {
                    assert_eq!(event, &crate::support::event(event.sequence), "delivered as it was made");
                    tell(stream, event.sequence, true);
                }
            }
            Delivery::Gap { stream, missing } => {
                assert!(!missing.is_empty());
                missing.clone().for_each(|number| tell(stream, number, false));
            }
            Delivery::Restarted { .. } => panic!("no source was restarted"),
        }
    }
}

fn config(batch_events: usize) -> PublisherConfig {
    PublisherConfig { batch_events, max_age: Duration::ZERO, ..PublisherConfig::default() }
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Deliver),
        1 => Just(Fate::Lose),
        1 => Just(Fate::Repeat),
        1 => Just(Fate::Corrupt),
        1 => Just(Fate::Unavailable),
        1 => Just(Fate::DeliveredButUnavailable),
    ]
}

proptest! {
    /// Rings that overflow, a transport that loses, repeats, damages and refuses: after one
    /// heartbeat over a transport that works again, the follower knows of every single number
    /// whether it has it.
    ///
    /// Mutations that make it fail: no gap between events in `Tracker::accept`; a publisher that
    /// does not take over the `next_sequence` that its source returned.
    #[test]
    fn invariant_4_every_loss_is_detected(
        script in prop::collection::vec(fate(), 0..60),
        bursts in prop::collection::vec((0u64..30, 0u64..30), 1..20),
        capacity in 1usize..40,
        batch_events in 1usize..12,
    ) {
        let transport = Arc::new(Faulty::new(script));
        let mut follower = Subscriber::new(transport.subscribe().unwrap());
        let rings = [Ring::new(capacity), Ring::new(capacity)];
        let mut manager =
            EventManager::new(config(batch_events), SOURCE, Epoch(1), Arc::clone(&transport) as _).unwrap();
        for (shard, ring) in (0..).zip(&rings) {
            manager.add_shard(shard, ring.clone()).unwrap();
        }
        let start = Instant::now();
        for (first, second) in bursts {
            rings[0].push(first);
            rings[1].push(second);
            // An unavailable transport is one of the faults.
            let _ = manager.pump(start);
        }
        let mut now = start;
        while !transport.is_perfect_now() {
            now += Duration::from_secs(2);
            let _ = manager.pump(now);
        }
        now += Duration::from_secs(2);
        manager.flush(crate::support::PATIENCE).unwrap();
        manager.pump(now).unwrap();

        let mut told = [Told::default(), Told::default()];
        while let Some(delivery) = follower.next(Duration::ZERO).unwrap() {
            told[0].take(&delivery, 0);
            told[1].take(&delivery, 1);
        }
        for (told, ring) in told.iter().zip(&rings) {
            prop_assert_eq!(told.0.len() as u64, ring.next(), "every number is accounted for");
            for lost in ring.lost() {
                prop_assert!(!told.0[lost as usize], "a ghost: {} never left its ring", lost);
            }
        }
        let stats = follower.stats().tracker;
        let delivered = told.iter().flat_map(|told| &told.0).filter(|present| **present).count() as u64;
        prop_assert_eq!(stats.events, delivered);
        prop_assert_eq!(stats.missing, rings[0].next() + rings[1].next() - delivered);
        let lost_in_rings = (rings[0].lost().len() + rings[1].lost().len()) as u64;
        prop_assert_eq!(manager.stats().lost_in_source, lost_in_rings);
    }
}

/// Mutation that makes it fail: `Tracker::accept` ignores the batch's `next_sequence`.
#[test]
fn invariant_4_a_lost_tail_is_noticed_by_the_next_heartbeat() {
    // The announcement of the stream arrives, the only batch does not, the heartbeat does.
    let transport = Arc::new(Faulty::new(vec![Fate::Deliver, Fate::Lose]));
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let ring = Ring::new(100);
    let mut manager = EventManager::new(config(100), SOURCE, Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    let start = Instant::now();
    manager.pump(start).unwrap();
    ring.push(5);
    manager.pump(start).unwrap();
    assert_eq!(follower.next(Duration::ZERO).unwrap(), None, "nothing tells of the loss yet");
    manager.pump(start + manager.config().heartbeat).unwrap();
    let stream = StreamId { source: SOURCE, epoch: Epoch(1), shard: 0 };
    assert_eq!(follower.next(Duration::ZERO).unwrap(), Some(Delivery::Gap { stream, missing: 0..5 }));
    assert_eq!(follower.next(Duration::ZERO).unwrap(), None);
}

#[test]
fn a_late_joiner_gets_what_it_missed_and_a_resync_covers_it() {
    let transport = Arc::new(Faulty::new(Vec::new()));
    let ring = Ring::new(100);
    let mut manager = EventManager::new(config(10), SOURCE, Epoch(1), Arc::clone(&transport) as _).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(30);
    manager.flush(crate::support::PATIENCE).unwrap();

    let stream = StreamId { source: SOURCE, epoch: Epoch(1), shard: 0 };
    let mut late = Subscriber::new(transport.subscribe().unwrap());
    let mut snapshot = Subscriber::new(transport.subscribe().unwrap());
    snapshot.resynced(stream, 32);
    ring.push(5);
    manager.flush(crate::support::PATIENCE).unwrap();

    let gap = late.next(Duration::ZERO).unwrap();
    assert_eq!(gap, Some(Delivery::Gap { stream, missing: 0..30 }));
    let numbers = |delivery: Option<Delivery>| match delivery {
        Some(Delivery::Events { events, .. }) => {
            events.iter().map(|event| event.sequence).collect::<Vec<_>>()
        }
        other => panic!("expected events, got {other:?}"),
    };
    assert_eq!(numbers(late.next(Duration::ZERO).unwrap()), [30, 31, 32, 33, 34]);
    assert_eq!(numbers(snapshot.next(Duration::ZERO).unwrap()), [32, 33, 34], "the snapshot had the others");
    assert_eq!(snapshot.stats().tracker.duplicates, 2);
}

#[test]
fn a_slow_subscriber_learns_what_its_queue_dropped() {
    let config_of_queue = kvbm_events::InProcessConfig { queue_batches: 3, queue_bytes: 1 << 20 };
    let transport = Arc::new(kvbm_events::InProcessTransport::new(config_of_queue));
    let mut slow = Subscriber::new(transport.subscribe().unwrap());
    let ring = Ring::new(1000);
    let mut manager = EventManager::new(config(10), SOURCE, Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(100);
    manager.flush(crate::support::PATIENCE).unwrap();
    let stream = StreamId { source: SOURCE, epoch: Epoch(1), shard: 0 };
    assert_eq!(slow.next(Duration::ZERO).unwrap(), Some(Delivery::Gap { stream, missing: 0..70 }));
    let mut told = 70;
    while let Some(Delivery::Events { events, .. }) = slow.next(Duration::ZERO).unwrap() {
        assert_eq!(events[0].sequence, told);
        told += events.len() as u64;
    }
    assert_eq!(told, 100);
    assert_eq!(slow.stats().dropped, 7);
}

#[test]
fn a_closed_transport_is_an_error_after_the_rest_was_read() {
    let transport = Arc::new(kvbm_events::InProcessTransport::default());
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let ring = Ring::new(10);
    let mut manager = EventManager::new(config(10), SOURCE, Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(3);
    manager.flush(crate::support::PATIENCE).unwrap();
    drop(manager);
    assert!(matches!(follower.next(crate::support::PATIENCE), Ok(Some(Delivery::Events { .. }))));
    assert_eq!(
        follower.next(crate::support::PATIENCE),
        Err(TransportError::Closed { transport: "in-process" })
    );
}
