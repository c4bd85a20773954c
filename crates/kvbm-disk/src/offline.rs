//! Looking at a directory that no engine has open: what it holds, whether it is whole, and making it whole again.

use crate::checksum::BlockChecksum;
use crate::journal::{Header, JOURNAL_FILE, ReplayError, Replayed, replay};
use crate::medium::{BlockFile, DirMedium, full, open_read_only};
use crate::slots::SLOT_FILE;
use crate::table::Table;
use crate::{DiskConfig, DiskEngine, Dropped, EngineMode, OpenError};
use kvbm_plan::{BlockId, BlockIdentity};
use std::collections::HashSet;
use std::io::{self, ErrorKind, IoSliceMut};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a repair may take to write down what it found.
const COMMIT_DEADLINE: Duration = Duration::from_secs(60);

/// What a directory holds, as its journal says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Namespace tag.
    pub namespace: [u8; 16],
    /// What lies in a slot.
    pub geometry: Vec<u8>,
    /// Slots.
    pub num_slots: u32,
    /// Bytes of the largest block.
    pub block_bytes: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Blocks that an opening would bring back.
    pub blocks: u64,
    /// Blocks among them whose parent is not there: a leader does not serve them.
    pub orphans: u64,
    /// Slots that are never used again.
    pub quarantined_slots: u64,
    /// Records of the journal, dead ones included.
    pub journal_records: u64,
    /// What an opening would leave out.
    pub dropped: Dropped,
    /// The engine was shut down in order.
    pub clean: bool,
    /// Who has the directory open, if somebody has.
    pub owner: Option<String>,
}

/// What reading every block of a directory found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// What the journal says.
    pub inspection: Inspection,
    /// Blocks whose bytes are what was written.
    pub verified: u64,
    /// Slots whose bytes are not. After a shutdown that was none in order, slots that were being overwritten then are among them.
    pub damaged: Vec<BlockId>,
}

/// Reads the journal. Changes nothing, and may be called while an engine has the directory.
///
/// # Errors
/// The directory has no journal, or one that this build does not read.
pub fn inspect(dir: &Path) -> Result<Inspection, OpenError> {
    let (replayed, table) = read(dir)?;
    Ok(summarize(dir, &replayed, &table))
}

