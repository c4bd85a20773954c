//! io_uring, with the slot files registered and memory registered as far as the kernel takes it.

use super::port::{Completed, FileOffset, Port, Ticket};
use super::system_calls::SystemCalls;
use super::wake_event::WakeEvent;
use crate::medium::complete::IOV_MAX;
use crate::{IoMemory, OwnedBuffer};
use io_uring::squeue::Entry;
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, Probe, opcode};
use libc::iovec;
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// The most memory that the kernel takes as one buffer, in bytes.
const MAX_BUFFER: usize = 1 << 30;
/// Buffers of one ring: 4 TiB of memory.
const MAX_BUFFERS: u32 = 4096;
/// Bytes of one request: what the kernel moves at most in one, rounded down to a power of two.
const MAX_REQUEST: usize = 1 << 30;
/// Marks the completion that says that the wake event rang.
const BELL: u64 = u64::MAX;
/// Between two attempts when the kernel is short of memory.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Memory that the kernel knows under a number.
struct Buffer {
    start: usize,
    end: usize,
    index: u16,
}

/// A ring of the kernel. Belongs to the thread that made it.
pub(super) struct KernelPort {
    ring: IoUring,
    wake_event: WakeEvent,
    /// The ring waits for the wake event.
    armed: bool,
    /// Requests that the kernel has, the wake event among them.
    under_way: usize,
    /// What was put into the submission queue last, as many as it has room for: those at its end
    /// the kernel may not have taken.
    pushed: VecDeque<u64>,
    /// Does what the kernel refuses to do.
    calls: SystemCalls,
    /// Whether it does. From then on the submission queue is never shown to the kernel again.
    refused: bool,
    /// The reason, until it is reported.
    batch_ends: Option<String>,
    /// Sorted by address.
    buffers: Vec<Buffer>,
    /// Whether runs of a registered buffer can be named in one request (Linux 6.15).
    vectored_buffers: bool,
    /// Registered memory stays where it is while the kernel knows it.
    owners: Vec<Arc<dyn Any + Send + Sync>>,
    /// Why the table of buffers could not be made.
    no_buffers: Option<String>,
}

impl KernelPort {
    /// A ring for `depth` requests on the files `fds`, which stay open while the ring lives.
    pub(super) fn new(fds: &[RawFd], depth: usize, wake_event: WakeEvent) -> io::Result<Self> {
        let entries = (depth as u32 + 1).next_power_of_two();
        // Not `defer_taskrun`: then nothing would end without a call that enters the ring, and that
        // may be forbidden one day.
        let mut ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(entries)
            // Linux before 6.0 does not know all of these.
            .or_else(|_| IoUring::new(entries))
            .map_err(|error| explained("io_uring_setup", &error))?;
        try_out(&mut ring)?;
        ring.submitter().register_files(fds).map_err(|error| explained("register the files", &error))?;
        let mut known = Probe::new();
        let vectored_buffers = ring.submitter().register_probe(&mut known).is_ok()
            && known.is_supported(opcode::ReadvFixed::CODE)
            && known.is_supported(opcode::WritevFixed::CODE);
        let sparse = ring.submitter().register_buffers_sparse(MAX_BUFFERS);
        let no_buffers = sparse.err().map(|error| explained("register buffers", &error).to_string());
        Ok(Self {
            ring,
            wake_event,
            armed: false,
            under_way: 0,
            pushed: VecDeque::with_capacity(entries as usize),
            calls: SystemCalls::new(fds),
            refused: false,
            batch_ends: None,
            buffers: Vec::new(),
            vectored_buffers,
            owners: Vec::new(),
            no_buffers,
        })
    }

