//! Where a block's bytes are.

use crate::{BlockSetId, LeaseId, NodeId, Tier, VolumeId};
use serde::{Deserialize, Serialize};

/// The tier that holds a block. Memory of a peer keeps its tier; the node distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Location {
    /// The tier.
    pub tier: Tier,
    /// The machine.
    pub node: NodeId,
    /// The volume, on G4 only.
    pub volume: Option<VolumeId>,
}

impl Location {
    /// A tier of node `node`.
    pub const fn on(node: NodeId, tier: Tier) -> Self {
        Self { tier, node, volume: None }
    }
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Endpoint {
    /// A tier of the worker that executes the plan.
    Local(Tier),
    /// Blocks that a peer exported, kept in place by a lease.
    Remote {
        /// The peer's exported blocks.
        block_set: BlockSetId,
        /// What keeps them there.
        lease: LeaseId,
    },
    /// A G4 volume.
    Volume(VolumeId),
}

impl Endpoint {
    /// The tier that the endpoint belongs to in paths and metrics; a peer's memory counts as G2
    /// there.
    pub const fn tier(self) -> Tier {
        match self {
            Self::Local(tier) => tier,
            Self::Remote { .. } => Tier::G2,
            Self::Volume(_) => Tier::G4,
        }
    }
}
