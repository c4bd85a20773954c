//! From a source's events to batches on a transport.

use crate::encoder::NativeEncoder;
use crate::{
    BatchEncoder, EventBatch, EventTransport, KvEvent, Payload, PublisherWaker, Replacement, SourceId,
    StreamId, TransportError, wire,
};
use kvbm_plan::Epoch;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Where a shard's events come from: a bounded ring that the pool fills.
pub trait EventSource: Send {
    /// Appends at most `max` events to `out`, oldest first, and returns the number that follows the
    /// last event the source has handed out *or lost* so far. Never waits.
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64;

    /// Takes what wakes the publisher's thread. Whether this source will call it, as
    /// [`wake_when`](Self::wake_when) asks; one that does not is looked into every 5 ms at least.
    fn attach(&mut self, waker: PublisherWaker) -> bool {
        drop(waker);
        false
    }

    /// Asks for one call of the waker when `waiting` events wait, or so many that some may soon be
    /// lost: now or later.
    fn wake_when(&mut self, waiting: usize) {
        let _ = waiting;
    }
}

impl<F: FnMut(usize, &mut Vec<KvEvent>) -> u64 + Send> EventSource for F {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        self(max, out)
    }
}

/// When a batch is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublisherConfig {
    /// Most events in a batch: 1 to [`EventBatch::MAX_EVENTS`].
    pub batch_events: usize,
    /// Most encoded bytes of a batch; a single event larger than this travels alone.
    pub batch_bytes: usize,
    /// How long an event waits for company at most: under load, the time between two batches that
    /// are not full. After a quiet time of this length an event goes at once, for no company is to
    /// be expected.
    pub max_age: Duration,
    /// Time between two signs of life of a stream without events.
    pub heartbeat: Duration,
    /// How long one publish may wait for the transport.
    pub publish_timeout: Duration,
}

impl Default for PublisherConfig {
    /// 1,000 events or 256 KiB or 10 ms; a heartbeat each second; 1 s for the transport.
    fn default() -> Self {
        Self {
            batch_events: 1000,
            batch_bytes: 256 << 10,
            max_age: Duration::from_millis(10),
            heartbeat: Duration::from_secs(1),
            publish_timeout: Duration::from_secs(1),
        }
    }
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A value outside its range.
    #[error("event publisher: {field} is {value}, expected {expected}")]
    Range {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// Two sources for one shard would give one number to two events.
    #[error("event publisher: shard {0} has a source already; each shard has exactly one")]
    DuplicateShard(u16),
}

impl PublisherConfig {
    /// Checks every field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let range = |field, value: String, expected| Err(ConfigError::Range { field, value, expected });
        let most = wire::MAX_BYTES - wire::MAX_HEADER_BYTES;
        if !(1..=EventBatch::MAX_EVENTS).contains(&self.batch_events) {
            return range("batch_events", self.batch_events.to_string(), "1 to 4096");
        }
        if !(1..=most).contains(&self.batch_bytes) {
            return range("batch_bytes", self.batch_bytes.to_string(), "1 byte to just below 4 MiB");
        }
        let ten_seconds = Duration::from_secs(10);
        if self.max_age > ten_seconds {
            return range("max_age", format!("{:?}", self.max_age), "at most 10 s");
        }
        if self.heartbeat.is_zero() {
            return range(
                "heartbeat",
                "0".into(),
                "more than 0: without heartbeats a lost tail goes unnoticed",
            );
        }
        if self.publish_timeout > ten_seconds {
            return range("publish_timeout", format!("{:?}", self.publish_timeout), "at most 10 s");
        }
        Ok(())
    }
}

/// Counters of a publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublisherStats {
    /// Events that the transport took.
    pub events: u64,
    /// Batches with events that the transport took.
    pub batches: u64,
    /// Heartbeats that the transport took.
    pub heartbeats: u64,
    /// Bytes that the transport took.
    pub bytes: u64,
    /// Numbers that the sources skipped: events lost in a full ring.
    pub lost_in_source: u64,
    /// Events dropped because they cannot be encoded or the transport refuses them; followers see a
    /// gap.
    pub refused: u64,
    /// Events dropped because the source handed them out again or out of order.
    pub out_of_order: u64,
    /// Times that the transport was unavailable; the batch was kept.
    pub unavailable: u64,
}

