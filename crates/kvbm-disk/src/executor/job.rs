//! Operations in the executor. Each has exactly one outcome in its batch.

use crate::batch::{BatchCompletion, IoBatch, Op};
use crate::ops;
use crate::shared::EngineState;
use crate::{BatchHandle, OpError, OpOutcome};
use parking_lot::Mutex;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A batch whose operations are under way.
struct RunningBatch {
    ops: Box<[Op]>,
    state: Mutex<BatchState>,
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    shared: Arc<EngineState>,
}

struct BatchState {
    outcomes: Vec<Option<OpOutcome>>,
    left: usize,
    guards: Vec<Arc<dyn Any + Send + Sync>>,
    completion: Option<BatchCompletion>,
}

impl RunningBatch {
    /// Records an outcome. After the last one it returns the end of the batch.
    fn complete(self: &Arc<Self>, index: usize, outcome: OpOutcome) -> Option<BatchEnd> {
        let mut state = self.state.lock();
        state.outcomes[index] = Some(outcome);
        state.left -= 1;
        (state.left == 0).then(|| BatchEnd(Arc::clone(self)))
    }

    /// Drops the guards and calls the completion.
    fn complete_batch(&self) {
        let mut state = self.state.lock();
        let outcomes = std::mem::take(&mut state.outcomes);
        let guards = std::mem::take(&mut state.guards);
        let completion = state.completion.take();
        drop(state);
        // Each on its own: a guard that panics must not take the completion with it.
        for guard in guards {
            self.contain(move || drop(guard));
        }
        if let Some(completion) = completion {
            self.contain(move || completion(outcomes.into_iter().flatten().collect()));
        }
    }

    /// Runs code of the caller's.
    fn contain(&self, call: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(call)).is_err() {
            self.shared.count(|stats| stats.callback_panics += 1);
        }
    }
}

/// A batch whose operations are all over. Dropping this calls its completion.
#[must_use = "a caller waits for it"]
pub(super) struct BatchEnd(Arc<RunningBatch>);

impl Drop for BatchEnd {
    fn drop(&mut self) {
        self.0.complete_batch();
    }
}

/// One operation of a batch, small, because it goes from list to list. The batch that it belongs to
/// is submitted and not completed while the job lives, so the contract of
/// [`IoFragments::from_raw`](crate::IoFragments::from_raw) holds for its fragments.
pub(super) struct Job {
    batch: Arc<RunningBatch>,
    index: usize,
    finished: bool,
}

impl Job {
    pub(super) fn op(&self) -> &Op {
        &self.batch.ops[self.index]
    }

    /// Why the operation must not start.
    pub(super) fn refusal(&self) -> Option<OpError> {
        let slot = self.op().slot;
        if self.batch.cancelled.load(Ordering::Acquire) {
            return Some(OpError::Cancelled { slot });
        }
        self.batch.deadline.filter(|deadline| *deadline <= Instant::now()).map(|_| OpError::Deadline { slot })
    }

    /// What to say when the medium's code panicked.
    pub(super) fn panicked(&self) -> OpError {
        OpError::Io {
            op: ops::name(self.op().kind),
            slot: self.op().slot,
            at: 0,
            kind: io::ErrorKind::Other,
            message: "the medium panicked".to_owned(),
        }
    }

    pub(super) fn finish(mut self, outcome: OpOutcome) -> Option<BatchEnd> {
        self.end(outcome)
    }

    fn end(&mut self, outcome: OpOutcome) -> Option<BatchEnd> {
        self.finished = true;
        ops::count(&self.batch.shared, self.op().kind, &outcome);
        self.batch.complete(self.index, outcome)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.finished {
            drop(self.end(Err(OpError::ShuttingDown { slot: self.op().slot })));
        }
    }
}

/// The jobs of a batch that was admitted, in the order of their slots: neighbours may go together.
pub(super) fn jobs_of(batch: IoBatch, shared: &Arc<EngineState>) -> (BatchHandle, Vec<Job>) {
    let count = batch.ops.len();
    let cancelled = Arc::new(AtomicBool::new(false));
    let running = Arc::new(RunningBatch {
        ops: batch.ops.into(),
        state: Mutex::new(BatchState {
            outcomes: vec![None; count],
            left: count,
            guards: batch.guards,
            completion: Some(batch.completion),
        }),
        cancelled: Arc::clone(&cancelled),
        deadline: batch.deadline,
        shared: Arc::clone(shared),
    });
    let job = |index| Job { batch: Arc::clone(&running), index, finished: false };
    let mut jobs: Vec<Job> = (0..count).map(job).collect();
    jobs.sort_unstable_by_key(|job| job.op().slot);
    (BatchHandle(cancelled), jobs)
}
