//! `JetStream`: payloads acknowledged when the server has them, subscribers that go on where they
//! were. A stream may be gone, with a server that kept it in memory or because somebody deleted it.
//! The next who publishes creates it again, and it is followed from its start. What was lost with
//! it shows up as a gap in the numbers of the events.

use super::connection::within;
use super::{StreamConfig, unavailable};
use crate::queue::Sink;
use crate::{Payload, TransportError};
use async_nats::Client;
use async_nats::datetime::DateTime;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::context::{
    CreateStreamError, CreateStreamErrorKind, PublishError, PublishErrorKind,
};
use async_nats::jetstream::stream::{Config, DiscardPolicy, StorageType, Stream};
use async_nats::jetstream::{self, Context};
use bytes::Bytes;
use futures_util::StreamExt;
use std::time::{Duration, Instant};

/// A stream on the server.
#[derive(Clone)]
pub(super) struct Kept {
    context: Context,
    /// How it is created where it is not there.
    wanted: Config,
    subject: String,
    from_start: bool,
}

/// Where a subscriber is in the stream.
#[derive(Clone, Copy)]
pub(super) struct Position {
    /// Number of the next message.
    next: u64,
    /// When the stream was created: one that was created again has other messages under the same
    /// numbers.
    created: DateTime,
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
        let kept = Self { context, wanted, subject: subject.to_owned(), from_start: config.from_start };
        kept.stream(name, deadline).await?;
        Ok(kept)
    }

    /// The stream, created if it is not there.
    async fn stream(&self, name: &'static str, deadline: Instant) -> Result<Stream, TransportError> {
        let Config { name: of, .. } = &self.wanted;
        let what = format!("opening stream {of}");
        let opening = async {
            loop {
                match self.context.get_or_create_stream(self.wanted.clone()).await {
                    // A slow disk: making a stream takes several files. The deadline is the
                    // caller's.
                    Err(error) if error.kind() == CreateStreamErrorKind::TimedOut => {}
                    opened => return opened.map_err(|error| explain(&error, &self.wanted)),
                }
            }
        };
        let stream = within(name, deadline, &what, opening).await?;
        let there = &stream.cached_info().config.subjects;
        if there.iter().any(|pattern| covers(pattern, &self.subject)) {
            return Ok(stream);
        }
        let reason = format!(
            "stream {of} keeps {there:?}, not {}: name another stream or subject, or add it to the stream's",
            self.subject
        );
        Err(TransportError::Config { transport: name, reason })
    }

    /// Publishes, and waits until the server confirms that it has stored the message.
    pub(super) async fn publish(
        &self,
        name: &'static str,
        deadline: Instant,
        payload: Bytes,
    ) -> Result<(), TransportError> {
        if self.hand_over(name, deadline, payload.clone()).await? {
            return Ok(());
        }
        self.stream(name, deadline).await?;
        if self.hand_over(name, deadline, payload).await? {
            return Ok(());
        }
        Err(unavailable(
            name,
            format!("stream {} was created again and accepts no events yet", self.wanted.name),
        ))
    }

    /// Whether the server keeps the payload; not where there is no stream for it.
    async fn hand_over(
        &self,
        name: &'static str,
        deadline: Instant,
        payload: Bytes,
    ) -> Result<bool, TransportError> {
        let bytes = payload.len();
        let sent = self.context.publish(self.subject.clone(), payload);
        let ack = within(name, deadline, "handing over a batch", sent).await?;
        let acknowledged = async {
            match ack.await {
                Ok(_) => Ok(Ok(true)),
                Err(error) if error.kind() == PublishErrorKind::StreamNotFound => Ok(Ok(false)),
                Err(error) if is_too_long(&error) => Ok(Err(error.to_string())),
                Err(error) => Err(error),
            }
        };
        match within(name, deadline, "waiting for the server to keep a batch", acknowledged).await? {
            Ok(is_kept) => Ok(is_kept),
            Err(said) => {
                let of = &self.wanted.name;
                let reason = format!("{said}: stream {of} takes no {bytes} bytes; raise its max_msg_size");
                Err(TransportError::Refused { transport: name, reason })
            }
        }
    }

    /// Where a new subscriber starts.
    pub(super) async fn position(
        &self,
        name: &'static str,
        deadline: Instant,
    ) -> Result<Position, TransportError> {
        let stream = self.stream(name, deadline).await?;
        let info = stream.cached_info();
        let next = if self.from_start { 1 } else { info.state.last_sequence + 1 };
        Ok(Position { next, created: info.created })
    }
}

