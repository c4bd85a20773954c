//! `JetStream`: payloads acknowledged when the server has them, subscribers that go on where they were.

use super::connection::within;
use super::{StreamConfig, unavailable};
use crate::queue::Sink;
use crate::{Payload, TransportError};
use async_nats::Client;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::{Config, DiscardPolicy, StorageType, Stream};
use async_nats::jetstream::{self, Context};
use bytes::Bytes;
use futures_util::StreamExt;
use std::time::{Duration, Instant};

/// A stream on the server.
#[derive(Clone)]
pub(super) struct Kept {
    context: Context,
    stream: Stream,
    from_start: bool,
}

impl Kept {
    pub(super) async fn open(
        name: &'static str,
        deadline: Instant,
        client: &Client,
        config: &StreamConfig,
        subject: &str,
    ) -> Result<Self, TransportError> {
        let mut context = jetstream::new(client.clone());
        // What a cut takes along is asked for again soon.
        context.set_timeout(ASKING);
        let wanted = Config {
            name: config.name.clone(),
            subjects: vec![subject.to_owned()],
            storage: if config.on_disk { StorageType::File } else { StorageType::Memory },
            max_bytes: i64::try_from(config.max_bytes).unwrap_or(i64::MAX),
            max_age: config.max_age,
            discard: DiscardPolicy::Old,
            ..Config::default()
        };
        let what = format!("opening stream {}", config.name);
        let stream = within(name, deadline, &what, context.get_or_create_stream(wanted)).await?;
        let there = &stream.cached_info().config.subjects;
        if !there.iter().any(|known| known == subject) {
            let reason =
                format!("stream {} keeps {there:?}, not {subject}: name another stream", config.name);
            return Err(unavailable(name, reason));
        }
        Ok(Self { context, stream, from_start: config.from_start })
    }

    /// Publishes and waits for the server's word that it is kept.
    pub(super) async fn publish(
        &self,
        name: &'static str,
        deadline: Instant,
        subject: &str,
        payload: Bytes,
    ) -> Result<(), TransportError> {
        let sent = self.context.publish(subject.to_owned(), payload);
        let ack = within(name, deadline, "handing over a batch", sent).await?;
        within(name, deadline, "waiting for the server to keep a batch", ack.into_future()).await?;
        Ok(())
    }

    /// Number in the stream with which a new subscriber starts.
    pub(super) async fn position(
        &self,
        name: &'static str,
        deadline: Instant,
    ) -> Result<u64, TransportError> {
        let info = within(name, deadline, "asking for the stream's end", self.stream.get_info()).await?;
        Ok(if self.from_start { 1 } else { info.state.last_sequence + 1 })
    }
}

/// How long the server may take to answer a request.
const ASKING: Duration = Duration::from_secs(1);

/// Pause before a consumer is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// Moves what is in the stream from `next` on into `sink`, whatever happens to the server meanwhile.
pub(super) async fn follow(kept: Kept, mut next: u64, subject: String, sink: Sink) {
    while sink.is_wanted() {
        // An error means that the server or the consumer is away: start again from what is known.
        if let Ok(reached) = follow_once(&kept, next, &subject, &sink).await {
            next = reached;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows until something is wrong; the number that comes next then.
async fn follow_once(
    kept: &Kept,
    mut next: u64,
    subject: &str,
    sink: &Sink,
) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    let config = pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: next },
        // The position is kept here: a consumer that is lost or late is made again.
        ack_policy: AckPolicy::None,
        filter_subject: subject.to_owned(),
        inactive_threshold: Duration::from_secs(30),
        memory_storage: true,
        ..pull::Config::default()
    };
    let consumer = kept.stream.create_consumer(config).await?;
    let mut messages = consumer
        .stream()
        .heartbeat(Duration::from_millis(500))
        .expires(Duration::from_secs(2))
        .max_messages_per_batch(256)
        .messages()
        .await?;
    let mut delivered = 0;
    while let Some(Ok(message)) = messages.next().await {
        let Ok(info) = message.info() else { break };
        // The stream's numbers may have holes, by age, size or other subjects; those of the consumer have none, unless a
        // lost connection took some along, the very first perhaps.
        delivered += 1;
        if info.consumer_sequence != delivered {
            break;
        }
        let number = info.stream_sequence;
        if number < next {
            continue;
        }
        if !sink.push(Payload::from(&*message.payload), message.payload.len()) {
            break;
        }
        next = number + 1;
    }
    Ok(next)
}
