//! The publisher's side: serves subscribers, and answers those who missed something.

use super::endpoint::{Halves, Listener};
use super::hub::{Hub, Outbox, Outgoing};
use super::zmtp::{Fault, Incoming, Peer, Reader, Socket, Writer, shake_hands};
use super::{ANSWER, ASK, BEAT, HANDSHAKE, SILENT_BEATS};
use crate::SourceId;
use crate::vllm::END_OF_REPLAY;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Accepts until the task is dropped and hands each connection to `serve`.
pub(super) async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: Listener,
    hub: Arc<Hub>,
    most: usize,
    serve: impl Fn(Halves) -> F,
) {
    let places = Arc::new(Semaphore::new(most));
    loop {
        match listener.accept().await {
            Ok(halves) => {
                // One too many is closed at once and may come again.
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                    hub.turn_away();
                    continue;
                };
                let serving = serve(halves);
                tokio::spawn(async move {
                    serving.await;
                    drop(place);
                });
            }
            // A connection that died in the queue, or too many open files: neither is the end.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Serves one subscriber until one of the two is gone.
pub(super) async fn serve_subscriber(hub: Arc<Hub>, halves: Halves, most: usize) {
    let (mut reader, mut writer) = (Reader::new(halves.0), Writer::new(halves.1));
    let greeted = timeout(HANDSHAKE, shake_hands(Socket::Pub, &hub.life, &mut reader, &mut writer)).await;
    let Ok(Ok(Peer { beats, .. })) = greeted else { return hub.turn_away() };
    let Some(outbox) = hub.join(most) else { return hub.turn_away() };
    let writing = tokio::spawn(write_to(Arc::clone(&hub), Arc::clone(&outbox), writer, beats));
    // How it ended is of no use to anybody here: the subscriber comes again.
    let _ = listen_to(&outbox, &mut reader, beats).await;
    writing.abort();
    hub.leave(&outbox);
}

async fn listen_to<R: AsyncRead + Unpin>(
    outbox: &Outbox,
    reader: &mut Reader<R>,
    beats: bool,
) -> Result<(), Fault> {
    loop {
        match next_from(outbox, reader, beats).await? {
            Incoming::Subscribe(prefix) => take(outbox, prefix)?,
            Incoming::Cancel(prefix) => outbox.cancel(&prefix),
            Incoming::Ping(context) => outbox.pong(context),
            Incoming::Pong => {}
            // Subscriptions before ZMTP 3.1: a byte that says whether, then the prefix.
            Incoming::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, prefix)) => take(outbox, prefix.to_vec())?,
                Some((0, prefix)) => outbox.cancel(prefix),
                _ => {}
            },
        }
    }
}

fn take(outbox: &Outbox, prefix: Vec<u8>) -> Result<(), Fault> {
    if outbox.subscribe(prefix) { Ok(()) } else { Err(Fault::Protocol("too many subscriptions")) }
}

/// What the peer says next. A peer that knows heartbeats and neither says nor takes anything for long is gone.
async fn next_from<R: AsyncRead + Unpin>(
    outbox: &Outbox,
    reader: &mut Reader<R>,
    beats: bool,
) -> Result<Incoming, Fault> {
    let mut next = std::pin::pin!(reader.next());
    let (mut silent, mut seen) = (0, outbox.progress.load(Ordering::Relaxed));
    loop {
        if let Ok(came) = timeout(BEAT, &mut next).await {
            return came;
        }
        let progress = outbox.progress.load(Ordering::Relaxed);
        silent = if progress == seen { silent + 1 } else { 0 };
        seen = progress;
        if outbox.ended.load(Ordering::Acquire) || (beats && silent >= SILENT_BEATS) {
            return Err(Fault::Protocol("silence"));
        }
    }
}

/// How long a message may be on its way to a subscriber that knows no heartbeats.
const STUCK: Duration = Duration::from_secs(60);

async fn write_to<W: AsyncWrite + Unpin>(
    hub: Arc<Hub>,
    outbox: Arc<Outbox>,
    mut writer: Writer<W>,
    beats: bool,
) {
    loop {
        let written = match timeout(BEAT, outbox.next()).await {
            Ok(Outgoing::Message(message)) => {
                let number = message.sequence.to_be_bytes();
                let frames: [&[u8]; 3] = [&hub.topic, &number, &message.payload];
                let stuck = Err(Fault::Protocol("a subscriber that takes nothing"));
                let written = timeout(STUCK, writer.message(&frames)).await.unwrap_or(stuck);
                outbox.progress.fetch_add(1, Ordering::Relaxed);
                written
            }
            Ok(Outgoing::Pong(context)) => writer.command("PONG", &context).await,
            Err(_) if beats => writer.command("PING", &ping_and_promise()).await,
            Err(_) => Ok(()),
        };
        if written.is_err() {
            break;
        }
    }
    outbox.ended.store(true, Ordering::Release);
}

