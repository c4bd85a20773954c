//! One operation on one slot, from the table to the medium and back: [`begin`], the transfer,
//! [`over`], [`end`].

use crate::batch::{Op, OpKind, Source};
use crate::keyring::NumberedKey;
use crate::medium::complete::{self, Stopped};
use crate::open::without_bytes;
use crate::seal::{Recorded, Summed};
use crate::shared::EngineState;
use crate::slot_file::{Bounce, Moved};
use crate::slot_table::{Content, ReadPermit};
use crate::stripes::JOURNAL_MEMBER;
use crate::{OpDone, OpError, OpOutcome, SlotCorruption};
use kvbm_keys::DataKey;
use kvbm_plan::BlockId;
use std::io::{ErrorKind, IoSliceMut};
use std::sync::Arc;

/// An operation that has its slot: the transfer may begin. With the key of a block that is
/// encrypted.
#[derive(Clone, Debug)]
pub(crate) enum Begun {
    /// With what the slot holds, and whether the bytes have passed [`Begun::open`].
    Read { permit: ReadPermit, key: Option<NumberedKey>, opened: bool },
    /// With the sums of the bytes.
    Write { sums: Summed, key: Option<NumberedKey> },
}

impl Begun {
    /// Encrypts a block on its way to the disk, where blocks are encrypted. `staged` begins with
    /// its bytes.
    pub(crate) fn seal(&mut self, op: &Op, staged: &mut [u8], shared: &EngineState) {
        if let Self::Write { sums, key: Some(NumberedKey { number, key }) } = self {
            let named = shared.seal.checksums.named(&op.identity);
            let tag = key.seal(&named, &mut staged[..op.fragments.bytes() as usize]);
            sums.recorded = Recorded::sealed(*number, tag);
        }
    }

    /// Decrypts a block that came from the disk, where blocks are encrypted. Whether it may go on.
    pub(crate) fn open(&mut self, op: &Op, staged: &mut [u8], shared: &EngineState) -> bool {
        let Self::Read { permit, key: Some(NumberedKey { key, .. }), opened } = self else { return true };
        let named = shared.seal.checksums.named(&op.identity);
        *opened = key.open(&named, &mut staged[..op.fragments.bytes() as usize], &permit.recorded.tag);
        *opened
    }
}

/// An operation whose transfer is over, and what is known of its bytes.
#[derive(Debug)]
pub(crate) enum Over {
    /// With what the slot holds, and the sums that the bytes have: none where they do not decrypt.
    Read { permit: ReadPermit, found: Result<(Moved, Option<Summed>), Stopped> },
    /// With the sums of the bytes.
    Write { sums: Summed, result: Result<Moved, Stopped> },
}

/// Takes the slot for `op`. What was begun is ended by [`end`] or [`abandon`].
///
/// # Safety
/// The contract of [`IoFragments::from_raw`] holds for the operation's fragments.
pub(crate) unsafe fn begin(op: &Op, shared: &EngineState) -> Result<Begun, OpError> {
    let (slot, bytes, max) = (op.slot, op.fragments.bytes(), shared.config.block_bytes);
    if !(1..=max).contains(&bytes) {
        return Err(OpError::Length { slot, bytes, max });
    }
    let sums = match op.kind {
        OpKind::Read => return begin_read(op, shared),
        OpKind::Write(Source::Trust(checksum)) if !shared.seal.reads_sources() => {
            Summed { checksum, recorded: Recorded::sum(checksum) }
        }
        OpKind::Write(source) => {
            // SAFETY: by the caller's contract.
            let found = unsafe { sums_of(op, shared) };
            // What is signed or encrypted is read anyway, and must not be so if it is damaged.
            if let Source::Compare(expected) | Source::Trust(expected) = source
                && expected != found.checksum
            {
                return Err(OpError::Source { slot, expected, found: found.checksum });
            }
            found
        }
    };
    let key = match &shared.keyring {
        Some(keyring) => Some(keyring.for_new(op.identity.namespace, !shared.follows).map_err(|error| {
            // Who follows was not failed by its device.
            let message = if shared.follows {
                error.to_string()
            } else {
                shared.note_failure_of(JOURNAL_MEMBER, &error)
            };
            OpError::NoKey { slot, message }
        })?),
        None => None,
    };
    shared.change(|table| table.begin_write(slot))?;
    Ok(Begun::Write { sums, key })
}

fn begin_read(op: &Op, shared: &EngineState) -> Result<Begun, OpError> {
    let (slot, identity) = (op.slot, op.identity);
    let permit = shared.table.lock().begin_read(slot, identity, op.fragments.bytes())?;
    let Some(keyring) = &shared.keyring else { return Ok(Begun::Read { permit, key: None, opened: true }) };
    if let Some(key) = keyring.key(identity.namespace, permit.recorded.word) {
        return Ok(Begun::Read { permit, key: Some(key), opened: false });
    }
    // Its key was destroyed while it was being written.
    shared.change(|table| {
        table.end_read(slot);
        table.release_taken(slot, permit);
    });
    Err(OpError::Missing { slot })
}

/// Looks at what a transfer brought: sums what was read.
///
/// # Safety
/// As for [`begin`]; the transfer is over.
pub(crate) unsafe fn over(
    op: &Op,
    begun: &Begun,
    result: Result<Moved, Stopped>,
    shared: &EngineState,
) -> Over {
    match *begun {
        Begun::Read { permit, key: None, .. } => {
            // SAFETY: by the caller's contract; the read is over and the memory still ours.
            let sum = |moved| (moved, Some(unsafe { sums_of(op, shared) }));
            Over::Read { permit, found: result.map(sum) }
        }
        Begun::Read { permit, key: Some(_), opened } => {
            let sum = |moved| {
                // SAFETY: as above.
                let checksum = opened.then(|| unsafe { sums_of(op, shared) }.checksum);
                let recorded = permit.recorded;
                (moved, checksum.map(|checksum| Summed { checksum, recorded }))
            };
            Over::Read { permit, found: result.map(sum) }
        }
        Begun::Write { sums, .. } => Over::Write { sums, result },
    }
}

