//! Which bytes of which peer's ranks make up a rank's part of a block, whatever shapes and layouts
//! both sides have.
//!
//! A [`ReadPlan`] is made once for a rank and a peer. Its descriptor lists come from the copy plans
//! of `kvbm-layout`, joined where ranges touch on both sides.

mod cover;
mod plan;

use std::ops::Range;

use kvbm_layout::PlanError;
use kvbm_plan::{GroupId, RankSlice};
use kvbm_storage::StorageError;
use serde::{Deserialize, Serialize};

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
