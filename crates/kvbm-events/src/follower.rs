//! An index that stays right: events applied, losses repaired by snapshots.

use crate::deadline;
use crate::{
    Delivery, EventKind, KvEvent, KvIndex, Resync, SnapshotSource, SourceId, StreamId, StreamRepair,
    Subscriber, TransportError,
};
use std::collections::BTreeMap;
use std::time::Duration;

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
/// After a gap the stream is *suspect*: its events are still applied, but what the index says of it
/// may be wrong until a snapshot has replaced it. A follower that joins late gets the whole truth
/// that way. Snapshots that come from elsewhere ([`RemoteSnapshots`](crate::RemoteSnapshots)) are
/// fetched in the background: no source waits for another.
pub struct IndexFollower<S> {
    subscriber: Subscriber,
    snapshots: S,
    index: KvIndex,
    resync: Resync,
    /// Events below these numbers are in a snapshot already, although they were still on their way
    /// to the index.
    covered: BTreeMap<StreamId, u64>,
    stats: FollowStats,
}

impl<S: SnapshotSource> IndexFollower<S> {
    /// Most deliveries in one poll, so that a busy stream does not keep the others from their
    /// snapshots.
    pub const MAX_DELIVERIES: usize = 16;

    /// How long a poll waits at most while a snapshot is under way.
    const SOON: Duration = Duration::from_millis(5);

    /// A follower with an empty index.
    pub fn new(subscriber: Subscriber, snapshots: S, index: KvIndex) -> Self {
        let (resync, covered, stats) = (Resync::default(), BTreeMap::new(), FollowStats::default());
        Self { subscriber, snapshots, index, resync, covered, stats }
    }

    /// Remembers at most `bytes` of events of a stream while its snapshot is under way, instead of
    /// [`Resync::MAX_BYTES`].
    #[must_use]
    pub fn remembering(self, bytes: usize) -> Self {
        Self { resync: Resync::new(bytes), ..self }
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
        self.resync.suspects()
    }

    /// Takes in what has come, waiting at most `timeout` for the first delivery and not more than
    /// [`Self::MAX_DELIVERIES`], and asks for the snapshots that are wanted. Whether anything was
    /// taken in.
    pub fn poll(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        let patience = if self.resync.is_empty() { timeout } else { timeout.min(Self::SOON) };
        let deadline = deadline::after(patience);
        let mut any = false;
        for _ in 0..Self::MAX_DELIVERIES {
            let left = if any { Duration::ZERO } else { deadline::remaining(deadline) };
            let delivery = self.subscriber.next(left);
            match delivery {
                Ok(Some(delivery)) => self.take(&delivery),
                Err(error) if !any => return Err(error),
                // What came before an end counts; the next call reports the end.
                Ok(None) | Err(_) => break,
            }
            any = true;
        }
        any |= self.repair();
        Ok(any)
    }

    /// Forgets a source, for example one whose heartbeats have stopped.
    pub fn forget(&mut self, source: SourceId) {
        self.subscriber.forget(source);
        self.drop_source(source);
    }

    fn drop_source(&mut self, source: SourceId) {
        self.index.forget(source);
        self.resync.forget(source, &mut self.snapshots);
        self.covered.retain(|stream, _| stream.source != source);
    }

    fn take(&mut self, delivery: &Delivery) {
        let covered = |stream| self.covered.get(stream).copied().unwrap_or(0);
        match delivery {
            Delivery::Events { stream, events } => {
                let fresh = events.partition_point(|event| event.sequence < covered(stream));
                let over =
                    events.last().is_some_and(|last| last.sequence.saturating_add(1) >= covered(stream));
                self.index.apply(*stream, &events[fresh..]);
                if over {
                    self.covered.remove(stream);
                }
                self.resync.note(delivery);
            }
            Delivery::Gap { stream, missing } => {
                self.stats.gaps += 1;
                if missing.end > covered(stream) {
                    self.resync.note(delivery);
                    self.repair();
                }
            }
            Delivery::Restarted { source, .. } => {
                self.stats.restarts += 1;
                self.drop_source(*source);
            }
        }
    }

    /// Asks for the snapshot of every suspect; whether one was taken in.
    fn repair(&mut self) -> bool {
        let repairs = self.resync.ask(&mut self.snapshots);
        let any = !repairs.is_empty();
        for repair in repairs {
            self.load(repair);
        }
        any
    }

    fn load(&mut self, StreamRepair { stream, mut snapshot, since }: StreamRepair) {
        // Parents first, so that chains come out whole.
        snapshot.blocks.sort_by_key(|block| block.identity.position);
        let blocks = snapshot.blocks.into_iter();
        let stores: Vec<KvEvent> = blocks.map(|block| KvEvent::new(0, EventKind::Store(block))).collect();
        self.index.clear(stream.source, stream.shard);
        self.index.apply(stream, &stores);
        self.index.apply(stream, &since);
        self.covered.insert(stream, snapshot.next_sequence);
        self.subscriber.resynced(stream, snapshot.next_sequence);
        self.stats.resyncs += 1;
    }
}
