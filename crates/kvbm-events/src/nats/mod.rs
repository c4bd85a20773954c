//! NATS (<https://nats.io>): core, which drops what has no subscriber at that moment, and
//! `JetStream`, which keeps it.
//!
//! A transport has one connection and one thread, on which its runtime lives; callers never meet
//! it. The connection comes back by itself after a loss. While it is away nothing is buffered for
//! the server: events wait with their source. With core, what was under way at that moment is lost
//! and shows up as a gap. With `JetStream` every payload is acknowledged by the server, and a
//! subscriber goes on where it was.

mod bucket;
mod connection;
mod denied;
mod login;
mod stream;

pub use bucket::{BucketConfig, NatsBucket};

use crate::deadline;
use crate::queue::{Queue, QueueReceiver};
use crate::{
    Answering, EventReceiver, EventTransport, InProcessConfig, Payload, Responder, SourceId, TransportError,
};
use connection::Command;
use crossbeam_channel::{RecvTimeoutError, bounded};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How to reach the server, and what to say there.
#[derive(Clone, PartialEq, Eq)]
pub struct NatsConfig {
    /// `nats://HOST:PORT`, or `tls://HOST:PORT`. Errors show it, so who we are does not stand in it
    /// but in `login`.
    pub url: String,
    /// Subject of the events: words with points between them, no wildcards.
    pub subject: String,
    /// Who we are.
    pub login: Login,
    /// Refuse a connection without TLS, whatever the URL says.
    pub require_tls: bool,
    /// Certificates of the authority that signed the server's, in PEM, beside the system's.
    pub root_certificates: Option<PathBuf>,
    /// Certificate and private key that say who we are, in PEM, for servers that ask for one.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
    /// How long connecting and subscribing may take.
    pub connect_timeout: Duration,
    /// What each subscriber's queue holds.
    pub queue: InProcessConfig,
    /// Keep the events in a stream; `None` is core NATS.
    pub stream: Option<StreamConfig>,
}

/// How to log in.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Login {
    /// The server asks for nothing.
    #[default]
    None,
    /// A token.
    Token(String),
    /// User and password.
    User(String, String),
    /// A `.creds` file: a user's JWT and the seed of his key.
    CredentialsFile(PathBuf),
    /// A file with the seed of a user's key, which the server knows without a JWT.
    NkeyFile(PathBuf),
}

/// A stream of `JetStream`. It is created if it is not there; one that is there is used as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamConfig {
    /// Name of the stream: letters, digits, `-` and `_`.
    pub name: String,
    /// Keep it in files rather than in the server's memory.
    pub on_disk: bool,
    /// Most bytes in the stream; the oldest go first.
    pub max_bytes: u64,
    /// How long events are kept.
    pub max_age: Duration,
    /// Start subscribers with the oldest event kept rather than with the next one.
    pub from_start: bool,
}

impl NatsConfig {
    /// Core NATS without login, and queues of the default size.
    pub fn new(url: impl Into<String>, subject: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            subject: subject.into(),
            login: Login::None,
            require_tls: false,
            root_certificates: None,
            client_certificate: None,
            connect_timeout: Duration::from_secs(5),
            queue: InProcessConfig::default(),
            stream: None,
        }
    }

    /// The same over a stream in files of at most 1 GiB, whose events are kept for an hour.
    #[must_use]
    pub fn with_stream(self, name: impl Into<String>) -> Self {
        let stream = StreamConfig {
            name: name.into(),
            on_disk: true,
            max_bytes: 1 << 30,
            max_age: Duration::from_secs(3600),
            from_start: false,
        };
        Self { stream: Some(stream), ..self }
    }

    fn name(&self) -> &'static str {
        if self.stream.is_some() { "nats-jetstream" } else { "nats" }
    }
}

