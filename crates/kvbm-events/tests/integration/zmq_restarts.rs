//! Publishers that start anew, and readers that are slow: a follower of engines, who give no
//! snapshots, may know too little for a while and never too much.

#![cfg(feature = "zmq")]

use crate::support::{PATIENCE, Proxy};
use kvbm_events::vllm::{self, BlockStored, EngineBatch, EngineEvent, EngineHash, EngineSource};
use kvbm_events::zmq::{EngineFollower, ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm_events::{EventReceiver, EventTransport, InProcessConfig, KvIndex, Payload, SourceId};
use kvbm_plan::{GroupId, NodeId};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

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

fn bind(config: &ZmqConfig) -> (ZmqTransport, ZmqAddress) {
    let anywhere = ZmqAddress::new("tcp://127.0.0.1:*").with_replay("tcp://127.0.0.1:*");
    let publisher = ZmqTransport::bind(config.clone(), &anywhere).unwrap();
    let [address] = publisher.addresses().try_into().unwrap();
    (publisher, address)
}

/// A publisher that a follower sees as an engine: nothing tells one life of it from the next.
struct Engine {
    publisher: ZmqTransport,
    /// In front of its two sockets.
    ways: [Proxy; 2],
    blocks: BTreeSet<u64>,
    sent: u64,
}

impl Engine {
    fn start() -> Self {
        let (publisher, address) = bind(&ZmqConfig::default());
        let ways = Self::sockets(&address).map(|socket| Proxy::nameless(&socket));
        Self { publisher, ways, blocks: BTreeSet::new(), sent: 0 }
    }

    fn sockets(address: &ZmqAddress) -> [String; 2] {
        [&address.events, address.replay.as_ref().unwrap()]
            .map(|socket| socket.strip_prefix("tcp://").unwrap().to_owned())
    }

    fn address(&self, with_replay: bool) -> ZmqAddress {
        let [events, replay] = &self.ways;
        let address = ZmqAddress::new(format!("tcp://{}", events.address()));
        if with_replay { address.with_replay(format!("tcp://{}", replay.address())) } else { address }
    }

    /// Stores a block with each of so many messages. Those of a life are of that life alone.
    fn say(&mut self, life: u64, messages: u64) {
        for _ in 0..messages {
            let block = 1_000_000 * life + self.sent;
            let block_hashes = vec![EngineHash::Uint(block)];
            let medium = Some("GPU".to_owned());
            let event = EngineEvent::Stored(BlockStored { block_hashes, medium, ..BlockStored::default() });
            let batch = EngineBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None };
            self.publisher.publish(&vllm::encode(&batch).into(), PATIENCE).unwrap();
            self.blocks.insert(block);
            self.sent += 1;
        }
    }

    /// Its process ends, and the next one has said so much before anybody hears it.
    fn restart(&mut self, life: u64, messages: u64) {
        for way in &self.ways {
            // Nobody listens on port 1.
            way.lead_to("127.0.0.1:1");
            way.cut();
        }
        let (publisher, address) = bind(&ZmqConfig::default());
        self.publisher = publisher;
        (self.blocks, self.sent) = (BTreeSet::new(), 0);
        self.say(life, messages);
        // Its replay first: whoever hears it may ask at once, and nothing more need be said after
        // that.
        for (way, socket) in self.ways.iter().zip(Self::sockets(&address)).rev() {
            way.lead_to(&socket);
        }
    }

    /// Blocks of the index that it does not hold, and those of its own that are missing there.
    fn compare(&self, follower: &EngineFollower) -> (u64, u64) {
        let known = |block: &&u64| !follower.find_hashes(GroupId(0), &[EngineHash::Uint(**block)]).is_empty();
        let right = self.blocks.iter().filter(known).count() as u64;
        (follower.index().stats().blocks - right, self.blocks.len() as u64 - right)
    }
}

fn follow(addresses: &[ZmqAddress]) -> (ZmqTransport, EngineFollower) {
    let config = ZmqConfig { from_start: true, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, addresses).unwrap();
    let worker = |n| EngineSource { source: SourceId(n), node: NodeId(0) };
    let workers: Vec<EngineSource> = (0..addresses.len() as u64).map(worker).collect();
    let follower = EngineFollower::new(subscriber.messages().unwrap(), &workers, KvIndex::default());
    (subscriber, follower)
}

fn poll_until(what: &str, follower: &mut EngineFollower, mut done: impl FnMut(&EngineFollower) -> bool) {
    until(what, || {
        follower.poll(Duration::from_millis(20)).unwrap();
        done(follower).then_some(())
    });
}

/// Mutation that makes it fail: `fetch_of_life` that asks from the next message, or does not
/// compare.
#[test]
fn a_new_life_is_noticed_however_long_it_is_already() {
    for (life, messages) in [(1, 30), (2, 99), (3, 100), (4, 101), (5, 150)] {
        let mut engine = Engine::start();
        let (_subscriber, mut follower) = follow(&[engine.address(true)]);
        engine.say(0, 100);
        poll_until("the first life is known", &mut follower, |follower| engine.compare(follower) == (0, 0));
        engine.restart(life, messages);
        // It has nothing more to say: what it said before the connection is there at once.
        poll_until("the second life is known", &mut follower, |follower| engine.compare(follower) == (0, 0));
        let stats = follower.stats(0);
        assert_eq!((stats.restarts, stats.missing, follower.forgotten(0)), (1, 0, 0), "{messages} messages");
    }
}