/// Reads every block and compares its checksum; `progress` gets the blocks done and their number. Changes nothing.
///
/// # Errors
/// As [`inspect`]; [`OpenError::Busy`] while an engine has the directory; a device that fails to read.
pub fn verify(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Verification, OpenError> {
    expect_journal(dir)?;
    let _lock = DirMedium::lock(dir)?;
    verify_locked(dir, progress)
}

/// Like [`verify`]; then takes what is damaged out of use, and what has no parent off the books.
///
/// # Errors
/// As [`verify`]; a journal that cannot be written.
pub fn repair(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Verification, OpenError> {
    let found = verify(dir, progress)?;
    let Inspection { namespace, geometry, num_slots, block_bytes, .. } = &found.inspection;
    let mut config = DiskConfig::new(dir, *num_slots, *block_bytes, *namespace);
    config.geometry.clone_from(geometry);
    config.engine = EngineMode::Buffered;
    let (engine, recovered) = DiskEngine::open(config)?;
    let held: Vec<_> = recovered.blocks.iter().map(|block| (block.slot, block.identity)).collect();
    let lost: HashSet<BlockId> = found.damaged.iter().copied().collect();
    for &slot in &found.damaged {
        if found.inspection.clean { engine.quarantine(slot) } else { engine.release(&[slot]) }
    }
    let kept = held.into_iter().filter(|(slot, _)| !lost.contains(slot)).collect();
    engine.release(&orphans(kept));
    let failed =
        |error: crate::FlushError| failed("write", JOURNAL_FILE, io::Error::other(error.to_string()));
    engine.flush(COMMIT_DEADLINE).map_err(failed)?;
    engine.shutdown(COMMIT_DEADLINE);
    Ok(found)
}

fn verify_locked(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Verification, OpenError> {
    let (replayed, table) = read(dir)?;
    let mut inspection = summarize(dir, &replayed, &table);
    inspection.owner = None;
    let file = open_read_only(&dir.join(SLOT_FILE)).map_err(|error| failed("open", SLOT_FILE, error))?;
    let sums = BlockChecksum::new(replayed.header.namespace);
    // No block is longer than the file, whatever the header says.
    let longest =
        file.len().map_err(|error| failed("read", SLOT_FILE, error))?.min(replayed.header.block_bytes);
    let mut bytes = vec![0; longest as usize];
    let (mut verified, mut damaged) = (0, Vec::new());
    for (slot, _, content) in table.blocks() {
        let part = bytes.get_mut(..content.bytes as usize).unwrap_or_default();
        let offset = u64::from(slot.0) * replayed.header.slot_stride;
        if part.len() as u64 == content.bytes
            && is_whole(&*file, offset, part).map_err(|error| failed("read", SLOT_FILE, error))?
            && sums.of(&content.identity, [&*part]) == content.checksum
        {
            verified += 1;
        } else {
            damaged.push(slot);
        }
        progress(verified + damaged.len() as u64, inspection.blocks);
    }
    Ok(Verification { inspection, verified, damaged })
}

/// Whether the file has all of these bytes; they are read.
fn is_whole(file: &dyn BlockFile, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
    match full::read(file, offset, &mut [IoSliceMut::new(bytes)], 1) {
        Ok(_) => Ok(true),
        Err(full::Stopped { error: None, .. }) => Ok(false),
        // The device cannot read these bytes: they are lost, and the others may not be.
        Err(full::Stopped { error: Some(error), .. }) if error.raw_os_error() == Some(libc::EIO) => Ok(false),
        Err(full::Stopped { error: Some(error), .. }) => Err(error),
    }
}

fn failed(doing: &str, file: &str, source: io::Error) -> OpenError {
    OpenError::Io { doing: format!("{doing} {file}"), source }
}

/// Refuses a directory without a journal before anything is created in it.
fn expect_journal(dir: &Path) -> Result<Arc<dyn BlockFile>, OpenError> {
    open_read_only(&dir.join(JOURNAL_FILE)).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => OpenError::NoJournal { dir: dir.to_owned() },
        _ => failed("open", JOURNAL_FILE, error),
    })
}

fn read(dir: &Path) -> Result<(Replayed, Table), OpenError> {
    let file = expect_journal(dir)?;
    // A header may lie about its slots: no more of them are believed than the slot file has room for.
    let room = std::fs::metadata(dir.join(SLOT_FILE)).map_or(0, |file| file.len());
    let accept = |header: &Header| {
        let slots = room.checked_div(header.slot_stride).unwrap_or(0).min(header.num_slots.into());
        Ok::<_, ReplayError>(Table::new(slots as u32))
    };
    let (replayed, mut table) = replay(&*file, accept).map_err(|error| match error {
        ReplayError::Format(source) => {
            OpenError::Format { file: dir.join(JOURNAL_FILE).display().to_string(), source }
        }
        ReplayError::Io(error) => failed("read", JOURNAL_FILE, error),
    })?;
    crate::open::drop_duplicates(&mut table);
    Ok((replayed, table))
}

fn summarize(dir: &Path, replayed: &Replayed, table: &Table) -> Inspection {
    let (blocks, _, quarantined_slots) = table.counts();
    let Header { namespace, geometry, num_slots, block_bytes, slot_stride, .. } = replayed.header.clone();
    let held = table.blocks().map(|(slot, _, content)| (slot, content.identity)).collect();
    Inspection {
        namespace,
        geometry,
        num_slots,
        block_bytes,
        slot_stride,
        blocks,
        orphans: orphans(held).len() as u64,
        quarantined_slots,
        journal_records: replayed.records,
        dropped: replayed.dropped,
        clean: replayed.clean,
        owner: DirMedium::owner(dir),
    }
}

/// Slots whose block, or an ancestor of it, has no parent among these.
fn orphans(mut held: Vec<(BlockId, BlockIdentity)>) -> Vec<BlockId> {
    held.sort_unstable_by_key(|(_, identity)| identity.position);
    let key = |identity: &BlockIdentity, hash| (identity.namespace, identity.group, hash);
    let mut rooted = HashSet::with_capacity(held.len());
    let mut orphans = Vec::new();
    for (slot, identity) in &held {
        if identity.parent.is_none_or(|parent| rooted.contains(&key(identity, parent))) {
            rooted.insert(key(identity, identity.hash));
        } else {
            orphans.push(*slot);
        }
    }
    orphans
}
