//! Opening a directory: judge first, change after.

use crate::error::hex;
use crate::journal::{JOURNAL_FILE, JOURNAL_TEMP_FILE, Journal, ReplayError, replay, write_again};
use crate::keyring::{KEY_FILE, Keyring};
use crate::medium::{BlockFile, Medium, OpenFile, complete};
use crate::record::{HEADER_BYTES, Header, record_bytes};
use crate::recorded_slots::SlotRecords;
use crate::seal::Seal;
use crate::slot_file::SlotFile;
use crate::slot_table::{Content, SlotTable};
use crate::stripes::{self, Stripes};
use crate::{
    DiskConfig, Dropped, EngineKind, EngineMode, FormatError, OpenError, OwnedBuffer, Recovered,
    RecoveredSlot,
};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, SequenceHash};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;

const PROBE_FILE: &str = "probe.tmp";

/// What the engine starts from.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) slots: SlotFile,
    pub(crate) table: Mutex<SlotTable>,
    pub(crate) journal: Journal,
    pub(crate) recovered: Recovered,
    pub(crate) keyring: Option<Keyring>,
}

pub(crate) fn open(config: &DiskConfig, medium: &Arc<dyn Medium>) -> Result<Opened, OpenError> {
    config.validate()?;
    let header = header_of(config)?;
    stripes::join(&**medium, &dir_names(config))?;
    let seal = seal_of(config);
    let mut found = read_journal(config, &header, &seal, &**medium)?;
    let keyring = open_keyring(config, medium, &found)?;
    let without_bytes = match &mut found {
        Found::Journal(found) => drop_without_bytes(config, &**medium, found)?,
        Found::Nothing { .. } => 0,
    };
    let mut reserved = ReservedSpace::default();
    let slots = open_slots(config, &**medium, &mut reserved)?;
    let (table, dropped, clean, journal) = match found {
        Found::Nothing { other_key } => {
            let table = Mutex::new(SlotTable::new(config.num_slots));
            let journal = create_journal(config, &header, &seal, medium, &table)?;
            (table, Dropped { other_key, ..Dropped::default() }, true, journal)
        }
        Found::Journal(found) => {
            let FoundJournal { file, replayed, mut table } = *found;
            let mut dropped = Dropped { without_bytes, ..replayed.dropped };
            dropped.without_key = drop_without_key(&mut table, keyring.as_ref());
            dropped.duplicates = drop_duplicates(&mut table);
            if !replayed.clean {
                table.distrust();
                sync_slots(&slots)?;
            }
            let table = Mutex::new(table);
            let journal = if replayed.header.num_slots == config.num_slots {
                // The last process may have ended before it replaced a journal whose sync had
                // failed.
                if !replayed.clean && !planted(Planted::TrustPageCache) {
                    let again = write_again(&*file, replayed.end());
                    again.map_err(|error| failed("write again", JOURNAL_FILE, error))?;
                }
                cut_tail(&*file, &replayed)?;
                let (medium, slack) = (Arc::clone(medium), config.compact_slack_records);
                Journal::resume(medium, file, (replayed.header, &seal), replayed.records, slack)
            } else {
                create_journal(config, &header, &seal, medium, &table)?
            };
            (table, dropped, replayed.clean, journal)
        }
    };
    let locked = table.lock();
    let recovered = Recovered {
        blocks: blocks_by_age(&*locked),
        quarantined: locked.quarantined_slots(),
        dropped,
        clean,
    };
    drop(locked);
    if let Some(keyring) = &keyring {
        keyring.doom_unused(&used_keys(&table.lock()));
        keyring.destroy_doomed().map_err(|error| failed("destroy unused keys of", KEY_FILE, error))?;
    }
    reserved.keep();
    Ok(Opened { slots, table, journal, recovered, keyring })
}

/// How blocks and records of a directory are summed.
pub(crate) fn seal_of(config: &DiskConfig) -> Seal {
    Seal::new(config.namespace, config.key.as_ref()).encrypting(config.encryption.is_some())
}

