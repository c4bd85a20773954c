//! Reading a layout from bytes that nobody vouches for.

use zerocopy::FromBytes;

use super::records::{CellRecord, Header, PlaneRecord, Preamble, RegionRecord};
use super::{
    AXIS_ORDERS, AnyLayout, CHECKSUM_BYTES, LAYOUT_TYPES, LayoutDescriptor, MAGIC, MAX_MESSAGE_BYTES,
    VERSION, WireError, checksum, field, message_bytes,
};
use crate::config::LayoutConfig;
use crate::contiguous::FullyContiguous;
use crate::dtype::DType;
use crate::geometry::CellStrides;
use crate::layer_separate::LayerSeparate;
use crate::layout::{AxisOrder, BlockLayout, LayoutType, RegionSpec};
use crate::strided::StridedLayout;

impl LayoutDescriptor {
    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// Never panics. It allocates in proportion to the length of `message` at most, whatever is in
    /// it.
    ///
    /// # Errors
    /// Anything that a writer of version 1 would not have written, damage, and regions that do not
    /// hold all blocks.
    pub fn decode(message: &[u8]) -> Result<Self, WireError> {
        let body = checked_body(message)?;
        let cut = || length(message, "ends in the middle of a field");
        let (header, rest) = Header::ref_from_prefix(body).map_err(|_| cut())?;
        let num_planes = usize::from(header.num_planes);
        let (num_regions, num_cells) = (header.num_regions.get(), header.num_cells.get());
        let (layout_type, order, config) = config(header)?;
        // Every region and cell takes bytes of the message, so larger counts cannot be true, and
        // the products below cannot overflow.
        for (name, count) in [("number of regions", num_regions), ("number of cells", num_cells)] {
            if count as usize > MAX_MESSAGE_BYTES {
                return Err(field(name, u64::from(count)));
            }
        }
        let (num_regions, num_cells) = (num_regions as usize, num_cells as usize);
        if message_bytes(num_planes, num_regions, num_cells) != message.len() {
            return Err(length(message, "the counts in the header need another length"));
        }
        let (planes, rest) =
            <[PlaneRecord]>::ref_from_prefix_with_elems(rest, num_planes).map_err(|_| cut())?;
        let (regions, rest) =
            <[RegionRecord]>::ref_from_prefix_with_elems(rest, num_regions).map_err(|_| cut())?;
        let (cells, _) = <[CellRecord]>::ref_from_prefix_with_elems(rest, num_cells).map_err(|_| cut())?;
        let planes = planes.iter().map(PlaneRecord::plane).collect::<Result<_, _>>()?;
        let regions: Result<(Vec<_>, Vec<_>), _> = regions.iter().map(RegionRecord::region).collect();
        let (memory, specs) = regions?;
        let cells = cells.iter().map(CellStrides::from).collect();
        let config = LayoutConfig { planes, ..config };
        config.validate().map_err(crate::layout::LayoutError::from)?;
        let layout = layout(config, layout_type, order, &specs, cells)?;
        Self::new(layout, memory)
    }
}

/// Magic, version, length and checksum; the rest is what they protect.
fn checked_body(message: &[u8]) -> Result<&[u8], WireError> {
    if message.len() > MAX_MESSAGE_BYTES {
        return Err(length(message, "longer than 4 MiB"));
    }
    let Ok((preamble, _)) = Preamble::ref_from_prefix(message) else {
        return Err(length(message, "ends in the middle of a field"));
    };
    if preamble.magic != MAGIC {
        return Err(WireError::Magic);
    }
    if preamble.version != VERSION {
        return Err(WireError::Version { found: preamble.version.get() });
    }
    if message.len() as u64 != u64::from(preamble.length.get())
        || message.len() < size_of::<Header>() + CHECKSUM_BYTES
    {
        return Err(length(message, "not the length that the header says"));
    }
    let Some((body, sum)) = message.split_last_chunk::<CHECKSUM_BYTES>() else {
        return Err(length(message, "ends in the middle of a field"));
    };
    let (found, computed) = (u64::from_le_bytes(*sum), checksum(body));
    if found != computed {
        return Err(WireError::Checksum { found, computed });
    }
    if preamble.reserved != 0 {
        return Err(field("reserved", u64::from(preamble.reserved.get())));
    }
    Ok(body)
}

/// Type, order and configuration that a header describes, without planes.
fn config(header: &Header) -> Result<(LayoutType, AxisOrder, LayoutConfig), WireError> {
    let unknown = |name, code: u8| field(name, u64::from(code));
    let layout_type = LAYOUT_TYPES.get(usize::from(header.layout_type));
    let layout_type = *layout_type.ok_or_else(|| unknown("layout type", header.layout_type))?;
    let order = AXIS_ORDERS.get(usize::from(header.order));
    let order = *order.ok_or_else(|| unknown("axis order", header.order))?;
    let dtype = DType::from_code(header.dtype).ok_or_else(|| unknown("dtype", header.dtype))?;
    let config = LayoutConfig {
        num_blocks: header.num_blocks.get(),
        num_layers: header.num_layers.get(),
        outer_dim: header.outer_dim.get(),
        page_size: header.page_size.get(),
        inner_dim: header.inner_dim.get(),
        value_inner_dim: Some(header.value_inner_dim.get()).filter(|&value| value != 0),
        num_heads: header.num_heads.get(),
        alignment: header.alignment.get(),
        dtype,
        planes: Vec::new(),
    };
    Ok((layout_type, order, config))
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
        let copied = cells.clone();
        let layout = StridedLayout::new(config, specs.to_vec(), cells)?;
        if layout.cells() != copied {
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
    for (made, copied) in layout.regions().iter().zip(specs) {
        if made.bytes != copied.bytes {
            return Err(field("bytes of a region", copied.bytes));
        }
        if made.alignment != copied.alignment {
            return Err(field("alignment of a region", copied.alignment));
        }
    }
    Ok(layout)
}

fn length(message: &[u8], rule: &'static str) -> WireError {
    WireError::Length { found: message.len() as u64, rule }
}
