//! The state of every slot, and which slots changed since the last commit.

use crate::record::{Record, RecordState};
use crate::seal::Recorded;
use crate::{OpError, SlotCorruption};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, BlockIdentity};
use std::collections::VecDeque;

/// A block as recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) identity: BlockIdentity,
    pub(crate) recorded: Recorded,
    pub(crate) bytes: u64,
}

/// What a read knows of the slot that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadPermit {
    /// What the bytes must have.
    pub(crate) recorded: Recorded,
    generation: u64,
    unproven: bool,
}

/// How a write ends: a slot can be released or quarantined while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteEnd {
    AsWritten,
    Released,
    Quarantined,
}

/// Whether a block survives power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durability {
    Durable,
    /// The journal does not record it.
    Pending,
    /// The sync of its bytes failed. It becomes durable only after it is written again.
    Unsynced,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    Writing {
        end: WriteEnd,
        /// A sync failed meanwhile. It may have lost bytes that this write had already moved.
        unsynced: bool,
    },
    Present {
        content: Content,
        durability: Durability,
    },
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "marks of a slot that come and go by themselves, in bytes that it has"
)]
struct Slot {
    /// Grows with every change of state, over all slots.
    generation: u64,
    state: SlotState,
    /// Reads that run.
    readers: u32,
    /// In the dirty queue.
    dirty: bool,
    /// In the queue of slots whose bytes could not be synced.
    renewable: bool,
    /// The journal may say that the slot holds a block: a change must be written there.
    recorded: bool,
    /// Recovered after a crash and not read since: the slot may have been overwritten when the
    /// process ended.
    unproven: bool,
}

impl Slot {
    const FREE: Self = Self {
        generation: 0,
        state: SlotState::Free,
        readers: 0,
        dirty: false,
        renewable: false,
        recorded: false,
        unproven: false,
    };
}

/// All slots. Guarded by one leaf lock; every method is short and calls nothing outside.
#[derive(Debug)]
pub(crate) struct SlotTable {
    slots: Vec<Slot>,
    last_generation: u64,
    dirty: VecDeque<u32>,
    /// Slots ever queued as dirty: what a flush has to wait for.
    dirtied: u64,
    /// Slots whose bytes could not be synced, and some that held such a block before.
    renewable: VecDeque<u32>,
    present: u64,
    durable: u64,
    unsynced: u64,
    quarantined: u64,
}

