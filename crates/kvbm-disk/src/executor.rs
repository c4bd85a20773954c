//! The executor: a bounded queue and a pool of threads with preadv / pwritev.

use crate::batch::{Completion, IoBatch, Op, OpKind};
use crate::ops;
use crate::shared::{Alive, Shared};
use crate::slots::Bounce;
use crate::{BatchHandle, OpError, OpOutcome, Rejected, SubmitError};
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Reads go first, because a request waits for them; but every so many a write does, so that none starves.
const READS_PER_WRITE: u32 = 8;

thread_local! {
    static IS_ENGINE_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller runs inside a completion: it must not wait for the threads of an engine.
pub(crate) fn on_engine_thread() -> bool {
    IS_ENGINE_THREAD.get()
}

/// A batch whose operations are under way.
struct Running {
    state: Mutex<RunningState>,
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    shared: Arc<Shared>,
}

struct RunningState {
    outcomes: Vec<Option<OpOutcome>>,
    left: usize,
    guards: Vec<Arc<dyn Any + Send + Sync>>,
    completion: Option<Completion>,
}

impl Running {
    /// Records an outcome; the last one drops the guards and calls the completion.
    fn complete(&self, index: usize, outcome: OpOutcome) {
        let mut state = self.state.lock();
        state.outcomes[index] = Some(outcome);
        state.left -= 1;
        if state.left > 0 {
            return;
        }
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

/// One operation. Whatever becomes of it, its batch gets exactly one outcome.
struct Job {
    batch: Arc<Running>,
    index: usize,
    op: Op,
    finished: bool,
}

impl Job {
    /// Why the operation must not start.
    fn refusal(&self) -> Option<OpError> {
        let slot = self.op.slot;
        if self.batch.cancelled.load(Ordering::Acquire) {
            return Some(OpError::Cancelled { slot });
        }
        self.batch.deadline.filter(|deadline| *deadline <= Instant::now()).map(|_| OpError::Deadline { slot })
    }

    fn finish(mut self, outcome: OpOutcome) {
        self.finished = true;
        ops::count(&self.batch.shared, self.op.kind, &outcome);
        self.batch.complete(self.index, outcome);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.finished {
            let outcome = Err(OpError::ShuttingDown { slot: self.op.slot });
            ops::count(&self.batch.shared, self.op.kind, &outcome);
            self.batch.complete(self.index, outcome);
        }
    }
}

#[derive(Default)]
struct Jobs {
    reads: VecDeque<Job>,
    writes: VecDeque<Job>,
    /// Queued and running.
    outstanding: usize,
    reads_in_a_row: u32,
    closed: bool,
}

impl Jobs {
    fn next(&mut self) -> Option<Job> {
        let write_is_due = self.reads.is_empty() || self.reads_in_a_row >= READS_PER_WRITE;
        if write_is_due && let Some(job) = self.writes.pop_front() {
            self.reads_in_a_row = 0;
            return Some(job);
        }
        let job = self.reads.pop_front()?;
        self.reads_in_a_row = self.reads_in_a_row.saturating_add(1);
        Some(job)
    }
}

/// The queue, shared with the pool's threads.
#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

/// The running pool.
pub(crate) struct Executor {
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    alive: Arc<Alive>,
}

impl Executor {
    /// Starts the threads.
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let executor =
            Self { queue: Arc::new(Queue::default()), shared: Arc::clone(shared), alive: Arc::default() };
        for index in 0..shared.config.threads {
            let (queue, shared, guard) =
                (Arc::clone(&executor.queue), Arc::clone(shared), executor.alive.guard());
            let spawned = std::thread::Builder::new().name(format!("kvbm-disk-{index}")).spawn(move || {
                IS_ENGINE_THREAD.set(true);
                work(&queue, &shared);
                // Before the guard: who waits for the threads may reopen the directory at once.
                drop((queue, shared));
                drop(guard);
            });
            if let Err(error) = spawned {
                executor.close();
                return Err(error);
            }
        }
        Ok(executor)
    }

    /// Queues all operations of a batch, or none.
    pub(crate) fn submit(&self, batch: IoBatch) -> Result<BatchHandle, Rejected> {
        let depth = self.shared.config.queue_depth;
        let count = batch.ops.len();
        let mut jobs = self.queue.jobs.lock();
        let queued = jobs.outstanding;
        let error = if count == 0 {
            Some(SubmitError::Empty)
        } else if jobs.closed {
            Some(SubmitError::ShuttingDown)
        } else if queued > 0 && queued.saturating_add(count) > depth {
            Some(SubmitError::QueueFull { queued, depth })
        } else {
            None
        };
        if let Some(error) = error {
            drop(jobs);
            return Err(Rejected { batch, error });
        }
        let cancelled = Arc::new(AtomicBool::new(false));
        let running = Arc::new(Running {
            state: Mutex::new(RunningState {
                outcomes: vec![None; count],
                left: count,
                guards: batch.guards,
                completion: Some(batch.completion),
            }),
            cancelled: Arc::clone(&cancelled),
            deadline: batch.deadline,
            shared: Arc::clone(&self.shared),
        });
        jobs.outstanding += count;
        for (index, op) in batch.ops.into_iter().enumerate() {
            let side = if op.kind == OpKind::Read { &mut jobs.reads } else { &mut jobs.writes };
            side.push_back(Job { batch: Arc::clone(&running), index, op, finished: false });
        }
        drop(jobs);
        for _ in 0..count.min(self.shared.config.threads) {
            self.queue.more.notify_one();
        }
        Ok(BatchHandle(cancelled))
    }

    /// Operations queued or running.
    pub(crate) fn outstanding(&self) -> usize {
        self.queue.jobs.lock().outstanding
    }

    /// Takes nothing more, fails what has not started, lets the threads end.
    pub(crate) fn close(&self) {
        let mut jobs = self.queue.jobs.lock();
        jobs.closed = true;
        let reads = std::mem::take(&mut jobs.reads);
        let writes = std::mem::take(&mut jobs.writes);
        jobs.outstanding -= reads.len() + writes.len();
        drop(jobs);
        self.queue.more.notify_all();
        drop((reads, writes));
    }

    /// Whether all threads ended by `deadline`.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        self.alive.wait_none(deadline)
    }
}

/// The life of an I/O thread.
fn work(queue: &Queue, shared: &Shared) {
    let mut bounce = Bounce::default();
    loop {
        let mut jobs = queue.jobs.lock();
        let job = loop {
            if let Some(job) = jobs.next() {
                break job;
            }
            if jobs.closed {
                return;
            }
            queue.more.wait(&mut jobs);
        };
        drop(jobs);
        let outcome = match job.refusal() {
            Some(error) => Err(error),
            None => run(&job, shared, &mut bounce),
        };
        queue.jobs.lock().outstanding -= 1;
        job.finish(outcome);
    }
}

/// Runs one operation. A medium that panics fails the operation, not the thread.
fn run(job: &Job, shared: &Shared, bounce: &mut Bounce) -> OpOutcome {
    let op = &job.op;
    // SAFETY: the batch is submitted and not completed, so the contract of its fragments holds.
    let run = AssertUnwindSafe(|| unsafe { ops::run(op, shared, bounce) });
    catch_unwind(run).unwrap_or_else(|_| {
        ops::abandon(op, shared);
        Err(OpError::Io {
            op: ops::name(op.kind),
            slot: op.slot,
            at: 0,
            kind: io::ErrorKind::Other,
            message: "the medium panicked".to_owned(),
        })
    })
}
