//! What a persistent tier held before a restart.

use super::handle::Registry;
use crate::core::restore;
use crate::metadata::BlockMetadata;
use crate::recovery::{RestoreError, Restored};
use kvbm_plan::{RecoveredBlock, Tier};

impl Registry {
    /// Makes what a persistent tier held before a restart Present again, in its slots. `blocks` are
    /// in order of last use, oldest first; where a slot or a hash occurs twice, the last record
    /// counts. Blocks whose ancestors are missing are left out. Untrusted input: anything may be in
    /// it.
    ///
    /// # Errors
    /// The tier is in use already, or has no slots. Nothing changed. What is wrong with single
    /// records is counted in the answer.
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
        let mut hold = self.shared.store.lock();
        let on = &mut hold.tiers[tier.index()];
        if !on.free.empty(&on.slots) {
            return Err(RestoreError::InUse { tier, free: on.free.free, capacity });
        }
        restore::restore(&mut hold, tier.index(), &kept, metadata, &mut outcome);
        Ok(outcome)
    }
}
