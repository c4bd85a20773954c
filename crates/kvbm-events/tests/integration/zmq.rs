//! `ZeroMQ` between our own ends, and against peers that misbehave. libzmq is met by `cargo xtask
//! test --only test`.

#![cfg(feature = "zmq")]

use crate::support::{PATIENCE, World, free_port};
use kvbm_events::vllm::{self, BlockStored, EngineBatch, EngineEvent, EngineHash, EngineSource};
use kvbm_events::zmq::{EngineFollower, MessageReceiver, ZmqAddress, ZmqConfig, ZmqMessage, ZmqTransport};
use kvbm_events::{
    EventManager, EventTransport, InProcessConfig, IndexFollower, KvIndex, Payload, PublisherConfig,
    Snapshot, SourceId, StreamId, Subscriber, TransportError, conformance,
};
use kvbm_plan::{Epoch, GroupId, NodeId};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn anywhere() -> ZmqAddress {
    ZmqAddress::new("tcp://127.0.0.1:*").with_replay("tcp://127.0.0.1:*")
}

/// Where a second one can be bound when the first is gone.
fn somewhere() -> ZmqAddress {
    ZmqAddress::new(format!("tcp://127.0.0.1:{}", free_port()))
}

fn payload(number: u64) -> Payload {
    number.to_le_bytes().to_vec().into()
}

/// The next message within patience.
fn next(receiver: &mut MessageReceiver) -> ZmqMessage {
    receiver.next(PATIENCE).unwrap().unwrap()
}

/// Calls `attempt` until it gives something.
fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn zmq_over_tcp_conforms() {
    conformance::check(|| ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap());
}

#[test]
fn zmq_over_ipc_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let number = std::cell::Cell::new(0);
    conformance::check(|| {
        number.set(number.get() + 1);
        let path = format!("ipc://{}/{}", folder.path().display(), number.get());
        let address = ZmqAddress::new(format!("{path}.sock")).with_replay(format!("{path}.replay"));
        ZmqTransport::bind(ZmqConfig::default(), &address).unwrap()
    });
}

