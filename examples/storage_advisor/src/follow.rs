//! From a URL to the advisor.

use crate::Advisor;
use kvbm_events::url::Side;
use kvbm_events::{
    Delivery, EventTransport, EventUrl, RemoteSnapshots, SnapshotSource, StreamId, Subscriber, TransportError,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An advisor that listens.
pub struct Following {
    /// What it knows.
    pub advisor: Advisor,
    subscriber: Subscriber,
    snapshots: RemoteSnapshots,
    /// Streams that lost something, and how far a snapshot has to reach.
    suspects: BTreeMap<StreamId, u64>,
}

/// Starts to listen to `url`.
pub fn follow(url: &EventUrl, advisor: Advisor) -> Result<Following, kvbm_events::url::OpenError> {
    let transport: Arc<dyn EventTransport> = url.open(Side::Subscriber, Duration::from_secs(5))?;
    let subscriber = Subscriber::new(transport.subscribe()?);
    let snapshots = RemoteSnapshots::new(transport);
    Ok(Following { advisor, subscriber, snapshots, suspects: BTreeMap::new() })
}

impl Following {
    /// Takes in what comes within `time`.
    pub fn listen(&mut self, time: Duration) -> Result<(), TransportError> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.subscriber.next(left)? {
                Some(Delivery::Events { stream, events }) => {
                    self.advisor.apply(stream, &events, Instant::now());
                }
                Some(Delivery::Gap { stream, missing }) => drop(self.suspects.insert(stream, missing.end)),
                Some(Delivery::Restarted { source, .. }) => {
                    self.advisor.forget(source);
                    self.suspects.retain(|stream, _| stream.source != source);
                }
                None => {}
            }
            self.repair();
            if left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Streams of which something is missing until their source has answered.
    pub fn suspects(&self) -> usize {
        self.suspects.len()
    }

    fn repair(&mut self) {
        let Some((stream, reach)) = self.suspects.iter().next().map(|(stream, reach)| (*stream, *reach))
        else {
            return;
        };
        // A source that does not answer is asked again later; what it says meanwhile is still taken in.
        let Some(snapshot) = self.snapshots.snapshot(stream, reach) else { return };
        self.advisor.replace(stream, &snapshot, Instant::now());
        self.subscriber.resynced(stream, snapshot.next_sequence);
        self.suspects.remove(&stream);
    }
}
