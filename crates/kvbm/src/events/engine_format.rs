//! Events as engines publish them, for routers that follow engines.

use super::notes::Notes;
use super::{ONLY_SHARD, TakeSnapshot, VOLUME_SHARD};
use kvbm_events::vllm::{Batch, BlockRemoved, BlockStored, EngineHash, Event, encode};
use kvbm_events::{EventBlock, EventKind, KvEvent, Payload, wire};
use kvbm_plan::{SequenceHash, Tier};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Turns our batches into messages of vLLM's format. Their numbers cannot tell of events that were lost before them: after a loss,
/// all is said anew.
pub(super) struct Translator {
    take: Arc<TakeSnapshot>,
    notes: Arc<Notes>,
    /// Number of the next event of each shard.
    next: [u64; SHARDS.len()],
    /// Stored blocks whose tokens were not known.
    without_tokens: Arc<AtomicU64>,
}

/// Their messages have one row of numbers.
const SHARDS: [u16; 2] = [ONLY_SHARD, VOLUME_SHARD];

/// Blocks of a message that says all anew.
const RESTATED: usize = 2048;

impl Translator {
    pub(super) fn new(take: Arc<TakeSnapshot>, notes: Arc<Notes>) -> Self {
        Self { take, notes, next: [0; SHARDS.len()], without_tokens: Arc::default() }
    }

    /// How many stored blocks were told without their tokens.
    pub(super) fn without_tokens(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.without_tokens)
    }

    /// The messages of a batch: none for a heartbeat, which engines do not have.
    pub(super) fn translate(&mut self, payload: &Payload) -> Vec<Payload> {
        // It was encoded a moment ago.
        let Ok(batch) = wire::decode(payload) else { return Vec::new() };
        let Some(shard) = SHARDS.iter().position(|shard| *shard == batch.stream.shard) else {
            return Vec::new();
        };
        let mut messages = Vec::new();
        let first = batch.events.first().map_or(batch.next_sequence, |event| event.sequence);
        if first > self.next[shard] {
            self.restate(&mut messages);
        }
        let fresh = batch.events.partition_point(|event| event.sequence < self.next[shard]);
        let events = self.events(&batch.events[fresh..]);
        if !events.is_empty() {
            messages.push(message(events));
        }
        self.next[shard] = self.next[shard].max(batch.next_sequence);
        messages
    }

    /// Everything is cleared, and what is there is stored.
    fn restate(&mut self, messages: &mut Vec<Payload>) {
        messages.push(message(vec![Event::AllBlocksCleared]));
        for (at, shard) in SHARDS.into_iter().enumerate() {
            let Some(snapshot) = (self.take)(shard) else { continue };
            let stores: Vec<KvEvent> =
                snapshot.blocks.into_iter().map(|block| KvEvent::new(0, EventKind::Store(block))).collect();
            for part in stores.chunks(RESTATED) {
                messages.push(message(self.events(part)));
            }
            self.next[at] = snapshot.next_sequence;
        }
    }

    fn events(&self, events: &[KvEvent]) -> Vec<Event> {
        let mut out: Vec<Event> = Vec::new();
        let mut last: Option<EventBlock> = None;
        for event in events {
            match &event.kind {
                EventKind::Cleared => out.push(Event::AllBlocksCleared),
                EventKind::Store(block) => self.store(block, last.as_ref(), &mut out),
                EventKind::Remove(block) => remove(block, &mut out),
            }
            last = match event.kind {
                EventKind::Store(block) => Some(block),
                _ => None,
            };
        }
        out
    }

    /// Blocks of one chain that follow each other are one event.
    fn store(&self, block: &EventBlock, last: Option<&EventBlock>, out: &mut Vec<Event>) {
        let tokens = self.notes.tokens(&block.identity.hash);
        self.without_tokens.fetch_add(u64::from(tokens.is_none()), Ordering::Relaxed);
        let follows = last.is_some_and(|last| {
            block.identity.parent == Some(last.identity.hash)
                && last.location == block.location
                && last.identity.group == block.identity.group
        });
        if let (true, Some(Event::Stored(stored))) = (follows, out.last_mut())
            && stored.token_ids.is_empty() == tokens.is_none()
        {
            stored.block_hashes.push(engine_hash(&block.identity.hash));
            stored.token_ids.extend_from_slice(tokens.as_deref().unwrap_or_default());
            return;
        }
        out.push(Event::Stored(BlockStored {
            block_hashes: vec![engine_hash(&block.identity.hash)],
            parent_block_hash: block.identity.parent.as_ref().map(engine_hash),
            token_ids: tokens.as_deref().unwrap_or_default().to_vec(),
            block_size: block.block_tokens,
            medium: Some(medium(block.location.tier).to_owned()),
            ..BlockStored::default()
        }));
    }
}

fn remove(block: &EventBlock, out: &mut Vec<Event>) {
    let (hash, medium) = (engine_hash(&block.identity.hash), medium(block.location.tier));
    if let Some(Event::Removed(removed)) = out.last_mut()
        && removed.medium.as_deref() == Some(medium)
    {
        removed.block_hashes.push(hash);
        return;
    }
    let medium = Some(medium.to_owned());
    out.push(Event::Removed(BlockRemoved { block_hashes: vec![hash], medium, ..BlockRemoved::default() }));
}

/// Engines say numbers of 64 bits unless told otherwise, and routers expect them.
fn engine_hash(hash: &SequenceHash) -> EngineHash {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    EngineHash::Uint(u64::from_le_bytes(bytes))
}

const fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::G1 => "GPU",
        Tier::G2 => "CPU",
        Tier::G3 | Tier::G4 => "STORAGE",
    }
}

fn message(events: Vec<Event>) -> Payload {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    encode(&Batch { timestamp: now.as_secs_f64(), events, data_parallel_rank: Some(0) }).into()
}
