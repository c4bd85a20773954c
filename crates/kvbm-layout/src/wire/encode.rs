//! Writing a layout.

use zerocopy::IntoBytes;

use super::records::{CellRecord, Header, PlaneRecord, Preamble, RegionRecord};
use super::{
    AXIS_ORDERS, AnyLayout, LAYOUT_TYPES, LayoutDescriptor, MAGIC, MAX_MESSAGE_BYTES, VERSION, WireError,
    checksum, message_bytes,
};
use crate::layout::BlockLayout;

impl LayoutDescriptor {
    /// The message that [`decode`](Self::decode) reads.
    ///
    /// # Errors
    /// [`WireError::Length`] beyond [`MAX_MESSAGE_BYTES`]: some 87,000 regions;
    /// [`WireError::Planes`].
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let config = self.layout.config();
        let num_planes = u8::try_from(config.planes.len());
        let num_planes = num_planes.map_err(|_| WireError::Planes { found: config.planes.len() })?;
        let cells = match &self.layout {
            AnyLayout::Strided(layout) => layout.cells(),
            AnyLayout::FullyContiguous(_) | AnyLayout::LayerSeparate(_) => &[],
        };
        let length = message_bytes(config.planes.len(), self.memory.len(), cells.len());
        if length > MAX_MESSAGE_BYTES {
            return Err(WireError::Length {
                found: length as u64,
                rule: "longer than 4 MiB; describe fewer regions",
            });
        }
        let mut out = Vec::with_capacity(length);
        out.extend(self.header(length, num_planes, cells.len()).as_bytes());
        for plane in &config.planes {
            out.extend(PlaneRecord::from(plane).as_bytes());
        }
        for (memory, spec) in self.memory.iter().zip(self.layout.regions()) {
            out.extend(RegionRecord::new(memory, *spec).as_bytes());
        }
        for cell in cells {
            out.extend(CellRecord::from(cell).as_bytes());
        }
        let sum = checksum(&out);
        out.extend(sum.to_le_bytes());
        debug_assert_eq!(out.len(), length);
        Ok(out)
    }

    fn header(&self, length: usize, num_planes: u8, num_cells: usize) -> Header {
        let config = self.layout.config();
        let length = (length as u32).into();
        Header {
            preamble: Preamble { magic: MAGIC, version: VERSION.into(), reserved: 0.into(), length },
            layout_type: code_of(&LAYOUT_TYPES, &self.layout.layout_type()),
            order: code_of(&AXIS_ORDERS, &self.layout.axis_order()),
            dtype: config.dtype.code(),
            num_planes,
            num_blocks: config.num_blocks.into(),
            num_layers: config.num_layers.into(),
            outer_dim: config.outer_dim.into(),
            page_size: config.page_size.into(),
            inner_dim: config.inner_dim.into(),
            value_inner_dim: config.value_inner_dim.unwrap_or(0).into(),
            num_heads: config.num_heads.into(),
            alignment: config.alignment.into(),
            num_regions: (self.memory.len() as u32).into(),
            num_cells: (num_cells as u32).into(),
        }
    }
}

/// Index of `value` in its table. Every variant is listed, so the search cannot fail; 255 is no
/// code.
fn code_of<T: PartialEq>(table: &[T], value: &T) -> u8 {
    table.iter().position(|known| known == value).map_or(u8::MAX, |index| index as u8)
}
