//! The source's side: answers questions from snapshots that it keeps for a while.

use super::Snapshot;
use super::wire::{Answer, PART_BLOCKS, Question, encode_part_of, part_blocks};
use crate::{Answering, EventTransport, Payload, SourceId, StreamId, TransportError};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

type Take = dyn Fn(StreamId) -> Option<Snapshot> + Send + Sync;
type NextSequence = dyn Fn(StreamId) -> Option<u64> + Send + Sync;

/// Answers questions for snapshots of a source. Followers that ask while another one fetches get
/// the same snapshot.
///
/// # Bounds
/// At most [`Self::KEPT`] snapshots of each shard are kept, and only while their parts are fetched:
/// memory is bounded by that many times what the pool itself holds. Of a stream, at most
/// [`Self::MAX_PER_SECOND`] snapshots are taken, and none for a question that none can answer
/// ([`with_next_sequence`](Self::with_next_sequence)). A follower that gets no answer asks again.
pub struct SnapshotServer {
    take: Box<Take>,
    next_sequence: Option<Box<NextSequence>>,
    state: Mutex<SnapshotCache>,
    /// By shard: held while a snapshot is taken, so that those who ask meanwhile share it.
    taking: [Mutex<()>; LOCKS],
    /// Most blocks of a part of snapshots that are taken from now on.
    part_blocks: AtomicUsize,
}

/// Shards beyond this number share their locks.
const LOCKS: usize = 16;

#[derive(Default)]
struct SnapshotCache {
    kept: VecDeque<Kept>,
    tickets: u64,
    /// When the last snapshot of each stream was taken, as far as that was lately.
    taken: HashMap<StreamId, Instant>,
}

impl SnapshotCache {
    fn drop_old(&mut self, now: Instant) {
        let age = |at: Instant| now.saturating_duration_since(at);
        self.kept.retain(|kept| age(kept.asked) <= kept.lifetime());
        self.taken.retain(|_, at| age(*at) < MIN_INTERVAL);
    }
}

struct Kept {
    asked: Instant,
    /// Followers that asked for its first part and not yet for its last.
    fetching: u32,
    shared: Shared,
}

impl Kept {
    /// How long it is kept after the last question about it.
    fn lifetime(&self) -> Duration {
        if self.fetching > 0 { SnapshotServer::PART_LIMIT } else { MIN_INTERVAL }
    }
}

/// A snapshot and how it is divided.
#[derive(Clone)]
struct Shared {
    stream: StreamId,
    ticket: u64,
    snapshot: Arc<Snapshot>,
    /// Blocks of each part.
    part_blocks: usize,
}

impl Shared {
    /// Whether no part follows `part`.
    fn is_last(&self, part: u32) -> bool {
        (part as usize + 1).saturating_mul(self.part_blocks) >= self.snapshot.blocks.len()
    }
}

/// Time between two snapshots of a stream.
const MIN_INTERVAL: Duration = Duration::from_millis(1000 / SnapshotServer::MAX_PER_SECOND as u64);

impl SnapshotServer {
    /// Most snapshots of a shard that are kept between two questions.
    pub const KEPT: usize = 2;

    /// Most snapshots of a stream that are taken in a second.
    pub const MAX_PER_SECOND: u32 = 20;

    /// Time until the next question about a snapshot, at most, and time that a question waits while
    /// a snapshot is taken.
    pub const PART_LIMIT: Duration = Duration::from_secs(10);

    /// Answers with what `take` returns; it is called on threads of the transport.
    pub fn new(take: impl Fn(StreamId) -> Option<Snapshot> + Send + Sync + 'static) -> Self {
        Self {
            take: Box::new(take),
            next_sequence: None,
            state: Mutex::default(),
            taking: Default::default(),
            part_blocks: AtomicUsize::new(PART_BLOCKS),
        }
    }

    /// `next_sequence` returns the number of a stream's next event at little cost, or `None` for an
    /// unknown stream. No snapshot is taken for a question that reaches beyond it.
    #[must_use]
    pub fn with_next_sequence(
        self,
        next_sequence: impl Fn(StreamId) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        Self { next_sequence: Some(Box::new(next_sequence)), ..self }
    }

