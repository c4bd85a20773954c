//! Sends events to the transport that the configuration names, and to subscribers in this process.

use super::engine_format::Translator;
use super::ring::Progress;
use kvbm_events::url::{EventRole, EventUrl, OpenError};
use kvbm_events::{
    Answering, EventReceiver, EventTransport, InProcessTransport, Payload, PublisherWaker, Responder,
    SnapshotServer, SourceId, TransportError,
};
use kvbm_pool::Registry;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);

/// Longest wait for an address that is in use: the engine that was here before may still be ending.
const BIND: Duration = Duration::from_secs(5);

/// A transport by its URL. It is opened by the first publish and, where that fails, by a later one.
/// A server that is down when the manager starts costs nothing but the events that the ring cannot
/// hold.
pub(super) struct Remote {
    url: EventUrl,
    /// Answers followers that lost something or come late.
    source: SourceId,
    server: Arc<SnapshotServer>,
    /// Set where the other side reads what engines say. Only the publisher's thread uses it.
    translator: Option<Mutex<Translator>>,
    state: Mutex<TransportState>,
}

enum TransportState {
    Open {
        transport: Arc<dyn EventTransport>,
        answering: Answered,
    },
    /// Not tried again before `again`.
    Failed {
        again: Option<Instant>,
        reason: String,
    },
}

/// Whether followers get answers.
enum Answered {
    /// As long as this is there.
    Yes { _guard: Answering },
    /// The server was too slow or away when the responder was announced. It is tried again then.
    NotYet { again: Instant },
    /// This transport has no questions, or the server does not permit it.
    Never,
}

impl Remote {
    /// Opens what needs nobody else, so that it fails now or never.
    pub(super) fn new(
        url: EventUrl,
        timeout: Duration,
        source: SourceId,
        server: Arc<SnapshotServer>,
        translator: Option<Translator>,
    ) -> Result<Self, OpenError> {
        let nothing = TransportState::Failed { again: None, reason: "not connected yet".into() };
        let translator = translator.map(Mutex::new);
        let remote = Self { url, source, server, translator, state: Mutex::new(nothing) };
        if remote.url.binds() {
            let transport = remote.url.open(EventRole::Publisher, timeout.max(BIND))?;
            tracing::info!(target: "kvbm", url = %remote.url, at = ?transport.listens_at(), "events are published");
            remote.begin(transport);
        }
        Ok(remote)
    }

    /// Publishes and answers over `transport` from now on.
    fn begin(&self, transport: Arc<dyn EventTransport>) {
        self.server.fit(transport.max_payload());
        let server = Arc::clone(&self.server);
        let responder = Arc::new(move |question: &[u8]| server.answer(question));
        let answering = match transport.answer(self.source, responder) {
            Ok(guard) => Answered::Yes { _guard: guard },
            Err(error) => {
                tracing::warn!(target: "kvbm", url = %self.url, %error, "followers cannot ask for snapshots");
                match error {
                    TransportError::Unavailable { .. } => {
                        Answered::NotYet { again: kvbm_plan::clock::now() + PAUSE }
                    }
                    _ => Answered::Never,
                }
            }
        };
        *self.state.lock() = TransportState::Open { transport, answering };
    }