#[test]
fn a_socket_file_that_a_killed_process_left_is_replaced_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the listener is gone and its file is not");
    let address = ZmqAddress::new(format!("ipc://{}", path.display()));
    let transport = ZmqTransport::bind(ZmqConfig::default(), &address).unwrap();
    let at_once = || ZmqConfig { connect_timeout: Duration::from_millis(200), ..ZmqConfig::default() };
    let Err(error) = ZmqTransport::bind(at_once(), &address) else { panic!("it is in use") };
    assert!(error.to_string().contains("cannot bind ipc://"), "{error}");
    drop(transport);
    assert!(!path.exists(), "an orderly end takes the file along");
    std::fs::write(&path, "precious").unwrap();
    assert!(ZmqTransport::bind(at_once(), &address).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

/// Mutation that makes it fail: `listen_by` that tries once.
#[test]
fn an_address_that_the_one_before_still_holds_is_bound_when_it_ends() {
    let address = somewhere();
    let old = ZmqTransport::bind(ZmqConfig::default(), &address).unwrap();
    // A connection that its server closes first lingers at the server's port.
    let way = ZmqTransport::connect(ZmqConfig::default(), std::slice::from_ref(&address)).unwrap();
    let messages = way.messages().unwrap();
    let config = ZmqConfig { connect_timeout: Duration::from_millis(100), ..ZmqConfig::default() };
    let Err(error) = ZmqTransport::bind(config, &address) else { panic!("it is in use") };
    let error = error.to_string();
    assert!(
        error.contains(&format!("cannot bind {}", address.events)) && error.contains("in use"),
        "{error}"
    );
    let new = std::thread::scope(|scope| {
        let patient = ZmqConfig { connect_timeout: PATIENCE, ..ZmqConfig::default() };
        let new = scope.spawn(|| ZmqTransport::bind(patient, &address));
        std::thread::sleep(Duration::from_millis(50));
        drop(old);
        new.join().unwrap().unwrap()
    });
    until("its subscriber is back", || (new.subscribers() > 0).then_some(()));
    drop(messages);
}

#[test]
fn other_machines_are_let_in_only_by_a_word() {
    let address = ZmqAddress::new("tcp://*:0");
    let Err(error) = ZmqTransport::bind(ZmqConfig::default(), &address) else { panic!("anybody could come") };
    assert!(
        matches!(&error, TransportError::Config { .. }) && error.to_string().contains("insecure"),
        "{error}"
    );
    let config = ZmqConfig { insecure: true, ..ZmqConfig::default() };
    let publisher = ZmqTransport::bind(config, &address).unwrap();
    let mut receiver = publisher.messages().unwrap();
    publisher.publish(&payload(1), PATIENCE).unwrap();
    assert_eq!(next(&mut receiver).payload, payload(1));
}

#[test]
fn what_cannot_work_is_reported() {
    let config = ZmqConfig { connect_timeout: Duration::from_millis(300), ..ZmqConfig::default() };
    let nobody = ZmqTransport::connect(config.clone(), &[ZmqAddress::new("tcp://127.0.0.1:1")]).unwrap();
    let Err(error) = nobody.messages() else { panic!("nobody listens on port 1") };
    assert!(error.to_string().contains("no publisher at tcp://127.0.0.1:1"), "{error}");
    assert!(matches!(nobody.publish(&payload(1), PATIENCE), Err(TransportError::Config { .. })));
    assert!(ZmqTransport::connect(config.clone(), &[]).is_err());
    assert!(ZmqTransport::connect(config, &[ZmqAddress::new("tcp://127.0.0.1:*")]).is_err());
}

#[test]
fn a_subscriber_comes_back_and_receives_what_it_missed() {
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    // Between the two, something that cuts every connection when it is told to.
    let proxy = crate::support::Proxy::start(address.events.strip_prefix("tcp://").unwrap());
    let through = ZmqAddress { events: format!("tcp://{}", proxy.address()), ..address };
    let subscriber = ZmqTransport::connect(ZmqConfig::default(), &[through]).unwrap();
    let mut receiver = subscriber.messages().unwrap();
    let mut sent = 0;
    let mut wanted = 0;
    for _ in 0..5 {
        for _ in 0..20 {
            publisher.publish(&payload(sent), PATIENCE).unwrap();
            sent += 1;
        }
        proxy.cut();
        for _ in 0..20 {
            publisher.publish(&payload(sent), PATIENCE).unwrap();
            sent += 1;
        }
        // What comes after the connection shows what is missing before it.
        while wanted < sent {
            if let Some(message) = receiver.next(Duration::from_millis(50)).unwrap() {
                assert_eq!((message.sequence, message.payload), (wanted, payload(wanted)));
                wanted += 1;
            } else {
                publisher.publish(&payload(sent), PATIENCE).unwrap();
                sent += 1;
            }
        }
    }
}

/// Mutation that makes it fail: `make_up_for` that asks once.
#[test]
fn a_replay_that_cannot_be_reached_at_first_is_asked_for_again() {
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let replay = address.replay.clone().unwrap();
    let replay = replay.strip_prefix("tcp://").unwrap();
    // Nobody listens on port 1.
    let way = crate::support::Proxy::start("127.0.0.1:1");
    let through = address.with_replay(format!("tcp://{}", way.address()));
    (0..5).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    let config = ZmqConfig { from_start: true, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[through]).unwrap();
    let mut receiver = subscriber.messages().unwrap();
    publisher.publish(&payload(5), PATIENCE).unwrap();
    until("it asks in vain", || (way.accepted() > 1).then_some(()));
    way.lead_to(replay);
    (0..6).for_each(|n| assert_eq!(next(&mut receiver).payload, payload(n)));
}

#[test]
fn a_publisher_that_starts_anew_is_followed_from_its_first_message() {
    let address = somewhere().with_replay(somewhere().events);
    let first = ZmqTransport::bind(ZmqConfig::default(), &address).unwrap();
    let subscriber = ZmqTransport::connect(ZmqConfig::default(), std::slice::from_ref(&address)).unwrap();
    let mut receiver = subscriber.messages().unwrap();
    (0..50).for_each(|n| first.publish(&payload(n), PATIENCE).unwrap());
    (0..50).for_each(|n| assert_eq!(next(&mut receiver).sequence, n));
    drop(first);
    let second = ZmqTransport::bind(ZmqConfig::default(), &address).unwrap();
    (100..110).for_each(|n| second.publish(&payload(n), PATIENCE).unwrap());
    until("the subscriber is back", || (second.subscribers() > 0).then_some(()));
    let got = until("a message comes", || {
        second.publish(&payload(110), PATIENCE).unwrap();
        receiver.next(Duration::from_millis(20)).unwrap()
    });
    assert_eq!((got.sequence, got.payload), (0, payload(100)), "by replay, from the start");
    (1..10).for_each(|n| assert_eq!(next(&mut receiver).payload, payload(100 + n)));
}

/// A message in which an engine stores blocks with these hashes.
fn engine_stores(hashes: std::ops::Range<u64>) -> Payload {
    let block_hashes = hashes.map(EngineHash::Uint).collect();
    let medium = Some("GPU".to_owned());
    let event = EngineEvent::Stored(BlockStored { block_hashes, medium, ..BlockStored::default() });
    vllm::encode(&EngineBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None }).into()
}

