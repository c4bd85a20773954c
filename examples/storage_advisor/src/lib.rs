//! A storage advisor: a subscriber on the vendor's side that only listens, and proposes what the storage could do.
//!
//! It keeps an index of the blocks by their prefix, infers how hot each prefix is, and proposes promotion, demotion and
//! compaction. kvbm does not know that it is there: nothing is asked of the manager but, after a loss, a snapshot.
//!
//! **Knows:** the events, and what they imply. **Must never know:** the manager, or how blocks are moved.

#![forbid(unsafe_code)]

mod follow;
mod heat;
mod policy;

pub use follow::{Following, follow};
pub use heat::Heat;
pub use policy::{Policy, Proposal};

use kvbm_events::{EventBlock, EventKind, KvEvent, Snapshot, SourceId, StreamId};
use kvbm_plan::{GroupId, Location, NamespaceId, SequenceHash, Tier};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// A prefix: everything that begins with one first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// Namespace tag, shortened as in events.
    pub namespace: NamespaceId,
    /// Cache group.
    pub group: GroupId,
    /// Sequence hash of its first block.
    pub hash: SequenceHash,
}

/// Who holds a block, and where.
type Holder = (SourceId, Location);

#[derive(Clone, Debug)]
struct Block {
    parent: Option<SequenceHash>,
    bytes: u64,
    holders: Vec<Holder>,
}

#[derive(Debug, Default)]
struct Chain {
    blocks: HashMap<SequenceHash, Block>,
    heat: Heat,
}

/// What was removed from a place since it was last proposed for compaction.
#[derive(Clone, Copy, Debug, Default)]
struct Churn {
    live_bytes: u64,
    removed_bytes: u64,
}

/// The index and what follows from it.
#[derive(Debug)]
pub struct Advisor {
    policy: Policy,
    chains: HashMap<Prefix, Chain>,
    places: BTreeMap<PlaceKey, (Location, Churn)>,
    blocks: usize,
    refused: u64,
}

/// A place, so that it can be sorted: source, tier, node, volume.
type PlaceKey = (SourceId, u8, u32, Option<u32>);

fn place_key((source, location): Holder) -> PlaceKey {
    (source, location.tier.index() as u8, location.node.0, location.volume.map(|volume| volume.0))
}

impl Advisor {
    /// An advisor that has seen nothing.
    pub fn new(policy: Policy) -> Self {
        Self { policy, chains: HashMap::new(), places: BTreeMap::new(), blocks: 0, refused: 0 }
    }

    /// Different blocks that are known.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Blocks that were not taken in because there was no room for them.
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    /// Bytes by place, of one source or all together.
    pub fn bytes_on(&self, tier: Tier) -> u64 {
        self.places.values().filter(|(place, _)| place.tier == tier).map(|(_, churn)| churn.live_bytes).sum()
    }

    /// Takes events of a stream in, in their order.
    pub fn apply(&mut self, stream: StreamId, events: &[KvEvent], now: Instant) {
        for event in events {
            match &event.kind {
                EventKind::Store(block) => self.store(stream.source, block, now),
                EventKind::Remove(block) => self.remove(stream.source, block),
                EventKind::Cleared => self.forget(stream.source),
            }
        }
    }

    /// Replaces all that is known of a source: after a loss.
    pub fn replace(&mut self, stream: StreamId, snapshot: &Snapshot, now: Instant) {
        self.forget(stream.source);
        for block in &snapshot.blocks {
            self.insert(stream.source, block, now);
        }
    }

    /// A source holds nothing any more.
    pub fn forget(&mut self, source: SourceId) {
        let blocks = &mut self.blocks;
        self.chains.retain(|_, chain| {
            chain.blocks.retain(|_, block| {
                block.holders.retain(|(holder, _)| *holder != source);
                *blocks -= usize::from(block.holders.is_empty());
                !block.holders.is_empty()
            });
            !chain.blocks.is_empty()
        });
        self.places.retain(|(of, ..), _| *of != source);
    }

    /// A block came. Where its source already holds it on a lower tier, it was brought up: somebody asked for it. That is all
    /// that a listener learns of accesses, and enough to tell hot from cold.
    fn store(&mut self, source: SourceId, block: &EventBlock, now: Instant) {
        let (prefix, hash) = (prefix_of(block), block.identity.hash);
        let below = |(holder, location): &Holder| {
            *holder == source && location.tier.index() > block.location.tier.index()
        };
        let known = self.chains.get(&prefix).and_then(|chain| chain.blocks.get(&hash));
        let asked_for = known.is_some_and(|known| known.holders.iter().any(below));
        self.insert(source, block, now);
        if let Some(chain) = self.chains.get_mut(&prefix) {
            let weight = if asked_for { Heat::REUSE } else { Heat::NEW };
            chain.heat.add(weight, now, self.policy.half_life);
        }
    }

    fn insert(&mut self, source: SourceId, block: &EventBlock, now: Instant) {
        let prefix = prefix_of(block);
        let known = self.chains.get(&prefix).is_some_and(|c| c.blocks.contains_key(&block.identity.hash));
        if !known && self.blocks >= self.policy.max_blocks {
            self.refused += 1;
            return;
        }
        let chain = self
            .chains
            .entry(prefix)
            .or_insert_with(|| Chain { blocks: HashMap::new(), heat: Heat::new(now) });
        let entry = chain.blocks.entry(block.identity.hash).or_insert_with(|| Block {
            parent: block.identity.parent,
            bytes: block.block_bytes,
            holders: Vec::new(),
        });
        self.blocks += usize::from(!known);
        let holder = (source, block.location);
        if !entry.holders.contains(&holder) {
            entry.holders.push(holder);
            let place = self.places.entry(place_key(holder)).or_insert((block.location, Churn::default()));
            place.1.live_bytes += block.block_bytes;
        }
    }

    fn remove(&mut self, source: SourceId, block: &EventBlock) {
        let (prefix, hash, holder) = (prefix_of(block), block.identity.hash, (source, block.location));
        let Some(chain) = self.chains.get_mut(&prefix) else { return };
        let Some(known) = chain.blocks.get_mut(&hash) else { return };
        let before = known.holders.len();
        known.holders.retain(|other| *other != holder);
        if known.holders.len() == before {
            return;
        }
        if let Some((_, churn)) = self.places.get_mut(&place_key(holder)) {
            churn.live_bytes = churn.live_bytes.saturating_sub(known.bytes);
            churn.removed_bytes += known.bytes;
        }
        if known.holders.is_empty() {
            chain.blocks.remove(&hash);
            self.blocks -= 1;
            if chain.blocks.is_empty() {
                self.chains.remove(&prefix);
            }
        }
    }
}

fn prefix_of(block: &EventBlock) -> Prefix {
    let identity = &block.identity;
    Prefix { namespace: identity.namespace, group: identity.group, hash: block.prefix_hash }
}
