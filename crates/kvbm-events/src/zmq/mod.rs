//! `ZeroMQ` (<https://zeromq.org>): PUB/SUB without a server, and a second socket for replays.
//!
//! The messages and the replay are those of vLLM's event publisher (`docs/formats.md`), so its
//! clients read ours and ours read its. The protocol itself is in `kvbm-zmtp`.
//!
//! A transport has one thread for all of its connections; publishing never waits for it. A
//! publisher keeps the newest payloads: `history` for replays and `queue` for its slowest
//! subscriber, whichever is longer. Payloads are shared, so memory does not grow with the number of
//! subscribers. A subscriber that does not read loses the oldest messages, counted by
//! [`ZmqTransport::dropped`]. It loses its connection after [`MISSED_HEARTBEATS`] seconds without a
//! sign of life.
//!
//! `ZeroMQ` authenticates nobody: addresses that other machines reach are refused without
//! [`insecure`](ZmqConfig::insecure).

mod config;
mod engine_follower;
mod fan_out;
mod serve_events;
mod serve_replay;
mod subscribe;

use crate::deadline;
use crate::queue::{Queue, QueueReceiver, Sink};
use crate::{Answering, EventReceiver, EventTransport, Payload, Responder, SourceId, TransportError};
pub use config::{ZmqAddress, ZmqConfig, ZmqMessage};
use config::{config_error, parse, reachable};
use crossbeam_channel::bounded;
pub use engine_follower::EngineFollower;
use fan_out::FanOut;
use kvbm_zmtp::{EndpointListener, ZmtpEndpoint};
use std::sync::Arc;
use std::time::{Duration, Instant};
use subscribe::Target;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

const NAME: &str = "zmq";

/// Second frames of a question about a source, and of its answer.
const ASK: &[u8] = b"kvbm-ask";
const ANSWER: &[u8] = b"kvbm-answer";

/// Property of READY that identifies one life of a publisher of ours; others do not send it.
const LIFE: &str = "X-Kvbm-Life";

/// Time between two heartbeats of a connection without traffic.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without an answer after which a peer loses its connection.
pub const MISSED_HEARTBEATS: u32 = 5;
/// Time limit of connecting and of the handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// How long a dropped publisher goes on sending, and how much later than its deadline a thread may
/// answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How often a closing publisher looks whether everything was sent.
const CLOSE_TICK: Duration = Duration::from_millis(5);
/// Bytes of a message beside its payload, at most.
const MESSAGE_OVERHEAD: usize = 1024;

/// Carries events over `ZeroMQ`: as a publisher with sockets of its own ([`bind`](Self::bind)), or
/// as a subscriber of other publishers ([`connect`](Self::connect)). Dropping it sends the queued
/// messages, for a second at most, and closes its subscribers.
pub struct ZmqTransport {
    config: ZmqConfig,
    publishers: Vec<(ZmtpEndpoint, Option<ZmtpEndpoint>)>,
    fan_out: Option<Arc<FanOut>>,
    runtime: Handle,
    /// Dropping it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    /// Disconnected when the thread has ended.
    ended: crossbeam_channel::Receiver<()>,
}

impl ZmqTransport {
    /// A publisher. Its own subscribers follow it over its sockets.
    pub fn bind(config: ZmqConfig, address: &ZmqAddress) -> Result<Self, TransportError> {
        let events = parse(&address.events, config.insecure)?;
        let replay = address.replay.as_deref().map(|text| parse(text, config.insecure)).transpose()?;
        let fan_out = Arc::new(FanOut::new(config.topic.clone().into_bytes(), config.queue, config.history));
        let mut transport = Self::start(config, Some(Arc::clone(&fan_out)))?;
        let events = transport.listen(events)?;
        let replay = replay.map(|endpoint| transport.listen(endpoint)).transpose()?;
        transport.publishers = vec![(events.endpoint(), replay.as_ref().map(EndpointListener::endpoint))];
        let max_peers = transport.config.max_peers;
        if let Some(listener) = replay {
            transport.runtime.spawn(serve_replay::accept(listener, Arc::clone(&fan_out), max_peers));
        }
        transport.runtime.spawn(serve_events::accept(events, fan_out, max_peers));
        Ok(transport)
    }

