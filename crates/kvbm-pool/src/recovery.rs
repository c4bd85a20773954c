//! The outcome of [`Registry::restore`](crate::Registry::restore).

use kvbm_plan::{BlockId, Tier};

/// What [`Registry::restore`](crate::Registry::restore) made of the recovered blocks. The slots
/// listed hold nothing that can be found: their records may be released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that are Present again.
    pub restored: u64,
    /// Earlier records of a slot that was written again.
    pub overwritten: u64,
    /// Records with a slot beyond the tier or out of use, an unknown group or a contradictory
    /// identity.
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