impl SlotTable {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            slots: vec![Slot::FREE; num_slots as usize],
            last_generation: 0,
            dirty: VecDeque::new(),
            dirtied: 0,
            renewable: VecDeque::new(),
            present: 0,
            durable: 0,
            unsynced: 0,
            quarantined: 0,
        }
    }

    /// Takes what the journal says about a slot; the highest generation wins, of equal ones the
    /// later.
    pub(crate) fn recover(&mut self, record: &Record) {
        let Some(slot) = self.slots.get_mut(record.slot.index()) else { return };
        if record.generation < slot.generation {
            return;
        }
        slot.generation = record.generation;
        self.last_generation = self.last_generation.max(record.generation);
        let state = match record.state {
            RecordState::Present { identity, recorded, bytes } => SlotState::Present {
                content: Content { identity, recorded, bytes },
                durability: Durability::Durable,
            },
            RecordState::Free | RecordState::Clean => SlotState::Free,
            RecordState::Quarantined => SlotState::Quarantined,
        };
        let recorded = matches!(state, SlotState::Present { .. });
        self.set_state(record.slot, state);
        self.slots[record.slot.index()].recorded = recorded;
    }

    /// The last process ended without a shutdown: any slot may have been half overwritten.
    pub(crate) fn distrust(&mut self) {
        for slot in &mut self.slots {
            slot.unproven = matches!(slot.state, SlotState::Present { .. });
        }
    }

    /// No write runs, and the journal has a record of every change.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.dirty.is_empty()
            && !self.slots.iter().any(|slot| matches!(slot.state, SlotState::Writing { .. }))
    }

    /// Every block with its generation, in slot order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (BlockId, u64, &Content)> + '_ {
        (0..self.num_slots()).map(BlockId).filter_map(|slot| {
            let (generation, content) = self.block(slot)?;
            Some((slot, generation, content))
        })
    }

    /// The block in a slot, and its generation.
    pub(crate) fn block(&self, slot: BlockId) -> Option<(u64, &Content)> {
        match self.slots.get(slot.index())? {
            Slot { generation, state: SlotState::Present { content, .. }, .. } => {
                Some((*generation, content))
            }
            _ => None,
        }
    }

    /// The first block in slots `from .. from + count`.
    pub(crate) fn next_block(&self, from: u32, count: u32) -> Option<(BlockId, u64, Content)> {
        (from..from.saturating_add(count).min(self.num_slots())).map(BlockId).find_map(|slot| {
            let (generation, content) = self.block(slot)?;
            Some((slot, generation, *content))
        })
    }

    #[cfg(any(test, kvbm_sim))]
    pub(crate) fn is_quarantined(&self, slot: BlockId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.state == SlotState::Quarantined)
    }

    pub(crate) fn quarantined_slots(&self) -> Vec<BlockId> {
        let is_quarantined = |(index, slot): (usize, &Slot)| {
            (slot.state == SlotState::Quarantined).then_some(BlockId(index as u32))
        };
        self.slots.iter().enumerate().filter_map(is_quarantined).collect()
    }

    /// (present, durable, quarantined) slots.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        (self.present, self.durable, self.quarantined)
    }

    /// The generation of the last change.
    pub(crate) fn newest(&self) -> u64 {
        self.last_generation
    }

    pub(crate) fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Begins a write. The slot's former block is gone, its bytes are undefined.
    pub(crate) fn begin_write(&mut self, slot: BlockId) -> Result<(), OpError> {
        let entry = self.entry(slot)?;
        match entry.state {
            SlotState::Quarantined => return Err(OpError::Quarantined { slot }),
            SlotState::Writing { .. } => return Err(OpError::Busy { slot }),
            SlotState::Free | SlotState::Present { .. } if entry.readers > 0 => {
                return Err(OpError::Busy { slot });
            }
            SlotState::Free | SlotState::Present { .. } => {}
        }
        self.change(slot, SlotState::Writing { end: WriteEnd::AsWritten, unsynced: false });
        Ok(())
    }

    /// The write is over: `Some` if all bytes were written. An error if the slot was taken away
    /// meanwhile.
    pub(crate) fn end_write(&mut self, slot: BlockId, written: Option<Content>) -> Result<(), OpError> {
        let SlotState::Writing { end, unsynced } = self.entry(slot)?.state else {
            return Err(OpError::Busy { slot });
        };
        let durability = if unsynced { Durability::Unsynced } else { Durability::Pending };
        let (state, result) = match (end, written) {
            (WriteEnd::Quarantined, _) => (SlotState::Quarantined, Err(OpError::Quarantined { slot })),
            (WriteEnd::Released, _) => (SlotState::Free, Err(OpError::Released { slot })),
            (WriteEnd::AsWritten, None) => (SlotState::Free, Ok(())),
            (WriteEnd::AsWritten, Some(content)) => (SlotState::Present { content, durability }, Ok(())),
        };
        self.change(slot, state);
        result
    }

    /// Takes a slot for a read, if it holds exactly this block. The slot is not overwritten until
    /// [`SlotTable::end_read`].
    pub(crate) fn begin_read(
        &mut self,
        slot: BlockId,
        identity: BlockIdentity,
        requested: u64,
    ) -> Result<ReadPermit, OpError> {
        let entry = self.entry(slot)?;
        let content = match entry.state {
            SlotState::Present { content, .. } => content,
            SlotState::Quarantined => return Err(OpError::Quarantined { slot }),
            SlotState::Free | SlotState::Writing { .. } => return Err(OpError::Missing { slot }),
        };
        if content.identity != identity {
            let cause = SlotCorruption::WrongIdentity { found: content.identity };
            return Err(OpError::Corrupt { slot, identity, cause });
        }
        if content.bytes != requested {
            let cause = SlotCorruption::WrongLength { recorded: content.bytes, requested };
            return Err(OpError::Corrupt { slot, identity, cause });
        }
        entry.readers += 1;
        let Slot { generation, unproven, .. } = *entry;
        Ok(ReadPermit { recorded: content.recorded, generation, unproven })
    }

    pub(crate) fn end_read(&mut self, slot: BlockId) {
        if let Ok(entry) = self.entry(slot) {
            entry.readers = entry.readers.saturating_sub(1);
        }
    }

    /// The slot was read in full and holds what its record says.
    pub(crate) fn prove(&mut self, slot: BlockId) {
        if let Ok(entry) = self.entry(slot) {
            entry.unproven = false;
        }
    }

    /// A read found wrong bytes. Where a write may have been cut short by the end of the last
    /// process, the slot becomes free, and this returns `true`. Otherwise it is quarantined.
    pub(crate) fn refute(&mut self, slot: BlockId) -> bool {
        let unproven = self.entry(slot).is_ok_and(|entry| std::mem::take(&mut entry.unproven));
        if unproven {
            self.release(slot);
        } else {
            self.quarantine(slot);
        }
        unproven
    }

    /// [`SlotTable::refute`] for a read that holds the slot. If the slot changed meanwhile, another
    /// read has decided already and may have freed it: nothing to do.
    pub(crate) fn refute_taken(&mut self, slot: BlockId, taken: ReadPermit) -> bool {
        match self.entry(slot) {
            Ok(entry) if entry.generation != taken.generation => {
                taken.unproven && entry.state != SlotState::Quarantined
            }
            _ => self.refute(slot),
        }
    }

    /// Releases the slot after a read that took it and found nothing there, unless it has changed
    /// since.
    pub(crate) fn release_taken(&mut self, slot: BlockId, taken: ReadPermit) {
        if self.block(slot).is_some_and(|(generation, _)| generation == taken.generation) {
            self.release(slot);
        }
    }

    pub(crate) fn release(&mut self, slot: BlockId) {
        match self.entry(slot).map(|entry| entry.state) {
            Ok(SlotState::Present { .. }) => self.change(slot, SlotState::Free),
            Ok(SlotState::Writing { end: WriteEnd::AsWritten, unsynced }) => {
                self.set_state(slot, SlotState::Writing { end: WriteEnd::Released, unsynced });
            }
            _ => {}
        }
    }

    pub(crate) fn quarantine(&mut self, slot: BlockId) {
        match self.entry(slot).map(|entry| entry.state) {
            Ok(SlotState::Free | SlotState::Present { .. }) => self.change(slot, SlotState::Quarantined),
            Ok(SlotState::Writing { unsynced, .. }) => {
                self.set_state(slot, SlotState::Writing { end: WriteEnd::Quarantined, unsynced });
            }
            _ => {}
        }
    }

    fn entry(&mut self, slot: BlockId) -> Result<&mut Slot, OpError> {
        let num_slots = self.num_slots();
        self.slots.get_mut(slot.index()).ok_or(OpError::NoSuchSlot { slot, num_slots })
    }

    /// Changes the state of `slot`, which exists, and queues it for the journal.
    fn change(&mut self, slot: BlockId, state: SlotState) {
        self.last_generation = self.last_generation.saturating_add(1);
        self.slots[slot.index()].generation = self.last_generation;
        self.slots[slot.index()].unproven = false;
        self.set_state(slot, state);
        self.mark_dirty(slot);
    }

    fn set_state(&mut self, slot: BlockId, state: SlotState) {
        let old = std::mem::replace(&mut self.slots[slot.index()].state, state);
        for (state, up) in [(old, false), (state, true)] {
            let step = |count: &mut u64| *count = if up { *count + 1 } else { count.saturating_sub(1) };
            match state {
                SlotState::Present { durability, .. } => {
                    step(&mut self.present);
                    match durability {
                        Durability::Durable => step(&mut self.durable),
                        Durability::Unsynced => step(&mut self.unsynced),
                        Durability::Pending => {}
                    }
                }
                SlotState::Quarantined => step(&mut self.quarantined),
                SlotState::Free | SlotState::Writing { .. } => {}
            }
        }
        let is_renewable = matches!(state, SlotState::Present { durability: Durability::Unsynced, .. });
        if is_renewable && !std::mem::replace(&mut self.slots[slot.index()].renewable, true) {
            self.renewable.push_back(slot.0);
        }
    }

    fn mark_dirty(&mut self, slot: BlockId) {
        let entry = &mut self.slots[slot.index()];
        if !std::mem::replace(&mut entry.dirty, true) {
            self.dirty.push_back(slot.0);
            self.dirtied += 1;
        }
    }
}

