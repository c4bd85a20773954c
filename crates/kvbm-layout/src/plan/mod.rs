//! Copy plans: which bytes of one layout are which bytes of another, in the fewest runs and in a
//! form that does not grow with tokens or heads.

mod build;
mod fragments;
mod grids;
mod merge;
mod runs;

use std::fmt;

pub use fragments::{Fragment, FragmentList, Fragments, MAX_FRAGMENTS};
pub use grids::{Grids, RunGrid};
pub use runs::{Run, Runs};

use crate::layout::{BlockLayout, LayoutError};
use crate::slice::Selection;

/// Most axes a segment can need: element, head, token, outer, layer.
const MAX_DIMS: usize = 5;

/// One axis of a segment: `count` runs, each this far from the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Dim {
    /// How many; at least 2.
    pub count: u64,
    /// Bytes between them in the source.
    pub src_stride: u64,
    /// Bytes between them in the destination.
    pub dst_stride: u64,
}

/// Runs of equal length in a regular pattern.
///
/// From source block `s` to destination block `d`, the run at index `i` of each axis copies
/// `run_bytes` bytes
/// ```text
/// from  src_offset + s * src_block_stride + sum(i * src_stride)
/// to    dst_offset + d * dst_block_stride + sum(i * dst_stride)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Region of the source layout.
    pub src_region: u32,
    /// Region of the destination layout.
    pub dst_region: u32,
    /// Offset of the first run in block 0 of the source.
    pub src_offset: u64,
    /// Offset of the first run in block 0 of the destination.
    pub dst_offset: u64,
    /// Bytes from one source block to the next; 0 if there is only one.
    pub src_block_stride: u64,
    /// Bytes from one destination block to the next; 0 if there is only one.
    pub dst_block_stride: u64,
    /// Length of each run.
    pub run_bytes: u64,
    dims: Dims,
}

/// The axes of a segment, in place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Dims {
    len: u8,
    axes: [Dim; MAX_DIMS],
}

impl Segment {
    /// The axes, outermost (largest destination stride) first; empty if the segment is one run.
    pub fn dims(&self) -> &[Dim] {
        self.dims.as_slice()
    }

    /// How many runs.
    pub fn num_runs(&self) -> u64 {
        self.dims().iter().map(|dim| dim.count).product()
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        self.num_runs() * self.run_bytes
    }
}

impl Dims {
    fn as_slice(&self) -> &[Dim] {
        &self.axes[..usize::from(self.len)]
    }

    fn as_mut_slice(&mut self) -> &mut [Dim] {
        &mut self.axes[..usize::from(self.len)]
    }

    /// Adds an axis if there is room.
    fn push(&mut self, dim: Dim) -> bool {
        let Some(slot) = self.axes.get_mut(usize::from(self.len)) else { return false };
        *slot = dim;
        self.len += 1;
        true
    }

