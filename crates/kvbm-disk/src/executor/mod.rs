//! The executor: a bounded queue, and who takes operations from it: a ring or a pool of threads,
//! which make system calls or have lanes of a [`SlotIo`].

mod job;
mod lane;
mod pool;
mod queue;
mod ring;

use crate::batch::{IoBatch, Op, OpKind};
use crate::keyring::Keyring;
use crate::ops::{self, Begun};
use crate::shared::{Alive, EngineState};
use crate::slot_file::Bounce;
use crate::{
    BatchHandle, EngineChoice, EngineKind, EngineMode, IoMemory, OpError, OpenError, SlotIo, UnsubmittedBatch,
};
use job::{Job, jobs_of};
use kvbm_plan::deadline_after;
use queue::Queue;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a batch of writes of another engine waits for data keys that it makes.
const KEY_DEADLINE: Duration = Duration::from_millis(250);
const KEY_PAUSE: Duration = Duration::from_millis(5);

thread_local! {
    static IS_ENGINE_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller runs inside a completion: it must not wait for the threads of an engine.
pub(crate) fn on_engine_thread() -> bool {
    IS_ENGINE_THREAD.get()
}

/// The running executor.
pub(crate) struct Executor {
    queue: Arc<Queue>,
    shared: Arc<EngineState>,
    alive: Arc<Alive>,
    choice: EngineChoice,
}

impl Executor {
    /// An executor that nobody takes operations from yet.
    fn idle(shared: &Arc<EngineState>) -> Self {
        Self {
            queue: Arc::new(Queue::new(shared.config.queue_depth)),
            shared: Arc::clone(shared),
            alive: Arc::default(),
            choice: shared.slots.choice(),
        }
    }

    /// One without threads: operations wait for [`Executor::run_waiting`].
    #[cfg(any(test, kvbm_sim))]
    pub(crate) fn without_threads(shared: &Arc<EngineState>) -> Self {
        Self::idle(shared)
    }

    /// Runs every operation that waits, on this thread.
    #[cfg(any(test, kvbm_sim))]
    pub(crate) fn run_waiting(&self, bounce: &mut Bounce) {
        pool::run_waiting(&self.queue, &self.shared, bounce);
    }

    /// Starts what the configuration and the medium allow.
    pub(crate) fn start(shared: &Arc<EngineState>) -> Result<Self, OpenError> {
        let mut executor = Self::idle(shared);
        let mode = shared.config.engine;
        if let Some(slot_io) = shared.config.slot_io.as_ref().filter(|_| mode == EngineMode::Custom) {
            executor.start_lanes(slot_io)?;
            return Ok(executor);
        }
        if executor.choice.kind != EngineKind::Buffered && mode != EngineMode::Threads {
            match ring::start(&executor.queue, shared, &executor.alive) {
                Ok(()) => {
                    executor.choice.kind = EngineKind::IoUring;
                    executor.choice.reason = reason(mode, "a ring could be set up");
                    return Ok(executor);
                }
                Err(error) if mode == EngineMode::IoUring => {
                    return Err(OpenError::NoEngine {
                        engine: EngineKind::IoUring,
                        reason: error.to_string(),
                    });
                }
                Err(error) => executor.choice.reason = format!("no io_uring: {error}"),
            }
        }
        pool::start(&executor.queue, shared, &executor.alive).map_err(|source| {
            executor.close();
            OpenError::Io { doing: "start a thread".to_owned(), source }
        })?;
        Ok(executor)
    }

    /// Starts threads with lanes of `slot_io`.
    fn start_lanes(&mut self, slot_io: &Arc<dyn SlotIo>) -> Result<(), OpenError> {
        let engine = EngineKind::Custom(slot_io.name());
        if slot_io.hides_short_writes() && !self.shared.slots.preallocated && !self.shared.follows {
            let reason = "it does not report a write for which the disk has no room, and this file system does not reserve the space of slot files (fallocate)";
            return Err(OpenError::NoEngine { engine, reason: reason.to_owned() });
        }
        let cached = match &self.shared.slots.direct {
            Ok(_) => String::new(),
            Err(reason) => format!(", through the page cache ({reason})"),
        };
        (self.choice.kind, self.choice.reason) = (engine, format!("{}{cached}", slot_io.describe()));
        pool::start_lanes(slot_io, &self.queue, &self.shared, &self.alive).map_err(|error| {
            self.close();
            OpenError::NoEngine { engine, reason: format!("{}: {error}", slot_io.describe()) }
        })
    }

    /// Who moves the bytes, and why.
    pub(crate) fn choice(&self) -> EngineChoice {
        let mut choice = self.choice.clone();
        (choice.registered_bytes, choice.unregistered) = self.queue.registered();
        choice.bounce_bytes = self.queue.bounce_bytes();
        if let Some(why) = self.queue.changed_way() {
            (choice.kind, choice.reason) = (EngineKind::Threads, why);
        }
        choice
    }

    /// Operations at the devices at a time.
    pub(crate) fn depth(&self) -> usize {
        match self.choice.kind {
            EngineKind::IoUring if self.queue.changed_way().is_some() => 1,
            EngineKind::IoUring => self.shared.config.ring_depth(),
            EngineKind::Threads | EngineKind::Buffered | EngineKind::Custom(_) => self.shared.config.threads,
        }
    }

    /// Lets the kernel, or a [`SlotIo`], know memory that many operations will use.
    pub(crate) fn register(&self, memory: IoMemory) {
        match (self.choice.kind, &self.shared.config.slot_io) {
            (EngineKind::IoUring, _) => self.queue.register(memory),
            (EngineKind::Custom(_), Some(slot_io)) => {
                let bytes = memory.bytes();
                match slot_io.register(memory) {
                    Ok(()) => self.queue.note_registered(bytes, None),
                    Err(error) => self.queue.note_registered(0, Some(error.to_string())),
                }
            }
            _ => {}
        }
    }

    /// Queues all operations of a batch, or none.
    pub(crate) fn submit(&self, batch: IoBatch) -> Result<BatchHandle, UnsubmittedBatch> {
        if let Err(error) = self.queue.admit(batch.len()) {
            return Err(UnsubmittedBatch { batch, error });
        }
        let (handle, mut jobs) = jobs_of(batch, &self.shared);
        if self.shared.follows {
            let (writes, reads) = jobs.into_iter().partition(|job| job.op().kind != OpKind::Read);
            jobs = reads;
            self.note(writes);
        }
        if !jobs.is_empty() {
            self.queue.push(jobs);
        }
        Ok(handle)
    }

    /// Writes of another engine: what they say is noted, and nothing moves.
    fn note(&self, writes: Vec<Job>) {
        let mut bounce = Bounce::default();
        if !writes.is_empty() {
            self.read_keys();
        }
        let until = deadline_after(Instant::now(), KEY_DEADLINE);
        for job in writes {
            // SAFETY: the job lives, so the contract of its fragments holds.
            let mut begun = unsafe { ops::begin(job.op(), &self.shared) };
            // The first write of a namespace makes its key, and goes on at the same time.
            while matches!(begun, Err(OpError::NoKey { .. })) && Instant::now() < until {
                std::thread::sleep(KEY_PAUSE);
                self.read_keys();
                // SAFETY: as above.
                begun = unsafe { ops::begin(job.op(), &self.shared) };
            }
            // SAFETY: as above.
            let begun = begun.map(|begun| unsafe { self.sealed(job.op(), begun, &mut bounce) });
            let outcome = begun.and_then(|begun| match begun {
                Begun::Write { sums, .. } => ops::note(job.op(), sums, &self.shared),
                Begun::Read { .. } => Err(job.panicked()),
            });
            self.queue.noted();
            drop(job.finish(outcome));
        }
    }

    /// Reads the keys again that another engine makes.
    fn read_keys(&self) {
        if let Some(Err(error)) = self.shared.keyring.as_ref().map(Keyring::refresh) {
            tracing::warn!(directory = self.shared.medium.location(), %error, "data keys cannot be read again");
        }
    }

    /// With the tag that the block has on the disk, where blocks are encrypted.
    ///
    /// Safety: the contract of [`IoFragments::from_raw`](crate::IoFragments::from_raw) holds, for a
    /// write.
    unsafe fn sealed(&self, op: &Op, mut begun: Begun, bounce: &mut Bounce) -> Begun {
        if matches!(begun, Begun::Write { key: Some(_), .. }) {
            let staged = bounce.part(&self.shared.slots, op.fragments.bytes());
            // SAFETY: by the caller's contract.
            unsafe { op.fragments.gather(staged) };
            begun.seal(op, staged, &self.shared);
        }
        begun
    }

    /// Operations queued or running.
    pub(crate) fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }

    /// Takes nothing more, fails what has not started, lets the threads end.
    pub(crate) fn close(&self) {
        self.queue.close();
    }

    /// Whether all threads ended by `deadline`.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        self.alive.wait_none(deadline)
    }
}

fn reason(mode: EngineMode, probed: &str) -> String {
    if mode == EngineMode::Auto { probed.to_owned() } else { "configured".to_owned() }
}

/// Starts a thread of the engine, which counts as alive until it ends.
fn spawn(name: String, alive: &Arc<Alive>, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let guard = alive.guard();
    let body = move || {
        IS_ENGINE_THREAD.set(true);
        body();
        // The last thing: who waits for the threads may reopen the directory at once.
        drop(guard);
    };
    std::thread::Builder::new().name(name).spawn(body).map(drop)
}