/// The committer's part.
impl SlotTable {
    pub(crate) fn dirty(&self) -> usize {
        self.dirty.len()
    }

    pub(crate) fn dirtied(&self) -> u64 {
        self.dirtied
    }

    /// Blocks whose bytes could not be synced and were not written again since.
    pub(crate) fn unsynced(&self) -> u64 {
        self.unsynced
    }

    /// A block whose bytes could not be synced, with its generation. The slot is not overwritten
    /// until [`SlotTable::end_renewal`].
    pub(crate) fn begin_renewal(&mut self) -> Option<(BlockId, u64, Content)> {
        while let Some(index) = self.renewable.pop_front() {
            let slot = &mut self.slots[index as usize];
            slot.renewable = false;
            if let SlotState::Present { content, durability: Durability::Unsynced } = slot.state {
                slot.readers += 1;
                return Some((BlockId(index), slot.generation, content));
            }
        }
        None
    }

    /// Ends a rewrite: the block waits for its record, or is given up. Whether the slot still held
    /// the block.
    pub(crate) fn end_renewal(&mut self, slot: BlockId, generation: u64, written: bool) -> bool {
        self.end_read(slot);
        let Some((_, &content)) = self.block(slot).filter(|(now, _)| *now == generation) else {
            return false;
        };
        let renewed = SlotState::Present { content, durability: Durability::Pending };
        self.change(slot, if written { renewed } else { SlotState::Free });
        true
    }

