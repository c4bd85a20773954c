//! What the ring's thread does: keeps the device busy, and verifies what came from it meanwhile.
//!
//! Blocks that lie side by side go in one request: a request costs the device and the kernel as
//! much as some ten thousand bytes do. Each keeps its own fate: where a request fails in the
//! middle, the blocks behind are tried again, each alone.

use super::port::{Completed, Port, Ticket};
use super::transfer::{Step, Transfer};
use crate::batch::OpKind;
use crate::buffer::{Arena, Staging};
use crate::executor::job::{BatchEnd, Job};
use crate::executor::queue::{Ended, Queue};
use crate::medium::complete::Stopped;
use crate::ops::{self, Begun, Over};
use crate::shared::EngineState;
use crate::slot_file::{Moved, SlotFile};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes between two looks at the device: to copy or to sum so many takes a fraction of what the
/// device needs for as many.
const STRIDE_BYTES: u64 = 1 << 20;
/// Bytes of operations that end before callers are notified of batches that are over, unless there
/// is nothing else to do. To wake a caller costs as much as to sum some hundred thousand bytes.
const BATCH_END_BYTES: u64 = 16 << 20;
/// Bytes that blocks in one request have together, at most, where few are under way. So a short
/// queue keeps the device busy and comes back in parts. Where there is enough for `GROUPS`
/// requests, each has more, which costs less CPU.
const GROUP_BYTES: u64 = 512 << 10;
const MAX_GROUP_BYTES: u64 = 4 << 20;
const GROUPS: u64 = 8;

/// An operation whose slot is taken.
struct StartedOp {
    job: Job,
    begun: Begun,
}

/// Blocks side by side in the file, in the same direction, all through the arena or none.
type Group = Vec<StartedOp>;

/// Room for one group at the device.
#[derive(Default)]
struct RingSlot {
    group: Group,
    transfer: Transfer,
    /// The part of the arena that it passes through.
    part: Option<usize>,
}

pub(super) struct Driver<P: Port> {
    /// Dropped first: it waits for the hardware, which may still use the memory of what follows.
    port: P,
    ring_slots: Vec<RingSlot>,
    free: Vec<Ticket>,
    /// Made when first needed.
    arena: Option<Arena>,
    /// Groups that wait for a ring slot, or for a part of the arena.
    waiting_groups: VecDeque<Group>,
    /// Transfers that are over and wait for their checksums.
    over: VecDeque<(StartedOp, Result<Moved, Stopped>)>,
    /// Transfers that have their checksums: a buffer of [`Driver::end_some`].
    summed: Vec<(Job, Over)>,
    /// Batches that are over and whose callers do not know it, and bytes of what ended since
    /// callers were notified.
    batch_ends: Vec<BatchEnd>,
    batch_end_bytes: u64,
    /// Bytes copied or summed since the device was last told of requests, and whether there are
    /// any.
    worked: u64,
    unsubmitted: bool,
    queue: Arc<Queue>,
    shared: Arc<EngineState>,
}

impl<P: Port> Driver<P> {
    pub(super) fn new(port: P, queue: Arc<Queue>, shared: Arc<EngineState>) -> Self {
        let depth = shared.config.ring_depth();
        Self {
            port,
            ring_slots: (0..depth).map(|_| RingSlot::default()).collect(),
            free: (0..depth as Ticket).rev().collect(),
            arena: None,
            waiting_groups: VecDeque::new(),
            over: VecDeque::with_capacity(depth),
            summed: Vec::new(),
            batch_ends: Vec::new(),
            batch_end_bytes: 0,
            worked: 0,
            unsubmitted: false,
            queue,
            shared,
        }
    }

    /// Runs until the queue is closed and nothing is under way.
    pub(super) fn run(mut self) {
        let mut completed: Vec<Completed> = Vec::with_capacity(self.ring_slots.len());
        loop {
            self.start_waiting();
            let slots = &self.shared.slots;
            // What still stands goes first.
            let room = if self.waiting_groups.is_empty() { self.free.len() } else { 0 };
            let taken = self.queue.take(room, |group, next, busy| joins(slots, group, next, busy));
            for memory in taken.memory {
                let (bytes, refused) = self.port.register(memory);
                self.queue.note_registered(bytes, refused);
            }
            for jobs in taken.jobs {
                self.begin(jobs);
            }
            self.submit();
            if !self.over.is_empty() {
                self.end_some();
                self.port.poll(&mut completed);
            } else if self.complete_batches() {
                // They may have more to do.
            } else if self.free.len() == self.ring_slots.len()
                && self.waiting_groups.is_empty()
                && taken.closed
            {
                return;
            } else if self.free.is_empty()
                || !self.waiting_groups.is_empty()
                || taken.closed
                || self.queue.sleep()
            {
                // Where no ring slot is free, or what stands needs memory that others have, or the
                // queue is closed, only the device is waited for.
                self.port.wait(&mut completed);
                self.queue.awake();
            }
            if let Some(why) = self.port.changed_way() {
                tracing::warn!(
                    directory = self.shared.medium.location(),
                    why,
                    "the disk tier is slow from here on: let the sandbox allow io_uring_enter, or open the directory again, with threads"
                );
                self.queue.note_changed_way(why);
            }
            for (ticket, result) in completed.drain(..) {
                self.completed(ticket, result);
            }
        }
    }

