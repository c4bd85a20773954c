//! The PUB socket of a publisher: serves subscribers.

use super::fan_out::{FanOut, Outgoing, SubscriberQueue};
use super::{HANDSHAKE_LIMIT, HEARTBEAT, LIFE, MISSED_HEARTBEATS};
use kvbm_zmtp::{
    EndpointListener, Handshake, Received, SocketReader, SocketType, SocketWriter, ZmtpError, ZmtpReader,
    ZmtpWriter, handshake,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// How long one message may take to a subscriber that knows no heartbeats.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// Serves subscribers until the task is dropped.
pub(super) async fn accept(listener: EndpointListener, fan_out: Arc<FanOut>, max_peers: usize) {
    let refusing = Arc::clone(&fan_out);
    let serve = move |halves| serve_subscriber(Arc::clone(&fan_out), halves, max_peers);
    kvbm_zmtp::accept(listener, max_peers, move || refusing.refuse(), serve).await;
}

/// Serves one subscriber until one of the two is gone.
async fn serve_subscriber(fan_out: Arc<FanOut>, halves: (SocketReader, SocketWriter), max_peers: usize) {
    let life: [(&str, &[u8]); 1] = [(LIFE, &fan_out.life)];
    let shaken = handshake(SocketType::Pub, &life, halves, HANDSHAKE_LIMIT).await;
    let Ok(Handshake { mut reader, writer, peer }) = shaken else { return fan_out.refuse() };
    let Some(queue) = fan_out.join(max_peers) else { return fan_out.refuse() };
    let writing =
        tokio::spawn(write_messages(Arc::clone(&fan_out), Arc::clone(&queue), writer, peer.heartbeats));
    // The subscriber connects again, whatever the error was.
    let _ = read_subscriptions(&queue, &mut reader, peer.heartbeats).await;
    writing.abort();
    fan_out.leave(&queue);
}

async fn read_subscriptions<R: AsyncRead + Unpin>(
    queue: &SubscriberQueue,
    reader: &mut ZmtpReader<R>,
    heartbeats: bool,
) -> Result<(), ZmtpError> {
    loop {
        match receive(queue, reader, heartbeats).await? {
            Received::Subscribe(prefix) => queue.subscribe(prefix)?,
            Received::Cancel(prefix) => queue.cancel(&prefix),
            Received::Ping(context) => queue.pong(context),
            Received::Pong | Received::Message(_) => {}
        }
    }
}

/// The next command of the peer. A peer that knows heartbeats, and neither sends nor takes anything
/// for [`MISSED_HEARTBEATS`], is gone.
async fn receive<R: AsyncRead + Unpin>(
    queue: &SubscriberQueue,
    reader: &mut ZmtpReader<R>,
    heartbeats: bool,
) -> Result<Received, ZmtpError> {
    let mut next = std::pin::pin!(reader.next());
    let (mut missed, mut before) = (0, queue.progress.load(Ordering::Relaxed));
    loop {
        if let Ok(received) = timeout(HEARTBEAT, &mut next).await {
            return received;
        }
        let progress = queue.progress.load(Ordering::Relaxed);
        missed = if progress == before { missed + 1 } else { 0 };
        before = progress;
        if queue.has_ended() || (heartbeats && missed >= MISSED_HEARTBEATS) {
            return Err(ZmtpError::Timeout("heartbeats of a subscriber"));
        }
    }
}

async fn write_messages<W: AsyncWrite + Unpin>(
    fan_out: Arc<FanOut>,
    queue: Arc<SubscriberQueue>,
    mut writer: ZmtpWriter<W>,
    heartbeats: bool,
) {
    loop {
        let written = match timeout(HEARTBEAT, queue.next()).await {
            Ok(Outgoing::Message(message)) => {
                let sequence = message.sequence.to_be_bytes();
                let frames: [&[u8]; 3] = [&fan_out.topic, &sequence, &message.payload];
                let late = Err(ZmtpError::Timeout("writing a message"));
                let written = timeout(WRITE_LIMIT, writer.message(&frames)).await.unwrap_or(late);
                queue.is_written();
                written
            }
            Ok(Outgoing::Pong(context)) => writer.pong(&context).await,
            // A message or another PING follows in that time.
            Err(_) if heartbeats => writer.ping(HEARTBEAT * MISSED_HEARTBEATS).await,
            Err(_) => Ok(()),
        };
        if written.is_err() {
            break;
        }
    }
    queue.end();
}