    /// The open transport; opens it, unless that has just failed. Only the publisher's thread does.
    fn open(&self, timeout: Duration) -> Result<Arc<dyn EventTransport>, TransportError> {
        let unanswered = match &*self.state.lock() {
            TransportState::Open { transport, answering: Answered::NotYet { again } }
                if kvbm_plan::clock::now() >= *again =>
            {
                Some(Arc::clone(transport))
            }
            _ => None,
        };
        if let Some(transport) = unanswered {
            self.begin(transport);
        }
        let before = match &*self.state.lock() {
            TransportState::Open { transport, .. } => return Ok(Arc::clone(transport)),
            TransportState::Failed { again: Some(again), reason } if kvbm_plan::clock::now() < *again => {
                return Err(unavailable(reason.clone()));
            }
            TransportState::Failed { reason, .. } => reason.clone(),
        };
        match self.url.open(EventRole::Publisher, timeout) {
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
                *self.state.lock() = TransportState::Failed {
                    again: Some(kvbm_plan::clock::now() + PAUSE),
                    reason: reason.clone(),
                };
                Err(unavailable(reason))
            }
        }
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        let deadline = kvbm_plan::deadline_after(kvbm_plan::clock::now(), timeout);
        let transport = self.open(timeout)?;
        let left = deadline.saturating_duration_since(kvbm_plan::clock::now());
        let sent = match &self.translator {
            None => transport.publish(payload, left),
            Some(translator) => {
                let left = || deadline.saturating_duration_since(kvbm_plan::clock::now());
                translator.lock().send(payload, |message| transport.publish(message, left()))
            }
        };
        if let Err(TransportError::Closed { .. }) = &sent {
            *self.state.lock() =
                TransportState::Failed { again: None, reason: "the connection was closed".into() };
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
    /// Why the remote did not take the last batch.
    pub(super) trouble: Mutex<Option<String>>,
    pub(super) registry: Registry,
    pub(super) progress: Arc<Progress>,
    /// Wakes the publisher, which sleeps while nobody listens.
    pub(super) publisher: OnceLock<PublisherWaker>,
}

impl EventTransport for Outlet {
    fn has_listeners(&self) -> bool {
        self.remote.is_some() || self.local.subscribers() > 0
    }

    fn name(&self) -> &'static str {
        if self.remote.is_some() { "remote" } else { self.local.name() }
    }

    fn listens_at(&self) -> Vec<String> {
        let state = self.remote.as_ref().map(|remote| remote.state.lock());
        match state.as_deref() {
            Some(TransportState::Open { transport, .. }) => transport.listens_at(),
            _ => Vec::new(),
        }
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        // Every attempt is a mark on the way, failed ones too: how far the world is behind shows by
        // them.
        self.progress.note(self.registry.event_backlog().next_seq);
        if let Some(remote) = &self.remote {
            let sent = remote.publish(payload, timeout);
            let trouble = sent.as_ref().err().map(|error| format!("{}: {error}", remote.url));
            *self.trouble.lock() = trouble;
            sent?;
        }
        self.local.publish(payload, timeout)
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        let receiver = self.local.subscribe()?;
        if let Some(publisher) = self.publisher.get() {
            publisher.wake();
        }
        Ok(receiver)
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

#[cfg(all(test, feature = "nats"))]
mod tests {
    use super::*;
    use kvbm_events::InProcessConfig;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A server that is too slow, so many times, when it is told who answers.
    struct Slow {
        inner: InProcessTransport,
        times: AtomicU32,
    }

    impl EventTransport for Slow {
        fn name(&self) -> &'static str {
            "slow"
        }

        fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
            self.inner.publish(payload, timeout)
        }

        fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
            self.inner.subscribe()
        }

        fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
            let left =
                self.times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if left.is_ok() {
                return Err(unavailable("subscribing took too long".into()));
            }
            self.inner.answer(source, responder)
        }

        fn ask(
            &self,
            source: SourceId,
            question: &Payload,
            timeout: Duration,
        ) -> Result<Payload, TransportError> {
            self.inner.ask(source, question, timeout)
        }
    }

    /// Mutation that makes it fail: `open` without its first part.
    #[test]
    fn a_server_that_missed_an_announcement_gets_it_again() {
        let (source, question) = (SourceId(3), Payload::from(*b"?"));
        let url = "nats://127.0.0.1:9".parse().unwrap();
        let server = Arc::new(SnapshotServer::new(|_| None));
        let nothing = server.answer(&question);
        let remote = Remote::new(url, Duration::from_secs(1), source, server, None).unwrap();
        let inner = InProcessTransport::new(InProcessConfig::default());
        let slow = Arc::new(Slow { inner, times: AtomicU32::new(2) });
        remote.begin(slow.clone());
        assert!(slow.ask(source, &question, Duration::ZERO).is_err());
        let deadline = kvbm_plan::clock::now() + Duration::from_secs(60);
        while slow.ask(source, &question, Duration::ZERO).is_err() {
            assert!(kvbm_plan::clock::now() < deadline, "nobody answers");
            // A heartbeat.
            remote.publish(&Payload::from(*b"x"), Duration::from_secs(1)).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(slow.ask(source, &question, Duration::from_secs(60)).unwrap(), nothing);
    }
}
