//! Events go to whoever the configuration names, and to subscribers in this process.

use super::engine_format::Translator;
use super::ring::Progress;
use kvbm_events::url::{EventUrl, OpenError, Side};
use kvbm_events::{
    Answering, EventReceiver, EventTransport, InProcessTransport, Payload, Responder, SourceId,
    TransportError,
};
use kvbm_pool::Registry;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);

/// A transport by its URL. It is opened by the first publish and, where that fails, by a later one: a server that is down when the
/// manager starts costs nothing but the events that the ring cannot hold.
pub(super) struct Remote {
    url: EventUrl,
    /// Answers followers that lost something or come late.
    source: SourceId,
    responder: Responder,
    /// Set where the other side reads what engines say. Only the publisher's thread uses it.
    translator: Option<Mutex<Translator>>,
    state: Mutex<State>,
}

enum State {
    Open {
        transport: Arc<dyn EventTransport>,
        /// Followers get their answers as long as this is there.
        _answering: Option<Answering>,
    },
    /// Not tried again before `again`.
    Failed { again: Option<Instant>, reason: String },
}

impl Remote {
    /// Opens what needs nobody else, so that it fails now or never.
    pub(super) fn new(
        url: EventUrl,
        timeout: Duration,
        source: SourceId,
        responder: Responder,
        translator: Option<Translator>,
    ) -> Result<Self, OpenError> {
        let nothing = State::Failed { again: None, reason: "not connected yet".into() };
        let translator = translator.map(Mutex::new);
        let remote = Self { url, source, responder, translator, state: Mutex::new(nothing) };
        if remote.url.binds() {
            let transport = remote.url.open(Side::Publisher, timeout)?;
            remote.begin(transport);
        }
        Ok(remote)
    }

    /// Publishes and answers over `transport` from now on.
    fn begin(&self, transport: Arc<dyn EventTransport>) {
        let answering = transport.answer(self.source, Arc::clone(&self.responder));
        if let Err(error) = &answering {
            tracing::warn!(target: "kvbm", url = %self.url, %error, "followers cannot ask for snapshots");
        }
        *self.state.lock() = State::Open { transport, _answering: answering.ok() };
    }

    /// The open transport; opens it, unless that has just failed. Only the publisher's thread does.
    fn open(&self, timeout: Duration) -> Result<Arc<dyn EventTransport>, TransportError> {
        let before = match &*self.state.lock() {
            State::Open { transport, .. } => return Ok(Arc::clone(transport)),
            State::Failed { again: Some(again), reason } if Instant::now() < *again => {
                return Err(unavailable(reason.clone()));
            }
            State::Failed { reason, .. } => reason.clone(),
        };
        match self.url.open(Side::Publisher, timeout) {
            Ok(transport) => {
                tracing::info!(target: "kvbm", url = %self.url, "events are published");
                self.begin(Arc::clone(&transport));
                Ok(transport)
            }
            Err(error) => {
                let reason = match error {
                    OpenError::Transport(TransportError::Unavailable { reason, .. }) => reason,
                    error => error.to_string(),
                };
                // Said when it changes, not twice a second.
                if before != reason {
                    tracing::warn!(target: "kvbm", url = %self.url, %reason, "events wait: no connection");
                }
                *self.state.lock() =
                    State::Failed { again: Some(Instant::now() + PAUSE), reason: reason.clone() };
                Err(unavailable(reason))
            }
        }
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        let deadline = Instant::now() + timeout;
        let transport = self.open(timeout)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let sent = match &self.translator {
            None => transport.publish(payload, left),
            Some(translator) => {
                let left = || deadline.saturating_duration_since(Instant::now());
                translator.lock().send(payload, |message| transport.publish(message, left()))
            }
        };
        if let Err(TransportError::Closed { .. }) = &sent {
            *self.state.lock() = State::Failed { again: None, reason: "the connection was closed".into() };
            return Err(unavailable("the connection was closed".into()));
        }
        sent
    }
}

fn unavailable(reason: String) -> TransportError {
    TransportError::Unavailable { transport: "remote", reason }
}

/// Publishes to the remote, if there is one; what it took goes to subscribers of this process too.
pub(super) struct Outlet {
    pub(super) remote: Option<Remote>,
    pub(super) local: InProcessTransport,
    pub(super) registry: Registry,
    pub(super) progress: Arc<Progress>,
}

impl EventTransport for Outlet {
    fn name(&self) -> &'static str {
        if self.remote.is_some() { "remote" } else { self.local.name() }
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        // Every attempt is a mark on the way, failed ones too: how far the world is behind shows by them.
        self.progress.note(self.registry.event_backlog().next_seq);
        if let Some(remote) = &self.remote {
            remote.publish(payload, timeout)?;
        }
        self.local.publish(payload, timeout)
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        self.local.subscribe()
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        self.local.answer(source, responder)
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        self.local.ask(source, question, timeout)
    }
}
