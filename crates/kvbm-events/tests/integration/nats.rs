//! NATS against a real server: `KVBM_NATS_SERVER` names its program; without it these tests say so
//! and pass. `cargo xtask test --only test` fetches one.

#![cfg(feature = "nats")]

use crate::support::{NatsServer, PATIENCE, Ring, STREAM_BYTES, World};
use kvbm_events::nats::{Login, NatsConfig, NatsTransport};
use kvbm_events::{
    Delivery, EventManager, EventTransport, IndexFollower, KvIndex, Payload, PublisherConfig, SourceId,
    StreamId, Subscriber, TransportError, conformance,
};
use kvbm_plan::Epoch;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn config(server: &NatsServer, subject: &str) -> NatsConfig {
    let config = NatsConfig::new(format!("nats://127.0.0.1:{}", server.port()), subject);
    NatsConfig { connect_timeout: PATIENCE, ..config }
}

/// The same over a stream of a size that the server has room for.
fn kept(config: NatsConfig, stream: &str) -> NatsConfig {
    let mut config = config.with_stream(stream);
    config.stream.as_mut().unwrap().max_bytes = STREAM_BYTES;
    config
}

#[test]
fn nats_core_conforms() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let number = AtomicU32::new(0);
    conformance::check(|| {
        let subject = format!("kvbm.events.{}", number.fetch_add(1, Ordering::Relaxed));
        NatsTransport::connect(config(&server, &subject)).unwrap()
    });
}

#[test]
fn jetstream_conforms() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let number = AtomicU32::new(0);
    conformance::check(|| {
        let number = number.fetch_add(1, Ordering::Relaxed);
        let config = config(&server, &format!("kvbm.events.{number}"));
        NatsTransport::connect(kept(config, &format!("kvbm-{number}"))).unwrap()
    });
}

/// Publishes `count` events in small batches while `disturb` is called now and then; the numbers
/// that a follower was given and those that it was told are missing.
fn publish_while(transport: NatsTransport, count: u64, mut disturb: impl FnMut(u64)) -> (Vec<u64>, Vec<u64>) {
    let transport = Arc::new(transport);
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    // The ring holds what waits while the server is away.
    let ring = Ring::new(count as usize);
    let config = PublisherConfig {
        batch_events: 50,
        max_age: Duration::ZERO,
        heartbeat: Duration::from_millis(50),
        publish_timeout: Duration::from_millis(500),
        ..PublisherConfig::default()
    };
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    let (mut came, mut missing) = (Vec::new(), Vec::new());
    let mut take = |delivery: Delivery| match delivery {
        Delivery::Events { events, .. } => came.extend(events.iter().map(|event| event.sequence)),
        Delivery::Gap { missing: gap, .. } => missing.extend(gap),
        Delivery::Restarted { .. } => panic!("no source was restarted"),
    };
    for step in 0..count / 100 {
        ring.push(100);
        disturb(step);
        // An unavailable server is what this is about.
        let _ = manager.pump(Instant::now());
        while let Some(delivery) = follower.next(Duration::ZERO).unwrap() {
            take(delivery);
        }
    }
    let deadline = Instant::now() + PATIENCE;
    let mut told = 0;
    while told < count {
        assert!(Instant::now() < deadline, "the follower knows of {told} of {count} events");
        let _ = manager.pump(Instant::now());
        if let Some(delivery) = follower.next(Duration::from_millis(20)).unwrap() {
            take(delivery);
        }
        told = follower.stats().tracker.events + follower.stats().tracker.missing;
    }
    (came, missing)
}

/// Mutation that makes it fail: `follow` that starts at the stream's end again.
#[test]
fn jetstream_loses_nothing_when_the_server_is_killed() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let transport = NatsTransport::connect(kept(config(&server, "kvbm.events.kill"), "kvbm-kill")).unwrap();
    let (came, missing) = publish_while(transport, 20_000, |step| {
        if step % 60 == 30 {
            server.restart();
        }
    });
    assert_eq!(missing, [0; 0]);
    assert!(came.iter().copied().eq(0..20_000), "each once and in order");
}

