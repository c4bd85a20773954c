//! No duration of a caller is beyond the clock.

use crate::support::Ring;
use kvbm_events::{
    EventManager, EventTransport, InProcessTransport, IndexFollower, KvIndex, Payload, PublisherConfig,
    SourceId, Subscriber,
};
use kvbm_plan::Epoch;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A transport with a publisher that has lost its first five events.
fn with_gap() -> (Arc<InProcessTransport>, Subscriber, EventManager) {
    let transport = Arc::new(InProcessTransport::default());
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let config = PublisherConfig::default();
    let mut manager = EventManager::new(config, SourceId(1), Epoch(1), transport.clone()).unwrap();
    let ring = Ring::new(0);
    ring.push(5);
    manager.add_shard(0, ring).unwrap();
    manager.pump(Instant::now()).unwrap();
    (transport, subscriber, manager)
}

/// Mutation that makes it fail: `deadline::after` without its limit.
#[test]
fn every_call_takes_the_longest_duration() {
    let (transport, mut subscriber, manager) = with_gap();
    let mut receiver = transport.subscribe().unwrap();
    transport.publish(&Payload::from(*b"x"), Duration::MAX).unwrap();
    assert!(receiver.recv(Duration::MAX).unwrap().is_some());
    assert!(subscriber.next(Duration::MAX).unwrap().is_some());
    let publisher = manager.spawn().unwrap();
    publisher.flush(Duration::MAX).unwrap();
}

#[test]
fn a_follower_takes_the_longest_duration() {
    let (_transport, subscriber, _manager) = with_gap();
    let mut follower = IndexFollower::new(subscriber, |_| None, KvIndex::default());
    assert!(follower.poll(Duration::MAX).unwrap());
}

#[cfg(feature = "zmq")]
#[test]
fn zmq_takes_the_longest_duration() {
    use kvbm_events::vllm::EngineSource;
    use kvbm_events::zmq::{EngineFollower, ZmqAddress, ZmqConfig, ZmqTransport};
    use kvbm_plan::NodeId;
    let config = ZmqConfig { connect_timeout: Duration::MAX, ..ZmqConfig::default() };
    let address = ZmqAddress::new("tcp://127.0.0.1:*").with_replay("tcp://127.0.0.1:*");
    let publisher = ZmqTransport::bind(config.clone(), &address).unwrap();
    let _answering = publisher.answer(SourceId(1), Arc::new(|_: &[u8]| Payload::from(*b"answer"))).unwrap();
    let connected = ZmqTransport::connect(config, &publisher.addresses()).unwrap();
    let receiver = connected.messages().unwrap();
    assert_eq!(*connected.ask(SourceId(1), &Payload::from(*b"?"), Duration::MAX).unwrap(), *b"answer");
    let worker = EngineSource { source: SourceId(1), node: NodeId(0) };
    let mut follower = EngineFollower::new(receiver, &[worker], KvIndex::default());
    publisher.publish(&Payload::from(*b"x"), Duration::MAX).unwrap();
    assert!(follower.poll(Duration::MAX).unwrap());
}
