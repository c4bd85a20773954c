//! When batches are published, what is kept when they cannot be, and the publishing thread.

use crate::support::{Fate, Faulty, PATIENCE, Ring};
use kvbm_events::{
    Answering, ConfigError, Delivery, EventBatch, EventKind, EventManager, EventReceiver, EventSource,
    EventTransport, FlushError, InProcessTransport, KvEvent, Payload, Publisher, PublisherConfig,
    PublisherWaker, Responder, SourceId, Subscriber, TransportError, wire,
};
use kvbm_plan::Epoch;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn manager(config: PublisherConfig, transport: Arc<dyn EventTransport>) -> EventManager {
    EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap()
}

fn batches(receiver: &mut dyn EventReceiver) -> Vec<EventBatch> {
    std::iter::from_fn(|| receiver.recv(Duration::ZERO).unwrap()).map(|p| wire::decode(&p).unwrap()).collect()
}

fn sizes(receiver: &mut dyn EventReceiver) -> Vec<usize> {
    batches(receiver).iter().map(|batch| batch.events.len()).collect()
}

#[test]
fn batches_go_by_count_by_bytes_and_by_age() {
    let transport = Arc::new(InProcessTransport::default());
    let mut receiver = transport.subscribe().unwrap();
    let ring = Ring::new(1000);
    let config = PublisherConfig {
        batch_events: 10,
        max_age: Duration::from_millis(10),
        heartbeat: Duration::from_secs(1),
        ..PublisherConfig::default()
    };
    let mut by_count = manager(config, Arc::clone(&transport) as _);
    by_count.add_shard(0, ring.clone()).unwrap();
    let start = Instant::now();
    by_count.pump(start).unwrap();
    assert_eq!(sizes(receiver.as_mut()), [0], "a new stream announces itself");
    ring.push(25);
    by_count.pump(start).unwrap();
    assert_eq!(sizes(receiver.as_mut()), [10, 10], "full ones at once");
    by_count.pump(start + Duration::from_millis(9)).unwrap();
    assert_eq!(sizes(receiver.as_mut()), Vec::<usize>::new(), "the rest waits for company");
    by_count.pump(start + Duration::from_millis(10)).unwrap();
    assert_eq!(sizes(receiver.as_mut()), [5]);
    by_count.pump(start + Duration::from_millis(1009)).unwrap();
    assert_eq!(sizes(receiver.as_mut()), Vec::<usize>::new());
    by_count.pump(start + Duration::from_millis(1010)).unwrap();
    let heartbeat = batches(receiver.as_mut());
    assert_eq!((heartbeat.len(), heartbeat[0].events.len(), heartbeat[0].next_sequence), (1, 0, 25));

    let bytes = 3 * wire::max_encoded_len(&crate::support::event(0));
    let mut by_bytes = manager(PublisherConfig { batch_bytes: bytes, ..config }, Arc::clone(&transport) as _);
    let ring = Ring::new(1000);
    by_bytes.add_shard(0, ring.clone()).unwrap();
    ring.push(7);
    by_bytes.pump(start).unwrap();
    assert_eq!(sizes(receiver.as_mut()), [3, 3]);
}

/// Mutation that makes it fail: an age that is counted from the first event of a batch.
#[test]
fn how_long_events_wait_adapts_to_the_load() {
    const NOTHING: [usize; 0] = [];
    let transport = Arc::new(InProcessTransport::default());
    let mut receiver = transport.subscribe().unwrap();
    let ring = Ring::new(100_000);
    let max_age = Duration::from_millis(10);
    let config = PublisherConfig { batch_events: 1000, max_age, ..PublisherConfig::default() };
    let mut manager = manager(config, Arc::clone(&transport) as _);
    manager.add_shard(0, ring.clone()).unwrap();
    let start = Instant::now();
    let mut at = |milliseconds: u64, events: u64| {
        ring.push(events);
        manager.pump(start + Duration::from_millis(milliseconds)).unwrap();
        sizes(receiver.as_mut())
    };
    assert_eq!(at(0, 0), [0]);
    // Little to tell: told at once.
    assert_eq!(at(100, 1), [1]);
    assert_eq!(at(110, 1), [1]);
    assert_eq!(at(300, 3), [3]);
    // More: after the first batch, one each ten milliseconds.
    for millisecond in 301..310 {
        assert_eq!(at(millisecond, 20), NOTHING, "{millisecond}");
    }
    assert_eq!(at(310, 20), [200]);
    assert_eq!(at(319, 1), NOTHING);
    assert_eq!(at(320, 0), [1], "none waits longer than that");
    // Much: full batches, whenever there is one.
    assert_eq!(at(321, 2500), [1000, 1000]);
    assert_eq!(at(322, 2500), [1000, 1000, 1000]);
    assert_eq!(at(332, 0), NOTHING, "all was told");
    assert_eq!(at(900, 1), [1], "quiet again");
}