    /// A subscriber of these publishers; it publishes nothing.
    pub fn connect(config: ZmqConfig, addresses: &[ZmqAddress]) -> Result<Self, TransportError> {
        if addresses.is_empty() {
            return Err(config_error("there is no address to subscribe to".into()));
        }
        let read = |text: &str| match parse(text, config.insecure)? {
            ZmtpEndpoint::Tcp { host, port } if host == "*" || port == 0 => {
                Err(config_error(format!("{text} is an address to bind, not one to connect to")))
            }
            endpoint => Ok(endpoint),
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
        let text = |(events, replay): &(ZmtpEndpoint, Option<ZmtpEndpoint>)| ZmqAddress {
            events: events.to_string(),
            replay: replay.as_ref().map(ToString::to_string),
        };
        self.publishers.iter().map(text).collect()
    }

    /// Messages that a publisher dropped because a subscriber was too slow, counted per subscriber.
    pub fn dropped(&self) -> u64 {
        self.fan_out.as_ref().map_or(0, |fan_out| fan_out.dropped())
    }

    /// Connections that a publisher refused: beyond `max_peers` of a socket, or peers that speak
    /// another protocol or mechanism, or nothing in time.
    pub fn refused(&self) -> u64 {
        self.fan_out.as_ref().map_or(0, |fan_out| fan_out.refused())
    }

    /// Subscribers that a publisher serves now.
    pub fn subscribers(&self) -> usize {
        self.fan_out.as_ref().map_or(0, |fan_out| fan_out.subscribers())
    }

    /// Bytes that a publisher keeps. Payloads are at most the larger of `history` and `queue` plus
    /// one that is being written to each subscriber. Subscriptions are at most 64 KiB for each
    /// subscriber.
    pub fn kept_bytes(&self) -> usize {
        self.fan_out.as_ref().map_or(0, |fan_out| fan_out.kept_bytes())
    }

    /// Starts to collect messages with their topics and numbers. Fails when no publisher can be
    /// reached; if some can, the others are retried in the background.
    pub fn messages(&self) -> Result<MessageReceiver, TransportError> {
        let queue = Arc::new(Queue::default());
        let (connected, connections) = bounded(self.publishers.len());
        for (at, (events, replay)) in self.publishers.iter().enumerate() {
            let target = Target {
                publisher: at as u32,
                events: reachable(events),
                replay: replay.as_ref().map(reachable),
                topic: self.config.topic.clone().into_bytes(),
                from_start: self.config.from_start,
            };
            let sink = Sink::new(&queue, self.config.queue);
            self.runtime.spawn(subscribe::follow(target, sink, connected.clone()));
        }
        let deadline = deadline::after(self.config.connect_timeout);
        let reached =
            (0..self.publishers.len()).take_while(|_| connections.recv_deadline(deadline).is_ok()).count();
        if reached == 0 {
            let names: Vec<String> = self.publishers.iter().map(|(events, _)| events.to_string()).collect();
            let limit = self.config.connect_timeout;
            return Err(unavailable(format!("no publisher at {} within {limit:?}", names.join(", "))));
        }
        Ok(MessageReceiver(QueueReceiver::new(queue, NAME)))
    }

    fn start(config: ZmqConfig, fan_out: Option<Arc<FanOut>>) -> Result<Self, TransportError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| unavailable(format!("cannot start a runtime: {error}")))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = bounded::<()>(0);
        let closing = fan_out.clone();
        std::thread::Builder::new()
            .name("kvbm-zmq".into())
            .spawn(move || {
                runtime.block_on(async {
                    // Ends when the sender is dropped.
                    let _ = stopped.await;
                    if let Some(fan_out) = closing {
                        send_the_rest(&fan_out).await;
                    }
                });
                drop((runtime, end));
            })
            .map_err(|error| unavailable(format!("cannot start a thread for the connections: {error}")))?;
        Ok(Self { config, publishers: Vec::new(), fan_out, runtime: handle, stop: Some(stop), ended })
    }

    fn listen(&self, endpoint: ZmtpEndpoint) -> Result<EndpointListener, TransportError> {
        let text = endpoint.to_string();
        let (answer, answered) = bounded(1);
        let deadline = deadline::after(self.config.connect_timeout);
        self.runtime.spawn(async move {
            // The caller may have given up.
            let _ = answer.try_send(endpoint.listen(deadline).await);
        });
        match answered.recv_deadline(deadline + CLOSE_LIMIT) {
            Ok(Ok(listener)) => Ok(listener),
            Ok(Err(error)) => Err(unavailable(format!(
                "cannot bind {text}: {error}; end the process that listens there, or take another port"
            ))),
            Err(_) => Err(unavailable(format!("cannot bind {text} in time"))),
        }
    }
}

