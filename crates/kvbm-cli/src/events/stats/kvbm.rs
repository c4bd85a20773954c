//! Counting batches of kvbm's own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use kvbm::events_plane::{Delivery, EventBatch, EventKind, EventReceiver, SourceId, wire};

use super::Counting;
use super::report::{Report, Source};
use crate::events::joining::Joining;

/// What is known of a publisher.
struct SeenSource {
    epoch: u64,
    events: u64,
    stores: u64,
    removes: u64,
    missing: u64,
    /// The streams of this life, each with numbers of its own.
    shards: BTreeMap<u16, Shard>,
    before: u64,
    /// The oldest batch of the interval.
    lag: Option<f64>,
    last: Instant,
}

/// Numbers of a stream.
#[derive(Clone, Copy, Default)]
struct Shard {
    joined_at: u64,
    next: u64,
}

/// The statistics so far.
pub(super) struct Stats {
    receiver: Box<dyn EventReceiver>,
    joining: Joining,
    sources: BTreeMap<SourceId, SeenSource>,
    deliveries: Vec<Delivery>,
    bytes: u64,
    batches: u64,
    malformed: u64,
    /// Events, bytes and batches of the last report, and when it was.
    before: [u64; 3],
    since: Instant,
}

/// Publishers that are counted one by one; more are only in the sums.
const MAX_SOURCES: usize = 1024;

impl Stats {
    pub(super) fn new(receiver: Box<dyn EventReceiver>, now: Instant) -> Self {
        Self {
            receiver,
            joining: Joining::default(),
            sources: BTreeMap::new(),
            deliveries: Vec::new(),
            bytes: 0,
            batches: 0,
            malformed: 0,
            before: [0; 3],
            since: now,
        }
    }

    fn take(&mut self, payload: &[u8], now: Instant) {
        self.bytes += payload.len() as u64;
        match wire::decode(payload) {
            Ok(batch) => self.count(batch, now),
            Err(_) => self.malformed += 1,
        }
    }

    fn count(&mut self, batch: EventBatch, now: Instant) {
        self.batches += u64::from(!batch.is_heartbeat());
        let age = batch.age(SystemTime::now()).map(|age| age.as_secs_f64());
        let (stream, next) = (batch.stream, batch.next_sequence);
        let (source, epoch) = (stream.source, stream.epoch.0);
        let joined_at = self.joining.accept(batch, now, &mut self.deliveries);
        if self.sources.len() >= MAX_SOURCES && !self.sources.contains_key(&source) {
            self.deliveries.clear();
            return;
        }
        let seen = self.sources.entry(source).or_insert(SeenSource {
            epoch,
            events: 0,
            stores: 0,
            removes: 0,
            missing: 0,
            shards: BTreeMap::new(),
            before: 0,
            lag: None,
            last: now,
        });
        // A lower one may be believed in the end.
        let is_new = self.deliveries.iter().any(|delivery| matches!(delivery, Delivery::Restarted { .. }));
        if is_new || epoch > seen.epoch {
            (seen.epoch, seen.shards) = (epoch, BTreeMap::new());
        }
        seen.shards.extend(joined_at.map(|joined_at| (stream.shard, Shard { joined_at, next })));
        seen.last = now;
        seen.lag = longest(seen.lag, age);
        if let Some(shard) = seen.shards.get_mut(&stream.shard).filter(|_| epoch == seen.epoch) {
            shard.next = shard.next.max(next);
        }
        for delivery in self.deliveries.drain(..) {
            match delivery {
                Delivery::Events { events, .. } => {
                    let stores =
                        events.iter().filter(|event| matches!(event.kind, EventKind::Store(_))).count();
                    let removes =
                        events.iter().filter(|event| matches!(event.kind, EventKind::Remove(_))).count();
                    seen.events += events.len() as u64;
                    seen.stores += stores as u64;
                    seen.removes += removes as u64;
                }
                Delivery::Gap { missing, .. } => seen.missing += missing.end - missing.start,
                Delivery::Restarted { .. } => {}
            }
        }
    }

