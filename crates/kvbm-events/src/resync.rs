//! What has to be made up for after a loss, until a snapshot has done so.

use crate::{Delivery, KvEvent, Snapshot, SnapshotSource, SourceId, StreamId};
use std::collections::{BTreeMap, VecDeque};

/// The streams of which a follower may know something wrong.
///
/// A snapshot takes its time, and events go on meanwhile. Those of a suspect stream are remembered,
/// so that whatever the snapshot does not know yet is applied again on top of it. Once the number
/// is known that the snapshot under way begins with, only what follows it is kept. Where that is
/// too much, the oldest go, and the snapshot has to be newer than they were.
#[derive(Debug)]
pub struct Resync {
    suspects: BTreeMap<StreamId, Suspect>,
    /// Most bytes of remembered events: of each stream whose snapshot is under way, and of all
    /// others together.
    most: usize,
    /// Bytes of the events of streams whose snapshot is not under way.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Suspect {
    /// The snapshot has to be the state after every event below this number.
    reach: u64,
    /// Every event from `reach` on that has come.
    since: VecDeque<KvEvent>,
    /// What they take.
    bytes: usize,
    /// Whether somebody fetches its snapshot.
    is_under_way: bool,
}

/// What makes a stream right again: forget all of it, then take in the snapshot, then apply these
/// events.
#[derive(Debug)]
pub struct StreamRepair {
    /// The stream.
    pub stream: StreamId,
    /// Its state at some moment after the loss.
    pub snapshot: Snapshot,
    /// What has come since, in order.
    pub since: Vec<KvEvent>,
}

impl Resync {
    /// Most bytes of events that are remembered by default: of each stream whose snapshot is under
    /// way, which are few at a time
    /// ([`RemoteSnapshots::MAX_FETCHES`](crate::RemoteSnapshots::MAX_FETCHES)), and of all that
    /// wait for theirs together. A stream is made right as long as less than this comes of it
    /// between the first and the last part of its snapshot: some 300,000 events.
    pub const MAX_BYTES: usize = 64 << 20;

    /// Nothing is suspect. At most `most` bytes are remembered; see [`Self::MAX_BYTES`].
    pub const fn new(most: usize) -> Self {
        Self { suspects: BTreeMap::new(), most, waiting: 0 }
    }

    /// Takes note of what came. Costs nothing for a stream that has lost nothing.
    pub fn note(&mut self, delivery: &Delivery) {
        match delivery {
            Delivery::Events { stream, events } => {
                if let Some(suspect) = self.suspects.get_mut(stream) {
                    suspect.remember(events, &mut self.waiting, self.most);
                }
            }
            Delivery::Gap { stream, missing } => {
                // All that was remembered is older than the end of this gap.
                self.suspects.entry(*stream).or_default().require(missing.end, &mut self.waiting);
            }
            Delivery::Restarted { .. } => {}
        }
    }

    /// Nothing has to be made up for any more at this source: it is gone, or has begun a new life.
    pub fn forget(&mut self, source: SourceId, snapshots: &mut impl SnapshotSource) {
        let waiting = &mut self.waiting;
        self.suspects.retain(|stream, suspect| {
            let stays = stream.source != source;
            if !stays {
                suspect.settle(0, waiting);
                snapshots.cancel(*stream);
            }
            stays
        });
    }

    /// Asks for the snapshot of every suspect. What came is the caller's to apply, before anything
    /// else of the stream.
    pub fn ask(&mut self, snapshots: &mut impl SnapshotSource) -> Vec<StreamRepair> {
        let mut repairs = Vec::new();
        for (&stream, suspect) in &mut self.suspects {
            let snapshot = snapshots.snapshot(stream, suspect.reach);
            // An older one would leave the gap.
            let Some(snapshot) = snapshot.filter(|found| found.next_sequence >= suspect.reach) else {
                suspect.is_fetched_from(snapshots.under_way(stream), &mut self.waiting, self.most);
                continue;
            };
            suspect.require(snapshot.next_sequence, &mut self.waiting);
            repairs.push(StreamRepair { stream, snapshot, since: std::mem::take(&mut suspect.since).into() });
            // What is left of it is the caller's now.
            suspect.settle(0, &mut self.waiting);
        }
        for repair in &repairs {
            self.suspects.remove(&repair.stream);
        }
        repairs
    }

    /// Streams of which something may be wrong.
    pub fn suspects(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.suspects.keys().copied()
    }

    /// Whether nothing is missing.
    pub fn is_empty(&self) -> bool {
        self.suspects.is_empty()
    }
}

