//! An index that stays right: events applied, losses repaired by snapshots.

use crate::{
    Delivery, EventKind, KvEvent, KvIndex, Snapshot, SnapshotSource, SourceId, StreamId, Subscriber,
    TransportError,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Counters of an [`IndexFollower`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowStats {
    /// Gaps that were noticed.
    pub gaps: u64,
    /// Snapshots that were taken in.
    pub resyncs: u64,
    /// New lives of sources.
    pub restarts: u64,
}

/// Keeps a [`KvIndex`] equal to what every source of a transport holds.
///
/// After a gap the stream is *suspect*: its events are still applied, but what the index says of it may be wrong until
/// a snapshot has replaced it. A follower that joins late gets the whole truth that way.
pub struct IndexFollower<S> {
    subscriber: Subscriber,
    snapshots: S,
    index: KvIndex,
    /// Streams that wait for a snapshot, with the number that it has to reach.
    suspects: BTreeMap<StreamId, u64>,
    /// Events below these numbers are in a snapshot already, although they were still on their way to the index.
    covered: BTreeMap<StreamId, u64>,
    stats: FollowStats,
}

impl<S: SnapshotSource> IndexFollower<S> {
    /// A follower with an empty index.
    pub fn new(subscriber: Subscriber, snapshots: S, index: KvIndex) -> Self {
        let (suspects, covered, stats) = (BTreeMap::new(), BTreeMap::new(), FollowStats::default());
        Self { subscriber, snapshots, index, suspects, covered, stats }
    }

    /// The index.
    pub const fn index(&self) -> &KvIndex {
        &self.index
    }

    /// The subscriber, for its counters.
    pub const fn subscriber(&self) -> &Subscriber {
        &self.subscriber
    }

    /// Counters so far.
    pub const fn stats(&self) -> FollowStats {
        self.stats
    }

    /// Streams of which the index may say something wrong.
    pub fn suspects(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.suspects.keys().copied()
    }

    /// Takes in what has come, waiting at most `timeout` for the first delivery and not more than
    /// [`Self::MAX_DELIVERIES`], and asks for the snapshots that are wanted. Whether anything was taken in.
    pub fn poll(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        let deadline = Instant::now() + timeout;
        let mut any = false;
        for _ in 0..Self::MAX_DELIVERIES {
            let left = if any { Duration::ZERO } else { deadline.saturating_duration_since(Instant::now()) };
            let delivery = self.subscriber.next(left);
            match delivery {
                Ok(Some(delivery)) => self.take(delivery),
                Err(error) if !any => return Err(error),
                // What came before an end counts; the next call tells of the end.
                Ok(None) | Err(_) => break,
            }
            any = true;
        }
        any |= self.resync();
        Ok(any)
    }

    /// Most deliveries in one poll, so that a busy stream does not keep the others from their snapshots.
    pub const MAX_DELIVERIES: usize = 16;

    /// Forgets a source, for example one whose heartbeats have stopped.
    pub fn forget(&mut self, source: SourceId) {
        self.subscriber.forget(source);
        self.drop_source(source);
    }

    fn drop_source(&mut self, source: SourceId) {
        self.index.forget(source);
        self.suspects.retain(|stream, _| stream.source != source);
        self.covered.retain(|stream, _| stream.source != source);
    }

    fn take(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Events { stream, events } => {
                let covered = self.covered.get(&stream).copied().unwrap_or(0);
                let fresh = events.partition_point(|event| event.sequence < covered);
                self.index.apply(stream, &events[fresh..]);
                if events.last().is_some_and(|last| last.sequence.saturating_add(1) >= covered) {
                    self.covered.remove(&stream);
                }
            }
            Delivery::Gap { stream, missing } => {
                self.stats.gaps += 1;
                let covered = self.covered.get(&stream).copied().unwrap_or(0);
                if missing.end > covered {
                    self.suspects.insert(stream, missing.end);
                    self.resync();
                }
            }
            Delivery::Restarted { source, .. } => {
                self.stats.restarts += 1;
                self.drop_source(source);
            }
        }
    }

    /// Asks for the snapshot of every suspect; whether one was taken in.
    fn resync(&mut self) -> bool {
        let wanted: BTreeSet<(StreamId, u64)> = self.suspects.iter().map(|(s, n)| (*s, *n)).collect();
        let mut any = false;
        for (stream, reach) in wanted {
            // An older one would leave the gap.
            let snapshot =
                self.snapshots.snapshot(stream, reach).filter(|found| found.next_sequence >= reach);
            let Some(snapshot) = snapshot else { continue };
            self.load(stream, snapshot);
            any = true;
        }
        any
    }

    fn load(&mut self, stream: StreamId, snapshot: Snapshot) {
        let Snapshot { next_sequence, mut blocks } = snapshot;
        // Parents first, so that chains come out whole.
        blocks.sort_by_key(|block| block.identity.position);
        let events: Vec<KvEvent> =
            blocks.into_iter().map(|block| KvEvent::new(0, EventKind::Store(block))).collect();
        self.index.clear(stream.source, stream.shard);
        self.index.apply(stream, &events);
        self.suspects.remove(&stream);
        self.covered.insert(stream, next_sequence);
        self.subscriber.resynced(stream, next_sequence);
        self.stats.resyncs += 1;
    }
}
