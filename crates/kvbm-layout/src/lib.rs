//! How the bytes of KV blocks lie in memory, and plans that copy blocks between layouts.
//!
//! **Knows:** shapes, strides, alignment, axis orders, and which byte of one layout holds the same
//! element as which byte of another.
//! **Must never know:** memory, files, devices, block identity or anything that moves a byte: it is
//! pure arithmetic, without I/O and without `unsafe`.
//!
//! # Words
//! A *block* holds the keys and values of `page_size` tokens for all layers of a group. One *cell*
//! of a block is the part that belongs to one layer and one outer index (0 = keys, 1 = values; MLA
//! has only one), or to one layer and one opaque plane. Inside a cell, an element is addressed by
//! (token, head, element of the head). A *region* is one contiguous range of memory or of a file.
//!
//! # Example
//! ```
//! use kvbm_layout::{AxisOrder, BlockLayout, Cell, DType, FullyContiguous, LayoutConfig};
//!
//! let config = LayoutConfig::builder()
//!     .num_blocks(1024)
//!     .num_layers(32)
//!     .outer_dim(2)
//!     .page_size(16)
//!     .inner_dim(8 * 128)
//!     .num_heads(8)
//!     .dtype(DType::BF16)
//!     .alignment(4096)
//!     .build()?;
//! let layout = FullyContiguous::new(config, AxisOrder::Nhd)?;
//! assert_eq!(layout.block_stride(), 32 * 2 * 16 * 1024 * 2);
//!
//! // Where do the values of layer 5 of block 7 start?
//! let view = layout.block_view(7, 5, Cell::Kv(1))?;
//! assert_eq!(view.offset, 7 * layout.block_stride() + (5 * 2 + 1) * 16 * 1024 * 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod arith;
mod config;
pub mod conformance;
mod contiguous;
mod dtype;
mod engine_order;
mod geometry;
mod group;
mod layer_separate;
mod layout;
mod opaque;
mod overlap;
mod plan;
mod slice;
mod strided;
mod wire;

pub use config::{ConfigError, LayoutConfig, LayoutConfigBuilder, OpaquePlane};
pub use contiguous::FullyContiguous;
pub use dtype::{DType, UnknownDType};
pub use engine_order::{EngineAxis, EngineOrder, UnknownEngineOrder};
pub use geometry::CellStrides;
pub use group::{LayerGroup, Plane, validate_groups};
pub use layer_separate::LayerSeparate;
pub use layout::{
    AxisOrder, BlockLayout, BlockView, Cell, CellView, ContiguousBlock, InnerOrder, LayoutError, LayoutType,
    OuterPlacement, RegionSpec, UnknownAxisOrder,
};
pub use opaque::{OpaqueLayout, OpaqueTensor};
pub use plan::{
    CopyPlan, Dim, Fragment, FragmentList, Fragments, Grids, MAX_FRAGMENTS, PlanError, Run, RunGrid, Runs,
    Segment, Side,
};
pub use slice::{BlockPart, HeadSlice, Holders, Planes, Selection, SliceError, Span, slice_for_rank};
pub use strided::{EngineRegions, StridedLayout};
pub use wire::{AnyLayout, LayoutDescriptor, MAX_MESSAGE_BYTES, MemoryKind, RegionMemory, WireError};