/// The data keys, where blocks are encrypted.
fn open_keyring(
    config: &DiskConfig,
    medium: &Arc<dyn Medium>,
    found: &Found,
) -> Result<Option<Keyring>, OpenError> {
    let Some(encryption) = &config.encryption else { return Ok(None) };
    let newest = match found {
        Found::Nothing { .. } => 0,
        Found::Journal(found) => used_keys(&found.table).into_iter().max().unwrap_or(0),
    };
    let newest = u32::try_from(newest).unwrap_or(u32::MAX);
    let place = (&config.namespace, &config.geometry[..]);
    Keyring::open(Arc::clone(medium), encryption, place, newest).map(Some)
}

/// Numbers of the data keys that blocks were encrypted with.
fn used_keys(table: &SlotTable) -> HashSet<u64> {
    table.blocks().map(|(_, _, content)| content.recorded.word).collect()
}

/// Frees the slots of blocks whose data key is not there. Returns their number.
pub(crate) fn drop_without_key(table: &mut impl SlotRecords, keyring: Option<&Keyring>) -> u64 {
    let Some(keyring) = keyring else { return 0 };
    let lacks_key =
        |content: &Content| keyring.key(content.identity.namespace, content.recorded.word).is_none();
    let lost: Vec<BlockId> =
        table.blocks().filter(|(_, _, content)| lacks_key(content)).map(|(slot, ..)| slot).collect();
    for &slot in &lost {
        table.release(slot);
    }
    lost.len() as u64
}

/// What a journal of ours says first.
pub(crate) fn header_of(config: &DiskConfig) -> Result<Header, OpenError> {
    Ok(Header {
        journal_id: 0,
        namespace: config.namespace,
        encrypted: config.encryption.is_some(),
        num_slots: config.num_slots,
        block_bytes: config.block_bytes,
        slot_stride: config.slot_stride()?,
        geometry: config.geometry.clone(),
    })
}

/// Makes the bytes of the slots durable. The last process may have written a block over its own
/// record and ended before it synced that: the record alone does not say that the bytes are on the
/// device. Where its sync had failed, the page cache may have bytes that this sync does not write
/// either: reads must not find those.
fn sync_slots(slots: &SlotFile) -> Result<(), OpenError> {
    for (file, name) in slots.files.iter().zip(stripes::slot_files(slots.files.len())) {
        file.sync_data().map_err(|error| failed("sync", &name, error))?;
        file.drop_cache();
    }
    Ok(())
}

/// Cuts the torn tail and the mark of a shutdown before anything is written.
fn cut_tail(file: &dyn BlockFile, replayed: &crate::journal::Replayed) -> Result<(), OpenError> {
    file.set_len(replayed.end())
        .and_then(|()| file.sync_data())
        .map_err(|error| failed("cut the tail of", JOURNAL_FILE, error))
}

