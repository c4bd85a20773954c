//! Blocks on their way that lie side by side in the file, in as many requests as it takes: too many
//! runs for one, short results, interruptions.

use super::port::FileOffset;
use crate::buffer::{IoFragments, Staging};
use crate::medium::complete::{Progress, Stopped};
use libc::iovec;

/// What comes after a completion.
pub(super) enum Step {
    /// There are bytes left.
    Again,
    /// All bytes were moved, with so many continuations of short results.
    Over(u64),
    Stopped(Stopped),
}

/// A ring slot for transfers, one after the other. Its lists keep their memory from one to the
/// next.
#[derive(Default)]
pub(super) struct Transfer {
    write: bool,
    /// Where the first block lies.
    place: FileOffset,
    /// Runs of memory; those before `first` are done.
    runs: Vec<iovec>,
    first: usize,
    /// Bytes that the running request was asked for.
    asked: u64,
    progress: Progress,
    continued: u64,
}

impl Transfer {
    /// Prepares to move `blocks`, one after the other in the file from `place` on. They go through
    /// `staged` if that is given, which has room for all of them, in units of `alignment`. There
    /// each block that is to be written is given to `seal` first. Runs of memory that adjoin become
    /// one where `joins` says so.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] holds for every block, and nobody else uses
    /// `staged`, until the transfer is over.
    pub(super) unsafe fn load<'a>(
        &mut self,
        blocks: impl Iterator<Item = &'a IoFragments>,
        (write, place, alignment): (bool, FileOffset, u64),
        staged: Option<Staging<'_>>,
        mut seal: impl FnMut(usize, &mut [u8]),
        joins: impl Fn(&iovec, &iovec) -> bool,
    ) {
        self.runs.clear();
        let mut bytes = 0;
        if let Some(mut staged) = staged {
            for (index, block) in blocks.enumerate() {
                let part = staged.part(bytes, block.bytes().next_multiple_of(alignment));
                bytes += part.len() as u64;
                if write {
                    // SAFETY: by the caller's contract, for a write.
                    unsafe { block.gather(part) };
                    seal(index, part);
                }
            }
            let whole = staged.part(0, bytes);
            self.runs.push(iovec { iov_base: whole.as_mut_ptr().cast(), iov_len: whole.len() });
        } else {
            for block in blocks {
                bytes += block.bytes();
                block.runs().for_each(|run| self.push(run, &joins));
            }
        }
        (self.write, self.place, self.first, self.continued) = (write, place, 0, 0);
        self.progress = Progress::new(bytes, alignment);
    }

    /// Adds a run of memory. One that goes on where the last one ended makes that longer. The
    /// kernel and the device handle each run on its own. Blocks that lie side by side on the disk
    /// often do so in memory.
    fn push(&mut self, (start, len): (*mut u8, usize), joins: &impl Fn(&iovec, &iovec) -> bool) {
        let next = iovec { iov_base: start.cast(), iov_len: len };
        match self.runs.last_mut() {
            Some(last)
                if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == start && joins(last, &next) =>
            {
                last.iov_len += len;
            }
            _ => self.runs.push(next),
        }
    }

    pub(super) fn is_write(&self) -> bool {
        self.write
    }

    /// Where the next request starts, and the memory from there on.
    pub(super) fn rest(&self) -> (FileOffset, &[iovec]) {
        let (file, offset) = self.place;
        ((file, offset + self.progress.done()), &self.runs[self.first..])
    }

    /// A request for `asked` bytes of the rest is under way.
    pub(super) fn requested(&mut self, asked: u64) {
        self.asked = asked;
    }

    /// The request is over.
    pub(super) fn completed(&mut self, result: std::io::Result<usize>) -> Step {
        let advanced = match self.progress.advance(result, self.asked) {
            Ok(advanced) => advanced,
            Err(stopped) => return Step::Stopped(stopped),
        };
        if self.progress.is_done() {
            return Step::Over(self.continued);
        }
        self.continued += u64::from((advanced as u64) < self.asked);
        self.advance(advanced);
        Step::Again
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some(run) = self.runs.get_mut(self.first) {
            if bytes < run.iov_len {
                run.iov_base = run.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                run.iov_len -= bytes;
                return;
            }
            bytes -= run.iov_len;
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnedBuffer;

    #[test]
    fn memory_that_goes_on_is_one_run_and_no_byte_is_lost() {
        const PAGE: usize = 4096;
        let mut buffer = OwnedBuffer::new(8 * PAGE);
        let start = buffer.as_mut_slice().as_mut_ptr();
        let run = |page: usize, pages: usize| (start.wrapping_add(page * PAGE), pages * PAGE);
        // Blocks of two pages; the second goes on where the first ends, the third starts elsewhere
        // and has a hole.
        let blocks = [vec![run(0, 1), run(1, 1)], vec![run(2, 2)], vec![run(6, 1), run(5, 1)]].map(|runs| {
            // SAFETY: nothing is submitted, so the memory is not touched.
            unsafe { IoFragments::from_raw(runs) }.unwrap()
        });
        let mut transfer = Transfer::default();
        // SAFETY: as above.
        unsafe { transfer.load(blocks.iter(), (false, (0, 4096), 512), None, |_, _| (), |_, _| true) };
        let (place, runs) = transfer.rest();
        let found: Vec<_> = runs.iter().map(|run| (run.iov_base.cast::<u8>(), run.iov_len)).collect();
        assert_eq!((place, found), ((0, 4096), vec![run(0, 4), run(6, 1), run(5, 1)]));
        // A short result in the middle of the joined run: the rest of it is asked for.
        transfer.requested(6 * PAGE as u64);
        assert!(matches!(transfer.completed(Ok(PAGE)), Step::Again));
        let (place, runs) = transfer.rest();
        assert_eq!(
            (place, runs[0].iov_base.cast::<u8>(), runs[0].iov_len),
            ((0, 8192), run(1, 1).0, 3 * PAGE)
        );
        transfer.requested(5 * PAGE as u64);
        assert!(matches!(transfer.completed(Ok(5 * PAGE)), Step::Over(1)));

        // Two registered buffers that adjoin, the second from the third page on.
        let alike = |run: &iovec, next: &iovec| {
            let second = |run: &iovec| run.iov_base.addr() >= start.addr() + 2 * PAGE;
            second(run) == second(next)
        };
        // SAFETY: as above.
        unsafe { transfer.load(blocks.iter(), (false, (0, 4096), 512), None, |_, _| (), alike) };
        let found: Vec<_> =
            transfer.rest().1.iter().map(|run| (run.iov_base.cast::<u8>(), run.iov_len)).collect();
        assert_eq!(found, [run(0, 2), run(2, 2), run(6, 1), run(5, 1)]);
    }
}
