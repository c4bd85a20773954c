//! The slot file: where a slot lies, and moving a block between it and memory fragments.

use crate::IoChoice;
use crate::buffer::{Fragments, OwnedBuffer};
use crate::medium::{BlockFile, full};
use kvbm_plan::BlockId;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

/// The slot file's name in its directory.
pub(crate) const SLOT_FILE: &str = "slots.kvbm";

#[derive(Debug)]
pub(crate) struct SlotFile {
    pub(crate) file: Arc<dyn BlockFile>,
    pub(crate) stride: u64,
    pub(crate) io: IoChoice,
    pub(crate) preallocated: bool,
}

/// What a transfer took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) bounced: bool,
    pub(crate) continued: u64,
}

/// An I/O thread's own buffer for memory that direct I/O cannot take; allocated at first need.
#[derive(Debug, Default)]
pub(crate) struct Bounce(Option<OwnedBuffer>);

impl Bounce {
    fn buffer(&mut self, stride: u64) -> &mut [u8] {
        self.0.get_or_insert_with(|| OwnedBuffer::new(stride as usize)).as_mut_slice()
    }
}

impl SlotFile {
    /// The one place that knows where a slot is.
    fn offset(&self, slot: BlockId) -> u64 {
        u64::from(slot.0) * self.stride
    }

    fn alignment(&self) -> u64 {
        match self.io {
            IoChoice::Direct { alignment } => alignment.into(),
            IoChoice::Buffered { .. } => 1,
        }
    }

    fn needs_bounce(&self, fragments: &Fragments) -> bool {
        !fragments.is_aligned(self.alignment() as usize)
    }

    /// Writes the fragments to the slot.
    ///
    /// # Safety
    /// The contract of [`Fragments::from_raw`] holds for a write.
    pub(crate) unsafe fn write(
        &self,
        slot: BlockId,
        fragments: &Fragments,
        bounce: &mut Bounce,
    ) -> Result<Moved, full::Stopped> {
        // SAFETY: by the caller's contract.
        let mut source = unsafe { fragments.as_source() };
        let bounced = self.needs_bounce(fragments);
        let calls = if bounced {
            let staged = bounce.buffer(self.stride);
            let mut at = 0;
            for run in &source {
                staged[at..at + run.len()].copy_from_slice(run);
                at += run.len();
            }
            let end = at.next_multiple_of(self.alignment() as usize);
            staged[at..end].fill(0);
            full::write(&*self.file, self.offset(slot), &mut [IoSlice::new(&staged[..end])], self.alignment())
        } else {
            full::write(&*self.file, self.offset(slot), &mut source, self.alignment())
        };
        let needed = if bounced { 1 } else { fragments.count().div_ceil(full::IOV_MAX) };
        Ok(Moved { bounced, continued: calls?.saturating_sub(needed as u64) })
    }

    /// Reads the slot into the fragments.
    ///
    /// # Safety
    /// The contract of [`Fragments::from_raw`] holds for a read.
    pub(crate) unsafe fn read(
        &self,
        slot: BlockId,
        fragments: &Fragments,
        bounce: &mut Bounce,
    ) -> Result<Moved, full::Stopped> {
        // SAFETY: by the caller's contract.
        let mut destination = unsafe { fragments.as_destination() };
        let bounced = self.needs_bounce(fragments);
        let calls = if bounced {
            let end = (fragments.bytes() as usize).next_multiple_of(self.alignment() as usize);
            let staged = &mut bounce.buffer(self.stride)[..end];
            let calls =
                full::read(&*self.file, self.offset(slot), &mut [IoSliceMut::new(staged)], self.alignment())?;
            let mut rest = &staged[..];
            for run in &mut destination {
                let (now, later) = rest.split_at(run.len());
                run.copy_from_slice(now);
                rest = later;
            }
            Ok(calls)
        } else {
            full::read(&*self.file, self.offset(slot), &mut destination, self.alignment())
        };
        let needed = if bounced { 1 } else { fragments.count().div_ceil(full::IOV_MAX) };
        Ok(Moved { bounced, continued: calls?.saturating_sub(needed as u64) })
    }
}
