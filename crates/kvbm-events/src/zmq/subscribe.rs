//! The subscriber's side: follows one publisher, comes back after every loss, asks for what it
//! missed.

use super::{ANSWER, ASK, HANDSHAKE_LIMIT, HEARTBEAT, LIFE, MISSED_HEARTBEATS, ZmqMessage};
use crate::deadline;
use crate::queue::Sink;
use crate::vllm::END_OF_REPLAY;
use crate::{Payload, SourceId};
use crossbeam_channel::Sender;
use kvbm_zmtp::{
    ConnectedPeer, Handshake, Received, SocketType, SocketWriter, ZmtpEndpoint, ZmtpError, ZmtpReader,
    ZmtpWriter,
};
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::time::timeout;

/// One publisher to follow.
pub(super) struct Target {
    /// Its place in the list of addresses.
    pub(super) publisher: u32,
    pub(super) events: ZmtpEndpoint,
    pub(super) replay: Option<ZmtpEndpoint>,
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
/// An answer that ends at a hole after fewer messages than this has brought little: what a socket
/// drops, it drops from a long row.
const LITTLE: u64 = 64;
/// So many of them in a row, and the holes are there for good: messages that the publisher does not
/// have.
const MOST_OF_LITTLE: u32 = 8;

/// Follows as long as somebody reads. `connected` hears of the first time that the publisher has
/// the subscription.
pub(super) async fn follow(target: Target, sink: Sink<ZmqMessage>, connected: Sender<u32>) {
    let mut follower = Follower::new(target, sink);
    follower.connected = Some(connected);
    let mut pause = FIRST_PAUSE;
    while follower.sink.is_wanted() {
        let reached = follower.reached();
        // Whatever ended it, the publisher may come back.
        let _ = follower.session().await;
        follower.connection = None;
        // A connection that ended before its first message may have lost just that: better too much
        // than too little.
        follower.target.from_start |= follower.connected.is_none();
        pause = if follower.reached() == reached { (pause * 2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        tokio::time::sleep(pause).await;
    }
}

struct Follower {
    target: Target,
    sink: Sink<ZmqMessage>,
    /// The way back to the publisher, as long as there is a connection.
    connection: Option<EventConnection>,
    /// Number of the next message.
    next: Option<u64>,
    /// Hash of the message before `next`, of a publisher that does not tell its lives apart.
    last: Option<u64>,
    /// Lives of the publisher before this one.
    lives: u64,
    /// The publisher may have begun a new life, and nothing has said yet whether it has.
    in_doubt: bool,
    /// Messages that came by a replay at this connection's start, until the first one that is none
    /// of them.
    covered: Covered,
    /// Number of the last message that came by itself over this connection.
    live: Option<u64>,
    /// What the publisher said of its life.
    life: Option<Vec<u8>>,
    /// Whether the replay socket could be reached when it was asked last.
    replays: bool,
    connected: Option<Sender<u32>>,
}

/// How the answer to a question for what is missing ended.
enum Answered {
    /// With all that is to come.
    All,
    /// With the life that was asked for it.
    Anew,
    /// At a hole, after so many messages.
    Hole(u64),
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

/// The writing end of the connection to the publisher's events.
struct EventConnection {
    writer: ZmtpWriter<SocketWriter>,
    /// The publisher knows heartbeats.
    heartbeats: bool,
}

impl EventConnection {
    /// A sign of life. One that cannot be written in time is left out.
    async fn ping(&mut self) -> Result<(), ZmtpError> {
        if !self.heartbeats {
            return Ok(());
        }
        timeout(HEARTBEAT, self.writer.ping(Duration::ZERO)).await.unwrap_or(Ok(()))
    }
}

impl Follower {
    fn new(target: Target, sink: Sink<ZmqMessage>) -> Self {
        Self {
            target,
            sink,
            connection: None,
            next: None,
            last: None,
            lives: 0,
            in_doubt: false,
            covered: Covered::default(),
            live: None,
            life: None,
            replays: true,
            connected: None,
        }
    }

    /// One connection, to its end.
    async fn session(&mut self) -> Result<(), ZmtpError> {
        let Handshake { mut reader, writer, peer } = dial(&self.target.events, SocketType::Sub).await?;
        let (heartbeats, life) = (peer.heartbeats, peer.property(LIFE).map(<[u8]>::to_vec));
        if self.next.is_some() && life != self.life {
            self.begin_anew();
        }
        self.life = life;
        // Who does not tell its lives apart may have come as far in a new one as it had in the old.
        self.in_doubt |= self.last.is_some();
        (self.covered, self.live) = (Covered::default(), None);
        let line = self.connection.insert(EventConnection { writer, heartbeats });
        line.writer.subscribe(&self.target.topic).await?;
        if heartbeats {
            // Peers do one thing after the other: the answer says that the subscription is there.
            line.writer.ping(Duration::ZERO).await?;
        } else {
            self.is_connected();
            self.catch_up().await;
        }
        let mut is_new = heartbeats;
        while self.sink.is_wanted() {
            match self.next_from(&mut reader).await? {
                Received::Pong => {
                    self.is_connected();
                    if std::mem::take(&mut is_new) {
                        self.catch_up().await;
                    }
                }
                Received::Ping(context) => {
                    if let Some(line) = &mut self.connection {
                        line.writer.pong(&context).await?;
                    }
                }
                Received::Message(frames) => self.take(frames).await,
                Received::Subscribe(_) | Received::Cancel(_) => {}
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

    /// The publisher has started anew, however far its numbers are by now.
    fn begin_anew(&mut self) {
        self.lives += 1;
        (self.next, self.last, self.in_doubt) = (Some(0), None, false);
    }

    /// How far it has come; grows.
    const fn reached(&self) -> (u64, Option<u64>) {
        (self.lives, self.next)
    }

    /// Number of the first message that is wanted, if that is not whatever comes first.
    fn first(&self) -> Option<u64> {
        self.next.or(self.target.from_start.then_some(0))
    }

    /// At the start of a connection: what was published before it is asked for at once. A publisher
    /// may have nothing more to say for long.
    async fn catch_up(&mut self) {
        while self.first().is_some() && self.target.replay.is_some() && self.sink.is_wanted() {
            let reached = self.reached();
            // What does not come shows with the next message.
            if self.fetch(u64::MAX).await.is_ok() || self.reached() == reached {
                break;
            }
        }
    }

    /// What the publisher says next. Silence is answered by PINGs, and lasting silence is an end.
    async fn next_from<R: AsyncRead + Unpin>(
        &mut self,
        reader: &mut ZmtpReader<R>,
    ) -> Result<Received, ZmtpError> {
        let mut next = std::pin::pin!(reader.next());
        let mut silent = 0;
        loop {
            if let Ok(came) = timeout(HEARTBEAT, &mut next).await {
                return came;
            }
            silent += 1;
            let Some(line) =
                self.connection.as_mut().filter(|line| !line.heartbeats || silent < MISSED_HEARTBEATS)
            else {
                return Err(ZmtpError::Timeout("heartbeats of a publisher"));
            };
            if !self.sink.is_wanted() {
                return Err(ZmtpError::Timeout("a reader"));
            }
            line.ping().await?;
        }
    }

    /// Hands a message on, and before it those that are missing, as far as the publisher still has
    /// them.
    async fn take(&mut self, frames: Vec<Vec<u8>>) {
        // Not of this protocol: what it said shows up as a gap.
        let Some((topic, sequence, payload)) = read(frames) else { return };
        if self.is_repeated(sequence, &payload) {
            return;
        }
        if self.next.is_some_and(|next| sequence < next) {
            if self.life.is_some() {
                // A publisher that names its life has one for each connection: this came by a
                // replay before.
                return;
            }
            self.begin_anew();
        }
        let lives = self.lives;
        let is_missing = |follower: &Self| follower.first().is_some_and(|first| first < sequence);
        if (self.in_doubt || is_missing(self)) && self.target.replay.is_some() {
            self.make_up_for(sequence).await;
        }
        let is_other = self.lives != lives;
        if std::mem::take(&mut self.in_doubt) && !is_missing(self) {
            // It may be the next message of this life or, as well, of another one. Where some are
            // missing, that says enough.
            self.begin_anew();
        }
        self.hand_on(topic, sequence, payload).await;
        // It may have been on its way since the life before, and the next one asks.
        self.in_doubt |= is_other;
    }

    /// Whether a message was on its way when what is there was asked for. One that steps back is
    /// none of those, nor is another one under the same number. An engine behind something that
    /// forwards its messages may start anew while this connection stays.
    fn is_repeated(&mut self, number: u64, payload: &[u8]) -> bool {
        let steps_back = self.live.replace(number).is_some_and(|last| number <= last);
        let is_repeated = !steps_back && self.covered.has(number, payload);
        if !is_repeated {
            self.covered = Covered::default();
        }
        is_repeated
    }

    /// Hands a message on as soon as there is room for it, with signs of life to the publisher
    /// meanwhile. Nothing more is read until then, so that it is the publisher who drops what is
    /// too much: that shows in the numbers and comes back by a replay.
    async fn hand_on(&mut self, topic: Vec<u8>, sequence: u64, payload: Payload) {
        self.next = Some(sequence.saturating_add(1));
        self.last = self.life.is_none().then(|| digest(&payload));
        let (publisher, bytes) = (self.target.publisher, payload.len());
        let mut message = Some(ZmqMessage { publisher, topic, life: self.lives, sequence, payload });
        loop {
            let offered = timeout(HEARTBEAT, self.sink.offer(&mut message, bytes)).await;
            if offered.is_ok() || !self.sink.is_wanted() {
                return;
            }
            if let Some(line) = &mut self.connection {
                // That it has ended shows at the next reading.
                let _ = line.ping().await;
            }
        }
    }

    /// Fetches what is missing before number `end`, however often the connection is lost meanwhile.
    /// What does not come stays a gap.
    async fn make_up_for(&mut self, end: u64) {
        let (mut deadline, mut pause) = (deadline::after(REPLAY_WHOLE), FIRST_PAUSE);
        while self.sink.is_wanted() {
            let before = self.reached();
            let fetched = self.fetch(end).await.is_ok();
            // A replay socket that could not be reached for so long is tried once for each loss,
            // until it can.
            self.replays |= fetched;
            if fetched || !self.replays {
                return;
            }
            if self.reached() > before {
                // What ended it may have been a reader that was too slow for the publisher's
                // patience.
                (deadline, pause) = (deadline::after(REPLAY_WHOLE), FIRST_PAUSE);
            }
            if deadline::after(pause) > deadline {
                self.replays = false;
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Asks for the messages from the next one to `end` and hands them on: if it shows that the
    /// publisher has started anew, for those of its new life.
    async fn fetch(&mut self, end: u64) -> Result<(), ZmtpError> {
        let mut of_little = 0;
        loop {
            // After a life has ended there is nothing to compare with, and before each hole
            // something has come.
            match self.fetch_of_life(end, of_little == MOST_OF_LITTLE).await? {
                Answered::All => return Ok(()),
                Answered::Hole(messages) if messages < LITTLE => of_little += 1,
                Answered::Hole(_) | Answered::Anew => of_little = 0,
            }
        }
    }

    /// The same in one answer. Without `over_holes` it ends at the first one.
    async fn fetch_of_life(&mut self, end: u64, over_holes: bool) -> Result<Answered, ZmtpError> {
        let Some(replay) = &self.target.replay else { return Ok(Answered::All) };
        // A connection for each question: nothing to repair after a loss.
        let Handshake { mut reader, mut writer, peer } = dial(replay, SocketType::Dealer).await?;
        let life = peer.property(LIFE).map(<[u8]>::to_vec);
        if life.is_some() && self.life.is_some() && life != self.life {
            // It has started anew and has other messages under these numbers.
            return Ok(Answered::All);
        }
        let mut brought = 0;
        let next = self.next.unwrap_or(0);
        // Who does not tell its lives apart is asked for what came last as well: an engine's
        // messages carry the time, so another life has another message under that number, or none.
        let mut last = self.last;
        let start = next - u64::from(last.is_some());
        writer.message(&[b"", &start.to_be_bytes()]).await?;
        while self.sink.is_wanted() {
            let Some(frames) = next_of_replay(&mut reader, &mut writer).await? else { continue };
            let Some((topic, sequence, payload)) = read_replayed(frames, &self.target.topic) else {
                return Err(ZmtpError::Protocol("a replay that is none"));
            };
            if sequence < start {
                continue;
            }
            if let Some(last) = last.take() {
                let is_same = sequence == start && digest(&payload) == last;
                // Where even the next message is gone there is a gap, and that says enough.
                if !is_same && (sequence <= next || sequence == END_OF_REPLAY) {
                    self.begin_anew();
                    return Ok(Answered::Anew);
                }
                self.in_doubt = false;
            }
            let is_hole = |wanted: u64| next < wanted && wanted < sequence;
            if !over_holes && sequence != END_OF_REPLAY && self.next.is_some_and(is_hole) {
                // What a socket dropped because we were slow comes when it is asked again.
                return Ok(Answered::Hole(brought));
            }
            if sequence == END_OF_REPLAY || sequence >= end {
                break;
            }
            if sequence >= next {
                self.covered.add(sequence, &payload);
                self.hand_on(topic, sequence, payload).await;
                brought += 1;
            }
        }
        Ok(Answered::All)
    }
}

/// The frames of the next message of a replay; `None` where something else came.
async fn next_of_replay<R: AsyncRead + Unpin>(
    reader: &mut ZmtpReader<R>,
    writer: &mut ZmtpWriter<SocketWriter>,
) -> Result<Option<Vec<Vec<u8>>>, ZmtpError> {
    let slow = |_| ZmtpError::Timeout("the next message of a replay");
    match timeout(REPLAY_PATIENCE, reader.next()).await.map_err(slow)?? {
        Received::Message(frames) => return Ok(Some(frames)),
        Received::Ping(context) => writer.pong(&context).await?,
        _ => {}
    }
    Ok(None)
}

/// `["", topic, number, payload]`; before vLLM 0.11 without the topic, which is `topic` then.
fn read_replayed(mut frames: Vec<Vec<u8>>, topic: &[u8]) -> Option<(Vec<u8>, u64, Payload)> {
    if frames.first().is_some_and(Vec::is_empty) {
        frames.remove(0);
    }
    if frames.len() == 2 {
        frames.insert(0, topic.to_vec());
    }
    read(frames)
}

/// `[topic, number, payload]`.
pub(super) fn read(frames: Vec<Vec<u8>>) -> Option<(Vec<u8>, u64, Payload)> {
    let [topic, number, payload]: [Vec<u8>; 3] = frames.try_into().ok()?;
    Some((topic, u64::from_be_bytes(number.try_into().ok()?), payload.into()))
}

fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(payload);
    hasher.finish()
}

/// The publisher's answer to a question about a source, if it answers for it.
pub(super) async fn ask(
    replay: &ZmtpEndpoint,
    source: SourceId,
    question: &[u8],
) -> Result<Option<Payload>, ZmtpError> {
    let Handshake { mut reader, mut writer, .. } = dial(replay, SocketType::Dealer).await?;
    let number = source.0.to_be_bytes();
    writer.message(&[b"", ASK, &number, question]).await?;
    loop {
        let frames = match reader.next().await? {
            Received::Message(frames) => frames,
            Received::Ping(context) => {
                writer.pong(&context).await?;
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

async fn dial(endpoint: &ZmtpEndpoint, socket: SocketType) -> Result<ConnectedPeer, ZmtpError> {
    kvbm_zmtp::connect(endpoint, socket, &[], HANDSHAKE_LIMIT).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InProcessConfig;
    use crate::queue::{Queue, QueueReceiver};
    use std::ops::Range;
    use std::sync::Arc;

    /// What is handed on of the messages `live`, which all say `payload`, after a replay has
    /// brought `replayed` and `next` is the one to come.
    fn taken(life: Option<&[u8]>, next: u64, replayed: &[u64], payload: u8, live: &[u64]) -> Vec<u64> {
        let life = life.map(<[u8]>::to_vec);
        let queue = Arc::new(Queue::default());
        let target = Target {
            publisher: 0,
            events: "tcp://127.0.0.1:1".parse().unwrap(),
            replay: None,
            topic: Vec::new(),
            from_start: false,
        };
        let mut follower = Follower::new(target, Sink::new(&queue, InProcessConfig::default()));
        (follower.next, follower.life) = (Some(next), life);
        for number in replayed {
            follower.covered.add(*number, b"1");
        }
        let mut receiver = QueueReceiver::new(queue, super::super::NAME);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for number in live {
            let frames = vec![Vec::new(), number.to_be_bytes().to_vec(), vec![payload]];
            runtime.block_on(follower.take(frames));
        }
        let received = || Some(receiver.next(Duration::ZERO).unwrap()?.sequence);
        std::iter::from_fn(received).collect()
    }

    /// Mutations that make it fail: `is_repeated` without `steps_back`; `has` without the digests.
    #[test]
    fn what_was_replayed_is_not_taken_twice_and_a_new_life_on_the_same_connection_is_taken() {
        let taken = |asked: Range<u64>, payload: u8, live: &[u64]| {
            let replayed: Vec<u64> = (asked.start..asked.end).collect();
            taken(None, asked.end, &replayed, payload, live)
        };
        assert_eq!(taken(5..9, b'1', &[7, 8, 9, 10]), [9, 10], "two were on their way");
        assert_eq!(taken(5..9, b'1', &[8, 9, 0, 1]), [9, 0, 1], "anew, behind what was replayed");
        assert_eq!(taken(0..9, b'1', &[7, 0, 1, 2]), [0, 1, 2], "anew, before anything new came");
        assert_eq!(taken(5..9, b'1', &[0, 1, 5, 6]), [0, 1, 5, 6], "anew, before anything came");
        assert_eq!(taken(0..9, b'2', &[5, 6, 7]), [5, 6, 7], "anew, and past the first ones when it comes");
    }

    /// Mutation that makes it fail: `take` that begins anew whoever steps back.
    #[test]
    fn who_names_its_life_does_not_begin_another_on_the_same_connection() {
        // The replay had a hole, so that no more is known of it than what came after.
        let (replayed, live) = ([5, 6, 8], [6, 8, 9, 10]);
        assert_eq!(taken(Some(b"a life"), 9, &replayed, b'1', &live), [9, 10], "two came by the replay");
        assert_eq!(taken(None, 9, &replayed, b'1', &live), [6, 8, 9, 10], "nobody can tell");
    }
}
