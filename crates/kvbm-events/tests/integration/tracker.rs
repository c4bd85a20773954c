//! Restarts, stale epochs, limits, and the last number there is.

use kvbm_events::{ConflictingEpochs, Delivery, EventBatch, EventKind, KvEvent, SourceId, StreamId, Tracker};
use kvbm_plan::Epoch;
use std::time::{Duration, Instant};

fn batch(source: u64, epoch: u64, shard: u16, numbers: std::ops::Range<u64>) -> EventBatch {
    let stream = StreamId { source: SourceId(source), epoch: Epoch(epoch), shard };
    let next_sequence = numbers.end;
    EventBatch::new(stream, next_sequence, numbers.map(crate::support::event).collect())
}

fn accept(tracker: &mut Tracker, batch: EventBatch) -> Vec<Delivery> {
    let mut out = Vec::new();
    tracker.accept(batch, &mut out);
    out
}

#[test]
fn a_restart_is_reported_once_and_the_old_life_is_ignored() {
    let mut tracker = Tracker::default();
    assert_eq!(accept(&mut tracker, batch(1, 4, 0, 0..3)).len(), 1);
    let told = accept(&mut tracker, batch(1, 6, 0, 0..2));
    let (source, previous, epoch) = (SourceId(1), Epoch(4), Epoch(6));
    assert_eq!(told[0], Delivery::Restarted { source, previous, epoch });
    assert!(matches!(&told[1..], [Delivery::Events { events, .. }] if events.len() == 2), "{told:?}");
    assert_eq!(accept(&mut tracker, batch(1, 4, 0, 3..9)), []);
    assert_eq!(tracker.stats().stale_batches, 1);
    assert_eq!(accept(&mut tracker, batch(1, 6, 1, 0..1)).len(), 1, "another shard of the same life");
}

#[test]
fn a_restart_whose_first_batches_are_lost_shows_restart_and_gap() {
    let mut tracker = Tracker::default();
    accept(&mut tracker, batch(1, 4, 0, 0..3));
    let told = accept(&mut tracker, batch(1, 5, 0, 7..8));
    assert!(matches!(told[0], Delivery::Restarted { .. }));
    assert!(matches!(&told[1], Delivery::Gap { missing, .. } if *missing == (0..7)), "{told:?}");
}

#[test]
fn late_and_repeated_batches_deliver_nothing() {
    let mut tracker = Tracker::default();
    accept(&mut tracker, batch(1, 1, 0, 0..4));
    let gap = accept(&mut tracker, batch(1, 1, 0, 8..12));
    assert!(matches!(&gap[0], Delivery::Gap { missing, .. } if *missing == (4..8)));
    assert_eq!(accept(&mut tracker, batch(1, 1, 0, 4..8)), [], "overtaken: it stays missing");
    assert_eq!(accept(&mut tracker, batch(1, 1, 0, 8..12)), [], "repeated");
    let overlap = accept(&mut tracker, batch(1, 1, 0, 10..14));
    assert!(
        matches!(&overlap[..], [Delivery::Events { events, .. }] if events[0].sequence == 12),
        "{overlap:?}"
    );
    assert_eq!(tracker.stats().duplicates, 4 + 4 + 2);
}

#[test]
fn streams_beyond_the_limit_are_counted_until_a_source_is_forgotten() {
    let mut tracker = Tracker::new(2);
    accept(&mut tracker, batch(1, 1, 0, 0..1));
    accept(&mut tracker, batch(1, 1, 1, 0..1));
    assert_eq!(accept(&mut tracker, batch(2, 1, 0, 0..1)), []);
    assert_eq!(tracker.stats().untracked_batches, 1);
    tracker.forget(SourceId(1));
    assert_eq!(accept(&mut tracker, batch(2, 1, 0, 0..1)).len(), 1);
}

#[test]
fn a_resync_may_come_first_and_never_goes_back() {
    let mut tracker = Tracker::default();
    let stream = StreamId { source: SourceId(1), epoch: Epoch(3), shard: 0 };
    assert_eq!(tracker.next_sequence(stream), None);
    assert_eq!(tracker.resynced(stream, 10), []);
    assert_eq!(tracker.resynced(stream, 4), []);
    assert_eq!(tracker.next_sequence(stream), Some(10));
    assert_eq!(accept(&mut tracker, batch(1, 3, 0, 5..10)), []);
    let restarted = tracker.resynced(StreamId { epoch: Epoch(4), ..stream }, 2);
    assert!(matches!(restarted[..], [Delivery::Restarted { .. }]));
    assert_eq!(tracker.resynced(stream, 99), [], "a snapshot of an old life says nothing");
    assert_eq!(tracker.next_sequence(StreamId { epoch: Epoch(4), ..stream }), Some(2));
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    let mut tracker = Tracker::default();
    let stream = StreamId { source: SourceId(1), epoch: Epoch(u64::MAX), shard: u16::MAX };
    let last = KvEvent::new(u64::MAX - 1, EventKind::Cleared);
    let told = accept(&mut tracker, EventBatch::new(stream, u64::MAX, vec![last]));
    assert!(matches!(&told[0], Delivery::Gap { missing, .. } if *missing == (0..u64::MAX - 1)));
    assert_eq!(tracker.next_sequence(stream), Some(u64::MAX));
    let heartbeat = EventBatch::new(stream, u64::MAX, Vec::new());
    assert_eq!(accept(&mut tracker, heartbeat), []);
}

