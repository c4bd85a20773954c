//! From the pool's ring to subscribers.

use crate::config::EventsConfig;
use kvbm_events::{
    EventBlock, EventKind, EventManager, InProcessConfig, InProcessTransport, KvEvent, Publisher,
    PublisherConfig, SourceId, Subscriber, TransportError,
};
use kvbm_plan::{BlockIdentity, Location, NodeId, SequenceHash, Tier};
use kvbm_pool::{EventRecord, Registry};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// Publishes what the pool writes to its ring, on a thread of its own, to subscribers in this process.
pub struct EventPump {
    transport: Arc<InProcessTransport>,
    publisher: Publisher,
}

/// What every event of this manager says about its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFacts {
    pub(crate) block_bytes: u64,
    pub(crate) block_tokens: u32,
}

/// A publisher that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] kvbm_events::ConfigError),
    /// The system refused a thread.
    #[error("cannot start the event thread: {0}; raise the limit of threads")]
    Thread(#[from] std::io::Error),
}

impl EventPump {
    pub(crate) fn start(
        registry: Registry,
        config: &EventsConfig,
        facts: BlockFacts,
    ) -> Result<Self, EventsError> {
        let transport = Arc::new(InProcessTransport::new(InProcessConfig::default()));
        let publishing = PublisherConfig {
            batch_events: config.batch_events as usize,
            max_age: config.batch_age,
            ..PublisherConfig::default()
        };
        let source = SourceId(fresh_source());
        let mut manager = EventManager::new(publishing, source, registry.epoch(), transport.clone())?;
        let mut ring = Ring { registry, facts, roots: Roots::default(), records: Vec::new() };
        manager.add_shard(0, move |max: usize, out: &mut Vec<KvEvent>| ring.drain(max, out))?;
        Ok(Self { transport, publisher: manager.spawn()? })
    }

    /// A subscriber that sees every event from now on, and every loss.
    ///
    /// # Errors
    /// Too many subscribers.
    pub fn subscribe(&self) -> Result<Subscriber, TransportError> {
        use kvbm_events::EventTransport;
        Ok(Subscriber::new(self.transport.subscribe()?))
    }

    /// Publishes what has happened so far rather than at the next tick. `false` if that did not work in a second.
    pub fn pump(&self) -> bool {
        self.publisher.flush(Duration::from_secs(1)).is_ok()
    }

    /// What was published, and what was lost on the way.
    pub fn stats(&self) -> kvbm_events::PublisherStats {
        self.publisher.stats()
    }
}

/// A number that no other manager has, on this machine or another: hash keys that the system drew at random, different with every call.
fn fresh_source() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// The pool's ring as a source of events.
struct Ring {
    registry: Registry,
    facts: BlockFacts,
    roots: Roots,
    records: Vec<EventRecord>,
}

impl Ring {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        self.records.clear();
        let drained = self.registry.drain_events(&mut self.records, max);
        for record in &self.records {
            let block = EventBlock {
                identity: record.identity,
                prefix_hash: self.roots.follow(record),
                local_hash: None,
                block_bytes: self.facts.block_bytes,
                block_tokens: self.facts.block_tokens,
                location: Location::on(NodeId(0), record.tier),
            };
            let kind = match record.kind {
                kvbm_pool::EventKind::Store => EventKind::Store(block),
                kvbm_pool::EventKind::Remove => EventKind::Remove(block),
            };
            out.push(KvEvent::new(record.seq, kind));
        }
        drained.next_seq
    }
}

/// The first block of the chain of every block that is on some tier. As large as the registry, and kept off its locks.
#[derive(Default)]
struct Roots {
    known: HashMap<SequenceHash, Root>,
}

#[derive(Clone, Copy)]
struct Root {
    hash: SequenceHash,
    tiers: u8,
}

impl Roots {
    /// The chain's first block. After lost events it may be unknown: then the earliest block that is known.
    fn follow(&mut self, record: &EventRecord) -> SequenceHash {
        let BlockIdentity { hash, parent, .. } = record.identity;
        let of_parent = parent.map(|parent| self.known.get(&parent).map_or(parent, |root| root.hash));
        let bit = 1 << record.tier.index().min(Tier::SLOTTED.len());
        match record.kind {
            kvbm_pool::EventKind::Store => {
                let root = Root { hash: of_parent.unwrap_or(hash), tiers: 0 };
                let root = self.known.entry(hash).or_insert(root);
                root.tiers |= bit;
                root.hash
            }
            kvbm_pool::EventKind::Remove => {
                let Some(root) = self.known.get_mut(&hash) else { return of_parent.unwrap_or(hash) };
                let chain = root.hash;
                root.tiers &= !bit;
                if root.tiers == 0 {
                    self.known.remove(&hash);
                }
                chain
            }
        }
    }
}
