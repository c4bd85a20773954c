//! An index behind a transport that loses, repeats, damages and refuses equals its source again and
//! again.

use crate::support::{Fate, Faulty, World};
use kvbm_events::{
    EventManager, EventTransport, IndexFollower, KvIndex, PublisherConfig, Snapshot, SourceId, StreamId,
    Subscriber,
};
use kvbm_plan::Epoch;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Deliver),
        2 => Just(Fate::Lose),
        1 => Just(Fate::Repeat),
        1 => Just(Fate::Corrupt),
        1 => Just(Fate::Unavailable),
        1 => Just(Fate::DeliveredButUnavailable),
    ]
}

fn manager(world: &World, epoch: u64, transport: &Arc<Faulty>) -> EventManager {
    let config = PublisherConfig { batch_events: 7, max_age: Duration::ZERO, ..PublisherConfig::default() };
    let transport = Arc::clone(transport) as Arc<dyn EventTransport>;
    let mut manager = EventManager::new(config, SourceId(7), Epoch(epoch), transport).unwrap();
    manager.add_shard(0, world.clone()).unwrap();
    manager
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Mutations that make it fail: `take` that applies events below `covered`; `resync` that
    /// accepts an older snapshot; `load` without `clear`.
    #[test]
    fn an_index_equals_its_source_after_any_faults(
        script in prop::collection::vec(fate(), 0..60),
        bursts in prop::collection::vec(
            (prop::collection::vec((0u32..100, 0usize..4), 0..30), any::<bool>(), any::<bool>()), 1..20),
        capacity in 1usize..60,
        late in any::<bool>(),
    ) {
        let transport = Arc::new(Faulty::new(script));
        let world = World::new(capacity);
        let mut manager = manager(&world, 1, &transport);
        let source = world.clone();
        let willing = std::cell::Cell::new(true);
        let snapshots = |_: StreamId| willing.get().then(|| source.snapshot());
        let mut receiver = (!late).then(|| transport.subscribe().unwrap());
        let mut follower = None;
        let mut now = Instant::now();
        for (changes, poll, answers) in bursts {
            for &(number, tier) in &changes {
                world.toggle(number, tier);
            }
            // An unavailable transport is one of the faults.
            let _ = manager.pump(now);
            now += Duration::from_millis(300);
            let receiver = receiver.take();
            if follower.is_none() {
                let receiver = receiver.unwrap_or_else(|| transport.subscribe().unwrap());
                follower = Some(IndexFollower::new(Subscriber::new(receiver), snapshots, KvIndex::default()));
            }
            willing.set(answers);
            if let (true, Some(follower)) = (poll, &mut follower) {
                follower.poll(Duration::ZERO).unwrap();
            }
        }
        willing.set(true);
        let mut follower = follower.unwrap();
        loop {
            let perfect = transport.is_perfect_now();
            now += Duration::from_secs(2);
            let sent = manager.pump(now);
            while follower.poll(Duration::ZERO).unwrap() {}
            if perfect && sent.is_ok() {
                break;
            }
        }
        prop_assert_eq!(follower.suspects().count(), 0);
        prop_assert!(world.is_mirrored_by(follower.index()), "{:?} {:?}", follower.stats(), follower.index());
        let stats = follower.subscriber().stats().tracker;
        prop_assert!(stats.events + stats.missing <= world.next());
    }
}

#[test]
fn a_source_that_starts_anew_is_followed_into_its_new_life() {
    let transport = Arc::new(Faulty::new(Vec::new()));
    let receiver = transport.subscribe().unwrap();
    let none = |_: StreamId| -> Option<Snapshot> { None };
    let mut follower = IndexFollower::new(Subscriber::new(receiver), none, KvIndex::default());
    let first = World::new(100);
    (0..40).for_each(|number| first.toggle(number, 0));
    manager(&first, 1, &transport).flush(crate::support::PATIENCE).unwrap();
    while follower.poll(Duration::ZERO).unwrap() {}
    assert!(first.is_mirrored_by(follower.index()));
    let second = World::new(100);
    (10..15).for_each(|number| second.toggle(number, 1));
    manager(&second, 2, &transport).flush(crate::support::PATIENCE).unwrap();
    while follower.poll(Duration::ZERO).unwrap() {}
    assert!(second.is_mirrored_by(follower.index()));
    assert_eq!((follower.stats().restarts, follower.stats().gaps), (1, 0));
    follower.forget(SourceId(7));
    assert_eq!(follower.index().stats().workers, 0);
}

/// A source that has lost events and gives no snapshot yet: what may be wrong is said.
#[test]
fn a_stream_is_suspect_until_a_snapshot_reaches_beyond_its_gap() {
    let transport = Arc::new(Faulty::new(Vec::new()));
    let receiver = transport.subscribe().unwrap();
    let world = World::new(3);
    (0..10).for_each(|number| world.toggle(number, 0));
    let answers = std::cell::RefCell::new(vec![
        Some(world.snapshot()),
        Some(Snapshot { next_sequence: 2, blocks: Vec::new() }),
        None,
    ]);
    let snapshots = |_: StreamId| answers.borrow_mut().pop().flatten();
    let mut follower = IndexFollower::new(Subscriber::new(receiver), snapshots, KvIndex::default());
    manager(&world, 1, &transport).flush(crate::support::PATIENCE).unwrap();
    // Asked at the gap and once more: none, then one from before the gap.
    follower.poll(Duration::ZERO).unwrap();
    assert_eq!(follower.suspects().count(), 1);
    assert!(!world.is_mirrored_by(follower.index()));
    assert!(follower.poll(Duration::ZERO).unwrap());
    assert_eq!((follower.suspects().count(), follower.stats().resyncs), (0, 1));
    assert!(world.is_mirrored_by(follower.index()));
}