/// Carries events over a NATS server. Dropping it waits until the server has what was taken, for a
/// second at most, and closes its subscribers.
pub struct NatsTransport {
    name: &'static str,
    /// The thread ends when this goes.
    commands: Option<mpsc::Sender<Command>>,
    patience: Duration,
    /// Disconnected when the server has everything, or the thread has given up.
    ended: crossbeam_channel::Receiver<()>,
    /// What the server takes at most, as it said last.
    max_payload: Arc<AtomicUsize>,
}

/// How long the end of a transport may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

impl Drop for NatsTransport {
    fn drop(&mut self) {
        drop(self.commands.take());
        // Who ends a process next would lose what is on its way, and nobody would be there to tell
        // of it.
        let _ = self.ended.recv_timeout(2 * CLOSE_LIMIT);
    }
}

/// Calls that may wait for the connection's thread at a time.
const COMMANDS: usize = 64;

impl NatsTransport {
    /// Connects, and creates the stream if there is to be one.
    pub fn connect(config: NatsConfig) -> Result<Self, TransportError> {
        let (name, patience) = (config.name(), config.connect_timeout);
        if config.url.contains('@') {
            let reason = "the server's URL has credentials (something before @), and errors show URLs: give them in `login`, \
                          and nats://HOST:PORT in `url`";
            return Err(TransportError::Config { transport: name, reason: reason.into() });
        }
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (ready, connected) = bounded(1);
        let (end, ended) = bounded(0);
        let max_payload = Arc::new(AtomicUsize::new(usize::MAX));
        let of_server = Arc::clone(&max_payload);
        std::thread::Builder::new()
            .name("kvbm-nats".into())
            .spawn(move || connection::run(config, inbox, &ready, end, &of_server))
            .map_err(|error| unavailable(name, format!("no thread for the connection: {error}")))?;
        // The thread keeps its own deadline; this one is for a thread that does not get to run.
        match connected.recv_timeout(patience.saturating_mul(2)) {
            Ok(connected) => {
                connected.map(|()| Self { name, commands: Some(commands), patience, ended, max_payload })
            }
            Err(_) => Err(unavailable(name, format!("not connected within {patience:?}"))),
        }
    }

    fn ask_thread<T>(
        &self,
        timeout: Duration,
        command: impl FnOnce(Instant, crossbeam_channel::Sender<Result<T, TransportError>>) -> Command,
    ) -> Result<T, TransportError> {
        let (answer, answered) = bounded(1);
        let deadline = deadline::after(timeout);
        let Some(commands) = &self.commands else {
            return Err(TransportError::Closed { transport: self.name });
        };
        match commands.try_send(command(deadline, answer)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(unavailable(self.name, format!("{COMMANDS} calls wait already")));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(TransportError::Closed { transport: self.name });
            }
        }
        match answered.recv_deadline(deadline + Duration::from_millis(50)) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                Err(unavailable(self.name, format!("no answer within {timeout:?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(TransportError::Closed { transport: self.name }),
        }
    }
}

impl EventTransport for NatsTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn max_payload(&self) -> usize {
        self.max_payload.load(Ordering::Relaxed)
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        let payload = Arc::clone(payload);
        self.ask_thread(timeout, |deadline, answer| Command::Publish { payload, deadline, answer })
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        let queue: Arc<Queue> =
            self.ask_thread(self.patience, |deadline, answer| Command::Subscribe { deadline, answer })?;
        Ok(Box::new(QueueReceiver::new(queue, self.name)))
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        let answering: oneshot::Sender<()> = self.ask_thread(self.patience, |deadline, answer| {
            Command::Answer { source, responder, deadline, answer }
        })?;
        // The task that answers ends with this.
        Ok(Answering::new(move || drop(answering)))
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        let question = Arc::clone(question);
        self.ask_thread(timeout, |deadline, answer| Command::Ask { source, question, deadline, answer })
    }
}

fn unavailable(transport: &'static str, reason: impl Into<String>) -> TransportError {
    TransportError::Unavailable { transport, reason: reason.into() }
}