/// Batches that come at times of a test's own.
struct Clocked {
    tracker: Tracker,
    start: Instant,
}

impl Clocked {
    fn new() -> Self {
        Self { tracker: Tracker::default(), start: Instant::now() }
    }

    /// A heartbeat of a life of source 1, after `tenths` of a second in all.
    fn heartbeat(&mut self, epoch: u64, tenths: u64) -> Vec<Delivery> {
        let mut out = Vec::new();
        self.tracker.accept_at(batch(1, epoch, 0, 7..7), self.at(tenths), &mut out);
        out
    }

    fn at(&self, tenths: u64) -> Instant {
        self.start + Duration::from_millis(100 * tenths)
    }

    fn conflicting_epochs(&self, tenths: u64) -> Vec<ConflictingEpochs> {
        self.tracker.conflicting_epochs(self.at(tenths)).collect()
    }
}

/// A worker with a name of its own starts again on a host whose clock is behind.
/// Mutation that makes it fail: `hear` that believes nobody.
#[test]
fn a_lower_life_that_speaks_alone_for_long_enough_is_believed() {
    let mut clocked = Clocked::new();
    clocked.heartbeat(9, 0);
    for tenths in [10, 20, 30, 40, 50] {
        assert_eq!(clocked.heartbeat(4, tenths), [], "the higher one may still be there");
    }
    assert_eq!(clocked.conflicting_epochs(50), [], "one of them is silent");
    let told = clocked.heartbeat(4, 60);
    let (source, previous, epoch) = (SourceId(1), Epoch(9), Epoch(4));
    assert_eq!(told[0], Delivery::Restarted { source, previous, epoch });
    assert!(matches!(&told[1..], [Delivery::Gap { missing, .. }] if *missing == (0..7)), "{told:?}");
    assert_eq!(clocked.tracker.stats().stale_batches, 5);
    assert_eq!(clocked.heartbeat(4, 70), [], "it is followed");
    assert_eq!(clocked.heartbeat(3, 80), [], "what is lower still is ignored");
    // The clock was set right, and it starts again.
    assert!(matches!(clocked.heartbeat(10, 90)[0], Delivery::Restarted { epoch: Epoch(10), .. }));
}

#[test]
fn what_is_left_of_an_old_life_changes_nothing() {
    let mut clocked = Clocked::new();
    clocked.heartbeat(4, 0);
    clocked.heartbeat(9, 10);
    // Much of it at one time, then a little late: it does not go on.
    (0..50).for_each(|_| assert_eq!(clocked.heartbeat(4, 20), []));
    assert_eq!(clocked.heartbeat(9, 21), []);
    assert_eq!(clocked.heartbeat(4, 900), [], "long after");
    assert_eq!(clocked.heartbeat(4, 910), []);
    assert_eq!(clocked.conflicting_epochs(910), [], "the higher one has not spoken since");
    assert_eq!(clocked.tracker.stats().stale_batches, 52);
}

/// Two managers with one `worker_id` by mistake.
/// Mutation that makes it fail: a word of the followed life that does not end the silence.
#[test]
fn two_lives_that_publish_in_turns_are_reported_and_the_higher_one_is_followed() {
    let mut clocked = Clocked::new();
    clocked.heartbeat(9, 0);
    for second in 1..20 {
        assert_eq!(clocked.heartbeat(4, 10 * second), []);
        assert_eq!(clocked.heartbeat(3, 10 * second + 1), [], "of several the highest is told");
        assert_eq!(clocked.heartbeat(9, 10 * second + 5), []);
        let two = ConflictingEpochs { source: SourceId(1), followed: Epoch(9), ignored: Epoch(4) };
        let is_published = clocked.conflicting_epochs(10 * second + 6) == [two];
        assert_eq!(is_published, second > 5, "second {second}");
    }
    // One of them ends.
    assert_eq!(clocked.heartbeat(9, 300), []);
    assert_eq!(clocked.conflicting_epochs(300), []);
    assert_eq!(clocked.tracker.stats().stale_batches, 38);
}
