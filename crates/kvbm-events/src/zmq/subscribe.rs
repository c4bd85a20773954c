//! The subscriber's side: follows one publisher, comes back after every loss, asks for what it missed.

use super::endpoint::Endpoint;
use super::publish::ping;
use super::zmtp::{Fault, Incoming, Peer, Reader, Socket, Writer, shake_hands};
use super::{ANSWER, ASK, BEAT, HANDSHAKE, Message, SILENT_BEATS};
use crate::queue::Sink;
use crate::vllm::END_OF_REPLAY;
use crate::{Payload, SourceId};
use crossbeam_channel::Sender;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// One publisher to follow.
pub(super) struct Target {
    /// Its place in the list of addresses.
    pub(super) publisher: u32,
    pub(super) events: Endpoint,
    pub(super) replay: Option<Endpoint>,
    pub(super) topic: Vec<u8>,
    /// Ask for what was published before the first message.
    pub(super) from_start: bool,
}

/// Pauses between two attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long the next message of a replay may take.
const REPLAY_PATIENCE: Duration = Duration::from_secs(5);
/// How long what is missing is asked for again after lost connections.
const REPLAY_WHOLE: Duration = Duration::from_secs(10);

/// Follows as long as somebody reads. `connected` hears of the first time that the publisher has the subscription.
pub(super) async fn follow(target: Target, sink: Sink<Message>, connected: Sender<u32>) {
    let mut follower = Follower {
        target,
        sink,
        next: None,
        covered: Covered::default(),
        live: None,
        life: None,
        replays: true,
        connected: Some(connected),
    };
    let mut pause = FIRST_PAUSE;
    while follower.sink.is_wanted() {
        let reached = follower.next;
        // Whatever ended it, the publisher may come back.
        let _ = follower.session().await;
        // A connection that ended before its first message may have lost just that: better too much than too little.
        follower.target.from_start |= follower.connected.is_none();
        pause = if follower.next == reached { (pause * 2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        tokio::time::sleep(pause).await;
    }
}

struct Follower {
    target: Target,
    sink: Sink<Message>,
    /// Number of the next message.
    next: Option<u64>,
    /// Messages that came by a replay at this connection's start, until the first one that is none of them.
    covered: Covered,
    /// Number of the last message that came by itself over this connection.
    live: Option<u64>,
    /// What the publisher said of its life.
    life: Option<Vec<u8>>,
    /// Whether the replay socket could be reached when it was asked last.
    replays: bool,
    connected: Option<Sender<u32>>,
}

/// What a replay has brought: consecutive messages, known by their payloads.
#[derive(Default)]
struct Covered {
    first: u64,
    digests: Vec<u64>,
}

impl Covered {
    fn add(&mut self, number: u64, payload: &[u8]) {
        if number.checked_sub(self.first) != Some(self.digests.len() as u64) {
            *self = Self { first: number, digests: Vec::new() };
        }
        self.digests.push(digest(payload));
    }

    fn has(&self, number: u64, payload: &[u8]) -> bool {
        let at = number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.digests.get(at)).is_some_and(|of| *of == digest(payload))
    }
}

fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(payload);
    hasher.finish()
}

impl Follower {
    /// One connection, to its end.
    async fn session(&mut self) -> Result<(), Fault> {
        let (mut reader, mut writer, Peer { beats, life }) = dial(&self.target.events, Socket::Sub).await?;
        if self.life.is_some() && life != self.life {
            // It has started anew, however far its numbers are by now.
            self.next = Some(0);
        }
        self.life = life;
        (self.covered, self.live) = (Covered::default(), None);
        let mut subscription = vec![1];
        subscription.extend_from_slice(&self.target.topic);
        writer.message(&[&subscription]).await?;
        if beats {
            // Peers do one thing after the other: the answer says that the subscription is there.
            writer.command("PING", &ping()).await?;
        } else {
            self.is_connected();
            self.catch_up().await;
        }
        let mut is_new = beats;
        while self.sink.is_wanted() {
            match self.next_from(&mut reader, &mut writer, beats).await? {
                Incoming::Pong => {
                    self.is_connected();
                    if std::mem::take(&mut is_new) {
                        self.catch_up().await;
                    }
                }
                Incoming::Ping(context) => writer.command("PONG", &context).await?,
                Incoming::Message(frames) => self.take(frames).await,
                Incoming::Subscribe(_) | Incoming::Cancel(_) => {}
            }
        }
        Ok(())
    }

    fn is_connected(&mut self) {
        if let Some(connected) = self.connected.take() {
            // Nobody waits any more when that took too long.
            let _ = connected.try_send(self.target.publisher);
        }
    }

