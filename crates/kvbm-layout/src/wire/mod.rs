//! A layout with its memory, as bytes that another process can read: versioned, checksummed, and
//! distrusted.
//!
//! All integers are little-endian.
//! ```text
//!   0  8  magic "KVBMLAYT"
//!   8  2  version, 1
//!  10  2  zero
//!  12  4  length of the whole message, checksum included
//!  16  1  layout type      0 fully contiguous, 1 layer-separate K/V outer, 2 block outer, 3 packed in head, 4 strided
//!  17  1  axis order       0 nhd, 1 hnd, 2 operational, 3 operational-nhd, 4 operational-hnd, 5 universal, 6 strided
//!  18  1  dtype            code of DType
//!  19  1  number of opaque planes P
//!  20  4  num_blocks
//!  24  4  num_layers
//!  28  4  outer_dim
//!  32  4  page_size
//!  36  4  inner_dim
//!  40  4  value_inner_dim, 0 if the same as inner_dim
//!  44  4  num_heads
//!  48  8  alignment
//!  56  4  number of regions R
//!  60  4  number of cells C: outer chunks and planes if strided, else 0
//!  64     P planes of 40 bytes:
//!           0  4  bytes per layer     4  4  length of the name     8  32  name, padded with zeros
//!         R regions of 48 bytes:
//!           0  1  memory kind         1  3  zero                   4  4  device id
//!           8  8  address             16 8  size of the memory     24 8  base offset of the region in that memory
//!          32  8  bytes of the region 40 8  alignment of the region
//!         C cells of 56 bytes:
//!           0  4  region              4  4  regions per layer      8  8  offset
//!          16  8  layer stride        24 8  block stride           32 8  token stride
//!          40  8  head stride         48 8  element stride
//!  -8  8  CRC-64/NVME of all bytes before
//! ```
//! A reader accepts exactly what a writer produces: reserved bytes are zero, and the same layout
//! has one encoding.

mod any;
mod decode;
mod encode;
mod records;

pub use any::AnyLayout;

use crate::layout::{
    AxisOrder, BlockLayout, InnerOrder, LayoutError, LayoutType, OuterPlacement, RegionSpec,
};
use records::{CellRecord, Header, PlaneRecord, RegionRecord};

const MAGIC: [u8; 8] = *b"KVBMLAYT";
const VERSION: u16 = 1;
const CHECKSUM_BYTES: usize = 8;

/// Longest message that is read or written.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// Layout types in the order of their wire code.
const LAYOUT_TYPES: [LayoutType; 5] = [
    LayoutType::FullyContiguous,
    LayoutType::LayerSeparate(OuterPlacement::KvOuter),
    LayoutType::LayerSeparate(OuterPlacement::BlockOuter),
    LayoutType::LayerSeparate(OuterPlacement::PackedInHead),
    LayoutType::Strided,
];

/// Axis orders in the order of their wire code.
const AXIS_ORDERS: [AxisOrder; 7] = [
    AxisOrder::Nhd,
    AxisOrder::Hnd,
    AxisOrder::Operational(InnerOrder::Opaque),
    AxisOrder::Operational(InnerOrder::Nhd),
    AxisOrder::Operational(InnerOrder::Hnd),
    AxisOrder::Universal,
    AxisOrder::Strided,
];

/// What kind of memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Pageable host memory.
    System = 0,
    /// Page-locked host memory.
    Pinned = 1,
    /// Device memory (VRAM).
    Device = 2,
    /// A file; the address is 0 and offsets count from its start.
    File = 3,
}

impl MemoryKind {
    /// Every kind, in the order of its wire code.
    pub const ALL: [Self; 4] = [Self::System, Self::Pinned, Self::Device, Self::File];
}

/// Where one region of a layout is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionMemory {
    /// What kind of memory.
    pub kind: MemoryKind,
    /// Device ordinal; 0 for host memory and files.
    pub device_id: u32,
    /// Address of the memory in the process that owns it; 0 for files. Only a number here.
    pub address: u64,
    /// Bytes of the memory from `address` on.
    pub bytes: u64,
    /// Offset of the layout's region in the memory.
    pub base_offset: u64,
}

/// A layout and the memory of each of its regions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescriptor {
    layout: AnyLayout,
    memory: Vec<RegionMemory>,
}

