//! One operation on one slot, from the table to the medium and back: [`begin`], the transfer,
//! [`over`], [`end`].

use crate::batch::{Op, OpKind, Source};
use crate::medium::complete::{self, Stopped};
use crate::open::without_bytes;
use crate::seal::Summed;
use crate::shared::Shared;
use crate::slot_file::{Bounce, Moved};
use crate::slot_table::{Content, ReadPermit};
use crate::{OpDone, OpError, OpOutcome, SlotCorruption};
use kvbm_plan::BlockId;
use std::io::{ErrorKind, IoSliceMut};

/// An operation that has its slot: the transfer may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// With what the slot holds.
    Read { permit: ReadPermit },
    /// With the sums of the bytes.
    Write { sums: Summed },
}

/// An operation whose transfer is over, and what is known of its bytes.
#[derive(Debug)]
pub(crate) enum Over {
    /// With what the slot holds, and the sums that the bytes have.
    Read { permit: ReadPermit, found: Result<(Moved, Summed), Stopped> },
    /// With the sums of the bytes.
    Write { sums: Summed, result: Result<Moved, Stopped> },
}

/// Takes the slot for `op`. What was begun is ended by [`end`] or [`abandon`].
///
/// # Safety
/// The contract of [`IoFragments::from_raw`] holds for the operation's fragments.
pub(crate) unsafe fn begin(op: &Op, shared: &Shared) -> Result<Begun, OpError> {
    let (slot, bytes, max) = (op.slot, op.fragments.bytes(), shared.config.block_bytes);
    if !(1..=max).contains(&bytes) {
        return Err(OpError::Length { slot, bytes, max });
    }
    let sums = match op.kind {
        OpKind::Read => {
            let permit = shared.table.lock().begin_read(slot, op.identity, bytes)?;
            return Ok(Begun::Read { permit });
        }
        OpKind::Write(Source::Trust(checksum)) if shared.seal.key_id().is_none() => {
            Summed { checksum, recorded: checksum }
        }
        OpKind::Write(source) => {
            // SAFETY: by the caller's contract.
            let found = unsafe { sums_of(op, shared) };
            // What is signed is read anyway, and must not be signed if it is damaged.
            if let Source::Compare(expected) | Source::Trust(expected) = source
                && expected != found.checksum
            {
                return Err(OpError::Source { slot, expected, found: found.checksum });
            }
            found
        }
    };
    shared.change(|table| table.begin_write(slot))?;
    Ok(Begun::Write { sums })
}

/// Looks at what a transfer brought: sums what was read.
///
/// # Safety
/// As for [`begin`]; the transfer is over.
pub(crate) unsafe fn over(op: &Op, begun: Begun, result: Result<Moved, Stopped>, shared: &Shared) -> Over {
    match begun {
        Begun::Read { permit } => {
            // SAFETY: by the caller's contract; the read is over and the memory still ours.
            let sum = |moved| (moved, unsafe { sums_of(op, shared) });
            Over::Read { permit, found: result.map(sum) }
        }
        Begun::Write { sums } => Over::Write { sums, result },
    }
}

/// Gives the slot back, and says what came of the operation.
pub(crate) fn end(op: &Op, over: Over, shared: &Shared) -> OpOutcome {
    match over {
        Over::Read { permit, found } => end_read(op, permit, found, shared),
        Over::Write { sums, result } => end_write(op, sums, result, shared),
    }
}

/// Gives the slot back after a transfer that unwound.
pub(crate) fn abandon(op: &Op, shared: &Shared) {
    match op.kind {
        OpKind::Read => shared.table.lock().end_read(op.slot),
        OpKind::Write(_) => drop(shared.change(|table| table.end_write(op.slot, None))),
    }
}

pub(crate) const fn name(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Read => "read",
        OpKind::Write(_) => "write",
    }
}

fn end_read(
    op: &Op,
    permit: ReadPermit,
    found: Result<(Moved, Summed), Stopped>,
    shared: &Shared,
) -> OpOutcome {
    let (slot, identity, bytes) = (op.slot, op.identity, op.fragments.bytes());
    let verdict = match found {
        Ok((moved, found)) => {
            count_moved(shared, moved);
            let expected = permit.checksum;
            if found.recorded == expected {
                Ok(OpDone { checksum: found.checksum, bytes })
            } else {
                Err(SlotCorruption::Checksum { expected, found: found.recorded })
            }
        }
        Err(Stopped { done, error: None }) => {
            Err(SlotCorruption::ShortFile { missing: bytes.saturating_sub(done) })
        }
        Err(Stopped { done, error: Some(error) }) => {
            shared.table.lock().end_read(slot);
            return Err(io_error(op, done, &error, shared));
        }
    };
    if let Err(SlotCorruption::ShortFile { .. }) = verdict {
        forget_what_was_cut(shared);
    }
    let cut_short = shared.change(|table| {
        table.end_read(slot);
        match verdict {
            Ok(_) => table.prove(slot),
            Err(SlotCorruption::ShortFile { .. }) => table.release_taken(slot, permit),
            Err(_) => return table.refute_taken(slot, permit),
        }
        false
    });
    match verdict {
        Err(_) if cut_short => Err(OpError::CutShort { slot }),
        verdict => verdict.map_err(|cause| OpError::Corrupt { slot, identity, cause }),
    }
}

