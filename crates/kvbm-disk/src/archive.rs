//! Blocks of a directory that no engine has open. A deployment with another number of ranks reads
//! them, and `verify` checks them.

use crate::journal::{JOURNAL_FILE, ReplayError, Replayed, replay};
use crate::keyring::Keyring;
use crate::medium::{BlockFile, DirMedium, complete, open_read_only};
use crate::open::{blocks_by_age, drop_duplicates, drop_without_key, without_bytes};
use crate::record::Header;
use crate::recorded_slots::{RecordedSlots, SlotRecords};
use crate::seal::Seal;
use crate::slot_table::Content;
use crate::stripes::SLOT_FILE;
use crate::stripes::{self, Stripes};
use crate::{DiskKeys, OpenError, RecoveredSlot};
use kvbm_keys::DeploymentKey;
use kvbm_plan::{BlockId, BlockIdentity, FileAccess};
use std::io::{self, ErrorKind, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that [`Archive::verify`] reads at once.
const VERIFY_BYTES: u64 = 1 << 20;

/// The blocks of a directory, or of several that belong together. Holds their locks: no engine
/// opens them meanwhile. Changes nothing.
#[derive(Debug)]
pub struct Archive {
    pub(crate) replayed: Replayed,
    pub(crate) table: RecordedSlots,
    files: Vec<Arc<dyn BlockFile>>,
    stripes: Stripes,
    seal: Seal,
    /// Where blocks are encrypted.
    keyring: Option<Keyring>,
    /// Upper bound of a block's length, by the files' lengths.
    longest: u64,
    /// Holds the locks.
    medium: DirMedium,
}

impl Archive {
    /// Locks the directories, of which the first has the journal, and reads it. `keys`: those that
    /// the directory was written with.
    ///
    /// # Errors
    /// There is no journal, or one that this build does not read, or of another key.
    /// [`OpenError::Busy`] while an engine has the directories. [`OpenError::Io`] where `access`
    /// refuses files of another user.
    pub fn open(dirs: &[PathBuf], access: FileAccess, keys: Option<&DiskKeys>) -> Result<Self, OpenError> {
        Self::open_for(dirs, Some(access), keys)
    }

    /// Likewise; without `access`, the system's permissions alone decide who may read.
    pub(crate) fn open_for(
        dirs: &[PathBuf],
        access: Option<FileAccess>,
        keys: Option<&DiskKeys>,
    ) -> Result<Self, OpenError> {
        stripes::check(dirs)?;
        expect_journal(first(dirs), access)?;
        let medium = DirMedium::lock_to_look(dirs)?;
        let (mut replayed, mut table) = read_journal(dirs, access, keys)?;
        let keyring = open_keyring(dirs, access, keys, &replayed.header)?;
        replayed.dropped.without_key = drop_without_key(&mut table, keyring.as_ref());
        let files = dirs.iter().map(|dir| open_slots(dir, access)).collect::<Result<Vec<_>, _>>()?;
        let room = files.iter().map(|file| file.len()).sum::<io::Result<u64>>();
        let room = room.map_err(|error| failed("read", SLOT_FILE, error))?;
        let longest = room.min(replayed.header.block_bytes);
        let stripes = Stripes::new(files.len(), replayed.header.slot_stride);
        let seal = Seal::new(replayed.header.namespace, signing(keys)).encrypting(keyring.is_some());
        Ok(Self { replayed, table, files, stripes, seal, keyring, longest, medium })
    }

    /// The namespace tag of its blocks.
    pub fn namespace(&self) -> [u8; 16] {
        self.replayed.header.namespace
    }

    /// The geometry that the writer stored in the header.
    pub fn geometry(&self) -> &[u8] {
        &self.replayed.header.geometry
    }

    /// Bytes of the largest block.
    pub fn block_bytes(&self) -> u64 {
        self.longest
    }

    /// Its blocks, the oldest write first.
    pub fn blocks(&self) -> Vec<RecoveredSlot> {
        blocks_by_age(&self.table)
    }

    /// Reads the block `identity` of `slot` to the beginning of `memory`. Returns its bytes if the
    /// slot's record names this block and the checksum matches.
    ///
    /// # Errors
    /// The device failed.
    pub fn read<'a>(
        &self,
        slot: BlockId,
        identity: &BlockIdentity,
        memory: &'a mut [u8],
    ) -> io::Result<Option<&'a [u8]>> {
        match self.table.block(slot) {
            Some((_, content)) if content.identity == *identity => self.read_content(slot, content, memory),
            _ => Ok(None),
        }
    }

    fn read_content<'a>(
        &self,
        slot: BlockId,
        content: &Content,
        memory: &'a mut [u8],
    ) -> io::Result<Option<&'a [u8]>> {
        let Some(bytes) = memory.get_mut(..content.bytes as usize) else { return Ok(None) };
        let good = self.read_part(slot, 0, bytes)? && self.is_good(content, bytes);
        let bytes = &*bytes;
        Ok(good.then_some(bytes))
    }

    /// Whether bytes that were read are the block, which they are then, not encrypted.
    fn is_good(&self, content: &Content, bytes: &mut [u8]) -> bool {
        let identity = &content.identity;
        let Some(keyring) = &self.keyring else {
            return self.seal.recorded(identity, bytes) == content.recorded;
        };
        let key = keyring.key(identity.namespace, content.recorded.word);
        let named = self.seal.checksums.named(identity);
        key.is_some_and(|found| found.key.open(&named, bytes, &content.recorded.tag))
    }

    /// Whether the bytes of a block are what was written. Reads them part by part: a record may
    /// claim any length. An encrypted block is read as a whole, which is no longer than the files.
    pub(crate) fn verify(&self, slot: BlockId, content: &Content) -> io::Result<bool> {
        if self.keyring.is_some() {
            let mut memory = vec![0; content.bytes.min(self.longest) as usize];
            return Ok(self.read_content(slot, content, &mut memory)?.is_some());
        }
        let mut memory = vec![0; content.bytes.min(VERIFY_BYTES) as usize];
        let mut sums = self.seal.begin(false);
        let mut at = 0;
        while at < content.bytes {
            let part = &mut memory[..(content.bytes - at).min(VERIFY_BYTES) as usize];
            if !self.read_part(slot, at, part)? {
                return Ok(false);
            }
            sums.update(part);
            at += part.len() as u64;
        }
        Ok(self.seal.finish(&content.identity, &sums).recorded == content.recorded)
    }

    /// Reads bytes of a slot from `at` on. `false` where the file does not have them all.
    fn read_part(&self, slot: BlockId, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let (file, offset) = self.stripes.place(slot);
        is_whole(&*self.files[file], offset.saturating_add(at), bytes).map_err(|error| {
            let dirs = crate::medium::Medium::location(&self.medium);
            io::Error::new(error.kind(), format!("slot {slot} of {dirs}: {error}"))
        })
    }
}