/// Frees the slots whose bytes the slot files do not have: a file was removed or cut. Returns their
/// number. In a new file these slots would read as damaged and be quarantined.
fn drop_without_bytes(
    config: &DiskConfig,
    medium: &dyn Medium,
    found: &mut FoundJournal,
) -> Result<u64, OpenError> {
    let names = stripes::slot_files(config.num_dirs());
    let stripes = Stripes::new(names.len(), config.slot_stride()?);
    let bytes_of = |name: &String| match medium.open(name, OpenFile::default()) {
        Ok(file) => file.len().map_err(|error| failed("read the length of", name, error)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        Err(error) => Err(failed("open", name, error)),
    };
    let bytes = names.iter().map(bytes_of).collect::<Result<Vec<u64>, _>>()?;
    let lost = without_bytes(&found.table, stripes, &bytes);
    if !lost.is_empty() {
        // Opening restores the file's length, so only this opening can tell. The mark of a shutdown
        // goes first: after a crash, slots that read wrong must become free, not quarantined.
        cut_tail(&*found.file, &found.replayed)?;
        for &slot in &lost {
            found.table.release(slot);
        }
    }
    Ok(lost.len() as u64)
}

/// Slots whose blocks are not, or not as a whole, in files of these lengths.
pub(crate) fn without_bytes(table: &impl SlotRecords, stripes: Stripes, lengths: &[u64]) -> Vec<BlockId> {
    let is_lost = |slot: BlockId, content: &Content| !stripes.have(lengths, slot, content.bytes);
    table.blocks().filter(|(slot, _, content)| is_lost(*slot, content)).map(|(slot, ..)| slot).collect()
}

pub(crate) fn failed(doing: &str, file: &str, source: io::Error) -> OpenError {
    OpenError::Io { doing: format!("{doing} {file}"), source }
}

pub(crate) enum Found {
    /// No journal, or one of another key with so many records.
    Nothing {
        other_key: u64,
    },
    Journal(Box<FoundJournal>),
}

pub(crate) struct FoundJournal {
    file: Arc<dyn BlockFile>,
    pub(crate) replayed: crate::journal::Replayed,
    pub(crate) table: SlotTable,
}

/// The journal, if there is one. Changes nothing.
pub(crate) fn read_journal(
    config: &DiskConfig,
    ours: &Header,
    seal: &Seal,
    medium: &dyn Medium,
) -> Result<Found, OpenError> {
    let file = match medium.open(JOURNAL_FILE, OpenFile::default()) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing { other_key: 0 }),
        Err(error) => return Err(failed("open", JOURNAL_FILE, error)),
    };
    let mut start = [0; 12];
    let read =
        complete::read_up_to(&*file, 0, &mut start).map_err(|error| failed("read", JOURNAL_FILE, error))?;
    // First of all: what is not encrypted must not stay where everything is thought to be.
    if let Some(encrypted) = Header::says_encrypted(&start[..read])
        && encrypted != ours.encrypted
    {
        let file = format!("{}/{JOURNAL_FILE}", medium.location());
        return Err(OpenError::Encryption { file, encrypted });
    }
    let accept = |theirs: &Header| {
        check_header(ours, theirs)?;
        Ok(SlotTable::new(config.num_slots))
    };
    let error = match replay(&*file, seal, accept) {
        Ok((replayed, table)) => return Ok(Found::Journal(Box::new(FoundJournal { file, replayed, table }))),
        Err(error) => error,
    };
    Err(match error {
        // Who wrote it did not have our key: to us it holds nothing.
        Refused::Replay(ReplayError::Format(FormatError::Key { ours: Some(_), .. })) => {
            let bytes = file.len().map_err(|error| failed("read the length of", JOURNAL_FILE, error))?;
            return Ok(Found::Nothing { other_key: records_in(bytes, ours.encrypted) });
        }
        Refused::Replay(ReplayError::Format(source)) => {
            OpenError::Format { file: format!("{}/{JOURNAL_FILE}", medium.location()), source }
        }
        Refused::Replay(ReplayError::Io(error)) => failed("read", JOURNAL_FILE, error),
        Refused::Header(error) => *error,
    })
}

/// Records that a journal of so many bytes has at most.
fn records_in(bytes: u64, encrypted: bool) -> u64 {
    bytes.saturating_sub(HEADER_BYTES as u64) / record_bytes(encrypted) as u64
}

enum Refused {
    Replay(ReplayError),
    Header(Box<OpenError>),
}

impl From<ReplayError> for Refused {
    fn from(error: ReplayError) -> Self {
        Self::Replay(error)
    }
}

fn check_header(ours: &Header, theirs: &Header) -> Result<(), Refused> {
    let refuse = |what, found: String, expected: String| {
        Err(Refused::Header(Box::new(OpenError::Geometry { what, found, expected })))
    };
    if theirs.namespace != ours.namespace {
        let error = OpenError::Namespace { found: theirs.namespace, expected: ours.namespace };
        return Err(Refused::Header(Box::new(error)));
    }
    if theirs.block_bytes != ours.block_bytes {
        return refuse("block_bytes", theirs.block_bytes.to_string(), ours.block_bytes.to_string());
    }
    if theirs.slot_stride != ours.slot_stride {
        return refuse("slot_stride", theirs.slot_stride.to_string(), ours.slot_stride.to_string());
    }
    if theirs.geometry != ours.geometry {
        return refuse("geometry", abridged(&theirs.geometry), abridged(&ours.geometry));
    }
    Ok(())
}