/// Mutations that make it fail: `SequenceTracker::hear` that takes a short step back for a
/// repetition; messages that do not say their life.
#[test]
fn without_a_replay_an_engine_that_starts_anew_is_believed_from_wherever_it_sends() {
    for heard_from in [0, 3, 300, 500, 600] {
        let config = ZmqConfig::default();
        let address = somewhere();
        let first = ZmqTransport::bind(config.clone(), &address).unwrap();
        let subscriber = ZmqTransport::connect(config.clone(), std::slice::from_ref(&address)).unwrap();
        let worker = EngineSource { source: SourceId(1), node: NodeId(0) };
        let mut follower = EngineFollower::new(subscriber.messages().unwrap(), &[worker], KvIndex::default());
        for n in 0..500 {
            first.publish(&engine_stores(n..n + 1), PATIENCE).unwrap();
        }
        until("the first life is known", || {
            follower.poll(Duration::from_millis(20)).unwrap();
            (follower.index().stats().blocks == 500).then_some(())
        });
        drop(first);
        let second = ZmqTransport::bind(config.clone(), &address).unwrap();
        // Said while nobody is there to hear it.
        (0..heard_from).for_each(|n| second.publish(&engine_stores(n..n + 1), PATIENCE).unwrap());
        until("the subscriber is back", || (second.subscribers() > 0).then_some(()));
        until("the first life is forgotten", || {
            second.publish(&engine_stores(9_000..9_002), PATIENCE).unwrap();
            follower.poll(Duration::from_millis(20)).unwrap();
            (follower.stats(0).restarts == 1).then_some(())
        });
        let old = follower.find_hashes(GroupId(0), &[EngineHash::Uint(499)]);
        let new = follower.find_hashes(GroupId(0), &[9_000, 9_001].map(EngineHash::Uint));
        assert_eq!((old.len(), new[0].blocks), (0, 2), "heard from {heard_from}");
    }
}

#[test]
fn a_late_joiner_receives_the_history_if_it_wants() {
    let config = ZmqConfig {
        history: InProcessConfig { queue_batches: 30, queue_bytes: 1 << 20 },
        ..ZmqConfig::default()
    };
    let publisher = ZmqTransport::bind(config.clone(), &anywhere()).unwrap();
    (0..100).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    let late =
        ZmqTransport::connect(ZmqConfig { from_start: true, ..config }, &publisher.addresses()).unwrap();
    let mut receiver = late.messages().unwrap();
    // The newest 30, at once: the publisher may have nothing more to say for long.
    (70..100).for_each(|n| assert_eq!(next(&mut receiver).sequence, n));
    (100..103).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    (100..103).for_each(|n| assert_eq!(next(&mut receiver).sequence, n, "each once"));
}

