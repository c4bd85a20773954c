//! Which events of each stream have been seen: finds gaps, repeats and restarts.

use crate::{EventBatch, KvEvent, SourceId, StreamId};
use kvbm_plan::Epoch;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What a follower has to know, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// New events of a stream, in order, each once, without a gap between them or before them.
    Events {
        /// The stream.
        stream: StreamId,
        /// At least one event.
        events: Vec<KvEvent>,
    },
    /// Events with these numbers will not come: what is known of the stream's shard may be wrong
    /// until a resync. A follower that joins late gets everything before its first batch as a gap.
    Gap {
        /// The stream.
        stream: StreamId,
        /// Their numbers.
        missing: Range<u64>,
    },
    /// The source began a new life: forget all that came from it. Numbers start again at 0. The
    /// life is a higher one, or a lower one that alone has published for [`Tracker::SILENCE`].
    Restarted {
        /// The source.
        source: SourceId,
        /// Its life before.
        previous: Epoch,
        /// Its life now.
        epoch: Epoch,
    },
}

/// Counters of a [`Tracker`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrackerStats {
    /// New events.
    pub events: u64,
    /// Events that had been seen, or reported as missing, before.
    pub duplicates: u64,
    /// Gaps.
    pub gaps: u64,
    /// Events lost in gaps.
    pub missing: u64,
    /// Batches of an epoch below the one that is followed: they are ignored. A few after a restart;
    /// more while a source has [two epochs](Tracker::conflicting_epochs), or until a lower one is
    /// believed.
    pub stale_batches: u64,
    /// Batches of streams beyond the limit of streams.
    pub untracked_batches: u64,
}

/// A source of which two lives publish at the same time: two processes were given the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConflictingEpochs {
    /// Whose name it is.
    pub source: SourceId,
    /// The life that is followed: the higher one.
    pub followed: Epoch,
    /// The life that is ignored.
    pub ignored: Epoch,
}

/// Follows any number of streams up to a limit. Pure bookkeeping: feed it batches in the order of
/// arrival.
///
/// Every number of a stream is delivered exactly once, as an event or as part of a gap. A batch
/// that arrives after its numbers were reported missing stays missing. Applying it late would undo
/// what came after.
///
/// Of a source the highest life is followed, and batches of lower ones are ignored. But epochs come
/// from clocks, and a clock may have been behind. So a lower life becomes the source's life when at
/// least three of its batches have come over at least [`SILENCE`](Self::SILENCE), and none of the
/// followed one between them.
#[derive(Debug)]
pub struct Tracker {
    sources: HashMap<SourceId, SourceState>,
    streams: usize,
    max_streams: usize,
    stats: TrackerStats,
}

#[derive(Debug)]
struct SourceState {
    epoch: Epoch,
    /// Next number per shard.
    shards: BTreeMap<u16, u64>,
    lower: Option<Lower>,
}

/// A life below the followed one that publishes.
#[derive(Clone, Copy, Debug)]
struct Lower {
    epoch: Epoch,
    first: Instant,
    last: Instant,
    /// Since when it has published without a batch of the followed life between, and how many
    /// batches.
    alone: Option<(Instant, u32)>,
}

impl Tracker {
    /// Streams that are followed by default.
    pub const DEFAULT_MAX_STREAMS: usize = 65_536;

    /// A life is over when it publishes nothing for this time while a lower one of its source does:
    /// five heartbeats of the default interval.
    pub const SILENCE: Duration = Duration::from_secs(5);

    /// Batches of the lower life that have to come meanwhile.
    const WORDS: u32 = 3;

    /// A lower life that was silent for so long is not known any more.
    const LAPSE: Duration = Duration::from_secs(60);

    /// A tracker that has seen nothing and follows at most `max_streams` streams.
    pub fn new(max_streams: usize) -> Self {
        Self { sources: HashMap::new(), streams: 0, max_streams, stats: TrackerStats::default() }
    }

    /// Counters so far.
    pub const fn stats(&self) -> TrackerStats {
        self.stats
    }

    /// Number that the stream's next event should have; `None` for a stream that is not followed in
    /// this epoch.
    pub fn next_sequence(&self, stream: StreamId) -> Option<u64> {
        let source = self.sources.get(&stream.source).filter(|source| source.epoch == stream.epoch)?;
        source.shards.get(&stream.shard).copied()
    }

    /// Says that a resync (a snapshot, a replay) has covered the stream up to, not including,
    /// `next_sequence`: events below it are repeats from now on. Never goes back.
    pub fn resynced(&mut self, stream: StreamId, next_sequence: u64) -> Vec<Delivery> {
        let mut out = Vec::new();
        if let Some(expected) = self.expected(stream, &mut out) {
            *expected = (*expected).max(next_sequence);
        }
        out
    }

    /// Forgets a source, for example one that stopped sending heartbeats.
    pub fn forget(&mut self, source: SourceId) {
        if let Some(state) = self.sources.remove(&source) {
            self.streams -= state.shards.len();
        }
    }