#[test]
fn an_unavailable_transport_keeps_the_batch_and_the_ring_counts_what_does_not_fit() {
    let transport = Arc::new(Faulty::new(vec![Fate::Unavailable; 3]));
    let mut receiver = transport.subscribe().unwrap();
    let ring = Ring::new(8);
    let config = PublisherConfig { batch_events: 4, max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager = manager(config, transport);
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(4);
    for _ in 0..3 {
        assert!(matches!(manager.pump(Instant::now()), Err(TransportError::Unavailable { .. })));
        ring.push(4);
    }
    assert_eq!(ring.lost(), [12, 13, 14, 15], "4 in the manager, 8 in the ring");
    manager.flush(PATIENCE).unwrap();
    let got = batches(receiver.as_mut());
    let numbers: Vec<u64> = got.iter().flat_map(|batch| &batch.events).map(|event| event.sequence).collect();
    assert_eq!(numbers, (0..12).collect::<Vec<_>>());
    assert_eq!(got.last().unwrap().next_sequence, 16, "the last batch tells of the four that were lost");
    let stats = manager.stats();
    assert_eq!((stats.events, stats.unavailable, stats.lost_in_source, stats.refused), (12, 3, 4, 0));
}

#[test]
fn one_event_that_cannot_be_encoded_costs_only_itself() {
    let transport = Arc::new(InProcessTransport::default());
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let mut events: Vec<KvEvent> = (0..5).map(crate::support::event).collect();
    events[2].extra = vec![("key".into(), "v".repeat(KvEvent::MAX_EXTRA_BYTES))];
    let mut manager = manager(PublisherConfig::default(), transport);
    manager
        .add_shard(0, move |_: usize, out: &mut Vec<KvEvent>| {
            out.append(&mut events);
            5
        })
        .unwrap();
    manager.flush(PATIENCE).unwrap();
    let (mut numbers, mut gaps) = (Vec::new(), Vec::new());
    while let Some(delivery) = follower.next(Duration::ZERO).unwrap() {
        match delivery {
            Delivery::Events { events, .. } => numbers.extend(events.iter().map(|event| event.sequence)),
            Delivery::Gap { missing, .. } => gaps.extend(missing),
            Delivery::Restarted { .. } => panic!("nothing was restarted"),
        }
    }
    assert_eq!((numbers, gaps), (vec![0, 1, 3, 4], vec![2]));
    assert_eq!((manager.stats().refused, manager.stats().events), (1, 4));
}

#[test]
fn events_out_of_order_are_dropped_and_counted() {
    let transport = Arc::new(InProcessTransport::default());
    let mut receiver = transport.subscribe().unwrap();
    let mut script = vec![
        crate::support::event(1),
        crate::support::event(0),
        crate::support::event(1),
        crate::support::event(2),
    ];
    let mut manager = manager(PublisherConfig::default(), transport);
    manager
        .add_shard(0, move |_: usize, out: &mut Vec<KvEvent>| {
            out.append(&mut script);
            3
        })
        .unwrap();
    manager.flush(PATIENCE).unwrap();
    let numbers: Vec<u64> = batches(receiver.as_mut())
        .iter()
        .flat_map(|batch| &batch.events)
        .map(|event| event.sequence)
        .collect();
    assert_eq!(numbers, [1, 2]);
    assert_eq!((manager.stats().out_of_order, manager.stats().lost_in_source), (2, 1));
}

#[test]
fn bad_configurations_name_field_value_and_rule() {
    let base = PublisherConfig::default();
    let cases = [
        ("batch_events", PublisherConfig { batch_events: 0, ..base }),
        ("batch_events", PublisherConfig { batch_events: EventBatch::MAX_EVENTS + 1, ..base }),
        ("batch_bytes", PublisherConfig { batch_bytes: 0, ..base }),
        ("batch_bytes", PublisherConfig { batch_bytes: wire::MAX_BYTES, ..base }),
        ("max_age", PublisherConfig { max_age: Duration::from_secs(11), ..base }),
        ("heartbeat", PublisherConfig { heartbeat: Duration::ZERO, ..base }),
        ("publish_timeout", PublisherConfig { publish_timeout: Duration::from_secs(11), ..base }),
    ];
    for (name, config) in cases {
        match config.validate() {
            Err(ConfigError::Range { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(base.validate(), Ok(()));
    let mut manager = manager(base, Arc::new(InProcessTransport::default()));
    manager.add_shard(3, Ring::new(1)).unwrap();
    assert_eq!(manager.add_shard(3, Ring::new(1)), Err(ConfigError::DuplicateShard(3)));
}

fn spawn(ring: &Ring, transport: Arc<dyn EventTransport>) -> Publisher {
    let mut manager = manager(PublisherConfig::default(), transport);
    manager.add_shard(0, ring.clone()).unwrap();
    manager.spawn().unwrap()
}

#[test]
fn the_thread_publishes_by_itself_and_on_flush() {
    let transport = Arc::new(InProcessTransport::default());
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let ring = Ring::new(100_000);
    let publisher = spawn(&ring, Arc::clone(&transport) as _);
    let mut received = 0;
    let mut receive = |until: u64, follower: &mut Subscriber| {
        while received < until {
            match follower.next(PATIENCE).unwrap() {
                Some(Delivery::Events { events, .. }) => received += events.len() as u64,
                other => panic!("expected events, got {other:?}"),
            }
        }
    };
    ring.push(10);
    receive(10, &mut follower);
    ring.push(50_000);
    publisher.wake();
    publisher.flush(PATIENCE).unwrap();
    receive(50_010, &mut follower);
    assert_eq!(publisher.stats().events, 50_010);
    assert!(publisher.is_running());
}

/// A ring that wakes the publisher.
#[derive(Clone)]
struct Waking {
    ring: Ring,
    waker: Arc<Mutex<Option<PublisherWaker>>>,
    drains: Arc<AtomicUsize>,
    /// What the publisher asked for last.
    asked: Arc<AtomicUsize>,
}

impl Waking {
    fn new() -> Self {
        let (waker, drains, asked) = (Arc::default(), Arc::default(), Arc::default());
        Self { ring: Ring::new(1000), waker, drains, asked }
    }

    /// Until the publisher asks for a call when so many events wait.
    fn wait_until_asked(&self, waiting: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.asked.load(Ordering::SeqCst) != waiting {
            assert!(Instant::now() < deadline, "asked for {:?}", self.asked);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl EventSource for Waking {
    fn attach(&mut self, waker: PublisherWaker) -> bool {
        *self.waker.lock().unwrap() = Some(waker);
        true
    }

    fn wake_when(&mut self, waiting: usize) {
        self.asked.store(waiting, Ordering::SeqCst);
    }

    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        self.drains.fetch_add(1, Ordering::SeqCst);
        self.ring.drain(max, out)
    }
}

/// Mutation that makes it fail: `rest` that gives the tick in any case.
#[test]
fn a_source_that_wakes_the_thread_is_left_alone_meanwhile() {
    let transport = Arc::new(InProcessTransport::default());
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let never = PublisherConfig { heartbeat: Duration::from_secs(3600), ..PublisherConfig::default() };
    let source = Waking::new();
    let mut manager = manager(never, Arc::clone(&transport) as _);
    manager.add_shard(0, source.clone()).unwrap();
    let publisher = manager.spawn().unwrap();
    source.wait_until_asked(1);
    let drains = source.drains.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(source.drains.load(Ordering::SeqCst), drains, "the thread looked without a reason");
    for round in 1..=3 {
        source.ring.push(5);
        source.waker.lock().unwrap().as_ref().unwrap().wake();
        let mut received = 0;
        while received < 5 {
            match follower.next(PATIENCE).unwrap() {
                Some(Delivery::Events { events, .. }) => received += events.len(),
                other => panic!("round {round}: expected events, got {other:?}"),
            }
        }
    }
    drop(publisher);
}

#[test]
fn dropping_the_publisher_publishes_the_rest() {
    let transport = Arc::new(InProcessTransport::default());
    let mut receiver = transport.subscribe().unwrap();
    let ring = Ring::new(100);
    let publisher = spawn(&ring, Arc::clone(&transport) as _);
    ring.push(42);
    drop(publisher);
    assert_eq!(sizes(receiver.as_mut()).iter().sum::<usize>(), 42);
}

/// A transport whose publish waits, against its contract, until the test lets it go.
struct Stuck(Mutex<mpsc::Receiver<()>>);

impl EventTransport for Stuck {
    fn name(&self) -> &'static str {
        "stuck"
    }
    fn publish(&self, _: &Payload, _: Duration) -> Result<(), TransportError> {
        // Either the test says so or it is over.
        let _ = self.0.lock().unwrap().recv();
        Ok(())
    }
    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        Err(TransportError::Closed { transport: "stuck" })
    }

    fn answer(&self, _source: SourceId, _responder: Responder) -> Result<Answering, TransportError> {
        Err(TransportError::Closed { transport: "stuck" })
    }

    fn ask(&self, _: SourceId, _: &Payload, _: Duration) -> Result<Payload, TransportError> {
        Err(TransportError::Closed { transport: "stuck" })
    }
}

/// Mutation that makes it fail: `recv` instead of `recv_timeout` in the publisher's `drop`.
#[test]
fn invariant_6_drop_does_not_hang_on_a_transport_that_does() {
    let (release, stuck) = mpsc::channel();
    let config = PublisherConfig { publish_timeout: Duration::from_millis(1), ..PublisherConfig::default() };
    let mut manager = manager(config, Arc::new(Stuck(Mutex::new(stuck))));
    manager.add_shard(0, Ring::new(1)).unwrap();
    let publisher = manager.spawn().unwrap();
    let error = publisher.flush(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, FlushError::TimedOut(_)), "{error}");
    let (done, dropped) = mpsc::channel();
    std::thread::spawn(move || {
        drop(publisher);
        done.send(()).unwrap();
    });
    assert_eq!(dropped.recv_timeout(PATIENCE), Ok(()));
    drop(release);
}

#[test]
fn a_source_that_panics_stops_the_publisher_and_nothing_else() {
    let mut manager = manager(PublisherConfig::default(), Arc::new(InProcessTransport::default()));
    manager.add_shard(0, |_: usize, _: &mut Vec<KvEvent>| -> u64 { panic!("as the test wants it") }).unwrap();
    let publisher = manager.spawn().unwrap();
    let error = publisher.flush(PATIENCE).unwrap_err();
    assert!(matches!(error, FlushError::Stopped), "{error}");
    assert!(!publisher.is_running());
    drop(publisher);
}

#[test]
fn a_source_may_drop_its_own_publisher() {
    let holder: Arc<Mutex<Option<Publisher>>> = Arc::default();
    let (held, dropped) = (Arc::clone(&holder), mpsc::channel());
    let mut manager = manager(PublisherConfig::default(), Arc::new(InProcessTransport::default()));
    manager
        .add_shard(0, move |_: usize, _: &mut Vec<KvEvent>| {
            if held.lock().unwrap().take().is_some() {
                dropped.0.send(()).unwrap();
            }
            0
        })
        .unwrap();
    *holder.lock().unwrap() = Some(manager.spawn().unwrap());
    assert_eq!(dropped.1.recv_timeout(PATIENCE), Ok(()));
}

#[test]
fn cleared_events_travel_like_all_others() {
    let transport = Arc::new(InProcessTransport::default());
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let mut script = vec![KvEvent::new(0, EventKind::Cleared)];
    let mut manager = manager(PublisherConfig::default(), transport);
    manager
        .add_shard(0, move |_: usize, out: &mut Vec<KvEvent>| {
            out.append(&mut script);
            1
        })
        .unwrap();
    manager.flush(PATIENCE).unwrap();
    let got = follower.next(Duration::ZERO).unwrap();
    assert!(
        matches!(&got, Some(Delivery::Events { events, .. }) if events[0].kind == EventKind::Cleared),
        "{got:?}"
    );
}