    /// At the start of a connection: what was published before it is asked for at once. A publisher may have nothing more to
    /// say for long.
    async fn catch_up(&mut self) {
        let first = self.next.or(self.target.from_start.then_some(0));
        if let (Some(first), Some(_)) = (first, &self.target.replay) {
            // What does not come shows with the next message.
            let _ = self.fetch(&mut (first..u64::MAX)).await;
        }
    }

    /// What the publisher says next. Silence is answered by PINGs, and lasting silence is an end.
    async fn next_from<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
        &self,
        reader: &mut Reader<R>,
        writer: &mut Writer<W>,
        beats: bool,
    ) -> Result<Incoming, Fault> {
        let mut next = std::pin::pin!(reader.next());
        let mut silent = 0;
        loop {
            if let Ok(came) = timeout(BEAT, &mut next).await {
                return came;
            }
            silent += 1;
            if !self.sink.is_wanted() || (beats && silent >= SILENT_BEATS) {
                return Err(Fault::Protocol("silence"));
            }
            if beats {
                timeout(BEAT, writer.command("PING", &ping())).await.unwrap_or(Ok(()))?;
            }
        }
    }

    /// Hands a message on, and before it those that are missing, as far as the publisher still has them.
    async fn take(&mut self, frames: Vec<Vec<u8>>) {
        // Not of this protocol: what it said shows up as a gap.
        let Some(message) = self.read(frames) else { return };
        if self.is_repeated(message.sequence, &message.payload) {
            return;
        }
        let missing = match self.next {
            Some(next) if message.sequence >= next => next..message.sequence,
            // It stepped back: the publisher has started anew.
            Some(_) => 0..message.sequence,
            None if self.target.from_start => 0..message.sequence,
            None => message.sequence..message.sequence,
        };
        if !missing.is_empty() && self.target.replay.is_some() {
            self.make_up_for(missing).await;
        }
        self.next = Some(message.sequence.saturating_add(1));
        let bytes = message.payload.len();
        self.sink.push(message, bytes);
    }

    /// Whether a message was on its way when what is there was asked for. One that steps back is none of those, nor is another one
    /// under the same number: an engine behind something that forwards its messages may start anew while this connection stays.
    fn is_repeated(&mut self, number: u64, payload: &[u8]) -> bool {
        let steps_back = self.live.replace(number).is_some_and(|last| number <= last);
        let is_repeated = !steps_back && self.covered.has(number, payload);
        if !is_repeated {
            self.covered = Covered::default();
        }
        is_repeated
    }

    /// `[topic, number, payload]`.
    fn read(&self, frames: Vec<Vec<u8>>) -> Option<Message> {
        let [topic, number, payload]: [Vec<u8>; 3] = frames.try_into().ok()?;
        let sequence = u64::from_be_bytes(number.try_into().ok()?);
        Some(Message { publisher: self.target.publisher, topic, sequence, payload: payload.into() })
    }

    /// Fetches what is missing, however often the connection is lost meanwhile. What does not come stays a gap.
    async fn make_up_for(&mut self, missing: Range<u64>) {
        let deadline = Instant::now() + REPLAY_WHOLE;
        let (mut rest, mut pause) = (missing, FIRST_PAUSE);
        while self.sink.is_wanted() {
            let before = rest.start;
            let fetched = self.fetch(&mut rest).await.is_ok();
            // A replay socket that could not be reached for so long is tried once for each loss, until it can.
            self.replays |= fetched;
            if fetched || !self.replays {
                return;
            }
            if Instant::now() + pause > deadline {
                self.replays = false;
                return;
            }
            tokio::time::sleep(pause).await;
            pause = if rest.start > before { FIRST_PAUSE } else { (2 * pause).min(LONGEST_PAUSE) };
        }
    }

    /// Asks for the messages of `missing` and hands them on; what remains of it is what has not come.
    async fn fetch(&mut self, missing: &mut Range<u64>) -> Result<(), Fault> {
        let Some(replay) = &self.target.replay else { return Ok(()) };
        // A connection for each question: nothing to repair after a loss.
        let (mut reader, mut writer, Peer { life, .. }) = dial(replay, Socket::Dealer).await?;
        if life.is_some() && self.life.is_some() && life != self.life {
            // It has started anew and has other messages under these numbers.
            return Ok(());
        }
        writer.message(&[b"", &missing.start.to_be_bytes()]).await?;
        loop {
            let slow = |_| Fault::Protocol("a replay that does not go on");
            let mut frames = match timeout(REPLAY_PATIENCE, reader.next()).await.map_err(slow)?? {
                Incoming::Message(frames) => frames,
                Incoming::Ping(context) => {
                    writer.command("PONG", &context).await?;
                    continue;
                }
                _ => continue,
            };
            // `["", topic, number, payload]`; before vLLM 0.11 without the topic.
            if frames.first().is_some_and(Vec::is_empty) {
                frames.remove(0);
            }
            if frames.len() == 2 {
                frames.insert(0, self.target.topic.clone());
            }
            let Some(message) = self.read(frames) else {
                return Err(Fault::Protocol("a replay that is none"));
            };
            if message.sequence == END_OF_REPLAY || message.sequence >= missing.end {
                return Ok(());
            }
            if message.sequence < missing.start {
                continue;
            }
            missing.start = message.sequence + 1;
            self.covered.add(message.sequence, &message.payload);
            let bytes = message.payload.len();
            self.next = Some(missing.start);
            if !self.sink.push(message, bytes) {
                return Ok(());
            }
        }
    }
}

