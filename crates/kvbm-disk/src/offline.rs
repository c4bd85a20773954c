//! Inspects, verifies and repairs directories that no engine has open.

use crate::archive::{Archive, failed, first, read_journal};
use crate::journal::{JOURNAL_FILE, Replayed};
use crate::keyring::{self, KEY_FILE, Keyring};
use crate::medium::{DirMedium, open_read_only};
use crate::record::Header;
use crate::recorded_slots::{RecordedSlots, SlotRecords};
use crate::stripes::SLOT_FILE;
use crate::{DataKeyInfo, DiskConfig, DiskEngine, DiskKeys, Dropped, EngineMode, OpenError};
use kvbm_keys::KeyId;
use kvbm_plan::{BlockId, BlockIdentity, FileAccess, NamespaceId};
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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
    /// The process that has the directory open.
    pub owner: Option<String>,
    /// Where blocks are encrypted: what the key file says.
    pub encryption: Option<KeyFileInfo>,
}

/// What a key file says, for which no key is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyFileInfo {
    /// The operator's key that wraps its data keys; none where the file is not there.
    pub operator: Option<KeyId>,
    /// Data keys, with receipts of those that were destroyed.
    pub keys: Vec<DataKeyInfo>,
    /// Entries that cannot be read.
    pub damaged: u64,
}

/// What reading every block of a directory found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// What the journal says.
    pub inspection: Inspection,
    /// Blocks whose bytes are what was written.
    pub verified: u64,
    /// Slots whose bytes are not. After a shutdown that was none in order, slots that were being
    /// overwritten then are among them.
    pub damaged: Vec<BlockId>,
}

/// What a repair found, and what it did about it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RepairReport {
    /// What was found before.
    pub found: Verification,
    /// Damaged slots that are never used again.
    pub quarantined: u64,
    /// Blocks whose slots are free now: those without their parents, and those that were being
    /// overwritten when the last life ended without a shutdown.
    pub freed: u64,
}

/// Reads the journal of a directory, the first where slots are spread over several: all of them are
/// named, in their order. `keys`: those that it was written with; what encrypts is not needed.
/// Changes nothing, and may be called while an engine has the directory.
///
/// # Errors
/// The directory has no journal, or one that this build does not read, or of another key.
pub fn inspect(dirs: &[PathBuf], keys: Option<&DiskKeys>) -> Result<Inspection, OpenError> {
    let (replayed, table) = read_journal(dirs, None, keys)?;
    summarize(dirs, &replayed, &table)
}

/// Reads every block and compares its checksum; `progress` gets the blocks done and their number.
/// Changes nothing.
///
/// # Errors
/// As [`inspect`]; [`OpenError::Busy`] while an engine has the directory; a device that fails to
/// read.
pub fn verify(
    dirs: &[PathBuf],
    keys: Option<&DiskKeys>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Verification, OpenError> {
    let archive = Archive::open_for(dirs, None, keys)?;
    let mut inspection = summarize(dirs, &archive.replayed, &archive.table)?;
    // The owner is this call.
    inspection.owner = None;
    let (mut verified, mut damaged) = (0, Vec::new());
    for (slot, _, content) in archive.table.blocks() {
        let is_good = archive.verify(slot, content).map_err(|error| failed("read", SLOT_FILE, error))?;
        if is_good {
            verified += 1;
        } else {
            damaged.push(slot);
        }
        progress(verified + damaged.len() as u64, inspection.blocks);
    }
    Ok(Verification { inspection, verified, damaged })
}

/// Like [`verify`]. Then quarantines damaged slots, or frees them after an unclean end, and
/// releases blocks without a parent.
///
/// # Errors
/// As [`verify`]; a journal that cannot be written.
pub fn repair(
    dirs: &[PathBuf],
    keys: Option<&DiskKeys>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<RepairReport, OpenError> {
    let found = verify(dirs, keys, progress)?;
    let Inspection { namespace, geometry, num_slots, block_bytes, .. } = &found.inspection;
    let mut config = DiskConfig::new(first(dirs), *num_slots, *block_bytes, *namespace);
    config.more_dirs = dirs.iter().skip(1).cloned().collect();
    config.geometry.clone_from(geometry);
    let keys = keys.cloned().unwrap_or_default();
    config.key = keys.signing;
    // A journal says whether its blocks are encrypted.
    config.encryption = keys.encryption.filter(|_| found.inspection.encryption.is_some());
    config.engine = EngineMode::Buffered;
    // A repair keeps the configured access.
    config.access = access_of(first(dirs))?;
    let (engine, recovered) = DiskEngine::open(config)?;
    let held: Vec<_> = recovered.blocks.iter().map(|block| (block.slot, block.identity)).collect();
    let lost: HashSet<BlockId> = found.damaged.iter().copied().collect();
    if found.inspection.clean {
        engine.quarantine(&found.damaged);
    } else {
        engine.release(&found.damaged);
    }
    let kept = held.into_iter().filter(|(slot, _)| !lost.contains(slot)).collect();
    let orphans = orphans(geometry, kept);
    engine.release(&orphans);
    let failed =
        |error: crate::FlushError| failed("write", JOURNAL_FILE, io::Error::other(error.to_string()));
    engine.flush(COMMIT_DEADLINE).map_err(failed)?;
    engine.shutdown(COMMIT_DEADLINE);
    let (damaged, orphans) = (found.damaged.len() as u64, orphans.len() as u64);
    let (quarantined, freed) =
        if found.inspection.clean { (damaged, orphans) } else { (0, damaged + orphans) };
    Ok(RepairReport { found, quarantined, freed })
}

/// The access that the journal's mode stands for.
fn access_of(dir: &Path) -> Result<FileAccess, OpenError> {
    let found =
        std::fs::metadata(dir.join(JOURNAL_FILE)).map_err(|error| failed("look at", JOURNAL_FILE, error))?;
    Ok(FileAccess::of_file_mode(found.mode()))
}

/// What the key file of directories says; `None` where blocks are not encrypted.
fn key_file(dirs: &[PathBuf], header: &Header) -> Result<Option<KeyFileInfo>, OpenError> {
    if !header.encrypted {
        return Ok(None);
    }
    let path = first(dirs).join(KEY_FILE);
    let file = match open_read_only(&path, None) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(KeyFileInfo::default())),
        Err(error) => return Err(failed("open", &path.display().to_string(), error)),
    };
    let read = keyring::read_file(&*file).map_err(|error| failed("read", KEY_FILE, error))?;
    let file = read.map_err(|source| OpenError::Keys { file: path.display().to_string(), source })?;
    let keys: Vec<DataKeyInfo> = file.known().map(|(_, entry)| entry.info.clone()).collect();
    let damaged = (file.entries.len() - keys.len()) as u64;
    Ok(Some(KeyFileInfo { operator: Some(file.operator), keys, damaged }))
}

