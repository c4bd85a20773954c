//! `ZeroMQ` with libzmq on the other side, both directions: `KVBM_PYZMQ` names a Python that has pyzmq and msgpack; without
//! it these tests say so and pass. `cargo xtask test --only zmq` makes one.

#![cfg(feature = "zmq")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use kvbm_events::vllm::{Follower, Worker, decode, encode};
use kvbm_events::zmq::{EngineFollower, ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm_events::{EventManager, KvIndex, PublisherConfig, SourceId};
use kvbm_plan::{Epoch, NodeId};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{PATIENCE, Proxy, World};

/// A Python process that plays the other side.
struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// `None` where there is no pyzmq.
    fn start(arguments: &[String]) -> Option<Self> {
        let Some(python) = std::env::var_os("KVBM_PYZMQ") else {
            println!("skipped: KVBM_PYZMQ names no Python with pyzmq");
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
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// Mutation that makes it fail: `serve_replay` that begins one message later.
#[test]
fn libzmq_follows_us_through_cuts_and_a_restart() {
    let bind = |address: &ZmqAddress| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match ZmqTransport::bind(ZmqConfig::default(), address) {
                Ok(transport) => return Arc::new(transport),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    };
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
        held.extend(world.snapshot().blocks.iter().map(|block| {
            let digest = block.identity.hash.to_string();
            (digest, block.location.tier.index() as u64)
        }));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = peer.say("state");
            let of_peer = state["held"].as_array().unwrap().iter();
            let of_peer: BTreeSet<(String, u64)> = of_peer
                .map(|block| (block[0].as_str().unwrap().to_owned(), block[1].as_u64().unwrap()))
                .collect();
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
    let mut arguments = vec!["engine".to_owned(), events.clone(), replay.clone()];
    arguments.extend(vectors.iter().map(|(path, _)| path.display().to_string()));
    let Some(mut engine) = Peer::start(&arguments) else { return };
    let proxy = Proxy::start(events.strip_prefix("tcp://").unwrap());
    let through = ZmqAddress::new(format!("tcp://{}", proxy.address())).with_replay(replay);
    let config = ZmqConfig { topic: "kv@".into(), from_start: true, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[through]).unwrap();
    let worker = Worker { source: SourceId(9), node: NodeId(1) };
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
        let mut index = KvIndex::default();
        let mut naive = Follower::new(worker);
        for number in 0..total {
            let (_, payload) = &vectors[number as usize % vectors.len()];
            naive.hear(&mut index, number, payload).unwrap();
        }
        let set = |index: &KvIndex| index.holdings().collect::<std::collections::HashSet<_>>();
        assert_eq!(set(follower.index()), set(&index), "life {life}");
        assert_eq!((follower.stats(0).missing, follower.forgotten(0)), (0, 0));
        before = follower.stats(0).events;
        drop(engine);
        engine = Peer::start(&arguments).unwrap();
    }
}

/// Events in the first `messages` messages.
fn events_of(vectors: &[(PathBuf, Vec<u8>)], messages: u64) -> u64 {
    let sizes: Vec<u64> =
        vectors.iter().map(|(_, payload)| decode(payload).unwrap().events.len() as u64).collect();
    (0..messages as usize).map(|number| sizes[number % sizes.len()]).sum()
}