fn abridged(geometry: &[u8]) -> String {
    match std::str::from_utf8(geometry) {
        Ok(text) if geometry.len() <= 200 && !text.contains(char::is_control) => format!("'{text}'"),
        _ => format!("{} bytes {}...", geometry.len(), hex(&geometry[..geometry.len().min(32)])),
    }
}

/// A journal of the present table, put in place at once.
fn create_journal(
    config: &DiskConfig,
    header: &Header,
    seal: &Seal,
    medium: &Arc<dyn Medium>,
    table: &Mutex<SlotTable>,
) -> Result<Journal, OpenError> {
    let created = Journal::create(Arc::clone(medium), header, seal, config.compact_slack_records, table);
    created.map_err(|source| match config.slot_file_bytes() {
        Ok(bytes) if is_full(&source) => OpenError::NoSpace { bytes, source },
        _ => failed("create", JOURNAL_TEMP_FILE, source),
    })
}

/// The directories, for people.
pub(crate) fn dir_names(config: &DiskConfig) -> Vec<String> {
    std::iter::once(&config.dir).chain(&config.more_dirs).map(|dir| dir.display().to_string()).collect()
}

/// Opens the slot files at their full length, directly if wanted and possible for all of them.
fn open_slots(
    config: &DiskConfig,
    medium: &dyn Medium,
    reserved: &mut ReservedSpace,
) -> Result<SlotFile, OpenError> {
    config.slot_file_bytes()?;
    let (stride, straight_bytes) = (config.slot_stride()?, config.straight_bytes);
    let names = stripes::slot_files(config.num_dirs());
    let stripes = Stripes::new(names.len(), stride);
    let lengths: Vec<u64> =
        (0..names.len()).map(|member| stripes.file_bytes(member, config.num_slots).max(stride)).collect();
    let (mut files, preallocated) = reserve(medium, &names, &lengths, reserved)?;
    // A new slot file must have a durable name before the first flush of its data.
    medium.sync_dir().map_err(|source| OpenError::Io { doing: "sync the directories".to_owned(), source })?;
    let direct = directly(config.engine, || open_direct(medium, names.len()))?.map(|(direct, alignment)| {
        files = direct;
        alignment
    });
    let encrypted = config.encryption.is_some();
    Ok(SlotFile { files, stripes, stride, direct, preallocated, straight_bytes, encrypted })
}

/// The slot files opened by `open` for direct I/O and the alignment that all of them take, or why
/// not; an error where `engine` must have that.
pub(crate) fn directly(
    engine: EngineMode,
    open: impl FnOnce() -> Result<(Files, u32), String>,
) -> Result<Result<(Files, u32), String>, OpenError> {
    match engine {
        EngineMode::Buffered => Ok(Err("configured".to_owned())),
        EngineMode::Auto | EngineMode::Custom => Ok(open()),
        EngineMode::IoUring => open().map(Ok).map_err(|reason| no_engine(EngineKind::IoUring, reason)),
        EngineMode::Threads => open().map(Ok).map_err(|reason| no_engine(EngineKind::Threads, reason)),
    }
}

/// The slot files, each of the length that it is to have, and whether their space is reserved.
fn reserve(
    medium: &dyn Medium,
    names: &[String],
    lengths: &[u64],
    reserved: &mut ReservedSpace,
) -> Result<(Files, bool), OpenError> {
    let (mut files, mut preallocated) = (Files::new(), true);
    for (name, &bytes) in names.iter().zip(lengths) {
        let create = OpenFile { create: true, ..OpenFile::default() };
        let file = medium.open(name, create).map_err(|error| failed("open", name, error))?;
        let before = file.len().map_err(|error| failed("read the length of", name, error))?;
        reserved.0.push((Arc::clone(&file), before));
        preallocated &= file.reserve(bytes).map_err(|source| {
            if is_full(&source) {
                OpenError::NoSpace { bytes, source }
            } else {
                failed("reserve space for", name, source)
            }
        })?;
        files.push(file);
    }
    Ok((files, preallocated))
}