/// The key that signs.
fn signing(keys: Option<&DiskKeys>) -> Option<&DeploymentKey> {
    keys.and_then(|keys| keys.signing.as_ref())
}

/// The data keys of a directory whose blocks are encrypted.
fn open_keyring(
    dirs: &[PathBuf],
    access: Option<FileAccess>,
    keys: Option<&DiskKeys>,
    header: &Header,
) -> Result<Option<Keyring>, OpenError> {
    if !header.encrypted {
        return Ok(None);
    }
    let Some(encryption) = keys.and_then(|keys| keys.encryption.as_ref()) else {
        let file = first(dirs).join(JOURNAL_FILE).display().to_string();
        return Err(OpenError::Encryption { file, encrypted: true });
    };
    let medium = DirMedium::follow(dirs, access.unwrap_or(FileAccess::Owner));
    let place = (&header.namespace, &header.geometry[..]);
    Keyring::follow(Arc::new(medium), encryption, place).map(Some)
}

/// The slot file of a directory that has a journal.
fn open_slots(dir: &Path, access: Option<FileAccess>) -> Result<Arc<dyn BlockFile>, OpenError> {
    let path = dir.join(SLOT_FILE);
    let doing = |error: &io::Error| match error.kind() {
        ErrorKind::NotFound => "find the blocks of this journal (restore the file, or clear the directory):",
        _ => "open",
    };
    open_read_only(&path, access).map_err(|error| failed(doing(&error), &path.display().to_string(), error))
}

/// Whether the file has all of these bytes; they are read.
fn is_whole(file: &dyn BlockFile, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
    match complete::read(file, offset, &mut [IoSliceMut::new(bytes)], 1) {
        Ok(_) => Ok(true),
        Err(complete::Stopped { error: None, .. }) => Ok(false),
        // The device cannot read these bytes: they are lost, and the others may not be.
        Err(complete::Stopped { error: Some(error), .. }) if error.raw_os_error() == Some(libc::EIO) => {
            Ok(false)
        }
        Err(complete::Stopped { error: Some(error), .. }) => Err(error),
    }
}

/// The directory with the journal.
pub(crate) fn first(dirs: &[PathBuf]) -> &Path {
    dirs.first().map_or(Path::new(""), PathBuf::as_path)
}

pub(crate) fn failed(doing: &str, file: &str, source: io::Error) -> OpenError {
    OpenError::Io { doing: format!("{doing} {file}"), source }
}

/// Refuses a directory without a journal before anything is created in it.
fn expect_journal(dir: &Path, access: Option<FileAccess>) -> Result<Arc<dyn BlockFile>, OpenError> {
    open_read_only(&dir.join(JOURNAL_FILE), access).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => OpenError::NoJournal { dir: dir.to_owned() },
        _ => failed("open", JOURNAL_FILE, error),
    })
}

/// Reads the journal. Needs no lock: an engine that writes it meanwhile only appends, or replaces
/// it by a snapshot.
pub(crate) fn read_journal(
    dirs: &[PathBuf],
    access: Option<FileAccess>,
    keys: Option<&DiskKeys>,
) -> Result<(Replayed, RecordedSlots), OpenError> {
    stripes::check(dirs)?;
    let file = expect_journal(first(dirs), access)?;
    // A header may claim more slots than there are. The slot files' lengths bound them.
    let lengths: Vec<u64> =
        dirs.iter().map(|dir| std::fs::metadata(dir.join(SLOT_FILE)).map_or(0, |file| file.len())).collect();
    let stripes = |header: &Header| Stripes::new(dirs.len(), header.slot_stride);
    let accept = |header: &Header| {
        let slots = stripes(header).end(&lengths).min(header.num_slots.into());
        Ok::<_, ReplayError>(RecordedSlots::new(slots as u32))
    };
    // The namespace has no part in sums of journals.
    let seal = Seal::new([0; 16], signing(keys));
    let (mut replayed, mut table) = replay(&*file, &seal, accept).map_err(|error| match error {
        ReplayError::Format(source) => {
            OpenError::Format { file: first(dirs).join(JOURNAL_FILE).display().to_string(), source }
        }
        ReplayError::Io(error) => failed("read", JOURNAL_FILE, error),
    })?;
    let lost = without_bytes(&table, stripes(&replayed.header), &lengths);
    for &slot in &lost {
        table.release(slot);
    }
    let dropped = &mut replayed.dropped;
    dropped.without_bytes = std::mem::take(&mut dropped.beyond_capacity) + lost.len() as u64;
    dropped.duplicates = drop_duplicates(&mut table);
    Ok((replayed, table))
}
