//! Reading a layout from bytes that nobody vouches for.

use super::encode::{AXIS_ORDERS, LAYOUT_TYPES};
use super::{
    AnyLayout, CELL_BYTES, CHECKSUM_BYTES, HEADER_BYTES, LayoutDescriptor, MAGIC, MAX_MESSAGE_BYTES,
    MemoryKind, PLANE_BYTES, REGION_BYTES, RegionMemory, VERSION, WireError, checksum,
};
use crate::config::{LayoutConfig, MAX_PLANE_NAME, OpaquePlane};
use crate::contiguous::FullyContiguous;
use crate::dtype::DType;
use crate::geometry::CellStrides;
use crate::layer_separate::LayerSeparate;
use crate::layout::{AxisOrder, BlockLayout, LayoutType, RegionSpec};
use crate::strided::StridedLayout;

impl LayoutDescriptor {
    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// Never panics, and never allocates more than in proportion to the length of `message`, whatever is in
    /// it.
    ///
    /// # Errors
    /// Anything that a writer of version 1 would not have written, damage, and regions that do not hold all
    /// blocks.
    pub fn decode(message: &[u8]) -> Result<Self, WireError> {
        let body = checked_body(message)?;
        let mut reader = Reader { rest: body };
        let header = Header::read(&mut reader)?;
        let expected = HEADER_BYTES
            + header.num_planes * PLANE_BYTES
            + header.num_regions * REGION_BYTES
            + header.num_cells * CELL_BYTES;
        if expected != body.len() {
            return Err(length(message, "the counts in the header need another length"));
        }
        let planes = (0..header.num_planes).map(|_| plane(&mut reader)).collect::<Result<_, _>>()?;
        let (memory, specs): (Vec<_>, Vec<_>) =
            (0..header.num_regions).map(|_| region(&mut reader)).collect::<Result<_, _>>()?;
        let cells: Vec<_> = (0..header.num_cells).map(|_| cell(&mut reader)).collect::<Result<_, _>>()?;
        let config = LayoutConfig { planes, ..header.config };
        config.validate().map_err(crate::layout::LayoutError::from)?;
        let layout = layout(config, header.layout_type, header.order, &specs, cells)?;
        Self::new(layout, memory)
    }
}

/// Magic, version, length and checksum; the rest is what they protect.
fn checked_body(message: &[u8]) -> Result<&[u8], WireError> {
    if message.len() > MAX_MESSAGE_BYTES {
        return Err(length(message, "longer than 4 MiB"));
    }
    let mut start = Reader { rest: message };
    if start.bytes::<8>()? != MAGIC {
        return Err(WireError::Magic);
    }
    let found = u16::from_le_bytes(start.bytes()?);
    if found != VERSION {
        return Err(WireError::Version { found });
    }
    let reserved = u16::from_le_bytes(start.bytes()?);
    let claimed = start.u32()?;
    if message.len() as u64 != u64::from(claimed) || message.len() < HEADER_BYTES + CHECKSUM_BYTES {
        return Err(length(message, "not the length that the header says"));
    }
    let (body, sum) = message.split_at(message.len() - CHECKSUM_BYTES);
    let (found, computed) = (Reader { rest: sum }.u64()?, checksum(body));
    if found != computed {
        return Err(WireError::Checksum { found, computed });
    }
    if reserved != 0 {
        return Err(field("reserved", u64::from(reserved)));
    }
    Ok(body)
}

struct Header {
    layout_type: LayoutType,
    order: AxisOrder,
    config: LayoutConfig,
    num_planes: usize,
    num_regions: usize,
    num_cells: usize,
}

impl Header {
    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        reader.bytes::<16>()?;
        let [layout_type, order, dtype, num_planes] = reader.bytes()?;
        let coded = |name, code: u8| field(name, u64::from(code));
        let layout_type =
            *LAYOUT_TYPES.get(usize::from(layout_type)).ok_or_else(|| coded("layout type", layout_type))?;
        let order = *AXIS_ORDERS.get(usize::from(order)).ok_or_else(|| coded("axis order", order))?;
        let dtype = DType::from_code(dtype).ok_or_else(|| coded("dtype", dtype))?;
        let config = LayoutConfig {
            num_blocks: reader.u32()?,
            num_layers: reader.u32()?,
            outer_dim: reader.u32()?,
            page_size: reader.u32()?,
            inner_dim: reader.u32()?,
            value_inner_dim: Some(reader.u32()?).filter(|&value| value != 0),
            num_heads: reader.u32()?,
            alignment: reader.u64()?,
            dtype,
            planes: Vec::new(),
        };
        let (regions, cells) = (reader.u32()?, reader.u32()?);
        // Every region and cell takes bytes of the message, so larger counts cannot be true, and the products
        // above cannot overflow.
        for (name, count) in [("number of regions", regions), ("number of cells", cells)] {
            if count as usize > MAX_MESSAGE_BYTES {
                return Err(field(name, u64::from(count)));
            }
        }
        let (num_regions, num_cells) = (regions as usize, cells as usize);
        Ok(Self { layout_type, order, config, num_planes: num_planes.into(), num_regions, num_cells })
    }
}

