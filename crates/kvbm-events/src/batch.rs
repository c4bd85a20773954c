//! Events of one stream that travel together.

use crate::{KvEvent, Unknown};
use kvbm_plan::Epoch;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Who publishes: unique among everything that shares a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u64);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A numbered stream of events. Numbers are dense within it and say nothing across streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId {
    /// Who publishes.
    pub source: SourceId,
    /// Life of the source: larger after every start.
    pub epoch: Epoch,
    /// Part of the source's blocks; a block stays in one shard, so its events are ordered.
    pub shard: u16,
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "source {} epoch {} shard {}", self.source, self.epoch, self.shard)
    }
}

/// Consecutive events of a stream; without events it is a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The stream.
    pub stream: StreamId,
    /// Number that follows the last event that the publisher has seen from its source, lost ones
    /// included. A follower that has fewer has lost some.
    pub next_sequence: u64,
    /// Strictly increasing in `sequence`, all below `next_sequence`, at most
    /// [`EventBatch::MAX_EVENTS`].
    pub events: Vec<KvEvent>,
    /// When the publisher made the batch: microseconds since 1970 in UTC by its clock. `None` where
    /// it does not say.
    pub published_us: Option<u64>,
    /// What a later revision of the format said beyond this; passed on unread.
    pub unknown: Unknown,
}

impl EventBatch {
    /// Most events in a batch.
    pub const MAX_EVENTS: usize = 4096;

    /// A batch without a time; without events, a heartbeat.
    pub const fn new(stream: StreamId, next_sequence: u64, events: Vec<KvEvent>) -> Self {
        Self { stream, next_sequence, events, published_us: None, unknown: Unknown::NONE }
    }

    /// The same, published at `time`.
    #[must_use]
    pub fn published_at(self, time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { published_us: Some(since.as_micros() as u64), ..self }
    }

    /// How old the batch is at `now`, by both clocks: clocks that differ may make it zero. `None`
    /// where it does not say when it was published.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        let published = UNIX_EPOCH.checked_add(Duration::from_micros(self.published_us?))?;
        Some(now.duration_since(published).unwrap_or_default())
    }

    /// Whether the batch only says that its source lives and how far it is.
    pub fn is_heartbeat(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether these are events, the first of them numbered `first`, without a hole between them or
    /// behind them.
    pub(crate) fn is_whole_from(&self, first: u64) -> bool {
        let Some(last) = self.events.last() else { return false };
        self.events[0].sequence == first
            && last.sequence.checked_add(1) == Some(self.next_sequence)
            && self.next_sequence - first == self.events.len() as u64
            && self.is_ordered()
    }

    /// Whether the numbers are strictly increasing and below `next_sequence`.
    pub(crate) fn is_ordered(&self) -> bool {
        self.events.windows(2).all(|pair| pair[0].sequence < pair[1].sequence)
            && self.events.last().is_none_or(|last| last.sequence < self.next_sequence)
    }
}
