//! The slot files: where a slot lies, and moving a block between it and memory fragments.

use crate::buffer::{IoFragments, OwnedBuffer};
use crate::medium::{BlockFile, complete};
use crate::stripes::Stripes;
use crate::{EngineChoice, EngineKind};
use kvbm_plan::BlockId;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct SlotFile {
    /// One in each directory.
    pub(crate) files: Vec<Arc<dyn BlockFile>>,
    pub(crate) stripes: Stripes,
    pub(crate) stride: u64,
    /// The alignment that direct I/O needs, or why there is none.
    pub(crate) direct: Result<u32, String>,
    pub(crate) preallocated: bool,
    /// As configured.
    pub(crate) straight_bytes: u64,
    /// The files have other bytes than memory: every block passes through a buffer.
    pub(crate) encrypted: bool,
}

/// What a transfer took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) bounced: bool,
    pub(crate) continued: u64,
}

/// A buffer for memory that direct I/O cannot take; allocated at first need.
#[derive(Debug, Default)]
pub(crate) struct Bounce(Option<OwnedBuffer>);

impl Bounce {
    /// The part of the buffer that a block of `bytes` bytes takes on its way, whole alignment
    /// units.
    pub(crate) fn part(&mut self, file: &SlotFile, bytes: u64) -> &mut [u8] {
        let whole = self.0.get_or_insert_with(|| OwnedBuffer::new(file.stride as usize)).as_mut_slice();
        &mut whole[..(bytes as usize).next_multiple_of(file.alignment() as usize)]
    }
}

impl SlotFile {
    /// The one place that knows where a slot is.
    pub(crate) fn place(&self, slot: BlockId) -> (usize, u64) {
        self.stripes.place(slot)
    }

    /// The file that a slot lies in, and the offset.
    pub(crate) fn file_of(&self, slot: BlockId) -> (&dyn BlockFile, u64) {
        let (file, offset) = self.place(slot);
        (&*self.files[file], offset)
    }

    /// How long the files are. One that does not say counts as whole.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.files.iter().map(|file| file.len().unwrap_or(u64::MAX)).collect()
    }

    /// What offsets, lengths and addresses must be multiples of.
    pub(crate) fn alignment(&self) -> u64 {
        self.direct.as_ref().map_or(1, |alignment| u64::from(*alignment))
    }

    /// The engine for this file where there is no ring.
    pub(crate) fn choice(&self) -> EngineChoice {
        let (kind, reason) = match &self.direct {
            Ok(_) => (EngineKind::Threads, "configured".to_owned()),
            Err(reason) => (EngineKind::Buffered, reason.clone()),
        };
        EngineChoice {
            kind,
            reason,
            alignment: self.alignment() as u32,
            registered_bytes: 0,
            unregistered: None,
            bounce_bytes: 0,
        }
    }

    /// Whether the fragments cannot be given to the device as they are, or are so short that it
    /// would take them piece by piece. Such a block goes through a buffer: a copy more.
    pub(crate) fn needs_bounce(&self, fragments: &IoFragments) -> bool {
        let short = || {
            fragments.count() > 1
                && fragments.bytes() < self.straight_bytes.saturating_mul(fragments.count() as u64)
        };
        self.encrypted || !fragments.is_aligned(self.alignment() as usize) || self.direct.is_ok() && short()
    }

    /// Whether a block in `slot` and then one in `next` are one piece of the file, if the first
    /// fills its slot.
    pub(crate) fn adjoin(&self, slot: BlockId, next: BlockId) -> bool {
        let ((file, offset), next) = (self.place(slot), self.place(next));
        (file, offset + self.stride) == next
    }

    /// Writes the fragments to the slot. What passes through the buffer is given to `seal` first.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] holds for a write.
    pub(crate) unsafe fn write(
        &self,
        slot: BlockId,
        fragments: &IoFragments,
        bounce: &mut Bounce,
        seal: impl FnOnce(&mut [u8]),
    ) -> Result<Moved, complete::Stopped> {
        let bounced = self.needs_bounce(fragments);
        let (file, offset) = self.file_of(slot);
        let calls = if bounced {
            let staged = bounce.part(self, fragments.bytes());
            // SAFETY: by the caller's contract.
            unsafe { fragments.gather(staged) };
            seal(staged);
            complete::write(file, offset, &mut [IoSlice::new(staged)], self.alignment())
        } else {
            // SAFETY: by the caller's contract.
            let mut source = unsafe { fragments.as_source() };
            complete::write(file, offset, &mut source, self.alignment())
        };
        Ok(Moved::after(calls?, bounced, fragments))
    }

    /// Reads the slot into the fragments. What passes through the buffer is given to `open` first,
    /// and goes on only if that returns `true`.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] holds for a read.
    pub(crate) unsafe fn read(
        &self,
        slot: BlockId,
        fragments: &IoFragments,
        bounce: &mut Bounce,
        open: impl FnOnce(&mut [u8]) -> bool,
    ) -> Result<Moved, complete::Stopped> {
        let bounced = self.needs_bounce(fragments);
        let (file, offset) = self.file_of(slot);
        let calls = if bounced {
            let staged = bounce.part(self, fragments.bytes());
            let mut target = [IoSliceMut::new(staged)];
            let calls = complete::read(file, offset, &mut target, self.alignment())?;
            if open(staged) {
                // SAFETY: by the caller's contract.
                unsafe { fragments.scatter(staged) };
            }
            Ok(calls)
        } else {
            // SAFETY: by the caller's contract.
            let mut destination = unsafe { fragments.as_destination() };
            complete::read(file, offset, &mut destination, self.alignment())
        };
        Ok(Moved::after(calls?, bounced, fragments))
    }
}

impl Moved {
    /// After so many calls of preadv or pwritev.
    fn after(calls: u64, bounced: bool, fragments: &IoFragments) -> Self {
        let needed = if bounced { 1 } else { fragments.count().div_ceil(complete::IOV_MAX) };
        Self { bounced, continued: calls.saturating_sub(needed as u64) }
    }
}
