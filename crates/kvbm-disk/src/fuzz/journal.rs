//! A journal of unknown history, beside slots of which nothing is said.

use super::input;
use crate::config::{DiskConfig, EngineMode};
use crate::fault::{JOURNAL_FILE, JOURNAL_TEMP_FILE, SLOT_FILE, SimMedium};
use crate::journal::{Journal, ReplayError, Replayed, replay};
use crate::medium::{Medium, OpenFile};
use crate::open::{Opened, blocks_by_age, open};
use crate::record::{HEADER_BYTES, Header, Record, RecordError, RecordState, record_bytes};
use crate::recorded_slots::{RecordedSlots, SlotRecords};
use crate::seal::{Recorded, Seal};
use crate::slot_table::{Content, SlotTable};
use crate::{Dropped, FormatError, Recovered, RecoveredSlot};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Slots and bytes of a block of the largest directory that is opened: what it takes is zeroed for
/// every input.
const MOST_SLOTS: u32 = 16;
const MOST_BYTES: u64 = 8192;
/// Bytes of the slot file that is found: fewer than those slots take.
const SLOT_FILE_BYTES: usize = 10 * 4096 + 1;
/// Slots of a table that is read without opening.
const MOST_READ: u32 = 64;

/// What is read of a journal is what `docs/formats.md` says, written again it is the same, and a
/// directory that it opens keeps what is done there. For what the input says see
/// [`input::journal`].
pub fn journal(input: &[u8]) {
    let bytes = input::journal(input);
    let seal = input::seal(&bytes);
    let header = match read(&bytes, &seal) {
        Ok((replayed, table)) => {
            is_what_the_page_says(&bytes, &replayed, &table, &seal);
            let header = replayed.header.clone();
            is_written_and_read_again(&header, table, &seal);
            Some(header)
        }
        Err(ReplayError::Format(error)) => {
            assert!(
                !error.to_string().is_empty()
                    && Header::decode(&bytes, bytes.len() as u64, &seal) == Err(error)
            );
            None
        }
        Err(ReplayError::Io(error)) => panic!("a medium without faults: {error}"),
    };
    is_opened_or_left_alone(&bytes, header.as_ref(), input.len());
}

fn medium_with(journal: &[u8]) -> SimMedium {
    let medium = SimMedium::new();
    medium.edit(JOURNAL_FILE, |bytes| bytes.extend_from_slice(journal));
    medium
}

fn read_from(medium: &SimMedium, seal: &Seal) -> Result<(Replayed, SlotTable), ReplayError> {
    let file = medium.open(JOURNAL_FILE, OpenFile::default())?;
    let (sparse_replayed, sparse) = replay(&*file, seal, |header| {
        Ok::<_, ReplayError>(RecordedSlots::new(header.num_slots.min(MOST_READ)))
    })?;
    let (replayed, table) =
        replay(&*file, seal, |header| Ok::<_, ReplayError>(SlotTable::new(header.num_slots.min(MOST_READ))))?;
    let blocks = SlotRecords::blocks(&sparse).map(|(slot, generation, content)| (slot, generation, *content));
    let sparse = (blocks.collect(), sparse.quarantined().collect());
    assert_eq!((sparse, sparse_replayed.dropped), (held(&table), replayed.dropped), "both readers agree");
    Ok((replayed, table))
}

fn read(journal: &[u8], seal: &Seal) -> Result<(Replayed, SlotTable), ReplayError> {
    read_from(&medium_with(journal), seal)
}

type Held = (Vec<(BlockId, u64, Content)>, Vec<BlockId>);

/// Blocks and quarantined slots.
fn held(table: &SlotTable) -> Held {
    let blocks = table.blocks().map(|(slot, generation, content)| (slot, generation, *content));
    (blocks.collect(), table.quarantined_slots())
}

/// What the records come to, one after the other.
struct Expected {
    dropped: Dropped,
    clean: bool,
    records: u64,
    slots: BTreeMap<u32, Record>,
}

fn read_records(bytes: &[u8], header: &Header, seal: &Seal, most_slots: u32) -> Expected {
    let each = record_bytes(header.encrypted);
    let records = bytes[HEADER_BYTES..].chunks_exact(each);
    let read: Vec<_> = records.clone().map(|bytes| Record::decode(header.journal_id, bytes, seal)).collect();
    let intact = read.iter().rposition(|record| *record != Err(RecordError::Checksum));
    let whole = intact.map_or(0, |last| last + 1);
    let torn = bytes.len() - HEADER_BYTES - whole * each;
    let clean = torn == 0 && whole > 0 && read[whole - 1] == Ok(Record::CLEAN);
    let mut expected = Expected {
        dropped: Dropped { torn_tail_bytes: torn as u64, ..Dropped::default() },
        clean,
        records: whole as u64 - u64::from(clean),
        slots: BTreeMap::new(),
    };
    for (record, bytes) in read[..whole].iter().zip(records) {
        match record {
            Err(RecordError::Checksum) => expected.dropped.damaged_records += 1,
            Err(RecordError::Invalid) => expected.dropped.invalid_records += 1,
            Ok(record) => {
                assert_eq!(record.encode(header.journal_id, seal), *bytes, "a record is all that it says");
                expected.take(record, header.block_bytes);
            }
        }
    }
    let beyond = expected.slots.split_off(&most_slots);
    let is_block = |record: &&Record| matches!(record.state, RecordState::Present { .. });
    expected.dropped.beyond_capacity = beyond.values().filter(is_block).count() as u64;
    expected
}

