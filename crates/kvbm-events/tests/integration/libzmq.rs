//! `ZeroMQ` with libzmq on the other side, both directions: `TEST_PYZMQ` names a Python that has
//! pyzmq and msgpack; without it these tests say so and pass. `cargo xtask test --only test` makes
//! one.

#![cfg(feature = "zmq")]

use crate::support::{PATIENCE, Proxy, World, free_port};
use kvbm_events::vllm::{EngineBlocks, EngineSource, Follower, Publishing, decode, encode};
use kvbm_events::zmq::{EngineFollower, ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm_events::{EventBlock, EventManager, KvIndex, Place, PublisherConfig, SourceId};
use kvbm_plan::{Epoch, GroupId, NodeId, SequenceHash, Tier};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A Python process that plays the other side.
struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// `None` where there is no pyzmq.
    fn start(arguments: &[String]) -> Option<Self> {
        let Some(python) = std::env::var_os("TEST_PYZMQ") else {
            println!("skipped: TEST_PYZMQ names no Python with pyzmq");
            return None;
        };
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/libzmq.py");
        let mut command = Command::new(python);
        command.arg(script).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, output };
        assert_eq!(peer.line()["ready"], true);
        Some(peer)
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Says a line and gives the answer.
    fn say(&mut self, line: &str) -> Value {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
        input.flush().unwrap();
        self.line()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_address() -> String {
    format!("tcp://127.0.0.1:{}", free_port())
}

fn bind(address: &ZmqAddress) -> Arc<ZmqTransport> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ZmqTransport::bind(ZmqConfig::default(), address) {
            Ok(transport) => return Arc::new(transport),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

/// What the other side says it holds: digest and tier.
fn held_by(state: &Value) -> BTreeSet<(String, u64)> {
    let blocks = state["held"].as_array().unwrap().iter();
    blocks.map(|block| (block[0].as_str().unwrap().to_owned(), block[1].as_u64().unwrap())).collect()
}

/// What a world holds, in the same words.
fn held_in(world: &World) -> BTreeSet<(String, u64)> {
    let named = |block: &EventBlock| (block.identity.hash.to_string(), block.location.tier.index() as u64);
    world.snapshot().blocks.iter().map(named).collect()
}

/// Mutation that makes it fail: `serve_replay` that begins one message later.
#[test]
fn libzmq_follows_us_through_cuts_and_a_restart() {
    let address = ZmqAddress::new(free_address()).with_replay(free_address());
    let mut publisher = bind(&address);
    let proxy = Proxy::start(address.events.strip_prefix("tcp://").unwrap());
    let through = format!("tcp://{}", proxy.address());
    let Some(mut peer) = Peer::start(&["follow".into(), through, address.replay.clone().unwrap()]) else {
        return;
    };
    let config = PublisherConfig {
        batch_events: 10,
        max_age: Duration::ZERO,
        heartbeat: Duration::from_millis(100),
        ..PublisherConfig::default()
    };
    // The second life has a cache of its own, and so a source of its own: both are held.
    let mut held = BTreeSet::new();
    for life in 0..2 {
        let world = World::new(10_000);
        let mut manager = EventManager::new(config, SourceId(life), Epoch(1), publisher.clone()).unwrap();
        manager.add_shard(0, world.clone()).unwrap();
        for step in 0..100u32 {
            for change in 0..10 {
                let random = (step * 10 + change).wrapping_mul(2_654_435_761) >> 8;
                world.toggle(random % 300, random as usize / 300 % 4);
            }
            manager.pump(Instant::now()).unwrap();
            if step % 25 == 12 {
                std::thread::sleep(Duration::from_millis(50));
                proxy.cut();
            }
        }
        held.extend(held_in(&world));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = peer.say("state");
            let of_peer = held_by(&state);
            if of_peer == held {
                assert_eq!(state["missing"], 0, "the replay socket has every message");
                assert_eq!(state["next"], world.next());
                assert!(state["replayed"].as_u64().unwrap() > 0, "the cuts lost something");
                break;
            }
            assert!(Instant::now() < deadline, "{} of {} blocks", of_peer.len(), held.len());
            manager.pump(Instant::now()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        drop((manager, publisher));
        publisher = bind(&address);
    }
}

/// A router that knows vLLM alone follows us, over libzmq, through cuts and a restart.
#[test]
fn libzmq_follows_us_as_it_follows_vllm() {
    let address = ZmqAddress::new(free_address()).with_replay(free_address());
    let mut publisher = bind(&address);
    let proxy = Proxy::start(address.events.strip_prefix("tcp://").unwrap());
    let through = format!("tcp://{}", proxy.address());
    let Some(mut peer) = Peer::start(&["follow-vllm".into(), through, address.replay.clone().unwrap()])
    else {
        return;
    };
    let config = PublisherConfig { batch_events: 10, max_age: Duration::ZERO, ..PublisherConfig::default() };
    // The first life sends more messages, so that the numbers of the second are a step back.
    for (life, steps) in [(0, 100u32), (1, 30)] {
        let world = World::new(10_000);
        let publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &Tier::ALL).with_rank(0);
        let manager = EventManager::new(config, SourceId(life), Epoch(1), publisher.clone()).unwrap();
        let mut manager = manager.with_format(publishing);
        manager.add_shard(0, world.clone()).unwrap();
        for step in 0..steps {
            for change in 0..10 {
                let random = (step * 10 + change).wrapping_mul(2_654_435_761) >> 8;
                world.toggle(random % 300, random as usize / 300 % 3);
            }
            manager.pump(Instant::now()).unwrap();
            if step % 25 == 12 {
                std::thread::sleep(Duration::from_millis(50));
                proxy.cut();
            }
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (state, held) = (peer.say("state"), held_in(&world));
            if held_by(&state) == held {
                assert!(state["replayed"].as_u64().unwrap() > 0, "the cuts lost something");
                break;
            }
            assert!(Instant::now() < deadline, "{} of {} blocks", held_by(&state).len(), held.len());
            // One more block, so that a follower that lost the last message hears of it.
            world.toggle(301, 0);
            manager.pump(Instant::now()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        drop((manager, publisher));
        publisher = bind(&address);
    }
}

/// vLLM's payloads, from its own publisher, in their order.
fn vectors() -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vllm");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|ending| ending == "msgpack")).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[test]
fn we_follow_an_engine_on_libzmq_through_cuts_and_a_kill() {
    let vectors = vectors();
    for (path, payload) in &vectors {
        assert_eq!(encode(&decode(payload).unwrap()), *payload, "{}", path.display());
    }
    let (events, replay) = (free_address(), free_address());
    let arguments = engine_arguments(&events, &replay, &vectors);
    let Some(mut engine) = Peer::start(&arguments) else { return };
    let proxy = Proxy::start(events.strip_prefix("tcp://").unwrap());
    let through = ZmqAddress::new(format!("tcp://{}", proxy.address())).with_replay(replay);
    let config = ZmqConfig { topic: "kv@".into(), from_start: true, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[through]).unwrap();
    let worker = EngineSource { source: SourceId(9), node: NodeId(1) };
    let mut follower = EngineFollower::new(subscriber.messages().unwrap(), &[worker], KvIndex::default());
    let mut before = 0;
    for life in 0..2 {
        for round in 0..6 {
            let sent = engine.say("publish 7")["sent"].as_u64().unwrap();
            if round % 2 == 0 {
                proxy.cut();
            }
            let deadline = Instant::now() + PATIENCE;
            // The last message after a cut shows only with the next one.
            let mut sent = sent;
            while follower.stats(0).events < before + events_of(&vectors, sent) {
                assert!(Instant::now() < deadline, "round {round}: {:?}", follower.stats(0));
                if !follower.poll(Duration::from_millis(200)).unwrap() {
                    sent = engine.say("publish 1")["sent"].as_u64().unwrap();
                }
            }
        }
        let total = engine.say("publish 0")["sent"].as_u64().unwrap();
        assert_eq!(held_by_index(follower.index()), after(&vectors, total, worker), "life {life}");
        assert_eq!((follower.stats(0).missing, follower.forgotten(0)), (0, 0));
        before = follower.stats(0).events;
        drop(engine);
        engine = Peer::start(&arguments).unwrap();
    }
}

/// Our connection leads to the forwarder and stays; the engine behind it ends and starts anew, with
/// its numbers. Mutation that makes it fail: `is_repeated` without the step back.
#[test]
fn we_follow_an_engine_behind_a_forwarder_into_its_next_life() {
    let vectors = vectors();
    let (events, replay, here) = (free_address(), free_address(), free_address());
    let arguments = engine_arguments(&events, &replay, &vectors);
    let Some(mut engine) = Peer::start(&arguments) else { return };
    let _forwarder = Peer::start(&["forward".into(), events.clone(), here.clone()]).unwrap();
    let forwarded = Proxy::start(here.strip_prefix("tcp://").unwrap());
    let address = ZmqAddress::new(format!("tcp://{}", forwarded.address())).with_replay(replay.clone());
    let config = ZmqConfig { topic: "kv@".into(), from_start: true, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[address]).unwrap();
    let worker = EngineSource { source: SourceId(9), node: NodeId(1) };
    let mut follower = EngineFollower::new(subscriber.messages().unwrap(), &[worker], KvIndex::default());
    let mut before = 0;
    // Until the forwarder has found the engine nobody hears what it says, which may take long: each
    // life says so much less than the one before that its numbers are a step back whenever that
    // ends.
    for (life, messages) in [(0, 600), (1, 300), (2, 7)] {
        if life > 0 {
            engine = Peer::start(&arguments).unwrap();
        }
        let mut sent = engine.say(&format!("publish {messages}"))["sent"].as_u64().unwrap();
        let deadline = Instant::now() + PATIENCE;
        // What comes before the forwarder has found the engine shows only with the next one. Lives
        // say the same again and again, so what the index holds does not tell that all of this one
        // was heard.
        while follower.stats(0).events < before + events_of(&vectors, sent) {
            assert!(Instant::now() < deadline, "life {life}: {:?} after {sent}", follower.stats(0));
            if !follower.poll(Duration::from_millis(200)).unwrap() {
                sent = engine.say("publish 1")["sent"].as_u64().unwrap();
            }
        }
        let stats = follower.stats(0);
        assert_eq!((stats.restarts, stats.missing, follower.forgotten(0)), (life, 0, 0), "life {life}");
        assert_eq!(held_by_index(follower.index()), after(&vectors, sent, worker), "life {life}");
        before = stats.events;
        // Its end.
        engine.child.kill().unwrap();
        engine.child.wait().unwrap();
    }
    assert_eq!(forwarded.accepted(), 1, "the connection stayed");
}

/// Mutation that makes it fail: `ping` that names a time.
#[test]
fn an_engine_that_never_pauses_keeps_its_connection() {
    let vectors = vectors();
    let (events, replay) = (free_address(), free_address());
    let Some(mut engine) = Peer::start(&engine_arguments(&events, &replay, &vectors)) else { return };
    let proxy = Proxy::start(events.strip_prefix("tcp://").unwrap());
    let address = ZmqAddress::new(format!("tcp://{}", proxy.address()));
    let config = ZmqConfig { topic: "kv@".into(), ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[address]).unwrap();
    let mut messages = subscriber.messages().unwrap();
    // Longer than any patience of the two, and never silent for as long as a heartbeat.
    let start = Instant::now();
    for number in 0.. {
        engine.say("publish 1");
        assert_eq!(messages.next(PATIENCE).unwrap().unwrap().sequence, number);
        if start.elapsed() > Duration::from_secs(7) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(proxy.accepted(), 1, "the connection stayed");
}

fn engine_arguments(events: &str, replay: &str, vectors: &[(PathBuf, Vec<u8>)]) -> Vec<String> {
    let mut arguments = vec!["engine".to_owned(), events.to_owned(), replay.to_owned()];
    arguments.extend(vectors.iter().map(|(path, _)| path.display().to_string()));
    arguments
}

type Held = std::collections::HashSet<(Place, GroupId, SequenceHash)>;

fn held_by_index(index: &KvIndex) -> Held {
    index.holdings().collect()
}

/// What an engine holds that has sent so many messages.
fn after(vectors: &[(PathBuf, Vec<u8>)], messages: u64, worker: EngineSource) -> Held {
    let mut index = KvIndex::default();
    let mut naive = Follower::new(worker);
    for number in 0..messages {
        let (_, payload) = &vectors[number as usize % vectors.len()];
        naive.receive(&mut index, number, payload).unwrap();
    }
    held_by_index(&index)
}

/// Events in the first `messages` messages.
fn events_of(vectors: &[(PathBuf, Vec<u8>)], messages: u64) -> u64 {
    let sizes: Vec<u64> =
        vectors.iter().map(|(_, payload)| decode(payload).unwrap().events.len() as u64).collect();
    (0..messages as usize).map(|number| sizes[number % sizes.len()]).sum()
}