    /// Sources of which two lives publish, for [`Self::SILENCE`] at least and both of them lately.
    pub fn conflicting_epochs(&self, now: Instant) -> impl Iterator<Item = ConflictingEpochs> + '_ {
        self.sources.iter().filter_map(move |(source, state)| {
            let lower = state.lower.filter(|lower| lower.is_living_beside(now))?;
            Some(ConflictingEpochs { source: *source, followed: state.epoch, ignored: lower.epoch })
        })
    }

    /// Takes the next batch and appends what it means to `out`.
    pub fn accept(&mut self, batch: EventBatch, out: &mut Vec<Delivery>) {
        self.accept_at(batch, Instant::now(), out);
    }

    /// The same, of a batch that came at `now`.
    pub fn accept_at(&mut self, batch: EventBatch, now: Instant, out: &mut Vec<Delivery>) {
        self.observe_life(batch.stream, now, out);
        let Some(expected) = self.expected(batch.stream, out) else { return };
        if batch.is_whole_from(*expected) {
            // The usual case: what comes is what was expected, and passes as it is.
            *expected = batch.next_sequence;
            self.stats.events += batch.events.len() as u64;
            out.push(Delivery::Events { stream: batch.stream, events: batch.events });
            return;
        }
        let EventBatch { stream, next_sequence, events, .. } = batch;
        let mut next = *expected;
        let (mut new, mut seen) = (TrackerStats::default(), Vec::with_capacity(events.len()));
        let flush = |seen: &mut Vec<KvEvent>, out: &mut Vec<Delivery>| {
            if !seen.is_empty() {
                out.push(Delivery::Events { stream, events: std::mem::take(seen) });
            }
        };
        for event in events {
            if event.sequence < next {
                new.duplicates += 1;
                continue;
            }
            if event.sequence > next {
                flush(&mut seen, out);
                new.gap(stream, next..event.sequence, out);
            }
            // A hostile publisher may use the last number: nothing can follow it.
            next = event.sequence.saturating_add(1);
            new.events += 1;
            seen.push(event);
        }
        flush(&mut seen, out);
        if next_sequence > next {
            new.gap(stream, next..next_sequence, out);
            next = next_sequence;
        }
        *expected = next;
        self.stats.add(&new);
    }

    /// Notes which life of a source publishes. A lower one may be followed from now on.
    fn observe_life(&mut self, stream: StreamId, now: Instant, out: &mut Vec<Delivery>) {
        let Some(state) = self.sources.get_mut(&stream.source) else { return };
        if stream.epoch >= state.epoch {
            if let Some(lower) = &mut state.lower {
                lower.alone = None;
            }
            return;
        }
        let epoch = stream.epoch;
        let new = Lower { epoch, first: now, last: now, alone: None };
        let is_known = |lower: &Lower| now.saturating_duration_since(lower.last) < Self::LAPSE;
        let mut lower = match state.lower.filter(is_known) {
            // Of several the highest.
            Some(lower) if lower.epoch > epoch => return,
            Some(lower) if lower.epoch == epoch => lower,
            _ => new,
        };
        lower.last = now;
        let (since, words) = lower.alone.map_or((now, 1), |(since, words)| (since, words.saturating_add(1)));
        lower.alone = Some((since, words));
        state.lower = Some(lower);
        if words >= Self::WORDS && now.saturating_duration_since(since) >= Self::SILENCE {
            let previous = state.epoch;
            self.streams -= state.shards.len();
            *state = SourceState { epoch, shards: BTreeMap::new(), lower: None };
            out.push(Delivery::Restarted { source: stream.source, previous, epoch });
        }
    }

    /// The next number of `stream`, after noticing a restart; `None` when the batch is to be
    /// ignored.
    fn expected(&mut self, stream: StreamId, out: &mut Vec<Delivery>) -> Option<&mut u64> {
        if let Some(state) = self.sources.get_mut(&stream.source) {
            if stream.epoch < state.epoch {
                self.stats.stale_batches += 1;
                return None;
            }
            if stream.epoch > state.epoch {
                let previous = state.epoch;
                self.streams -= state.shards.len();
                *state = SourceState { epoch: stream.epoch, shards: BTreeMap::new(), lower: None };
                out.push(Delivery::Restarted { source: stream.source, previous, epoch: stream.epoch });
            }
        }
        let known = self.sources.get(&stream.source).is_some_and(|s| s.shards.contains_key(&stream.shard));
        if !known {
            if self.streams >= self.max_streams {
                self.stats.untracked_batches += 1;
                return None;
            }
            self.streams += 1;
        }
        let state = self.sources.entry(stream.source).or_insert_with(|| SourceState {
            epoch: stream.epoch,
            shards: BTreeMap::new(),
            lower: None,
        });
        Some(state.shards.entry(stream.shard).or_insert(0))
    }
}

impl Lower {
    /// Whether it and the followed one publish in turns.
    fn is_living_beside(&self, now: Instant) -> bool {
        let is_lately = now.saturating_duration_since(self.last) < 2 * Tracker::SILENCE;
        let is_long = self.last.saturating_duration_since(self.first) >= Tracker::SILENCE;
        is_lately && is_long && self.alone.is_none_or(|(since, _)| since > self.first)
    }
}

impl Default for Tracker {
    fn default() -> Self {
        Self::new(Self::DEFAULT_MAX_STREAMS)
    }
}

impl TrackerStats {
    fn gap(&mut self, stream: StreamId, missing: Range<u64>, out: &mut Vec<Delivery>) {
        self.gaps += 1;
        self.missing = self.missing.saturating_add(missing.end - missing.start);
        out.push(Delivery::Gap { stream, missing });
    }

    fn add(&mut self, new: &Self) {
        self.events += new.events;
        self.duplicates += new.duplicates;
        self.gaps += new.gaps;
        self.missing = self.missing.saturating_add(new.missing);
    }
}