/// The publisher's answer to a question about a source, if it answers for it.
pub(super) async fn ask(
    replay: &Endpoint,
    source: SourceId,
    question: &[u8],
) -> Result<Option<Payload>, Fault> {
    let (mut reader, mut writer, _) = dial(replay, Socket::Dealer).await?;
    let number = source.0.to_be_bytes();
    writer.message(&[b"", ASK, &number, question]).await?;
    loop {
        let frames = match reader.next().await? {
            Incoming::Message(frames) => frames,
            Incoming::Ping(context) => {
                writer.command("PONG", &context).await?;
                continue;
            }
            _ => continue,
        };
        match frames.as_slice() {
            [_, kind, of, answer] if kind == ANSWER && *of == number => {
                return Ok(Some(answer.as_slice().into()));
            }
            _ => return Ok(None),
        }
    }
}

type Connection =
    (Reader<Box<dyn AsyncRead + Send + Unpin>>, Writer<Box<dyn AsyncWrite + Send + Unpin>>, Peer);

async fn dial(endpoint: &Endpoint, socket: Socket) -> Result<Connection, Fault> {
    let dialled = timeout(HANDSHAKE, async {
        let halves = endpoint.connect().await?;
        let (mut reader, mut writer) = (Reader::new(halves.0), Writer::new(halves.1));
        let peer = shake_hands(socket, &[], &mut reader, &mut writer).await?;
        Ok((reader, writer, peer))
    });
    dialled.await.unwrap_or(Err(Fault::Protocol("no handshake in time")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InProcessConfig;
    use crate::queue::{Queue, QueueReceiver};
    use std::sync::Arc;

    /// Mutations that make it fail: `is_repeated` without `steps_back`; `has` without the digests.
    #[test]
    fn what_was_replayed_is_not_taken_twice_and_a_new_life_on_the_same_connection_is_taken() {
        let taken = |asked: Range<u64>, payload: u8, live: &[u64]| {
            let queue = Arc::new(Queue::default());
            let target = Target {
                publisher: 0,
                events: "tcp://127.0.0.1:1".parse().unwrap(),
                replay: None,
                topic: Vec::new(),
                from_start: false,
            };
            let mut covered = Covered::default();
            asked.clone().for_each(|number| covered.add(number, b"1"));
            let mut follower = Follower {
                target,
                sink: Sink::new(&queue, InProcessConfig::default()),
                next: Some(asked.end),
                covered,
                live: None,
                life: None,
                replays: true,
                connected: None,
            };
            let mut receiver = QueueReceiver::new(queue, super::super::NAME);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            for number in live {
                let frames = vec![Vec::new(), number.to_be_bytes().to_vec(), vec![payload]];
                runtime.block_on(follower.take(frames));
            }
            let next = || Some(receiver.next(Duration::ZERO).unwrap()?.sequence);
            std::iter::from_fn(next).collect::<Vec<_>>()
        };
        assert_eq!(taken(5..9, b'1', &[7, 8, 9, 10]), [9, 10], "two were on their way");
        assert_eq!(taken(5..9, b'1', &[8, 9, 0, 1]), [9, 0, 1], "anew, behind what was replayed");
        assert_eq!(taken(0..9, b'1', &[7, 0, 1, 2]), [0, 1, 2], "anew, before anything new was heard");
        assert_eq!(taken(5..9, b'1', &[0, 1, 5, 6]), [0, 1, 5, 6], "anew, before anything was heard");
        assert_eq!(
            taken(0..9, b'2', &[5, 6, 7]),
            [5, 6, 7],
            "anew, and past the first ones when it is heard"
        );
    }
}
