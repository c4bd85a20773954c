//! A thread of a pool whose bytes a [`SlotIoLane`] moves.

use crate::buffer::{Arena, IoFragments};
use crate::medium::BlockFile;
use crate::medium::complete::{Progress, Stopped};
use crate::shared::EngineState;
use crate::slot_file::{Moved, SlotFile};
use crate::{SlotIo, SlotIoLane, SlotIoRequest};
use kvbm_plan::BlockId;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Bytes that are read of each slot file before it is used. Each has at least one slot.
const PROBE_BYTES: usize = 4096;

/// The lane of a thread, and the buffer of one block for what cannot be given to it as it is.
pub(super) struct Lane {
    io: Box<dyn SlotIoLane>,
    /// Made and registered when the first block needs it.
    buffer: Option<Arena>,
}

impl Lane {
    /// Opens a lane on the slot files and reads a page of each.
    pub(super) fn open(slot_io: &dyn SlotIo, shared: &EngineState) -> io::Result<Self> {
        let files =
            shared.slots.files.iter().map(|file| duplicate(&**file)).collect::<io::Result<Vec<_>>>()?;
        let mut lane = Self { io: slot_io.open_lane(files)?, buffer: None };
        let mut page = Arena::new(1, PROBE_BYTES as u64, PROBE_BYTES as u64);
        lane.io.register(page.io_memory())?;
        let memory = page.part(0).part(0, PROBE_BYTES as u64).as_mut_ptr();
        (0..shared.slots.files.len()).try_for_each(|file| lane.probe(file, memory))?;
        Ok(lane)
    }

    /// Reads the first page of a file into `memory`, which nobody else has and has room for it.
    fn probe(&mut self, file: usize, memory: *mut u8) -> io::Result<()> {
        let request = SlotIoRequest { write: false, file, offset: 0, runs: &[(memory, PROBE_BYTES)] };
        // SAFETY: the memory lives through the call, and nobody else has it.
        match unsafe { self.io.transfer(&request) } {
            Ok(moved) if moved == PROBE_BYTES as u64 => Ok(()),
            Ok(moved) => Err(io::Error::other(format!("a probe read {moved} of {PROBE_BYTES} bytes"))),
            Err(error) => Err(io::Error::new(error.kind(), format!("a probe failed: {error}"))),
        }
    }

    /// Writes the fragments to the slot. What passes through the buffer is given to `seal` first.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] holds for a write.
    pub(super) unsafe fn write(
        &mut self,
        slots: &SlotFile,
        slot: BlockId,
        fragments: &IoFragments,
        seal: impl FnOnce(&mut [u8]),
    ) -> Result<Moved, Stopped> {
        if !self.needs_buffer(slots, fragments) {
            // SAFETY: by the caller's contract.
            return unsafe { self.transfer(slots, slot, true, fragments.runs().collect(), false) };
        }
        let staged = self.buffer(slots).map(|buffer| {
            let mut part = buffer.part(0);
            let staged = part.part(0, whole(slots, fragments));
            // SAFETY: by the caller's contract.
            unsafe { fragments.gather(staged) };
            seal(staged);
            (staged.as_mut_ptr(), staged.len())
        });
        // SAFETY: the buffer is this lane's, and only this call uses it.
        unsafe { self.transfer(slots, slot, true, vec![staged.map_err(not_started)?], true) }
    }

