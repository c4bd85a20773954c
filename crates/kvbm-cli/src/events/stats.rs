//! `kvbm events stats`: rates, losses, lag.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use kvbm::config::Secret;
use kvbm::events_plane::{Delivery, EventBatch, EventKind, SourceId, Tracker, wire};
use serde::Serialize;

use super::follow;
use crate::args::events_url;
use crate::human::count;
use crate::interrupt;
use crate::table::Table;

/// Options of `kvbm events stats`.
#[derive(Clone, Debug, Args)]
pub struct StatsArgs {
    /// Where the events are published, like `nats://127.0.0.1:4222` (docs/events.md).
    #[arg(value_name = "URL", value_parser = events_url)]
    pub url: Secret,

    /// Seconds between two reports.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,

    /// Stop after N reports [default: on Ctrl-C].
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// One JSON value a line.
    #[arg(long)]
    pub json: bool,
}

/// One report: the last interval, and sums since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Report {
    /// Events per second in the interval.
    pub events_per_s: f64,
    /// Bytes per second in the interval.
    pub bytes_per_s: f64,
    /// Batches with events per second in the interval.
    pub batches_per_s: f64,
    /// Events since the start.
    pub events: u64,
    /// Times that events were missing, since the start.
    pub gaps: u64,
    /// Events that were missing, since the start.
    pub missing: u64,
    /// Events that came again, since the start.
    pub duplicates: u64,
    /// Payloads that were no batch, since the start.
    pub malformed: u64,
    /// Batches that this reader was too slow for, since the start.
    pub dropped: u64,
    /// Batches that wait to be read: how far this reader is behind.
    pub lag_batches: usize,
    /// Who publishes.
    pub sources: Vec<Source>,
}

/// One publisher.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Source {
    /// Its name in events.
    #[serde(rename = "source")]
    pub name: String,
    /// Its life.
    pub epoch: u64,
    /// Events per second in the interval.
    pub events_per_s: f64,
    /// Blocks stored since the start.
    pub stores: u64,
    /// Blocks removed since the start.
    pub removes: u64,
    /// Events that were missing, since the start.
    pub missing: u64,
    /// Number of its next event.
    pub next_sequence: u64,
    /// Seconds since it was last heard of; a heartbeat comes every second unless configured otherwise.
    pub silent_s: f64,
}

/// What is known of a publisher.
struct Heard {
    epoch: u64,
    stores: u64,
    removes: u64,
    missing: u64,
    next_sequence: u64,
    before: u64,
    last: Instant,
}

/// Prints to `out` until it was asked to stop.
pub(super) fn run(args: &StatsArgs, out: &mut dyn Write) -> Result<()> {
    interrupt::catch();
    let (url, transport) = follow::open(&args.url)?;
    let mut receiver = follow::subscribe(&url, transport.as_ref())?;
    eprintln!("following {url}");
    let interval = Duration::from_secs(u64::from(args.interval));
    let mut stats = Stats::new(Instant::now());
    let mut due = Instant::now() + interval;
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 && !interrupt::asked() {
        let wait = due.saturating_duration_since(Instant::now()).min(follow::TICK);
        if let Some(payload) = receiver.recv(wait)? {
            stats.take(&payload, Instant::now());
        }
        let now = Instant::now();
        if now >= due {
            let report = stats.report(receiver.dropped(), receiver.waiting(), now);
            if args.json {
                writeln!(out, "{}", serde_json::to_string(&report)?)?;
            } else {
                write!(out, "{}", render(&report))?;
            }
            out.flush()?;
            (due, left) = (now + interval, left - 1);
        }
    }
    Ok(())
}

/// What was heard so far.
struct Stats {
    tracker: Tracker,
    sources: BTreeMap<SourceId, Heard>,
    deliveries: Vec<Delivery>,
    bytes: u64,
    batches: u64,
    malformed: u64,
    /// Events, bytes and batches of the last report, and when it was.
    before: [u64; 3],
    since: Instant,
}

/// Publishers that are told one by one; more are only in the sums.
const MAX_SOURCES: usize = 1024;

