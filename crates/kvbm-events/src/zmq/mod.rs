//! `ZeroMQ` (<https://zeromq.org>): PUB/SUB without a server, and a second socket that repeats what was missed.
//!
//! The messages and the replay are those of vLLM's event publisher (`docs/formats.md`), so its clients read ours and
//! ours read its. ZMTP is spoken here directly, because a publisher's queues have to be bounded in bytes and counted, a
//! peer's lengths are not to be believed, and its heartbeats are to be answered.
//!
//! A transport has one thread for all of its connections; publishing never waits for it. A publisher holds the newest
//! payloads, `history` for replays and `queue` for its slowest subscriber, whichever is longer: payloads are shared, so
//! the number of subscribers does not matter. A subscriber that takes nothing loses the oldest, counted by
//! [`ZmqTransport::dropped`], and after [`SILENT_BEATS`] seconds without a sign of life its connection.
//!
//! `ZeroMQ` asks nobody who he is: addresses that other machines reach are refused without
//! [`insecure`](ZmqConfig::insecure).

mod endpoint;
mod engines;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod hub;
mod publish;
mod subscribe;
mod zmtp;

use crate::queue::{Queue, QueueReceiver, Sink};
use crate::{
    Answering, EventReceiver, EventTransport, InProcessConfig, Payload, Responder, SourceId, TransportError,
};
use crossbeam_channel::bounded;
use endpoint::{Endpoint, Listener, refused};
pub use engines::EngineFollower;
use hub::Hub;
use std::sync::Arc;
use std::time::{Duration, Instant};
use subscribe::Target;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

const NAME: &str = "zmq";

/// Second frames of a question about a source, and of its answer.
const ASK: &[u8] = b"kvbm-ask";
const ANSWER: &[u8] = b"kvbm-answer";

/// Time between two heartbeats of a connection without traffic.
const BEAT: Duration = Duration::from_secs(1);
/// Heartbeats after which a silent peer is given up.
pub const SILENT_BEATS: u32 = 5;
/// How long a peer may take to connect and to say who he is.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The two sockets of a publisher, as `tcp://HOST:PORT` or `ipc://PATH`. To bind, the port may be `*` for any free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqAddress {
    /// Its PUB socket.
    pub events: String,
    /// Its ROUTER socket, which repeats what it has sent; without it every loss is a gap.
    pub replay: Option<String>,
}

impl ZmqAddress {
    /// A publisher without replay.
    pub fn new(events: impl Into<String>) -> Self {
        Self { events: events.into(), replay: None }
    }

    /// The same with a replay socket.
    #[must_use]
    pub fn with_replay(self, replay: impl Into<String>) -> Self {
        Self { replay: Some(replay.into()), ..self }
    }
}

/// What both sides have to say beyond addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqConfig {
    /// Topic of the messages; subscribers take every topic that begins so.
    pub topic: String,
    /// What waits for each subscriber, at the publisher, where the oldest go, and again at the subscriber, who takes no more then.
    pub queue: InProcessConfig,
    /// What a publisher keeps for replays.
    pub history: InProcessConfig,
    /// Most connections to each of a publisher's sockets.
    pub max_peers: usize,
    /// Allow addresses that other machines can reach, although nobody has to say who he is.
    pub insecure: bool,
    /// How long binding and subscribing may take. A publisher that finds its address in use tries as long.
    pub connect_timeout: Duration,
    /// Ask for everything that a publisher still has rather than begin with its next message.
    pub from_start: bool,
}

impl Default for ZmqConfig {
    /// Topic `kv-events`; queues of the default size; 10,000 messages or 64 MiB of history; 64 peers; 5 s.
    fn default() -> Self {
        Self {
            topic: "kv-events".into(),
            queue: InProcessConfig::default(),
            history: InProcessConfig { queue_batches: 10_000, queue_bytes: 64 << 20 },
            max_peers: 64,
            insecure: false,
            connect_timeout: Duration::from_secs(5),
            from_start: false,
        }
    }
}