/// Mutations that make it fail: `Kept::publish` that does not open the stream again; `follow_once`
/// that keeps its number.
#[test]
fn a_stream_that_is_gone_is_created_again_and_followed_from_its_start() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    for (subject, is_restarted) in [("kvbm.events.restarted", true), ("kvbm.events.deleted", false)] {
        let mut config = kept(config(&server, subject), "kvbm-gone");
        config.stream.as_mut().unwrap().on_disk = false;
        let publisher = NatsTransport::connect(config.clone()).unwrap();
        let follower = NatsTransport::connect(config).unwrap();
        let mut receiver = follower.subscribe().unwrap();
        let mut hear = |number: u8| loop {
            let payload = receiver.recv(PATIENCE).unwrap().expect("it comes");
            // One that was not acknowledged in time may be there twice.
            if payload[0] == number {
                break;
            }
            assert!(payload[0] < number);
        };
        let publish = |number: u8| {
            let deadline = Instant::now() + PATIENCE;
            while let Err(error) = publisher.publish(&Payload::from(vec![number]), Duration::from_secs(5)) {
                assert!(Instant::now() < deadline, "{subject}: {error}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        (0..50).for_each(publish);
        (0..50).for_each(&mut hear);
        for life in 1..3u8 {
            if is_restarted {
                server.restart();
            } else {
                server.delete_stream("kvbm-gone");
            }
            // Fewer than before: their numbers in the stream were used already.
            (50 * life..50 * life + 10).for_each(publish);
            hear(50 * life);
            (50 * life + 1..50 * life + 10).for_each(&mut hear);
        }
        server.delete_stream("kvbm-gone");
    }
}

#[test]
fn invariant_4_what_core_loses_with_the_server_is_reported() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let transport = NatsTransport::connect(config(&server, "kvbm.events.loss")).unwrap();
    let (came, missing) = publish_while(transport, 20_000, |step| {
        if step % 60 == 30 {
            server.restart();
        }
    });
    let mut all: Vec<u64> = came.iter().chain(&missing).copied().collect();
    assert!(came.is_sorted(), "in order");
    all.sort_unstable();
    assert!(all.iter().copied().eq(0..20_000), "each number came or is missing, once");
    assert!(came.len() > 10_000, "{} came", came.len());
}

#[test]
fn a_late_joiner_receives_what_the_stream_kept() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let mut config = kept(config(&server, "kvbm.events.late"), "kvbm-late");
    if let Some(stream) = &mut config.stream {
        stream.from_start = true;
    }
    let publisher = NatsTransport::connect(config.clone()).unwrap();
    let sent: Vec<Payload> = (0..200u8).map(|n| Payload::from(vec![n; 100])).collect();
    for payload in &sent {
        publisher.publish(payload, PATIENCE).unwrap();
    }
    drop(publisher);
    let late = NatsTransport::connect(config).unwrap();
    let mut receiver = late.subscribe().unwrap();
    for payload in &sent {
        assert_eq!(receiver.recv(PATIENCE).unwrap().as_ref(), Some(payload));
    }
}

#[test]
fn an_unreachable_server_is_an_error_that_names_it() {
    let mut config = NatsConfig::new("nats://127.0.0.1:1", "kvbm.events");
    config.connect_timeout = Duration::from_secs(5);
    let Err(error) = NatsTransport::connect(config) else { panic!("nobody listens on port 1") };
    assert!(error.to_string().contains("connecting to nats://127.0.0.1:1"), "{error}");
}

/// Mutation that makes it fail: `explain` that only repeats what the server says.
#[test]
fn a_server_with_too_little_storage_is_named_with_the_way_out() {
    let Some(server) = NatsServer::start(&[]) else { return };
    for (on_disk, setting) in [(true, "max_file_store"), (false, "max_memory_store")] {
        let mut config = config(&server, "kvbm.events.large").with_stream("kvbm-large");
        config.stream.as_mut().unwrap().on_disk = on_disk;
        let Err(error) = NatsTransport::connect(config.clone()) else { panic!("1 GiB of 256 MiB") };
        let error = error.to_string();
        for part in ["stream kvbm-large", "max_bytes=1073741824", "max_bytes=BYTES in the URL", setting] {
            assert!(error.contains(part), "{part:?} is missing: {error}");
        }
        // The way out is one.
        config.stream.as_mut().unwrap().max_bytes = STREAM_BYTES;
        let transport = NatsTransport::connect(config).unwrap();
        transport.publish(&Payload::from(vec![1]), PATIENCE).unwrap();
        server.delete_stream("kvbm-large");
    }
}

