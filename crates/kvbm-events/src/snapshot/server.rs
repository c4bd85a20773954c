//! The source's side: answers questions from snapshots that it keeps for a while.

use super::Snapshot;
use super::wire::{Answer, PART_BLOCKS, Question, encode_part_of, part_blocks};
use crate::{Answering, EventTransport, Payload, SourceId, StreamId, TransportError};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

type Take = dyn Fn(StreamId) -> Option<Snapshot> + Send + Sync;

/// Answers who asks for snapshots of a source. Whoever asks while another fetches gets the same snapshot. At most
/// [`Self::KEPT`] of each shard are kept, for as long as somebody fetches their parts: memory is bounded by that many
/// times what the pool itself knows.
pub struct SnapshotServer {
    take: Box<Take>,
    state: Mutex<State>,
    /// By shard: held while a snapshot is taken, so that those who ask meanwhile find it instead of taking one each.
    taking: [Mutex<()>; TURNS],
    /// Most blocks of a part of what is taken from now on.
    part_blocks: AtomicUsize,
}

/// Shards beyond this number share their turns.
const TURNS: usize = 16;

#[derive(Default)]
struct State {
    kept: VecDeque<Kept>,
    tickets: u64,
}

struct Kept {
    stream: StreamId,
    ticket: u64,
    asked: Instant,
    /// Those who asked for its first part and not yet for its last.
    fetching: u32,
    snapshot: Arc<Snapshot>,
    /// Blocks of each part.
    of_part: usize,
}

/// A snapshot as it is told.
struct Told {
    ticket: u64,
    snapshot: Arc<Snapshot>,
    of_part: usize,
}

impl Told {
    /// Whether there is no part behind `part`.
    fn is_last(&self, part: u32) -> bool {
        (part as usize + 1).saturating_mul(self.of_part) >= self.snapshot.blocks.len()
    }
}

impl SnapshotServer {
    /// Most snapshots of a shard that are kept between two questions.
    pub const KEPT: usize = 2;

    /// How long the next question about a snapshot may take, and how long a question waits while another's is taken.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    /// Answers with what `take` says; it is called on threads of the transport's.
    pub fn new(take: impl Fn(StreamId) -> Option<Snapshot> + Send + Sync + 'static) -> Self {
        let part_blocks = AtomicUsize::new(PART_BLOCKS);
        Self { take: Box::new(take), state: Mutex::default(), taking: Default::default(), part_blocks }
    }

    /// Answers take at most `bytes` from now on, for a transport that carries no more
    /// ([`EventTransport::max_payload`]). It is never more again.
    pub fn fit(&self, bytes: usize) {
        self.part_blocks.fetch_min(part_blocks(bytes), Ordering::Relaxed);
    }

    /// Answers questions about `source` over `transport` until what is returned is dropped.
    pub fn serve(
        self,
        transport: &dyn EventTransport,
        source: SourceId,
    ) -> Result<Answering, TransportError> {
        self.fit(transport.max_payload());
        transport.answer(source, Arc::new(move |question: &[u8]| self.answer(question)))
    }

    /// The answer to a question, in their wire forms. Of what is no question it knows nothing.
    pub fn answer(&self, question: &[u8]) -> Payload {
        let part = Question::decode(question).ok().and_then(|question| self.part(&question));
        part.unwrap_or_else(|| Answer::Nothing.encode()).into()
    }

    fn part(&self, question: &Question) -> Option<Vec<u8>> {
        let told = match self.kept(question) {
            Some(found) => found,
            None if question.ticket == 0 => self.taken(question)?,
            None => return None,
        };
        if told.snapshot.next_sequence < question.reach {
            self.is_fetched(told.ticket);
            return None;
        }
        let part = encode_part_of(&told.snapshot, told.of_part, told.ticket, question.part)?;
        if told.is_last(question.part) {
            self.is_fetched(told.ticket);
        }
        Some(part)
    }

    /// A new snapshot, or the one that another question had taken while this one waited for its turn.
    fn taken(&self, question: &Question) -> Option<Told> {
        let _turn = self.taking[question.stream.shard as usize % TURNS].try_lock_for(Self::PATIENCE)?;
        self.kept(question).or_else(|| Some(self.keep(question.stream, (self.take)(question.stream)?)))
    }

    /// One of those who fetch a snapshot needs nothing more of it. With the last of them it goes.
    fn is_fetched(&self, ticket: u64) {
        let mut state = self.state.lock();
        if let Some(kept) = state.kept.iter_mut().find(|kept| kept.ticket == ticket) {
            kept.fetching = kept.fetching.saturating_sub(1);
        }
        state.kept.retain(|kept| kept.fetching > 0);
    }

    /// The snapshot that is asked for, or for ticket 0 any that reaches far enough.
    fn kept(&self, question: &Question) -> Option<Told> {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.kept.retain(|kept| now.saturating_duration_since(kept.asked) <= Self::PATIENCE);
        let found = state.kept.iter_mut().find(|kept| {
            kept.stream == question.stream
                && (question.ticket == kept.ticket
                    || (question.ticket == 0 && kept.snapshot.next_sequence >= question.reach.max(1)))
        })?;
        found.asked = now;
        found.fetching += u32::from(question.ticket == 0);
        let Kept { ticket, of_part, .. } = *found;
        Some(Told { ticket, snapshot: Arc::clone(&found.snapshot), of_part })
    }

    fn keep(&self, stream: StreamId, snapshot: Snapshot) -> Told {
        let (snapshot, of_part) = (Arc::new(snapshot), self.part_blocks.load(Ordering::Relaxed));
        let mut state = self.state.lock();
        state.tickets += 1;
        let told = Told { ticket: state.tickets, snapshot, of_part };
        if !told.is_last(0) {
            let of_shard = |kept: &Kept| kept.stream.shard == stream.shard;
            if state.kept.iter().filter(|kept| of_shard(kept)).count() == Self::KEPT
                && let Some(oldest) = state.kept.iter().position(of_shard)
            {
                state.kept.remove(oldest);
            }
            let (ticket, snapshot) = (told.ticket, Arc::clone(&told.snapshot));
            let asked = Instant::now();
            state.kept.push_back(Kept { stream, ticket, asked, fetching: 1, snapshot, of_part });
        }
        told
    }
}
