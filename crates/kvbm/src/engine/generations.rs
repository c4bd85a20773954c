//! Whose turn it is on a block of the engine's own memory.
//!
//! The engine reuses its block ids as it likes. A copy that was made while the block changed hands
//! is worthless. So each id carries a generation that goes up whenever its content may change, and
//! a count of the transfers that touch it right now. When it went up last is kept too: what was put
//! there before G1 was lost is gone.

use kvbm_plan::BlockId;
use kvbm_pool::Losses;
use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// One hold per block: what the block's generation was when a transfer began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) block: BlockId,
    generation: u32,
    writes: bool,
}

impl Hold {
    /// Whether nothing else was done with the block between the beginnings of both.
    pub(crate) fn is_same_content(&self, other: &Self) -> bool {
        (self.block, self.generation) == (other.block, other.generation)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    generation: u32,
    /// When the block was given to what is in it.
    losses: Losses,
    /// Transfers that touch the block, and whether one of them writes it.
    transfers: u32,
}

/// Set in `Slot::transfers` while one of them writes: no other begins then.
const WRITTEN: u32 = 1 << 31;

impl Slot {
    fn is_written(&self) -> bool {
        self.transfers & WRITTEN != 0
    }

    fn change(&mut self, losses: Losses) {
        self.generation = self.generation.wrapping_add(1);
        self.losses = losses;
    }
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
        self.begin(ids, None)
    }

    /// A transfer begins to write these blocks, after so many losses: whatever reads them now reads
    /// rubbish.
    ///
    /// # Errors
    /// Those of the blocks that another transfer writes right now: nothing was begun.
    pub(crate) fn begin_write(&self, ids: &[BlockId], losses: Losses) -> Result<Vec<Hold>, Vec<BlockId>> {
        self.begin(ids, Some(losses))
    }

    fn begin(&self, ids: &[BlockId], writes: Option<Losses>) -> Result<Vec<Hold>, Vec<BlockId>> {
        let mut slots = self.slots.lock();
        let written = |id: &&BlockId| slots.get(id.index()).is_some_and(Slot::is_written);
        let written: Vec<_> = ids.iter().filter(written).copied().collect();
        if !written.is_empty() {
            return Err(written);
        }
        let begin = |&block: &BlockId| {
            let slot = slots.get_mut(block.index())?;
            slot.transfers += 1;
            if let Some(losses) = writes {
                slot.transfers |= WRITTEN;
                slot.change(losses);
            }
            Some(Hold { block, generation: slot.generation, writes: writes.is_some() })
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
                let written = slot.is_written() && !hold.writes;
                let left = (slot.transfers & !WRITTEN).saturating_sub(1);
                slot.transfers = if written { left | WRITTEN } else { left };
            }
        }
        drop(slots);
        self.changed.notify_all();
    }

    /// The content of these blocks may change from now on, after so many losses.
    pub(crate) fn invalidate(&self, ids: &[BlockId], losses: Losses) {
        let mut slots = self.slots.lock();
        for id in ids {
            if let Some(slot) = slots.get_mut(id.index()) {
                slot.change(losses);
            }
        }
    }

    /// Those of `ids` that were given to what is in them at a time since which that `is_lost`.
    pub(crate) fn lost(&self, ids: &[BlockId], is_lost: impl Fn(Losses) -> bool) -> Vec<BlockId> {
        let slots = self.slots.lock();
        let lost = |id: &&BlockId| slots.get(id.index()).is_some_and(|slot| is_lost(slot.losses));
        ids.iter().filter(lost).copied().collect()
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
        blocks.invalidate(&[BlockId(3)], Losses::default());
        assert_eq!(holds.iter().map(|&hold| blocks.is_valid(hold)).collect::<Vec<_>>(), [true, false]);
        assert_eq!(blocks.busy(&IDS), IDS);
        blocks.end(&holds);
        assert_eq!(blocks.busy(&IDS), []);
    }

    #[test]
    fn a_write_spoils_the_reads_under_way_but_not_itself() {
        let blocks = Generations::new(4);
        let reads = blocks.begin_read(&IDS).unwrap();
        let writes = blocks.begin_write(&IDS, Losses::default()).unwrap();
        assert!(!reads.iter().any(|&hold| blocks.is_valid(hold)));
        assert!(writes.iter().all(|&hold| blocks.is_valid(hold)));
    }

    #[test]
    fn what_is_written_is_neither_read_nor_written_by_another() {
        let blocks = Generations::new(4);
        let writes = blocks.begin_write(&IDS, Losses::default()).unwrap();
        assert_eq!(blocks.begin_write(&[BlockId(0), BlockId(1)], Losses::default()), Err(vec![BlockId(1)]));
        assert_eq!(blocks.begin_read(&[BlockId(3)]), Err(vec![BlockId(3)]));
        assert_eq!(blocks.busy(&[BlockId(0)]), [], "nothing was begun");
        assert_eq!(blocks.busy(&IDS), IDS);
        blocks.end(&writes);
        assert_eq!(blocks.busy(&IDS), []);
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
