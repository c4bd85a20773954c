//! Small integer ids. Each is its own type, so that a rank is never taken for a block.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// A slot of one tier, from 0. The same number on every rank of a deployment.
    BlockId(u32)
);
id!(
    /// A cache group: layers that share tokens per block and retention. 0 where a model has one.
    GroupId(u16)
);
id!(
    /// First four bytes (little endian) of a namespace's tag (of
    /// [`BlockChain::namespace`](kvbm_tokens::BlockChain::namespace), for instance). A label, not a
    /// proof: the sequence hash already binds the whole tag, so two namespaces that share a label
    /// only share their quota and their `forget`.
    NamespaceId(u32)
);
id!(
    /// A worker of a deployment, from 0: one per accelerator.
    Rank(u16)
);
id!(
    /// A machine of a deployment.
    NodeId(u32)
);
id!(
    /// A registered G4 volume.
    VolumeId(u32)
);
id!(
    /// A transfer plan, unique within an [`Epoch`].
    PlanId(u64)
);
id!(
    /// One life of a leader: larger after every start. Reports of an earlier epoch are ignored.
    Epoch(u64)
);
id!(
    /// A lease that keeps a peer's blocks in place while they are read.
    LeaseId(u64)
);
id!(
    /// A peer's exported set of blocks.
    BlockSetId(u64)
);

impl BlockId {
    /// The id as an index into a tier's slots.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Rank {
    /// The rank as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<kvbm_tokens::NamespaceTag> for NamespaceId {
    fn from(tag: kvbm_tokens::NamespaceTag) -> Self {
        let [a, b, c, d, ..] = *tag.as_bytes();
        Self(u32::from_le_bytes([a, b, c, d]))
    }
}
