//! What waits for the executor's threads.

use super::job::Job;
use super::ring::WakeEvent;
use crate::batch::{OpKind, Source};
use crate::{IoMemory, SubmitError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads go first, because a request waits for them; but every so many a write does, so that none
/// starves.
const READS_PER_WRITE: u32 = 8;

/// Operations in one direction.
#[derive(Default)]
struct DirectionQueue {
    waiting: VecDeque<Job>,
    /// That wait or run.
    busy: usize,
}

#[derive(Default)]
struct Jobs {
    reads: DirectionQueue,
    writes: DirectionQueue,
    /// Admitted and not finished.
    outstanding: usize,
    reads_in_a_row: u32,
    closed: bool,
    /// Memory that the ring has yet to register.
    memory: Vec<IoMemory>,
    registered_bytes: u64,
    unregistered: Option<String>,
    /// Of the ring's buffer.
    bounce_bytes: u64,
    changed_way: Option<String>,
}

impl Jobs {
    fn next(&mut self) -> Option<Job> {
        let write_is_due = self.reads.waiting.is_empty() || self.reads_in_a_row >= READS_PER_WRITE;
        if write_is_due && let Some(job) = self.writes.waiting.pop_front() {
            self.reads_in_a_row = 0;
            return Some(job);
        }
        let job = self.reads.waiting.pop_front()?;
        self.reads_in_a_row = self.reads_in_a_row.saturating_add(1);
        Some(job)
    }

    /// The next operation, with those behind it that `joins` says go well with it.
    fn next_group(&mut self, joins: &impl Fn(&[Job], &Job, usize) -> bool) -> Option<Vec<Job>> {
        let mut group = vec![self.next()?];
        let side = self.side(group[0].op().kind);
        while side.waiting.front().is_some_and(|next| joins(&group, next, side.busy)) {
            group.extend(side.waiting.pop_front());
        }
        Some(group)
    }

    fn side(&mut self, kind: OpKind) -> &mut DirectionQueue {
        if kind == OpKind::Read { &mut self.reads } else { &mut self.writes }
    }

    fn is_empty(&self) -> bool {
        self.reads.waiting.is_empty() && self.writes.waiting.is_empty() && self.memory.is_empty()
    }
}

/// How many operations are over.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ended {
    reads: usize,
    writes: usize,
}

impl Ended {
    /// One more.
    pub(super) fn and(self, kind: OpKind) -> Self {
        let read = usize::from(kind == OpKind::Read);
        Self { reads: self.reads + read, writes: self.writes + 1 - read }
    }
}

/// What a ring takes at a time.
#[derive(Default)]
pub(super) struct TakenJobs {
    /// In groups.
    pub(super) jobs: Vec<Vec<Job>>,
    pub(super) memory: Vec<IoMemory>,
    pub(super) closed: bool,
}

/// The queue. Threads of a pool wait on its condition; a ring is woken by its wake event.
pub(super) struct Queue {
    depth: usize,
    jobs: Mutex<Jobs>,
    more: Condvar,
    wake_event: OnceLock<WakeEvent>,
    /// The ring is about to wait, or waits, and wants the wake event for every change.
    ring_sleeps: AtomicBool,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            depth,
            jobs: Mutex::default(),
            more: Condvar::new(),
            wake_event: OnceLock::new(),
            ring_sleeps: AtomicBool::new(false),
        }
    }

    /// Reserves room for `count` operations, which [`Queue::push`] brings.
    pub(super) fn admit(&self, count: usize) -> Result<(), SubmitError> {
        let mut jobs = self.jobs.lock();
        let (queued, depth) = (jobs.outstanding, self.depth);
        if count == 0 {
            return Err(SubmitError::Empty);
        }
        if jobs.closed {
            return Err(SubmitError::ShuttingDown);
        }
        if queued > 0 && queued.saturating_add(count) > depth {
            return Err(SubmitError::QueueFull { queued, depth });
        }
        jobs.outstanding += count;
        Ok(())
    }

    /// Queues operations that were admitted. If the queue was closed meanwhile they fail.
    pub(super) fn push(&self, new: Vec<Job>) {
        let count = new.len();
        let mut jobs = self.jobs.lock();
        if jobs.closed {
            jobs.outstanding -= count;
            drop(jobs);
            return drop(new);
        }
        for job in new {
            let side = jobs.side(job.op().kind);
            side.busy += 1;
            side.waiting.push_back(job);
        }
        drop(jobs);
        self.wake(count);
    }

    fn wake(&self, count: usize) {
        if let Some(wake_event) = self.wake_event.get() {
            // A ring that has not set `ring_sleeps` checks the queue before it waits.
            if self.ring_sleeps.swap(false, Ordering::AcqRel) {
                wake_event.ring();
            }
        } else {
            for _ in 0..count.min(self.depth) {
                self.more.notify_one();
            }
        }
    }

    pub(super) fn outstanding(&self) -> usize {
        self.jobs.lock().outstanding
    }

    /// Frees the room of these operations. Call it before their outcomes are delivered: a caller
    /// may submit again at once.
    pub(super) fn done(&self, ended: Ended) {
        let mut jobs = self.jobs.lock();
        jobs.outstanding -= ended.reads + ended.writes;
        jobs.reads.busy -= ended.reads;
        jobs.writes.busy -= ended.writes;
    }

    /// Frees the room of an operation that was admitted and is over without having been queued.
    pub(super) fn noted(&self) {
        self.jobs.lock().outstanding -= 1;
    }

    /// Takes nothing more and fails what has not started.
    pub(super) fn close(&self) {
        let mut jobs = self.jobs.lock();
        jobs.closed = true;
        let unstarted = [OpKind::Read, OpKind::Write(Source::Unknown)].map(|kind| {
            let side = jobs.side(kind);
            side.busy -= side.waiting.len();
            std::mem::take(&mut side.waiting)
        });
        jobs.memory.clear();
        jobs.outstanding -= unstarted.iter().map(VecDeque::len).sum::<usize>();
        drop(jobs);
        self.more.notify_all();
        self.wake(1);
        drop(unstarted);
    }
}

