//! Following a URL.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::config::Secret;
use kvbm::events_plane::url::{PayloadFormat, Side};
use kvbm::events_plane::{EventReceiver, EventTransport, EventUrl};

/// Longest time for the other side to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a command that follows looks whether it was asked to stop.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The subscribing end of what `url` names.
pub(super) fn open(url: &Secret) -> Result<(EventUrl, Arc<dyn EventTransport>)> {
    let url: EventUrl = url.expose().parse()?;
    anyhow::ensure!(
        url.format() == PayloadFormat::Kvbm,
        "this reads kvbm's own events: leave format=vllm out; `kvbm events decode --format vllm` reads a message of an engine"
    );
    let transport = url.open(Side::Subscriber, PATIENCE).with_context(|| hint(&url))?;
    Ok((url, transport))
}

/// Starts to collect what is published.
pub(super) fn subscribe(url: &EventUrl, transport: &dyn EventTransport) -> Result<Box<dyn EventReceiver>> {
    transport.subscribe().with_context(|| hint(url))
}

fn hint(url: &EventUrl) -> String {
    format!("cannot follow {url}: check that the other side is up and that the URL is its address")
}
