//! Counting messages of engines.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::events_plane::vllm::{Continuity, EngineEvent};

use super::Counting;
use super::report::{Report, Source};
use crate::events::engines::{Engines, Listener, Spoken, age};

/// What engines said so far.
pub(super) struct Stats {
    listener: Listener,
    counts: Counts,
}

/// What was counted; see [`Report`].
struct Counts {
    engines: Vec<Engine>,
    bytes: u64,
    messages: u64,
    gaps: u64,
    malformed: u64,
    /// Bytes and messages of the last report, and when it was.
    before: [u64; 2],
    since: Instant,
}

struct Engine {
    address: String,
    events: u64,
    stores: u64,
    removes: u64,
    missing: u64,
    joined_at: u64,
    next: u64,
    lives: u64,
    /// Events of the last report.
    before: u64,
    lag: Option<f64>,
    last: Option<Instant>,
}

impl Stats {
    pub(super) fn new(engines: Engines, now: Instant) -> Self {
        let counts = Counts::new(&engines.addresses, now);
        Self { listener: Listener::new(engines), counts }
    }
}

impl Counting for Stats {
    fn poll(&mut self, wait: Duration) -> Result<()> {
        if let Some(spoken) = self.listener.next(wait)? {
            self.counts.take(&spoken, Instant::now());
        }
        Ok(())
    }

    fn report(&mut self, now: Instant) -> Report {
        let engines = self.listener.engines();
        let (dropped, waiting) = (engines.dropped(), engines.waiting());
        Report { dropped, lag_batches: waiting, ..self.counts.report(now) }
    }
}

impl Counts {
    fn new(addresses: &[String], now: Instant) -> Self {
        let engine = |address: &String| Engine {
            address: address.clone(),
            events: 0,
            stores: 0,
            removes: 0,
            missing: 0,
            joined_at: 0,
            next: 0,
            lives: 0,
            before: 0,
            lag: None,
            last: None,
        };
        let engines = addresses.iter().map(engine).collect();
        let (bytes, messages, before) = (0, 0, [0; 2]);
        Self { engines, bytes, messages, gaps: 0, malformed: 0, before, since: now }
    }

    fn take(&mut self, spoken: &Spoken, now: Instant) {
        self.bytes += spoken.bytes as u64;
        self.messages += 1;
        let Some(engine) = self.engines.get_mut(spoken.engine) else { return };
        if engine.last.replace(now).is_none() {
            engine.joined_at = spoken.sequence;
        }
        match &spoken.continuity {
            Continuity::Next => {}
            Continuity::Gap { missing } => {
                self.gaps += 1;
                engine.missing += missing.end - missing.start;
            }
            Continuity::Restarted { .. } => {
                (engine.lives, engine.joined_at) = (engine.lives + 1, 0);
                engine.missing += spoken.sequence;
            }
        }
        engine.next = spoken.sequence.saturating_add(1);
        let Ok(batch) = &spoken.batch else {
            self.malformed += 1;
            return;
        };
        let lag = age(batch.timestamp);
        engine.lag = Some(engine.lag.map_or(lag, |longest| longest.max(lag)));
        engine.events += batch.events.len() as u64;
        for event in &batch.events {
            match event {
                EngineEvent::Stored(stored) => engine.stores += stored.block_hashes.len() as u64,
                EngineEvent::Removed(removed) => engine.removes += removed.block_hashes.len() as u64,
                EngineEvent::AllBlocksCleared | EngineEvent::Unknown(_) => {}
            }
        }
    }

    fn report(&mut self, now: Instant) -> Report {
        let seconds = now.saturating_duration_since(self.since).max(Duration::from_millis(1)).as_secs_f64();
        let rate = |now: u64, before: u64| (now - before) as f64 / seconds;
        let silent = |last: Option<Instant>| now.saturating_duration_since(last.unwrap_or(self.since));
        let active = self.engines.iter().filter(|engine| engine.last.is_some());
        let sources: Vec<Source> = active
            .map(|engine| Source {
                name: engine.address.clone(),
                epoch: engine.lives,
                ignored_epoch: None,
                events_per_s: rate(engine.events, engine.before),
                stores: engine.stores,
                removes: engine.removes,
                missing: engine.missing,
                joined_at: engine.joined_at,
                next_sequence: engine.next,
                silent_s: silent(engine.last).as_secs_f64(),
                lag_s: engine.lag,
            })
            .collect();
        let events = |of: fn(&Engine) -> u64| self.engines.iter().map(of).sum::<u64>();
        let (sum, before) = (events(|engine| engine.events), events(|engine| engine.before));
        let [bytes, messages] = std::mem::replace(&mut self.before, [self.bytes, self.messages]);
        let report = Report {
            events_per_s: rate(sum, before),
            bytes_per_s: rate(self.bytes, bytes),
            batches_per_s: rate(self.messages, messages),
            events: sum,
            gaps: self.gaps,
            missing: events(|engine| engine.missing),
            // A message comes once: what a replay and a connection both have is handed on once.
            duplicates: 0,
            malformed: self.malformed,
            dropped: 0,
            stale_batches: 0,
            untracked_batches: 0,
            lag_batches: 0,
            lag_s: self.engines.iter().filter_map(|engine| engine.lag).reduce(f64::max),
            sources,
        };
        self.since = now;
        for engine in &mut self.engines {
            (engine.before, engine.lag) = (engine.events, None);
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::render;
    use super::*;
    use kvbm::events_plane::vllm::{self, BlockRemoved, EngineBatch, EngineHash};

    fn spoken(engine: usize, sequence: u64, continuity: Continuity, timestamp: f64) -> Spoken {
        let hashes = (0..3).map(EngineHash::Uint).collect();
        let event = EngineEvent::Removed(BlockRemoved { block_hashes: hashes, ..BlockRemoved::default() });
        let batch = EngineBatch { timestamp, events: vec![event.clone(), event], data_parallel_rank: None };
        let bytes = vllm::encode(&batch).len();
        Spoken { engine, topic: String::new(), sequence, continuity, bytes, batch: Ok(batch) }
    }

    #[test]
    fn rates_losses_lag_and_lives_are_reported_for_each_engine() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut counts = Counts::new(&["tcp://a:1".into(), "tcp://b:1".into()], start);
        let now = age(0.0);
        counts.take(&spoken(0, 3, Continuity::Next, now - 2.0), at(1));
        counts.take(&spoken(0, 8, Continuity::Gap { missing: 4..8 }, now), at(1));
        let report = counts.report(at(2));
        assert_eq!((report.events, report.events_per_s, report.batches_per_s), (4, 2.0, 1.0));
        assert_eq!((report.gaps, report.missing, report.duplicates), (1, 4, 0));
        assert!((2.0..20.0).contains(&report.lag_s.unwrap()), "{:?}", report.lag_s);
        assert_eq!((report.sources.len(), report.sources[0].removes), (1, 12), "the other was not heard of");
        assert_eq!((report.sources[0].joined_at, report.sources[0].next_sequence), (3, 9));
        assert!(render(&report).contains(" ms old at most\n"), "{}", render(&report));
        let mut broken = spoken(1, 2, Continuity::Restarted { expected: 9 }, now);
        broken.batch = vllm::decode(b"no");
        counts.take(&broken, at(3));
        let report = counts.report(at(4));
        assert_eq!((report.events_per_s, report.malformed, report.lag_s), (0.0, 1, None));
        assert_eq!((report.sources[1].epoch, report.sources[0].silent_s), (1, 3.0));
        assert_eq!((report.sources[1].missing, report.sources[1].joined_at), (2, 0), "what it said before");
    }
}
