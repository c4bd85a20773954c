//! The slots that a journal names, for readers that open no engine.
//!
//! Memory grows with the number of records, not with the slot numbers in them. A journal is
//! untrusted, and a record of 80 bytes may name any of 4 billion slots.

use crate::record::{Record, RecordState};
use crate::slot_table::{Content, SlotTable};
use kvbm_plan::BlockId;
use std::collections::BTreeMap;

/// What a replay fills and a recovery prunes.
pub(crate) trait SlotRecords {
    /// Slots that a record may name.
    fn max_slots(&self) -> u32;
    /// Takes what the journal says about a slot: the highest generation wins, of equal ones the
    /// later.
    fn recover(&mut self, record: &Record);
    /// Every block with its generation, in slot order.
    fn blocks(&self) -> impl Iterator<Item = (BlockId, u64, &Content)>;
    /// The block in a slot, and its generation.
    fn block(&self, slot: BlockId) -> Option<(u64, &Content)>;
    /// Frees a slot that holds a block.
    fn release(&mut self, slot: BlockId);
}

impl SlotRecords for SlotTable {
    fn max_slots(&self) -> u32 {
        self.num_slots()
    }

    fn recover(&mut self, record: &Record) {
        Self::recover(self, record);
    }

    fn blocks(&self) -> impl Iterator<Item = (BlockId, u64, &Content)> {
        Self::blocks(self)
    }

    fn block(&self, slot: BlockId) -> Option<(u64, &Content)> {
        Self::block(self, slot)
    }

    fn release(&mut self, slot: BlockId) {
        Self::release(self, slot);
    }
}

/// The state of one slot by its newest record.
#[derive(Debug)]
enum RecordedState {
    Free,
    Block(Content),
    Quarantined,
}

/// The newest record of each slot that a journal names.
#[derive(Debug)]
pub(crate) struct RecordedSlots {
    max_slots: u32,
    slots: BTreeMap<BlockId, (u64, RecordedState)>,
}

impl RecordedSlots {
    pub(crate) fn new(max_slots: u32) -> Self {
        Self { max_slots, slots: BTreeMap::new() }
    }

    pub(crate) fn quarantined(&self) -> impl Iterator<Item = BlockId> {
        let is_quarantined = |state: &RecordedState| matches!(state, RecordedState::Quarantined);
        self.slots.iter().filter(move |(_, (_, state))| is_quarantined(state)).map(|(slot, _)| *slot)
    }
}

impl SlotRecords for RecordedSlots {
    fn max_slots(&self) -> u32 {
        self.max_slots
    }

    fn recover(&mut self, record: &Record) {
        let state = match record.state {
            RecordState::Present { identity, recorded, bytes } => {
                RecordedState::Block(Content { identity, recorded, bytes })
            }
            RecordState::Free | RecordState::Clean => RecordedState::Free,
            RecordState::Quarantined => RecordedState::Quarantined,
        };
        let known = self.slots.entry(record.slot).or_insert((0, RecordedState::Free));
        if record.generation >= known.0 {
            *known = (record.generation, state);
        }
    }

    fn blocks(&self) -> impl Iterator<Item = (BlockId, u64, &Content)> {
        self.slots.iter().filter_map(|(slot, (generation, state))| match state {
            RecordedState::Block(content) => Some((*slot, *generation, content)),
            RecordedState::Free | RecordedState::Quarantined => None,
        })
    }

    fn block(&self, slot: BlockId) -> Option<(u64, &Content)> {
        match self.slots.get(&slot)? {
            (generation, RecordedState::Block(content)) => Some((*generation, content)),
            _ => None,
        }
    }

    fn release(&mut self, slot: BlockId) {
        if let Some((_, state @ RecordedState::Block(_))) = self.slots.get_mut(&slot) {
            *state = RecordedState::Free;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation that makes it fail: a vector indexed by slot.
    #[test]
    fn a_record_of_the_last_slot_takes_the_memory_of_one_record() {
        let mut slots = RecordedSlots::new(u32::MAX);
        let last = BlockId(u32::MAX - 1);
        slots.recover(&Record { slot: last, generation: 2, state: RecordState::Quarantined });
        slots.recover(&Record { slot: last, generation: 1, state: RecordState::Free });
        assert_eq!(slots.slots.len(), 1);
        assert_eq!(slots.quarantined().collect::<Vec<_>>(), [last]);
    }
}
