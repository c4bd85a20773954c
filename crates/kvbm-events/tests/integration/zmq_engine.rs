//! Following an engine that starts anew unseen: one that says what the test tells it to, on sockets
//! that name no life, as libzmq's.

#![cfg(feature = "zmq")]

use crate::support::PATIENCE;
use kvbm_events::vllm::{self, BlockStored, EngineBatch, EngineEvent, EngineHash, EngineSource};
use kvbm_events::zmq::{EngineFollower, ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm_events::{KvIndex, SourceId};
use kvbm_plan::{GroupId, NodeId};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// An engine, or a forwarder in front of one: its PUB socket and its replay socket, spoken by hand.
struct Engine {
    address: ZmqAddress,
    said: Arc<Mutex<Said>>,
}

#[derive(Default)]
struct Said {
    /// What the replay socket repeats.
    history: Vec<(u64, Vec<u8>)>,
    /// Most messages that an answer of it carries, the first and last ones; the others are dropped
    /// on the way.
    room: Option<usize>,
    /// How often the replay socket was asked.
    asked: u64,
    subscribers: Vec<TcpStream>,
}

impl Engine {
    fn start() -> Self {
        let said = Arc::new(Mutex::new(Said::default()));
        let of_events = Arc::clone(&said);
        let events = listen(b"PUB", move |mut stream| {
            // The subscription.
            if message(&mut stream).is_some() {
                of_events.lock().unwrap().subscribers.push(stream);
            }
        });
        let of_replay = Arc::clone(&said);
        let replay = listen(b"ROUTER", move |mut stream| {
            while let Some(frames) = message(&mut stream) {
                let from = u64::from_be_bytes(frames[1][..].try_into().unwrap());
                let mut said = of_replay.lock().unwrap();
                said.asked += 1;
                let kept: Vec<_> = said.history.iter().filter(|(number, _)| *number >= from).collect();
                let room = said.room.unwrap_or(kept.len()).div_ceil(2);
                let is_sent = |at: usize| at < room || at + room >= kept.len();
                for (_, (number, payload)) in kept.iter().enumerate().filter(|(at, _)| is_sent(*at)) {
                    if !write(&mut stream, &[b"", b"kv", &number.to_be_bytes(), payload]) {
                        return;
                    }
                }
                if !write(&mut stream, &[b"", b"", &vllm::END_OF_REPLAY.to_be_bytes(), b""]) {
                    return;
                }
            }
        });
        Self { address: ZmqAddress::new(events).with_replay(replay), said }
    }

    /// Ends and starts anew behind a forwarder: connections stay.
    fn restart(&self) {
        self.said.lock().unwrap().history.clear();
    }

    fn cut(&self) {
        for stream in self.said.lock().unwrap().subscribers.drain(..) {
            stream.shutdown(Shutdown::Both).unwrap();
        }
    }

    /// Stores the blocks of each of `hashes`, a message each, which nobody hears; what it said.
    fn send_to_nobody(&self, hashes: std::ops::Range<u64>) -> Vec<(u64, Vec<u8>)> {
        let mut said = self.said.lock().unwrap();
        let first = said.history.len() as u64;
        let messages: Vec<_> = (first..).zip(hashes.map(stores)).collect();
        said.history.extend_from_slice(&messages);
        messages
    }

    /// Hands a message to the subscribers.
    fn forward(&self, messages: &[(u64, Vec<u8>)]) {
        for stream in &mut self.said.lock().unwrap().subscribers {
            for (number, payload) in messages {
                write(stream, &[b"kv", &number.to_be_bytes(), payload]);
            }
        }
    }

    fn say(&self, hashes: std::ops::Range<u64>) {
        self.forward(&self.send_to_nobody(hashes));
    }
}

/// A listener that greets as a socket of this type and gives each connection to `serve`; its
/// address.
fn listen(socket: &'static [u8], serve: impl Fn(TcpStream) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, serve) = (stream.unwrap(), serve.clone());
            std::thread::spawn(move || {
                let mut greeting = [0; 64];
                (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
                greeting[12..16].copy_from_slice(b"NULL");
                stream.write_all(&greeting).unwrap();
                let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
                ready.push(socket.len() as u8);
                ready.extend_from_slice(socket);
                stream.write_all(&[4, ready.len() as u8]).unwrap();
                stream.write_all(&ready).unwrap();
                // Theirs: the greeting, and READY.
                if stream.read_exact(&mut greeting).is_ok() && frame(&mut stream).is_some() {
                    serve(stream);
                }
            });
        }
    });
    address
}

