//! The seam to whatever carries batches.

use crate::SourceId;
use std::sync::Arc;
use std::time::Duration;

/// An encoded batch, shared by everyone who has yet to read it.
pub type Payload = Arc<[u8]>;

/// Why a transport did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Cannot take the payload now; nothing was sent, or it may have been. Publish it again:
    /// followers drop repeats.
    #[error("event transport '{transport}' is unavailable: {reason} (worth another attempt)")]
    Unavailable {
        /// Implementer.
        transport: &'static str,
        /// What happened.
        reason: String,
    },
    /// Will never take this payload. Followers see its events as a gap.
    #[error(
        "event transport '{transport}' refuses the payload: {reason}; lower the publisher's batch limits"
    )]
    Refused {
        /// Implementer.
        transport: &'static str,
        /// What happened.
        reason: String,
    },
    /// Configured for what it cannot do.
    #[error("event transport '{transport}' cannot do this: {reason}")]
    Config {
        /// Implementer.
        transport: &'static str,
        /// What is wrong, and what is right.
        reason: String,
    },
    /// The other side is gone and nothing more will come; subscribe again.
    #[error("event transport '{transport}' is closed: subscribe again")]
    Closed {
        /// Implementer.
        transport: &'static str,
    },
}

/// Carries payloads from publishers to subscribers.
///
/// The contract, checked by [`crate::conformance`]:
///
/// - Payloads arrive unchanged. Those that one thread published arrive in that order. Any may be
///   lost or repeated.
/// - No call waits much longer than its `timeout`.
/// - A subscriber sees what is published after [`subscribe`](Self::subscribe) returned.
/// - Queues are bounded, and a slow subscriber costs only itself.
/// - Questions find who answers for their source, from any end of the transport.
pub trait EventTransport: Send + Sync {
    /// Name of the implementer, for errors and metrics.
    fn name(&self) -> &'static str;

    /// Addresses of its own where subscribers reach it, with the ports that it got; none where all
    /// go through a server or stay in this process.
    fn listens_at(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether anybody may read what is published now. Where nobody does, a publisher sleeps.
    fn has_listeners(&self) -> bool {
        true
    }

    /// Most bytes of a payload or an answer, as far as that is known now; what is longer is
    /// refused, or no answer.
    fn max_payload(&self) -> usize {
        usize::MAX
    }

    /// Hands over a payload, waiting at most `timeout`.
    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError>;

    /// Starts to collect payloads for a new subscriber.
    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError>;

    /// Answers questions about `source` with `responder` until what is returned is dropped. Of two
    /// that answer for one source, any may be asked.
    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError>;

    /// Asks the responder of `source`, and waits at most `timeout`.
    /// [`TransportError::Unavailable`] when nobody does.
    fn ask(&self, source: SourceId, question: &Payload, timeout: Duration)
    -> Result<Payload, TransportError>;
}

/// Answers a question. It is called on threads of the transport's and may take its time; it must
/// not panic.
pub type Responder = Arc<dyn Fn(&[u8]) -> Payload + Send + Sync>;

/// Somebody answers as long as this is there.
pub struct Answering(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Answering {
    /// Calls `end` when it is dropped.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}

/// One subscriber's end of a transport.
pub trait EventReceiver: Send {
    /// The next payload, or `None` when none came within `timeout`.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Payload>, TransportError>;

    /// Payloads that this subscriber's own bounded queue has dropped so far, oldest first. Loss
    /// elsewhere is not counted here; gaps in the numbers show it all.
    fn dropped(&self) -> u64;

    /// Payloads that wait in this subscriber's queue: how far its reader is behind. 0 where that is
    /// not known.
    fn waiting(&self) -> usize {
        0
    }
}