/// A subscriber in ZMTP by hand that shakes hands, subscribes to everything and then reads nothing.
fn stalled(address: &ZmqAddress) -> TcpStream {
    let mut stream = TcpStream::connect(address.events.strip_prefix("tcp://").unwrap()).unwrap();
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).unwrap();
    stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB").unwrap();
    stream.write_all(&[0, 1, 1]).unwrap();
    stream.read_exact(&mut greeting).unwrap();
    stream
}

/// A client of the replay socket in ZMTP 3.1 by hand that shakes hands and asks nothing.
fn client(address: &ZmqAddress) -> TcpStream {
    let replay = address.replay.as_ref().unwrap();
    let mut stream = TcpStream::connect(replay.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xFF, 0x7F, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).unwrap();
    stream.write_all(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER").unwrap();
    stream.read_exact(&mut greeting).unwrap();
    let ready = short_frame(&mut stream).unwrap();
    assert!(ready.1.starts_with(b"\x05READY"));
    stream
}

/// Flags and body of a frame; `None` at the end.
fn short_frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).ok()?;
    let mut body = vec![0; usize::from(head[1])];
    stream.read_exact(&mut body).ok()?;
    Some((head[0], body))
}

/// A machine that is gone says no word of it, and there are few places.
/// Mutation that makes it fail: `asked` that waits for `next` alone.
#[test]
fn a_silent_client_of_the_replay_socket_gives_up_its_place_and_one_that_answers_keeps_it() {
    let config = ZmqConfig { max_peers: 2, ..ZmqConfig::default() };
    let publisher = ZmqTransport::bind(config, &anywhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let (mut alive, mut gone) = (client(&address), client(&address));
    let ended = std::thread::spawn(move || while short_frame(&mut gone).is_some() {});
    let deadline = Instant::now() + PATIENCE;
    while !ended.is_finished() {
        assert!(Instant::now() < deadline, "who answers nothing keeps its place");
        assert_eq!(
            short_frame(&mut alive).expect("who answers keeps its place"),
            (4, b"\x04PING\0\0".to_vec())
        );
        alive.write_all(b"\x04\x05\x04PONG").unwrap();
    }
    ended.join().unwrap();
    // The other place is another's now.
    publisher.publish(&payload(5), PATIENCE).unwrap();
    let late = ZmqTransport::connect(
        ZmqConfig { from_start: true, ..ZmqConfig::default() },
        std::slice::from_ref(&address),
    );
    assert_eq!(next(&mut late.unwrap().messages().unwrap()).payload, payload(5));
}

/// libzmq ends a connection when nothing comes over it for as long as a PING has said, and a
/// subscriber that hears enough says nothing. Mutation that makes it fail: `ping` that names a
/// time.
#[test]
fn a_subscriber_promises_no_sign_of_life() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = ZmqAddress::new(format!("tcp://{}", listener.local_addr().unwrap()));
    let publisher = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xFF, 0x7F, 3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).unwrap();
        stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB").unwrap();
        stream.read_exact(&mut greeting).unwrap();
        // READY and the subscription come before.
        let mut pings = Vec::new();
        while pings.len() < 2 {
            let mut head = [0; 2];
            stream.read_exact(&mut head).unwrap();
            let mut body = vec![0; usize::from(head[1])];
            stream.read_exact(&mut body).unwrap();
            if let (4, Some(ping)) = (head[0], body.strip_prefix(b"\x04PING")) {
                pings.push(ping.to_vec());
                stream.write_all(b"\x04\x05\x04PONG").unwrap();
            }
        }
        pings
    });
    let subscriber = ZmqTransport::connect(ZmqConfig::default(), &[address]).unwrap();
    let _messages = subscriber.messages().unwrap();
    // The first one asks whether the subscription is there, the second one whether the publisher
    // is.
    assert_eq!(publisher.join().unwrap(), [[0; 2]; 2]);
}

