//! The trait every layout implements, and the words in which a layout answers.

use std::fmt;
use std::str::FromStr;

use crate::config::{ConfigError, LayoutConfig};

/// Order of the axes inside one outer chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InnerOrder {
    /// `[token, head, element]`.
    Nhd,
    /// `[head, token, element]`.
    Hnd,
    /// Not known: the chunk is one run of bytes that cannot be permuted or sliced by head.
    Opaque,
}

/// Order of the axes inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AxisOrder {
    /// `[.., token, head, element]` in each outer chunk.
    Nhd,
    /// `[.., head, token, element]` in each outer chunk.
    Hnd,
    /// `[layer, outer, inner]`: one contiguous buffer per block, with the order of `inner` as far
    /// as it is known.
    Operational(InnerOrder),
    /// `[head, layer, outer, token, element]`: one contiguous buffer per block in which each range
    /// of heads is contiguous.
    Universal,
    /// Whatever the strides say: memory that an engine owns.
    Strided,
}

impl AxisOrder {
    /// The name used in configuration and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nhd => "nhd",
            Self::Hnd => "hnd",
            Self::Operational(InnerOrder::Nhd) => "operational-nhd",
            Self::Operational(InnerOrder::Hnd) => "operational-hnd",
            Self::Operational(InnerOrder::Opaque) => "operational",
            Self::Universal => "universal",
            Self::Strided => "strided",
        }
    }
}

impl fmt::Display for AxisOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no axis order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown axis order `{name}`; known are nhd, hnd, operational, operational-nhd, operational-hnd, universal"
)]
pub struct UnknownAxisOrder {
    /// What was given.
    pub name: String,
}

impl FromStr for AxisOrder {
    type Err = UnknownAxisOrder;

    fn from_str(name: &str) -> Result<Self, UnknownAxisOrder> {
        [
            Self::Nhd,
            Self::Hnd,
            Self::Operational(InnerOrder::Opaque),
            Self::Operational(InnerOrder::Nhd),
            Self::Operational(InnerOrder::Hnd),
            Self::Universal,
        ]
        .into_iter()
        .find(|order| order.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| UnknownAxisOrder { name: name.chars().take(64).collect() })
    }
}

/// Where a layer-separate layout puts keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OuterPlacement {
    /// `[outer][block][..]`: all keys of a layer, then all values.
    KvOuter,
    /// `[block][outer][..]`: keys and values of a block side by side.
    BlockOuter,
    /// `[block][.., K | V]`: keys and values side by side in the last axis of each head.
    PackedInHead,
}

/// Family of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayoutType {
    /// One region; each block is one contiguous range.
    FullyContiguous,
    /// One region per layer.
    LayerSeparate(OuterPlacement),
    /// Explicit strides over any number of regions.
    Strided,
}

/// One contiguous range of memory (or of a file) that a layout needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionSpec {
    /// Length in bytes; holds all blocks.
    pub bytes: u64,
    /// Alignment its first byte must have, a power of two.
    pub alignment: u64,
}

/// A part of one layer of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cell {
    /// Outer chunk: 0 = keys (or the MLA latent), 1 = values.
    Kv(u32),
    /// Opaque plane, by its index in [`LayoutConfig::planes`].
    Plane(u32),
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kv(outer) => write!(f, "outer {outer}"),
            Self::Plane(plane) => write!(f, "plane {plane}"),
        }
    }
}

/// Where one cell lies, for all blocks.
///
/// In region `region`, element (block, token, head, element) starts at byte
/// ```text
/// offset + block * block_stride + token * token_stride + head * head_stride + element * elem_stride
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CellView {
    /// Index into [`BlockLayout::regions`].
    pub region: u32,
    /// Byte offset of the cell's first element in block 0.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Tokens in the cell; 1 if the cell is opaque.
    pub tokens: u32,
    /// Heads in the cell; 1 if the cell is opaque.
    pub heads: u32,
    /// Elements per head; if the cell is opaque, all its elements.
    pub elems: u64,
    /// Bytes per element.
    pub elem_bytes: u32,
    /// Bytes from one token to the next.
    pub token_stride: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// Bytes from one element to the next; `elem_bytes` when heads are contiguous.
    pub elem_stride: u64,
    /// True if the order inside is not known: the cell is copied whole or not at all.
    pub opaque: bool,
}

impl CellView {
    /// Payload bytes of the cell in one block. Saturates; layouts of this crate are validated to
    /// fit.
    pub fn bytes(&self) -> u64 {
        u64::from(self.tokens)
            .saturating_mul(u64::from(self.heads))
            .saturating_mul(self.elems)
            .saturating_mul(u64::from(self.elem_bytes))
    }

    /// Bytes from the first to just after the last byte of the cell in one block. Saturates.
    pub fn span(&self) -> u64 {
        let last = |count: u64, stride: u64| count.saturating_sub(1).saturating_mul(stride);
        last(u64::from(self.tokens), self.token_stride)
            .saturating_add(last(u64::from(self.heads), self.head_stride))
            .saturating_add(last(self.elems, self.elem_stride))
            .saturating_add(u64::from(self.elem_bytes))
    }