    /// Reads a page of a file through the ring: a kernel that sets rings up and then refuses
    /// requests is found out here.
    pub(super) fn probe(&mut self, file: usize) -> io::Result<()> {
        let mut page = OwnedBuffer::new(4096);
        let memory = page.as_mut_slice();
        let run = iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
        // SAFETY: the page lives until this function returns, which is after the completion.
        unsafe { self.start(0, false, (file, 0), &[run]) };
        let mut completed = Vec::new();
        while completed.is_empty() {
            self.wait(&mut completed);
        }
        match completed.pop() {
            Some((_, Err(error))) => Err(explained("read through the ring", &error)),
            _ => Ok(()),
        }
    }

    /// The registered buffer that holds all of `run`.
    fn buffer_of(&self, run: &iovec) -> Option<u16> {
        let start = run.iov_base.addr();
        let after = self.buffers.partition_point(|buffer| buffer.start <= start);
        let buffer = self.buffers.get(after.checked_sub(1)?)?;
        (start + run.iov_len <= buffer.end).then_some(buffer.index)
    }

    /// How many of `runs` one request takes, of how many bytes, and the registered buffer that they
    /// all lie in.
    ///
    /// Runs of several buffers, such as a region per layer, go in one request without any. To lock
    /// their pages costs less than a request for each buffer, one after the other.
    fn portion(&self, runs: &[iovec]) -> (usize, usize, Option<u16>) {
        let Some((first, others)) = runs.split_first() else { return (0, 0, None) };
        let mut bytes = first.iov_len.min(MAX_REQUEST);
        let mut count = 1;
        for run in others.iter().take(IOV_MAX - 1) {
            if bytes + run.iov_len > MAX_REQUEST {
                break;
            }
            bytes += run.iov_len;
            count += 1;
        }
        let alike = |buffer: &u16| {
            count == 1
                || self.vectored_buffers
                    && others[..count - 1].iter().all(|run| self.buffer_of(run) == Some(*buffer))
        };
        (count, bytes, self.buffer_of(first).filter(alike))
    }

    /// Puts an entry into the submission queue, which has room for `depth` requests and the
    /// wake event. Whether it is there: the kernel may refuse for good.
    ///
    /// # Safety
    /// What the entry names stays valid until its completion.
    unsafe fn push(&mut self, entry: &Entry) -> bool {
        // SAFETY: by the caller's contract.
        while !self.refused && unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0);
        }
        if self.refused {
            return false;
        }
        if self.pushed.len() == self.pushed.capacity() {
            self.pushed.pop_front();
        }
        self.pushed.push_back(entry.get_user_data());
        self.under_way += 1;
        true
    }

    /// Tells the kernel of new entries and waits for `want` completions. When it cannot take them
    /// now it will later.
    fn enter(&mut self, want: usize) {
        match self.ring.submit_and_wait(want) {
            Err(error) if is_final(&error) => self.refuse(&error),
            Err(error) if error.kind() != io::ErrorKind::Interrupted => std::thread::sleep(RETRY_PAUSE),
            _ => {}
        }
    }

    /// The kernel forbids what it allowed: what it has not taken is given back, and done by calls.
    /// What it has taken it does, and reports it in the memory that it shares with the ring,
    /// whether that may be entered or not.
    fn refuse(&mut self, error: &io::Error) {
        self.refused = true;
        let left = self.ring.submission().len();
        for data in self.pushed.drain(..).rev().take(left) {
            self.under_way -= 1;
            if data == BELL {
                self.armed = false;
            } else {
                self.calls.give_back(data as Ticket);
            }
        }
        let why = explained("io_uring_enter", error);
        self.batch_ends = Some(format!(
            "{why}, in mid-life; one thread does one request at a time until the directory is opened again"
        ));
    }

    fn collect(&mut self, into: &mut Vec<Completed>) {
        for completion in self.ring.completion() {
            self.under_way -= 1;
            if completion.user_data() == BELL {
                self.armed = false;
                self.wake_event.reset();
                continue;
            }
            let result = completion.result();
            let moved = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            into.push((completion.user_data() as Ticket, moved));
        }
    }

    fn arm(&mut self) {
        if !self.armed {
            let poll = opcode::PollAdd::new(Fd(self.wake_event.fd()), libc::POLLIN as u32).build();
            // SAFETY: the entry names no memory, and the wake event's descriptor lives as long as
            // this port.
            self.armed = unsafe { self.push(&poll.user_data(BELL)) };
        }
    }

    /// As [`Port::wait`], where the kernel refuses: without entering the ring.
    fn wait_outside(&mut self, into: &mut Vec<Completed>) {
        if !self.calls.collect(into) {
            self.wake_event.wait(Some(self.ring.as_raw_fd()));
            self.collect(into);
        }
    }

    fn register_part(&mut self, start: *mut u8, len: usize) -> io::Result<()> {
        let index = self.buffers.len() as u32;
        if index >= MAX_BUFFERS {
            return Err(io::Error::other(format!("a ring registers {MAX_BUFFERS} buffers at most")));
        }
        let part = [iovec { iov_base: start.cast(), iov_len: len }];
        // SAFETY: the memory is allocated, and `register` keeps its owner as long as the ring.
        unsafe { self.ring.submitter().register_buffers_update(index, &part, None) }?;
        let start = start.addr();
        let at = self.buffers.partition_point(|buffer| buffer.start < start);
        self.buffers.insert(at, Buffer { start, end: start + len, index: index as u16 });
        Ok(())
    }
}

