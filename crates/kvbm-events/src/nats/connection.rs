//! The thread of a connection: carries out one command after the other.

use super::denied::{Denied, Right};
use super::stream::{self, Kept};
use super::{CLOSE_LIMIT, NatsConfig, login, unavailable};
use crate::deadline;
use crate::queue::{Queue, Sink};
use crate::{InProcessConfig, Payload, Responder, SourceId, TransportError};
use async_nats::Client;
use async_nats::connection::State;
use bytes::Bytes;
use crossbeam_channel::Sender;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// What a caller wants. Nobody listens to an answer that comes after the deadline.
pub(super) enum Command {
    Publish {
        payload: Payload,
        deadline: Instant,
        answer: Sender<Result<(), TransportError>>,
    },
    Subscribe {
        deadline: Instant,
        answer: Sender<Result<Arc<Queue>, TransportError>>,
    },
    Answer {
        source: SourceId,
        responder: Responder,
        deadline: Instant,
        answer: Sender<Result<oneshot::Sender<()>, TransportError>>,
    },
    Ask {
        source: SourceId,
        question: Payload,
        deadline: Instant,
        answer: Sender<Result<Payload, TransportError>>,
    },
}

/// Connects, says how that went, and serves until nobody can ask any more; `end` goes when the
/// server has everything.
pub(super) fn run(
    config: NatsConfig,
    mut inbox: mpsc::Receiver<Command>,
    ready: &Sender<Result<(), TransportError>>,
    end: Sender<()>,
    max_payload: &AtomicUsize,
) {
    let name = config.name();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            // The caller has its own deadline.
            let _ = ready.try_send(Err(unavailable(name, format!("no runtime: {error}"))));
            return;
        }
    };
    runtime.block_on(async {
        match Connection::open(config).await {
            Ok(connection) => {
                max_payload.store(connection.client.max_payload(), Ordering::Relaxed);
                let _ = ready.try_send(Ok(()));
                while let Some(command) = inbox.recv().await {
                    max_payload.store(connection.client.max_payload(), Ordering::Relaxed);
                    connection.carry_out(command).await;
                }
                // What the server has not taken by then is lost. Where there is no connection
                // nothing can be.
                if connection.client.connection_state() == State::Connected {
                    let _ = connection.round_trip(deadline::after(CLOSE_LIMIT)).await;
                }
                drop(end);
            }
            Err(error) => {
                let _ = ready.try_send(Err(error));
            }
        }
    });
}

struct Connection {
    name: &'static str,
    client: Client,
    denied: Arc<Denied>,
    subject: String,
    queue: InProcessConfig,
    kept: Option<Kept>,
}

impl Connection {
    async fn open(config: NatsConfig) -> Result<Self, TransportError> {
        let name = config.name();
        let deadline = deadline::after(config.connect_timeout);
        let denied = Arc::new(Denied::default());
        let client = login::connect(&config, deadline, &denied).await?;
        let kept = match &config.stream {
            Some(stream) => {
                let opening = Box::pin(Kept::open(name, deadline, &client, stream, &config.subject));
                Some(denied.unless(name, stream::API, opening).await?)
            }
            None => None,
        };
        Ok(Self { name, client, denied, subject: config.subject, queue: config.queue, kept })
    }

    async fn carry_out(&self, command: Command) {
        match command {
            Command::Publish { payload, deadline, answer } => {
                let _ = answer.try_send(self.publish(payload, deadline).await);
            }
            Command::Subscribe { deadline, answer } => {
                let _ = answer.try_send(self.subscribe(deadline).await);
            }
            Command::Answer { source, responder, deadline, answer } => {
                let _ = answer.try_send(self.answer(source, responder, deadline).await);
            }
            Command::Ask { source, question, deadline, answer } => {
                // An answer may take long; events are published meanwhile.
                let (name, client, subject) = (self.name, self.client.clone(), self.asking(source));
                let denied = Arc::clone(&self.denied);
                tokio::spawn(async move {
                    let asked = client.request(subject.clone(), Bytes::from_owner(question));
                    let what = format!("asking for source {source}");
                    let found = denied.unless(name, &subject, within(name, deadline, &what, asked)).await;
                    let _ = answer.try_send(found.map(|message| Payload::from(&*message.payload)));
                });
            }
        }
    }

