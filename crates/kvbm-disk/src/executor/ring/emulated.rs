//! A port over a medium without descriptors: the driver's logic under every fault that the medium
//! can simulate.

use super::port::{Completed, FileOffset, Port, Ticket};
use super::wake_event::WakeEvent;
use crate::IoMemory;
use crate::medium::{BlockFile, complete::IOV_MAX};
use libc::iovec;
use std::io::{self, IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

struct Request {
    ticket: Ticket,
    write: bool,
    at: FileOffset,
    runs: Vec<iovec>,
}

/// Does requests one by one, the latest first, when asked to wait.
pub(super) struct EmulatedPort {
    files: Vec<Arc<dyn BlockFile>>,
    wake_event: WakeEvent,
    waiting: Vec<Request>,
}

// SAFETY: made before its thread starts, without a request; from then on used by that thread alone.
unsafe impl Send for EmulatedPort {}

impl EmulatedPort {
    pub(super) fn new(files: Vec<Arc<dyn BlockFile>>, wake_event: WakeEvent) -> Self {
        Self { files, wake_event, waiting: Vec::new() }
    }

    fn perform(&self, request: &Request) -> io::Result<usize> {
        let (file, offset) = request.at;
        let file = &self.files[file];
        let call = || {
            if request.write {
                let slice = |run: &iovec| {
                    // SAFETY: `Port::start` obliges its caller: readable until the completion.
                    IoSlice::new(unsafe { std::slice::from_raw_parts(run.iov_base.cast(), run.iov_len) })
                };
                let buffers: Vec<_> = request.runs.iter().map(slice).collect();
                file.write_at(offset, &buffers)
            } else {
                let slice = |run: &iovec| {
                    // SAFETY: `Port::start` obliges its caller: ours alone until the completion.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(run.iov_base.cast(), run.iov_len) };
                    IoSliceMut::new(bytes)
                };
                let mut buffers: Vec<_> = request.runs.iter().map(slice).collect();
                file.read_at(offset, &mut buffers)
            }
        };
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the medium panicked")))
    }
}

impl Port for EmulatedPort {
    unsafe fn start(&mut self, ticket: Ticket, write: bool, at: FileOffset, runs: &[iovec]) -> u64 {
        let runs = runs[..runs.len().min(IOV_MAX)].to_vec();
        let asked = runs.iter().map(|run| run.iov_len as u64).sum();
        self.waiting.push(Request { ticket, write, at, runs });
        asked
    }

    /// The slices made of the runs must not reach over two allocations, and nobody says where one
    /// ends.
    fn joins(&self, _run: &iovec, _next: &iovec) -> bool {
        false
    }

    fn submit(&mut self) {}

    fn poll(&mut self, _into: &mut Vec<Completed>) {}

    fn wait(&mut self, into: &mut Vec<Completed>) {
        match self.waiting.pop() {
            Some(request) => into.push((request.ticket, self.perform(&request))),
            None => self.wake_event.wait(None),
        }
    }

    fn register(&mut self, memory: IoMemory) -> (u64, Option<String>) {
        drop(memory);
        (0, Some("an emulated ring has no use for it".to_owned()))
    }
}