/// A message of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Which of the addresses it came from, counted from 0.
    pub publisher: u32,
    /// Its topic.
    pub topic: Vec<u8>,
    /// The publisher's life, counted from the first that was heard. A number of another life says nothing about those before it. A
    /// new one begins also where nobody can say whether it is the old one: over a new connection to a publisher that does not tell
    /// its lives apart (an engine), when what it said last cannot be had by a replay and compared.
    pub life: u64,
    /// Its number, from 0 since the publisher's start.
    pub sequence: u64,
    /// What it says.
    pub payload: Payload,
}

impl From<Message> for Payload {
    fn from(message: Message) -> Self {
        message.payload
    }
}

/// Carries events over `ZeroMQ`: as a publisher with sockets of its own ([`bind`](Self::bind)), or as a subscriber of
/// other publishers ([`connect`](Self::connect)). Dropping it sends what is queued, for a second at most, and closes its
/// subscribers.
pub struct ZmqTransport {
    config: ZmqConfig,
    publishers: Vec<(Endpoint, Option<Endpoint>)>,
    hub: Option<Arc<Hub>>,
    runtime: Handle,
    /// Ends the thread when it goes.
    stop: Option<oneshot::Sender<()>>,
    /// Disconnected when the thread has ended.
    ended: crossbeam_channel::Receiver<()>,
}

/// How long a publisher goes on sending after it was dropped.
const FAREWELL: Duration = Duration::from_secs(1);

impl ZmqTransport {
    /// A publisher. Its own subscribers follow it over its sockets.
    pub fn bind(config: ZmqConfig, address: &ZmqAddress) -> Result<Self, TransportError> {
        let events = Endpoint::read(&address.events, config.insecure)?;
        let replay =
            address.replay.as_deref().map(|text| Endpoint::read(text, config.insecure)).transpose()?;
        let hub = Arc::new(Hub::new(config.topic.clone().into_bytes(), config.queue, config.history));
        let mut transport = Self::start(config, Some(Arc::clone(&hub)))?;
        let events = transport.listen(events)?;
        let replay = replay.map(|endpoint| transport.listen(endpoint)).transpose()?;
        transport.publishers = vec![(events.endpoint(), replay.as_ref().map(Listener::endpoint))];
        let most = transport.config.max_peers;
        if let Some(replay) = replay {
            let (hub, of_replay) = (Arc::clone(&hub), Arc::clone(&hub));
            let serve = move |halves| publish::serve_replay(Arc::clone(&hub), halves);
            transport.runtime.spawn(publish::accept(replay, of_replay, most, serve));
        }
        let subscribed = Arc::clone(&hub);
        let serve = move |halves| publish::serve_subscriber(Arc::clone(&subscribed), halves, most);
        transport.runtime.spawn(publish::accept(events, hub, most, serve));
        Ok(transport)
    }

    /// A subscriber of these publishers; it publishes nothing.
    pub fn connect(config: ZmqConfig, addresses: &[ZmqAddress]) -> Result<Self, TransportError> {
        if addresses.is_empty() {
            return Err(refused("there is no address to subscribe to".into()));
        }
        let read = |text: &str| {
            let endpoint = Endpoint::read(text, config.insecure)?;
            match &endpoint {
                Endpoint::Tcp { host, port } if host == "*" || *port == 0 => {
                    Err(refused(format!("{text} is an address to bind, not one to connect to")))
                }
                _ => Ok(endpoint),
            }
        };
        let publishers = addresses
            .iter()
            .map(|address| Ok((read(&address.events)?, address.replay.as_deref().map(read).transpose()?)));
        let publishers = publishers.collect::<Result<Vec<_>, TransportError>>()?;
        let mut transport = Self::start(config, None)?;
        transport.publishers = publishers;
        Ok(transport)
    }

