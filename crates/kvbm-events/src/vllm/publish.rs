//! kvbm's events as an engine's own, for routers that follow engines.

use super::engine_blocks::EngineBlocks;
use super::event::{EngineBatch, EngineEvent, EngineHash};
use super::gather::{EventGatherer, GatheredBlock};
use super::holders::{Holders, PlaceNumber, Places};
use super::read::decode;
use super::split::split;
use super::write::encode;
use crate::encoder::{BatchEncoder, Replacement};
use crate::{EventBatch, EventBlock, EventKind, KvEvent, SnapshotSource, StreamId, wire};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Counters of a [`Publishing`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishingStats {
    /// Stored blocks that were published without tokens, because nobody had described them.
    pub without_tokens: u64,
    /// Stored blocks that were published under kvbm's hash, because nobody had given the engine's.
    pub without_hash: u64,
    /// Losses in the source. Removes were published for what is gone, and stores for what is there,
    /// if there was a snapshot.
    pub losses: u64,
    /// Blocks that were not published, because the transport refuses a message of one such block.
    pub refused: u64,
}

/// Writes events as vLLM does, for [`EventManager::with_format`](crate::EventManager::with_format).
///
/// It remembers which blocks it has published, so memory grows with what the cache holds. Followers
/// of engines know neither losses nor cleared tiers. After a loss in the source's ring it publishes
/// the difference to a snapshot, or the removal of everything. It publishes a cleared tier block by
/// block: `AllBlocksCleared` would also remove the blocks that the engine itself has published of
/// its own memory.
pub struct Publishing {
    engine: Arc<EngineBlocks>,
    /// Tiers whose blocks are published, by [`Tier::index`].
    tiers: [bool; Tier::ALL.len()],
    rank: Option<u32>,
    /// Kind of the only group that there is so far, as vLLM calls it.
    kind: String,
    numbers: bool,
    snapshots: Option<Box<dyn SnapshotSource + Send>>,
    published: HashMap<Key, PublishedBlock>,
    places: Places,
    next: HashMap<u16, u64>,
    stats: Arc<Mutex<PublishingStats>>,
}

type Key = (GroupId, SequenceHash);

/// Followers know tiers alone. So a block stays published on a tier as long as any place of that
/// tier has it: the pool, or one of several volumes.
#[derive(Debug)]
struct PublishedBlock {
    name: EngineHash,
    holders: Holders,
}

/// What vLLM calls the kind of the usual cache group.
pub const FULL_ATTENTION: &str = "full_attention";

impl Publishing {
    /// Publishes events of `tiers`, with what `engine` knows of the blocks. Leave out the tier that
    /// the engine owns and publishes itself.
    pub fn new(engine: Arc<EngineBlocks>, tiers: &[Tier]) -> Self {
        let tiers = Tier::ALL.map(|tier| tiers.contains(&tier));
        Self {
            engine,
            tiers,
            rank: None,
            kind: FULL_ATTENTION.into(),
            numbers: false,
            snapshots: None,
            published: HashMap::new(),
            places: Places::default(),
            next: HashMap::new(),
            stats: Arc::default(),
        }
    }

    /// In the name of a data-parallel rank.
    #[must_use]
    pub fn with_rank(self, rank: u32) -> Self {
        Self { rank: Some(rank), ..self }
    }

    /// Blocks of group 0 are of this kind, which is `full_attention` otherwise (vLLM's names:
    /// `mla_attention` is another).
    #[must_use]
    pub fn with_kind(self, kind: impl Into<String>) -> Self {
        Self { kind: kind.into(), ..self }
    }

    /// A block that no engine has named is published under the first eight bytes of its sequence
    /// hash, as a little-endian number. Routers expect that from engines by default.
    #[must_use]
    pub fn with_numbers(self) -> Self {
        Self { numbers: true, ..self }
    }

    /// Source of the blocks that are published after a loss.
    #[must_use]
    pub fn with_snapshots(self, snapshots: impl SnapshotSource + Send + 'static) -> Self {
        Self { snapshots: Some(Box::new(snapshots)), ..self }
    }

    /// Counters, to be kept when the format is given away.
    pub fn stats(&self) -> Arc<Mutex<PublishingStats>> {
        Arc::clone(&self.stats)
    }

    /// What is to be published after a loss, and the number of the first event that it does not
    /// cover.
    fn lost(&mut self, stream: StreamId, reach: u64, out: &mut EventGatherer) -> u64 {
        self.stats.lock().losses += 1;
        let snapshot = self.snapshots.as_mut().and_then(|source| source.snapshot(stream, reach));
        let blocks = snapshot.as_ref().map_or(&[][..], |snapshot| &snapshot.blocks);
        let mut there = HashSet::with_capacity(blocks.len());
        for block in blocks {
            // A place without a number holds nothing that could be taken back.
            there.extend(self.places.find(stream.shard, block.location).map(|place| (key(block), place)));
        }
        self.remove_of(stream.shard, &there, out);
        let mut blocks: Vec<&EventBlock> = blocks.iter().collect();
        blocks.sort_by_key(|block| block.identity.position);
        for block in blocks {
            self.store(stream.shard, block, out);
        }
        snapshot.map_or(0, |snapshot| snapshot.next_sequence)
    }

    fn take(&mut self, shard: u16, event: &KvEvent, out: &mut EventGatherer) {
        match &event.kind {
            EventKind::Store(block) => self.store(shard, block, out),
            EventKind::Remove(block) => {
                if let Some(place) = self.places.find(shard, block.location) {
                    self.remove(key(block), place, out);
                }
            }
            EventKind::Cleared => self.remove_of(shard, &HashSet::new(), out),
        }
    }

    /// Removes what `shard` has published, except for what is `there`.
    fn remove_of(&mut self, shard: u16, there: &HashSet<(Key, PlaceNumber)>, out: &mut EventGatherer) {
        let places = &self.places;
        let held = self
            .published
            .iter()
            .flat_map(|(key, published)| published.holders.iter().map(|place| (*key, place)));
        let gone = held.filter(|held| places.shard(held.1) == shard && !there.contains(held));
        for (key, place) in gone.collect::<Vec<_>>() {
            self.remove(key, place, out);
        }
    }

    /// The name of a block that no engine has named.
    fn own_name(&self, hash: &SequenceHash) -> EngineHash {
        let bytes = hash.as_bytes();
        match bytes.first_chunk::<8>() {
            Some(first) if self.numbers => EngineHash::Uint(u64::from_le_bytes(*first)),
            _ => EngineHash::Bytes(bytes.to_vec()),
        }
    }

    fn store(&mut self, shard: u16, block: &EventBlock, out: &mut EventGatherer) {
        let (identity, tier) = (&block.identity, block.location.tier);
        if !self.tiers[tier.index()] {
            return;
        }
        // Nothing is published if followers know it on the tier already; the holder is noted.
        if let Some(published) = self.published.get_mut(&key(block)) {
            let place = self.places.find(shard, block.location);
            if place.is_some_and(|place| published.holders.iter().any(|holder| holder == place)) {
                return;
            }
            let is_published = published.holders.iter().any(|holder| self.places.tier(holder) == tier);
            if is_published {
                published.holders.add(self.places.take(shard, block.location));
                return;
            }
        }
        let mut known = self.engine.get(&identity.hash).unwrap_or_default();
        let own = self.own_name(&identity.hash);
        let name = known.hash.take().unwrap_or_else(|| own.clone());
        let place = self.places.take(shard, block.location);
        let published = self
            .published
            .entry(key(block))
            .or_insert_with(|| PublishedBlock { name, holders: Holders::default() });
        published.holders.add(place);
        let name = published.name.clone();
        {
            let mut stats = self.stats.lock();
            stats.without_tokens += u64::from(known.token_ids.is_empty());
            stats.without_hash += u64::from(name == own);
        }
        let parent = identity.parent.map(|parent| match self.published.get(&(identity.group, parent)) {
            Some(published) => published.name.clone(),
            None => self.engine.name(&parent).unwrap_or_else(|| self.own_name(&parent)),
        });
        out.stored(self.of(tier, identity.group, name), parent, block.block_tokens, known);
    }

    fn of(&self, tier: Tier, group: GroupId, name: EngineHash) -> GatheredBlock<'_> {
        let kind = (group == GroupId(0)).then_some(self.kind.as_str());
        GatheredBlock { tier, group, name, kind }
    }

    /// A place has a block no longer. If it was the last one of its tier, the removal is published.
    fn remove(&mut self, key: Key, place: PlaceNumber, out: &mut EventGatherer) {
        let Some(published) = self.published.get_mut(&key) else { return };
        if !published.holders.remove(place) {
            return;
        }
        let tier = self.places.tier(place);
        let is_there = published.holders.iter().any(|holder| self.places.tier(holder) == tier);
        let name = (!is_there).then(|| published.name.clone());
        if published.holders.is_empty() {
            self.published.remove(&key);
        }
        self.places.release(place);
        if let Some(name) = name {
            out.removed(self.of(tier, key.0, name));
        }
    }
}