impl LayoutDescriptor {
    /// Puts the regions of `layout`, in order, into `memory`.
    ///
    /// # Errors
    /// A count of regions that differs; memory that does not hold its region, is misaligned, or
    /// wraps around; regions that share memory (files apart, which have no address to tell them
    /// by).
    pub fn new(layout: AnyLayout, memory: Vec<RegionMemory>) -> Result<Self, WireError> {
        let specs = layout.regions();
        if specs.len() != memory.len() {
            let rule = format!("the layout has {} regions", specs.len());
            return Err(WireError::Region { index: 0, field: "count", value: memory.len() as u64, rule });
        }
        for (index, (spec, at)) in specs.iter().zip(&memory).enumerate() {
            let bad = |field, value, rule| Err(WireError::Region { index, field, value, rule });
            if at.kind == MemoryKind::File && at.address != 0 {
                return bad("address", at.address, "a file has address 0".to_owned());
            }
            if at.address.checked_add(at.bytes).is_none() {
                return bad("size", at.bytes, format!("wraps around behind address {:#x}", at.address));
            }
            if at.base_offset.checked_add(spec.bytes).is_none_or(|end| end > at.bytes) {
                let rule = format!("{} bytes behind it exceed the memory of {} bytes", spec.bytes, at.bytes);
                return bad("base_offset", at.base_offset, rule);
            }
            if !(at.address + at.base_offset).is_multiple_of(spec.alignment) {
                let rule = format!("the region has to be aligned to {} bytes", spec.alignment);
                return bad("address + base_offset", at.address + at.base_offset, rule);
            }
        }
        regions_are_apart(specs, &memory)?;
        Ok(Self { layout, memory })
    }

    /// The layout.
    pub fn layout(&self) -> &AnyLayout {
        &self.layout
    }

    /// The memory of each region, in order.
    pub fn memory(&self) -> &[RegionMemory] {
        &self.memory
    }
}

fn regions_are_apart(specs: &[RegionSpec], memory: &[RegionMemory]) -> Result<(), WireError> {
    let mut places: Vec<_> = (0..memory.len())
        .filter(|&index| memory[index].kind != MemoryKind::File)
        .map(|index| {
            let at = &memory[index];
            // Host addresses share one space, page-locked or not.
            let device = (at.kind == MemoryKind::Device).then_some(at.device_id);
            let start = at.address + at.base_offset;
            (device, start, start + specs[index].bytes, index)
        })
        .collect();
    places.sort_unstable();
    for pair in places.windows(2) {
        let ((device, _, end, first), (next_device, start, _, index)) = (pair[0], pair[1]);
        if device == next_device && start < end {
            let rule = format!("shares memory with region {first}");
            return Err(WireError::Region { index, field: "address + base_offset", value: start, rule });
        }
    }
    Ok(())
}

/// Why bytes are not a layout, or a layout cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not a serialized layout.
    #[error("not a serialized layout: it does not start with KVBMLAYT")]
    Magic,
    /// Another version of the format.
    #[error(
        "layout format version {found} is not supported; this build reads version 1: upgrade the older side"
    )]
    Version {
        /// The version found.
        found: u16,
    },
    /// Too short, too long, or not the length it claims.
    #[error("serialized layout of {found} bytes: {rule}")]
    Length {
        /// Bytes at hand, or claimed.
        found: u64,
        /// The rule it breaks.
        rule: &'static str,
    },
    /// Damaged on the way.
    #[error(
        "checksum {found:#018x} of the serialized layout differs from the computed {computed:#018x}: fetch it again"
    )]
    Checksum {
        /// The checksum in the message.
        found: u64,
        /// The checksum of its bytes.
        computed: u64,
    },
    /// More planes than the format can count.
    #[error("a layout of {found} opaque planes cannot be serialized: the format counts to 255")]
    Planes {
        /// Planes of the layout.
        found: usize,
    },
    /// A field with an unknown or impossible value.
    #[error("serialized layout: {field} = {value} is unknown or inconsistent with the other fields")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Memory that does not hold its region.
    #[error("memory of region {index}: {field} = {value}: {rule}")]
    Region {
        /// Which region.
        index: usize,
        /// What is wrong with it.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The rule it breaks.
        rule: String,
    },
    /// The described shape is no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Length of a message with so many planes, regions and cells, checksum included.
const fn message_bytes(planes: usize, regions: usize, cells: usize) -> usize {
    size_of::<Header>()
        + planes * size_of::<PlaneRecord>()
        + regions * size_of::<RegionRecord>()
        + cells * size_of::<CellRecord>()
        + CHECKSUM_BYTES
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

fn field(field: &'static str, value: u64) -> WireError {
    WireError::Field { field, value }
}
