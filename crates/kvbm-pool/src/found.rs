//! Blocks that a lookup found.

use kvbm_plan::{BlockId, NodeId, Tier, VolumeId};

/// The location of a block of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixBlock {
    /// Slot; none on G4.
    pub block: BlockId,
    /// Nearest tier that holds the block; G4 for what
    /// volumes and peers have.
    pub tier: Tier,
}

impl PrefixBlock {
    /// On no tier of the registry.
    pub(crate) const OUTSIDE: Self = Self { block: BlockId(u32::MAX), tier: Tier::G4 };
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

/// Where blocks are that lie on no tier of the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outside {
    /// On a volume.
    Volume(VolumeId),
    /// In the memory of a peer.
    Node(NodeId),
}