#[test]
fn a_server_without_jetstream_is_named_with_the_way_out() {
    let Some(server) = NatsServer::configured("jetstream: disabled") else { return };
    let config = kept(config(&server, "kvbm.events.forgetful"), "kvbm-forgetful");
    let Err(error) = NatsTransport::connect(config) else { panic!("it keeps nothing") };
    let error = error.to_string();
    assert!(error.contains("stream kvbm-forgetful") && error.contains("nats-server -js"), "{error}");
}

#[test]
fn logins_are_checked_and_an_absent_server_makes_publishing_unavailable() {
    let Some(mut server) = NatsServer::start(&["--user", "kv", "--pass", "secret"]) else { return };
    let config = config(&server, "kvbm.events.login");
    let refused = NatsTransport::connect(config.clone());
    assert!(matches!(refused, Err(TransportError::Unavailable { .. })), "nobody said who he is");
    let login = Login::User("kv".into(), "secret".into());
    let transport = NatsTransport::connect(NatsConfig { login, ..config }).unwrap();
    let payload = Payload::from(vec![7; 10]);
    transport.publish(&payload, PATIENCE).unwrap();
    let long = Payload::from(vec![7; 2 << 20]);
    assert!(matches!(transport.publish(&long, PATIENCE), Err(TransportError::Refused { .. })));
    server.kill();
    let deadline = Instant::now() + PATIENCE;
    while transport.publish(&payload, Duration::from_millis(100)).is_ok() {
        assert!(Instant::now() < deadline, "the server is gone and every publish succeeds");
    }
    server.restart();
    while transport.publish(&payload, Duration::from_millis(100)).is_err() {
        assert!(Instant::now() < deadline + PATIENCE, "the server is back and no publish succeeds");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One who does not read loses the oldest within his own bound; the publisher and who reads notice
/// nothing.
#[test]
fn a_slow_subscriber_harms_nobody_elses_memory() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let core = config(&server, "kvbm.events.slow");
    let stream = kept(config(&server, "kvbm.events.slow-and-kept"), "slow");
    for config in [core, stream] {
        let queue = kvbm_events::InProcessConfig { queue_batches: 50, queue_bytes: 1 << 20 };
        let slow = NatsTransport::connect(NatsConfig { queue, ..config.clone() }).unwrap();
        let mut stalled = slow.subscribe().unwrap();
        let reader = NatsTransport::connect(config).unwrap();
        let mut receiver = reader.subscribe().unwrap();
        let sent: Vec<Payload> = (0..400u32).map(|n| vec![n as u8; 50_000].into()).collect();
        for payload in &sent {
            reader.publish(payload, PATIENCE).unwrap();
            assert_eq!(receiver.recv(PATIENCE).unwrap().as_ref(), Some(payload), "{}", reader.name());
        }
        let deadline = Instant::now() + PATIENCE;
        // Twenty fit into its queue.
        while stalled.dropped() < 380 {
            assert!(Instant::now() < deadline, "{}: {} dropped", slow.name(), stalled.dropped());
            std::thread::sleep(Duration::from_millis(5));
        }
        let (mut kept, mut last) = (0, None);
        while let Some(payload) = stalled.recv(Duration::from_millis(300)).unwrap() {
            (kept, last) = (kept + payload.len(), Some(payload));
        }
        assert!(kept <= 1 << 20, "{}: {kept} bytes waited", slow.name());
        assert_eq!((last.as_ref(), receiver.dropped()), (sent.last(), 0), "the newest are kept");
    }
}

#[test]
fn dropping_the_transport_closes_its_subscribers() {
    let Some(server) = NatsServer::start(&[]) else { return };
    for config in [config(&server, "kvbm.events.close"), kept(config(&server, "kvbm.events.close2"), "close")]
    {
        let transport = NatsTransport::connect(config).unwrap();
        let mut receiver = transport.subscribe().unwrap();
        transport.publish(&Payload::from(vec![1]), PATIENCE).unwrap();
        assert!(receiver.recv(PATIENCE).unwrap().is_some());
        drop(transport);
        assert!(matches!(receiver.recv(PATIENCE), Err(TransportError::Closed { .. })));
    }
}

/// Changes a cache while the server is killed ten times; the index that followed, and how many gaps
/// it had.
fn index_through_kills(server: &mut NatsServer, config: NatsConfig) -> u64 {
    let transport: Arc<dyn EventTransport> = Arc::new(NatsTransport::connect(config).unwrap());
    let world = World::new(50_000);
    let source = world.clone();
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let snapshots = move |_: StreamId| Some(source.snapshot());
    let mut follower = IndexFollower::new(subscriber, snapshots, KvIndex::default());
    let config = PublisherConfig {
        batch_events: 20,
        max_age: Duration::ZERO,
        heartbeat: Duration::from_millis(50),
        publish_timeout: Duration::from_millis(500),
        ..PublisherConfig::default()
    };
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap();
    manager.add_shard(0, world.clone()).unwrap();
    for step in 0..1000u32 {
        for change in 0..20 {
            let random = (step * 20 + change).wrapping_mul(2_654_435_761) >> 8;
            world.toggle(random % 500, random as usize / 500 % 4);
        }
        if step % 100 == 50 {
            server.restart();
        }
        // An unavailable server is what this is about.
        let _ = manager.pump(Instant::now());
        follower.poll(Duration::ZERO).unwrap();
    }
    let deadline = Instant::now() + PATIENCE;
    while follower.suspects().count() > 0 || !world.is_mirrored_by(follower.index()) {
        assert!(Instant::now() < deadline, "the index stays wrong: {:?}", follower.stats());
        let _ = manager.pump(Instant::now());
        follower.poll(Duration::from_millis(20)).unwrap();
    }
    follower.stats().gaps
}

#[test]
fn an_index_equals_its_source_after_kills_with_core_and_snapshots() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let config = config(&server, "kvbm.events.index");
    index_through_kills(&mut server, config);
}