/// A pool's part.
impl Queue {
    /// Waits for the next operation; `None` once the queue is closed.
    pub(super) fn wait(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.next() {
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            self.more.wait(&mut jobs);
        }
    }

    /// The next operation, if one waits.
    #[cfg(any(test, kvbm_sim))]
    pub(super) fn next(&self) -> Option<Job> {
        self.jobs.lock().next()
    }
}

/// A ring's part.
impl Queue {
    /// From here on `bell` says that there is a change.
    pub(super) fn set_wake_event(&self, wake_event: WakeEvent) {
        // There is one ring and it does this once.
        let _already = self.wake_event.set(wake_event);
    }

    /// Takes up to `room` groups of operations of one kind. An operation joins the group before it
    /// as `joins` decides, which is told how many of that kind wait or run.
    pub(super) fn take(&self, room: usize, joins: impl Fn(&[Job], &Job, usize) -> bool) -> TakenJobs {
        let mut jobs = self.jobs.lock();
        let mut taken = TakenJobs { closed: jobs.closed, ..TakenJobs::default() };
        while taken.jobs.len() < room
            && let Some(group) = jobs.next_group(&joins)
        {
            taken.jobs.push(group);
        }
        taken.memory = std::mem::take(&mut jobs.memory);
        taken
    }

    /// Announces that the ring is about to wait. `false` if it must not, because there is a change
    /// already.
    pub(super) fn sleep(&self) -> bool {
        self.ring_sleeps.store(true, Ordering::Release);
        let jobs = self.jobs.lock();
        // Who queues something from here on takes the lock after us, and sees the announcement.
        if jobs.is_empty() && !jobs.closed {
            return true;
        }
        self.ring_sleeps.store(false, Ordering::Release);
        false
    }

    /// The ring is awake for another reason than the wake event.
    pub(super) fn awake(&self) {
        self.ring_sleeps.store(false, Ordering::Release);
    }

    pub(super) fn register(&self, memory: IoMemory) {
        let mut jobs = self.jobs.lock();
        if !jobs.closed {
            jobs.memory.push(memory);
        }
        drop(jobs);
        self.wake(1);
    }

    /// The kernel took `bytes` of memory, or did not because of `refused`.
    pub(super) fn note_registered(&self, bytes: u64, refused: Option<String>) {
        let mut jobs = self.jobs.lock();
        jobs.registered_bytes += bytes;
        if refused.is_some() {
            jobs.unregistered = refused;
        }
    }

    /// The ring has made its buffer, of so many bytes.
    pub(super) fn note_bounce(&self, bytes: u64) {
        self.jobs.lock().bounce_bytes = bytes;
    }

    /// The ring is not used any more, for this reason.
    pub(super) fn note_changed_way(&self, why: String) {
        self.jobs.lock().changed_way = Some(why);
    }

    /// Why the ring is not used any more, if so.
    pub(super) fn changed_way(&self) -> Option<String> {
        self.jobs.lock().changed_way.clone()
    }

    /// Bytes of the ring's buffer.
    pub(super) fn bounce_bytes(&self) -> u64 {
        self.jobs.lock().bounce_bytes
    }

    /// Bytes that the kernel knows, and why it does not know more.
    pub(super) fn registered(&self) -> (u64, Option<String>) {
        let jobs = self.jobs.lock();
        (jobs.registered_bytes, jobs.unregistered.clone())
    }
}
