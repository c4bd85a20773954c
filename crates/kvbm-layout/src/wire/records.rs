//! The fixed-size parts of a serialized layout, byte for byte.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{MemoryKind, RegionMemory, WireError, field};
use crate::config::{MAX_PLANE_NAME, OpaquePlane};
use crate::geometry::CellStrides;
use crate::layout::RegionSpec;

/// What every version begins with.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Preamble {
    pub(super) magic: [u8; 8],
    pub(super) version: U16,
    pub(super) reserved: U16,
    /// Bytes of the whole message.
    pub(super) length: U32,
}

/// The beginning of version 1; planes, regions and cells follow.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Header {
    pub(super) preamble: Preamble,
    /// Index in [`LAYOUT_TYPES`](super::LAYOUT_TYPES).
    pub(super) layout_type: u8,
    /// Index in [`AXIS_ORDERS`](super::AXIS_ORDERS).
    pub(super) order: u8,
    pub(super) dtype: u8,
    pub(super) num_planes: u8,
    pub(super) num_blocks: U32,
    pub(super) num_layers: U32,
    pub(super) outer_dim: U32,
    pub(super) page_size: U32,
    pub(super) inner_dim: U32,
    /// 0 if the same as `inner_dim`.
    pub(super) value_inner_dim: U32,
    pub(super) num_heads: U32,
    pub(super) alignment: U64,
    pub(super) num_regions: U32,
    pub(super) num_cells: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct PlaneRecord {
    bytes_per_layer: U32,
    name_len: U32,
    /// Padded with zeros.
    name: [u8; MAX_PLANE_NAME],
}

impl From<&OpaquePlane> for PlaneRecord {
    fn from(plane: &OpaquePlane) -> Self {
        let mut name = [0; MAX_PLANE_NAME];
        name[..plane.name.len()].copy_from_slice(plane.name.as_bytes());
        let name_len = (plane.name.len() as u32).into();
        Self { bytes_per_layer: plane.bytes_per_layer.into(), name_len, name }
    }
}

impl PlaneRecord {
    pub(super) fn plane(&self) -> Result<OpaquePlane, WireError> {
        let bad = || field("length of a plane's name", u64::from(self.name_len.get()));
        let split = self.name.split_at_checked(self.name_len.get() as usize);
        let (used, padding) = split.ok_or_else(bad)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(bad());
        }
        let name = std::str::from_utf8(used).map_err(|_| bad())?;
        Ok(OpaquePlane::new(name, self.bytes_per_layer.get()))
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RegionRecord {
    /// Index in [`MemoryKind::ALL`].
    kind: u8,
    zeros: [u8; 3],
    device_id: U32,
    address: U64,
    memory_bytes: U64,
    base_offset: U64,
    bytes: U64,
    alignment: U64,
}

impl RegionRecord {
    pub(super) fn new(memory: &RegionMemory, spec: RegionSpec) -> Self {
        Self {
            kind: memory.kind as u8,
            zeros: [0; 3],
            device_id: memory.device_id.into(),
            address: memory.address.into(),
            memory_bytes: memory.bytes.into(),
            base_offset: memory.base_offset.into(),
            bytes: spec.bytes.into(),
            alignment: spec.alignment.into(),
        }
    }

    pub(super) fn region(&self) -> Result<(RegionMemory, RegionSpec), WireError> {
        if self.zeros != [0; 3] {
            return Err(field("reserved", u64::from(self.zeros[0])));
        }
        let kind = MemoryKind::ALL.get(usize::from(self.kind));
        let memory = RegionMemory {
            kind: *kind.ok_or_else(|| field("memory kind", u64::from(self.kind)))?,
            device_id: self.device_id.get(),
            address: self.address.get(),
            bytes: self.memory_bytes.get(),
            base_offset: self.base_offset.get(),
        };
        Ok((memory, RegionSpec { bytes: self.bytes.get(), alignment: self.alignment.get() }))
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct CellRecord {
    region: U32,
    region_per_layer: U32,
    offset: U64,
    layer_stride: U64,
    block_stride: U64,
    token_stride: U64,
    head_stride: U64,
    elem_stride: U64,
}

impl From<&CellStrides> for CellRecord {
    fn from(cell: &CellStrides) -> Self {
        Self {
            region: cell.region.into(),
            region_per_layer: cell.region_per_layer.into(),
            offset: cell.offset.into(),
            layer_stride: cell.layer_stride.into(),
            block_stride: cell.block_stride.into(),
            token_stride: cell.token_stride.into(),
            head_stride: cell.head_stride.into(),
            elem_stride: cell.elem_stride.into(),
        }
    }
}

impl From<&CellRecord> for CellStrides {
    fn from(cell: &CellRecord) -> Self {
        Self {
            region: cell.region.get(),
            region_per_layer: cell.region_per_layer.get(),
            offset: cell.offset.get(),
            layer_stride: cell.layer_stride.get(),
            block_stride: cell.block_stride.get(),
            token_stride: cell.token_stride.get(),
            head_stride: cell.head_stride.get(),
            elem_stride: cell.elem_stride.get(),
        }
    }
}