    async fn publish(&self, payload: Payload, deadline: Instant) -> Result<(), TransportError> {
        if self.client.connection_state() != State::Connected {
            return Err(unavailable(self.name, "the connection is lost; connecting again"));
        }
        let most = self.client.max_payload();
        if payload.len() > most {
            let reason = format!("{} bytes exceed the server's max_payload of {most}", payload.len());
            return Err(TransportError::Refused { transport: self.name, reason });
        }
        self.denied.check_publishing(self.name, &self.subject)?;
        let bytes = Bytes::from_owner(payload);
        if let Some(kept) = &self.kept {
            let kept = Box::pin(kept.publish(self.name, deadline, bytes));
            return self.denied.unless(self.name, &self.subject, kept).await;
        }
        let publish = self.client.publish(self.subject.clone(), bytes);
        within(self.name, deadline, "handing over a batch", publish).await?;
        if !self.denied.may_publish() {
            // Nobody answers to what is published: the first is believed when the server had the
            // time to deny it.
            self.round_trip(deadline).await?;
            self.denied.check(self.name, Right::Publish, &self.subject)?;
            self.denied.published();
        }
        Ok(())
    }

    async fn subscribe(&self, deadline: Instant) -> Result<Arc<Queue>, TransportError> {
        let queue = Arc::new(Queue::default());
        let sink = Sink::new(&queue, self.queue);
        if let Some(kept) = &self.kept {
            let position = Box::pin(kept.position(self.name, deadline));
            let position = self.denied.unless(self.name, stream::API, position).await?;
            tokio::spawn(stream::follow(kept.clone(), position, sink));
            return Ok(queue);
        }
        let mut subscription = self.subscription(self.subject.clone(), deadline).await?;
        let (denied, subject) = (Arc::clone(&self.denied), self.subject.clone());
        tokio::spawn(async move {
            // Denied later, on another connection perhaps, it ends: whoever subscribes again is
            // told why.
            let denied = denied.of_subscribing(&subject);
            futures_util::pin_mut!(denied);
            while let Either::Left((Some(message), _)) = select(subscription.next(), &mut denied).await {
                if !sink.push(Payload::from(&*message.payload), message.payload.len()) {
                    break;
                }
            }
        });
        Ok(queue)
    }

    /// A subscription that the server has, and permits.
    async fn subscription(
        &self,
        subject: String,
        deadline: Instant,
    ) -> Result<async_nats::Subscriber, TransportError> {
        self.denied.forget(Right::Subscribe, &subject);
        let subscribe = self.client.subscribe(subject.clone());
        let subscription = within(self.name, deadline, "subscribing", subscribe).await?;
        self.round_trip(deadline).await?;
        self.denied.check(self.name, Right::Subscribe, &subject)?;
        Ok(subscription)
    }

    /// Subject of questions about a source.
    fn asking(&self, source: SourceId) -> String {
        format!("{}.ask.{source}", self.subject)
    }

    /// Answers questions until what is returned is dropped. The client subscribes again after a
    /// lost connection.
    async fn answer(
        &self,
        source: SourceId,
        responder: Responder,
        deadline: Instant,
    ) -> Result<oneshot::Sender<()>, TransportError> {
        let mut questions = self.subscription(self.asking(source), deadline).await?;
        let (guard, mut gone) = oneshot::channel::<()>();
        let client = self.client.clone();
        tokio::spawn(async move {
            while let Either::Left((Some(question), _)) = select(questions.next(), &mut gone).await {
                let Some(reply) = question.reply else { continue };
                let responder = Arc::clone(&responder);
                let answered = tokio::task::spawn_blocking(move || responder(&question.payload)).await;
                if let Ok(mut answer) = answered {
                    if answer.len() > client.max_payload() {
                        // What is empty is no answer, and known at once.
                        answer = Payload::from(&b""[..]);
                    }
                    // Lost with the connection, it is asked for again.
                    let _ = client.publish(reply, Bytes::from_owner(answer)).await;
                }
            }
        });
        Ok(guard)
    }

    /// Waits until the server has done all that was asked of it on this connection, and what it
    /// denies of that is noted.
    async fn round_trip(&self, deadline: Instant) -> Result<(), TransportError> {
        let inbox = self.client.new_inbox();
        let mut echo =
            within(self.name, deadline, "subscribing", self.client.subscribe(inbox.clone())).await?;
        let publish = self.client.publish(inbox.clone(), Bytes::new());
        within(self.name, deadline, "subscribing", publish).await?;
        // Where the echo itself is denied, that is a word of the server's too, behind all others.
        let denied = self.denied.of(&inbox);
        futures_util::pin_mut!(denied);
        within(self.name, deadline, "subscribing", async {
            match select(echo.next(), denied).await {
                Either::Left((None, _)) => Err("the connection was lost"),
                Either::Left(_) | Either::Right(_) => Ok(()),
            }
        })
        .await?;
        // The client reports denials on a task of its own; this lets that task run.
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    }
}

/// The result of `work`, or that it took too long.
pub(super) async fn within<T, E: std::fmt::Display>(
    name: &'static str,
    deadline: Instant,
    what: &str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, TransportError> {
    match tokio::time::timeout_at(deadline.into(), work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(unavailable(name, format!("{what}: {error}"))),
        Err(_) => Err(unavailable(name, format!("{what} took too long"))),
    }
}
