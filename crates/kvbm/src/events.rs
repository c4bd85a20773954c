//! From the pool's ring to subscribers.

use crate::config::EventsConfig;
use crate::manager::ONLY_GROUP;
use kvbm_events::{
    EventBlock, EventKind, EventManager, InProcessConfig, InProcessTransport, KvEvent, Publisher,
    PublisherConfig, SourceId, Subscriber, TransportError,
};
use kvbm_plan::{BlockIdentity, Location, NodeId, SequenceHash, Tier};
use kvbm_pool::{EventRecord, Registry, TierMask};
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
        let registry = &self.registry;
        let slots: usize = Tier::SLOTTED.into_iter().map(|tier| registry.capacity(tier) as usize).sum();
        self.roots.prune(2 * slots, |hash| registry.tiers_of(ONLY_GROUP, hash) != TierMask::NONE);
        drained.next_seq
    }
}

/// The first block of the chain of every block that is on some tier. As large as the registry, at most twice that where events
/// were lost, and kept off its locks.
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
    /// Lost events leave blocks behind that are gone: beyond `limit` blocks, only those that are `there` are kept.
    fn prune(&mut self, limit: usize, there: impl Fn(SequenceHash) -> bool) {
        if self.known.len() > limit {
            self.known.retain(|hash, _| there(*hash));
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockId, GroupId, NamespaceId};
    use kvbm_pool::EventKind;

    fn record(seq: u64, kind: EventKind, hash: u8, parent: Option<u8>) -> EventRecord {
        let hash_of = |byte| SequenceHash::from_bytes([byte; 16]);
        let identity = BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: hash_of(hash),
            parent: parent.map(hash_of),
            position: u32::from(parent.is_some()),
        };
        EventRecord { seq, kind, tier: Tier::G1, block: BlockId(0), identity }
    }

    #[test]
    fn blocks_whose_removal_was_lost_are_not_kept_for_good() {
        let mut roots = Roots::default();
        let root = roots.follow(&record(0, EventKind::Store, 1, None));
        assert_eq!(roots.follow(&record(1, EventKind::Store, 2, Some(1))), root);
        for lost in 3..9 {
            roots.follow(&record(u64::from(lost), EventKind::Store, lost, None));
        }
        roots.prune(8, |_| panic!("there is room"));
        roots.prune(7, |hash| hash.as_bytes()[0] < 3);
        assert_eq!(roots.known.len(), 2);
        assert_eq!(
            roots.follow(&record(9, EventKind::Store, 9, Some(2))),
            root,
            "the others know their chain"
        );
        assert_eq!(roots.follow(&record(10, EventKind::Remove, 2, Some(1))), root);
        assert_eq!(roots.known.len(), 2);
    }
}
