//! Distinguishes events that were missed from those before the stream was joined.

use std::collections::BTreeMap;
use std::time::Instant;

use kvbm::events_plane::{ConflictingEpochs, Delivery, EventBatch, SourceId, Tracker, TrackerStats};
use kvbm::plan::Epoch;

/// A tracker of streams that may be joined late: the numbers before the first batch of a stream are
/// not missing.
///
/// An index has to make up for them, so the tracker itself reports them as a gap. Who only watches
/// has lost nothing. In later lives of a source, which began while it was followed, numbers are
/// expected from 0 on.
#[derive(Default)]
pub(super) struct Joining {
    tracker: Tracker,
    /// The life of each source that was joined.
    lives: BTreeMap<SourceId, Epoch>,
}

impl Joining {
    /// Takes the next batch, which came at `now`, and appends what it means to `out`. Where it is
    /// the first one of a stream: the number that the stream was joined at, 0 where that is its
    /// beginning.
    pub(super) fn accept(&mut self, batch: EventBatch, now: Instant, out: &mut Vec<Delivery>) -> Option<u64> {
        let stream = batch.stream;
        let is_new = self.tracker.next_sequence(stream).is_none();
        let is_joined = self.lives.get(&stream.source).is_none_or(|life| *life == stream.epoch);
        let first = batch.events.first().map_or(batch.next_sequence, |event| event.sequence);
        if is_new && is_joined {
            out.extend(self.tracker.resynced(stream, first));
        }
        self.tracker.accept_at(batch, now, out);
        // As many as the tracker follows, no more.
        if !is_new || self.tracker.next_sequence(stream).is_none() {
            return None;
        }
        self.lives.entry(stream.source).or_insert(stream.epoch);
        Some(if is_joined { first } else { 0 })
    }

    /// Sources of which two lives publish at the same time.
    pub(super) fn conflicting_epochs(&self, now: Instant) -> impl Iterator<Item = ConflictingEpochs> + '_ {
        self.tracker.conflicting_epochs(now)
    }

    /// Counters; what came before a stream was joined is in none of them.
    pub(super) const fn stats(&self) -> TrackerStats {
        self.tracker.stats()
    }
}

/// The warning that two processes publish as one source, with the way out.
pub(super) fn conflicting_epochs(source: &str, followed: u64, ignored: u64) -> String {
    format!(
        "two processes publish as source {source}: epoch {followed} is followed, epoch {ignored} is ignored; give each \
         process an events.worker_id of its own"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::events_plane::{EventKind, KvEvent, StreamId};
    use std::ops::Range;

    #[test]
    fn only_the_first_life_of_a_source_is_joined_late() {
        let mut joining = Joining::default();
        let mut take = |(epoch, shard), numbers: Range<u64>| {
            let stream = StreamId { source: SourceId(1), epoch: Epoch(epoch), shard };
            let next = numbers.end;
            let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
            let mut out = Vec::new();
            let joined = joining.accept(EventBatch::new(stream, next, events), Instant::now(), &mut out);
            let missing = out.iter().filter_map(|delivery| match delivery {
                Delivery::Gap { missing, .. } => Some((missing.start, missing.end)),
                _ => None,
            });
            (joined, missing.collect::<Vec<_>>())
        };
        assert_eq!(take((1, 0), 50..53), (Some(50), vec![]));
        assert_eq!(take((1, 0), 55..56), (None, vec![(53, 55)]), "lost while it was followed");
        assert_eq!(take((1, 1), 7..7), (Some(7), vec![]), "a heartbeat of another stream");
        assert_eq!(take((1, 1), 9..10), (None, vec![(7, 9)]));
        assert_eq!(take((2, 0), 4..6), (Some(0), vec![(0, 4)]), "its new life was followed from the start");
        assert_eq!(take((2, 1), 0..0), (Some(0), vec![]));
        assert_eq!(take((2, 1), 2..3), (None, vec![(0, 2)]), "after a heartbeat, too");
        assert_eq!(take((1, 0), 60..61), (None, vec![]), "that life is over");
        assert_eq!((joining.stats().gaps, joining.stats().missing), (4, 10));
    }
}