#[test]
fn an_index_equals_its_source_after_kills_with_jetstream_alone() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let config = kept(config(&server, "kvbm.events.index"), "kvbm-index");
    assert_eq!(index_through_kills(&mut server, config), 0, "the stream has every event");
}

#[test]
fn an_index_equals_its_source_after_kills_that_take_the_stream_along() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let mut config = kept(config(&server, "kvbm.events.index"), "kvbm-index");
    config.stream.as_mut().unwrap().on_disk = false;
    index_through_kills(&mut server, config);
}

/// A user who may do anything but what is said.
fn denying(what: &str) -> Option<NatsServer> {
    let user = format!("{{ user: kv, password: secret, permissions: {{ {what} }} }}");
    NatsServer::configured(&format!("authorization: {{ users: [ {user} ] }}"))
}

fn as_user(server: &NatsServer, subject: &str) -> NatsConfig {
    NatsConfig { login: Login::User("kv".into(), "secret".into()), ..config(server, subject) }
}

/// That an attempt fails as it should: the error names the subject and what is missing.
fn assert_denied<T>(what: Result<T, TransportError>, subject: &str, permission: &str) {
    let Err(error) = what else { panic!("{permission} on {subject} is denied and succeeds") };
    assert!(matches!(error, TransportError::Config { .. }), "{error:?}");
    let error = error.to_string();
    let parts = [format!("subject {subject}"), format!("the permission '{permission}'")];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

/// Mutations that make it fail: `login::connect` without its callback; `publish` that believes the
/// first.
#[test]
fn a_publisher_that_may_not_publish_gets_an_error_and_counts_nothing() {
    let Some(server) = denying("publish: { deny: \"kvbm.events\" }") else { return };
    let transport = Arc::new(NatsTransport::connect(as_user(&server, "kvbm.events")).unwrap());
    let payload = Payload::from(vec![7; 10]);
    for _ in 0..3 {
        assert_denied(transport.publish(&payload, PATIENCE), "kvbm.events", "publish");
    }
    let ring = Ring::new(100);
    let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(10);
    assert_denied(manager.pump(Instant::now()), "kvbm.events", "publish");
    assert_eq!(manager.stats().events, 0);
    // Over a stream too, at its opening or at the first batch.
    let stream = NatsTransport::connect(kept(as_user(&server, "kvbm.events"), "denied"));
    assert_denied(stream.and_then(|stream| stream.publish(&payload, PATIENCE)), "kvbm.events", "publish");
}

/// Mutation that makes it fail: `subscription` that does not look.
#[test]
fn who_may_not_subscribe_answer_or_ask_gets_an_error() {
    let Some(server) = denying(
        "subscribe: { deny: [\"kvbm.events\", \"kvbm.events.ask.>\"] }, publish: { deny: \"kvbm.events.ask.*\" }",
    ) else {
        return;
    };
    let transport = NatsTransport::connect(as_user(&server, "kvbm.events")).unwrap();
    let (question, source) = (Payload::from(vec![7; 10]), SourceId(1));
    for _ in 0..2 {
        assert_denied(transport.subscribe(), "kvbm.events", "subscribe");
        let responder: kvbm_events::Responder = Arc::new(|_| Payload::from(vec![1]));
        let asked = "kvbm.events.ask.0000000000000001";
        assert_denied(transport.answer(source, responder), asked, "subscribe");
        assert_denied(transport.ask(source, &question, PATIENCE), asked, "publish");
    }
    transport.publish(&question, PATIENCE).unwrap();
}

/// Who may not have answers can publish and subscribe all the same, as far as nobody has to answer.
#[test]
fn who_may_have_no_answers_publishes_and_follows() {
    let Some(server) = denying("subscribe: { deny: \"_INBOX.>\" }") else { return };
    let transport = NatsTransport::connect(as_user(&server, "kvbm.events")).unwrap();
    let mut receiver = transport.subscribe().unwrap();
    let payload = Payload::from(vec![7; 10]);
    transport.publish(&payload, PATIENCE).unwrap();
    assert_eq!(receiver.recv(PATIENCE).unwrap(), Some(payload.clone()));
    assert_denied(transport.ask(SourceId(1), &payload, PATIENCE), "_INBOX.>", "subscribe");
    let stream = NatsTransport::connect(kept(as_user(&server, "kvbm.kept"), "no-answers"));
    assert_denied(stream.map(drop), "_INBOX.>", "subscribe");
}

/// A server that starts again with other permissions is believed anew, whatever they were before.
#[test]
fn permissions_that_change_are_noticed() {
    let Some(mut server) = denying("publish: { deny: \"kvbm.events\" }") else { return };
    let transport = NatsTransport::connect(as_user(&server, "kvbm.events")).unwrap();
    let mut receiver = transport.subscribe().unwrap();
    let payload = Payload::from(vec![7; 10]);
    assert_denied(transport.publish(&payload, PATIENCE), "kvbm.events", "publish");
    server.configure("authorization: { users: [ { user: kv, password: secret } ] }");
    server.restart();
    let deadline = Instant::now() + PATIENCE;
    while transport.publish(&payload, Duration::from_secs(1)).is_err() {
        assert!(Instant::now() < deadline, "it is permitted and fails");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(receiver.recv(PATIENCE).unwrap(), Some(payload));
    server.configure(
        "authorization: { users: [ { user: kv, password: secret, permissions: { subscribe: { deny: \"kvbm.events\" } } } ] }",
    );
    server.restart();
    let closed = loop {
        assert!(Instant::now() < deadline + PATIENCE, "a subscriber that hears nothing is told nothing");
        match receiver.recv(Duration::from_millis(50)) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(closed, TransportError::Closed { .. }), "{closed}");
    assert_denied(transport.subscribe(), "kvbm.events", "subscribe");
}

/// Mutation that makes it fail: `hand_over` that takes every error of the server's for one that
/// passes.
#[test]
fn a_batch_that_the_stream_never_takes_is_halved() {
    let Some(server) = NatsServer::start(&[]) else { return };
    server.create_stream("operator", &["kvbm.>"], 16 << 10);
    let config = kept(config(&server, "kvbm.events"), "operator");
    let transport = Arc::new(NatsTransport::connect(config).unwrap());
    let long = transport.publish(&Payload::from(vec![1; 17 << 10]), PATIENCE);
    let Err(TransportError::Refused { reason, .. }) = &long else { panic!("{long:?}") };
    assert!(reason.contains("stream operator takes no 17408 bytes; raise its max_msg_size"), "{reason}");
    let mut follower = Subscriber::new(transport.subscribe().unwrap());
    let ring = Ring::new(2000);
    let config =
        PublisherConfig { batch_events: 1000, max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap();
    manager.add_shard(0, ring.clone()).unwrap();
    ring.push(1000);
    manager.flush(PATIENCE).unwrap();
    assert_eq!((manager.stats().events, manager.stats().refused), (1000, 0));
    assert!(manager.stats().batches > 4, "{:?}", manager.stats());
    while follower.stats().tracker.events < 1000 {
        assert!(matches!(follower.next(PATIENCE).unwrap(), Some(Delivery::Events { .. })));
    }
}

#[test]
fn a_stream_of_other_subjects_is_named_at_once() {
    let Some(server) = NatsServer::start(&[]) else { return };
    server.create_stream("others", &["others.*"], -1);
    let other = NatsTransport::connect(kept(config(&server, "kvbm.events"), "others")).err().unwrap();
    let TransportError::Config { reason, .. } = &other else { panic!("{other:?}") };
    assert!(reason.contains("stream others keeps [\"others.*\"], not kvbm.events"), "{reason}");
}

/// Mutation that makes it fail: `SnapshotServer::serve` that does not look at what the transport
/// carries.
#[test]
fn snapshots_come_through_a_server_of_small_messages() {
    let Some(server) = NatsServer::configured("max_payload: 8192") else { return };
    let transport: Arc<dyn EventTransport> =
        Arc::new(NatsTransport::connect(config(&server, "kvbm.events")).unwrap());
    assert_eq!(transport.max_payload(), 8192);
    let world = World::new(10);
    for number in 0..1000 {
        world.toggle(number, 1);
    }
    let (source, stream) = (world.clone(), StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 });
    let snapshots = kvbm_events::SnapshotServer::new(move |_| Some(source.snapshot()));
    let _answering = snapshots.serve(&*transport, SourceId(1)).unwrap();
    let mut asker = kvbm_events::RemoteSnapshots::new(Arc::clone(&transport));
    let deadline = Instant::now() + PATIENCE;
    let found = loop {
        assert!(Instant::now() < deadline, "no snapshot comes");
        match kvbm_events::SnapshotSource::snapshot(&mut asker, stream, 1) {
            Some(found) => break found,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(found.blocks.len(), 1000);
    // What is too long all the same is known to be no answer at once.
    let responder: kvbm_events::Responder = Arc::new(|_| Payload::from(vec![1; 9000]));
    let _answering = transport.answer(SourceId(2), responder).unwrap();
    let start = Instant::now();
    let answer = transport.ask(SourceId(2), &Payload::from(vec![1]), PATIENCE).unwrap();
    assert!(answer.is_empty() && start.elapsed() < PATIENCE / 2);
}

/// Mutation that makes it fail: `NatsTransport::connect` that does not look at the URL.
#[test]
fn a_url_that_says_who_we_are_is_refused_and_not_repeated() {
    for url in ["nats://kv:sesame@127.0.0.1:1", "sesame@127.0.0.1:1"] {
        let Err(error) = NatsTransport::connect(NatsConfig::new(url, "kvbm.events")) else { panic!("{url}") };
        assert!(matches!(error, TransportError::Config { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("`login`") && !error.contains("sesame"), "{error}");
    }
}
