//! What the tests of this crate share: blocks, a scripted source, transports that misbehave.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of this")]

mod nats_server;
mod ports;
mod proxy;

pub(crate) use nats_server::{NatsServer, STREAM_BYTES};
pub(crate) use ports::free_port;
pub(crate) use proxy::Proxy;

use kvbm_events::{
    Answering, EventBlock, EventKind, EventReceiver, EventSource, EventTransport, InProcessConfig,
    InProcessTransport, KvEvent, Payload, Responder, SourceId, TransportError,
};
use kvbm_plan::{BlockIdentity, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier, VolumeId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Long enough for any machine; a correct run never waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn hash(n: u64) -> SequenceHash {
    SequenceHash::from_bytes(
        (u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)).to_le_bytes(),
    )
}

pub(crate) fn block(n: u32) -> EventBlock {
    EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(0xABCD_EF01),
            group: GroupId(0),
            hash: hash(u64::from(n) + 1),
            parent: (n > 0).then(|| hash(u64::from(n))),
            position: n,
        },
        prefix_hash: hash(1),
        local_hash: None,
        block_bytes: 2 << 20,
        block_tokens: 16,
        location: Location::on(NodeId(3), Tier::G2),
    }
}

pub(crate) fn event(sequence: u64) -> KvEvent {
    let mut block = block(sequence as u32);
    if sequence % 5 == 4 {
        block.location = Location { tier: Tier::G4, node: NodeId(3), volume: Some(VolumeId(9)) };
    }
    let kind = match sequence % 3 {
        0 | 1 => EventKind::Store(block),
        _ => EventKind::Remove(block),
    };
    KvEvent::new(sequence, kind)
}

/// A ring as a pool has one: bounded, numbers every event, loses the newest when it is full.
#[derive(Clone)]
pub(crate) struct Ring(Arc<Mutex<RingState>>);

struct RingState {
    events: VecDeque<KvEvent>,
    capacity: usize,
    next: u64,
    lost: Vec<u64>,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(RingState { events: VecDeque::new(), capacity, next: 0, lost: Vec::new() })))
    }

    pub(crate) fn push(&self, count: u64) {
        let mut ring = self.0.lock().unwrap();
        for _ in 0..count {
            let sequence = ring.next;
            ring.next += 1;
            if ring.events.len() < ring.capacity {
                ring.events.push_back(event(sequence));
            } else {
                ring.lost.push(sequence);
            }
        }
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.lock().unwrap().next
    }

    pub(crate) fn lost(&self) -> Vec<u64> {
        self.0.lock().unwrap().lost.clone()
    }
}

impl EventSource for Ring {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        let mut ring = self.0.lock().unwrap();
        let count = ring.events.len().min(max);
        out.extend(ring.events.drain(..count));
        ring.events.front().map_or(ring.next, |front| front.sequence)
    }
}

/// What a faulty transport does with the next payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Deliver,
    Lose,
    Repeat,
    Corrupt,
    Unavailable,
    /// Delivered, but the publisher is told that it was not.
    DeliveredButUnavailable,
}

/// Carries payloads as a script says, then perfectly.
pub(crate) struct Faulty {
    inner: InProcessTransport,
    script: Vec<Fate>,
    at: AtomicUsize,
}

impl Faulty {
    pub(crate) fn new(script: Vec<Fate>) -> Self {
        let config = InProcessConfig { queue_batches: 1 << 16, queue_bytes: 1 << 30 };
        Self { inner: InProcessTransport::new(config), script, at: AtomicUsize::new(0) }
    }

    pub(crate) fn is_perfect_now(&self) -> bool {
        self.at.load(Ordering::SeqCst) >= self.script.len()
    }
}

impl EventTransport for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        let unavailable =
            || TransportError::Unavailable { transport: "faulty", reason: "as the script says".to_owned() };
        let at = self.at.fetch_add(1, Ordering::SeqCst);
        match self.script.get(at).copied().unwrap_or(Fate::Deliver) {
            Fate::Deliver => self.inner.publish(payload, timeout),
            Fate::Lose => Ok(()),
            Fate::Repeat => {
                self.inner.publish(payload, timeout)?;
                self.inner.publish(payload, timeout)
            }
            Fate::Corrupt => self.inner.publish(&payload[..payload.len() - 1].into(), timeout),
            Fate::Unavailable => Err(unavailable()),
            Fate::DeliveredButUnavailable => {
                self.inner.publish(payload, timeout)?;
                Err(unavailable())
            }
        }
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        self.inner.subscribe()
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        self.inner.answer(source, responder)
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        self.inner.ask(source, question, timeout)
    }
}

/// A cache of chains that tells its events through a bounded ring: what it holds, and what it told.
#[derive(Clone)]
pub(crate) struct World(Arc<Mutex<WorldState>>);

struct WorldState {
    held: std::collections::BTreeSet<(u32, usize)>,
    events: VecDeque<KvEvent>,
    capacity: usize,
    next: u64,
}

impl World {
    /// Blocks of each chain: a number names chain and position.
    pub(crate) const CHAIN: u32 = 20;

    pub(crate) fn new(capacity: usize) -> Self {
        let (held, events) = (std::collections::BTreeSet::new(), VecDeque::new());
        Self(Arc::new(Mutex::new(WorldState { held, events, capacity, next: 0 })))
    }

    fn block(number: u32, tier: usize) -> EventBlock {
        let (chain, at) = (number / Self::CHAIN, number % Self::CHAIN);
        let name = |at: u32| hash(u64::from(chain * Self::CHAIN + at) + 1);
        let mut block = block(at);
        block.identity.hash = name(at);
        block.identity.parent = at.checked_sub(1).map(name);
        block.prefix_hash = name(0);
        block.location = Location::on(NodeId(0), Tier::ALL[tier]);
        block
    }

    /// Stores a block on a tier, or removes it if it is there.
    pub(crate) fn toggle(&self, number: u32, tier: usize) {
        let mut world = self.0.lock().unwrap();
        let block = Self::block(number, tier);
        let kind = if world.held.insert((number, tier)) {
            EventKind::Store(block)
        } else {
            world.held.remove(&(number, tier));
            EventKind::Remove(block)
        };
        let sequence = world.next;
        world.next += 1;
        if world.events.len() == world.capacity {
            // The oldest goes, as in the pool: what remains ends with the truth.
            world.events.pop_front();
        }
        world.events.push_back(KvEvent::new(sequence, kind));
    }

    pub(crate) fn snapshot(&self) -> kvbm_events::Snapshot {
        let world = self.0.lock().unwrap();
        let blocks = world.held.iter().map(|&(number, tier)| Self::block(number, tier)).collect();
        kvbm_events::Snapshot { next_sequence: world.next, blocks }
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.lock().unwrap().next
    }

    /// Whether an index that follows only this holds exactly the same.
    pub(crate) fn is_mirrored_by(&self, index: &kvbm_events::KvIndex) -> bool {
        let world = self.0.lock().unwrap();
        let of_world =
            world.held.iter().map(|&(number, tier)| (Self::block(number, tier).identity.hash, tier));
        let of_index = index.holdings().map(|(place, _, hash)| (hash, place.location.tier.index()));
        let set = of_world.collect::<std::collections::BTreeSet<_>>();
        set == of_index.collect()
    }
}

impl EventSource for World {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        let mut world = self.0.lock().unwrap();
        let count = world.events.len().min(max);
        out.extend(world.events.drain(..count));
        world.events.front().map_or(world.next, |front| front.sequence)
    }
}