    /// Takes up to `max` dirty slots, oldest first: their number, and the records to write.
    pub(crate) fn take_dirty(&mut self, max: usize) -> (u64, Vec<Record>) {
        let count = self.dirty.len().min(max);
        let mut records = Vec::with_capacity(count);
        for index in self.dirty.drain(..count) {
            let slot = &mut self.slots[index as usize];
            slot.dirty = false;
            let state = match slot.state {
                SlotState::Present { durability: Durability::Durable, .. } => continue,
                SlotState::Present {
                    content: Content { identity, recorded, bytes },
                    durability: Durability::Pending,
                } => RecordState::Present { identity, recorded, bytes },
                SlotState::Quarantined => RecordState::Quarantined,
                // The journal still names a former block of the slot.
                _ if slot.recorded && !planted(Planted::SkipRemovalRecord) => RecordState::Free,
                _ => continue,
            };
            records.push(Record { slot: BlockId(index), generation: slot.generation, state });
        }
        (count as u64, records)
    }

    /// These records are synced.
    pub(crate) fn mark_recorded(&mut self, records: &[Record]) {
        for record in records {
            let is_block = matches!(record.state, RecordState::Present { .. });
            let slot = &mut self.slots[record.slot.index()];
            slot.recorded = is_block;
            if is_block
                && slot.generation == record.generation
                && let SlotState::Present { content, durability: Durability::Pending } = slot.state
            {
                self.set_state(record.slot, SlotState::Present { content, durability: Durability::Durable });
            }
        }
    }

    /// The bytes of these blocks could not be synced. Returns the records to write instead: the
    /// slots' former blocks are gone.
    pub(crate) fn give_up(&self, unsynced: &[Record]) -> Vec<Record> {
        let recorded = unsynced.iter().filter(|record| self.slots[record.slot.index()].recorded);
        recorded.map(|record| Record { state: RecordState::Free, ..*record }).collect()
    }

    /// The sync of one file failed; `lies_there` picks its slots. The sync may have lost any byte
    /// written before, and the next one would not report it. So no block of slots `from .. from +
    /// count` in that file becomes durable that is not yet.
    pub(crate) fn distrust_unsynced(&mut self, from: u32, count: u32, lies_there: impl Fn(BlockId) -> bool) {
        let end = from.saturating_add(count).min(self.num_slots());
        for slot in (from..end).map(BlockId).filter(|slot| lies_there(*slot)) {
            match self.slots[slot.index()].state {
                SlotState::Writing { end, .. } => {
                    self.set_state(slot, SlotState::Writing { end, unsynced: true });
                }
                SlotState::Present { content, durability: Durability::Pending } => {
                    self.set_state(slot, SlotState::Present { content, durability: Durability::Unsynced });
                }
                _ => {}
            }
        }
    }

    /// These records could not be written: queue their slots again. The journal may have some of
    /// them all the same. A block that goes before they are written again needs a record for that.
    pub(crate) fn put_back(&mut self, records: &[Record]) {
        for record in records {
            let is_block = matches!(record.state, RecordState::Present { .. });
            self.slots[record.slot.index()].recorded |= is_block;
            self.mark_dirty(record.slot);
        }
    }

    /// What a snapshot says about slots `from .. from + count`: what is durable already.
    pub(crate) fn durable_records(&self, from: usize, count: usize, into: &mut Vec<Record>) {
        for (index, slot) in self.slots.iter().enumerate().skip(from).take(count) {
            let state = match slot.state {
                SlotState::Present {
                    content: Content { identity, recorded, bytes },
                    durability: Durability::Durable,
                } => RecordState::Present { identity, recorded, bytes },
                SlotState::Quarantined => RecordState::Quarantined,
                _ => continue,
            };
            into.push(Record { slot: BlockId(index as u32), generation: slot.generation, state });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};

    /// A device whose syncs fail, and slots that are used again and again.
    #[test]
    fn a_slot_is_queued_once_to_be_written_again() {
        let (namespace, group, hash) = (NamespaceId(0), GroupId(0), SequenceHash::from_bytes([1; 16]));
        let identity = BlockIdentity { namespace, group, hash, parent: None, position: 0 };
        let content = Content { identity, recorded: Recorded::sum(0), bytes: 1 };
        let (mut table, slot) = (SlotTable::new(2), BlockId(1));
        for _ in 0..10 {
            table.begin_write(slot).unwrap();
            table.distrust_unsynced(0, 2, |_| true);
            table.end_write(slot, Some(content)).unwrap();
            assert_eq!((table.unsynced(), table.renewable.len()), (1, 1));
        }
        let (renewed, generation, _) = table.begin_renewal().unwrap();
        assert_eq!((renewed, table.begin_renewal().is_none()), (slot, true));
        assert!(table.end_renewal(slot, generation, true));
        assert_eq!((table.unsynced(), table.renewable.len()), (0, 0));
    }
}
