//! Blocks whose sync failed are written again.
//!
//! After a failed `fdatasync` the kernel marks the pages clean, whether they reached the device or
//! not. Another sync therefore proves nothing. The kernel can still read the pages that it has not
//! dropped. So the block is read, compared with its checksum, written once more and synced with the
//! next commit. A block that reads back changed is given up: its slot is free, a miss.

use crate::medium::complete::{self, contained};
use crate::ops;
use crate::shared::{EngineState, GivenUp};
use crate::slot_file::Bounce;
use crate::slot_table::Content;
use kvbm_plan::BlockId;
use std::io::{self, ErrorKind, IoSlice};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes between two commits: so much is written in vain, and waits in memory of the system, where
/// syncs go on failing.
const STEP_BYTES: u64 = 64 << 20;

/// Rewrites some of the blocks whose sync failed. Returns how many it handled.
pub(crate) fn rewrite_some(shared: &EngineState, memory: &mut Bounce) -> u64 {
    let most = (STEP_BYTES / shared.slots.stride).max(1);
    let mut dealt = 0;
    while dealt < most {
        let next = shared.table.lock().begin_renewal();
        let Some((slot, generation, content)) = next else { break };
        let written = contained(|| rewrite(slot, &content, shared, memory));
        if let Err(error) = &written {
            shared.note_failure(slot, error);
        }
        let there = shared.table.lock().end_renewal(slot, generation, written.is_ok());
        shared.count(|stats| {
            stats.renewed += u64::from(there && written.is_ok());
            stats.given_up += u64::from(there && written.is_err());
        });
        if let (true, Err(_), Some(GivenUp(notify))) = (there, &written, shared.given_up.get())
            && catch_unwind(AssertUnwindSafe(|| notify(slot, content.identity))).is_err()
        {
            shared.count(|stats| stats.callback_panics += 1);
        }
        dealt += 1;
        if written.is_err() {
            // A failing device may take long for each block: commits of other blocks must not wait
            // for all of them.
            break;
        }
    }
    dealt
}

fn rewrite(slot: BlockId, content: &Content, shared: &EngineState, memory: &mut Bounce) -> io::Result<()> {
    let stopped =
        |stopped: complete::Stopped| stopped.error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into());
    if ops::read_slot(slot, content, shared, memory).map_err(stopped)?.is_err() {
        return Err(io::Error::other("what was written before a sync that failed was not read back"));
    }
    let bytes = &mut memory.part(&shared.slots, content.bytes)[..content.bytes as usize];
    ops::seal_again(content, shared, bytes).map_err(io::Error::other)?;
    let ((file, offset), alignment) = (shared.slots.file_of(slot), shared.slots.alignment());
    let staged = memory.part(&shared.slots, content.bytes);
    complete::write(file, offset, &mut [IoSlice::new(staged)], alignment).map(drop).map_err(stopped)
}
