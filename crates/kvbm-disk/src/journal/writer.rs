//! Writing the journal: append and sync, or replace the whole by a snapshot.

use super::format::{HEADER_BYTES, Header, RECORD_BYTES, Record, RecordState};
use crate::medium::{BlockFile, Medium, OpenFile, full};
use crate::table::Table;
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

/// The journal, open for writing. Owned by the committer.
#[derive(Debug)]
pub(crate) struct Journal {
    medium: Arc<dyn Medium>,
    file: Arc<dyn BlockFile>,
    header: Header,
    records: u64,
    /// The file's tail is unknown since a failed append or sync: nothing is appended until it is replaced.
    broken: bool,
    slack_records: u64,
    compactions: u64,
}

impl Journal {
    /// Creates a journal that says what `table` says.
    pub(crate) fn create(
        medium: Arc<dyn Medium>,
        header: Header,
        slack_records: u64,
        table: &Mutex<Table>,
    ) -> io::Result<Self> {
        let mut journal_header = header;
        let (file, records) = write_snapshot(&*medium, &mut journal_header, table, &[])?;
        Ok(Self {
            medium,
            file,
            header: journal_header,
            records,
            broken: false,
            slack_records,
            compactions: 0,
        })
    }

    /// Goes on with a journal that was replayed, of `records` records.
    pub(crate) fn resume(
        medium: Arc<dyn Medium>,
        file: Arc<dyn BlockFile>,
        header: Header,
        records: u64,
        slack_records: u64,
    ) -> Self {
        Self { medium, file, header, records, broken: false, slack_records, compactions: 0 }
    }

    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    pub(crate) fn compactions(&self) -> u64 {
        self.compactions
    }

    /// Makes `records` lasting. After an error none of them may count as lasting.
    pub(crate) fn persist(&mut self, table: &Mutex<Table>, records: &[Record]) -> io::Result<()> {
        let (present, _, quarantined) = table.lock().counts();
        let bound = 2 * (present + quarantined) + self.slack_records;
        let replace = self.broken || self.records + records.len() as u64 > bound;
        // Until it is known that all went well: the medium may panic.
        self.broken = true;
        if replace { self.replace(table, records) } else { self.append(records) }?;
        self.broken = false;
        Ok(())
    }

    /// Says that the directory is left in order. The next record that is appended takes the mark's place.
    pub(crate) fn mark_clean(&mut self) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        full::write_all(&*self.file, self.end(), &Record::CLEAN.encode(self.header.journal_id))?;
        self.file.sync_data()
    }

    fn end(&self) -> u64 {
        HEADER_BYTES as u64 + self.records * RECORD_BYTES as u64
    }

    fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(records.len() * RECORD_BYTES);
        for record in records {
            bytes.extend_from_slice(&record.encode(self.header.journal_id));
        }
        full::write_all(&*self.file, self.end(), &bytes)?;
        self.file.sync_data()?;
        self.records += records.len() as u64;
        Ok(())
    }

    fn replace(&mut self, table: &Mutex<Table>, records: &[Record]) -> io::Result<()> {
        (self.file, self.records) = write_snapshot(&*self.medium, &mut self.header, table, records)?;
        self.compactions += 1;
        Ok(())
    }
}

/// Writes what is durable, and `records`, to a new file, and puts it in the journal's place. The old journal stays
/// until the new one is complete and synced.
fn write_snapshot(
    medium: &dyn Medium,
    header: &mut Header,
    table: &Mutex<Table>,
    records: &[Record],
) -> io::Result<(Arc<dyn BlockFile>, u64)> {
    let file = medium.open(JOURNAL_TEMP_FILE, OpenFile { create: true, truncate: true, direct: false })?;
    header.journal_id = RandomState::new().hash_one(std::process::id());
    full::write_all(&*file, 0, &header.encode())?;
    let mut written = 0;
    let mut write = |records: &[Record]| {
        let lasting = records.iter().filter(|record| record.state != RecordState::Free);
        let bytes: Vec<u8> = lasting.flat_map(|record| record.encode(header.journal_id)).collect();
        let at = HEADER_BYTES as u64 + written * RECORD_BYTES as u64;
        written += (bytes.len() / RECORD_BYTES) as u64;
        full::write_all(&*file, at, &bytes)
    };
    let num_slots = table.lock().num_slots() as usize;
    let mut chunk = Vec::with_capacity(SNAPSHOT_SLOTS);
    for from in (0..num_slots).step_by(SNAPSHOT_SLOTS) {
        chunk.clear();
        table.lock().durable_records(from, SNAPSHOT_SLOTS, &mut chunk);
        write(&chunk)?;
    }
    write(records)?;
    file.sync_data()?;
    medium.rename(JOURNAL_TEMP_FILE, JOURNAL_FILE)?;
    medium.sync_dir()?;
    Ok((file, written))
}