impl Port for KernelPort {
    unsafe fn start(&mut self, ticket: Ticket, write: bool, place: FileOffset, runs: &[iovec]) -> u64 {
        if self.refused {
            // SAFETY: by the caller's contract.
            return unsafe { self.calls.perform(ticket, write, place, runs) };
        }
        let (file, offset) = (Fixed(place.0 as u32), place.1);
        let (count, bytes, buffer) = self.portion(runs);
        let (list, len) = (runs.as_ptr(), count as u32);
        let entry = match (write, buffer, runs) {
            (false, None, [run, ..]) if count == 1 => {
                opcode::Read::new(file, run.iov_base.cast(), bytes as u32).offset(offset).build()
            }
            (true, None, [run, ..]) if count == 1 => {
                opcode::Write::new(file, run.iov_base.cast(), bytes as u32).offset(offset).build()
            }
            (false, Some(buffer), [run, ..]) if count == 1 => {
                opcode::ReadFixed::new(file, run.iov_base.cast(), bytes as u32, buffer).offset(offset).build()
            }
            (true, Some(buffer), [run, ..]) if count == 1 => {
                opcode::WriteFixed::new(file, run.iov_base.cast(), bytes as u32, buffer)
                    .offset(offset)
                    .build()
            }
            (false, None, _) => opcode::Readv::new(file, list, len).offset(offset).build(),
            (true, None, _) => opcode::Writev::new(file, list, len).offset(offset).build(),
            (false, Some(buffer), _) => {
                opcode::ReadvFixed::new(file, list, len, buffer).offset(offset).build()
            }
            (true, Some(buffer), _) => {
                opcode::WritevFixed::new(file, list, len, buffer).offset(offset).build()
            }
        };
        // SAFETY: by the caller's contract.
        if !unsafe { self.push(&entry.user_data(ticket.into())) } {
            self.calls.give_back(ticket);
        }
        bytes as u64
    }

    /// The kernel knows addresses, not allocations; but a run in two registered buffers would be in
    /// none.
    fn joins(&self, run: &iovec, next: &iovec) -> bool {
        self.buffer_of(run) == self.buffer_of(next)
    }

    fn submit(&mut self) {
        if !self.refused {
            self.enter(0);
        }
    }

    fn poll(&mut self, into: &mut Vec<Completed>) {
        // Completions may wait for a call that lets the kernel deliver them.
        let pending = {
            let submission = self.ring.submission();
            !submission.is_empty() || submission.taskrun()
        };
        if pending && !self.refused {
            self.enter(0);
        }
        self.collect(into);
        self.calls.collect(into);
    }

