//! Following a URL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use kvbm::config::Secret;
#[cfg(not(feature = "zmq"))]
use kvbm::events_plane::url::UrlError;
use kvbm::events_plane::url::{EventRole, OpenError, PayloadFormat};
use kvbm::events_plane::{EventReceiver, EventTransport, EventUrl, TransportError};

#[cfg(feature = "zmq")]
use super::engines::Engines;
use crate::args::events_url;
use crate::interrupt;
use crate::number::whole;

/// Longest time that one attempt takes: how long a command may be deaf to Ctrl-C.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// How often a command that follows looks whether it was asked to stop.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Whom to follow.
#[derive(Clone, Debug, Args)]
pub struct FollowArgs {
    /// Where the events are published, like `nats://127.0.0.1:4222` (docs/events.md).
    #[arg(value_name = "URL", value_parser = events_url)]
    pub url: Secret,

    /// How long to wait for the other side where it is not there yet.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, allow_negative_numbers = true, value_parser = whole::<u32>(0..=86_400))]
    pub wait: u32,
}

/// Who publishes at a URL.
pub(super) enum Source {
    /// kvbm, or whoever speaks its format.
    Kvbm(Arc<dyn EventTransport>, Box<dyn EventReceiver>),
    /// Engines, in a format of their own (`format=vllm`).
    #[cfg(feature = "zmq")]
    Engines(Engines),
}

/// Starts to collect what is published.
pub(super) fn open(args: &FollowArgs) -> Result<(EventUrl, Source)> {
    let url: EventUrl = args.url.text().parse()?;
    let deadline = kvbm::plan::deadline_after(Instant::now(), Duration::from_secs(args.wait.into()));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match subscribe(&url, left.clamp(PAUSE, ATTEMPT)) {
            Ok(source) => return Ok((url, source)),
            // Not there yet, and neither the URL nor the login is wrong.
            Err(OpenError::Transport(TransportError::Unavailable { .. }))
                if left > PAUSE && !interrupt::asked() =>
            {
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                let is_absent = matches!(error, OpenError::Transport(TransportError::Unavailable { .. }));
                let hint = "check that the other side is up and that the URL is its address, or give it more time with --wait";
                let what = format!("cannot follow {url}");
                return Err(error).context(if is_absent { format!("{what}: {hint}") } else { what });
            }
        }
    }
}

fn subscribe(url: &EventUrl, patience: Duration) -> Result<Source, OpenError> {
    if url.format() == PayloadFormat::Vllm {
        return engines(url, patience);
    }
    let transport = url.open(EventRole::Subscriber, patience)?;
    let receiver = transport.subscribe()?;
    Ok(Source::Kvbm(transport, receiver))
}

#[cfg(feature = "zmq")]
fn engines(url: &EventUrl, patience: Duration) -> Result<Source, OpenError> {
    Ok(Source::Engines(Engines::open(url.open_messages(patience)?)?))
}

/// Engines publish over `ZeroMQ` alone.
#[cfg(not(feature = "zmq"))]
fn engines(_url: &EventUrl, _patience: Duration) -> Result<Source, OpenError> {
    Err(UrlError::NotBuilt { scheme: "zmq+tcp".into(), feature: "zmq" }.into())
}