    /// True if the cell is one run of bytes in each block.
    pub fn is_contiguous(&self) -> bool {
        self.span() == self.bytes()
    }
}

/// Where one cell of one block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockView {
    /// Index into [`BlockLayout::regions`].
    pub region: u32,
    /// Byte offset in the region of the cell's first element in this block.
    pub offset: u64,
    /// Shape and strides of the cell.
    pub cell: CellView,
}

/// A layout whose blocks are one run of bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContiguousBlock {
    /// Index into [`BlockLayout::regions`].
    pub region: u32,
    /// Byte offset of block 0.
    pub offset: u64,
    /// Payload bytes of a block.
    pub bytes: u64,
    /// Bytes from one block to the next; what is beyond `bytes` is padding.
    pub stride: u64,
}

/// Why a layout cannot be made, or cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The shape breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A size does not fit into a signed 64-bit offset.
    #[error("{what} exceeds 2^63 - 1 bytes; use fewer blocks or a smaller shape")]
    TooLarge {
        /// The size that is too large.
        what: &'static str,
    },
    /// An axis order that this layout does not have.
    #[error("{layout} does not support axis order {order}; use {supported}")]
    UnsupportedOrder {
        /// The layout.
        layout: &'static str,
        /// The order asked for.
        order: AxisOrder,
        /// Orders that work.
        supported: &'static str,
    },
    /// An index beyond the layout.
    #[error("{axis} {index} is out of range: the layout has {count}")]
    OutOfRange {
        /// Which index: `block`, `layer`, `outer` or `plane`.
        axis: &'static str,
        /// Its value.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// Explicit strides that do not describe a usable layout.
    #[error("strides of {cell}: {field} = {value}: {rule}")]
    Strides {
        /// Which cell, such as `outer 1` or `plane 0`.
        cell: String,
        /// The stride or offset at fault.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The rule it breaks.
        rule: String,
    },
    /// Two elements share a byte, or the strides are too irregular to prove that none do.
    #[error(
        "strides of {first} and {second}: elements overlap, or cannot be proven apart; check strides and offsets"
    )]
    Overlap {
        /// One cell.
        first: String,
        /// The other cell (the same if it overlaps itself).
        second: String,
    },
    /// Regions do not fit the layout.
    #[error("regions: {field} = {value}: {rule}")]
    Regions {
        /// What is wrong: a count or a size.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The rule it breaks.
        rule: String,
    },
}

/// How the bytes of blocks lie in regions.
///
/// Implementers give the five required methods; elements must not overlap and must lie inside the
/// regions. [`conformance`](crate::conformance) checks that.
pub trait BlockLayout: fmt::Debug + Send + Sync {
    /// The shape; has passed [`LayoutConfig::validate`].
    fn config(&self) -> &LayoutConfig;

    /// The family.
    fn layout_type(&self) -> LayoutType;

    /// The order of axes inside a block.
    fn axis_order(&self) -> AxisOrder;

    /// The regions this layout needs, in order.
    fn regions(&self) -> &[RegionSpec];

    /// Where `cell` of `layer` lies, for all blocks.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`] if there is no such layer or cell.
    fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError>;

    /// Where `cell` of `layer` lies in `block`.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`] if there is no such block, layer or cell.
    fn block_view(&self, block: u32, layer: u32, cell: Cell) -> Result<BlockView, LayoutError> {
        let num_blocks = self.config().num_blocks;
        if block >= num_blocks {
            return Err(LayoutError::OutOfRange { axis: "block", index: block, count: num_blocks });
        }
        let view = self.view(layer, cell)?;
        let offset = view.block_stride.saturating_mul(u64::from(block)).saturating_add(view.offset);
        Ok(BlockView { region: view.region, offset, cell: view })
    }

    /// Payload bytes of one block, without padding.
    fn bytes_per_block(&self) -> u64 {
        self.config().bytes_per_block()
    }

    /// Bytes of all regions together. Saturates.
    fn total_bytes(&self) -> u64 {
        self.regions().iter().fold(0, |sum, region| sum.saturating_add(region.bytes))
    }

    /// The run of bytes that each block is, if each block is one.
    fn contiguous_block(&self) -> Option<ContiguousBlock> {
        let config = self.config();
        let first = self.view(0, config.cells().next()?).ok()?;
        let (mut start, mut end) = (u64::MAX, 0);
        for layer in 0..config.num_layers {
            for cell in config.cells() {
                let view = self.view(layer, cell).ok()?;
                if view.region != first.region || view.block_stride != first.block_stride {
                    return None;
                }
                start = start.min(view.offset);
                end = end.max(view.offset.saturating_add(view.span()));
            }
        }
        // Elements never overlap, so a span as long as the payload has no holes.
        let bytes = self.bytes_per_block();
        (end.checked_sub(start) == Some(bytes)).then_some(ContiguousBlock {
            region: first.region,
            offset: start,
            bytes,
            stride: first.block_stride,
        })
    }
}