impl Expected {
    fn take(&mut self, record: &Record, block_bytes: u64) {
        match record.state {
            RecordState::Clean => {}
            RecordState::Present { bytes, .. } if bytes == 0 || bytes > block_bytes => {
                self.dropped.invalid_records += 1;
            }
            _ => {
                let known = self.slots.get(&record.slot.0).map_or(0, |known| known.generation);
                if record.generation >= known {
                    self.slots.insert(record.slot.0, *record);
                }
            }
        }
    }

    fn held(&self) -> Held {
        let block = |record: &Record| match record.state {
            RecordState::Present { identity, recorded, bytes } => {
                Some((record.slot, record.generation, Content { identity, recorded, bytes }))
            }
            _ => None,
        };
        let quarantined = self.slots.values().filter(|record| record.state == RecordState::Quarantined);
        (self.slots.values().filter_map(block).collect(), quarantined.map(|record| record.slot).collect())
    }
}

fn is_what_the_page_says(bytes: &[u8], replayed: &Replayed, table: &SlotTable, seal: &Seal) {
    // Not `assert_eq`: it would print all of both.
    assert!(replayed.header.encode(seal) == bytes[..HEADER_BYTES], "a header is all that it says");
    let expected = read_records(bytes, &replayed.header, seal, table.num_slots());
    assert_eq!(
        (replayed.dropped, replayed.clean, replayed.records),
        (expected.dropped, expected.clean, expected.records)
    );
    assert_eq!(held(table), expected.held());
    assert_eq!(
        replayed.end(),
        (HEADER_BYTES + record_bytes(replayed.header.encrypted) * expected.records as usize) as u64
    );
}

/// As a snapshot, and then with the mark of a shutdown.
fn is_written_and_read_again(header: &Header, table: SlotTable, seal: &Seal) {
    let (medium, before) = (SimMedium::new(), held(&table));
    let records = (before.0.len() + before.1.len()) as u64;
    let mut journal = created(Journal::create(seam(&medium), header, seal, 0, &Mutex::new(table)));
    for closed in [false, true] {
        if closed {
            created(journal.mark_clean());
        }
        let (replayed, table) = created(read_from(&medium, seal));
        assert_eq!(held(&table), before, "a snapshot says what there is");
        assert_eq!((replayed.records, replayed.clean), (records, closed));
        assert_eq!(replayed.dropped, Dropped::default());
        assert_eq!(Header { journal_id: header.journal_id, ..replayed.header }, *header);
    }
}

/// What cannot fail over a medium without faults.
fn created<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("a medium without faults: {error}"))
}

fn seam(medium: &SimMedium) -> Arc<dyn Medium> {
    Arc::new(medium.clone())
}

/// Opens the directory as its header wants it, if that is not too large. `turn` says what is done
/// in it then.
fn is_opened_or_left_alone(bytes: &[u8], header: Option<&Header>, turn: usize) {
    let medium = medium_with(bytes);
    medium.edit(SLOT_FILE, |bytes| bytes.resize(SLOT_FILE_BYTES, 0));
    // Of a snapshot that was never completed.
    medium.edit(JOURNAL_TEMP_FILE, |temporary| temporary.extend_from_slice(bytes));
    let mut config = config_for(header, turn);
    config.key = input::key(bytes);
    config.encryption = input::is_encrypted(bytes).then(input::encryption);
    let fits = header.is_some_and(|header| {
        header.block_bytes == config.block_bytes && config.slot_stride() == Ok(header.slot_stride)
    });
    let decoded = Header::decode(bytes, bytes.len() as u64, &input::seal(bytes));
    match open(&config, &seam(&medium)) {
        Ok(opened) if matches!(decoded, Err(FormatError::Key { ours: Some(_), .. })) => {
            let records = (bytes.len() - HEADER_BYTES) / record_bytes(input::is_encrypted(bytes));
            let dropped = Dropped { other_key: records as u64, ..Dropped::default() };
            assert_eq!(opened.recovered, Recovered { dropped, clean: true, ..Recovered::default() });
        }
        Err(error) => {
            assert!(!fits && !error.to_string().is_empty(), "{error}");
            assert!(medium.bytes(JOURNAL_FILE) == bytes, "what is refused is left alone");
        }
        Ok(opened) => {
            assert!(fits, "another directory is refused");
            let expected =
                header.map(|header| read_records(bytes, header, &input::seal(bytes), config.num_slots));
            is_recovered(&opened, expected, config.block_bytes.next_multiple_of(4096));
            is_kept(opened, &config, &medium, turn);
        }
    }
}

