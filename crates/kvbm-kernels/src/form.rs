//! The forms, as strides over rows.

use std::fmt;

use crate::{Argument, KernelError};

/// Order of tokens and heads within one (layer, outer) chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChunkOrder {
    /// `[nt, nh, hd]`: tokens outermost.
    Nhd,
    /// `[nh, nt, hd]`: heads outermost.
    Hnd,
}

/// How the bytes of a block are ordered and divided into chunks of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockForm {
    /// `nl * no` chunks, layer by layer, the outer parts of a layer in order.
    Stack(ChunkOrder),
    /// One chunk `[nl, no, inner]`: the chunks of a stack of this order, one behind the other.
    Operational(ChunkOrder),
    /// One chunk `[nh, nl, no, nt, hd]`.
    Universal,
}

impl BlockForm {
    /// Chunks of memory that a block has.
    pub fn chunks_per_block(self, shape: &BlockShape) -> usize {
        match self {
            Self::Stack(_) => shape.num_layers * shape.num_outer,
            Self::Operational(_) | Self::Universal => 1,
        }
    }

    /// Bytes of each chunk.
    pub fn chunk_bytes(self, shape: &BlockShape) -> usize {
        shape.block_bytes() / self.chunks_per_block(shape)
    }

    /// Where a row lies.
    pub(crate) fn strides(self, shape: &BlockShape) -> RowStrides {
        let BlockShape { num_layers: nl, num_outer: no, num_heads: nh, num_tokens: nt, .. } = *shape;
        let (head, token) = match self {
            Self::Stack(ChunkOrder::Nhd) | Self::Operational(ChunkOrder::Nhd) => (1, nh),
            Self::Stack(ChunkOrder::Hnd) | Self::Operational(ChunkOrder::Hnd) => (nt, 1),
            Self::Universal => (nl * no * nt, 1),
        };
        let (layer, outer) = match self {
            Self::Stack(_) => (0, 0),
            Self::Operational(_) => (no * nh * nt, nh * nt),
            Self::Universal => (no * nt, nt),
        };
        RowStrides { separate: matches!(self, Self::Stack(_)), layer, outer, head, token }
    }
}

impl fmt::Display for BlockForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stack(ChunkOrder::Nhd) => "stacked NHD form",
            Self::Stack(ChunkOrder::Hnd) => "stacked HND form",
            Self::Operational(ChunkOrder::Nhd) => "operational form (NHD)",
            Self::Operational(ChunkOrder::Hnd) => "operational form (HND)",
            Self::Universal => "universal form",
        })
    }
}

/// Dimensions of a block; all at least 1, and their product fits the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    pub(crate) num_layers: usize,
    pub(crate) num_outer: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_tokens: usize,
    row_bytes: usize,
    element_bytes: usize,
}

impl BlockShape {
    /// `nl` layers, `no` outer parts, `nh` heads, `nt` tokens, `hd` elements of `element_bytes`
    /// bytes each.
    pub fn new(
        nl: usize,
        no: usize,
        nh: usize,
        nt: usize,
        hd: usize,
        element_bytes: usize,
    ) -> Result<Self, KernelError> {
        let dimensions = [nl, no, nh, nt, hd, element_bytes];
        for (dimension, value) in ["nl", "no", "nh", "nt", "hd", "element_bytes"].into_iter().zip(dimensions)
        {
            if value == 0 {
                return Err(KernelError::ZeroDimension { dimension });
            }
        }
        let bytes = dimensions.iter().try_fold(1_usize, |product, value| product.checked_mul(*value));
        // Rust's slices end at isize::MAX bytes.
        if bytes.is_none_or(|bytes| bytes > isize::MAX.unsigned_abs()) {
            return Err(KernelError::TooLarge { dimensions });
        }
        Ok(Self {
            num_layers: nl,
            num_outer: no,
            num_heads: nh,
            num_tokens: nt,
            row_bytes: hd * element_bytes,
            element_bytes,
        })
    }

    /// Bytes of one row: the elements of one (layer, outer, head, token).
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of one element.
    pub fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    /// The same shape with another number of heads.
    ///
    /// # Errors
    /// As for [`BlockShape::new`].
    pub fn with_heads(&self, nh: usize) -> Result<Self, KernelError> {
        let hd = self.row_bytes / self.element_bytes;
        Self::new(self.num_layers, self.num_outer, nh, self.num_tokens, hd, self.element_bytes)
    }

    /// Bytes of a whole block.
    pub fn block_bytes(&self) -> usize {
        self.num_layers * self.num_outer * self.num_heads * self.num_tokens * self.row_bytes
    }
}

/// The heads of a larger block that a conversion touches: as many as its shape has, from `first`
/// on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The first one.
    pub first: usize,
    /// Heads of the block.
    pub of: usize,
}

impl Heads {
    /// The shape of the blocks that have the slice, whose own shape is `shape`.
    pub(crate) fn whole(self, shape: &BlockShape, argument: Argument) -> Result<BlockShape, KernelError> {
        let (Self { first, of }, count) = (self, shape.num_heads);
        if first.checked_add(count).is_none_or(|end| end > of) {
            return Err(KernelError::Heads { argument, first, count, of });
        }
        shape.with_heads(of)
    }
}

/// Distances in rows between neighbours along each dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowStrides {
    /// Whether each (layer, outer) has a chunk of its own.
    pub(crate) separate: bool,
    pub(crate) layer: usize,
    pub(crate) outer: usize,
    pub(crate) head: usize,
    pub(crate) token: usize,
}
