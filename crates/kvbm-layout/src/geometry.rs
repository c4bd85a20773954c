//! The one description behind every layout of this crate: each cell is affine in block, layer,
//! token, head and element.

use crate::arith;
use crate::config::LayoutConfig;
use crate::layout::{AxisOrder, Cell, CellView, InnerOrder, LayoutError, LayoutType, RegionSpec};

/// Where one cell (an outer chunk or an opaque plane) lies, over all layers and blocks. All strides
/// are in bytes.
///
/// In layer `l`, the cell is in region `region + l * region_per_layer`, at
/// ```text
/// offset + l * layer_stride + block * block_stride
///     + token * token_stride + head * head_stride + element * elem_stride
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CellStrides {
    /// Region of layer 0.
    pub region: u32,
    /// Regions from one layer to the next; 0 if all layers share a region.
    pub region_per_layer: u32,
    /// Offset of the first element of layer 0, block 0.
    pub offset: u64,
    /// From one layer to the next, within a region.
    pub layer_stride: u64,
    /// From one block to the next.
    pub block_stride: u64,
    /// From one token to the next; ignored (0) for opaque cells.
    pub token_stride: u64,
    /// From one head to the next; ignored (0) for opaque cells.
    pub head_stride: u64,
    /// From one element to the next; the element width for opaque cells.
    pub elem_stride: u64,
}

/// A validated shape with its regions and cells, in the order of [`LayoutConfig::cells`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) config: LayoutConfig,
    pub(crate) layout_type: LayoutType,
    pub(crate) order: AxisOrder,
    pub(crate) regions: Vec<RegionSpec>,
    pub(crate) cells: Vec<CellStrides>,
}

/// Makes a type with a field `geometry` the layout that the geometry describes.
macro_rules! layout_of_geometry {
    ($layout:ty) => {
        impl $crate::BlockLayout for $layout {
            fn config(&self) -> &$crate::LayoutConfig {
                &self.geometry.config
            }

            fn layout_type(&self) -> $crate::LayoutType {
                self.geometry.layout_type
            }

            fn axis_order(&self) -> $crate::AxisOrder {
                self.geometry.order
            }

            fn regions(&self) -> &[$crate::RegionSpec] {
                &self.geometry.regions
            }

            fn view(&self, layer: u32, cell: $crate::Cell) -> Result<$crate::CellView, $crate::LayoutError> {
                self.geometry.view(layer, cell)
            }
        }
    };
}
pub(crate) use layout_of_geometry;

impl Geometry {
    pub(crate) fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError> {
        let config = &self.config;
        if layer >= config.num_layers {
            return Err(LayoutError::OutOfRange { axis: "layer", index: layer, count: config.num_layers });
        }
        let at = &self.cells[cell_index(config, cell)?];
        let opaque_inner = self.order == AxisOrder::Operational(InnerOrder::Opaque);
        let (tokens, heads, elems, elem_bytes, opaque) = match cell {
            Cell::Plane(_) => (1, 1, config.cell_bytes(cell), 1, true),
            Cell::Kv(_) if opaque_inner => {
                (1, 1, config.cell_bytes(cell) / width(config), config.dtype.width(), true)
            }
            Cell::Kv(outer) => {
                let elems = u64::from(config.head_dim_of(outer));
                (config.page_size, config.num_heads, elems, config.dtype.width(), false)
            }
        };
        Ok(CellView {
            region: at.region + layer * at.region_per_layer,
            offset: at.offset + u64::from(layer) * at.layer_stride,
            block_stride: at.block_stride,
            tokens,
            heads,
            elems,
            elem_bytes,
            token_stride: if opaque { 0 } else { at.token_stride },
            head_stride: if opaque { 0 } else { at.head_stride },
            elem_stride: if opaque { u64::from(elem_bytes) } else { at.elem_stride },
            opaque,
        })
    }

    /// Alignment that the first byte of a region must have: that of a block, and at least that of
    /// an element.
    pub(crate) fn region_alignment(config: &LayoutConfig) -> u64 {
        config.alignment.max(width(config))
    }
}

/// Index of `cell` in the order of [`LayoutConfig::cells`].
pub(crate) fn cell_index(config: &LayoutConfig, cell: Cell) -> Result<usize, LayoutError> {
    let (axis, index, count, base) = match cell {
        Cell::Kv(outer) => ("outer", outer, config.outer_dim, 0),
        Cell::Plane(plane) => ("plane", plane, config.cells_per_layer() - config.outer_dim, config.outer_dim),
    };
    if index >= count {
        return Err(LayoutError::OutOfRange { axis, index, count });
    }
    Ok((base + index) as usize)
}

pub(crate) fn width(config: &LayoutConfig) -> u64 {
    u64::from(config.dtype.width())
}

/// Token, head and element strides of a dense chunk `[token, head, elem]` or `[head, token, elem]`
/// whose heads are `head_bytes` long.
pub(crate) fn dense_strides(
    config: &LayoutConfig,
    head_major: bool,
    head_bytes: u64,
) -> Result<(u64, u64), LayoutError> {
    let what = "one layer of a block";
    let (tokens, heads) = (u64::from(config.page_size), u64::from(config.num_heads));
    if head_major {
        Ok((head_bytes, arith::product(what, &[tokens, head_bytes])?))
    } else {
        Ok((arith::product(what, &[heads, head_bytes])?, head_bytes))
    }
}
