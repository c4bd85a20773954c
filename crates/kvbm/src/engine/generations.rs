//! Whose turn it is on a block of the engine's own memory.
//!
//! The engine reuses its block ids as it likes. A copy that was made while the block changed hands is worthless, so
//! each id carries a generation that goes up whenever its content may change, and a count of the transfers that
//! touch it right now.

use kvbm_plan::BlockId;
use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// One hold per block: what the block's generation was when a transfer began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) block: BlockId,
    generation: u32,
    writes: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    generation: u32,
    /// Transfers that touch the block; of these, such as write it.
    transfers: u32,
    writers: u32,
}

/// The engine's blocks.
#[derive(Debug)]
pub(crate) struct Generations {
    slots: Mutex<Vec<Slot>>,
    changed: Condvar,
}

/// An id beyond the engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("engine block {block} does not exist: the registered memory has {blocks} blocks")]
pub struct NoSuchBlock {
    /// The id given.
    pub block: BlockId,
    /// Blocks of the registered memory.
    pub blocks: u32,
}

impl Generations {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { slots: Mutex::new(vec![Slot::default(); blocks as usize]), changed: Condvar::new() }
    }

    /// Checks ids before anything else happens to them: they exist.
    pub(crate) fn check(&self, ids: &[BlockId]) -> Result<(), NoSuchBlock> {
        let blocks = self.slots.lock().len() as u32;
        match ids.iter().find(|id| id.0 >= blocks) {
            Some(&block) => Err(NoSuchBlock { block, blocks }),
            None => Ok(()),
        }
    }

    /// A transfer begins to read these blocks.
    ///
    /// # Errors
    /// Those of the blocks that a transfer writes right now: nothing was begun.
    pub(crate) fn begin_read(&self, ids: &[BlockId]) -> Result<Vec<Hold>, Vec<BlockId>> {
        self.begin(ids, false)
    }

    /// A transfer begins to write these blocks: whatever reads them now reads rubbish.
    ///
    /// # Errors
    /// Those of the blocks that another transfer writes right now: nothing was begun.
    pub(crate) fn begin_write(&self, ids: &[BlockId]) -> Result<Vec<Hold>, Vec<BlockId>> {
        self.begin(ids, true)
    }

    fn begin(&self, ids: &[BlockId], writes: bool) -> Result<Vec<Hold>, Vec<BlockId>> {
        let mut slots = self.slots.lock();
        let written = |id: &&BlockId| slots.get(id.index()).is_some_and(|slot| slot.writers > 0);
        let written: Vec<_> = ids.iter().filter(written).copied().collect();
        if !written.is_empty() {
            return Err(written);
        }
        let begin = |&block: &BlockId| {
            let slot = slots.get_mut(block.index())?;
            slot.transfers += 1;
            if writes {
                slot.writers += 1;
                slot.generation = slot.generation.wrapping_add(1);
            }
            Some(Hold { block, generation: slot.generation, writes })
        };
        Ok(ids.iter().filter_map(begin).collect())
    }

    /// Whether the block still is what it was when the hold began.
    pub(crate) fn is_valid(&self, hold: Hold) -> bool {
        self.slots.lock().get(hold.block.index()).is_some_and(|slot| slot.generation == hold.generation)
    }

    /// The hardware is done with these blocks.
    pub(crate) fn end(&self, holds: &[Hold]) {
        let mut slots = self.slots.lock();
        for hold in holds {
            if let Some(slot) = slots.get_mut(hold.block.index()) {
                slot.transfers = slot.transfers.saturating_sub(1);
                slot.writers = slot.writers.saturating_sub(u32::from(hold.writes));
            }
        }
        drop(slots);
        self.changed.notify_all();
    }

    /// The content of these blocks may change from now on.
    pub(crate) fn invalidate(&self, ids: &[BlockId]) {
        let mut slots = self.slots.lock();
        for id in ids {
            if let Some(slot) = slots.get_mut(id.index()) {
                slot.generation = slot.generation.wrapping_add(1);
            }
        }
    }

    /// Those of `ids` that a transfer touches right now.
    pub(crate) fn busy(&self, ids: &[BlockId]) -> Vec<BlockId> {
        let slots = self.slots.lock();
        let busy = |id: &&BlockId| slots.get(id.index()).is_some_and(|slot| slot.transfers > 0);
        ids.iter().filter(busy).copied().collect()
    }

    /// Blocks until no transfer touches `ids`, or `deadline` passes. What is still busy then.
    pub(crate) fn wait_idle(&self, ids: &[BlockId], deadline: Instant) -> Vec<BlockId> {
        let mut slots = self.slots.lock();
        loop {
            let busy = |id: &&BlockId| slots.get(id.index()).is_some_and(|slot| slot.transfers > 0);
            let left: Vec<_> = ids.iter().filter(busy).copied().collect();
            if left.is_empty() || self.changed.wait_until(&mut slots, deadline).timed_out() {
                return left;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const IDS: [BlockId; 2] = [BlockId(1), BlockId(3)];

    #[test]
    fn a_read_across_a_reuse_is_worthless() {
        let blocks = Generations::new(4);
        let holds = blocks.begin_read(&IDS).unwrap();
        assert!(holds.iter().all(|&hold| blocks.is_valid(hold)));
        blocks.invalidate(&[BlockId(3)]);
        assert_eq!(holds.iter().map(|&hold| blocks.is_valid(hold)).collect::<Vec<_>>(), [true, false]);
        assert_eq!(blocks.busy(&IDS), IDS);
        blocks.end(&holds);
        assert_eq!(blocks.busy(&IDS), []);
    }

    #[test]
    fn a_write_spoils_the_reads_under_way_but_not_itself() {
        let blocks = Generations::new(4);
        let reads = blocks.begin_read(&IDS).unwrap();
        let writes = blocks.begin_write(&IDS).unwrap();
        assert!(!reads.iter().any(|&hold| blocks.is_valid(hold)));
        assert!(writes.iter().all(|&hold| blocks.is_valid(hold)));
    }

    #[test]
    fn what_is_written_is_neither_read_nor_written_by_another() {
        let blocks = Generations::new(4);
        let writes = blocks.begin_write(&IDS).unwrap();
        assert_eq!(blocks.begin_write(&[BlockId(0), BlockId(1)]), Err(vec![BlockId(1)]));
        assert_eq!(blocks.begin_read(&[BlockId(3)]), Err(vec![BlockId(3)]));
        assert_eq!(blocks.busy(&[BlockId(0)]), [], "nothing was begun");
        blocks.end(&writes);
        assert!(blocks.begin_read(&IDS).is_ok());
    }

    #[test]
    fn waiting_ends_at_the_deadline_and_names_what_is_busy() {
        let blocks = Generations::new(4);
        let holds = blocks.begin_read(&[BlockId(1)]).unwrap();
        let deadline = Instant::now() + Duration::from_millis(5);
        assert_eq!(blocks.wait_idle(&IDS, deadline), [BlockId(1)]);
        std::thread::scope(|scope| {
            scope.spawn(|| blocks.end(&holds));
            assert_eq!(blocks.wait_idle(&IDS, Instant::now() + Duration::from_secs(60)), []);
        });
    }

    #[test]
    fn ids_beyond_the_memory_are_named() {
        let error = Generations::new(4).check(&[BlockId(0), BlockId(4)]).unwrap_err();
        assert_eq!(error, NoSuchBlock { block: BlockId(4), blocks: 4 });
    }
}
