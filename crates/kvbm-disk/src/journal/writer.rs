//! Writing the journal: append and sync, or replace the whole by a snapshot.

use crate::medium::{BlockFile, Medium, OpenFile, complete};
use crate::record::{HEADER_BYTES, Header, Record, RecordState, record_bytes};
use crate::seal::Seal;
use crate::slot_table::SlotTable;
use kvbm_plan::simulation::{Planted, planted};
use parking_lot::Mutex;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::sync::Arc;

/// The journal's name in its directory.
pub(crate) const JOURNAL_FILE: &str = "journal.kvbm";
/// A snapshot that is being written.
pub(crate) const JOURNAL_TEMP_FILE: &str = "journal.kvbm.tmp";

/// Slots looked at under one hold of the table's lock.
const SNAPSHOT_SLOTS: usize = 4096;

/// Bytes of a journal that are written again at once.
const AGAIN_BYTES: usize = 1 << 20;

/// The journal, open for writing. Owned by the committer.
#[derive(Debug)]
pub(crate) struct Journal {
    medium: Arc<dyn Medium>,
    file: Arc<dyn BlockFile>,
    header: Header,
    seal: Seal,
    records: u64,
    /// A sync or a rename failed, so the end of the file is unknown. Nothing is appended until a
    /// snapshot replaces the journal.
    broken: bool,
    /// After a failed snapshot: the number of records at which the next one is tried.
    postponed_to: u64,
    slack_records: u64,
    compactions: u64,
    failed_snapshots: u64,
}

impl Journal {
    /// Creates a journal that says what `table` says.
    pub(crate) fn create(
        medium: Arc<dyn Medium>,
        header: &Header,
        seal: &Seal,
        slack_records: u64,
        table: &Mutex<SlotTable>,
    ) -> io::Result<Self> {
        let Snapshot { file, header, records } = write_snapshot(&*medium, header, seal, table, &[])?;
        put_in_place(&*medium)?;
        Ok(Self::resume(medium, file, (header, seal), records, slack_records))
    }

    /// Goes on with a journal that was replayed, of `records` records.
    pub(crate) fn resume(
        medium: Arc<dyn Medium>,
        file: Arc<dyn BlockFile>,
        (header, seal): (Header, &Seal),
        records: u64,
        slack_records: u64,
    ) -> Self {
        Self {
            medium,
            file,
            header,
            seal: seal.clone(),
            records,
            broken: false,
            postponed_to: 0,
            slack_records,
            compactions: 0,
            failed_snapshots: 0,
        }
    }

    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    /// Snapshots that replaced the journal, and snapshots that failed.
    pub(crate) fn snapshots(&self) -> (u64, u64) {
        (self.compactions, self.failed_snapshots)
    }

    /// Makes `records` durable. After an error none of them counts as durable.
    pub(crate) fn persist(&mut self, table: &Mutex<SlotTable>, records: &[Record]) -> io::Result<()> {
        let (present, _, quarantined) = table.lock().counts();
        let slack = slack_records(present + quarantined, self.slack_records);
        let needed = self.records + records.len() as u64;
        if self.broken || needed > self.postponed_to.max(present + quarantined + slack) {
            // Counted as failed until it succeeds: the medium may panic.
            self.failed_snapshots += 1;
            match self.replace(table, records) {
                Err(error) if self.broken => return Err(error),
                // A full disk may have space for a few records where it has none for a snapshot.
                Err(_) => self.postponed_to = needed + slack,
                Ok(()) => {
                    self.failed_snapshots -= 1;
                    return Ok(());
                }
            }
        }
        self.append(records)
    }

    /// Appends the mark of a shutdown. The next record overwrites it.
    pub(crate) fn mark_clean(&mut self) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        complete::write_all(
            &*self.file,
            self.end(),
            &Record::CLEAN.encode(self.header.journal_id, &self.seal),
        )?;
        self.file.sync_data()
    }

    fn end(&self) -> u64 {
        HEADER_BYTES as u64 + self.records * record_bytes(self.header.encrypted) as u64
    }

    fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(records.len() * record_bytes(self.header.encrypted));
        for record in records {
            bytes.extend_from_slice(&record.encode(self.header.journal_id, &self.seal));
        }
        // Set until all calls succeeded: the medium may panic.
        self.broken = true;
        if let Err(error) = complete::write_all(&*self.file, self.end(), &bytes) {
            // Cuts what was written of the records: the next ones start there.
            self.broken = self.file.set_len(self.end()).is_err();
            return Err(error);
        }
        if !planted(Planted::AcknowledgeUnsynced) {
            self.file.sync_data()?;
        }
        self.broken = false;
        self.records += records.len() as u64;
        Ok(())
    }

    /// Until the snapshot is complete, an error leaves the journal as it was.
    fn replace(&mut self, table: &Mutex<SlotTable>, records: &[Record]) -> io::Result<()> {
        let snapshot = write_snapshot(&*self.medium, &self.header, &self.seal, table, records)?;
        // After an error it is unknown which of the two files is the journal. The medium may also
        // panic.
        self.broken = true;
        put_in_place(&*self.medium)?;
        (self.file, self.header, self.records) = (snapshot.file, snapshot.header, snapshot.records);
        (self.broken, self.postponed_to) = (false, 0);
        self.compactions += 1;
        Ok(())
    }
}

