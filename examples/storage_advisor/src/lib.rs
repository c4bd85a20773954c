//! A storage advisor: a subscriber on the vendor's side that only listens, and proposes what the
//! storage could do.
//!
//! It keeps an index of the blocks by their prefix, infers how hot each prefix is, and proposes
//! promotion, demotion and compaction. kvbm does not know that it is there: nothing is asked of the
//! manager but, after a loss, a snapshot.
//!
//! **Knows:** the events, and what they imply. **Must never know:** the manager, or how blocks are
//! moved.

#![forbid(unsafe_code)]

mod follow;
mod heat;
mod policy;

pub use follow::{FORGET_AFTER, Following, follow};
pub use heat::Heat;
pub use policy::{Policy, Proposal, best_of_each};

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

/// Who holds a block, and where. A source tells of its holders in several streams (pool, volumes),
/// each with a snapshot of its own: what happens to one of them says nothing of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    source: SourceId,
    shard: u16,
    location: Location,
}

impl Holder {
    const fn new(stream: StreamId, location: Location) -> Self {
        Self { source: stream.source, shard: stream.shard, location }
    }

    fn place(self) -> PlaceKey {
        let Location { tier, node, volume } = self.location;
        (self.source, self.shard, tier.index() as u8, node.0, volume.map(|volume| volume.0))
    }
}

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

/// How full a place is, and how full it was.
#[derive(Clone, Copy, Debug, Default)]
struct Room {
    live_bytes: u64,
    /// Most of them at any time since it was empty or last rewritten: storage takes new blocks into
    /// the holes of old ones.
    peak_bytes: u64,
}

impl Room {
    /// What was removed, and not filled again.
    const fn hole_bytes(self) -> u64 {
        self.peak_bytes.saturating_sub(self.live_bytes)
    }
}

/// What a block is called, whatever prefix is told along with it.
type BlockKey = (NamespaceId, GroupId, SequenceHash);

/// The index and what follows from it.
#[derive(Debug)]
pub struct Advisor {
    policy: Policy,
    chains: HashMap<Prefix, Chain>,
    places: BTreeMap<PlaceKey, (Location, Room)>,
    /// The prefix that each block is kept below: that of who told of it first.
    prefixes: HashMap<BlockKey, SequenceHash>,
    refused: u64,
}

/// A place, so that it can be sorted: source, shard, tier, node, volume.
type PlaceKey = (SourceId, u16, u8, u32, Option<u32>);

impl Advisor {
    /// An advisor that has seen nothing.
    pub fn new(policy: Policy) -> Self {
        let (chains, places, prefixes) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        Self { policy, chains, places, prefixes, refused: 0 }
    }

    /// Different blocks that are known.
    pub fn blocks(&self) -> usize {
        self.prefixes.len()
    }

    /// Blocks that were not taken in because there was no room for them.
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    /// Bytes by place, of one source or all together.
    pub fn bytes_on(&self, tier: Tier) -> u64 {
        self.places.values().filter(|(place, _)| place.tier == tier).map(|(_, room)| room.live_bytes).sum()
    }

    /// Takes events of a stream in, in their order.
    pub fn apply(&mut self, stream: StreamId, events: &[KvEvent], now: Instant) {
        for event in events {
            match &event.kind {
                EventKind::Store(block) => self.store(stream, block, now),
                EventKind::Remove(block) => self.remove(stream, block),
                EventKind::Cleared => self.clear(stream),
            }
        }
    }

    /// Replaces what a stream told, after a loss, by its snapshot and what has come since. What was
    /// asked for is not forgotten, nor counted again.
    pub fn replace(&mut self, stream: StreamId, snapshot: &Snapshot, since: &[KvEvent], now: Instant) {
        let heats: Vec<(Prefix, Heat)> =
            self.chains.iter().map(|(prefix, chain)| (*prefix, chain.heat)).collect();
        self.clear(stream);
        for block in &snapshot.blocks {
            self.insert(stream, block, now);
        }
        for event in since {
            match &event.kind {
                EventKind::Store(block) => self.insert(stream, block, now),
                EventKind::Remove(block) => self.remove(stream, block),
                EventKind::Cleared => self.clear(stream),
            }
        }
        for (prefix, heat) in heats {
            if let Some(chain) = self.chains.get_mut(&prefix) {
                chain.heat = heat;
            }
        }
    }