impl Default for Resync {
    fn default() -> Self {
        Self::new(Self::MAX_BYTES)
    }
}

impl Suspect {
    fn remember(&mut self, events: &[KvEvent], waiting: &mut usize, most: usize) {
        let fresh = &events[events.partition_point(|event| event.sequence < self.reach)..];
        self.since.extend(fresh.iter().cloned());
        self.settle(self.bytes + fresh.iter().map(bytes_of).sum::<usize>(), waiting);
        self.fit(waiting, most);
    }

    /// The snapshot has to be the state after every event below `reach`: no event below it is
    /// needed any more.
    fn require(&mut self, reach: u64, waiting: &mut usize) {
        self.reach = self.reach.max(reach);
        while self.since.front().is_some_and(|event| event.sequence < self.reach) {
            self.forget_oldest(waiting);
        }
    }

    /// Whether a snapshot is under way, and the number from which on events are not in it.
    fn is_fetched_from(&mut self, from: Option<u64>, waiting: &mut usize, most: usize) {
        if from.is_some() != self.is_under_way {
            let bytes = self.bytes;
            self.settle(0, waiting);
            self.is_under_way = from.is_some();
            self.settle(bytes, waiting);
            self.fit(waiting, most);
        }
        self.require(from.unwrap_or(0), waiting);
    }

    fn fit(&mut self, waiting: &mut usize, most: usize) {
        while (if self.is_under_way { self.bytes } else { *waiting }) > most {
            let Some(oldest) = self.since.front() else { return };
            self.reach = oldest.sequence.saturating_add(1);
            self.forget_oldest(waiting);
        }
    }

    fn forget_oldest(&mut self, waiting: &mut usize) {
        if let Some(event) = self.since.pop_front() {
            self.settle(self.bytes - bytes_of(&event), waiting);
        }
    }

    /// It takes so many bytes now.
    fn settle(&mut self, bytes: usize, waiting: &mut usize) {
        if !self.is_under_way {
            *waiting = *waiting - self.bytes + bytes;
        }
        self.bytes = bytes;
    }
}