/// Waits until every queued message is written, for a second at most.
async fn send_the_rest(fan_out: &FanOut) {
    let deadline = deadline::after(CLOSE_LIMIT);
    while !fan_out.is_drained() && Instant::now() < deadline {
        tokio::time::sleep(CLOSE_TICK).await;
    }
}

impl EventTransport for ZmqTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The address for events, then the one for replays.
    fn listens_at(&self) -> Vec<String> {
        if self.fan_out.is_none() {
            return Vec::new();
        }
        self.addresses().into_iter().flat_map(|at| std::iter::once(at.events).chain(at.replay)).collect()
    }

    fn publish(&self, payload: &Payload, _timeout: Duration) -> Result<(), TransportError> {
        let Some(fan_out) = &self.fan_out else {
            return Err(config_error(
                "it is connected as a subscriber; publish through one that binds".into(),
            ));
        };
        let limit = kvbm_zmtp::MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD;
        if payload.len() > limit {
            let reason = format!("a subscriber reads at most {limit} bytes, not {}", payload.len());
            return Err(TransportError::Refused { transport: NAME, reason });
        }
        fan_out.publish(payload);
        Ok(())
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        Ok(Box::new(self.messages()?))
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        match (&self.fan_out, self.publishers.first()) {
            (Some(fan_out), Some((_, Some(_)))) => Ok(fan_out.responders.add(source, responder)),
            (Some(_), _) => Err(config_error("questions come over the replay socket: bind one".into())),
            (None, _) => {
                Err(config_error("it is connected as a subscriber; answer through one that binds".into()))
            }
        }
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        let replays: Vec<ZmtpEndpoint> =
            self.publishers.iter().filter_map(|(_, replay)| replay.as_ref().map(reachable)).collect();
        if replays.is_empty() {
            return Err(config_error("questions go to the replay socket: give its address".into()));
        }
        let (answer, answered) = bounded(replays.len());
        let deadline = deadline::after(timeout);
        for replay in replays {
            let (answer, question) = (answer.clone(), Arc::clone(question));
            self.runtime.spawn(async move {
                // Without an answer the sender is dropped.
                let asked = subscribe::ask(&replay, source, &question);
                if let Ok(Ok(Some(found))) = tokio::time::timeout_at(deadline.into(), asked).await {
                    let _ = answer.try_send(found);
                }
            });
        }
        drop(answer);
        answered
            .recv_deadline(deadline + Duration::from_millis(50))
            .map_err(|_| unavailable(format!("no answer for source {source} within {timeout:?}")))
    }
}

impl Drop for ZmqTransport {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Ends by disconnection or by time; its sockets are free then, unless the machine is very
        // busy.
        let _ = self.ended.recv_timeout(2 * CLOSE_LIMIT);
    }
}

/// One subscriber's end: messages with their topics and numbers, or payloads alone through
/// [`EventReceiver`].
pub struct MessageReceiver(QueueReceiver<ZmqMessage>);

impl MessageReceiver {
    /// The next message, or `None` when none came within `timeout`. Messages of one publisher come
    /// in order. Messages that it could not repeat are a gap in the numbers. With a new
    /// [`life`](ZmqMessage::life) the numbers begin again. A slow reader loses nothing here: while
    /// the queue is full, nothing more is read from the publishers.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<ZmqMessage>, TransportError> {
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