    fn count_up(&mut self, dropped: u64, lag_batches: usize, now: Instant) -> Report {
        let seconds = now.saturating_duration_since(self.since).max(Duration::from_millis(1)).as_secs_f64();
        let rate = |now: u64, before: u64| (now - before) as f64 / seconds;
        let tracker = self.joining.stats();
        let two: BTreeMap<SourceId, u64> =
            self.joining.conflicting_epochs(now).map(|two| (two.source, two.ignored.0)).collect();
        let sources = self.sources.iter_mut().map(|(source, seen)| {
            let before = std::mem::replace(&mut seen.before, seen.events);
            let first = seen.shards.values().next().copied().unwrap_or_default();
            Source {
                name: source.to_string(),
                epoch: seen.epoch,
                ignored_epoch: two.get(source).copied(),
                events_per_s: rate(seen.events, before),
                stores: seen.stores,
                removes: seen.removes,
                missing: seen.missing,
                joined_at: first.joined_at,
                next_sequence: first.next,
                silent_s: now.saturating_duration_since(seen.last).as_secs_f64(),
                lag_s: seen.lag.take(),
            }
        });
        let sources: Vec<Source> = sources.collect();
        let sums = [tracker.events, self.bytes, self.batches];
        let [events, bytes, batches] = std::mem::replace(&mut self.before, sums);
        self.since = now;
        Report {
            events_per_s: rate(sums[0], events),
            bytes_per_s: rate(sums[1], bytes),
            batches_per_s: rate(sums[2], batches),
            events: sums[0],
            gaps: tracker.gaps,
            missing: tracker.missing,
            duplicates: tracker.duplicates,
            malformed: self.malformed,
            dropped,
            stale_batches: tracker.stale_batches,
            untracked_batches: tracker.untracked_batches,
            lag_batches,
            lag_s: sources.iter().fold(None, |lag, source| longest(lag, source.lag_s)),
            sources,
        }
    }
}

