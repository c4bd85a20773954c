//! Opening a directory: judge first, change after.

use crate::error::hex;
use crate::journal::{Header, JOURNAL_FILE, JOURNAL_TEMP_FILE, Journal, ReplayError, replay};
use crate::medium::{BlockFile, Medium, OpenFile, full};
use crate::slots::{SLOT_FILE, SlotFile};
use crate::table::Table;
use crate::{DiskConfig, Dropped, IoChoice, IoMode, OpenError, OwnedBuffer, Recovered, RecoveredSlot};
use parking_lot::Mutex;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;

const PROBE_FILE: &str = "probe.tmp";

/// What the engine starts from.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) slots: SlotFile,
    pub(crate) table: Mutex<Table>,
    pub(crate) journal: Journal,
    pub(crate) recovered: Recovered,
}

pub(crate) fn open(config: &DiskConfig, medium: &Arc<dyn Medium>) -> Result<Opened, OpenError> {
    config.validate()?;
    let header = Header {
        journal_id: 0,
        namespace: config.namespace,
        num_slots: config.num_slots,
        block_bytes: config.block_bytes,
        slot_stride: config.slot_stride()?,
        geometry: config.geometry.clone(),
    };
    let found = read_journal(config, &header, &**medium)?;
    let slots = open_slots(config, &**medium)?;
    let (table, dropped, journal) = match found {
        None => {
            let table = Mutex::new(Table::new(config.num_slots));
            let journal = create_journal(config, header, medium, &table)?;
            (table, Dropped::default(), journal)
        }
        Some(Found { file, replayed, mut table }) => {
            let mut dropped = replayed.dropped;
            dropped.duplicates = drop_duplicates(&mut table);
            let table = Mutex::new(table);
            let journal = if replayed.header.num_slots == config.num_slots {
                file.set_len(replayed.end())
                    .map_err(|error| failed("cut the torn tail of", JOURNAL_FILE, error))?;
                let (medium, slack) = (Arc::clone(medium), config.compact_slack_records);
                Journal::resume(medium, file, replayed.header, replayed.records, slack)
            } else {
                create_journal(config, header, medium, &table)?
            };
            (table, dropped, journal)
        }
    };
    let locked = table.lock();
    let recovered =
        Recovered { blocks: blocks_by_age(&locked), quarantined: locked.quarantined_slots(), dropped };
    drop(locked);
    Ok(Opened { slots, table, journal, recovered })
}

fn failed(doing: &str, file: &str, source: io::Error) -> OpenError {
    OpenError::Io { doing: format!("{doing} {file}"), source }
}

struct Found {
    file: Arc<dyn BlockFile>,
    replayed: crate::journal::Replayed,
    table: Table,
}

/// The journal, if there is one. Changes nothing.
fn read_journal(config: &DiskConfig, ours: &Header, medium: &dyn Medium) -> Result<Option<Found>, OpenError> {
    let file = match medium.open(JOURNAL_FILE, OpenFile::default()) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open", JOURNAL_FILE, error)),
    };
    let accept = |theirs: &Header| {
        check_header(ours, theirs)?;
        Ok(Table::new(config.num_slots))
    };
    let (replayed, table) = replay(&*file, accept).map_err(|error| match error {
        Refused::Replay(ReplayError::Format(source)) => {
            OpenError::Format { file: format!("{}/{JOURNAL_FILE}", medium.location()), source }
        }
        Refused::Replay(ReplayError::Io(error)) => failed("read", JOURNAL_FILE, error),
        Refused::Header(error) => *error,
    })?;
    Ok(Some(Found { file, replayed, table }))
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
    header: Header,
    medium: &Arc<dyn Medium>,
    table: &Mutex<Table>,
) -> Result<Journal, OpenError> {
    Journal::create(Arc::clone(medium), header, config.compact_slack_records, table)
        .map_err(|error| failed("create", JOURNAL_TEMP_FILE, error))
}