    fn submit(&mut self) {
        self.worked = 0;
        if std::mem::take(&mut self.unsubmitted) {
            self.port.submit();
        }
    }

    /// Takes the slots of a group, and a ring slot for those that got theirs. Blocks that no longer
    /// adjoin make groups of their own.
    fn begin(&mut self, jobs: Vec<Job>) {
        let mut group = Group::with_capacity(jobs.len());
        for job in jobs {
            let begun = match job.refusal() {
                Some(error) => Err(error),
                // SAFETY: the job lives, so the contract of its fragments holds.
                None => unsafe { ops::begin(job.op(), &self.shared) },
            };
            match begun {
                Ok(begun) => {
                    self.worked += if job.op().kind.sums_first() { job.op().fragments.bytes() } else { 0 };
                    let last = group.last().map(|flight: &StartedOp| flight.job.op().slot);
                    if last.is_some_and(|last| !self.shared.slots.adjoin(last, job.op().slot)) {
                        self.waiting_groups.push_back(std::mem::take(&mut group));
                    }
                    group.push(StartedOp { job, begun });
                }
                Err(error) => {
                    self.queue.done(Ended::default().and(job.op().kind));
                    self.batch_ends.extend(job.finish(Err(error)));
                }
            }
        }
        self.waiting_groups.extend((!group.is_empty()).then_some(group));
        self.start_waiting();
    }

    /// Puts groups on free ring slots, in their order: until the ring slots are taken, or the parts
    /// of the arena where the next one needs one.
    fn start_waiting(&mut self) {
        while let (Some(ticket), Some(group)) = (self.free.last().copied(), self.waiting_groups.pop_front()) {
            let first = group.first().map(|flight| &flight.job.op().fragments);
            let bounced = first.is_some_and(|first| self.shared.slots.needs_bounce(first));
            let part = if bounced { self.arena().take() } else { None };
            if bounced && part.is_none() {
                return self.waiting_groups.push_front(group);
            }
            self.free.pop();
            self.start(ticket, group, part);
        }
    }

    /// Starts a group on its ring slot; through a part of the arena if that is given.
    fn start(&mut self, ticket: Ticket, mut group: Group, part: Option<usize>) {
        let slots = &self.shared.slots;
        let Some(StartedOp { job, begun }) = group.first() else { return self.free.push(ticket) };
        let (write, place) = (matches!(begun, Begun::Write { .. }), slots.place(job.op().slot));
        let bytes: u64 = group.iter().map(|flight| flight.job.op().fragments.bytes()).sum();
        let staged = part.and_then(|part| Some(self.arena.as_mut()?.part(part)));
        let ring_slot = &mut self.ring_slots[usize::from(ticket)];
        let blocks = group.iter().map(|flight| &flight.job.op().fragments);
        let (how, port, shared) = ((write, place, slots.alignment()), &self.port, &*self.shared);
        let mut sealed = Vec::new();
        let seal = |index: usize, staged: &mut [u8]| {
            if shared.keyring.is_some() {
                let StartedOp { job, begun } = &group[index];
                let mut begun = begun.clone();
                begun.seal(job.op(), staged, shared);
                sealed.push(begun);
            }
        };
        // SAFETY: the jobs live on the ring slot until the transfer is over, so the contract of
        // their fragments holds; the part of the arena is this ring slot's until it is given back.
        unsafe { ring_slot.transfer.load(blocks, how, staged, seal, |run, next| port.joins(run, next)) };
        for (flight, begun) in group.iter_mut().zip(sealed) {
            flight.begun = begun;
        }
        (ring_slot.group, ring_slot.part) = (group, part);
        self.worked += if part.is_some() && write { bytes } else { 0 };
        self.shared.count(|stats| stats.requests += 1);
        self.request(ticket);
    }

    /// Asks for what is left of a ring slot's transfer.
    fn request(&mut self, ticket: Ticket) {
        let transfer = &mut self.ring_slots[usize::from(ticket)].transfer;
        let (place, rest) = transfer.rest();
        // SAFETY: the list lies in its own allocation, which nobody touches before the completion;
        // its memory belongs to the jobs on this ring slot, begun for this direction, or is the
        // ring slot's part of the arena.
        let asked = unsafe { self.port.start(ticket, transfer.is_write(), place, rest) };
        transfer.requested(asked);
        self.unsubmitted = true;
        if self.worked >= STRIDE_BYTES {
            self.submit();
        }
    }