/// The longer one of those that are known.
fn longest(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

impl Counting for Stats {
    fn poll(&mut self, wait: Duration) -> Result<()> {
        if let Some(payload) = self.receiver.recv(wait)? {
            self.take(&payload, Instant::now());
        }
        Ok(())
    }

    fn report(&mut self, now: Instant) -> Report {
        self.count_up(self.receiver.dropped(), self.receiver.waiting(), now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::render;
    use super::*;
    use kvbm::events_plane::{EventTransport, InProcessTransport, KvEvent, StreamId};
    use kvbm::plan::Epoch;

    #[test]
    fn rates_losses_and_silence_are_reported_for_each_source() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stats = Stats::new(InProcessTransport::default().subscribe().unwrap(), start);
        let payload = |source, numbers: std::ops::Range<u64>, next| {
            let stream = StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 };
            let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
            wire::encode(&EventBatch::new(stream, next, events)).unwrap()
        };
        stats.take(&payload(1, 0..10, 10), at(1));
        stats.take(&payload(2, 4..5, 5), at(1));
        stats.take(&payload(2, 9..10, 10), at(1));
        stats.take(b"nonsense", at(1));
        let report = stats.count_up(0, 3, at(2));
        assert_eq!((report.events, report.missing, report.gaps, report.malformed), (12, 4, 1, 1));
        assert_eq!((report.events_per_s, report.lag_batches, report.sources.len()), (6.0, 3, 2));
        assert_eq!((report.sources[1].missing, report.sources[1].next_sequence), (4, 10));
        assert_eq!(
            (report.sources[0].joined_at, report.sources[1].joined_at),
            (0, 4),
            "what came before is not missing"
        );
        // A heartbeat tells of a lost tail.
        stats.take(&payload(1, 10..10, 12), at(3));
        let report = stats.count_up(0, 0, at(4));
        assert_eq!((report.events_per_s, report.missing), (0.0, 6));
        assert_eq!(report.sources.iter().map(|source| source.silent_s).collect::<Vec<_>>(), [1.0, 3.0]);
        let text = render(&report);
        assert!(text.contains("6 missing in 2 gaps") && text.contains("0000000000000002"), "{text}");
    }

    #[test]
    fn the_age_of_the_oldest_batch_of_an_interval_is_reported() {
        let start = Instant::now();
        let mut stats = Stats::new(InProcessTransport::default().subscribe().unwrap(), start);
        let mut publish = |source, age: Option<Duration>| {
            let stream = StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 };
            let batch = EventBatch::new(stream, 0, Vec::new());
            let at = age.map(|age| SystemTime::now() - age);
            let batch = at.map_or(batch.clone(), |at| batch.published_at(at));
            stats.take(&wire::encode(&batch).unwrap(), start);
        };
        publish(1, None);
        for age in [90, 600, 30] {
            publish(2, Some(Duration::from_secs(age)));
        }
        let report = stats.count_up(0, 0, start);
        let lag = report.sources[1].lag_s.unwrap();
        assert!((600.0..700.0).contains(&lag), "{lag}");
        assert_eq!((report.sources[0].lag_s, report.lag_s), (None, Some(lag)));
        assert!(render(&report).contains(" ms old at most"), "{}", render(&report));
        assert_eq!(stats.count_up(0, 0, start).lag_s, None, "of the interval alone");
    }

    #[test]
    fn every_stream_of_a_source_has_numbers_of_its_own() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stats = Stats::new(InProcessTransport::default().subscribe().unwrap(), start);
        let payload = |(epoch, shard), numbers: std::ops::Range<u64>| {
            let stream = StreamId { source: SourceId(1), epoch: Epoch(epoch), shard };
            let next = numbers.end;
            let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
            wire::encode(&EventBatch::new(stream, next, events)).unwrap()
        };
        let mut counted = |payload: &[u8], seconds| {
            stats.take(payload, at(seconds));
            let report = stats.count_up(0, 0, at(seconds));
            let source = &report.sources[0];
            (source.joined_at, source.next_sequence, source.events_per_s)
        };
        assert_eq!(
            counted(&payload((1, 1), 3..4), 1),
            (3, 4, 1.0),
            "the volumes, as long as nothing else is known"
        );
        assert_eq!(counted(&payload((1, 0), 50..60), 2), (50, 60, 10.0), "clearings are events too");
        assert_eq!(counted(&payload((1, 1), 4..4), 3), (50, 60, 0.0), "the volumes speak last");
        assert_eq!(
            counted(&payload((1, 0), 50..55), 4),
            (50, 60, 0.0),
            "what comes again takes nothing back"
        );
        assert_eq!(counted(&payload((2, 0), 0..2), 5), (0, 2, 2.0), "a new life");
        assert_eq!(counted(&payload((1, 0), 60..61), 6), (0, 2, 0.0), "the old one is over");
    }

    #[test]
    fn two_processes_of_one_name_are_reported_and_a_lower_life_that_goes_on_alone_is_followed() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stats = Stats::new(InProcessTransport::default().subscribe().unwrap(), start);
        let payload = |epoch, next| {
            let stream = StreamId { source: SourceId(1), epoch: Epoch(epoch), shard: 0 };
            wire::encode(&EventBatch::new(stream, next, Vec::new())).unwrap()
        };
        for second in 0..8 {
            stats.take(&payload(9, 20), at(second));
            stats.take(&payload(4, 30), at(second));
        }
        let report = stats.count_up(0, 0, at(8));
        assert_eq!((report.stale_batches, report.untracked_batches), (8, 0));
        let source = &report.sources[0];
        assert_eq!((source.epoch, source.ignored_epoch, source.next_sequence), (9, Some(4), 20));
        let text = render(&report);
        assert!(text.contains("8 batches of older epochs"), "{text}");
        assert!(text.contains("epoch 9 is followed, epoch 4 is ignored"), "{text}");
        // The higher one ends.
        (8..20).for_each(|second| stats.take(&payload(4, 31), at(second)));
        let report = stats.count_up(0, 0, at(20));
        let source = &report.sources[0];
        assert_eq!((source.epoch, source.ignored_epoch, source.next_sequence), (4, None, 31));
    }
}
