//! A follower's end: receives, decodes, tracks.

use crate::deadline;
use crate::{
    ConflictingEpochs, Delivery, EventReceiver, Payload, SourceId, StreamId, Tracker, TrackerStats,
    TransportError, wire,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Counters of a [`Subscriber`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscriberStats {
    /// Payloads received.
    pub batches: u64,
    /// Payloads that were not a batch of ours; their events show up as gaps.
    pub malformed: u64,
    /// Payloads that this subscriber's own queue dropped because it was read too slowly.
    pub dropped: u64,
    /// What the numbers say.
    pub tracker: TrackerStats,
}

/// Follows every source of a transport. Holds at most what one batch means beyond the transport's
/// own queue.
pub struct Subscriber {
    receiver: Box<dyn EventReceiver>,
    tracker: Tracker,
    ready: VecDeque<Delivery>,
    scratch: Vec<Delivery>,
    batches: u64,
    malformed: u64,
    last_malformed: Option<wire::DecodeError>,
    last_received: BTreeMap<SourceId, Instant>,
}

impl Subscriber {
    /// A follower that has seen nothing yet.
    pub fn new(receiver: Box<dyn EventReceiver>) -> Self {
        Self::with_tracker(receiver, Tracker::default())
    }

    /// A follower that knows what `tracker` has seen, for example after subscribing again.
    pub fn with_tracker(receiver: Box<dyn EventReceiver>, tracker: Tracker) -> Self {
        let (ready, scratch, last_received) = (VecDeque::new(), Vec::new(), BTreeMap::new());
        Self {
            receiver,
            tracker,
            ready,
            scratch,
            batches: 0,
            malformed: 0,
            last_malformed: None,
            last_received,
        }
    }

    /// The next delivery, or `None` when there was none within `timeout`. Heartbeats that report no
    /// loss deliver nothing.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Delivery>, TransportError> {
        let deadline = deadline::after(timeout);
        loop {
            if let Some(delivery) = self.ready.pop_front() {
                return Ok(Some(delivery));
            }
            let left = deadline::remaining(deadline);
            match self.receiver.recv(left)? {
                Some(payload) => self.take(&payload),
                None => return Ok(None),
            }
        }
    }

    /// Tells that a resync has covered `stream` below `next_sequence`; see [`Tracker::resynced`].
    pub fn resynced(&mut self, stream: StreamId, next_sequence: u64) {
        self.ready.extend(self.tracker.resynced(stream, next_sequence));
    }

    /// When the last batch of each followed source arrived; a heartbeat counts.
    pub fn last_received(&self) -> impl Iterator<Item = (SourceId, Instant)> + '_ {
        self.last_received.iter().map(|(source, at)| (*source, *at))
    }

    /// Sources of which two lives publish at the same time; see [`Tracker::conflicting_epochs`].
    pub fn conflicting_epochs(&self) -> impl Iterator<Item = ConflictingEpochs> + '_ {
        self.tracker.conflicting_epochs(Instant::now())
    }

    /// Payloads that wait to be read, where that is known.
    pub fn waiting(&self) -> usize {
        self.receiver.waiting()
    }

    /// Forgets a source; see [`Tracker::forget`].
    pub fn forget(&mut self, source: SourceId) {
        self.last_received.remove(&source);
        self.tracker.forget(source);
    }

    /// Counters so far.
    pub fn stats(&self) -> SubscriberStats {
        SubscriberStats {
            batches: self.batches,
            malformed: self.malformed,
            dropped: self.receiver.dropped(),
            tracker: self.tracker.stats(),
        }
    }

    /// Why the last malformed payload was dropped.
    pub const fn last_malformed(&self) -> Option<&wire::DecodeError> {
        self.last_malformed.as_ref()
    }

    fn take(&mut self, payload: &Payload) {
        self.batches += 1;
        match wire::decode(payload) {
            Ok(batch) => {
                let (stream, now) = (batch.stream, Instant::now());
                self.tracker.accept_at(batch, now, &mut self.scratch);
                // As many as the tracker follows, no more.
                if self.tracker.next_sequence(stream).is_some() {
                    self.last_received.insert(stream.source, now);
                }
                self.ready.extend(self.scratch.drain(..));
            }
            Err(error) => {
                self.malformed += 1;
                self.last_malformed = Some(error);
            }
        }
    }
}
