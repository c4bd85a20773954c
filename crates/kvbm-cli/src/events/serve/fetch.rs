//! Snapshots fetched on a thread of their own: whoever asks the index does not wait for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use anyhow::{Context, Result};
use kvbm::events_plane::{EventTransport, RemoteSnapshots, Snapshot, SnapshotSource, StreamId};

/// Questions and answers that may wait; a question that finds no room is asked again.
const WAITING: usize = 4;

/// Says `None` until an answer is there.
pub(super) struct Fetcher {
    questions: SyncSender<(StreamId, u64)>,
    answers: Receiver<(StreamId, Option<Snapshot>)>,
    /// What is being asked, and how far it has to reach.
    asked: HashMap<StreamId, u64>,
}

impl Fetcher {
    pub(super) fn start(transport: Arc<dyn EventTransport>) -> Result<Self> {
        let (questions, inbox) = sync_channel::<(StreamId, u64)>(WAITING);
        let (outbox, answers) = sync_channel(WAITING);
        let mut snapshots = RemoteSnapshots::new(transport);
        let work = move || {
            while let Ok((stream, reach)) = inbox.recv() {
                // The follower has gone: nobody wants the rest.
                if outbox.send((stream, snapshots.snapshot(stream, reach))).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("snapshots".into());
        thread.spawn(work).context("no thread for snapshots")?;
        Ok(Self { questions, answers, asked: HashMap::new() })
    }
}

impl SnapshotSource for Fetcher {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        let mut found = None;
        while let Ok((of, snapshot)) = self.answers.try_recv() {
            self.asked.remove(&of);
            // One for another stream is asked for again.
            if of == stream {
                found = snapshot;
            }
        }
        if found.as_ref().is_some_and(|snapshot| snapshot.next_sequence >= reach) {
            return found;
        }
        if !self.asked.contains_key(&stream) {
            match self.questions.try_send((stream, reach)) {
                Ok(()) => drop(self.asked.insert(stream, reach)),
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
            }
        }
        None
    }
}