/// A read met the end of a slot file: blocks whose bytes no slot file has are forgotten, and their
/// slots are free, as they would be after the next opening. The next write behind the end brings
/// the length back; what was lost would look damaged then, and its slots be out of use.
pub(crate) fn forget_what_was_cut(shared: &Shared) {
    let newest = shared.table.lock().newest();
    let lengths = shared.slots.lengths();
    let lost = shared.change(|table| {
        let mut lost = without_bytes(table, shared.slots.stripes, &lengths);
        // What was written since may lie in files that have grown since.
        lost.retain(|&slot| table.block(slot).is_some_and(|(generation, _)| generation <= newest));
        for &slot in &lost {
            table.release(slot);
        }
        lost.len()
    });
    if lost > 0 {
        let directory = shared.medium.location();
        tracing::warn!(
            directory,
            lost,
            "a slot file was cut while it was in use: the blocks behind its end are lost"
        );
    }
}

fn end_write(op: &Op, sums: Summed, result: Result<Moved, Stopped>, shared: &Shared) -> OpOutcome {
    let (slot, identity, bytes) = (op.slot, op.identity, op.fragments.bytes());
    let written = result.is_ok().then_some(Content { identity, checksum: sums.recorded, bytes });
    let kept = shared.change(|table| table.end_write(slot, written));
    match result {
        Ok(moved) => count_moved(shared, moved),
        Err(Stopped { done, error }) => {
            return Err(io_error(op, done, &error.unwrap_or_else(|| ErrorKind::WriteZero.into()), shared));
        }
    }
    kept.map(|()| OpDone { checksum: sums.checksum, bytes })
}

/// Safety: the contract of [`IoFragments::from_raw`] holds; nobody writes the memory meanwhile.
unsafe fn sums_of(op: &Op, shared: &Shared) -> Summed {
    let mut sums = shared.seal.begin(true);
    // SAFETY: by the caller's contract.
    for run in unsafe { op.fragments.pieces() } {
        sums.update(run);
    }
    shared.seal.finish(&op.identity, &sums)
}

fn io_error(op: &Op, at: u64, error: &std::io::Error, shared: &Shared) -> OpError {
    let message = shared.note_failure(op.slot, error);
    OpError::Io { op: name(op.kind), slot: op.slot, at, kind: error.kind(), message }
}

fn count_moved(shared: &Shared, moved: Moved) {
    if moved.bounced || moved.continued > 0 {
        shared.count(|stats| {
            stats.bounced += u64::from(moved.bounced);
            stats.continued += moved.continued;
        });
    }
}

/// Counts an outcome, once per operation.
pub(crate) fn count(shared: &Shared, kind: OpKind, outcome: &OpOutcome) {
    shared.count(|stats| match outcome {
        Ok(done) if kind == OpKind::Read => {
            stats.reads += 1;
            stats.read_bytes += done.bytes;
        }
        Ok(done) => {
            stats.writes += 1;
            stats.written_bytes += done.bytes;
        }
        Err(OpError::Corrupt { cause, .. }) => match cause {
            SlotCorruption::Checksum { .. } => stats.corrupt_checksum += 1,
            SlotCorruption::WrongIdentity { .. } => stats.corrupt_identity += 1,
            SlotCorruption::WrongLength { .. } => stats.corrupt_length += 1,
            SlotCorruption::ShortFile { .. } => stats.corrupt_short_file += 1,
        },
        Err(OpError::Source { .. }) => stats.corrupt_source += 1,
        Err(OpError::Missing { .. }) => stats.missing += 1,
        Err(OpError::CutShort { .. }) => stats.cut_short += 1,
        Err(OpError::Io { .. }) => stats.io_errors += 1,
        Err(_) => stats.refused += 1,
    });
}

/// The checksum of what lies in the slot, and its bytes in `memory`.
pub(crate) fn read_slot(
    slot: BlockId,
    content: &Content,
    shared: &Shared,
    memory: &mut Bounce,
) -> Result<u64, Stopped> {
    let staged = memory.part(&shared.slots, content.bytes);
    let ((file, offset), alignment) = (shared.slots.file_of(slot), shared.slots.alignment());
    complete::read(file, offset, &mut [IoSliceMut::new(staged)], alignment)?;
    Ok(shared.seal.recorded(&content.identity, &staged[..content.bytes as usize]))
}
