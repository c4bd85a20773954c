//! Description of the blocks that a worker offers to peers.

use kvbm_layout::LayoutDescriptor;
use kvbm_plan::{BlockSetId, GroupId, NamespaceTag, NodeId, RankSlice};

/// Everything a peer needs to address a worker's blocks. It may read them under a lease, for which
/// it asks the owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSet {
    /// The set's id, chosen by the exporter.
    pub id: BlockSetId,
    /// The namespace of all its blocks.
    pub namespace: NamespaceTag,
    /// The cache group of all its blocks.
    pub group: GroupId,
    /// The exporter's node.
    pub node: NodeId,
    /// The part of every block that the exporter holds: as many layers and heads as the layout has.
    pub slice: RankSlice,
    /// How many blocks there are, how they lie, and in which memory: kind, device, addresses in the
    /// exporter's space, strides.
    pub layout: LayoutDescriptor,
    /// Name of the exporter's NIXL agent. 1 to 255 bytes.
    pub agent: String,
    /// What the agent gives to connect to it; empty while there is no NIXL. Up to 1 MiB.
    pub agent_metadata: Vec<u8>,
}
