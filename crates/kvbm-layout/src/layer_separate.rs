//! One region per layer: how engines allocate their KV tensors.

use crate::arith;
use crate::config::LayoutConfig;
use crate::geometry::{CellStrides, Geometry, dense_strides, layout_of_geometry, width};
use crate::layout::{AxisOrder, Cell, LayoutError, LayoutType, OuterPlacement, RegionSpec};

/// One region per layer, and one region per layer for each opaque plane.
///
/// ```text
/// regions:  layer 0 | layer 1 | ... | plane 0 of layer 0 | plane 0 of layer 1 | ... | plane 1 of layer 0 | ...
/// KvOuter:       [outer][block][token, head, element]      the keys of all blocks, then the values
/// BlockOuter:    [block][outer][token, head, element]
/// PackedInHead:  [block][token, head, K | V]               one head holds its key and its value side by side
/// ```
/// (`Hnd` swaps token and head.) Blocks are `alignment` bytes aligned in each region; engines pack
/// densely, with alignment 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSeparate {
    geometry: Geometry,
    placement: OuterPlacement,
}

impl LayerSeparate {
    /// The layout of `config`, with `order` inside each chunk.
    ///
    /// # Errors
    /// A broken rule of the config, a size beyond 2^63 - 1 bytes, or an order other than NHD and
    /// HND.
    pub fn new(
        config: LayoutConfig,
        order: AxisOrder,
        placement: OuterPlacement,
    ) -> Result<Self, LayoutError> {
        config.validate()?;
        let head_major = match order {
            AxisOrder::Nhd => false,
            AxisOrder::Hnd => true,
            AxisOrder::Operational(_) | AxisOrder::Universal | AxisOrder::Strided => {
                let supported =
                    "nhd or hnd; the other orders need one contiguous buffer per block (FullyContiguous)";
                return Err(LayoutError::UnsupportedOrder { layout: "LayerSeparate", order, supported });
            }
        };
        let (mut cells, region_bytes) = match placement {
            OuterPlacement::KvOuter => kv_outer(&config, head_major)?,
            OuterPlacement::BlockOuter => block_outer(&config, head_major)?,
            OuterPlacement::PackedInHead => packed_in_head(&config, head_major)?,
        };
        let alignment = Geometry::region_alignment(&config);
        let mut regions = Vec::new();
        if config.outer_dim > 0 {
            regions.resize(config.num_layers as usize, RegionSpec { bytes: region_bytes, alignment });
        }
        for plane in &config.planes {
            let (block_stride, bytes) = blocks(&config, u64::from(plane.bytes_per_layer))?;
            cells.push(CellStrides {
                region: u32::try_from(regions.len())
                    .map_err(|_| LayoutError::TooLarge { what: "regions" })?,
                region_per_layer: 1,
                block_stride,
                elem_stride: 1,
                ..CellStrides::default()
            });
            regions.resize(regions.len() + config.num_layers as usize, RegionSpec { bytes, alignment });
        }
        let layout_type = LayoutType::LayerSeparate(placement);
        Ok(Self { geometry: Geometry { config, layout_type, order, regions, cells }, placement })
    }

    /// Where keys and values stand.
    pub fn placement(&self) -> OuterPlacement {
        self.placement
    }
}

/// Stride and total length of all blocks, when each has `bytes` of payload.
fn blocks(config: &LayoutConfig, bytes: u64) -> Result<(u64, u64), LayoutError> {
    let stride = arith::align_up("one block", bytes, config.alignment)?;
    Ok((stride, arith::product("one region", &[stride, u64::from(config.num_blocks)])?))
}

fn kv_outer(config: &LayoutConfig, head_major: bool) -> Result<(Vec<CellStrides>, u64), LayoutError> {
    let mut cells = Vec::new();
    let mut offset = 0;
    for outer in 0..config.outer_dim {
        let (block_stride, bytes) = blocks(config, config.cell_bytes(Cell::Kv(outer)))?;
        let head_bytes = u64::from(config.head_dim_of(outer)) * width(config);
        cells.push(CellStrides { offset, block_stride, ..dense_cell(config, head_major, head_bytes)? });
        offset = arith::sum("one region", &[offset, bytes])?;
    }
    Ok((cells, offset))
}

fn block_outer(config: &LayoutConfig, head_major: bool) -> Result<(Vec<CellStrides>, u64), LayoutError> {
    let mut cells = Vec::new();
    let mut offset = 0;
    for outer in 0..config.outer_dim {
        let head_bytes = u64::from(config.head_dim_of(outer)) * width(config);
        cells.push(CellStrides { offset, ..dense_cell(config, head_major, head_bytes)? });
        offset = arith::sum("one block", &[offset, config.cell_bytes(Cell::Kv(outer))])?;
    }
    finish_shared_stride(config, cells, offset)
}

fn packed_in_head(config: &LayoutConfig, head_major: bool) -> Result<(Vec<CellStrides>, u64), LayoutError> {
    let head_bytes: u64 =
        (0..config.outer_dim).map(|outer| u64::from(config.head_dim_of(outer)) * width(config)).sum();
    let mut cells = Vec::new();
    let mut offset = 0;
    for outer in 0..config.outer_dim {
        cells.push(CellStrides { offset, ..dense_cell(config, head_major, head_bytes)? });
        offset += u64::from(config.head_dim_of(outer)) * width(config);
    }
    let (tokens, heads) = (u64::from(config.page_size), u64::from(config.num_heads));
    finish_shared_stride(config, cells, arith::product("one block", &[tokens, heads, head_bytes])?)
}

/// Gives all cells the block stride of blocks with `bytes` of payload; the second value is the
/// region's length.
fn finish_shared_stride(
    config: &LayoutConfig,
    mut cells: Vec<CellStrides>,
    bytes: u64,
) -> Result<(Vec<CellStrides>, u64), LayoutError> {
    let (block_stride, region_bytes) = blocks(config, bytes)?;
    for cell in &mut cells {
        cell.block_stride = block_stride;
    }
    Ok((cells, region_bytes))
}

/// Strides inside a dense chunk of heads that are `head_bytes` long, in its own region per layer.
fn dense_cell(config: &LayoutConfig, head_major: bool, head_bytes: u64) -> Result<CellStrides, LayoutError> {
    let (token_stride, head_stride) = dense_strides(config, head_major, head_bytes)?;
    let elem_stride = width(config);
    Ok(CellStrides { region_per_layer: 1, token_stride, head_stride, elem_stride, ..CellStrides::default() })
}

layout_of_geometry!(LayerSeparate);
