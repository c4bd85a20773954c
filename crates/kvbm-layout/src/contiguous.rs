//! All layers of all blocks in one region; the default layout of every tier that we own.

use crate::arith;
use crate::config::LayoutConfig;
use crate::geometry::{CellStrides, Geometry, dense_strides, layout_of_geometry, width};
use crate::layout::{AxisOrder, Cell, InnerOrder, LayoutError, LayoutType, RegionSpec};

/// One region in which each block is one contiguous range.
///
/// ```text
/// region:  | block 0 | pad | block 1 | pad | ...      block_stride = align_up(num_layers * layer_stride, alignment)
/// block:   | keys and values of all layers | plane 0 of all layers | plane 1 of all layers | ...
/// nhd, hnd, operational:  [layer, outer, ...]         universal:  [head, layer, outer, token, element]
/// ```
/// `layer_stride` is the payload of a layer: all outer chunks and planes. Planes stand behind the
/// keys and values of all layers, so that a plane of odd length cannot misalign elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullyContiguous {
    geometry: Geometry,
    block_stride: u64,
}

impl FullyContiguous {
    /// The layout of `config` with the given order of axes.
    ///
    /// # Errors
    /// A broken rule of the config, a size beyond 2^63 - 1 bytes, or [`AxisOrder::Strided`].
    pub fn new(config: LayoutConfig, order: AxisOrder) -> Result<Self, LayoutError> {
        Self::in_slots(config, order, 0)
    }

    /// The same in slots of `slot_bytes` bytes, or more where alignment asks for it: slots of one
    /// size hold blocks of several shapes. Slots shorter than a block have the block's length.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_slots(config: LayoutConfig, order: AxisOrder, slot_bytes: u64) -> Result<Self, LayoutError> {
        config.validate()?;
        let what = "one block";
        let layers = u64::from(config.num_layers);
        let block_bytes = arith::product(what, &[layers, config.layer_bytes()])?;
        // Keys and values are a multiple of the element width anyway; odd planes must not misalign
        // the next block.
        let slot_bytes = block_bytes.max(slot_bytes);
        let block_stride = arith::align_up(what, slot_bytes, Geometry::region_alignment(&config))?;
        let bytes = arith::product("the layout", &[block_stride, u64::from(config.num_blocks)])?;

        let mut cells = kv_cells(&config, order)?;
        let kv_layer_bytes: u64 = (0..config.outer_dim).map(|outer| config.cell_bytes(Cell::Kv(outer))).sum();
        let mut offset = layers * kv_layer_bytes;
        for plane in &config.planes {
            let layer_stride = u64::from(plane.bytes_per_layer);
            cells.push(CellStrides { offset, layer_stride, elem_stride: 1, ..CellStrides::default() });
            offset += layers * layer_stride;
        }
        for cell in &mut cells {
            cell.block_stride = block_stride;
        }
        let regions = vec![RegionSpec { bytes, alignment: Geometry::region_alignment(&config) }];
        let geometry = Geometry { config, layout_type: LayoutType::FullyContiguous, order, regions, cells };
        Ok(Self { geometry, block_stride })
    }

    /// Bytes from one block to the next: `align_up(num_layers * layer_stride, alignment)`.
    pub fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// Payload bytes of one layer of a block: `layer_stride` of the formula above.
    pub fn layer_stride(&self) -> u64 {
        self.geometry.config.layer_bytes()
    }
}

/// Cells of the keys and values, without their block stride.
fn kv_cells(config: &LayoutConfig, order: AxisOrder) -> Result<Vec<CellStrides>, LayoutError> {
    let what = "one block";
    let layer_stride: u64 = (0..config.outer_dim).map(|outer| config.cell_bytes(Cell::Kv(outer))).sum();
    let mut offset = 0;
    let mut cells = Vec::with_capacity(config.cells_per_layer() as usize);
    for outer in 0..config.outer_dim {
        let head_bytes = u64::from(config.head_dim_of(outer)) * width(config);
        let mut cell =
            CellStrides { offset, layer_stride, elem_stride: width(config), ..CellStrides::default() };
        match order {
            AxisOrder::Nhd | AxisOrder::Operational(InnerOrder::Nhd | InnerOrder::Opaque) => {
                (cell.token_stride, cell.head_stride) = dense_strides(config, false, head_bytes)?;
            }
            AxisOrder::Hnd | AxisOrder::Operational(InnerOrder::Hnd) => {
                (cell.token_stride, cell.head_stride) = dense_strides(config, true, head_bytes)?;
            }
            AxisOrder::Universal => {
                let heads = u64::from(config.num_heads);
                cell.token_stride = head_bytes;
                cell.head_stride =
                    arith::product(what, &[u64::from(config.num_layers), layer_stride / heads])?;
                cell.layer_stride = layer_stride / heads;
                cell.offset = offset / heads;
            }
            AxisOrder::Strided => {
                let supported = "nhd, hnd, operational or universal, or StridedLayout for explicit strides";
                return Err(LayoutError::UnsupportedOrder { layout: "FullyContiguous", order, supported });
            }
        }
        offset += config.cell_bytes(Cell::Kv(outer));
        cells.push(cell);
    }
    Ok(cells)
}

layout_of_geometry!(FullyContiguous);