/// The body of a PING that promises nothing: how often a subscriber says something depends on what it hears, and libzmq ends a
/// connection over which nothing comes in the time that a PING names.
pub(super) const fn ping() -> [u8; 2] {
    [0; 2]
}

/// The body of a publisher's PING: in how many tenths of a second something more will come, a message or another PING.
fn ping_and_promise() -> [u8; 2] {
    ((BEAT.as_millis() as u16 / 100) * SILENT_BEATS as u16).to_be_bytes()
}

/// Messages that a replay takes from the history at a time.
const REPLAY_STEP: usize = 16;
/// How long a client may take for a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Heartbeats after which a client of the replay socket that knows none and asks nothing gives up its place.
const IDLE_BEATS: u32 = 300;

/// Answers the questions of one client of the replay socket until it goes.
pub(super) async fn serve_replay(hub: Arc<Hub>, halves: Halves) {
    let (mut reader, mut writer) = (Reader::new(halves.0), Writer::new(halves.1));
    let greeted = timeout(HANDSHAKE, shake_hands(Socket::Router, &hub.life, &mut reader, &mut writer)).await;
    let Ok(Ok(Peer { beats, .. })) = greeted else { return hub.turn_away() };
    while let Ok(came) = asked(&mut reader, &mut writer, beats).await {
        let answered = match came {
            Incoming::Message(frames) => answer(&hub, &frames, &mut writer).await,
            Incoming::Ping(context) => in_time(writer.command("PONG", &context)).await,
            _ => Ok(()),
        };
        if answered.is_err() {
            break;
        }
    }
}

/// What a client of the replay socket says next. Its machine may be gone without a word, and its place is one of few: who answers no
/// PING for long gives it up, and of those that know none who asks nothing for very long.
async fn asked<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut Reader<R>,
    writer: &mut Writer<W>,
    beats: bool,
) -> Result<Incoming, Fault> {
    let mut next = std::pin::pin!(reader.next());
    for _ in 0..if beats { SILENT_BEATS } else { IDLE_BEATS } {
        if let Ok(came) = timeout(BEAT, &mut next).await {
            return came;
        }
        if beats {
            // Without a promise: an answer may take its time, and none comes meanwhile.
            in_time(writer.command("PING", &ping())).await?;
        }
    }
    Err(Fault::Protocol("silence"))
}

async fn answer<W: AsyncWrite + Unpin>(
    hub: &Hub,
    frames: &[Vec<u8>],
    writer: &mut Writer<W>,
) -> Result<(), Fault> {
    let number = |frame: &[u8]| <[u8; 8]>::try_from(frame).map(u64::from_be_bytes);
    // Anything else is left unanswered, as vLLM does.
    match frames {
        [delimiter, start] if delimiter.is_empty() => match number(start) {
            Ok(from) => replay(hub, from, writer).await,
            Err(_) => Ok(()),
        },
        [delimiter, ask, source, question] if delimiter.is_empty() && ask == ASK => match number(source) {
            Ok(source) => reply(hub, SourceId(source), question, writer).await,
            Err(_) => Ok(()),
        },
        _ => Ok(()),
    }
}

/// `["", "kvbm-answer", source, answer]`, without the last frame where nobody answers for the source.
async fn reply<W: AsyncWrite + Unpin>(
    hub: &Hub,
    source: SourceId,
    question: &[u8],
    writer: &mut Writer<W>,
) -> Result<(), Fault> {
    let number = source.0.to_be_bytes();
    let answer = match hub.responders.find(source) {
        Some(responder) => {
            let question = question.to_vec();
            // It may take a while, and the thread of the connections has others to serve.
            tokio::task::spawn_blocking(move || responder(&question)).await.ok()
        }
        None => None,
    };
    match &answer {
        Some(answer) => in_time(writer.message(&[b"", ANSWER, &number, answer])).await,
        None => in_time(writer.message(&[b"", ANSWER, &number])).await,
    }
}

/// What is written to a client that reads.
async fn in_time(written: impl Future<Output = Result<(), Fault>>) -> Result<(), Fault> {
    timeout(PATIENCE, written).await.unwrap_or(Err(Fault::Protocol("a client that does not read")))
}

async fn replay<W: AsyncWrite + Unpin>(
    hub: &Hub,
    mut from: u64,
    writer: &mut Writer<W>,
) -> Result<(), Fault> {
    loop {
        let messages = hub.replay(from, REPLAY_STEP);
        let Some(last) = messages.last() else { break };
        from = last.sequence + 1;
        for message in &messages {
            let number = message.sequence.to_be_bytes();
            let frames: [&[u8]; 4] = [b"", &hub.topic, &number, &message.payload];
            in_time(writer.message(&frames)).await?;
        }
    }
    let end = END_OF_REPLAY.to_be_bytes();
    in_time(writer.message(&[b"", b"", &end, b""])).await
}