    /// From now on answers have at most `bytes`, for a transport that carries no more
    /// ([`EventTransport::max_payload`]). The limit never grows again.
    pub fn fit(&self, bytes: usize) {
        self.part_blocks.fetch_min(part_blocks(bytes), Ordering::Relaxed);
    }

    /// Answers questions about `source` over `transport` until the returned guard is dropped.
    pub fn serve(
        self,
        transport: &dyn EventTransport,
        source: SourceId,
    ) -> Result<Answering, TransportError> {
        self.fit(transport.max_payload());
        transport.answer(source, Arc::new(move |question: &[u8]| self.answer(question)))
    }

    /// The answer to a question, both encoded. Other bytes get [`Answer::Nothing`].
    pub fn answer(&self, question: &[u8]) -> Payload {
        let part = Question::decode(question).ok().and_then(|question| self.part(&question));
        part.unwrap_or_else(|| Answer::Nothing.encode()).into()
    }

    fn part(&self, question: &Question) -> Option<Vec<u8>> {
        let is_first = (question.ticket, question.part) == (0, 0);
        let shared = match self.find(question) {
            Some(found) => found,
            None if is_first => self.take_for(question)?,
            None => return None,
        };
        if shared.snapshot.next_sequence < question.reach {
            self.is_fetched(shared.ticket);
            return None;
        }
        let part = encode_part_of(&shared.snapshot, shared.part_blocks, shared.ticket, question.part)?;
        if shared.is_last(question.part) {
            self.is_fetched(shared.ticket);
        }
        Some(part)
    }

    /// A new snapshot, or one that was taken for another question while this one waited.
    fn take_for(&self, question: &Question) -> Option<Shared> {
        let stream = question.stream;
        if let Some(next_sequence) = &self.next_sequence
            && next_sequence(stream)? < question.reach
        {
            return None;
        }
        let _taking = self.taking[stream.shard as usize % LOCKS].try_lock_for(Self::PART_LIMIT)?;
        if let Some(found) = self.find(question) {
            return Some(found);
        }
        if self.state.lock().taken.contains_key(&stream) {
            return None;
        }
        Some(self.keep(stream, (self.take)(stream)?))
    }

    /// A follower needs nothing more of a snapshot. With the last follower it is dropped; if it has
    /// one part only, a little later, so that others get it meanwhile.
    fn is_fetched(&self, ticket: u64) {
        let mut state = self.state.lock();
        if let Some(kept) = state.kept.iter_mut().find(|kept| kept.shared.ticket == ticket) {
            kept.fetching = kept.fetching.saturating_sub(1);
        }
        state.kept.retain(|kept| kept.fetching > 0 || kept.shared.is_last(0));
    }

    /// The snapshot of the question's ticket, or for the first question any that reaches far
    /// enough.
    fn find(&self, question: &Question) -> Option<Shared> {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.drop_old(now);
        let reach = question.reach.max(1);
        let found = state.kept.iter_mut().find(|kept| {
            let Shared { stream, ticket, snapshot, .. } = &kept.shared;
            *stream == question.stream
                && match question.ticket {
                    0 => snapshot.next_sequence >= reach,
                    wanted => *ticket == wanted,
                }
        })?;
        // Followers that come later do not keep an old snapshot of one part alive.
        if !found.shared.is_last(0) {
            found.asked = now;
            found.fetching += u32::from(question.ticket == 0);
        }
        Some(found.shared.clone())
    }

    fn keep(&self, stream: StreamId, snapshot: Snapshot) -> Shared {
        let (snapshot, part_blocks) = (Arc::new(snapshot), self.part_blocks.load(Ordering::Relaxed));
        let mut state = self.state.lock();
        let asked = Instant::now();
        state.tickets += 1;
        state.taken.insert(stream, asked);
        let shared = Shared { stream, ticket: state.tickets, snapshot, part_blocks };
        let of_shard = |kept: &Kept| kept.shared.stream.shard == stream.shard;
        if state.kept.iter().filter(|kept| of_shard(kept)).count() == Self::KEPT
            && let Some(oldest) = state.kept.iter().position(of_shard)
        {
            state.kept.remove(oldest);
        }
        let fetching = u32::from(!shared.is_last(0));
        state.kept.push_back(Kept { asked, fetching, shared: shared.clone() });
        shared
    }
}