    /// Addresses of the publishers: a bound one's with the ports that it got.
    pub fn addresses(&self) -> Vec<ZmqAddress> {
        let text = |(events, replay): &(Endpoint, Option<Endpoint>)| ZmqAddress {
            events: events.to_string(),
            replay: replay.as_ref().map(ToString::to_string),
        };
        self.publishers.iter().map(text).collect()
    }

    /// Messages that a publisher has dropped because a subscriber was too slow, each counted once a subscriber.
    pub fn dropped(&self) -> u64 {
        self.hub.as_ref().map_or(0, |hub| hub.dropped())
    }

    /// Connections that a publisher has turned away: beyond `max_peers` of a socket, or of peers that speak another protocol or
    /// mechanism, or nothing in time. Addresses that other machines reach are refused before: they are an error of `bind`.
    pub fn refused(&self) -> u64 {
        self.hub.as_ref().map_or(0, |hub| hub.refused())
    }

    /// Subscribers that a publisher serves now.
    pub fn subscribers(&self) -> usize {
        self.hub.as_ref().map_or(0, |hub| hub.peers())
    }

    /// Bytes of payloads that a publisher holds: at most the larger of `history` and `queue`, plus what is being written.
    pub fn kept_bytes(&self) -> usize {
        self.hub.as_ref().map_or(0, |hub| hub.kept_bytes())
    }

    /// Starts to collect messages with their topics and numbers. Fails when no publisher can be reached; one that can
    /// not is tried again and again as long as another can.
    pub fn messages(&self) -> Result<MessageReceiver, TransportError> {
        let queue = Arc::new(Queue::default());
        let (connected, heard) = bounded(self.publishers.len());
        for (at, (events, replay)) in self.publishers.iter().enumerate() {
            let target = Target {
                publisher: at as u32,
                events: local(events),
                replay: replay.as_ref().map(local),
                topic: self.config.topic.clone().into_bytes(),
                from_start: self.config.from_start,
            };
            let sink = Sink::new(&queue, self.config.queue);
            self.runtime.spawn(subscribe::follow(target, sink, connected.clone()));
        }
        let deadline = Instant::now() + self.config.connect_timeout;
        let reached =
            (0..self.publishers.len()).take_while(|_| heard.recv_deadline(deadline).is_ok()).count();
        if reached == 0 {
            let names: Vec<String> = self.publishers.iter().map(|(events, _)| events.to_string()).collect();
            let patience = self.config.connect_timeout;
            return Err(unavailable(format!("no publisher at {} within {patience:?}", names.join(", "))));
        }
        Ok(MessageReceiver(QueueReceiver::new(queue, NAME)))
    }

    fn start(config: ZmqConfig, hub: Option<Arc<Hub>>) -> Result<Self, TransportError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| unavailable(format!("no runtime: {error}")))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = bounded::<()>(0);
        let last = hub.clone();
        std::thread::Builder::new()
            .name("kvbm-zmq".into())
            .spawn(move || {
                runtime.block_on(async {
                    // Ends by the sender's end.
                    let _ = stopped.await;
                    if let Some(hub) = last {
                        farewell(&hub).await;
                    }
                });
                drop((runtime, end));
            })
            .map_err(|error| unavailable(format!("no thread for the connections: {error}")))?;
        Ok(Self { config, publishers: Vec::new(), hub, runtime: handle, stop: Some(stop), ended })
    }

    fn listen(&self, endpoint: Endpoint) -> Result<Listener, TransportError> {
        let text = endpoint.to_string();
        let (answer, answered) = bounded(1);
        let deadline = Instant::now() + self.config.connect_timeout;
        self.runtime.spawn(async move {
            // Nobody waits any more when that took too long.
            let _ = answer.try_send(endpoint.listen_by(deadline).await);
        });
        match answered.recv_deadline(deadline + FAREWELL) {
            Ok(Ok(listener)) => Ok(listener),
            Ok(Err(error)) => Err(unavailable(format!(
                "cannot bind {text}: {error}; end whoever listens there, or take another port"
            ))),
            Err(_) => Err(unavailable(format!("cannot bind {text} in time"))),
        }
    }
}

