//! What a persistent tier held before a restart.

use super::Registry;
use crate::core::restore;
use crate::metadata::BlockMetadata;
use kvbm_plan::{BlockId, RecoveredBlock, Tier};

/// What [`Registry::restore`] made of the recovered blocks. The slots listed hold nothing that can be found: their
/// records may be released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that are Present again.
    pub restored: u64,
    /// Earlier records of a slot that was written again.
    pub overwritten: u64,
    /// Records with a slot beyond the tier or out of use, an unknown group or a contradictory identity.
    pub invalid: u64,
    /// Slots of the latter, where the tier has them.
    pub rejected: Vec<BlockId>,
    /// Slots with a block that a later record has in another slot.
    pub duplicates: Vec<BlockId>,
    /// Slots with a block some ancestor of which is missing.
    pub orphans: Vec<BlockId>,
}

/// Blocks can only be restored before anything else happens on their tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The tier is in use.
    #[error("{tier} is in use ({free} of {capacity} blocks free): restore before the first allocation")]
    InUse {
        /// The tier.
        tier: Tier,
        /// Its free slots.
        free: u32,
        /// Its slots.
        capacity: u32,
    },
    /// The tier has no slots that could be restored.
    #[error("{0} has no slots: restore G1, G2 or G3")]
    NoSlots(Tier),
}

impl Registry {
    /// Makes what a persistent tier held before a restart Present again, in its slots. `blocks` are in order of last
    /// use, oldest first; where a slot or a hash occurs twice, the last record counts. Blocks whose ancestors are
    /// missing are left out. Untrusted input: anything may be in it.
    ///
    /// # Errors
    /// The tier is in use already, or has no slots. Nothing changed. What is wrong with single records is counted in the answer.
    pub fn restore(
        &self,
        tier: Tier,
        blocks: &[RecoveredBlock],
        metadata: BlockMetadata,
    ) -> Result<Restored, RestoreError> {
        let mut outcome = Restored::default();
        let capacity = self.capacity(tier);
        if tier.index() >= crate::tier::TIERS {
            return Err(RestoreError::NoSlots(tier));
        }
        let kept = restore::latest(blocks, capacity, &mut outcome);
        let mut core = self.shared.store.lock_all();
        let mut free = self.shared.store.free[tier.index()].lock();
        // Who allocates takes free slots without a shard's lock: while blocks are placed there are none to be had.
        if !free.close(&self.shared.store.slots[tier.index()]) {
            return Err(RestoreError::InUse { tier, free: free.free, capacity });
        }
        drop(free);
        core.restore(tier.index(), &kept, metadata, &mut outcome);
        Ok(outcome)
    }
}