/// Opens the slot file at its full length, directly if wanted and possible.
fn open_slots(config: &DiskConfig, medium: &dyn Medium) -> Result<SlotFile, OpenError> {
    let bytes = config.slot_file_bytes()?;
    let create = OpenFile { create: true, ..OpenFile::default() };
    let mut file = medium.open(SLOT_FILE, create).map_err(|error| failed("open", SLOT_FILE, error))?;
    let preallocated = file.reserve(bytes).map_err(|source| match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => OpenError::NoSpace { bytes, source },
        _ => failed("reserve space for", SLOT_FILE, source),
    })?;
    let direct = match config.io {
        IoMode::Buffered => Err("configured".to_owned()),
        IoMode::Auto | IoMode::Direct => open_direct(medium),
    };
    let io = match direct {
        Ok((direct_file, alignment)) => {
            file = direct_file;
            IoChoice::Direct { alignment }
        }
        Err(reason) if config.io == IoMode::Direct => return Err(OpenError::NoDirect { reason }),
        Err(reason) => IoChoice::Buffered { reason },
    };
    Ok(SlotFile { file, stride: config.slot_stride()?, io, preallocated })
}

/// The slot file opened for direct I/O and the alignment that it needs, or why not.
fn open_direct(medium: &dyn Medium) -> Result<(Arc<dyn BlockFile>, u32), String> {
    let probed = probe_direct(medium);
    let _ = medium.remove(PROBE_FILE);
    let alignment = probed?;
    let how = OpenFile { direct: true, ..OpenFile::default() };
    let file = medium.open(SLOT_FILE, how).map_err(|error| format!("open with O_DIRECT: {error}"))?;
    Ok((file, alignment))
}

/// Writes and reads back a block of a scratch file, aligned to 512 bytes and then to 4096.
fn probe_direct(medium: &dyn Medium) -> Result<u32, String> {
    let how = OpenFile { create: true, truncate: true, direct: true };
    let file = medium.open(PROBE_FILE, how).map_err(|error| format!("open with O_DIRECT: {error}"))?;
    let mut reason = String::new();
    for alignment in [512_u32, 4096] {
        match probe_alignment(&*file, alignment as usize) {
            Ok(()) => return Ok(alignment),
            Err(error) => reason = format!("O_DIRECT at {alignment} bytes: {error}"),
        }
    }
    Err(reason)
}

fn probe_alignment(file: &dyn BlockFile, alignment: usize) -> io::Result<()> {
    let whole = |result: Result<u64, full::Stopped>| {
        result.map(drop).map_err(|stopped| stopped.error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into()))
    };
    let mut memory = OwnedBuffer::new(3 * alignment);
    let (pattern, rest) = memory.as_mut_slice()[alignment..].split_at_mut(alignment);
    pattern.fill(0xA5);
    // Memory, offset and length at an odd multiple: what is not refused here is not refused later.
    let offset = alignment as u64;
    whole(full::write(file, offset, &mut [IoSlice::new(pattern)], 1))?;
    whole(full::read(file, offset, &mut [IoSliceMut::new(rest)], 1))?;
    if pattern == rest { Ok(()) } else { Err(io::Error::other("what was written was not read back")) }
}

/// Frees all slots of a block but the newest; returns how many.
fn drop_duplicates(table: &mut Table) -> u64 {
    let mut blocks: Vec<_> = table
        .blocks()
        .map(|(slot, generation, content)| {
            let identity = content.identity;
            ((identity.namespace, identity.group, identity.hash), generation, slot)
        })
        .collect();
    blocks.sort_unstable();
    let mut dropped = 0;
    for pair in blocks.windows(2) {
        if pair[0].0 == pair[1].0 {
            table.release(pair[0].2);
            dropped += 1;
        }
    }
    dropped
}

fn blocks_by_age(table: &Table) -> Vec<RecoveredSlot> {
    let mut blocks: Vec<_> = table.blocks().collect();
    blocks.sort_unstable_by_key(|(_, generation, _)| *generation);
    blocks
        .into_iter()
        .map(|(slot, _, content)| RecoveredSlot {
            slot,
            identity: content.identity,
            checksum: content.checksum,
            bytes: content.bytes,
        })
        .collect()
}