    fn wait(&mut self, into: &mut Vec<Completed>) {
        if self.refused {
            return self.wait_outside(into);
        }
        self.arm();
        self.enter(1);
        self.collect(into);
        self.calls.collect(into);
    }

    fn register(&mut self, memory: IoMemory) -> (u64, Option<String>) {
        if let Some(reason) = &self.no_buffers {
            return (0, Some(reason.clone()));
        }
        let (start, len) = memory.range();
        self.owners.push(memory.into_owner());
        let mut done = 0;
        while done < len {
            let part = (len - done).min(MAX_BUFFER);
            if let Err(error) = self.register_part(start.wrapping_add(done), part) {
                return (done as u64, Some(explained("register memory", &error).to_string()));
            }
            done += part;
        }
        (done as u64, None)
    }

    fn changed_way(&mut self) -> Option<String> {
        self.batch_ends.take()
    }
}

impl Drop for KernelPort {
    fn drop(&mut self) {
        // The kernel may still write into memory that the ring slots own. Only the wake event,
        // which names none, may be left.
        let mut over = Vec::new();
        while self.under_way > usize::from(self.armed) {
            if self.refused {
                self.wait_outside(&mut over);
            } else {
                self.enter(1);
                self.collect(&mut over);
            }
        }
    }
}

/// Does a request that names no memory: where a sandbox lets rings be made and not be used, no
/// other would ever end.
fn try_out(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the entry names nothing.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
    while let Err(error) = ring.submit_and_wait(1) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(explained("io_uring_enter", &error));
        }
    }
    ring.completion().for_each(drop);
    Ok(())
}

/// Whether there is no use in trying again.
fn is_final(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS))
}

/// What a refusal of the kernel means.
fn explained(doing: &str, error: &io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOSYS) => "; the kernel has no io_uring",
        Some(libc::EPERM | libc::EACCES) => {
            "; forbidden by seccomp or by the sysctl kernel.io_uring_disabled"
        }
        Some(libc::ENOMEM) => "; raise the memlock limit (ulimit -l)",
        _ => "",
    };
    io::Error::new(error.kind(), format!("{doing}: {error}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    const PAGE: usize = 4096;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no io_uring")]
    fn runs_of_several_buffers_go_in_one_request() {
        let file = tempfile::tempfile().unwrap();
        // No ring here: nothing to test.
        let Ok(mut port) = KernelPort::new(&[file.as_raw_fd()], 4, WakeEvent::new().unwrap()) else { return };
        let layers = [(); 2].map(|()| Arc::new(OwnedBuffer::new(4 * PAGE)));
        let mut known = true;
        for layer in &layers {
            let start = NonNull::from(layer.as_slice()).cast();
            // SAFETY: the memory stays allocated as long as its owner.
            let memory = unsafe { IoMemory::new(start, 4 * PAGE, Arc::clone(layer) as _) };
            known &= port.register(memory).1.is_none();
        }
        let run = |layer: usize, page: usize| iovec {
            iov_base: layers[layer].as_slice()[page * PAGE..].as_ptr().cast_mut().cast(),
            iov_len: PAGE,
        };
        assert_eq!(port.portion(&[run(0, 0), run(0, 2), run(1, 0), run(1, 2)]), (4, 4 * PAGE, None));
        let of_one = (known && port.vectored_buffers).then_some(1);
        assert_eq!(port.portion(&[run(1, 0), run(1, 2)]), (2, 2 * PAGE, of_one));
        assert_eq!(port.portion(&[run(0, 1)]), (1, PAGE, known.then_some(0)));
        assert!(port.joins(&run(0, 0), &run(0, 1)));
        assert_eq!(port.joins(&run(0, 3), &run(1, 0)), !known, "such a run would be in neither buffer");
    }
}
