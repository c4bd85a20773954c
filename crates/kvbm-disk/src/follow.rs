//! Opening directories that another engine writes, to read what it wrote there. Nothing is changed.

use crate::keyring::Keyring;
use crate::medium::{Medium, OpenFile};
use crate::open::{Files, Found, blocks_by_age, directly, drop_duplicates, failed, header_of};
use crate::open::{drop_without_key, probe_reading, read_journal, seal_of, without_bytes};
use crate::slot_file::SlotFile;
use crate::slot_table::SlotTable;
use crate::stripes::{self, Stripes};
use crate::{DiskConfig, OpenError, Recovered};
use parking_lot::Mutex;
use std::sync::Arc;

/// What a following engine starts from.
#[derive(Debug)]
pub(crate) struct Followed {
    pub(crate) slots: SlotFile,
    pub(crate) table: Mutex<SlotTable>,
    pub(crate) recovered: Recovered,
    pub(crate) keyring: Option<Keyring>,
}

/// Reads the journal, which its writer may go on with meanwhile: it only appends, or puts a
/// snapshot in the journal's place.
pub(crate) fn follow(config: &DiskConfig, medium: &Arc<dyn Medium>) -> Result<Followed, OpenError> {
    config.validate()?;
    let header = header_of(config)?;
    let seal = seal_of(config);
    // The writer puts a journal of its own in the place of one of another key.
    let Found::Journal(mut found) = read_journal(config, &header, &seal, &**medium)? else {
        return Err(OpenError::NoJournal { dir: config.dir.clone() });
    };
    let slots = open_slots(config, &**medium)?;
    let lost = without_bytes(&found.table, slots.stripes, &slots.lengths());
    for &slot in &lost {
        found.table.release(slot);
    }
    let mut dropped = found.replayed.dropped;
    dropped.without_bytes = lost.len() as u64;
    let place = (&config.namespace, &config.geometry[..]);
    let keyring = config.encryption.as_ref();
    let keyring = keyring.map(|keys| Keyring::follow(Arc::clone(medium), keys, place)).transpose()?;
    dropped.without_key = drop_without_key(&mut found.table, keyring.as_ref());
    dropped.duplicates = drop_duplicates(&mut found.table);
    // The writer may be writing to any slot since: what reads wrong is free then, and not damaged.
    found.table.distrust();
    let recovered = Recovered {
        blocks: blocks_by_age(&found.table),
        quarantined: found.table.quarantined_slots(),
        dropped,
        clean: found.replayed.clean,
    };
    Ok(Followed { slots, table: Mutex::new(found.table), recovered, keyring })
}

/// Opens the slot files as they are, directly if wanted and possible for all of them.
fn open_slots(config: &DiskConfig, medium: &dyn Medium) -> Result<SlotFile, OpenError> {
    let stride = config.slot_stride()?;
    let names = stripes::slot_files(config.num_dirs());
    let open =
        |name: &String| medium.open(name, OpenFile::default()).map_err(|error| failed("open", name, error));
    let mut files = names.iter().map(open).collect::<Result<Files, _>>()?;
    let direct = directly(config.engine, || open_direct(medium, &names))?.map(|(direct, alignment)| {
        files = direct;
        alignment
    });
    let (stripes, straight_bytes) = (Stripes::new(names.len(), stride), config.straight_bytes);
    let encrypted = config.encryption.is_some();
    Ok(SlotFile { files, stripes, stride, direct, preallocated: false, straight_bytes, encrypted })
}

/// The slot files opened for direct reads, and the alignment that all of them take, or why not.
fn open_direct(medium: &dyn Medium, names: &[String]) -> Result<(Files, u32), String> {
    let how = OpenFile { direct: true, ..OpenFile::default() };
    let open = |name: &String| medium.open(name, how).map_err(|error| format!("open with O_DIRECT: {error}"));
    let files: Files = names.iter().map(open).collect::<Result<_, _>>()?;
    let mut reason = String::new();
    for alignment in [512_u32, 4096] {
        match files.iter().try_for_each(|file| probe_reading(&**file, alignment as usize)) {
            Ok(()) => return Ok((files, alignment)),
            Err(error) => reason = format!("O_DIRECT at {alignment} bytes: {error}"),
        }
    }
    Err(reason)
}