fn layout(
    config: LayoutConfig,
    layout_type: LayoutType,
    order: AxisOrder,
    specs: &[RegionSpec],
    cells: Vec<CellStrides>,
) -> Result<AnyLayout, WireError> {
    if layout_type == LayoutType::Strided {
        if order != AxisOrder::Strided {
            return Err(field("axis order", 6));
        }
        let told = cells.clone();
        let layout = StridedLayout::new(config, specs.to_vec(), cells)?;
        if layout.cells() != told {
            return Err(field("strides of an opaque plane", 0));
        }
        return Ok(layout.into());
    }
    if !cells.is_empty() {
        return Err(field("number of cells", cells.len() as u64));
    }
    // A region per layer and cell kind at most: checked before the constructor allocates them.
    let per_layer = u64::from(config.cells_per_layer());
    if specs.len() as u64 > u64::from(config.num_layers).saturating_mul(per_layer) {
        return Err(field("number of regions", specs.len() as u64));
    }
    let layout: AnyLayout = match layout_type {
        LayoutType::LayerSeparate(placement) => {
            if (specs.len() as u64) < u64::from(config.num_layers) {
                return Err(field("number of regions", specs.len() as u64));
            }
            LayerSeparate::new(config, order, placement)?.into()
        }
        LayoutType::FullyContiguous | LayoutType::Strided => FullyContiguous::new(config, order)?.into(),
    };
    if layout.regions().len() != specs.len() {
        return Err(field("number of regions", specs.len() as u64));
    }
    for (made, told) in layout.regions().iter().zip(specs) {
        if made.bytes != told.bytes {
            return Err(field("bytes of a region", told.bytes));
        }
        if made.alignment != told.alignment {
            return Err(field("alignment of a region", told.alignment));
        }
    }
    Ok(layout)
}

fn plane(reader: &mut Reader<'_>) -> Result<OpaquePlane, WireError> {
    let (bytes_per_layer, name_len) = (reader.u32()?, reader.u32()?);
    let name = reader.bytes::<MAX_PLANE_NAME>()?;
    let bad = || field("length of a plane's name", u64::from(name_len));
    let (used, padding) = name.split_at_checked(name_len as usize).ok_or_else(bad)?;
    if padding.iter().any(|&byte| byte != 0) {
        return Err(bad());
    }
    let name = std::str::from_utf8(used).map_err(|_| bad())?;
    Ok(OpaquePlane::new(name, bytes_per_layer))
}

fn region(reader: &mut Reader<'_>) -> Result<(RegionMemory, RegionSpec), WireError> {
    let [kind, zeros @ ..] = reader.bytes::<4>()?;
    if zeros != [0; 3] {
        return Err(field("reserved", u64::from(zeros[0])));
    }
    let kind =
        *MemoryKind::ALL.get(usize::from(kind)).ok_or_else(|| field("memory kind", u64::from(kind)))?;
    let memory = RegionMemory {
        kind,
        device_id: reader.u32()?,
        address: reader.u64()?,
        bytes: reader.u64()?,
        base_offset: reader.u64()?,
    };
    Ok((memory, RegionSpec { bytes: reader.u64()?, alignment: reader.u64()? }))
}

fn cell(reader: &mut Reader<'_>) -> Result<CellStrides, WireError> {
    Ok(CellStrides {
        region: reader.u32()?,
        region_per_layer: reader.u32()?,
        offset: reader.u64()?,
        layer_stride: reader.u64()?,
        block_stride: reader.u64()?,
        token_stride: reader.u64()?,
        head_stride: reader.u64()?,
        elem_stride: reader.u64()?,
    })
}

fn field(field: &'static str, value: u64) -> WireError {
    WireError::Field { field, value }
}

fn length(message: &[u8], rule: &'static str) -> WireError {
    WireError::Length { found: message.len() as u64, rule }
}

/// Reads fixed-size fields; the end of the message is an error.
struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let Some((field, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(WireError::Length {
                found: self.rest.len() as u64,
                rule: "ends in the middle of a field",
            });
        };
        self.rest = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.bytes().map(u64::from_le_bytes)
    }
}
