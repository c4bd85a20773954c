//! Which bytes of which peer's ranks make up a rank's part of a block, whatever shapes and layouts
//! both sides have.
//!
//! A [`ReadPlan`] is made once for a rank and a peer. Its descriptor lists come from the copy plans
//! of `kvbm-layout`, joined where ranges touch on both sides.

mod cover;
mod plan;

use std::ops::Range;

use kvbm_layout::{BlockLayout, LayoutConfig, PlanError};
use kvbm_plan::{GroupId, RankSlice};
use kvbm_storage::{BoundLayout, StorageError};
use serde::{Deserialize, Serialize};

use crate::BlockSet;

pub(crate) use cover::cover;
pub use plan::{ReadPlan, TransferLists};

/// A range of layers and heads of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPart {
    /// Layers of the model.
    pub layers: Range<u32>,
    /// Heads of the model.
    pub heads: Range<u32>,
}

impl ModelPart {
    /// What a rank holds. Saturates.
    pub fn of(slice: &RankSlice) -> Self {
        let end = |first: u32, count: u32| first..first.saturating_add(count);
        Self {
            layers: end(slice.first_layer, slice.num_layers),
            heads: end(slice.heads.start, slice.heads.count),
        }
    }

    /// What both hold; `None` if nothing.
    pub fn overlap(&self, other: &Self) -> Option<Self> {
        let both = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
        let (layers, heads) = (both(&self.layers, &other.layers), both(&self.heads, &other.heads));
        (!layers.is_empty() && !heads.is_empty()).then_some(Self { layers, heads })
    }

    /// Pairs of a layer and a head.
    pub(crate) fn cells(&self) -> u64 {
        self.layers.len() as u64 * self.heads.len() as u64
    }
}

impl std::fmt::Display for ModelPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layers, heads } = self;
        write!(f, "layers {}..{}, heads {}..{}", layers.start, layers.end, heads.start, heads.end)
    }
}

/// Refuses blocks with parts that no other number of ranks can divide anew, where both sides do not
/// have the same number. What each rank holds is compared later, by the copy plans.
pub(crate) fn check_whole<'a>(
    ranks: impl Iterator<Item = &'a BoundLayout>,
    sets: &[BlockSet],
) -> Result<(), ShapeError> {
    let has_planes = |config: &LayoutConfig| !config.planes.is_empty();
    let ours: Vec<bool> = ranks.map(|bound| has_planes(bound.layout().config())).collect();
    let is_whole = ours.contains(&true) || sets.iter().any(|set| has_planes(set.layout.layout().config()));
    match sets.first() {
        Some(set) if is_whole && sets.len() != ours.len() => {
            Err(ShapeError::Ranks { group: set.group, ours: ours.len(), theirs: sets.len() })
        }
        _ => Ok(()),
    }
}

/// Why a peer's blocks cannot be read into a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// The peer offers nothing of this group.
    #[error("the peer offers no block set of group {group}; check that both sides run the same model")]
    NoSets {
        /// The group.
        group: GroupId,
    },
    /// Blocks that cannot be divided anew, of another number of ranks.
    #[error(
        "blocks of group {group} are divided among {theirs} ranks at the peer and among {ours} here, and have parts \
         without heads (opaque tensors, states or scales): give both sides the same number of ranks"
    )]
    Ranks {
        /// The group.
        group: GroupId,
        /// Ranks of this node.
        ours: usize,
        /// Ranks of the peer.
        theirs: usize,
    },
    /// The peer's ranks do not hold all of the part, or hold some of it twice in different cuts.
    #[error(
        "the peer's ranks hold {found} of {needed} cells of {part}; all its ranks have to export their block \
         sets, and replicas have to hold the same heads"
    )]
    Uncovered {
        /// What is needed.
        part: ModelPart,
        /// Pairs of layer and head that are needed.
        needed: u64,
        /// Pairs that the chosen ranks hold.
        found: u64,
    },
    /// The layouts do not hold the same things.
    #[error("the peer's blocks do not fit ours: {0}")]
    Layout(#[from] PlanError),
    /// A block outside the layout, or memory that cannot be addressed.
    #[error("remote blocks: {0}")]
    Storage(String),
}

impl From<crate::AgentError> for ShapeError {
    fn from(error: crate::AgentError) -> Self {
        Self::Storage(error.to_string())
    }
}

impl From<StorageError> for ShapeError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error.to_string())
    }
}