/// Mutation that makes it fail: `Window::push` that drops nothing.
#[test]
fn stalled_subscribers_cost_a_bounded_amount_of_memory_and_nobody_else_a_message() {
    let limit = InProcessConfig { queue_batches: 1_000, queue_bytes: 4 << 20 };
    let config = ZmqConfig { queue: limit, history: limit, ..ZmqConfig::default() };
    let publisher = ZmqTransport::bind(config, &anywhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let _stalled: Vec<TcpStream> = (0..4).map(|_| stalled(&address)).collect();
    until("all are there", || (publisher.subscribers() == 4).then_some(()));
    let mut receiver = publisher.messages().unwrap();
    let big: Payload = vec![7; 100_000].into();
    let mut alive = Vec::new();
    // How much a network buffers is its own affair: until much more than that was dropped.
    for n in 0..10_000 {
        if publisher.dropped() > 1_000 {
            break;
        }
        let payload: Payload = big.to_vec().into();
        alive.push(Arc::downgrade(&payload));
        publisher.publish(&payload, PATIENCE).unwrap();
        drop(payload);
        assert_eq!(next(&mut receiver).sequence, n, "the one who reads misses nothing");
    }
    let held: usize = alive.iter().filter_map(|payload| Some(payload.upgrade()?.len())).sum();
    // The longest queue, and one payload under way for each subscriber.
    assert!(held <= (4 << 20) + 5 * big.len(), "{held} bytes of payloads are alive");
    assert!(publisher.kept_bytes() <= 4 << 20);
    assert!(publisher.dropped() > 1_000, "{} dropped", publisher.dropped());
}

#[test]
fn peers_that_are_none_are_turned_away_and_harm_nobody() {
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let mut receiver = publisher.messages().unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 200], &[0; 64]] {
        for socket in [&address.events, address.replay.as_ref().unwrap()] {
            let mut stream = TcpStream::connect(socket.strip_prefix("tcp://").unwrap()).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(garbage).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            // Closed in order or by force, after our greeting at most.
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.len() <= 128, "{} bytes", rest.len());
        }
    }
    until("all six are counted", || (publisher.refused() == 6).then_some(()));
    publisher.publish(&payload(5), PATIENCE).unwrap();
    assert_eq!(next(&mut receiver).payload, payload(5));
}

#[test]
fn subscribers_beyond_the_limit_are_turned_away_and_counted() {
    let config = ZmqConfig { max_peers: 2, ..ZmqConfig::default() };
    let publisher = ZmqTransport::bind(config, &ZmqAddress::new("tcp://127.0.0.1:*")).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let served: Vec<TcpStream> = (0..2).map(|_| stalled(&address)).collect();
    until("both are there", || (publisher.subscribers() == 2).then_some(()));
    let mut third = TcpStream::connect(address.events.strip_prefix("tcp://").unwrap()).unwrap();
    third.set_read_timeout(Some(PATIENCE)).unwrap();
    match third.read(&mut [0; 1]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("it is not closed: {other:?}"),
    }
    until("it is counted", || (publisher.refused() == 1).then_some(()));
    assert_eq!(publisher.subscribers(), 2);
    drop(served);
}

#[test]
fn dropping_the_transport_sends_what_is_queued_and_closes_its_subscribers() {
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap();
    let subscriber = ZmqTransport::connect(ZmqConfig::default(), &publisher.addresses()).unwrap();
    let mut receiver = subscriber.messages().unwrap();
    (0..500).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    drop(publisher);
    (0..500).for_each(|n| assert_eq!(next(&mut receiver).sequence, n));
    drop(subscriber);
    assert!(matches!(receiver.next(PATIENCE), Err(TransportError::Closed { .. })));
}