/// New blocks of a directory get new data keys: those of one namespace, or all. Blocks that are
/// there stay readable until they are evicted. Returns how many keys are old from now on. A
/// previous operator's key is replaced as an opening does it.
///
/// # Errors
/// As [`verify`], and [`OpenError::Encryption`] where blocks are not encrypted.
pub fn rotate(dirs: &[PathBuf], keys: &DiskKeys, namespace: Option<NamespaceId>) -> Result<u64, OpenError> {
    let (replayed, table) = read_journal(dirs, None, Some(keys))?;
    let Some(encryption) = keys.encryption.as_ref().filter(|_| replayed.header.encrypted) else {
        let file = first(dirs).join(JOURNAL_FILE).display().to_string();
        return Err(OpenError::Encryption { file, encrypted: replayed.header.encrypted });
    };
    let medium = DirMedium::lock_all(dirs, access_of(first(dirs))?)?;
    let newest = table.blocks().map(|(_, _, content)| content.recorded.word).max().unwrap_or(0);
    let place = (&replayed.header.namespace, &replayed.header.geometry[..]);
    let newest = u32::try_from(newest).unwrap_or(u32::MAX);
    let keyring = Keyring::open(Arc::new(medium), encryption, place, newest)?;
    keyring.retire(namespace).map_err(|error| failed("write", KEY_FILE, error))
}

fn summarize(dirs: &[PathBuf], replayed: &Replayed, table: &RecordedSlots) -> Result<Inspection, OpenError> {
    let encryption = key_file(dirs, &replayed.header)?;
    let Header { namespace, geometry, num_slots, block_bytes, slot_stride, .. } = replayed.header.clone();
    let held: Vec<_> = table.blocks().map(|(slot, _, content)| (slot, content.identity)).collect();
    Ok(Inspection {
        namespace,
        num_slots,
        block_bytes,
        slot_stride,
        blocks: held.len() as u64,
        orphans: orphans(&geometry, held).len() as u64,
        geometry,
        quarantined_slots: table.quarantined().count() as u64,
        journal_records: replayed.records,
        dropped: replayed.dropped,
        clean: replayed.clean,
        owner: dirs.iter().find_map(|dir| DirMedium::owner(dir)),
        encryption,
    })
}

/// Says in a geometry that blocks are of several cache groups.
const SEVERAL_GROUPS: &[u8] = b"; order=groups;";

/// Slots whose block, or an ancestor of it, has no parent among these. None among blocks of several
/// cache groups: those of a sliding window, and states, need no parents.
fn orphans(geometry: &[u8], mut held: Vec<(BlockId, BlockIdentity)>) -> Vec<BlockId> {
    if geometry.windows(SEVERAL_GROUPS.len()).any(|part| part == SEVERAL_GROUPS) {
        return Vec::new();
    }
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
