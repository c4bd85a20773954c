//! Reads and verifies blocks in the background, to find damage before a request does.
//!
//! A scrubbing read holds no slot: a write does not wait for it. Its result counts only if the slot
//! did not change meanwhile.

use crate::medium::complete::Stopped;
use crate::ops;
use crate::shared::EngineState;
use crate::slot_file::Bounce;
use crate::slot_table::Content;
use crate::{DiskEngine, OpError, SlotCorruption};
use kvbm_plan::{BlockId, BlockIdentity};

/// Slots that are looked at for a block under one hold of the table's lock.
const LOOK: u32 = 4096;

/// A walk over the blocks of an engine in slot order, round and round.
#[derive(Debug, Default)]
pub struct Scrubber {
    next: u32,
    memory: Bounce,
}

/// What a step of a [`Scrubber`] found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Scrubbed {
    /// Operations wait or run: nothing was read, the disk is theirs.
    Busy,
    /// No slot holds a block.
    Empty,
    /// The block is what was written.
    Good {
        /// Bytes read.
        bytes: u64,
    },
    /// The slot was written, released or quarantined meanwhile: what was read means nothing.
    Changed {
        /// Bytes read.
        bytes: u64,
    },
    /// The block cannot be read as it was written. As after any other read, a damaged slot is
    /// quarantined now, and one whose write was cut short is free; after [`OpError::Io`] nothing
    /// changed.
    Bad {
        /// Where.
        slot: BlockId,
        /// What.
        identity: BlockIdentity,
        /// Bytes asked for.
        bytes: u64,
        /// [`OpError::Corrupt`], [`OpError::CutShort`] or [`OpError::Io`].
        error: OpError,
    },
}

impl DiskEngine {
    /// Reads and verifies the next block, in the calling thread, one at a time and only while no
    /// operation is queued or running. The caller decides how often. A read through the page cache
    /// ([`EngineKind::Buffered`](crate::EngineKind)) may not reach the device.
    pub fn scrub(&self, scrubber: &mut Scrubber) -> Scrubbed {
        if self.is_busy() {
            return Scrubbed::Busy;
        }
        let shared = self.shared();
        let Some((slot, generation, content)) = scrubber.next_block(shared) else { return Scrubbed::Empty };
        let read = ops::read_slot(slot, &content, shared, &mut scrubber.memory);
        let scrubbed = judge(slot, generation, &content, read, shared);
        shared.count(|stats| match scrubbed {
            Scrubbed::Good { .. } => stats.scrubbed += 1,
            Scrubbed::Bad { .. } => stats.scrub_failures += 1,
            _ => {}
        });
        scrubbed
    }
}

impl Scrubber {
    /// The next block from where the walk stands; `None` after all slots.
    fn next_block(&mut self, shared: &EngineState) -> Option<(BlockId, u64, Content)> {
        let slots = shared.config.num_slots;
        let mut looked = 0;
        while looked < slots {
            let from = if self.next < slots { self.next } else { 0 };
            let part = LOOK.min(slots - from).min(slots - looked);
            let found = shared.table.lock().next_block(from, part);
            self.next = found.map_or(from + part, |(slot, ..)| slot.0 + 1);
            if found.is_some() {
                return found;
            }
            looked += part;
        }
        None
    }
}

/// What the reading says about the slot, which is dealt with accordingly if it still holds what it
/// held before.
fn judge(
    slot: BlockId,
    generation: u64,
    content: &Content,
    read: Result<Result<(), SlotCorruption>, Stopped>,
    shared: &EngineState,
) -> Scrubbed {
    let &Content { identity, bytes, .. } = content;
    let bad = |error| Scrubbed::Bad { slot, identity, bytes, error };
    let cause = match read {
        Ok(found) => found.err(),
        Err(Stopped { done, error: None }) => {
            Some(SlotCorruption::ShortFile { missing: bytes.saturating_sub(done) })
        }
        Err(Stopped { done, error: Some(error) }) => {
            let (kind, message) = (error.kind(), shared.note_failure(slot, &error));
            return bad(OpError::Io { op: "scrub", slot, at: done, kind, message });
        }
    };
    let is_short = matches!(cause, Some(SlotCorruption::ShortFile { .. }));
    let scrubbed = shared.change(|table| {
        if table.block(slot).is_none_or(|(now, _)| now != generation) {
            return Scrubbed::Changed { bytes };
        }
        let Some(cause) = cause else {
            table.prove(slot);
            return Scrubbed::Good { bytes };
        };
        if is_short {
            table.release(slot);
        } else if table.refute(slot) {
            return bad(OpError::CutShort { slot });
        }
        bad(OpError::Corrupt { slot, identity, cause })
    });
    if is_short {
        ops::forget_what_was_cut(shared);
    }
    scrubbed
}