    fn completed(&mut self, ticket: Ticket, result: std::io::Result<usize>) {
        let Some(ring_slot) = self.ring_slots.get_mut(usize::from(ticket)) else { return };
        if ring_slot.group.is_empty() {
            return;
        }
        match ring_slot.transfer.completed(result) {
            Step::Again => self.request(ticket),
            Step::Over(continued) => {
                if let Some(part) = ring_slot.part
                    && !ring_slot.transfer.is_write()
                {
                    let staged = self.arena.as_mut().map(|arena| arena.part(part));
                    // SAFETY: the transfer is over, and these are the fragments that it was loaded
                    // with.
                    unsafe { scatter(&mut ring_slot.group, staged, &self.shared) };
                }
                let mut moved = Moved { bounced: ring_slot.part.is_some(), continued };
                for flight in ring_slot.group.drain(..) {
                    self.over.push_back((flight, Ok(moved)));
                    moved.continued = 0;
                }
                self.vacate(ticket);
            }
            Step::Stopped(stopped) if ring_slot.group.len() == 1 => {
                self.over.extend(ring_slot.group.pop().map(|flight| (flight, Err(stopped))));
                self.vacate(ticket);
            }
            Step::Stopped(_) => {
                // Whose fault it was shows when each is tried alone.
                self.waiting_groups.extend(ring_slot.group.drain(..).map(|flight| vec![flight]));
                self.vacate(ticket);
            }
        }
    }

    /// The ring slot's transfer is over.
    fn vacate(&mut self, ticket: Ticket) {
        let part = self.ring_slots[usize::from(ticket)].part.take();
        if let (Some(part), Some(arena)) = (part, &mut self.arena) {
            arena.give_back(part);
        }
        self.free.push(ticket);
    }

    fn arena(&mut self) -> &mut Arena {
        let Self { arena, port, queue, shared, .. } = self;
        arena.get_or_insert_with(|| {
            let config = &shared.config;
            let arena =
                Arena::new(config.ring_depth(), shared.slots.stride.max(GROUP_BYTES), config.bounce_bytes);
            queue.note_bounce(arena.bytes());
            let (bytes, refused) = port.register(arena.io_memory());
            queue.note_registered(bytes, refused);
            arena
        })
    }

    /// Ends operations whose transfers are over, until the device may want attention.
    fn end_some(&mut self) {
        let mut summed = std::mem::take(&mut self.summed);
        let mut bytes = 0;
        // All sums first, and nothing between them: blocks that follow each other in memory are
        // then read at full speed.
        while bytes < STRIDE_BYTES
            && let Some((StartedOp { job, begun }, result)) = self.over.pop_front()
        {
            bytes += if job.op().kind == OpKind::Read { job.op().fragments.bytes() } else { 0 };
            // SAFETY: the job lives, and its transfer is over.
            let over = unsafe { ops::over(job.op(), &begun, result, &self.shared) };
            summed.push((job, over));
        }
        let mut ended = Ended::default();
        for (job, end) in summed.drain(..) {
            ended = ended.and(job.op().kind);
            self.batch_end_bytes += job.op().fragments.bytes();
            let outcome = ops::end(job.op(), end, &self.shared);
            self.batch_ends.extend(job.finish(outcome));
        }
        self.queue.done(ended);
        self.summed = summed;
        if self.batch_end_bytes >= BATCH_END_BYTES {
            self.complete_batches();
        }
    }

    /// Tells the callers whose batches are over. Whether there were any.
    fn complete_batches(&mut self) -> bool {
        self.batch_end_bytes = 0;
        !std::mem::take(&mut self.batch_ends).is_empty()
    }
}

/// Whether `next` may go in one request with `group`, behind its last. `busy` operations in the
/// same direction wait or run.
fn joins(slots: &SlotFile, group: &[Job], next: &Job, busy: usize) -> bool {
    let Some(last) = group.last() else { return true };
    let (last, next) = (last.op(), next.op());
    let (bytes, bounced) = (last.fragments.bytes(), slots.needs_bounce(&last.fragments));
    let share = busy as u64 * slots.stride / GROUPS;
    let most = if bounced { GROUP_BYTES } else { share.clamp(GROUP_BYTES, MAX_GROUP_BYTES) };
    bytes == slots.stride
        && bytes * (group.len() as u64 + 1) <= most
        && slots.adjoin(last.slot, next.slot)
        && (last.kind == OpKind::Read) == (next.kind == OpKind::Read)
        && next.fragments.bytes() <= slots.stride
        && bounced == slots.needs_bounce(&next.fragments)
}

/// Safety: the contract of [`IoFragments::from_raw`](crate::IoFragments::from_raw) holds, for reads
/// that are over.
unsafe fn scatter(group: &mut [StartedOp], staged: Option<Staging<'_>>, shared: &EngineState) {
    let Some(mut staged) = staged else { return };
    let mut at = 0;
    for StartedOp { job, begun } in group {
        let fragments = &job.op().fragments;
        let part = staged.part(at, fragments.bytes().next_multiple_of(shared.slots.alignment()));
        at += part.len() as u64;
        if begun.open(job.op(), part, shared) {
            // SAFETY: by the caller's contract.
            unsafe { fragments.scatter(part) };
        }
    }
}
