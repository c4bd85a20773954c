//! The follower's side: fetches snapshots part by part, each on a thread of its own.

use super::wire::{Answer, Question};
use super::{Snapshot, SnapshotSource};
use crate::{EventTransport, StreamId};
use crossbeam_channel::{Receiver, TryRecvError, bounded};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Asks sources for their snapshots over a transport, without keeping its owner waiting: a question that was begun says `None`
/// until its answer is there. A source that does not answer is left alone for a while, longer each time.
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
    unwanted: Arc<AtomicBool>,
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.unwanted.store(true, Ordering::Relaxed);
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

    /// Most snapshots that are fetched at a time, and so most threads.
    pub const MAX_FETCHES: usize = 8;

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

    /// Fetches a snapshot and waits for it, [`Self::WHOLE`] at most. `None` when the source does not answer or cannot reach so far.
    pub fn fetch(&self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        self.asker.fetch(stream, reach, &AtomicBool::new(false))
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
        let unwanted = Arc::new(AtomicBool::new(false));
        let (asker, thread, stop) = (self.asker.clone(), Arc::clone(&self.threads), Arc::clone(&unwanted));
        let work = move || {
            let found = asker.fetch(stream, reach, &stop);
            // The place is free before the answer is there. Nobody may want it any more.
            drop((asker, thread));
            let _ = answer.try_send(found);
        };
        // Without a thread the answer never comes: that is silence as well.
        let _ = std::thread::Builder::new().name("kvbm-snapshot".into()).spawn(work);
        self.fetches.insert(stream, Fetch { answer: answered, unwanted });
    }

    fn leave_alone(&mut self, stream: StreamId) {
        let before = self.silent.get(&stream);
        let pause = before.map_or(Self::FIRST_PAUSE, |silence| 2 * silence.pause).min(Self::LONGEST_PAUSE);
        if self.silent.len() >= Self::MAX_SILENT {
            self.silent.clear();
        }
        self.silent.insert(stream, Silence { until: Instant::now() + pause, pause });
    }
}

impl SnapshotSource for RemoteSnapshots {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        if let Some(fetch) = self.fetches.get(&stream) {
            let found = match fetch.answer.try_recv() {
                Err(TryRecvError::Empty) => return None,
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

    fn cancel(&mut self, stream: StreamId) {
        self.fetches.remove(&stream);
        self.silent.remove(&stream);
    }
}

impl Asker {
    /// Most blocks of a snapshot: more than any pool has, less than a lie could cost.
    const MAX_BLOCKS: usize = 64 << 20;

    fn fetch(&self, stream: StreamId, reach: u64, unwanted: &AtomicBool) -> Option<Snapshot> {
        let deadline = Instant::now() + RemoteSnapshots::WHOLE;
        let mut question = Question { stream, reach, ticket: 0, part: 0 };
        let mut snapshot = Snapshot::default();
        while Instant::now() < deadline && !unwanted.load(Ordering::Relaxed) {
            let asked = question.encode().into();
            let answer = self.transport.ask(stream.source, &asked, self.timeout).ok()?;
            let Ok(Answer::Part(part)) = Answer::decode(&answer) else { return None };
            let same = question.ticket == 0
                || (part.ticket == question.ticket && part.next_sequence == snapshot.next_sequence);
            if part.part != question.part || !same || part.next_sequence < reach {
                return None;
            }
            (snapshot.next_sequence, question.ticket) = (part.next_sequence, part.ticket);
            snapshot.blocks.extend(part.blocks);
            question.part += 1;
            if question.part >= part.parts {
                return Some(snapshot);
            }
            if snapshot.blocks.len() > Self::MAX_BLOCKS {
                return None;
            }
        }
        None
    }
}