/// What a bound address is called by who connects to it from here.
fn local(endpoint: &Endpoint) -> Endpoint {
    match endpoint {
        Endpoint::Tcp { host, port } if host == "*" || host == "0.0.0.0" => {
            Endpoint::Tcp { host: "127.0.0.1".into(), port: *port }
        }
        other => other.clone(),
    }
}

/// Waits until everything queued is written, for a second at most.
async fn farewell(hub: &Hub) {
    let deadline = Instant::now() + FAREWELL;
    while !hub.is_drained() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl EventTransport for ZmqTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The address for events, then the one for replays.
    fn listens_at(&self) -> Vec<String> {
        if self.hub.is_none() {
            return Vec::new();
        }
        self.addresses().into_iter().flat_map(|at| std::iter::once(at.events).chain(at.replay)).collect()
    }

    fn publish(&self, payload: &Payload, _timeout: Duration) -> Result<(), TransportError> {
        let Some(hub) = &self.hub else {
            return Err(refused("it is connected as a subscriber; publish through one that binds".into()));
        };
        if payload.len() > zmtp::MAX_MESSAGE - 1024 {
            let reason = format!("{} bytes are more than a subscriber reads", payload.len());
            return Err(TransportError::Refused { transport: NAME, reason });
        }
        hub.publish(payload);
        Ok(())
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        Ok(Box::new(self.messages()?))
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        match (&self.hub, self.publishers.first()) {
            (Some(hub), Some((_, Some(_)))) => Ok(hub.responders.add(source, responder)),
            (Some(_), _) => Err(refused("questions come over the replay socket: bind one".into())),
            (None, _) => {
                Err(refused("it is connected as a subscriber; answer through one that binds".into()))
            }
        }
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        let replays: Vec<Endpoint> =
            self.publishers.iter().filter_map(|(_, replay)| replay.as_ref().map(local)).collect();
        if replays.is_empty() {
            return Err(refused("questions go to the replay socket: say its address".into()));
        }
        let (answer, answered) = bounded(replays.len());
        for replay in replays {
            let (answer, question) = (answer.clone(), Arc::clone(question));
            self.runtime.spawn(async move {
                // Not answering is an answer: the sender goes.
                let asked = subscribe::ask(&replay, source, &question);
                if let Ok(Ok(Some(found))) = tokio::time::timeout(timeout, asked).await {
                    let _ = answer.try_send(found);
                }
            });
        }
        drop(answer);
        answered
            .recv_timeout(timeout + Duration::from_millis(50))
            .map_err(|_| unavailable(format!("nobody answered for source {source} within {timeout:?}")))
    }
}

impl Drop for ZmqTransport {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Ends by disconnection or by time; its sockets are free then, unless the machine is very busy.
        let _ = self.ended.recv_timeout(2 * FAREWELL);
    }
}

/// One subscriber's end: messages with their topics and numbers, or only payloads through [`EventReceiver`].
pub struct MessageReceiver(QueueReceiver<Message>);

impl MessageReceiver {
    /// The next message, or `None` when none came within `timeout`. Messages of one publisher come in order; what it
    /// could not repeat is a gap in their numbers, and with [`life`](Message::life) their numbers begin anew. Whoever reads slowly
    /// loses nothing here: while there is no room for more, nothing more is taken from a publisher.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Message>, TransportError> {
        self.0.next(timeout)
    }
}

impl EventReceiver for MessageReceiver {
    fn recv(&mut self, timeout: Duration) -> Result<Option<Payload>, TransportError> {
        self.0.recv(timeout)
    }

    fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    fn waiting(&self) -> usize {
        self.0.waiting()
    }
}

fn unavailable(reason: String) -> TransportError {
    TransportError::Unavailable { transport: NAME, reason }
}
