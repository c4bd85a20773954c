//! One block on its way, in as many requests as it takes: too many runs for one, short results, interruptions.

use crate::buffer::Fragments;
use crate::medium::full::{Progress, Stopped};
use crate::slots::{Bounce, Moved, SlotFile};
use kvbm_plan::BlockId;
use libc::iovec;

/// What comes after a completion.
pub(super) enum Step {
    /// There are bytes left.
    Again,
    Over(Result<Moved, Stopped>),
}

/// A seat for transfers, one after the other. Its lists keep their memory from one to the next.
#[derive(Default)]
pub(super) struct Transfer {
    write: bool,
    /// Where the block lies in the file.
    offset: u64,
    /// Runs of memory; those before `first` are done.
    runs: Vec<iovec>,
    first: usize,
    /// Bytes that the running request was asked for.
    asked: u64,
    progress: Progress,
    moved: Moved,
    bounce: Bounce,
}

impl Transfer {
    /// Prepares to move `fragments` from or to `slot`.
    ///
    /// # Safety
    /// The contract of [`Fragments::from_raw`] holds until the transfer is over.
    pub(super) unsafe fn load(&mut self, file: &SlotFile, slot: BlockId, fragments: &Fragments, write: bool) {
        self.runs.clear();
        self.moved = Moved { bounced: file.needs_bounce(fragments), continued: 0 };
        if self.moved.bounced {
            let staged = self.bounce.part(file, fragments.bytes());
            if write {
                // SAFETY: by the caller's contract, for a write.
                unsafe { fragments.gather(staged) };
            }
            self.runs.push(iovec { iov_base: staged.as_mut_ptr().cast(), iov_len: staged.len() });
        } else {
            let run = |(start, len): (*mut u8, usize)| iovec { iov_base: start.cast(), iov_len: len };
            self.runs.extend(fragments.runs().map(run));
        }
        let bytes = self.runs.iter().map(|run| run.iov_len as u64).sum();
        (self.write, self.offset, self.first) = (write, file.offset(slot), 0);
        self.progress = Progress::new(bytes, file.alignment());
    }

    pub(super) fn is_write(&self) -> bool {
        self.write
    }

    /// Where the next request starts in the file, and the memory from there on.
    pub(super) fn rest(&self) -> (u64, &[iovec]) {
        (self.offset + self.progress.done(), &self.runs[self.first..])
    }

    /// A request for `asked` bytes of the rest is under way.
    pub(super) fn requested(&mut self, asked: u64) {
        self.asked = asked;
    }

    /// The request is over.
    ///
    /// # Safety
    /// As for [`Transfer::load`], with the same fragments.
    pub(super) unsafe fn completed(
        &mut self,
        result: std::io::Result<usize>,
        file: &SlotFile,
        fragments: &Fragments,
    ) -> Step {
        let advanced = match self.progress.advance(result, self.asked) {
            Ok(advanced) => advanced,
            Err(stopped) => return Step::Over(Err(stopped)),
        };
        if !self.progress.is_done() {
            self.moved.continued += u64::from((advanced as u64) < self.asked);
            self.advance(advanced);
            return Step::Again;
        }
        if self.moved.bounced && !self.write {
            let staged = self.bounce.part(file, fragments.bytes());
            // SAFETY: by the caller's contract, for a read.
            unsafe { fragments.scatter(staged) };
        }
        Step::Over(Ok(self.moved))
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