/// Gathers the events of one source from its shards and publishes them in batches.
///
/// Call [`pump`](Self::pump) often, or let [`spawn`](Self::spawn) do it on a thread of its own. It
/// never touches the code that makes the events: it drains the rings they were written to.
pub struct EventManager {
    config: PublisherConfig,
    source: SourceId,
    epoch: Epoch,
    transport: Arc<dyn EventTransport>,
    format: Box<dyn BatchEncoder>,
    streams: Vec<Stream>,
    stats: PublisherStats,
}

/// What one [`EventManager::pump`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pumped {
    /// Events published.
    pub events: u64,
    /// Whether full batches were left for the next call.
    pub backlog: bool,
}

struct Stream {
    id: StreamId,
    source: Box<dyn EventSource>,
    /// Whether the source wakes the thread.
    wakes: bool,
    /// Drained, not yet published: at most `batch_events`.
    pending: Vec<KvEvent>,
    /// Encoded, not yet taken by the transport, with the events that each stands for: those of one
    /// batch.
    unsent: VecDeque<(Payload, u64)>,
    /// Last batch.
    last_batch: Option<Instant>,
    /// Last batch or heartbeat.
    last_sent: Option<Instant>,
    /// Number that follows what the source has handed out or lost.
    next_sequence: u64,
    /// Room for the next events, left by a batch that is gone.
    spare: Vec<KvEvent>,
}

impl Stream {
    /// Tops `pending` up to `limit` events.
    fn refill(&mut self, limit: usize, stats: &mut PublisherStats) {
        let room = limit.saturating_sub(self.pending.len());
        if room == 0 {
            return;
        }
        let (before, first) = (self.pending.len(), self.next_sequence);
        let next = self.source.drain(room, &mut self.pending);
        let expected = &mut self.next_sequence;
        let mut disordered = 0;
        for event in &self.pending[before..] {
            if event.sequence < *expected {
                disordered += 1;
                continue;
            }
            stats.lost_in_source += event.sequence - *expected;
            *expected = event.sequence.saturating_add(1);
        }
        if disordered > 0 {
            stats.out_of_order += disordered;
            self.drop_disordered(before, first);
        }
        stats.lost_in_source += next.saturating_sub(self.next_sequence);
        self.next_sequence = self.next_sequence.max(next);
    }

    /// Drops those of `pending` behind the first `kept` whose number is not at least `next` and
    /// above all before.
    fn drop_disordered(&mut self, kept: usize, mut next: u64) {
        let mut at = 0;
        self.pending.retain(|event| {
            at += 1;
            let stays = at <= kept || event.sequence >= next;
            if stays && at > kept {
                next = event.sequence.saturating_add(1);
            }
            stays
        });
    }

    /// Takes the first `count` of `pending`.
    fn take(&mut self, count: usize) -> Vec<KvEvent> {
        if count == self.pending.len() {
            return std::mem::replace(&mut self.pending, std::mem::take(&mut self.spare));
        }
        self.pending.drain(..count).collect()
    }

    /// How long nothing of this stream is due at `now`, unless its source wakes the thread before.
    fn rest(&mut self, config: &PublisherConfig, now: Instant, tick: Duration) -> Duration {
        let left = |since: Option<Instant>, span: Duration| {
            since.map_or(Duration::ZERO, |since| span.saturating_sub(now.saturating_duration_since(since)))
        };
        if !self.wakes || !self.unsent.is_empty() {
            return tick;
        }
        if self.pending.is_empty() {
            self.source.wake_when(1);
            return left(self.last_sent, config.heartbeat);
        }
        // They wait for company; a full batch goes at once.
        self.source.wake_when(config.batch_events.saturating_sub(self.pending.len()));
        left(self.last_batch, config.max_age)
    }

    /// How many of `pending` make the next batch, and whether that is a full one.
    fn next_batch(&self, config: &PublisherConfig) -> (usize, bool) {
        let mut bytes = 0;
        let fits = self.pending.iter().take_while(|event| {
            bytes += wire::max_encoded_len(event);
            bytes <= config.batch_bytes
        });
        let count = fits.count().max(1).min(self.pending.len());
        (count, count >= config.batch_events || count < self.pending.len())
    }
}

impl EventManager {
    /// A manager without shards. `epoch` must be larger than in every earlier life of `source`.
    pub fn new(
        config: PublisherConfig,
        source: SourceId,
        epoch: Epoch,
        transport: Arc<dyn EventTransport>,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        let (streams, stats) = (Vec::new(), PublisherStats::default());
        Ok(Self { config, source, epoch, transport, format: Box::new(NativeEncoder), streams, stats })
    }

    /// Writes batches in another format, for example [`vllm::Publishing`](crate::vllm::Publishing).
    #[must_use]
    pub fn with_format(self, format: impl BatchEncoder + 'static) -> Self {
        Self { format: Box::new(format), ..self }
    }