impl Publishing {
    /// A block was not published. It counts as absent, so the next store of it is published.
    fn take_back(&mut self, event: &EngineEvent) {
        let EngineEvent::Stored(stored) = event else { return };
        let (Some(tier), Some(name)) = (stored.medium_tier(), stored.block_hashes.first()) else { return };
        let group = GroupId(stored.group_idx.unwrap_or(0));
        let mut all = self.published.iter_mut();
        let Some((key, published)) = all.find(|(key, published)| key.0 == group && published.name == *name)
        else {
            return;
        };
        let (key, holders) = (*key, &mut published.holders);
        let of_tier: Vec<_> = holders.iter().filter(|place| self.places.tier(*place) == tier).collect();
        for place in of_tier {
            holders.remove(place);
            self.places.release(place);
        }
        if holders.is_empty() {
            self.published.remove(&key);
        }
    }
}

impl BatchEncoder for Publishing {
    fn encode(&mut self, batch: &EventBatch, out: &mut Vec<Vec<u8>>) -> Result<(), wire::EncodeError> {
        let (stream, shard) = (batch.stream, batch.stream.shard);
        let mut next = self.next.get(&shard).copied().unwrap_or(0);
        let mut events = EventGatherer::default();
        for event in &batch.events {
            if event.sequence > next {
                next = self.lost(stream, event.sequence, &mut events).max(event.sequence);
            }
            if event.sequence == next {
                self.take(shard, event, &mut events);
                next += 1;
            }
        }
        if batch.next_sequence > next {
            next = self.lost(stream, batch.next_sequence, &mut events).max(batch.next_sequence);
        }
        self.next.insert(shard, next);
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        for events in events.into_payloads() {
            let batch = EngineBatch { timestamp: since_1970, events, data_parallel_rank: self.rank };
            out.push(encode(&batch));
        }
        Ok(())
    }

    fn refused(&mut self, payload: &[u8]) -> Replacement {
        let Ok(batch) = decode(payload) else { return Replacement::Nothing { events: u64::MAX } };
        match split(batch) {
            Ok(halves) => Replacement::Smaller(halves.iter().map(encode).collect()),
            Err(one) => {
                one.events.iter().for_each(|event| self.take_back(event));
                self.stats.lock().refused += 1;
                Replacement::Nothing { events: 1 }
            }
        }
    }

    fn is_repeatable(&self) -> bool {
        false
    }
}

const fn key(block: &EventBlock) -> Key {
    (block.identity.group, block.identity.hash)
}
