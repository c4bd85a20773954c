//! Flushes G3 on a thread of its own: a sync may take seconds, and commands must not wait for it.

use crate::error::SubmitError;
use crate::hub::{Hub, Producer};
use kvbm_disk::{DiskEngine, FlushError};
use kvbm_plan::{Epoch, Failure, FailureKind, FlushOutcome, Message, Rank};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// Flushes that may wait.
const MAX_PENDING: usize = 64;

/// The queue of the flush thread.
pub(crate) struct Flusher {
    engine: Arc<DiskEngine>,
    rank: Rank,
    epoch: Epoch,
    deadline: Duration,
    pending: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    tokens: Vec<u64>,
    closing: bool,
}

impl Flusher {
    pub(crate) fn new(engine: Arc<DiskEngine>, rank: Rank, epoch: Epoch, deadline: Duration) -> Self {
        Self { engine, rank, epoch, deadline, pending: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues a flush, answered by one message.
    pub(crate) fn request(&self, token: u64) -> Result<(), SubmitError> {
        let mut pending = self.pending.lock();
        if pending.closing {
            return Err(SubmitError::ShuttingDown);
        }
        if pending.tokens.len() >= MAX_PENDING {
            return Err(SubmitError::Backlogged { what: "flushes", pending: pending.tokens.len() });
        }
        pending.tokens.push(token);
        self.changed.notify_one();
        Ok(())
    }

    /// Lets the thread end after what is queued.
    pub(crate) fn close(&self) {
        self.pending.lock().closing = true;
        self.changed.notify_one();
    }

    /// The thread: one flush of the engine answers all tokens that were queued when it began.
    pub(crate) fn run(&self, hub: &Hub, _alive: &Producer) {
        loop {
            let tokens = {
                let mut pending = self.pending.lock();
                while pending.tokens.is_empty() {
                    if pending.closing {
                        return;
                    }
                    self.changed.wait(&mut pending);
                }
                std::mem::take(&mut pending.tokens)
            };
            let outcome = match self.engine.flush(self.deadline) {
                Ok(report) => FlushOutcome::Durable { blocks: report.durable_blocks },
                Err(error) => {
                    FlushOutcome::Failed(Failure::new(kind_of(&error), format!("flush of G3: {error}")))
                }
            };
            let keys = self.engine.take_key_notices();
            for part in keys.chunks(Message::MAX_KEYS) {
                let (rank, epoch, volume, keys) = (self.rank, self.epoch, None, part.to_vec());
                hub.send(Message::Keys { rank, epoch, volume, keys });
            }
            for token in tokens {
                let (rank, epoch, outcome) = (self.rank, self.epoch, outcome.clone());
                hub.send(Message::Flushed { rank, epoch, token, outcome });
            }
        }
    }
}

fn kind_of(error: &FlushError) -> FailureKind {
    match error {
        FlushError::Deadline { .. } => FailureKind::Deadline,
        FlushError::Io { .. } => FailureKind::Io,
        FlushError::ShutDown { .. } => FailureKind::ShuttingDown,
    }
}