    /// Adds a shard with its source.
    pub fn add_shard(&mut self, shard: u16, source: impl EventSource + 'static) -> Result<(), ConfigError> {
        if self.streams.iter().any(|stream| stream.id.shard == shard) {
            return Err(ConfigError::DuplicateShard(shard));
        }
        self.streams.push(Stream {
            id: StreamId { source: self.source, epoch: self.epoch, shard },
            source: Box::new(source),
            wakes: false,
            pending: Vec::new(),
            unsent: VecDeque::new(),
            last_batch: None,
            last_sent: None,
            next_sequence: 0,
            spare: Vec::new(),
        });
        Ok(())
    }

    /// Counters so far.
    pub const fn stats(&self) -> PublisherStats {
        self.stats
    }

    /// The configuration.
    pub const fn config(&self) -> &PublisherConfig {
        &self.config
    }

    /// Drains the sources and publishes what is due at `now`: full batches, others when `max_age`
    /// has passed since the last, heartbeats. At most [`Self::MAX_BATCHES_PER_PUMP`] batches per
    /// shard, so that no shard starves another.
    ///
    /// On an error the batch is kept for the next call and the other shards wait as well.
    pub fn pump(&mut self, now: Instant) -> Result<Pumped, TransportError> {
        self.pass(now, false)
    }

    /// Publishes everything that the sources hold, whatever its age. Ends after `timeout` with what
    /// is left kept.
    pub fn flush(&mut self, timeout: Duration) -> Result<Pumped, TransportError> {
        let start = Instant::now();
        let mut total = Pumped::default();
        loop {
            let pass = self.pass(Instant::now(), true)?;
            total.events += pass.events;
            total.backlog = pass.backlog;
            if !pass.backlog || start.elapsed() >= timeout {
                return Ok(total);
            }
        }
    }

    /// Gives each source what wakes the thread that pumps.
    #[cfg_attr(kvbm_sim, allow(dead_code, reason = "a simulation has no threads"))]
    pub(crate) fn attach(&mut self, waker: &PublisherWaker) {
        for stream in &mut self.streams {
            stream.wakes = stream.source.attach(waker.clone());
        }
    }

    /// How long nothing is due at `now`, unless a source wakes the thread before. Where nobody
    /// listens, events wait for the next heartbeat, or until their source is half full.
    pub(crate) fn rest(&mut self, now: Instant, tick: Duration) -> Duration {
        let heartbeat = self.config.heartbeat;
        if !self.transport.has_listeners() {
            self.streams.iter_mut().for_each(|stream| stream.source.wake_when(usize::MAX));
            return heartbeat;
        }
        let config = self.config;
        self.streams.iter_mut().map(|stream| stream.rest(&config, now, tick)).min().unwrap_or(heartbeat)
    }

    /// Most batches of one shard in one pump.
    pub const MAX_BATCHES_PER_PUMP: usize = 16;

    fn pass(&mut self, now: Instant, force: bool) -> Result<Pumped, TransportError> {
        let before = self.stats.events;
        let mut backlog = false;
        for index in 0..self.streams.len() {
            backlog |= self.pump_shard(index, now, force)?;
        }
        Ok(Pumped { events: self.stats.events - before, backlog })
    }

    /// Publishes what is due in one shard; whether a batch that is due was left.
    fn pump_shard(&mut self, index: usize, now: Instant, force: bool) -> Result<bool, TransportError> {
        self.retry(index)?;
        for _ in 0..Self::MAX_BATCHES_PER_PUMP {
            let stream = &mut self.streams[index];
            stream.refill(self.config.batch_events, &mut self.stats);
            let (count, full) = stream.next_batch(&self.config);
            // The load decides: a stream that has just told something has more to tell soon.
            let aged = stream
                .last_batch
                .is_none_or(|last| now.saturating_duration_since(last) >= self.config.max_age);
            if count == 0 {
                let quiet =
                    |last_sent: Instant| now.saturating_duration_since(last_sent) >= self.config.heartbeat;
                if stream.last_sent.is_none_or(quiet) {
                    self.publish(index, 0, now)?;
                }
                return Ok(false);
            }
            if !(full || aged || force) {
                return Ok(false);
            }
            self.publish(index, count, now)?;
        }
        Ok(true)
    }