fn config_for(header: Option<&Header>, turn: usize) -> DiskConfig {
    let (slots, bytes) = header.map_or((1, 1), |header| (header.num_slots, header.block_bytes));
    let namespace = header.map_or([0; 16], |header| header.namespace);
    let mut config = DiskConfig::new("", slots.clamp(1, MOST_SLOTS), bytes.clamp(1, MOST_BYTES), namespace);
    config.geometry = header.map_or_else(Vec::new, |header| header.geometry.clone());
    config.engine = EngineMode::Buffered;
    config.compact_slack_records = (turn % 3) as u64;
    config
}

/// All that the records say, but blocks whose bytes the file does not have, and the older ones of a
/// block in two slots.
fn is_recovered(opened: &Opened, expected: Option<Expected>, stride: u64) {
    let Some(expected) = expected else { panic!("opened without a header") };
    let (mut blocks, quarantined) = expected.held();
    let has_bytes = |slot: BlockId, bytes: u64| u64::from(slot.0) * stride + bytes <= SLOT_FILE_BYTES as u64;
    let all = blocks.len();
    blocks.retain(|(slot, _, content)| has_bytes(*slot, content.bytes));
    let without_bytes = (all - blocks.len()) as u64;
    // There is no key file.
    let without_key = if opened.keyring.is_some() { std::mem::take(&mut blocks).len() as u64 } else { 0 };
    blocks.sort_by_key(|(slot, generation, _)| (*generation, *slot));
    let newest: Vec<RecoveredSlot> = (0..blocks.len())
        .filter(|&at| {
            let key = |block: &(BlockId, u64, Content)| {
                (block.2.identity.namespace, block.2.identity.group, block.2.identity.hash)
            };
            blocks[at + 1..].iter().all(|newer| key(newer) != key(&blocks[at]))
        })
        .map(|at| {
            let (slot, _, Content { identity, recorded, bytes }) = blocks[at];
            RecoveredSlot { slot, identity, checksum: recorded.checksum(), bytes }
        })
        .collect();
    let duplicates = (blocks.len() - newest.len()) as u64;
    assert_eq!(
        opened.recovered.dropped,
        Dropped { duplicates, without_bytes, without_key, ..expected.dropped }
    );
    assert_eq!((&opened.recovered.blocks, &opened.recovered.quarantined), (&newest, &quarantined));
    assert_eq!(opened.recovered.clean, expected.clean);
}

/// A few changes, committed as the engine does it; then the next opening.
fn is_kept(opened: Opened, config: &DiskConfig, medium: &SimMedium, turn: usize) {
    let Opened { table, mut journal, recovered, .. } = opened;
    change(&mut table.lock(), &recovered.blocks, turn, config);
    loop {
        let (taken, records) = table.lock().take_dirty(1 + turn % 5);
        if taken == 0 {
            break;
        }
        created(journal.persist(&table, &records));
        table.lock().mark_recorded(&records);
    }
    let closed = turn.is_multiple_of(2);
    if closed {
        created(journal.mark_clean());
    }
    let again = created(open(config, &seam(medium))).recovered;
    if config.encryption.is_some() {
        // What was changed by hand has no key either.
        assert_eq!((again.blocks.len(), again.quarantined), (0, table.lock().quarantined_slots()));
        return;
    }
    let table = table.lock();
    assert_eq!(table.counts().0, table.counts().1, "what was committed is durable");
    assert_eq!((again.blocks, again.quarantined), (blocks_by_age(&*table), table.quarantined_slots()));
    assert_eq!((again.clean, again.dropped.torn_tail_bytes), (closed, 0));
}

/// The first block goes, the slot of the second is bad, the oldest that stays is replaced.
fn change(table: &mut SlotTable, blocks: &[RecoveredSlot], turn: usize, config: &DiskConfig) {
    if let Some(block) = blocks.first().filter(|_| turn & 4 != 0) {
        table.release(block.slot);
    }
    if let Some(block) = blocks.get(1).filter(|_| turn & 8 != 0) {
        table.quarantine(block.slot);
    }
    let identity = BlockIdentity {
        namespace: NamespaceId(1),
        group: GroupId(2),
        hash: SequenceHash::from_bytes([0xE7; 16]),
        parent: None,
        position: 0,
    };
    let is_new = blocks.iter().all(|block| block.identity.hash != identity.hash);
    let slot = blocks.get(2).map_or(BlockId(0), |block| block.slot);
    if is_new && table.begin_write(slot).is_ok() {
        let content = Content { identity, recorded: Recorded::sum(7), bytes: config.block_bytes };
        created(table.end_write(slot, Some(content)));
    }
}