/// Flags and body of a frame, `None` at the end.
fn frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).ok()?;
    let mut body = vec![0; usize::from(head[1])];
    stream.read_exact(&mut body).ok()?;
    Some((head[0], body))
}

fn message(stream: &mut TcpStream) -> Option<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    loop {
        let (flags, body) = frame(stream)?;
        frames.push(body);
        if flags & 1 == 0 {
            return Some(frames);
        }
    }
}

/// Whether a message of short frames could be written.
fn write(stream: &mut TcpStream, frames: &[&[u8]]) -> bool {
    let mut bytes = Vec::new();
    for (at, frame) in frames.iter().enumerate() {
        bytes.extend_from_slice(&[u8::from(at + 1 < frames.len()), u8::try_from(frame.len()).unwrap()]);
        bytes.extend_from_slice(frame);
    }
    stream.write_all(&bytes).is_ok()
}

/// A message in which an engine stores a block.
fn stores(hash: u64) -> Vec<u8> {
    let (block_hashes, medium) = (vec![EngineHash::Uint(hash)], Some("GPU".to_owned()));
    let event = EngineEvent::Stored(BlockStored { block_hashes, medium, ..BlockStored::default() });
    vllm::encode(&EngineBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None })
}

struct Following {
    follower: EngineFollower,
    _transport: ZmqTransport,
}

impl Following {
    fn start(engine: &Engine) -> Self {
        let config = ZmqConfig { topic: "kv".into(), from_start: true, ..ZmqConfig::default() };
        let transport = ZmqTransport::connect(config, std::slice::from_ref(&engine.address)).unwrap();
        let worker = EngineSource { source: SourceId(1), node: NodeId(0) };
        let follower = EngineFollower::new(transport.messages().unwrap(), &[worker], KvIndex::default());
        let deadline = Instant::now() + PATIENCE;
        while engine.said.lock().unwrap().subscribers.is_empty() {
            assert!(Instant::now() < deadline, "nobody subscribes");
            std::thread::sleep(Duration::from_millis(1));
        }
        Self { follower, _transport: transport }
    }

    /// Waits until the index holds these blocks and no other.
    fn holds(&mut self, what: &str, hashes: impl Iterator<Item = u64>) {
        let wanted: BTreeSet<_> = hashes.map(|hash| EngineHash::Uint(hash).index_key()).collect();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let held = self.follower.index().holdings().map(|(_, group, hash)| {
                assert_eq!(group, GroupId(0));
                hash
            });
            let held: BTreeSet<_> = held.collect();
            if held == wanted {
                return;
            }
            let stats = self.follower.stats(0);
            assert!(Instant::now() < deadline, "{what}: {} of {}, {stats:?}", held.len(), wanted.len());
            self.follower.poll(Duration::from_millis(20)).unwrap();
        }
    }

    fn counted(&self) -> (u64, u64, u64) {
        let stats = self.follower.stats(0);
        (stats.restarts, stats.missing, self.follower.forgotten(0))
    }
}

