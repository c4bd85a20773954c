//! What the tests of this crate share: blocks, a scripted source, transports that misbehave.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use kvbm_events::{
    EventBlock, EventKind, EventReceiver, EventSource, EventTransport, InProcessConfig, InProcessTransport,
    KvEvent, Payload, TransportError,
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
}
