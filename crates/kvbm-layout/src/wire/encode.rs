//! Writing a layout.

use super::{
    AnyLayout, CELL_BYTES, CHECKSUM_BYTES, HEADER_BYTES, LayoutDescriptor, MAGIC, MAX_MESSAGE_BYTES,
    PLANE_BYTES, REGION_BYTES, RegionMemory, VERSION, WireError, checksum,
};
use crate::config::{LayoutConfig, MAX_PLANE_NAME, OpaquePlane};
use crate::geometry::CellStrides;
use crate::layout::{AxisOrder, BlockLayout, InnerOrder, LayoutType, OuterPlacement, RegionSpec};

/// Layout types in the order of their wire code.
pub(super) const LAYOUT_TYPES: [LayoutType; 5] = [
    LayoutType::FullyContiguous,
    LayoutType::LayerSeparate(OuterPlacement::KvOuter),
    LayoutType::LayerSeparate(OuterPlacement::BlockOuter),
    LayoutType::LayerSeparate(OuterPlacement::PackedInHead),
    LayoutType::Strided,
];

/// Axis orders in the order of their wire code.
pub(super) const AXIS_ORDERS: [AxisOrder; 7] = [
    AxisOrder::Nhd,
    AxisOrder::Hnd,
    AxisOrder::Operational(InnerOrder::Opaque),
    AxisOrder::Operational(InnerOrder::Nhd),
    AxisOrder::Operational(InnerOrder::Hnd),
    AxisOrder::Universal,
    AxisOrder::Strided,
];

impl LayoutDescriptor {
    /// The message that [`decode`](Self::decode) reads.
    ///
    /// # Errors
    /// [`WireError::Length`] beyond [`MAX_MESSAGE_BYTES`]: some 87,000 regions; [`WireError::Planes`].
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let config = self.layout.config();
        let num_planes = u8::try_from(config.planes.len());
        let num_planes = num_planes.map_err(|_| WireError::Planes { found: config.planes.len() })?;
        let cells = match &self.layout {
            AnyLayout::Strided(layout) => layout.cells(),
            AnyLayout::FullyContiguous(_) | AnyLayout::LayerSeparate(_) => &[],
        };
        let length = HEADER_BYTES
            + config.planes.len() * PLANE_BYTES
            + self.memory.len() * REGION_BYTES
            + cells.len() * CELL_BYTES
            + CHECKSUM_BYTES;
        if length > MAX_MESSAGE_BYTES {
            return Err(WireError::Length {
                found: length as u64,
                rule: "longer than 4 MiB; describe fewer regions",
            });
        }
        let mut out = Vec::with_capacity(length);
        self.header(&mut out, length, num_planes, cells.len());
        for one in &config.planes {
            plane(&mut out, one);
        }
        for (at, spec) in self.memory.iter().zip(self.layout.regions()) {
            region(&mut out, at, *spec);
        }
        for one in cells {
            cell(&mut out, one);
        }
        let sum = checksum(&out);
        out.extend(sum.to_le_bytes());
        debug_assert_eq!(out.len(), length);
        Ok(out)
    }

    fn header(&self, out: &mut Vec<u8>, length: usize, num_planes: u8, num_cells: usize) {
        let config: &LayoutConfig = self.layout.config();
        let layout_type = code_of(&LAYOUT_TYPES, &self.layout.layout_type());
        let order = code_of(&AXIS_ORDERS, &self.layout.axis_order());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(0_u16.to_le_bytes());
        out.extend((length as u32).to_le_bytes());
        out.extend([layout_type, order, config.dtype.code(), num_planes]);
        for value in [
            config.num_blocks,
            config.num_layers,
            config.outer_dim,
            config.page_size,
            config.inner_dim,
            config.value_inner_dim.unwrap_or(0),
            config.num_heads,
        ] {
            out.extend(value.to_le_bytes());
        }
        out.extend(config.alignment.to_le_bytes());
        out.extend((self.memory.len() as u32).to_le_bytes());
        out.extend((num_cells as u32).to_le_bytes());
        debug_assert_eq!(out.len(), HEADER_BYTES);
    }
}

/// Index of `value` in its table. Every variant is listed, so the search cannot fail; 255 is no code.
fn code_of<T: PartialEq>(table: &[T], value: &T) -> u8 {
    table.iter().position(|known| known == value).map_or(u8::MAX, |index| index as u8)
}

fn plane(out: &mut Vec<u8>, plane: &OpaquePlane) {
    let mut name = [0; MAX_PLANE_NAME];
    name[..plane.name.len()].copy_from_slice(plane.name.as_bytes());
    out.extend(plane.bytes_per_layer.to_le_bytes());
    out.extend((plane.name.len() as u32).to_le_bytes());
    out.extend(name);
}

fn region(out: &mut Vec<u8>, at: &RegionMemory, spec: RegionSpec) {
    out.extend([at.kind as u8, 0, 0, 0]);
    out.extend(at.device_id.to_le_bytes());
    for value in [at.address, at.bytes, at.base_offset, spec.bytes, spec.alignment] {
        out.extend(value.to_le_bytes());
    }
}

fn cell(out: &mut Vec<u8>, cell: &CellStrides) {
    out.extend(cell.region.to_le_bytes());
    out.extend(cell.region_per_layer.to_le_bytes());
    for value in [
        cell.offset,
        cell.layer_stride,
        cell.block_stride,
        cell.token_stride,
        cell.head_stride,
        cell.elem_stride,
    ] {
        out.extend(value.to_le_bytes());
    }
}
