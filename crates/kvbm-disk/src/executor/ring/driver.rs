//! What the ring's thread does: keeps the device busy, and verifies what came from it meanwhile.

use super::port::{Completed, Port, Ticket};
use super::transfer::{Step, Transfer};
use crate::executor::job::Job;
use crate::executor::queue::Queue;
use crate::medium::full::Stopped;
use crate::ops::{self, Begun};
use crate::shared::Shared;
use crate::slots::Moved;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes between two looks at the device: checksums of so many take a fraction of what the device needs for as many.
const STRIDE_BYTES: u64 = 256 << 10;

/// An operation whose slot is taken.
struct Flight {
    job: Job,
    begun: Begun,
}

/// Room for one operation at the device.
#[derive(Default)]
struct Seat {
    flight: Option<Flight>,
    transfer: Transfer,
}

pub(super) struct Driver<P: Port> {
    /// Dropped first: it waits for the hardware, which may still use the memory of what follows.
    port: P,
    seats: Vec<Seat>,
    free: Vec<Ticket>,
    /// Transfers that are over and wait for their checksums.
    over: VecDeque<(Flight, Result<Moved, Stopped>)>,
    /// Bytes started since the device was last told.
    unsubmitted: u64,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
}

impl<P: Port> Driver<P> {
    pub(super) fn new(port: P, queue: Arc<Queue>, shared: Arc<Shared>) -> Self {
        let depth = shared.config.depth;
        Self {
            port,
            seats: (0..depth).map(|_| Seat::default()).collect(),
            free: (0..depth as Ticket).rev().collect(),
            over: VecDeque::with_capacity(depth),
            unsubmitted: 0,
            queue,
            shared,
        }
    }

    /// Runs until the queue is closed and nothing is under way.
    pub(super) fn run(mut self) {
        let mut completed: Vec<Completed> = Vec::with_capacity(self.seats.len());
        loop {
            let room = self.free.len().min(self.seats.len() - self.over.len());
            let taken = self.queue.take(room);
            for memory in taken.memory {
                let (bytes, refused) = self.port.register(memory);
                self.queue.note_registered(bytes, refused);
            }
            for job in taken.jobs {
                self.begin(job);
            }
            self.submit();
            if !self.over.is_empty() {
                self.end_some();
                self.port.poll(&mut completed);
            } else if self.free.len() == self.seats.len() && taken.closed {
                return;
            } else if self.free.is_empty() || self.queue.sleep() {
                self.port.wait(&mut completed);
                self.queue.awake();
            }
            for (ticket, result) in completed.drain(..) {
                self.completed(ticket, result);
            }
        }
    }

    fn submit(&mut self) {
        if self.unsubmitted > 0 {
            self.unsubmitted = 0;
            self.port.submit();
        }
    }

    /// Puts an operation on a free seat.
    fn begin(&mut self, job: Job) {
        // There is one: no more are taken than there are seats.
        let Some(ticket) = self.free.pop() else { return drop(job) };
        let begun = match job.refusal() {
            Some(error) => Err(error),
            // SAFETY: the job lives, so the contract of its fragments holds.
            None => unsafe { ops::begin(job.op(), &self.shared) },
        };
        let begun = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.free.push(ticket);
                self.queue.done(1);
                return job.finish(Err(error));
            }
        };
        let seat = &mut self.seats[usize::from(ticket)];
        let (op, write) = (job.op(), matches!(begun, Begun::Write { .. }));
        // SAFETY: as above; the job lives on the seat until its transfer is over.
        unsafe { seat.transfer.load(&self.shared.slots, op.slot, &op.fragments, write) };
        seat.flight = Some(Flight { job, begun });
        self.request(ticket);
    }

    /// Asks for what is left of a seat's transfer.
    fn request(&mut self, ticket: Ticket) {
        let transfer = &mut self.seats[usize::from(ticket)].transfer;
        let (offset, rest) = transfer.rest();
        // SAFETY: the list lies in its own allocation, which nobody touches before the completion; its memory belongs to
        // the job on this seat, begun for this direction, or is the seat's bounce buffer.
        let asked = unsafe { self.port.start(ticket, transfer.is_write(), offset, rest) };
        transfer.requested(asked);
        self.unsubmitted += asked.max(1);
        if self.unsubmitted >= STRIDE_BYTES {
            self.submit();
        }
    }

    fn completed(&mut self, ticket: Ticket, result: std::io::Result<usize>) {
        let Some(seat) = self.seats.get_mut(usize::from(ticket)) else { return };
        let Some(flight) = &seat.flight else { return };
        let op = flight.job.op();
        // SAFETY: the job lives, and these are the fragments that the transfer was loaded with.
        let step = unsafe { seat.transfer.completed(result, &self.shared.slots, &op.fragments) };
        match step {
            Step::Again => self.request(ticket),
            Step::Over(result) => {
                let flight = seat.flight.take();
                self.free.push(ticket);
                self.over.extend(flight.map(|flight| (flight, result)));
            }
        }
    }

    /// Ends operations whose transfers are over, until the device may want attention.
    fn end_some(&mut self) {
        let mut bytes = 0;
        while bytes < STRIDE_BYTES
            && let Some((Flight { job, begun }, result)) = self.over.pop_front()
        {
            bytes += job.op().fragments.bytes();
            // SAFETY: the job lives, and its transfer is over.
            let outcome = unsafe { ops::end(job.op(), begun, result, &self.shared) };
            self.queue.done(1);
            job.finish(outcome);
        }
    }
}
