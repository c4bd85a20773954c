//! What comes before a run of blocks, and the parent and position of each that follow from it.

use crate::SequenceHash;

/// One block of a chain, with what travels beside its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainLink {
    /// The block's identity.
    pub hash: SequenceHash,
    /// The block before it; `None` for the first block of a sequence.
    pub parent: Option<SequenceHash>,
    /// The block's index in its sequence.
    pub position: u32,
}

/// What comes before the first block of a run, and whether its blocks follow one another at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ChainOrigin {
    /// The run begins with the first block of a sequence.
    #[default]
    Root,
    /// The run begins behind a known block.
    After {
        /// The block before the run.
        parent: SequenceHash,
        /// Position of the run's first block; never 0.
        position: u32,
    },
    /// Blocks have no parents: each is a key of its own.
    Flat,
}

impl ChainOrigin {
    /// Block `at` of a run with these hashes.
    pub fn link(self, hashes: &[SequenceHash], at: usize) -> Option<ChainLink> {
        (at < hashes.len()).then(|| self.link_in(hashes, at))
    }

    /// Block `at`, which is below the number of hashes.
    pub(crate) fn link_in(self, hashes: &[SequenceHash], at: usize) -> ChainLink {
        let hash = hashes[at];
        let before = at.checked_sub(1).map(|before| hashes[before]);
        match self {
            Self::Root => ChainLink { hash, parent: before, position: position(at) },
            Self::After { parent, position: first } => {
                let position = first.saturating_add(position(at));
                ChainLink { hash, parent: Some(before.unwrap_or(parent)), position }
            }
            Self::Flat => ChainLink { hash, parent: None, position: 0 },
        }
    }
}

/// A block index as it is stored. A sequence of 2^32 blocks does not fit a machine's memory.
pub(crate) fn position(index: usize) -> u32 {
    index as u32
}