impl Stats {
    fn new(now: Instant) -> Self {
        Self {
            tracker: Tracker::default(),
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
        let (source, epoch, next) = (batch.stream.source, batch.stream.epoch.0, batch.next_sequence);
        self.tracker.accept(batch, &mut self.deliveries);
        if self.sources.len() >= MAX_SOURCES && !self.sources.contains_key(&source) {
            self.deliveries.clear();
            return;
        }
        let heard = self.sources.entry(source).or_insert(Heard {
            epoch,
            stores: 0,
            removes: 0,
            missing: 0,
            next_sequence: 0,
            before: 0,
            last: now,
        });
        (heard.epoch, heard.last) = (heard.epoch.max(epoch), now);
        heard.next_sequence = if epoch == heard.epoch { next } else { heard.next_sequence };
        for delivery in self.deliveries.drain(..) {
            match delivery {
                Delivery::Events { events, .. } => {
                    let stores =
                        events.iter().filter(|event| matches!(event.kind, EventKind::Store(_))).count();
                    let removes =
                        events.iter().filter(|event| matches!(event.kind, EventKind::Remove(_))).count();
                    heard.stores += stores as u64;
                    heard.removes += removes as u64;
                }
                Delivery::Gap { missing, .. } => heard.missing += missing.end - missing.start,
                Delivery::Restarted { .. } => {}
            }
        }
    }

    fn report(&mut self, dropped: u64, lag_batches: usize, now: Instant) -> Report {
        let seconds = now.saturating_duration_since(self.since).max(Duration::from_millis(1)).as_secs_f64();
        let rate = |now: u64, before: u64| (now - before) as f64 / seconds;
        let tracker = self.tracker.stats();
        let sources = self.sources.iter_mut().map(|(source, heard)| {
            let events = heard.stores + heard.removes;
            let before = std::mem::replace(&mut heard.before, events);
            Source {
                name: source.to_string(),
                epoch: heard.epoch,
                events_per_s: rate(events, before),
                stores: heard.stores,
                removes: heard.removes,
                missing: heard.missing,
                next_sequence: heard.next_sequence,
                silent_s: now.saturating_duration_since(heard.last).as_secs_f64(),
            }
        });
        let sources = sources.collect();
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
            lag_batches,
            sources,
        }
    }
}

fn render(report: &Report) -> String {
    let mut text = format!(
        "{} events/s, {} batches/s, {}/s; in all {} events, {} missing in {} gaps, {} repeated; {} batches behind\n",
        count(report.events_per_s as u64),
        count(report.batches_per_s as u64),
        crate::human::bytes(report.bytes_per_s as u64),
        count(report.events),
        count(report.missing),
        count(report.gaps),
        count(report.duplicates),
        count(report.lag_batches as u64),
    );
    if report.malformed + report.dropped > 0 {
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "  {} payloads were no batch, {} came too fast", report.malformed, report.dropped);
    }
    let mut table = Table::new(["source", "events/s", "stored", "removed", "missing", "silent"]);
    for source in &report.sources {
        table.row([
            source.name.clone(),
            count(source.events_per_s as u64),
            count(source.stores),
            count(source.removes),
            count(source.missing),
            format!("{:.1} s", source.silent_s),
        ]);
    }
    if !report.sources.is_empty() {
        text += &table.render();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::events_plane::{KvEvent, StreamId};
    use kvbm::plan::Epoch;

    #[test]
    fn rates_losses_and_silence_are_told_for_each_source() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stats = Stats::new(start);
        let payload = |source, numbers: std::ops::Range<u64>, next| {
            let stream = StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 };
            let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
            wire::encode(&EventBatch::new(stream, next, events)).unwrap()
        };
        stats.take(&payload(1, 0..10, 10), at(1));
        stats.take(&payload(2, 4..6, 6), at(1));
        stats.take(b"nonsense", at(1));
        let report = stats.report(0, 3, at(2));
        assert_eq!((report.events, report.missing, report.gaps, report.malformed), (12, 4, 1, 1));
        assert_eq!((report.events_per_s, report.lag_batches, report.sources.len()), (6.0, 3, 2));
        assert_eq!((report.sources[1].missing, report.sources[1].next_sequence), (4, 6));
        // A heartbeat tells of a lost tail.
        stats.take(&payload(1, 10..10, 12), at(3));
        let report = stats.report(0, 0, at(4));
        assert_eq!((report.events_per_s, report.missing), (0.0, 6));
        assert_eq!(report.sources.iter().map(|source| source.silent_s).collect::<Vec<_>>(), [1.0, 3.0]);
        let text = render(&report);
        assert!(text.contains("6 missing in 2 gaps") && text.contains("0000000000000002"), "{text}");
    }
}
