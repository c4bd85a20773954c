//! Which blob: the name of one rank slice of one block.

use std::fmt;

use kvbm_plan::{GroupId, NamespaceTag, RankSlice, SequenceHash};

/// The layers and heads of a block that an object holds. The whole block when it names all of the model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobSlice {
    /// First layer of the model in the object.
    pub first_layer: u32,
    /// Number of layers.
    pub num_layers: u32,
    /// First KV head of the model in the object.
    pub first_head: u32,
    /// Number of heads.
    pub num_heads: u32,
}

impl From<&RankSlice> for BlobSlice {
    fn from(slice: &RankSlice) -> Self {
        Self {
            first_layer: slice.first_layer,
            num_layers: slice.num_layers,
            first_head: slice.heads.start,
            num_heads: slice.heads.count,
        }
    }
}

/// The name of an object.
///
/// The slice is named by content, not by rank, so replicated ranks name the same object and writing it twice is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobKey {
    /// The namespace of the block: two models never meet in a volume.
    pub namespace: NamespaceTag,
    /// The block's cache group.
    pub group: GroupId,
    /// The block.
    pub hash: SequenceHash,
    /// The part of the block.
    pub slice: BlobSlice,
}

impl BlobKey {
    /// The object's path in a store: `NAMESPACE/gGROUP/HH/HASH.lFIRST+COUNT.hFIRST+COUNT`, `HH` being the hash's first byte.
    ///
    /// Made of hexadecimal digits, numbers and `./+glh` only, at most 130 bytes: valid in every file system and S3.
    pub fn object_path(&self) -> String {
        let BlobSlice { first_layer, num_layers, first_head, num_heads } = self.slice;
        format!(
            "{}/g{}/{:02x}/{}.l{first_layer}+{num_layers}.h{first_head}+{num_heads}",
            self.namespace,
            self.group,
            self.hash.as_bytes()[0],
            self.hash,
        )
    }
}

impl fmt::Display for BlobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.object_path())
    }
}