/// Subjects of requests to `JetStream` begin so.
pub(super) const API: &str = "$JS.API.";

/// Whether the stream will never take a message of this length.
fn is_too_long(error: &PublishError) -> bool {
    let said = std::error::Error::source(error).and_then(|error| error.downcast_ref::<jetstream::Error>());
    said.is_some_and(|said| said.error_code() == ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM)
}

/// Whether a stream with the subject `pattern`, perhaps with wildcards, keeps what is published to
/// `subject`.
fn covers(pattern: &str, subject: &str) -> bool {
    let mut words = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, words.next()) {
            (">", word) => return word.is_some(),
            ("*", Some(_)) => {}
            (wanted, Some(word)) if wanted == word => {}
            _ => return false,
        }
    }
    words.next().is_none()
}

/// What is in the way of a stream, and the way out.
fn explain(error: &CreateStreamError, wanted: &Config) -> String {
    let storage = match wanted.storage {
        StorageType::File => "files: free space on its disk, or max_file_store in its configuration",
        StorageType::Memory => "memory: max_memory_store in its configuration",
    };
    match error.kind() {
        CreateStreamErrorKind::JetStream(refusal) if LACKS_STORAGE.contains(&refusal.error_code()) => {
            format!(
                "{refusal}: the server reserves max_bytes={} for it and has too little left; reserve less \
             (max_bytes=BYTES in the URL), or give the server or its account more storage in {storage}",
                wanted.max_bytes
            )
        }
        CreateStreamErrorKind::JetStreamUnavailable => format!(
            "{error}: start the server with JetStream (nats-server -js, and room for its files), or use nats:// without it"
        ),
        _ => error.to_string(),
    }
}

/// What the server says when the stream's `max_bytes` are more than it, or the account, has left.
const LACKS_STORAGE: [ErrorCode; 5] = [
    ErrorCode::STORAGE_RESOURCES_EXCEEDED,
    ErrorCode::MEMORY_RESOURCES_EXCEEDED,
    ErrorCode::INSUFFICIENT_RESOURCES,
    ErrorCode::ACCOUNT_RESOURCES_EXCEEDED,
    ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED,
];

/// How long the server may take to answer a request.
const ASKING: Duration = Duration::from_secs(1);

/// Pause before a consumer is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// Moves what is in the stream from `position` on into `sink`, whatever happens to the server
/// meanwhile.
pub(super) async fn follow(kept: Kept, mut position: Position, sink: Sink) {
    while sink.is_wanted() {
        // An error means that the server, the stream or the consumer is away: start again from what
        // is known.
        let _ = follow_once(&kept, &mut position, &sink).await;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows until something is wrong.
async fn follow_once(
    kept: &Kept,
    position: &mut Position,
    sink: &Sink,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let config = pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: position.next },
        // The position is kept here: a consumer that is lost or late is made again.
        ack_policy: AckPolicy::None,
        filter_subject: kept.subject.clone(),
        inactive_threshold: Duration::from_secs(30),
        memory_storage: true,
        ..pull::Config::default()
    };
    let consumer = kept.context.create_consumer_on_stream(config, kept.wanted.name.as_str()).await?;
    // Asked for after the consumer was made: it goes with its stream, so that it follows this one
    // or ends.
    let info = kept.context.get_stream_no_info(kept.wanted.name.as_str()).await?.get_info().await?;
    if info.created != position.created || info.state.last_sequence + 1 < position.next {
        // Created again, or set back to an earlier state: what it has under the old numbers is
        // news.
        *position = Position { next: 1, created: info.created };
        return Ok(());
    }
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
        // The stream's numbers may have holes, by age, size or other subjects; those of the
        // consumer have none, unless a lost connection took some along, the very first perhaps.
        delivered += 1;
        if info.consumer_sequence != delivered {
            break;
        }
        let number = info.stream_sequence;
        if number < position.next {
            continue;
        }
        if !sink.push(Payload::from(&*message.payload), message.payload.len()) {
            break;
        }
        position.next = number + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_of_a_stream_cover_its_subjects() {
        for pattern in ["kvbm.events", "kvbm.*", "kvbm.>", "*.events", "*.*", ">"] {
            assert!(covers(pattern, "kvbm.events"), "{pattern}");
        }
        for pattern in ["kvbm", "kvbm.events.a", "kvbm.events.>", "kvbm.*.*", "*", "other.>", ""] {
            assert!(!covers(pattern, "kvbm.events"), "{pattern}");
        }
    }
}