    /// Publishes the first `count` pending events, or a heartbeat for none.
    fn publish(&mut self, index: usize, count: usize, now: Instant) -> Result<(), TransportError> {
        self.retry(index)?;
        let stream = &mut self.streams[index];
        let events = stream.take(count);
        let next_sequence = match (stream.pending.is_empty(), events.last()) {
            // What follows is still here, so nothing behind this batch is known to be lost.
            (false, Some(last)) => last.sequence.saturating_add(1),
            _ => stream.next_sequence,
        };
        let mut batch = EventBatch::new(stream.id, next_sequence, events).published_at(SystemTime::now());
        let mut payloads = Vec::new();
        let sent = match self.format.encode(&batch, &mut payloads) {
            Ok(()) => {
                self.streams[index].unsent.extend(counted(payloads, count as u64));
                self.send_unsent(index)
            }
            Err(error) => {
                let (transport, reason) = (self.transport.name(), error.to_string());
                Err((TransportError::Refused { transport, reason }, count as u64))
            }
        };
        let stream = &mut self.streams[index];
        stream.last_sent = Some(now);
        if count > 0 {
            stream.last_batch = Some(now);
        }
        let done = match sent {
            Ok(()) => Ok(()),
            Err((TransportError::Refused { .. }, _)) if count > 1 && self.format.is_repeatable() => {
                // One event may spoil the batch: halve it until only that one is lost.
                self.give_back(index, std::mem::take(&mut batch.events));
                self.publish(index, count / 2, now)?;
                self.publish(index, count - count / 2, now)
            }
            Err((TransportError::Refused { .. }, events)) => {
                self.stats.refused += events;
                Ok(())
            }
            Err((error, _)) => Err(error),
        };
        batch.events.clear();
        self.streams[index].spare = batch.events;
        done
    }

    /// Hands over what is encoded. What the transport cannot take now stays for the next call; what
    /// it refuses is dropped: so many events.
    fn send_unsent(&mut self, index: usize) -> Result<(), (TransportError, u64)> {
        while let Some((payload, events)) = self.streams[index].unsent.pop_front() {
            match self.transport.publish(&payload, self.config.publish_timeout) {
                Ok(()) => self.stats.sent(events, payload.len() as u64),
                Err(refused @ TransportError::Refused { .. }) if self.format.is_repeatable() => {
                    return Err((refused, events));
                }
                Err(TransportError::Refused { .. }) => self.say_otherwise(index, &payload, events),
                Err(error) => {
                    self.stats.unavailable += 1;
                    self.streams[index].unsent.push_front((payload, events));
                    return Err((error, 0));
                }
            }
        }
        Ok(())
    }

    /// Replaces what the transport refuses by what the format says instead of it.
    fn say_otherwise(&mut self, index: usize, payload: &[u8], events: u64) {
        let unsent = &mut self.streams[index].unsent;
        match self.format.refused(payload) {
            Replacement::Smaller(smaller) if !smaller.is_empty() => {
                let smaller: Vec<_> = counted(smaller, events).collect();
                smaller.into_iter().rev().for_each(|payload| unsent.push_front(payload));
            }
            Replacement::Smaller(_) => self.stats.refused += events,
            Replacement::Nothing { events: lost } => {
                // The last payload of a batch carries its events.
                if let Some((_, of_batch)) = unsent.back_mut() {
                    self.stats.refused += lost.min(*of_batch);
                    *of_batch = of_batch.saturating_sub(lost);
                } else {
                    self.stats.refused += lost.min(events);
                    self.stats.events += events.saturating_sub(lost);
                }
            }
        }
    }

    /// Hands over what an earlier call could not.
    fn retry(&mut self, index: usize) -> Result<(), TransportError> {
        loop {
            match self.send_unsent(index) {
                Ok(()) => return Ok(()),
                Err((TransportError::Refused { .. }, events)) => self.stats.refused += events,
                Err((error, _)) => return Err(error),
            }
        }
    }

    fn give_back(&mut self, index: usize, events: Vec<KvEvent>) {
        self.streams[index].pending.splice(..0, events);
    }
}

/// The payloads of a batch. Its events count once, with the last of them.
fn counted(payloads: Vec<Vec<u8>>, events: u64) -> impl Iterator<Item = (Payload, u64)> {
    let last = payloads.len().saturating_sub(1);
    let count = move |at: usize| if at == last { events } else { 0 };
    payloads.into_iter().enumerate().map(move |(at, payload)| (payload.into(), count(at)))
}

impl PublisherStats {
    fn sent(&mut self, events: u64, bytes: u64) {
        self.events += events;
        self.bytes += bytes;
        if events == 0 {
            self.heartbeats += 1;
        } else {
            self.batches += 1;
        }
    }
}