    /// Reads the slot into the fragments. What passes through the buffer is given to `open` first,
    /// and goes on only if that returns `true`.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] holds for a read.
    pub(super) unsafe fn read(
        &mut self,
        slots: &SlotFile,
        slot: BlockId,
        fragments: &IoFragments,
        open: impl FnOnce(&mut [u8]) -> bool,
    ) -> Result<Moved, Stopped> {
        if !self.needs_buffer(slots, fragments) {
            // SAFETY: by the caller's contract.
            return unsafe { self.transfer(slots, slot, false, fragments.runs().collect(), false) };
        }
        let len = whole(slots, fragments);
        let memory = self.buffer(slots).map(|buffer| buffer.part(0).part(0, len).as_mut_ptr());
        let runs = vec![(memory.map_err(not_started)?, len as usize)];
        // SAFETY: the buffer is this lane's, and only this call uses it.
        let moved = unsafe { self.transfer(slots, slot, false, runs, true) }?;
        let mut part = self.buffer(slots).map_err(not_started)?.part(0);
        let staged = part.part(0, len);
        if open(staged) {
            // SAFETY: by the caller's contract.
            unsafe { fragments.scatter(staged) };
        }
        Ok(moved)
    }

    /// Whether the fragments cannot be given to the lane as they are.
    fn needs_buffer(&mut self, slots: &SlotFile, fragments: &IoFragments) -> bool {
        slots.needs_bounce(fragments) || !fragments.runs().all(|(start, len)| self.io.knows(start, len))
    }

    /// The buffer of one block.
    fn buffer(&mut self, slots: &SlotFile) -> io::Result<&mut Arena> {
        if self.buffer.is_none() {
            let made = Arena::new(1, slots.stride, slots.stride);
            self.io.register(made.io_memory())?;
            self.buffer = Some(made);
        }
        self.buffer.as_mut().ok_or_else(|| io::Error::other("the lane has no buffer"))
    }

    /// Moves the runs, with as many requests as it takes.
    ///
    /// # Safety
    /// As [`SlotIoLane::transfer`].
    unsafe fn transfer(
        &mut self,
        slots: &SlotFile,
        slot: BlockId,
        write: bool,
        mut runs: Vec<(*mut u8, usize)>,
        bounced: bool,
    ) -> Result<Moved, Stopped> {
        let (file, offset) = slots.place(slot);
        let mut left: u64 = runs.iter().map(|(_, len)| *len as u64).sum();
        let mut progress = Progress::new(left, slots.alignment());
        let (mut first, mut requests) = (0, 0_u64);
        while !progress.is_done() {
            let at = offset + progress.done();
            let request = SlotIoRequest { write, file, offset: at, runs: &runs[first..] };
            // SAFETY: by the caller's contract.
            let result = unsafe { self.io.transfer(&request) };
            let moved = progress.advance(result.map(|moved| moved as usize), left)?;
            left -= moved as u64;
            first += skip(&mut runs[first..], moved);
            requests += 1;
        }
        Ok(Moved { bounced, continued: requests.saturating_sub(1) })
    }
}

/// Takes `bytes` off the front of the runs; returns how many of them are done.
fn skip(runs: &mut [(*mut u8, usize)], mut bytes: usize) -> usize {
    for (done, (start, len)) in runs.iter_mut().enumerate() {
        if bytes < *len {
            *start = start.wrapping_add(bytes);
            *len -= bytes;
            return done;
        }
        bytes -= *len;
    }
    runs.len()
}

/// Bytes that a block takes in the buffer: whole alignment units.
fn whole(slots: &SlotFile, fragments: &IoFragments) -> u64 {
    fragments.bytes().next_multiple_of(slots.alignment())
}

fn not_started(error: io::Error) -> Stopped {
    Stopped { done: 0, error: Some(error) }
}

/// Another descriptor of a slot file.
fn duplicate(file: &dyn BlockFile) -> io::Result<OwnedFd> {
    let fd = file.raw_fd().ok_or_else(|| io::Error::other("the medium has no file descriptor"))?;
    // SAFETY: the file is open while it is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_move_goes_on_where_it_ended() {
        let start = std::ptr::without_provenance_mut::<u8>(4096);
        let mut runs = [(start, 10), (start, 20), (start, 30)];
        assert_eq!(skip(&mut runs, 10), 1);
        assert_eq!(skip(&mut runs[1..], 5), 0);
        assert_eq!(runs[1], (start.wrapping_add(5), 15));
        assert_eq!(skip(&mut runs[1..], 45), 2);
    }
}
