//! Blocks that a lookup found.

use kvbm_plan::{BlockId, Tier};

/// The location of a block of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixBlock {
    /// Slot; none on G4.
    pub block: BlockId,
    /// Nearest tier that holds the block; G4 for what
    /// [`Prefix::extend_on_volume`](crate::Prefix::extend_on_volume) added.
    pub tier: Tier,
}

/// A block that is on no tier yet, but on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivingBlock {
    /// Index among the hashes that were looked up.
    pub index: usize,
    /// Where it will arrive.
    pub tier: Tier,
    /// Ticket of the arrival.
    pub ticket: u64,
}