#[test]
fn a_lost_connection_costs_nothing_where_the_last_message_can_be_had_again() {
    let mut engine = Engine::start();
    let (_subscriber, mut follower) = follow(&[engine.address(true)]);
    for round in 0..5 {
        engine.say(0, 20);
        if round % 2 == 0 {
            engine.ways[0].cut();
            engine.say(0, round);
        }
        poll_until("all is known", &mut follower, |follower| engine.compare(follower) == (0, 0));
    }
    let stats = follower.stats(0);
    assert_eq!((stats.restarts, stats.missing, follower.forgotten(0)), (0, 0, 0));
}

/// Nothing can be asked: the next message may be of this life or of another one.
/// Mutation that makes it fail: `session` that leaves no doubt.
#[test]
fn without_a_replay_nothing_is_believed_over_a_lost_connection() {
    for (life, messages) in [(1, 30), (2, 500), (3, 600)] {
        let mut engine = Engine::start();
        let (_subscriber, mut follower) = follow(&[engine.address(false)]);
        engine.say(0, 500);
        poll_until("the first life is known", &mut follower, |follower| engine.compare(follower) == (0, 0));
        engine.restart(life, messages);
        until("the subscriber is back", || (engine.publisher.subscribers() > 0).then_some(()));
        poll_until("something of the second life is known", &mut follower, |follower| {
            engine.say(life, 1);
            follower.index().stats().blocks < 500
        });
        assert_eq!(engine.compare(&follower).0, 0, "{messages} messages");
        // It is learnt again from here on.
        let before = follower.index().stats().blocks;
        engine.say(life, 10);
        poll_until("what it says is known", &mut follower, |follower| {
            follower.index().stats().blocks >= before + 10
        });
        assert_eq!(engine.compare(&follower).0, 0, "{messages} messages");
    }
}

fn payload(number: u64) -> Payload {
    number.to_le_bytes().to_vec().into()
}

/// Mutation that makes it fail: `hand_on` that does not wait for room.
#[test]
fn a_slow_reader_loses_nothing_that_the_publisher_still_has() {
    let (publisher, address) = bind(&ZmqConfig::default());
    (0..10_000).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    let config = ZmqConfig { from_start: true, ..ZmqConfig::default() };
    let late = ZmqTransport::connect(config, &[address]).unwrap();
    let mut receiver = late.messages().unwrap();
    for n in 0..20_000u64 {
        if n % 2_500 == 0 {
            // Long enough for all that can come.
            std::thread::sleep(Duration::from_millis(200));
        }
        if n == 9_000 {
            // As many more, live, while nobody reads: the publisher drops most of them.
            (10_000..19_000).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
        }
        if n == 18_000 {
            (19_000..20_000).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
        }
        let message = receiver.next(PATIENCE).unwrap().unwrap();
        assert_eq!((message.sequence, message.payload), (n, payload(n)));
    }
    assert_eq!(receiver.dropped(), 0);
}

/// Mutation that makes it fail: `hand_on` that does not wait for room.
#[test]
fn an_engine_that_says_much_costs_another_nothing() {
    let (mut loud, mut quiet) = (Engine::start(), Engine::start());
    quiet.say(1, 10);
    loud.say(2, 5_000);
    let (_subscriber, mut follower) = follow(&[quiet.address(true), loud.address(true)]);
    std::thread::sleep(Duration::from_millis(300));
    loud.say(2, 2_000);
    quiet.say(1, 10);
    std::thread::sleep(Duration::from_millis(300));
    poll_until("both are known", &mut follower, |follower| {
        follower.index().stats().blocks == (loud.blocks.len() + quiet.blocks.len()) as u64
    });
    for engine in 0..2 {
        let stats = follower.stats(engine);
        assert_eq!((stats.restarts, stats.missing, follower.forgotten(engine)), (0, 0, 0), "engine {engine}");
    }
    assert_eq!(follower.dropped(), 0);
}

/// Its runtime is not to wait for a reader who has gone.
#[test]
fn a_subscriber_that_waits_for_room_ends_when_nobody_reads() {
    let queue = InProcessConfig { queue_batches: 4, queue_bytes: 1 << 20 };
    let (publisher, address) = bind(&ZmqConfig::default());
    let config = ZmqConfig { from_start: true, queue, ..ZmqConfig::default() };
    let subscriber = ZmqTransport::connect(config, &[address]).unwrap();
    let receiver = subscriber.messages().unwrap();
    (0..100).for_each(|n| publisher.publish(&payload(n), PATIENCE).unwrap());
    until("it is full", || (receiver.waiting() == 4).then_some(()));
    drop(receiver);
    until("the connection is gone", || (publisher.subscribers() == 0).then_some(()));
    let start = Instant::now();
    let receiver = subscriber.messages().unwrap();
    until("it is full", || (receiver.waiting() == 4).then_some(()));
    drop(subscriber);
    assert!(start.elapsed() < PATIENCE / 2, "an end does not wait");
}