/// Slot files and their lengths before the opening. An opening that fails cuts them back.
#[derive(Default)]
struct ReservedSpace(Vec<(Arc<dyn BlockFile>, u64)>);

impl ReservedSpace {
    fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for ReservedSpace {
    fn drop(&mut self) {
        for (file, before) in &self.0 {
            if file.len().is_ok_and(|now| now > *before) {
                // A file that cannot be cut keeps its length. The caller reports the first error.
                let _ = file.set_len(*before);
            }
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

fn no_engine(engine: EngineKind, reason: String) -> OpenError {
    OpenError::NoEngine { engine, reason }
}

pub(crate) type Files = Vec<Arc<dyn BlockFile>>;

/// The slot files opened for direct I/O and the alignment that all of them take, or why not.
fn open_direct(medium: &dyn Medium, count: usize) -> Result<(Files, u32), String> {
    let how = OpenFile { direct: true, ..OpenFile::default() };
    let open = |name: &String| medium.open(name, how).map_err(|error| format!("open with O_DIRECT: {error}"));
    let files: Files = stripes::slot_files(count).iter().map(open).collect::<Result<_, _>>()?;
    let mut alignment = 0;
    for (member, slots) in files.iter().enumerate() {
        let name = stripes::name_in(member, PROBE_FILE);
        let probed = probe_direct(medium, &name, &**slots);
        let _ = medium.remove(&name);
        alignment = alignment.max(probed?);
    }
    Ok((files, alignment))
}

/// Writes and reads back a block of a scratch file, aligned to 512 bytes and then to 4096. A full
/// disk has no room for that, which says nothing about direct I/O: then the probe only reads, from
/// the slots, which have their space.
fn probe_direct(medium: &dyn Medium, name: &str, slots: &dyn BlockFile) -> Result<u32, String> {
    let how = OpenFile { create: true, truncate: true, direct: true };
    let scratch = match medium.open(name, how) {
        Ok(file) => Some(file),
        Err(error) if is_full(&error) => None,
        Err(error) => return Err(format!("open with O_DIRECT: {error}")),
    };
    let probe = |alignment: usize| match scratch.as_ref().map(|file| probe_writing(&**file, alignment)) {
        Some(written) if !written.as_ref().is_err_and(is_full) => written,
        _ => probe_reading(slots, alignment),
    };
    let mut reason = String::new();
    for alignment in [512_u32, 4096] {
        match probe(alignment as usize) {
            Ok(()) => return Ok(alignment),
            Err(error) => reason = format!("O_DIRECT at {alignment} bytes: {error}"),
        }
    }
    Err(reason)
}

/// Reads at an odd multiple of `alignment` in memory, offset and length. The content does not
/// matter.
pub(crate) fn probe_reading(slots: &dyn BlockFile, alignment: usize) -> io::Result<()> {
    let mut memory = OwnedBuffer::new(2 * alignment);
    slots.read_at(alignment as u64, &mut [IoSliceMut::new(&mut memory.as_mut_slice()[alignment..])]).map(drop)
}

fn probe_writing(file: &dyn BlockFile, alignment: usize) -> io::Result<()> {
    let whole = |result: Result<u64, complete::Stopped>| {
        result.map(drop).map_err(|stopped| stopped.error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into()))
    };
    let mut memory = OwnedBuffer::new(3 * alignment);
    let (pattern, rest) = memory.as_mut_slice()[alignment..].split_at_mut(alignment);
    pattern.fill(0xA5);
    // Odd multiples of the alignment: a device that accepts them accepts every later request.
    let offset = alignment as u64;
    whole(complete::write(file, offset, &mut [IoSlice::new(pattern)], 1))?;
    whole(complete::read(file, offset, &mut [IoSliceMut::new(rest)], 1))?;
    if pattern == rest { Ok(()) } else { Err(io::Error::other("what was written was not read back")) }
}

/// Slots ordered by `key`, then by number. What is sorted are integers: entries of the table are
/// large and many.
fn slots_by(table: &impl SlotRecords, key: impl Fn(u64, &Content) -> u64) -> Vec<(u64, BlockId)> {
    let pack = |(slot, generation, content): (BlockId, u64, &Content)| {
        u128::from(key(generation, content)) << 32 | u128::from(slot.0)
    };
    let mut keys: Vec<u128> = table.blocks().map(pack).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| ((key >> 32) as u64, BlockId(key as u32))).collect()
}

/// Frees all slots of a block but the newest; returns how many.
pub(crate) fn drop_duplicates(table: &mut impl SlotRecords) -> u64 {
    let first_half = |hash: &SequenceHash| {
        let (first, _) = hash.as_bytes().split_first_chunk().unwrap_or((&[0; 8], &[]));
        u64::from_le_bytes(*first)
    };
    let slots = slots_by(table, |_, content| first_half(&content.identity.hash));
    let mut older = Vec::new();
    // Equal first halves almost always mean equal hashes. Forged ones only cost time.
    for alike in slots.chunk_by(|one, next| one.0 == next.0).filter(|alike| alike.len() > 1) {
        let whole = |(_, slot): &(u64, BlockId)| {
            let (generation, content) = table.block(*slot)?;
            let identity = content.identity;
            Some(((identity.namespace, identity.group, identity.hash), generation, *slot))
        };
        let mut blocks: Vec<_> = alike.iter().filter_map(whole).collect();
        blocks.sort_unstable();
        let same = blocks.windows(2).filter(|pair| pair[0].0 == pair[1].0);
        older.extend(same.map(|pair| pair[0].2));
    }
    for &slot in &older {
        table.release(slot);
    }
    older.len() as u64
}

/// Blocks, the oldest write first.
pub(crate) fn blocks_by_age(table: &impl SlotRecords) -> Vec<RecoveredSlot> {
    let recovered = |(_, slot): (u64, BlockId)| {
        let (_, content) = table.block(slot)?;
        let Content { identity, recorded, bytes } = *content;
        Some(RecoveredSlot { slot, identity, checksum: recorded.checksum(), bytes })
    };
    slots_by(table, |generation, _| generation).into_iter().filter_map(recovered).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Record, RecordState};
    use crate::seal::Recorded;
    use kvbm_plan::{BlockIdentity, GroupId, NamespaceId};

    #[test]
    fn only_the_same_block_is_a_duplicate() {
        let mut table = SlotTable::new(8);
        let mut recover = |slot: u32, generation: u64, hash: [u8; 16], group: u16| {
            let hash = SequenceHash::from_bytes(hash);
            let (namespace, group) = (NamespaceId(0), GroupId(group));
            let identity = BlockIdentity { namespace, group, hash, parent: None, position: 0 };
            let recorded = Recorded::sum(u64::from(slot));
            let state = RecordState::Present { identity, recorded, bytes: 16 };
            table.recover(&Record { slot: BlockId(slot), generation, state });
        };
        let alike = |last: u8| {
            let mut hash = [1; 16];
            hash[15] = last;
            hash
        };
        recover(0, 9, alike(0), 0);
        recover(1, 8, alike(1), 0);
        recover(2, 7, alike(0), 1);
        recover(3, 6, alike(0), 0); // older than slot 0
        recover(4, 5, [2; 16], 0);
        recover(5, 10, alike(1), 0); // newer than slot 1
        recover(6, 4, alike(1), 0); // older than both
        assert_eq!(drop_duplicates(&mut table), 3);
        let by_age = blocks_by_age(&table);
        assert_eq!(by_age.iter().map(|found| found.slot.0).collect::<Vec<_>>(), [4, 2, 0, 5]);
        assert!(by_age.iter().all(|found| found.checksum == u64::from(found.slot.0)));
    }
}