    /// A source holds nothing any more, by none of its streams.
    pub fn forget(&mut self, source: SourceId) {
        self.drop_holders(|of, _| of == source);
    }

    /// What a stream told is over; what the other streams of its source told is not.
    fn clear(&mut self, stream: StreamId) {
        self.drop_holders(|of, shard| (of, shard) == (stream.source, stream.shard));
    }

    fn drop_holders(&mut self, is_gone: impl Fn(SourceId, u16) -> bool) {
        let prefixes = &mut self.prefixes;
        self.chains.retain(|prefix, chain| {
            chain.blocks.retain(|hash, block| {
                block.holders.retain(|holder| !is_gone(holder.source, holder.shard));
                if block.holders.is_empty() {
                    prefixes.remove(&(prefix.namespace, prefix.group, *hash));
                }
                !block.holders.is_empty()
            });
            !chain.blocks.is_empty()
        });
        self.places.retain(|(source, shard, ..), _| !is_gone(*source, *shard));
    }

    /// A block came. Where its source already holds it on a lower tier, it was brought up: somebody
    /// asked for it. That is all that a listener learns of accesses, and enough to tell hot from
    /// cold.
    fn store(&mut self, stream: StreamId, block: &EventBlock, now: Instant) {
        let (prefix, hash) = (self.prefix_of(block), block.identity.hash);
        let below = |holder: &Holder| {
            holder.source == stream.source && holder.location.tier.index() > block.location.tier.index()
        };
        let known = self.chains.get(&prefix).and_then(|chain| chain.blocks.get(&hash));
        let asked_for = known.is_some_and(|known| known.holders.iter().any(below));
        self.insert(stream, block, now);
        if let Some(chain) = self.chains.get_mut(&prefix) {
            let weight = if asked_for { Heat::REUSE } else { Heat::NEW };
            chain.heat.add(weight, now, self.policy.half_life);
        }
    }

    fn insert(&mut self, stream: StreamId, block: &EventBlock, now: Instant) {
        let (prefix, key) = (self.prefix_of(block), key_of(block));
        if self.blocks() >= self.policy.max_blocks && !self.prefixes.contains_key(&key) {
            self.refused += 1;
            return;
        }
        self.prefixes.insert(key, prefix.hash);
        let chain = self
            .chains
            .entry(prefix)
            .or_insert_with(|| Chain { blocks: HashMap::new(), heat: Heat::new(now) });
        let entry = chain.blocks.entry(block.identity.hash).or_insert_with(|| Block {
            parent: block.identity.parent,
            bytes: block.block_bytes,
            holders: Vec::new(),
        });
        let holder = Holder::new(stream, block.location);
        if !entry.holders.contains(&holder) {
            entry.holders.push(holder);
            let (_, room) = self.places.entry(holder.place()).or_insert((block.location, Room::default()));
            room.live_bytes += entry.bytes;
            room.peak_bytes = room.peak_bytes.max(room.live_bytes);
        }
    }

    fn remove(&mut self, stream: StreamId, block: &EventBlock) {
        let (prefix, hash) = (self.prefix_of(block), block.identity.hash);
        let holder = Holder::new(stream, block.location);
        let Some(chain) = self.chains.get_mut(&prefix) else { return };
        let Some(known) = chain.blocks.get_mut(&hash) else { return };
        let before = known.holders.len();
        known.holders.retain(|other| *other != holder);
        if known.holders.len() == before {
            return;
        }
        if let Some((_, room)) = self.places.get_mut(&holder.place()) {
            room.live_bytes = room.live_bytes.saturating_sub(known.bytes);
        }
        if known.holders.is_empty() {
            chain.blocks.remove(&hash);
            self.prefixes.remove(&key_of(block));
            if chain.blocks.is_empty() {
                self.chains.remove(&prefix);
            }
        }
    }

    /// The prefix that a block is kept below, or will be.
    fn prefix_of(&self, block: &EventBlock) -> Prefix {
        let hash = self.prefixes.get(&key_of(block)).copied().unwrap_or(block.prefix_hash);
        Prefix { namespace: block.identity.namespace, group: block.identity.group, hash }
    }
}

const fn key_of(block: &EventBlock) -> BlockKey {
    (block.identity.namespace, block.identity.group, block.identity.hash)
}
