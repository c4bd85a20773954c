//! Which part of every block a rank holds.

use crate::Rank;
use serde::{Deserialize, Serialize};

/// Attention heads `start .. start + count` of the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeadRange {
    /// First head.
    pub start: u32,
    /// Number of heads.
    pub count: u32,
}

/// Whether other ranks hold the same bytes (more ranks than KV heads, MLA).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Replication {
    /// The slice exists once.
    None,
    /// Several ranks hold it; `writer` alone writes it where storage is shared.
    Replicated {
        /// The rank that writes.
        writer: Rank,
    },
}

/// A rank's slice of every block: layers (pipeline parallel), heads (tensor parallel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankSlice {
    /// The rank.
    pub rank: Rank,
    /// First layer of the model on this rank.
    pub first_layer: u32,
    /// Number of layers on this rank.
    pub num_layers: u32,
    /// Heads on this rank.
    pub heads: HeadRange,
    /// Who else holds the same bytes.
    pub replication: Replication,
}
