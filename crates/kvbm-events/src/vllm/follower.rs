//! Keeping an index right from an engine's events.

use super::event::{BlockStored, EngineEvent, EngineHash, tier};
use super::read::{Error, decode};
use super::sequence::{Continuity, SequenceTracker};
use super::token_keys::TokenKeys;
use crate::{KvIndex, Place, SourceId};
use kvbm_plan::{GroupId, Location, NodeId, SequenceHash};
use std::collections::BTreeSet;

/// Who an engine is in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSource {
    /// Its name in the index. Each data-parallel rank that publishes has one of its own.
    pub source: SourceId,
    /// Its machine.
    pub node: NodeId,
}

/// Counters of a [`Follower`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FollowerStats {
    /// Events applied.
    pub events: u64,
    /// Messages that are known to be missing.
    pub missing: u64,
    /// New lives of the engine, those among them that it only may have begun (see
    /// [`SequenceTracker::expect_restart`]).
    pub restarts: u64,
    /// Events on a medium that is not known here: not applied.
    pub unknown_medium: u64,
    /// Events of a type that is not known here: not applied.
    pub unknown_events: u64,
    /// Messages that could not be read. Their events are missing as well.
    pub malformed: u64,
    /// Stored blocks beyond the limit of [`Follower::by_tokens`]: not applied.
    pub refused: u64,
    /// When the newest message was published: seconds since 1970 by the engine's clock.
    pub timestamp: f64,
}

/// Follows one publisher of an engine.
#[derive(Debug)]
pub struct Follower {
    worker: EngineSource,
    numbers: SequenceTracker,
    /// Set where blocks are known by their tokens.
    names: Option<TokenKeys>,
    keys: Vec<SequenceHash>,
    stats: FollowerStats,
}

impl Follower {
    /// A follower that has received nothing. What the engine published before the first message is
    /// not known: ask for a replay from 0. Blocks stand in the index under
    /// [`EngineHash::index_key`].
    pub fn new(worker: EngineSource) -> Self {
        let (numbers, names, keys) = (SequenceTracker::default(), None, Vec::new());
        Self { worker, numbers, names, keys, stats: FollowerStats::default() }
    }

    /// Blocks stand in the index under their [token keys](super::token_keys), so that a prompt
    /// finds them, and engines with different hashes agree. What the engine calls the blocks that
    /// it holds is remembered for that, `max_blocks` of them at most, about 60 bytes each; what is
    /// beyond is refused and counted.
    #[must_use]
    pub fn by_tokens(self, max_blocks: usize) -> Self {
        Self { names: Some(TokenKeys::new(max_blocks)), ..self }
    }

    /// Number that the next message should have.
    pub const fn next_sequence(&self) -> u64 {
        self.numbers.next()
    }

    /// Counters so far.
    pub const fn stats(&self) -> FollowerStats {
        self.stats
    }

    /// The key in the index of a block that the engine holds, by the engine's own hash.
    pub fn key_of(&self, group: GroupId, hash: &EngineHash) -> Option<SequenceHash> {
        match &self.names {
            Some(names) => names.key(group, hash),
            None => Some(hash.index_key()),
        }
    }

    /// Tokens in a block, of all stored blocks so far; known where blocks go [by their
    /// tokens](Self::by_tokens).
    pub fn block_sizes(&self) -> Option<&BTreeSet<u32>> {
        self.names.as_ref().map(TokenKeys::sizes)
    }

    /// The engine has started anew, or nobody can say that it has not: with the next message all
    /// that it had is forgotten, whatever its number.
    pub const fn expect_restart(&mut self) {
        self.numbers.expect_restart();
    }

    /// Forgets all that the engine holds: something that it said is lost.
    pub fn forget(&mut self, index: &mut KvIndex) {
        index.forget(self.worker.source);
        if let Some(names) = &mut self.names {
            names.clear();
        }
    }

    /// Takes a message: the number of its second frame and its third frame. With the first message
    /// of a new life all that the engine had is forgotten before its events are applied.
    pub fn receive(
        &mut self,
        index: &mut KvIndex,
        sequence: u64,
        payload: &[u8],
    ) -> Result<Continuity, Error> {
        let batch = decode(payload).inspect_err(|_| self.stats.malformed += 1)?;
        let heard = self.numbers.accept(sequence);
        match &heard {
            Continuity::Gap { missing } => {
                self.stats.missing = self.stats.missing.saturating_add(missing.end - missing.start);
            }
            Continuity::Restarted { .. } => {
                self.stats.restarts += 1;
                // What the new life said before this.
                self.stats.missing = self.stats.missing.saturating_add(sequence);
                self.forget(index);
            }
            Continuity::Next => {}
        }
        self.stats.timestamp = batch.timestamp;
        for event in &batch.events {
            self.apply(index, event);
        }
        Ok(heard)
    }

    /// Goes on behind a message whose payload could not be read: what it said is missing.
    pub fn skip(&mut self, sequence: u64) {
        self.numbers.accept(sequence);
    }

    fn apply(&mut self, index: &mut KvIndex, event: &EngineEvent) {
        self.stats.events += 1;
        let EngineSource { source, node } = self.worker;
        let place = |medium: Option<&str>| {
            Some(Place { source, shard: 0, location: Location::on(node, tier(medium)?) })
        };
        match event {
            EngineEvent::AllBlocksCleared => {
                index.clear(source, 0);
                if let Some(names) = &mut self.names {
                    names.clear();
                }
            }
            EngineEvent::Unknown(_) => self.stats.unknown_events += 1,
            EngineEvent::Stored(stored) => match place(stored.medium.as_deref()) {
                Some(place) => self.store(index, place, stored),
                None => self.stats.unknown_medium += 1,
            },
            EngineEvent::Removed(removed) => match place(removed.medium.as_deref()) {
                Some(place) => {
                    let group = GroupId(removed.group_idx.unwrap_or(0));
                    self.remove(index, place, group, &removed.block_hashes);
                }
                None => self.stats.unknown_medium += 1,
            },
        }
    }

    fn store(&mut self, index: &mut KvIndex, place: Place, stored: &BlockStored) {
        let group = GroupId(stored.group_idx.unwrap_or(0));
        self.keys.clear();
        let parent = if let Some(names) = &mut self.names {
            names.store(group, bit(place), stored, &mut self.keys)
        } else {
            self.keys.extend(stored.block_hashes.iter().map(EngineHash::index_key));
            stored.parent_block_hash.as_ref().map(EngineHash::index_key)
        };
        self.stats.refused += (stored.block_hashes.len() - self.keys.len()) as u64;
        index.store(place, group, parent, &self.keys);
    }

    fn remove(&mut self, index: &mut KvIndex, place: Place, group: GroupId, hashes: &[EngineHash]) {
        self.keys.clear();
        match &mut self.names {
            Some(names) => names.remove(group, bit(place), hashes, &mut self.keys),
            None => self.keys.extend(hashes.iter().map(EngineHash::index_key)),
        }
        index.remove(place, group, &self.keys);
    }
}

const fn bit(place: Place) -> u8 {
    1 << place.location.tier.index()
}
