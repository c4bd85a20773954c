//! From a URL to the advisor.

use crate::Advisor;
use kvbm_events::url::EventRole;
use kvbm_events::{
    Delivery, EventTransport, EventUrl, RemoteSnapshots, Resync, SnapshotSource, SourceId, StreamId,
    StreamRepair, Subscriber, TransportError,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An advisor that listens.
pub struct Following<S = RemoteSnapshots> {
    /// What it knows.
    pub advisor: Advisor,
    subscriber: Subscriber,
    snapshots: S,
    resync: Resync,
    /// Events below these numbers are in a snapshot already, although they were still on their way.
    covered: BTreeMap<StreamId, u64>,
    forget_after: Duration,
}

/// How long it waits for events at most while a snapshot is under way.
const SOON: Duration = Duration::from_millis(5);

/// How long a source may be silent by default; with its heartbeats it speaks every second.
pub const FORGET_AFTER: Duration = Duration::from_secs(30);

/// Starts to listen to `url`.
pub fn follow(url: &EventUrl, advisor: Advisor) -> Result<Following, kvbm_events::url::OpenError> {
    let transport: Arc<dyn EventTransport> = url.open(EventRole::Subscriber, Duration::from_secs(5))?;
    let subscriber = Subscriber::new(transport.subscribe()?);
    Ok(Following::new(subscriber, RemoteSnapshots::new(transport), advisor))
}

impl<S: SnapshotSource> Following<S> {
    /// Listens to `subscriber`, with snapshots from `snapshots`.
    pub fn new(subscriber: Subscriber, snapshots: S, advisor: Advisor) -> Self {
        let (resync, covered) = (Resync::default(), BTreeMap::new());
        Self { advisor, subscriber, snapshots, resync, covered, forget_after: FORGET_AFTER }
    }

    /// Forgets a source that was not heard of for so long, zero for never.
    #[must_use]
    pub fn forget_after(self, silence: Duration) -> Self {
        Self { forget_after: silence, ..self }
    }

    /// Takes in what comes within `time`, and forgets those that have been silent for too long by
    /// then.
    pub fn listen(&mut self, time: Duration) -> Result<(), TransportError> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let patience = if self.resync.is_empty() { left } else { left.min(SOON) };
            if let Some(delivery) = self.subscriber.next(patience)? {
                self.take(&delivery);
            }
            self.repair();
            if left.is_zero() {
                self.forget_silent();
                return Ok(());
            }
        }
    }

    /// Streams of which something is missing until their source has answered.
    pub fn suspects(&self) -> usize {
        self.resync.suspects().count()
    }

    fn take(&mut self, delivery: &Delivery) {
        let covered = |stream| self.covered.get(stream).copied().unwrap_or(0);
        match delivery {
            Delivery::Events { stream, events } => {
                let fresh = events.partition_point(|event| event.sequence < covered(stream));
                let over =
                    events.last().is_some_and(|last| last.sequence.saturating_add(1) >= covered(stream));
                self.advisor.apply(*stream, &events[fresh..], Instant::now());
                if over {
                    self.covered.remove(stream);
                }
                self.resync.note(delivery);
            }
            Delivery::Gap { stream, missing } => {
                if missing.end > covered(stream) {
                    self.resync.note(delivery);
                }
            }
            Delivery::Restarted { source, .. } => self.drop_source(*source),
        }
    }

    /// A source that does not answer is asked again later; what it says meanwhile is still taken
    /// in.
    fn repair(&mut self) {
        for StreamRepair { stream, snapshot, since } in self.resync.ask(&mut self.snapshots) {
            self.advisor.replace(stream, &snapshot, &since, Instant::now());
            self.covered.insert(stream, snapshot.next_sequence);
            self.subscriber.resynced(stream, snapshot.next_sequence);
        }
    }

    /// What a dead source held is nobody's to move.
    fn forget_silent(&mut self) {
        if self.forget_after.is_zero() {
            return;
        }
        let heard = self.subscriber.last_received();
        let silent: Vec<_> =
            heard.filter(|(_, at)| at.elapsed() > self.forget_after).map(|(source, _)| source).collect();
        for source in silent {
            self.subscriber.forget(source);
            self.drop_source(source);
        }
    }

    fn drop_source(&mut self, source: SourceId) {
        self.advisor.forget(source);
        self.resync.forget(source, &mut self.snapshots);
        self.covered.retain(|stream, _| stream.source != source);
    }
}
