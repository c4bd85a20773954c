//! Reading a journal of unknown history.

use crate::medium::{BlockFile, complete};
use crate::record::{HEADER_BYTES, Header, Record, RecordError, RecordState, record_bytes};
use crate::recorded_slots::SlotRecords;
use crate::seal::Seal;
use crate::{Dropped, FormatError};
use kvbm_plan::BlockId;
use std::collections::HashMap;
use std::io;

/// Records read at once: bounds the memory of a replay for any file length.
const CHUNK_RECORDS: usize = 8192;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A journal that was read.
#[derive(Debug)]
pub(crate) struct Replayed {
    pub(crate) header: Header,
    pub(crate) dropped: Dropped,
    /// Records up to the last intact one, damaged ones included. What follows is torn.
    pub(crate) records: u64,
    /// The journal ends with the mark of a shutdown, which `records` does not count.
    pub(crate) clean: bool,
}

impl Replayed {
    /// Where the next record goes, in bytes.
    pub(crate) fn end(&self) -> u64 {
        (HEADER_BYTES as u64)
            .saturating_add(self.records.saturating_mul(record_bytes(self.header.encrypted) as u64))
    }
}

/// Reads the header and lets `accept` judge it; then every record into the table that `accept`
/// returns.
pub(crate) fn replay<T: SlotRecords, E: From<ReplayError>>(
    file: &dyn BlockFile,
    seal: &Seal,
    accept: impl FnOnce(&Header) -> Result<T, E>,
) -> Result<(Replayed, T), E> {
    let file_bytes = file.len().map_err(ReplayError::from)?;
    let mut bytes = vec![0; HEADER_BYTES];
    let read = complete::read_up_to(file, 0, &mut bytes).map_err(ReplayError::from)?;
    let header = Header::decode(&bytes[..read], file_bytes, seal).map_err(ReplayError::from)?;
    let mut table = accept(&header)?;
    let mut replayed = Replayed { header, dropped: Dropped::default(), records: 0, clean: false };
    let seal = seal.clone().encrypting(replayed.header.encrypted);
    let torn = read_records(file, &seal, &mut replayed, &mut table).map_err(ReplayError::from)?;
    replayed.dropped.torn_tail_bytes = torn;
    replayed.clean &= torn == 0;
    replayed.records -= u64::from(replayed.clean);
    Ok((replayed, table))
}

/// Returns the number of bytes after the last intact record.
fn read_records(
    file: &dyn BlockFile,
    seal: &Seal,
    replayed: &mut Replayed,
    table: &mut impl SlotRecords,
) -> io::Result<u64> {
    let each = record_bytes(replayed.header.encrypted);
    let mut offset = HEADER_BYTES as u64;
    let records = file.len()?.saturating_sub(offset) / each as u64;
    // One more than there are, so that the first read of a short journal is the last.
    let chunk_records =
        CHUNK_RECORDS.min(usize::try_from(records).unwrap_or(CHUNK_RECORDS).saturating_add(1));
    let mut chunk = vec![0; chunk_records * each];
    let mut beyond = HashMap::new();
    // Records that do not verify, until an intact one follows: damage in the middle then, a torn
    // tail otherwise.
    let mut suspicious = 0;
    loop {
        let read = complete::read_up_to(file, offset, &mut chunk)?;
        let records = chunk[..read].chunks_exact(each);
        let rest = records.remainder().len();
        for bytes in records {
            match Record::decode(replayed.header.journal_id, bytes, seal) {
                Err(RecordError::Checksum) => suspicious += 1,
                intact => {
                    replayed.dropped.damaged_records += suspicious;
                    replayed.records += suspicious + 1;
                    suspicious = 0;
                    apply(intact.ok(), replayed, table, &mut beyond);
                }
            }
        }
        offset += read as u64;
        if read < chunk.len() {
            let is_block = |(_, is_block): &&(u64, bool)| *is_block;
            replayed.dropped.beyond_capacity = beyond.values().filter(is_block).count() as u64;
            return Ok(suspicious * each as u64 + rest as u64);
        }
    }
}

/// Slots that the table does not have: the highest generation of each, and whether that is a block.
type Beyond = HashMap<BlockId, (u64, bool)>;

/// Applies an intact record; `None` is one that makes no sense.
fn apply(record: Option<Record>, replayed: &mut Replayed, table: &mut impl SlotRecords, beyond: &mut Beyond) {
    replayed.clean = record.is_some_and(|record| record.state == RecordState::Clean);
    let Some(record) = record else {
        replayed.dropped.invalid_records += 1;
        return;
    };
    if replayed.clean {
        return;
    }
    let is_block = matches!(record.state, RecordState::Present { .. });
    if let RecordState::Present { bytes, .. } = record.state
        && !(1..=replayed.header.block_bytes).contains(&bytes)
    {
        replayed.dropped.invalid_records += 1;
    } else if record.slot.0 < table.max_slots() {
        table.recover(&record);
    } else {
        let last = beyond.entry(record.slot).or_default();
        if record.generation >= last.0 {
            *last = (record.generation, is_block);
        }
    }
}
