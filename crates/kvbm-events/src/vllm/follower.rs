//! Keeping an index right from an engine's events.

use super::event::{Event, tier};
use super::read::{Error, decode};
use crate::{KvIndex, Place, SourceId};
use kvbm_plan::{GroupId, Location, NodeId, SequenceHash};
use std::ops::Range;

/// Who an engine is in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its name in the index. Each data-parallel rank that publishes has one of its own.
    pub source: SourceId,
    /// Its machine.
    pub node: NodeId,
}

/// What a message meant beyond its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The next message; its events are applied.
    Next,
    /// A message that was heard before, or was reported missing before: ignored.
    Repeated,
    /// Messages with these numbers did not come before this one: ask for a replay from the first, or forget the engine
    /// until it clears. This message's events are applied; what the index says of the engine may be wrong.
    Gap {
        /// Their numbers.
        missing: Range<u64>,
    },
    /// The number stepped back to the start: the engine has started anew. All it had is forgotten, this message's events
    /// are applied.
    Restarted {
        /// Number that was expected.
        expected: u64,
    },
}

/// Counters of a [`Follower`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowerStats {
    /// Events applied.
    pub events: u64,
    /// Messages that are known to be missing.
    pub missing: u64,
    /// Messages that were heard before.
    pub repeated: u64,
    /// New lives of the engine.
    pub restarts: u64,
    /// Events on a medium that is not known here: not applied.
    pub unknown_medium: u64,
    /// Messages that could not be read. Their events are missing as well.
    pub malformed: u64,
}

/// Follows one publisher of an engine.
#[derive(Debug)]
pub struct Follower {
    worker: Worker,
    next: u64,
    started: bool,
    keys: Vec<SequenceHash>,
    stats: FollowerStats,
}

impl Follower {
    /// How far back a number may step and still be a repetition: further back, or to 0, it is a new life.
    pub const REPEATS: u64 = 1024;

    /// A follower that has heard nothing. What the engine said before the first message is not known: ask for a replay
    /// from 0.
    pub fn new(worker: Worker) -> Self {
        Self { worker, next: 0, started: false, keys: Vec::new(), stats: FollowerStats::default() }
    }

    /// Number that the next message should have.
    pub const fn next_sequence(&self) -> u64 {
        self.next
    }

    /// Counters so far.
    pub const fn stats(&self) -> FollowerStats {
        self.stats
    }

    /// Takes a message: the number of its second frame and its third frame.
    pub fn hear(&mut self, index: &mut KvIndex, sequence: u64, payload: &[u8]) -> Result<Heard, Error> {
        let batch = decode(payload).inspect_err(|_| self.stats.malformed += 1)?;
        let heard = self.place(sequence);
        match &heard {
            Heard::Repeated => {
                self.stats.repeated += 1;
                return Ok(heard);
            }
            Heard::Gap { missing } => {
                self.stats.missing = self.stats.missing.saturating_add(missing.end - missing.start);
            }
            Heard::Restarted { .. } => {
                self.stats.restarts += 1;
                index.forget(self.worker.source);
            }
            Heard::Next => {}
        }
        self.started = true;
        self.next = sequence.saturating_add(1);
        for event in &batch.events {
            self.apply(index, event);
        }
        Ok(heard)
    }

    /// Goes on behind a message whose payload could not be read: what it said is missing.
    pub fn skip(&mut self, sequence: u64) {
        if self.place(sequence) != Heard::Repeated {
            self.started = true;
            self.next = sequence.saturating_add(1);
        }
    }

    fn place(&self, sequence: u64) -> Heard {
        if sequence == self.next {
            Heard::Next
        } else if sequence > self.next {
            Heard::Gap { missing: self.next..sequence }
        } else if self.started && (sequence == 0 || self.next - sequence > Self::REPEATS) {
            Heard::Restarted { expected: self.next }
        } else {
            Heard::Repeated
        }
    }

    fn apply(&mut self, index: &mut KvIndex, event: &Event) {
        self.stats.events += 1;
        let Worker { source, node } = self.worker;
        let place = |medium: Option<&str>| {
            Some(Place { source, shard: 0, location: Location::on(node, tier(medium)?) })
        };
        match event {
            Event::AllBlocksCleared => index.clear(source, 0),
            Event::Stored(stored) => match place(stored.medium.as_deref()) {
                Some(place) => {
                    self.keys.clear();
                    self.keys.extend(stored.block_hashes.iter().map(super::EngineHash::index_key));
                    let parent = stored.parent_block_hash.as_ref().map(super::EngineHash::index_key);
                    index.store(place, GroupId(stored.group_idx.unwrap_or(0)), parent, &self.keys);
                }
                None => self.stats.unknown_medium += 1,
            },
            Event::Removed(removed) => match place(removed.medium.as_deref()) {
                Some(place) => {
                    self.keys.clear();
                    self.keys.extend(removed.block_hashes.iter().map(super::EngineHash::index_key));
                    index.remove(place, GroupId(removed.group_idx.unwrap_or(0)), &self.keys);
                }
                None => self.stats.unknown_medium += 1,
            },
        }
    }
}