/// What an event takes.
fn bytes_of(event: &KvEvent) -> usize {
    let pair = |(key, value): &(String, String)| size_of::<(String, String)>() + key.len() + value.len();
    let extra: usize = event.extra.iter().map(pair).sum();
    size_of::<KvEvent>() + extra + event.unknown.bytes().len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventKind;
    use kvbm_plan::Epoch;

    fn stream(source: u64) -> StreamId {
        StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 }
    }

    fn events(source: u64, numbers: std::ops::Range<u64>) -> Delivery {
        let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
        Delivery::Events { stream: stream(source), events }
    }

    fn gap(source: u64, missing: std::ops::Range<u64>) -> Delivery {
        Delivery::Gap { stream: stream(source), missing }
    }

    fn at(next_sequence: u64) -> impl FnMut(StreamId) -> Option<Snapshot> {
        move |_| Some(Snapshot { next_sequence, blocks: Vec::new() })
    }

    fn numbers(repairs: &[StreamRepair]) -> Vec<u64> {
        repairs.iter().flat_map(|repair| repair.since.iter().map(|event| event.sequence)).collect()
    }

    #[test]
    fn what_came_after_the_snapshot_was_taken_is_applied_again() {
        let mut resync = Resync::default();
        resync.note(&events(1, 0..5));
        resync.note(&gap(1, 5..8));
        resync.note(&events(1, 8..20));
        assert!(resync.ask(&mut at(7)).is_empty(), "from before the end of the gap");
        resync.note(&events(1, 20..22));
        assert_eq!(numbers(&resync.ask(&mut at(18))), [18, 19, 20, 21]);
        assert_eq!((resync.is_empty(), resync.waiting), (true, 0));
        resync.note(&gap(1, 22..23));
        resync.note(&events(1, 23..25));
        assert_eq!(numbers(&resync.ask(&mut at(40))), [0; 0], "it is ahead of all that came");
    }

    #[test]
    fn a_further_gap_asks_for_a_newer_snapshot() {
        let mut resync = Resync::default();
        resync.note(&gap(1, 0..8));
        resync.note(&events(1, 8..10));
        resync.note(&gap(1, 10..12));
        assert_eq!(resync.waiting, 0);
        assert!(resync.ask(&mut at(10)).is_empty());
        assert_eq!(resync.ask(&mut at(12)).len(), 1);
    }

    /// What an event of these tests takes.
    const EVENT: usize = size_of::<KvEvent>();

    #[test]
    fn what_is_remembered_is_bounded_and_no_less_right() {
        let mut resync = Resync::new(100 * EVENT);
        resync.note(&gap(1, 0..1));
        resync.note(&gap(2, 0..1));
        resync.note(&events(1, 1..101));
        resync.note(&events(2, 1..3));
        assert_eq!(resync.waiting, 100 * EVENT, "the second stream remembers nothing");
        assert_eq!(numbers(&resync.ask(&mut at(99))), [99, 100]);
        resync.note(&gap(2, 3..4));
        resync.note(&events(2, 4..6));
        assert_eq!((resync.suspects().collect::<Vec<_>>(), resync.waiting), (vec![stream(2)], 2 * EVENT));
        let mut cancelled = Fetched::default();
        resync.forget(SourceId(2), &mut cancelled);
        assert_eq!((cancelled.cancelled, resync.waiting), (vec![stream(2)], 0));
    }

    /// Mutations that make it fail: one budget for all streams; `fit` that forgets all that is
    /// remembered; `ask` that does not ask how far a snapshot is.
    #[test]
    fn a_snapshot_under_way_is_kept_up_with_whatever_comes_of_other_streams() {
        let mut resync = Resync::new(100 * EVENT);
        (1..=3).for_each(|source| resync.note(&gap(source, 0..1)));
        let mut fetched = Fetched::default();
        // The first two are asked for their snapshots; the third is not, and says much.
        fetched.under_way.extend([(stream(1), 0), (stream(2), 0)]);
        assert!(resync.ask(&mut fetched).is_empty());
        (1..=3).for_each(|source| resync.note(&events(source, 1..500)));
        // Their snapshots begin with what was said last.
        fetched.under_way.extend([(stream(1), 490), (stream(2), 450)]);
        assert!(resync.ask(&mut fetched).is_empty());
        let kept = |resync: &Resync, source| resync.suspects[&stream(source)].since.len();
        assert_eq!([1, 2, 3].map(|source| kept(&resync, source)), [10, 50, 100], "what may be needed");
        (1..=3).for_each(|source| resync.note(&events(source, 500..580)));
        fetched.there = vec![(stream(1), 490), (stream(2), 450)];
        let repairs = resync.ask(&mut fetched);
        assert_eq!(repairs.iter().map(|repair| repair.stream.source.0).collect::<Vec<_>>(), [1]);
        assert_eq!(numbers(&repairs), (490..580).collect::<Vec<_>>());
        assert_eq!(
            fetched.reach[&stream(2)],
            480,
            "of the second too much came: from here on it is remembered"
        );
        // Its next snapshot is not under way yet: it is remembered with the others.
        fetched.under_way.clear();
        assert!(resync.ask(&mut fetched).is_empty());
        assert!(resync.waiting <= 100 * EVENT && kept(&resync, 2) + kept(&resync, 3) <= 100);
        assert_eq!(resync.ask(&mut at(580)).len(), 2);
        assert_eq!(resync.waiting, 0);
    }

    #[test]
    fn what_goes_with_an_event_counts_too() {
        let mut large = KvEvent::new(1, EventKind::Cleared);
        large.extra = vec![("k".repeat(10), "v".repeat(1000))];
        assert!(bytes_of(&large) > EVENT + 1010);
        let mut resync = Resync::new(EVENT + 500);
        resync.note(&gap(1, 0..1));
        resync.note(&Delivery::Events { stream: stream(1), events: vec![large] });
        assert_eq!((resync.waiting, resync.suspects[&stream(1)].reach), (0, 2));
    }

    /// Snapshots that take their time.
    #[derive(Default)]
    struct Fetched {
        under_way: BTreeMap<StreamId, u64>,
        there: Vec<(StreamId, u64)>,
        /// How far each was last asked to reach.
        reach: BTreeMap<StreamId, u64>,
        cancelled: Vec<StreamId>,
    }

    impl SnapshotSource for Fetched {
        fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
            self.reach.insert(stream, reach);
            let there = self.there.iter().find(|(of, _)| *of == stream);
            there.map(|(_, next_sequence)| Snapshot { next_sequence: *next_sequence, blocks: Vec::new() })
        }

        fn under_way(&self, stream: StreamId) -> Option<u64> {
            self.under_way.get(&stream).copied()
        }

        fn cancel(&mut self, stream: StreamId) {
            self.cancelled.push(stream);
        }
    }
}
