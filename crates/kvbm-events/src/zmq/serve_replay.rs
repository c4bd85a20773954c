//! The ROUTER socket of a publisher: repeats messages and answers questions.

use super::fan_out::FanOut;
use super::{ANSWER, ASK, HANDSHAKE_LIMIT, HEARTBEAT, LIFE, MISSED_HEARTBEATS};
use crate::SourceId;
use crate::vllm::END_OF_REPLAY;
use kvbm_zmtp::{
    EndpointListener, Handshake, Received, SocketReader, SocketType, SocketWriter, ZmtpError, ZmtpReader,
    ZmtpWriter, handshake,
};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Messages that a replay takes from the history at a time.
const REPLAY_STEP: usize = 16;
/// How long a client may take to read one message.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// Heartbeats after which a client that knows none and asks nothing loses its connection.
const IDLE_HEARTBEATS: u32 = 300;
/// Most bytes of a question: 64 clients together cost 64 MiB.
const MAX_QUESTION_BYTES: usize = 1 << 20;

/// Serves clients until the task is dropped.
pub(super) async fn accept(listener: EndpointListener, fan_out: Arc<FanOut>, max_peers: usize) {
    let refusing = Arc::clone(&fan_out);
    let serve = move |halves| serve_client(Arc::clone(&fan_out), halves);
    kvbm_zmtp::accept(listener, max_peers, move || refusing.refuse(), serve).await;
}

/// Answers the questions of one client until it goes.
async fn serve_client(fan_out: Arc<FanOut>, halves: (SocketReader, SocketWriter)) {
    let life: [(&str, &[u8]); 1] = [(LIFE, &fan_out.life)];
    let shaken = handshake(SocketType::Router, &life, halves, HANDSHAKE_LIMIT).await;
    let Ok(Handshake { reader, mut writer, peer }) = shaken else { return fan_out.refuse() };
    let mut reader = reader.with_max_message_bytes(MAX_QUESTION_BYTES);
    while let Ok(received) = receive(&mut reader, &mut writer, peer.heartbeats).await {
        let answered = match received {
            Received::Message(frames) => answer(&fan_out, &frames, &mut writer).await,
            Received::Ping(context) => in_time(writer.pong(&context)).await,
            _ => Ok(()),
        };
        if answered.is_err() {
            break;
        }
    }
}

/// What a client sends next. Connections are few, and a client's machine may be gone silently. So a
/// client that answers no PING for [`MISSED_HEARTBEATS`] loses its connection, and one that knows
/// no heartbeats after [`IDLE_HEARTBEATS`].
async fn receive<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut ZmtpReader<R>,
    writer: &mut ZmtpWriter<W>,
    heartbeats: bool,
) -> Result<Received, ZmtpError> {
    let mut next = std::pin::pin!(reader.next());
    for _ in 0..if heartbeats { MISSED_HEARTBEATS } else { IDLE_HEARTBEATS } {
        if let Ok(received) = timeout(HEARTBEAT, &mut next).await {
            return received;
        }
        if heartbeats {
            // Without a promise: while an answer is computed, no PING is sent.
            in_time(writer.ping(Duration::ZERO)).await?;
        }
    }
    Err(ZmtpError::Timeout("heartbeats of a client"))
}

async fn answer<W: AsyncWrite + Unpin>(
    fan_out: &FanOut,
    frames: &[Vec<u8>],
    writer: &mut ZmtpWriter<W>,
) -> Result<(), ZmtpError> {
    let number = |frame: &[u8]| <[u8; 8]>::try_from(frame).map(u64::from_be_bytes);
    // Other messages get no answer, as with vLLM.
    match frames {
        [delimiter, start] if delimiter.is_empty() => match number(start) {
            Ok(from) => replay(fan_out, from, writer).await,
            Err(_) => Ok(()),
        },
        [delimiter, ask, source, question] if delimiter.is_empty() && ask == ASK => match number(source) {
            Ok(source) => reply(fan_out, SourceId(source), question, writer).await,
            Err(_) => Ok(()),
        },
        _ => Ok(()),
    }
}

/// `["", "kvbm-answer", source, answer]`, without the last frame if the source has no responder.
async fn reply<W: AsyncWrite + Unpin>(
    fan_out: &FanOut,
    source: SourceId,
    question: &[u8],
    writer: &mut ZmtpWriter<W>,
) -> Result<(), ZmtpError> {
    let number = source.0.to_be_bytes();
    let answer = match fan_out.responders.find(source) {
        Some(responder) => {
            let question = question.to_vec();
            // A responder may take long, and this thread serves all connections.
            tokio::task::spawn_blocking(move || responder(&question)).await.ok()
        }
        None => None,
    };
    match &answer {
        Some(answer) => in_time(writer.message(&[b"", ANSWER, &number, answer])).await,
        None => in_time(writer.message(&[b"", ANSWER, &number])).await,
    }
}

async fn in_time(written: impl Future<Output = Result<(), ZmtpError>>) -> Result<(), ZmtpError> {
    timeout(WRITE_LIMIT, written).await.unwrap_or(Err(ZmtpError::Timeout("a client that does not read")))
}

async fn replay<W: AsyncWrite + Unpin>(
    fan_out: &FanOut,
    mut from: u64,
    writer: &mut ZmtpWriter<W>,
) -> Result<(), ZmtpError> {
    loop {
        let messages = fan_out.replay(from, REPLAY_STEP);
        let Some(last) = messages.last() else { break };
        from = last.sequence + 1;
        for message in &messages {
            let sequence = message.sequence.to_be_bytes();
            let frames: [&[u8]; 4] = [b"", &fan_out.topic, &sequence, &message.payload];
            in_time(writer.message(&frames)).await?;
        }
    }
    let end = END_OF_REPLAY.to_be_bytes();
    in_time(writer.message(&[b"", b"", &end, b""])).await
}
