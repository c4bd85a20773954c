//! Executes requests by system calls of the ring's thread, one by one. Used where the kernel
//! forbids the ring while it is in use.

use super::port::{Completed, FileOffset, Ticket};
use crate::medium::complete::IOV_MAX;
use crate::medium::move_at;
use libc::iovec;
use std::io;
use std::os::fd::RawFd;

/// Requests that are over and not reported yet.
pub(super) struct SystemCalls {
    fds: Vec<RawFd>,
    over: Vec<Completed>,
}

impl SystemCalls {
    /// For the files `fds`, which stay open as long as this lives.
    pub(super) fn new(fds: &[RawFd]) -> Self {
        Self { fds: fds.to_vec(), over: Vec::new() }
    }

    /// Does a request over some memory runs, from the first of `runs` on; says for how many bytes.
    ///
    /// # Safety
    /// The memory of `runs` is valid: to be read for a write, to be written by nobody else for a
    /// read.
    pub(super) unsafe fn perform(
        &mut self,
        ticket: Ticket,
        write: bool,
        (file, offset): FileOffset,
        runs: &[iovec],
    ) -> u64 {
        let runs = &runs[..runs.len().min(IOV_MAX)];
        // SAFETY: by the caller's contract.
        let moved = unsafe { move_at(self.fds[file], write, offset, runs.as_ptr(), runs.len()) };
        self.over.push((ticket, moved));
        runs.iter().map(|run| run.iov_len as u64).sum()
    }

    /// A request that nobody did: it is to be asked for again.
    pub(super) fn give_back(&mut self, ticket: Ticket) {
        self.over.push((ticket, Err(io::ErrorKind::Interrupted.into())));
    }

    /// Adds what is over to `into`. Whether there was any.
    pub(super) fn collect(&mut self, into: &mut Vec<Completed>) -> bool {
        let any = !self.over.is_empty();
        into.append(&mut self.over);
        any
    }
}