/// Gives the slot back, and says what came of the operation.
pub(crate) fn end(op: &Op, over: Over, shared: &EngineState) -> OpOutcome {
    match over {
        Over::Read { permit, found } => end_read(op, permit, found, shared),
        Over::Write { sums, result } => end_write(op, sums, result, shared),
    }
}

/// Gives the slot back after a write that another engine does: no bytes were moved here.
pub(crate) fn note(op: &Op, sums: Summed, shared: &EngineState) -> OpOutcome {
    let (slot, identity, bytes) = (op.slot, op.identity, op.fragments.bytes());
    let written = Content { identity, recorded: sums.recorded, bytes };
    let kept = shared.change(|table| table.end_write(slot, Some(written)));
    kept.map(|()| OpDone { checksum: sums.checksum, bytes: 0 })
}

/// Gives the slot back after a transfer that unwound.
pub(crate) fn abandon(op: &Op, shared: &EngineState) {
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
    found: Result<(Moved, Option<Summed>), Stopped>,
    shared: &EngineState,
) -> OpOutcome {
    let (slot, identity, bytes) = (op.slot, op.identity, op.fragments.bytes());
    let verdict = match found {
        Ok((moved, found)) => {
            count_moved(shared, moved);
            let expected = permit.recorded;
            match found {
                Some(found) if found.recorded == expected => Ok(OpDone { checksum: found.checksum, bytes }),
                Some(found) => {
                    Err(SlotCorruption::Checksum { expected: expected.word, found: found.recorded.word })
                }
                None => Err(SlotCorruption::Tag { key: expected.word }),
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

/// A read met the end of a slot file. Blocks whose bytes no slot file has are forgotten, and their
/// slots are free, as they would be after the next opening. The next write behind the end brings
/// the length back; what was lost would look damaged then, and its slots be out of use.
pub(crate) fn forget_what_was_cut(shared: &EngineState) {
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

fn end_write(op: &Op, sums: Summed, result: Result<Moved, Stopped>, shared: &EngineState) -> OpOutcome {
    let (slot, identity, bytes) = (op.slot, op.identity, op.fragments.bytes());
    let written = result.is_ok().then_some(Content { identity, recorded: sums.recorded, bytes });
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
unsafe fn sums_of(op: &Op, shared: &EngineState) -> Summed {
    let mut sums = shared.seal.begin(true);
    // SAFETY: by the caller's contract.
    for run in unsafe { op.fragments.pieces() } {
        sums.update(run);
    }
    shared.seal.finish(&op.identity, &sums)
}

fn io_error(op: &Op, at: u64, error: &std::io::Error, shared: &EngineState) -> OpError {
    let message = shared.note_failure(op.slot, error);
    OpError::Io { op: name(op.kind), slot: op.slot, at, kind: error.kind(), message }
}

fn count_moved(shared: &EngineState, moved: Moved) {
    if moved.bounced || moved.continued > 0 {
        shared.count(|stats| {
            stats.bounced += u64::from(moved.bounced);
            stats.continued += moved.continued;
        });
    }
}

/// Counts an outcome, once per operation.
pub(crate) fn count(shared: &EngineState, kind: OpKind, outcome: &OpOutcome) {
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
            SlotCorruption::Checksum { .. } | SlotCorruption::Tag { .. } => stats.corrupt_checksum += 1,
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

/// Reads a slot: whether it holds the block, whose bytes are in `memory` then, not encrypted.
pub(crate) fn read_slot(
    slot: BlockId,
    content: &Content,
    shared: &EngineState,
    memory: &mut Bounce,
) -> Result<Result<(), SlotCorruption>, Stopped> {
    let staged = memory.part(&shared.slots, content.bytes);
    let ((file, offset), alignment) = (shared.slots.file_of(slot), shared.slots.alignment());
    complete::read(file, offset, &mut [IoSliceMut::new(staged)], alignment)?;
    let (expected, bytes) = (content.recorded, &mut staged[..content.bytes as usize]);
    if shared.keyring.is_some() {
        let named = shared.seal.checksums.named(&content.identity);
        let opens = key_of(content, shared).is_some_and(|key| key.open(&named, bytes, &expected.tag));
        return Ok(if opens { Ok(()) } else { Err(SlotCorruption::Tag { key: expected.word }) });
    }
    let found = shared.seal.recorded(&content.identity, bytes);
    let corruption = SlotCorruption::Checksum { expected: expected.word, found: found.word };
    Ok(if found == expected { Ok(()) } else { Err(corruption) })
}

/// Makes of a block that was read what lies in the slot.
pub(crate) fn seal_again(
    content: &Content,
    shared: &EngineState,
    bytes: &mut [u8],
) -> Result<(), SlotCorruption> {
    if shared.keyring.is_none() {
        return Ok(());
    }
    let named = shared.seal.checksums.named(&content.identity);
    let tag = key_of(content, shared).map(|key| key.seal(&named, bytes));
    let is_same = tag == Some(content.recorded.tag);
    if is_same { Ok(()) } else { Err(SlotCorruption::Tag { key: content.recorded.word }) }
}

fn key_of(content: &Content, shared: &EngineState) -> Option<Arc<DataKey>> {
    let keyring = shared.keyring.as_ref()?;
    Some(keyring.key(content.identity.namespace, content.recorded.word)?.key)
}
