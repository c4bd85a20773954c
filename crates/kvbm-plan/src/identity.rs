//! What a block is, wherever its bytes are.

use crate::{GroupId, NamespaceId};
use kvbm_tokens::{ChainLink, ChainOrigin, SequenceHash};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of a block's content. `hash` chains all tokens before the block, so equal hashes mean
/// equal content; `parent` and `position` travel beside it so that a receiver can rebuild the
/// chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockIdentity {
    /// Short name of the namespace that the hash is chained in: what quotas and `forget` go by.
    pub namespace: NamespaceId,
    /// Cache group of the block.
    pub group: GroupId,
    /// Sequence hash: the block and everything before it.
    pub hash: SequenceHash,
    /// Sequence hash of the block before it; `None` for the first block of a chain.
    pub parent: Option<SequenceHash>,
    /// Index of the block in its chain, from 0.
    pub position: u32,
}

impl BlockIdentity {
    /// Identities of a whole chain, from its hashes in order.
    pub fn chain(
        namespace: NamespaceId,
        group: GroupId,
        hashes: &[SequenceHash],
    ) -> impl ExactSizeIterator<Item = Self> + '_ {
        hashes.iter().enumerate().map(move |(index, &hash)| Self {
            namespace,
            group,
            hash,
            parent: index.checked_sub(1).map(|before| hashes[before]),
            position: index as u32,
        })
    }

    /// Identities of a run of blocks that begins as `origin` says.
    pub fn run(
        namespace: NamespaceId,
        group: GroupId,
        origin: ChainOrigin,
        hashes: &[SequenceHash],
    ) -> impl Iterator<Item = Self> + '_ {
        (0..hashes.len()).filter_map(move |at| {
            let ChainLink { hash, parent, position } = origin.link(hashes, at)?;
            Some(Self { namespace, group, hash, parent, position })
        })
    }

    /// Whether parent and position agree: exactly the first block of a chain has no parent.
    pub const fn is_consistent(&self) -> bool {
        self.parent.is_none() == (self.position == 0)
    }
}

/// How the blocks of a group are used, hence what a cached prefix is worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GroupKind {
    /// Full attention: a block is useful only with every block before it.
    #[default]
    Full,
    /// Sliding window attention over this many tokens: only the blocks inside the window are
    /// needed.
    SlidingWindow(u32),
    /// Recurrent state: the last block alone carries everything before it.
    State,
}

/// As configurations spell it: `full`, `window=TOKENS` or `state`.
impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::SlidingWindow(tokens) => write!(f, "window={tokens}"),
            Self::State => f.write_str("state"),
        }
    }
}
