//! The follower's side: fetches snapshots in the background, several parts of each at a time.

use super::wire::{Answer, Part, Question};
use super::{Snapshot, SnapshotSource};
use crate::deadline;
use crate::{EventBlock, EventTransport, StreamId};
use crossbeam_channel::{Receiver, TryRecvError, bounded};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Asks sources for their snapshots over a transport, without keeping its owner waiting: a question
/// that was begun says `None` until its answer is there. A source that does not answer is left
/// alone for a while, longer each time.
pub struct RemoteSnapshots {
    asker: Asker,
    fetches: HashMap<StreamId, Fetch>,
    silent: HashMap<StreamId, Silence>,
    /// Held by every thread that fetches.
    threads: Arc<()>,
}

/// Fetches a snapshot and waits for it.
#[derive(Clone)]
struct Asker {
    transport: Arc<dyn EventTransport>,
    timeout: Duration,
}

/// A question that was begun.
struct Fetch {
    answer: Receiver<Option<Snapshot>>,
    progress: Arc<FetchProgress>,
}

/// What a fetch and its owner share.
#[derive(Default)]
struct FetchProgress {
    /// The owner does not want it any more.
    unwanted: AtomicBool,
    /// The snapshot's, known with its first part.
    next_sequence: OnceLock<u64>,
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.progress.unwanted.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy)]
struct Silence {
    until: Instant,
    pause: Duration,
}

impl RemoteSnapshots {
    /// How long a source may take for an answer by default.
    pub const TIMEOUT: Duration = Duration::from_secs(1);

    /// How long all parts of a snapshot may take together.
    pub const WHOLE: Duration = Duration::from_secs(60);

    /// Most snapshots that are fetched at a time.
    pub const MAX_FETCHES: usize = 8;

    /// Parts of a snapshot that are asked for at a time, each on a thread of its own.
    pub const WINDOW: u32 = 4;

    const FIRST_PAUSE: Duration = Duration::from_millis(50);
    const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// Streams whose silence is remembered.
    const MAX_SILENT: usize = 4096;

    /// Asks over `transport` and waits at most [`Self::TIMEOUT`] for each answer.
    pub fn new(transport: Arc<dyn EventTransport>) -> Self {
        Self::with_timeout(transport, Self::TIMEOUT)
    }

    /// Asks over `transport` and waits at most `timeout` for each answer.
    pub fn with_timeout(transport: Arc<dyn EventTransport>, timeout: Duration) -> Self {
        let (fetches, silent, threads) = (HashMap::new(), HashMap::new(), Arc::new(()));
        Self { asker: Asker { transport, timeout }, fetches, silent, threads }
    }

    /// Fetches a snapshot and waits for it, [`Self::WHOLE`] at most. `None` when the source does
    /// not answer or cannot reach so far.
    pub fn fetch(&self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        self.asker.fetch(stream, reach, &FetchProgress::default())
    }

    /// Begins to fetch, unless the source is to be left alone or enough others are being fetched.
    fn begin(&mut self, stream: StreamId, reach: u64) {
        let silence = self.silent.get(&stream);
        if silence.is_some_and(|silence| Instant::now() < silence.until) {
            return;
        }
        // Those who did not answer last time leave room for the others.
        let most = if silence.is_some() { Self::MAX_FETCHES / 2 } else { Self::MAX_FETCHES };
        if Arc::strong_count(&self.threads) > most {
            return;
        }
        let (answer, answered) = bounded(1);
        let progress = Arc::new(FetchProgress::default());
        let (asker, thread, shared) = (self.asker.clone(), Arc::clone(&self.threads), Arc::clone(&progress));
        let work = move || {
            let found = asker.fetch(stream, reach, &shared);
            // The place is free before the answer is there. Nobody may want it any more.
            drop((asker, thread));
            let _ = answer.try_send(found);
        };
        // Without a thread the answer never comes: that is silence as well.
        let _ = std::thread::Builder::new().name("kvbm-snapshot".into()).spawn(work);
        self.fetches.insert(stream, Fetch { answer: answered, progress });
    }

    fn leave_alone(&mut self, stream: StreamId) {
        let before = self.silent.get(&stream);
        let pause = before.map_or(Self::FIRST_PAUSE, |silence| 2 * silence.pause).min(Self::LONGEST_PAUSE);
        if self.silent.len() >= Self::MAX_SILENT {
            self.silent.clear();
        }
        self.silent.insert(stream, Silence { until: deadline::after(pause), pause });
    }
}