/// Behind a forwarder nothing of a start is seen but the numbers, and they may have passed the old
/// ones before one is heard. Mutation that makes it fail: `fetch_of_life` without `last`.
#[test]
fn an_engine_that_is_past_its_old_numbers_when_it_sends_again_has_started_anew() {
    let engine = Engine::start();
    let mut following = Following::start(&engine);
    engine.say(0..20);
    following.holds("the first life", 0..20);
    engine.restart();
    engine.send_to_nobody(100..130);
    engine.say(130..140);
    following.holds("the second life", 100..140);
    assert_eq!(following.counted(), (1, 0, 0));
    // A loss within a life is none of that.
    engine.send_to_nobody(140..150);
    engine.say(150..151);
    following.holds("what was lost", 100..151);
    assert_eq!(following.counted(), (1, 0, 0));
}

/// Mutation that makes it fail: `fetch_of_life` without `last`.
#[test]
fn an_engine_that_started_anew_while_nobody_listened_is_known_by_what_it_repeats() {
    for (said, what) in [(50, "more than before"), (20, "as much as before"), (7, "less than before")] {
        let engine = Engine::start();
        let mut following = Following::start(&engine);
        engine.say(0..20);
        following.holds("the first life", 0..20);
        engine.restart();
        engine.send_to_nobody(100..100 + said);
        engine.cut();
        // It need say nothing more.
        following.holds(what, 100..100 + said);
        assert_eq!(following.counted(), (1, 0, 0), "{what}");
    }
}

/// All of the first life came by a replay, and the second one is within its numbers when it is
/// heard. Mutation that makes it fail: `Covered::has` without the digests.
#[test]
fn an_engine_that_sends_again_within_the_numbers_of_a_replay_has_started_anew() {
    let engine = Engine::start();
    engine.send_to_nobody(0..20);
    let mut following = Following::start(&engine);
    following.holds("the first life", 0..20);
    engine.restart();
    engine.send_to_nobody(100..105);
    engine.say(105..108);
    following.holds("the second life", 100..108);
    assert_eq!(following.counted(), (1, 0, 0));
}

/// A message of the old life that is heard when its new life has been asked about is none of the
/// new one, whose next number follows it. Mutation that makes it fail: `take` that leaves no doubt
/// after a life that began within it.
#[test]
fn the_last_message_of_a_life_that_comes_late_is_not_believed_of_the_next() {
    let engine = Engine::start();
    let mut following = Following::start(&engine);
    engine.say(0..20);
    following.holds("the first life", 0..20);
    engine.send_to_nobody(20..25);
    let late = engine.send_to_nobody(25..26);
    engine.restart();
    engine.send_to_nobody(100..126);
    engine.forward(&late);
    engine.say(126..127);
    following.holds("the second life", 100..127);
    assert_eq!(following.counted().1, 0);
}

/// libzmq drops what does not fit into its queue for who reads slowly, from the middle of an answer
/// too. Mutations that make it fail: `fetch_of_life` that takes holes for gaps; `fetch` that counts
/// answers which brought much.
#[test]
fn a_replay_with_holes_is_asked_for_again() {
    let engine = Engine::start();
    let mut following = Following::start(&engine);
    engine.say(0..1);
    following.holds("the beginning", 0..1);
    engine.said.lock().unwrap().room = Some(200);
    engine.send_to_nobody(1..2_000);
    engine.say(2_000..2_001);
    following.holds("all of it", 0..2_001);
    engine.send_to_nobody(2_001..4_000);
    engine.cut();
    following.holds("all of it after a cut", 0..4_000);
    assert_eq!(following.counted(), (0, 0, 0));
}

/// Mutation that makes it fail: `fetch` that asks again after every hole.
#[test]
fn a_replay_that_has_holes_for_good_is_asked_for_a_few_times() {
    let engine = Engine::start();
    // Every second number is missing.
    let messages = (0..2_000).map(|n| (2 * n, stores(n)));
    engine.said.lock().unwrap().history = messages.collect();
    let mut following = Following::start(&engine);
    // What a gap may have taken along is forgotten.
    following.holds("what came after the last hole", 1_999..2_000);
    assert_eq!(following.counted().0, 0);
    let asked = engine.said.lock().unwrap().asked;
    assert!(asked <= 10, "asked {asked} times");
}
