//! What has to be made up for after a loss, until a snapshot has done so.

use crate::{Delivery, KvEvent, Snapshot, SnapshotSource, SourceId, StreamId};
use std::collections::BTreeMap;

/// The streams of which a follower may know something wrong.
///
/// A snapshot takes its time, and events go on meanwhile: those of a suspect stream are remembered, so that whatever the
/// snapshot does not know yet is applied again on top of it. Where too many would have to be, the next snapshot has to be
/// newer than all that came.
#[derive(Debug, Default)]
pub struct Resync {
    suspects: BTreeMap<StreamId, Suspect>,
    /// Events that are remembered, of all streams together.
    remembered: usize,
}

#[derive(Debug, Default)]
struct Suspect {
    /// The snapshot has to be the state after every event below this number.
    reach: u64,
    /// Every event from `reach` on that has come.
    since: Vec<KvEvent>,
}

/// What makes a stream right again: forget all of it, then take in the snapshot, then apply these events.
#[derive(Debug)]
pub struct Repair {
    /// The stream.
    pub stream: StreamId,
    /// Its state at some moment after the loss.
    pub snapshot: Snapshot,
    /// What has come since, in order.
    pub since: Vec<KvEvent>,
}

impl Resync {
    /// Most events that are remembered while snapshots are under way: some 50 MiB.
    pub const MAX_REMEMBERED: usize = 1 << 18;

    /// Takes note of what came. Costs nothing for a stream that has lost nothing.
    pub fn note(&mut self, delivery: &Delivery) {
        match delivery {
            Delivery::Events { stream, events } => self.remember(*stream, events),
            Delivery::Gap { stream, missing } => {
                let suspect = self.suspects.entry(*stream).or_default();
                // All that was remembered is older than the end of this gap.
                self.remembered -= suspect.since.len();
                *suspect = Suspect { reach: suspect.reach.max(missing.end), since: Vec::new() };
            }
            Delivery::Restarted { .. } => {}
        }
    }

    fn remember(&mut self, stream: StreamId, events: &[KvEvent]) {
        let Some(suspect) = self.suspects.get_mut(&stream) else { return };
        let Some(last) = events.last() else { return };
        if self.remembered + events.len() > Self::MAX_REMEMBERED {
            self.remembered -= suspect.since.len();
            *suspect = Suspect { reach: last.sequence.saturating_add(1), since: Vec::new() };
            return;
        }
        let fresh = events.partition_point(|event| event.sequence < suspect.reach);
        suspect.since.extend_from_slice(&events[fresh..]);
        self.remembered += events.len() - fresh;
    }

    /// Nothing has to be made up for any more at this source: it is gone, or has begun a new life.
    pub fn forget(&mut self, source: SourceId, snapshots: &mut impl SnapshotSource) {
        let remembered = &mut self.remembered;
        self.suspects.retain(|stream, suspect| {
            let stays = stream.source != source;
            if !stays {
                *remembered -= suspect.since.len();
                snapshots.cancel(*stream);
            }
            stays
        });
    }

    /// Asks for the snapshot of every suspect. What came is the caller's to apply, before anything else of the stream.
    pub fn ask(&mut self, snapshots: &mut impl SnapshotSource) -> Vec<Repair> {
        let mut repairs = Vec::new();
        for (&stream, suspect) in &mut self.suspects {
            let snapshot = snapshots.snapshot(stream, suspect.reach);
            // An older one would leave the gap.
            let Some(snapshot) = snapshot.filter(|found| found.next_sequence >= suspect.reach) else {
                continue;
            };
            let mut since = std::mem::take(&mut suspect.since);
            self.remembered -= since.len();
            since.drain(..since.partition_point(|event| event.sequence < snapshot.next_sequence));
            repairs.push(Repair { stream, snapshot, since });
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

    fn numbers(repairs: &[Repair]) -> Vec<u64> {
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
        assert!(resync.is_empty() && resync.remembered == 0);
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
        assert_eq!(resync.remembered, 0);
        assert!(resync.ask(&mut at(10)).is_empty());
        assert_eq!(resync.ask(&mut at(12)).len(), 1);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_no_less_right() {
        let mut resync = Resync::default();
        resync.note(&gap(1, 0..1));
        resync.note(&gap(2, 0..1));
        let most = Resync::MAX_REMEMBERED as u64;
        resync.note(&events(1, 1..most));
        resync.note(&events(2, 1..3));
        assert_eq!(resync.remembered, Resync::MAX_REMEMBERED - 1, "the second stream remembers nothing");
        assert_eq!(numbers(&resync.ask(&mut at(most - 2))), [most - 2, most - 1]);
        resync.note(&gap(2, 3..4));
        resync.note(&events(2, 4..6));
        assert_eq!(resync.suspects().collect::<Vec<_>>(), [stream(2)]);
        let mut cancelled = Cancelled(Vec::new());
        resync.forget(SourceId(2), &mut cancelled);
        assert_eq!((cancelled.0, resync.remembered), (vec![stream(2)], 0));
    }

    struct Cancelled(Vec<StreamId>);

    impl SnapshotSource for Cancelled {
        fn snapshot(&mut self, _stream: StreamId, _reach: u64) -> Option<Snapshot> {
            None
        }

        fn cancel(&mut self, stream: StreamId) {
            self.0.push(stream);
        }
    }
}