impl SnapshotSource for RemoteSnapshots {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        if let Some(fetch) = self.fetches.get(&stream) {
            let found = match fetch.answer.try_recv() {
                Err(TryRecvError::Empty) => {
                    // More was lost since, or could not be remembered: it would be thrown away in
                    // the end.
                    if fetch.progress.next_sequence.get().is_some_and(|next| *next < reach) {
                        self.fetches.remove(&stream);
                        self.leave_alone(stream);
                    }
                    return None;
                }
                Ok(found) => found,
                Err(TryRecvError::Disconnected) => None,
            };
            self.fetches.remove(&stream);
            match found {
                None => self.leave_alone(stream),
                Some(found) => {
                    self.silent.remove(&stream);
                    // More was lost since it was asked for: a newer one is wanted.
                    if found.next_sequence >= reach {
                        return Some(found);
                    }
                }
            }
        }
        self.begin(stream, reach);
        None
    }

    fn under_way(&self, stream: StreamId) -> Option<u64> {
        self.fetches.get(&stream).map(|fetch| fetch.progress.next_sequence.get().copied().unwrap_or(0))
    }

    fn cancel(&mut self, stream: StreamId) {
        self.fetches.remove(&stream);
        self.silent.remove(&stream);
    }
}

impl Asker {
    /// Most blocks of a snapshot: more than any pool has, less than a lie could cost.
    const MAX_BLOCKS: usize = 64 << 20;

    fn fetch(&self, stream: StreamId, reach: u64, progress: &FetchProgress) -> Option<Snapshot> {
        let deadline = deadline::after(RemoteSnapshots::WHOLE);
        let first = self.ask(Question { stream, reach, ticket: 0, part: 0 }, None)?;
        let _ = progress.next_sequence.set(first.next_sequence);
        let (next_sequence, last) = (first.next_sequence, first.parts - 1);
        let question = Question { stream, reach, ticket: first.ticket, part: 0 };
        let parts = Mutex::new(Parts::new(last));
        let fetch = || self.fetch_parts(question, &first, &parts, progress, deadline);
        let is_whole = std::thread::scope(|scope| {
            for _ in 1..RemoteSnapshots::WINDOW.min(last.saturating_sub(1)) {
                // Without help it takes longer.
                let thread = std::thread::Builder::new().name("kvbm-snapshot-part".into());
                let _ = thread.spawn_scoped(scope, fetch);
            }
            fetch()
        });
        // Where a thread that helped failed, its part is left.
        if !is_whole || !fetch() {
            return None;
        }
        // The source forgets the snapshot with its last part, so nothing else may be asked for
        // behind it.
        let end = match last {
            0 => Vec::new(),
            part => self.ask(Question { part, ..question }, Some(&first))?.blocks,
        };
        let mut blocks = first.blocks;
        blocks.extend(parts.into_inner().found.into_values().flatten());
        blocks.extend(end);
        Some(Snapshot { next_sequence, blocks })
    }

    /// Fetches parts until there are none to begin with; whether nothing went wrong.
    fn fetch_parts(
        &self,
        question: Question,
        first: &Part,
        parts: &Mutex<Parts>,
        progress: &FetchProgress,
        deadline: Instant,
    ) -> bool {
        loop {
            let Some(part) = parts.lock().begin() else { return true };
            let is_wanted = Instant::now() < deadline && !progress.unwanted.load(Ordering::Relaxed);
            let found = is_wanted.then(|| self.ask(Question { part, ..question }, Some(first))).flatten();
            let Some(found) = found else {
                parts.lock().left.push(part);
                return false;
            };
            let mut parts = parts.lock();
            // A part without any takes room as well.
            parts.blocks += found.blocks.len().max(64);
            parts.found.insert(part, found.blocks);
            if parts.blocks > Self::MAX_BLOCKS {
                return false;
            }
        }
    }

    /// Asks for a part, of the same snapshot as `first`.
    fn ask(&self, question: Question, first: Option<&Part>) -> Option<Part> {
        let answer =
            self.transport.ask(question.stream.source, &question.encode().into(), self.timeout).ok()?;
        let Ok(Answer::Part(part)) = Answer::decode(&answer) else { return None };
        let state = |part: &Part| (part.ticket, part.next_sequence, part.parts);
        let is_asked_for = part.part == question.part && part.next_sequence >= question.reach;
        (is_asked_for && first.is_none_or(|first| state(first) == state(&part))).then_some(part)
    }
}

/// The parts of a snapshot between its first and its last.
struct Parts {
    next: u32,
    end: u32,
    /// Those whose answer did not come.
    left: Vec<u32>,
    found: BTreeMap<u32, Vec<EventBlock>>,
    blocks: usize,
}

impl Parts {
    const fn new(end: u32) -> Self {
        Self { next: 1, end, left: Vec::new(), found: BTreeMap::new(), blocks: 0 }
    }

    /// A part that nobody fetches.
    fn begin(&mut self) -> Option<u32> {
        if let Some(part) = self.left.pop() {
            return Some(part);
        }
        let new = (self.next < self.end).then_some(self.next);
        self.next += u32::from(new.is_some());
        new
    }
}