    fn remove(&mut self, index: usize) {
        let len = usize::from(self.len);
        self.axes.copy_within(index + 1..len, index);
        // Unused axes stay at their default, so that equality is that of the axes in use.
        self.axes[len - 1] = Dim::default();
        self.len -= 1;
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// One side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Where bytes come from.
    Source,
    /// Where bytes go.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Why there is no plan between two layouts, or why a plan does not apply to these blocks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layouts hold different things.
    #[error("layouts differ in {field}: source {src}, destination {dst}; {hint}")]
    Mismatch {
        /// The field that differs.
        field: &'static str,
        /// Its value in the source.
        src: String,
        /// Its value in the destination.
        dst: String,
        /// What to do.
        hint: &'static str,
    },
    /// A selected range is empty or beyond a layout.
    #[error("{axis} {first}..{first}+{len} of the {side}: {rule}")]
    Range {
        /// `layers`, `heads` or `planes`.
        axis: &'static str,
        /// Which layout.
        side: Side,
        /// First index selected.
        first: u32,
        /// How many are selected.
        len: u32,
        /// The rule it breaks.
        rule: String,
    },
    /// The inner order of one layout is not declared, so its bytes cannot be permuted or sliced.
    #[error(
        "the inner order of the {side} ({order}) is not declared, so it can only be copied whole to another such layout; \
         declare it as operational-nhd or operational-hnd"
    )]
    OpaqueInner {
        /// Which layout.
        side: Side,
        /// Its axis order.
        order: crate::layout::AxisOrder,
    },
    /// Opaque planes cannot be cut by head.
    #[error(
        "opaque plane `{plane}` cannot be cut to heads {first}..{first}+{len} of the {side}; copy all heads, or select \
         without planes and move the planes otherwise"
    )]
    PlaneSplit {
        /// The first plane in the way.
        plane: String,
        /// The layout of which only a part of the heads is selected.
        side: Side,
        /// First head selected.
        first: u32,
        /// How many heads are selected.
        len: u32,
    },
    /// The selection moves no byte.
    #[error("the selection is empty: the layouts have opaque planes only, and the selection skips them")]
    Nothing,
    /// A block beyond a layout.
    #[error("{side} block {block} is out of range: the layout has {count} blocks")]
    Block {
        /// Which layout.
        side: Side,
        /// The block id.
        block: u32,
        /// How many blocks there are.
        count: u32,
    },
    /// The slot layout of a fragment list has to be contiguous.
    #[error("the slot layout ({slot}) does not keep a block in one run of bytes; use a FullyContiguous slot")]
    SlotNotContiguous {
        /// What was given.
        slot: String,
    },
    /// Too many fragments to list.
    #[error(
        "a block is cut into {count} fragments, more than {limit}; choose a slot with the axis order of the \
         memory, or copy through a staging buffer"
    )]
    TooManyFragments {
        /// How many.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// A layout gave a wrong answer.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// How to copy a block from one layout to another.
///
/// The plan is relative to the block: the same plan serves every pair of blocks. It has as few
/// contiguous runs as the two layouts allow, but for one case. Where axes are permuted, the last
/// run of one permuted array (a cell, say) and the first of the next may touch on both sides. Such
/// pairs stay apart, because joining them would break the regular pattern. ([`FragmentList`] joins
/// them.)
///
/// # Example
/// ```
/// use kvbm_layout::{
///     AxisOrder, CopyPlan, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement, Selection,
/// };
///
/// let config = LayoutConfig::builder()
///     .num_blocks(64)
///     .num_layers(4)
///     .page_size(16)
///     .inner_dim(1024)
///     .num_heads(8)
///     .dtype(DType::F8E4M3)
///     .build()?;
/// let engine = LayerSeparate::new(config.clone(), AxisOrder::Nhd, OuterPlacement::KvOuter)?;
/// let host = FullyContiguous::new(config, AxisOrder::Nhd)?;
/// let plan = CopyPlan::between(&engine, &host, &Selection::all())?;
/// assert_eq!(plan.num_runs(), 4 * 2);
///
/// let mut copied = 0;
/// plan.for_each_run(3, 9, |run| copied += run.len)?;
/// assert_eq!(copied, plan.bytes_per_block());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    segments: Vec<Segment>,
    src_blocks: u32,
    dst_blocks: u32,
    num_runs: u64,
    bytes_per_block: u64,
}

impl CopyPlan {
    /// The plan that copies `selection` from blocks of `src` to blocks of `dst`.
    ///
    /// # Errors
    /// The field in which the layouts differ, with both values; a range outside a layout; a
    /// permutation or cut of bytes whose order is not known.
    pub fn between(
        src: &dyn BlockLayout,
        dst: &dyn BlockLayout,
        selection: &Selection,
    ) -> Result<Self, PlanError> {
        let segments = build::segments(src, dst, selection)?;
        Ok(Self {
            src_blocks: src.config().num_blocks,
            dst_blocks: dst.config().num_blocks,
            num_runs: segments.iter().map(Segment::num_runs).sum(),
            bytes_per_block: segments.iter().map(Segment::bytes).sum(),
            segments,
        })
    }

    /// The runs in compact form, by destination.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Contiguous runs per block.
    pub fn num_runs(&self) -> u64 {
        self.num_runs
    }

    /// Bytes copied per block.
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_block
    }

    /// True if a block is one run.
    pub fn is_contiguous(&self) -> bool {
        self.num_runs == 1
    }

    /// Blocks of the source layout.
    pub fn src_blocks(&self) -> u32 {
        self.src_blocks
    }

    /// Blocks of the destination layout.
    pub fn dst_blocks(&self) -> u32 {
        self.dst_blocks
    }

    /// The plan that copies the same bytes the other way.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let mut segments: Vec<Segment> = self.segments.iter().map(reverse).collect();
        merge::sort_by_destination(&mut segments);
        Self {
            segments,
            src_blocks: self.dst_blocks,
            dst_blocks: self.src_blocks,
            num_runs: self.num_runs,
            bytes_per_block: self.bytes_per_block,
        }
    }
}

fn reverse(segment: &Segment) -> Segment {
    let mut reversed = Segment {
        src_region: segment.dst_region,
        dst_region: segment.src_region,
        src_offset: segment.dst_offset,
        dst_offset: segment.src_offset,
        src_block_stride: segment.dst_block_stride,
        dst_block_stride: segment.src_block_stride,
        ..*segment
    };
    for dim in reversed.dims.as_mut_slice() {
        std::mem::swap(&mut dim.src_stride, &mut dim.dst_stride);
    }
    merge::sort_dims(&mut reversed);
    reversed
}
