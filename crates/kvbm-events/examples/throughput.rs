//! Events a second from a source through a transport into an index: in this process, and over NATS
//! where a server is named: `cargo run --release -p kvbm-events --features nats --example
//! throughput -- nats://127.0.0.1:4222`.
//!
//! Prints one line of JSON a transport. Source, publisher, server and follower share the machine. A
//! follower that falls behind slows the source down, so nothing is lost; `missing` says whether
//! that held.

use kvbm_events::{Delivery, StreamId};
use kvbm_events::{
    EventBlock, EventKind, EventManager, EventTransport, InProcessTransport, KvEvent, KvIndex,
    PublisherConfig, SourceId, Subscriber,
};
use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EVENTS: u64 = 3_000_000;
/// Most events under way.
const WINDOW: u64 = 200_000;
/// Chains of 128 blocks are stored, then removed when this many newer ones are there.
const CHAIN: u64 = 128;
const KEPT: u64 = 1_000;

fn hash(block: u64) -> SequenceHash {
    let number = u128::from(block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    SequenceHash::from_bytes(number.to_le_bytes())
}

/// Event `sequence` of a cache that stores chain after chain and evicts the oldest, tail first.
fn event(sequence: u64) -> KvEvent {
    let (turn, at) = (sequence / CHAIN, sequence % CHAIN);
    let stores = turn < KEPT || turn % 2 == 0;
    let chain = if turn < KEPT { turn } else { KEPT + (turn - KEPT) / 2 };
    let (chain, at) = if stores { (chain, at) } else { (chain - KEPT, CHAIN - 1 - at) };
    let block = EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(0x1234_5678),
            group: GroupId(0),
            hash: hash(chain * CHAIN + at),
            parent: at.checked_sub(1).map(|before| hash(chain * CHAIN + before)),
            position: at as u32,
        },
        prefix_hash: hash(chain * CHAIN),
        local_hash: None,
        block_bytes: 2 << 20,
        block_tokens: 16,
        location: Location::on(NodeId(0), Tier::G1),
    };
    let kind = if stores { EventKind::Store(block) } else { EventKind::Remove(block) };
    KvEvent::new(sequence, kind)
}

/// One transport; what came out as a line of JSON.
fn measure(transport: Arc<dyn EventTransport>) -> Result<String, Box<dyn std::error::Error>> {
    let name = transport.name();
    let mut follower = Subscriber::new(transport.subscribe()?);
    let followed = Arc::new(AtomicU64::new(0));
    let mut manager = EventManager::new(PublisherConfig::default(), SourceId(1), Epoch(1), transport)?;
    let (mut next, seen) = (0, Arc::clone(&followed));
    manager.add_shard(0, move |max: usize, out: &mut Vec<KvEvent>| {
        let room = (seen.load(Ordering::Acquire) + WINDOW).min(EVENTS) - next;
        let count = room.min(max as u64);
        out.extend((next..next + count).map(event));
        next += count;
        next
    })?;
    let start = Instant::now();
    let publisher = manager.spawn()?;
    let mut index = KvIndex::default();
    while followed.load(Ordering::Acquire) < EVENTS {
        match follower.next(Duration::from_secs(10))? {
            Some(Delivery::Events { stream, events }) => {
                index.apply(stream, &events);
                followed.fetch_add(events.len() as u64, Ordering::Release);
            }
            Some(Delivery::Gap { stream: StreamId { .. }, missing }) => {
                followed.fetch_add(missing.end - missing.start, Ordering::Release);
            }
            Some(Delivery::Restarted { .. }) => return Err("the source was not restarted".into()),
            None => return Err(format!("{name}: nothing came for ten seconds").into()),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    publisher.flush(Duration::from_secs(5))?;
    let published = publisher.stats();
    Ok(format!(
        "{{\"name\":\"{name}\",\"events_per_s\":{:.0},\"bytes_per_event\":{:.1},\"batches\":{},\"missing\":{},\"index_blocks\":{}}}",
        EVENTS as f64 / seconds,
        published.bytes as f64 / published.events as f64,
        published.batches,
        follower.stats().tracker.missing,
        index.stats().blocks,
    ))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", measure(Arc::new(InProcessTransport::default()))?);
    for url in std::env::args().skip(1) {
        over_nats(&url)?;
    }
    Ok(())
}

#[cfg(feature = "nats")]
fn over_nats(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    use kvbm_events::nats::{NatsConfig, NatsTransport};
    // A subject and a stream of this run alone.
    let run = std::process::id();
    let config = NatsConfig::new(url, format!("kvbm.throughput.{run}"));
    println!("{}", measure(Arc::new(NatsTransport::connect(config)?))?);
    let config = NatsConfig::new(url, format!("kvbm.throughput.{run}.kept"));
    let config = config.with_stream(format!("kvbm-throughput-{run}"));
    println!("{}", measure(Arc::new(NatsTransport::connect(config)?))?);
    Ok(())
}

#[cfg(not(feature = "nats"))]
fn over_nats(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    Err(format!("{url}: this was built without NATS; add --features nats").into())
}