/// Connections are cut again and again under a changing cache; the index that followed equals it,
/// without a snapshot.
#[test]
fn an_index_equals_its_source_through_cuts_by_replay_alone() {
    let publisher = Arc::new(ZmqTransport::bind(ZmqConfig::default(), &anywhere()).unwrap());
    let [address] = publisher.addresses().try_into().unwrap();
    let proxy = crate::support::Proxy::start(address.events.strip_prefix("tcp://").unwrap());
    let through = ZmqAddress { events: format!("tcp://{}", proxy.address()), ..address };
    let subscriber = ZmqTransport::connect(ZmqConfig::default(), &[through]).unwrap();
    let none = |_: StreamId| -> Option<Snapshot> { None };
    let mut follower =
        IndexFollower::new(Subscriber::new(subscriber.subscribe().unwrap()), none, KvIndex::default());
    let world = World::new(50_000);
    let config = PublisherConfig {
        batch_events: 20,
        max_age: Duration::ZERO,
        heartbeat: Duration::from_millis(50),
        ..PublisherConfig::default()
    };
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), publisher).unwrap();
    manager.add_shard(0, world.clone()).unwrap();
    for step in 0..500u32 {
        for change in 0..20 {
            let random = (step * 20 + change).wrapping_mul(2_654_435_761) >> 8;
            world.toggle(random % 500, random as usize / 500 % 4);
        }
        if step % 50 == 25 {
            proxy.cut();
        }
        manager.pump(Instant::now()).unwrap();
        follower.poll(Duration::ZERO).unwrap();
    }
    until("the index is right", || {
        manager.pump(Instant::now()).unwrap();
        follower.poll(Duration::from_millis(20)).unwrap();
        world.is_mirrored_by(follower.index()).then_some(())
    });
    assert_eq!(follower.stats().gaps, 0, "the replay socket has every message");
}

/// A SUB socket by hand, in the version before subscriptions were commands.
fn connected(address: &ZmqAddress) -> TcpStream {
    let stream = stalled(address);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Writes frames until the publisher closes the connection.
fn is_refused(stream: &mut TcpStream, mut frame: impl FnMut(u32) -> Vec<u8>) -> bool {
    (0..10_000).any(|number| stream.write_all(&frame(number)).is_err())
}

/// Mutation that makes it fail: `Subscriptions::add` without its limit of bytes; `kept_bytes`
/// without subscriptions.
#[test]
fn invariant_5_the_subscriptions_of_a_peer_are_bounded_in_bytes_and_counted() {
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &somewhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let is_gone = || until("the peer is gone", || (publisher.subscribers() == 0).then_some(()));

    // One long prefix in the form of a message: 8 MiB.
    let mut stream = connected(&address);
    let mut long = vec![2];
    long.extend_from_slice(&(8u64 << 20).to_be_bytes());
    long.push(1);
    assert!(is_refused(&mut stream, |number| if number == 0 { long.clone() } else { vec![b'x'; 4096] }));
    is_gone();

    // Many prefixes of 4,000 bytes, as messages and as commands.
    for command in [false, true] {
        let mut stream = connected(&address);
        let head: &[u8] = if command { b"\x09SUBSCRIBE" } else { b"\x01" };
        let body = [head, &[b'x'; 4000]].concat();
        let mut frame = vec![if command { 6 } else { 2 }];
        frame.extend_from_slice(&(body.len() as u64).to_be_bytes());
        frame.extend_from_slice(&body);
        stream.write_all(&frame.repeat(10)).unwrap();
        until("10 prefixes are counted", || (publisher.kept_bytes() > 40_000).then_some(()));
        assert!(publisher.kept_bytes() < 42_000, "{}", publisher.kept_bytes());
        assert!(is_refused(&mut stream, |_| frame.clone()));
        is_gone();
        assert_eq!(publisher.kept_bytes(), 0);
    }
}

/// Mutation that makes it fail: `FanOut::is_drained` that looks at the queues alone.
#[test]
fn closing_waits_for_the_message_that_is_half_written() {
    const LENGTH: usize = 16 << 20;
    let publisher = ZmqTransport::bind(ZmqConfig::default(), &somewhere()).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    let mut stream = connected(&address);
    until("a subscription", || (publisher.kept_bytes() > 0).then_some(()));
    publisher.publish(&vec![7; LENGTH].into(), PATIENCE).unwrap();
    // The first bytes are here, and more than the sockets' buffers hold is not.
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    let reader = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let mut bytes = Vec::new();
        // A connection that was cut may end with an error.
        let _ = stream.read_to_end(&mut bytes);
        bytes.len()
    });
    drop(publisher);
    assert!(reader.join().unwrap() > LENGTH);
}
