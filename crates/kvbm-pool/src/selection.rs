//! Which blocks a removal takes, and what it did.

use kvbm_plan::{GroupId, NamespaceId, SequenceHash};

/// Which blocks to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSelection {
    /// Every block.
    All,
    /// The blocks of a group.
    Group(GroupId),
    /// The blocks of a namespace (a model, a tenant).
    Namespace(NamespaceId),
    /// A block and everything that continues it.
    Subtree {
        /// Group of the block.
        group: GroupId,
        /// The block.
        hash: SequenceHash,
    },
}

/// What a removal did. All of it is invisible now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Blocks that were on a tier (one on two tiers counts twice).
    pub blocks: u64,
    /// Slots of these that come back only after their last user.
    pub in_use: u64,
    /// Blocks on their way, which will not become visible.
    pub cancelled: u64,
}

/// What became of a slot whose bytes are bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quarantine {
    /// Out of use for good.
    Done,
    /// Invisible now, out of use for good after its last user.
    AfterLastUser,
    /// The slot holds no registered block: nothing was done.
    NotRegistered,
}