/// Writes the first `bytes` bytes of a journal again as they are read. After a sync that failed the
/// page cache may have bytes that the device does not have and no later sync writes. Once this is
/// synced, the device has what a reader finds.
pub(crate) fn write_again(file: &dyn BlockFile, bytes: u64) -> io::Result<()> {
    let mut chunk = vec![0; usize::try_from(bytes).unwrap_or(AGAIN_BYTES).min(AGAIN_BYTES)];
    let mut at = 0;
    while at < bytes {
        let left = usize::try_from(bytes - at).unwrap_or(AGAIN_BYTES).min(chunk.len());
        let read = complete::read_up_to(file, at, &mut chunk[..left])?;
        if read == 0 {
            break;
        }
        complete::write_all(file, at, &chunk[..read])?;
        at += read as u64;
    }
    Ok(())
}

/// Records that a journal of `occupied` slots may hold beyond one for each slot. An entry of a
/// large cache then takes less than 100 bytes on the disk, and an opening reads few dead records. A
/// snapshot writes each entry about six times before all slots were replaced: less than a hundredth
/// of the blocks' bytes.
fn slack_records(occupied: u64, least: u64) -> u64 {
    least.max(occupied / 5)
}

/// A journal that is complete and synced, under its temporary name.
struct Snapshot {
    file: Arc<dyn BlockFile>,
    header: Header,
    records: u64,
}

/// Writes all durable slots and `records` to a new file. Removes an incomplete one: on a full disk
/// it would keep the disk full.
fn write_snapshot(
    medium: &dyn Medium,
    header: &Header,
    seal: &Seal,
    table: &Mutex<SlotTable>,
    records: &[Record],
) -> io::Result<Snapshot> {
    let written = write_new_file(medium, header, seal, table, records);
    if written.is_err() {
        // The caller reports the first error.
        let _ = medium.remove(JOURNAL_TEMP_FILE);
    }
    written
}

/// The old journal stays until this rename. After an error the temporary name is free again.
fn put_in_place(medium: &dyn Medium) -> io::Result<()> {
    if let Err(error) = medium.rename(JOURNAL_TEMP_FILE, JOURNAL_FILE) {
        let _ = medium.remove(JOURNAL_TEMP_FILE);
        return Err(error);
    }
    medium.sync_dir()
}

fn write_new_file(
    medium: &dyn Medium,
    header: &Header,
    seal: &Seal,
    table: &Mutex<SlotTable>,
    records: &[Record],
) -> io::Result<Snapshot> {
    let file = medium.open(JOURNAL_TEMP_FILE, OpenFile { create: true, truncate: true, direct: false })?;
    let journal_id = RandomState::new().hash_one(std::process::id());
    let header = Header { journal_id, ..header.clone() };
    complete::write_all(&*file, 0, &header.encode(seal))?;
    let mut written = 0;
    let mut write = |records: &[Record]| {
        let lasting = records.iter().filter(|record| record.state != RecordState::Free);
        let bytes: Vec<u8> = lasting.flat_map(|record| record.encode(journal_id, seal)).collect();
        let each = record_bytes(header.encrypted);
        let at = HEADER_BYTES as u64 + written * each as u64;
        written += (bytes.len() / each) as u64;
        complete::write_all(&*file, at, &bytes)
    };
    let num_slots = table.lock().num_slots() as usize;
    let mut chunk = Vec::with_capacity(SNAPSHOT_SLOTS);
    for from in (0..num_slots).step_by(SNAPSHOT_SLOTS) {
        chunk.clear();
        table.lock().durable_records(from, SNAPSHOT_SLOTS, &mut chunk);
        write(&chunk)?;
    }
    write(records)?;
    if !planted(Planted::ReplaceUnsynced) {
        file.sync_data()?;
    }
    Ok(Snapshot { file, header, records: written })
}
