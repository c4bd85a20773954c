//! Any layout of this crate as one type, so that it can be written, read and compared.

use crate::config::LayoutConfig;
use crate::contiguous::FullyContiguous;
use crate::geometry::CellStrides;
use crate::layer_separate::LayerSeparate;
use crate::layout::{AxisOrder, BlockLayout, Cell, CellView, LayoutError, LayoutType, RegionSpec};
use crate::strided::StridedLayout;

/// A layout of this crate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnyLayout {
    /// All layers of all blocks in one region.
    FullyContiguous(FullyContiguous),
    /// One region per layer.
    LayerSeparate(LayerSeparate),
    /// Explicit strides.
    Strided(StridedLayout),
}

impl AnyLayout {
    /// The layout that places every element where `layout` does: of the same family if this crate
    /// makes it so, else with explicit strides.
    ///
    /// # Errors
    /// A layout that is not affine in its layers, has an inner order that is not declared and is
    /// not [`FullyContiguous`], or breaks the rules of [`StridedLayout::new`].
    pub fn describe(layout: &dyn BlockLayout) -> Result<Self, LayoutError> {
        let (config, order) = (layout.config().clone(), layout.axis_order());
        let same = match layout.layout_type() {
            LayoutType::FullyContiguous => FullyContiguous::new(config, order).map(Self::FullyContiguous),
            LayoutType::LayerSeparate(placement) => {
                LayerSeparate::new(config, order, placement).map(Self::LayerSeparate)
            }
            LayoutType::Strided => return strided(layout).map(Self::Strided),
        };
        match same {
            Ok(same) if same_places(&same, layout)? => Ok(same),
            _ => strided(layout).map(Self::Strided),
        }
    }

    fn inner(&self) -> &dyn BlockLayout {
        match self {
            Self::FullyContiguous(layout) => layout,
            Self::LayerSeparate(layout) => layout,
            Self::Strided(layout) => layout,
        }
    }
}

fn same_places(a: &dyn BlockLayout, b: &dyn BlockLayout) -> Result<bool, LayoutError> {
    if a.regions() != b.regions() {
        return Ok(false);
    }
    for layer in 0..a.config().num_layers {
        for cell in a.config().cells() {
            if a.view(layer, cell)? != b.view(layer, cell)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Explicit strides from the views of the first two layers, if the other layers follow them.
fn strided(layout: &dyn BlockLayout) -> Result<StridedLayout, LayoutError> {
    let config = layout.config();
    let mut cells = Vec::with_capacity(config.cells_per_layer() as usize);
    for cell in config.cells() {
        let first = layout.view(0, cell)?;
        let second = if config.num_layers > 1 { layout.view(1, cell)? } else { first };
        let bad = |field, value, rule: &str| {
            Err(LayoutError::Strides { cell: cell.to_string(), field, value, rule: rule.to_owned() })
        };
        if first.opaque && matches!(cell, Cell::Kv(_)) {
            return bad(
                "elements",
                first.elems,
                "inner order not declared: declare it, or use an opaque plane",
            );
        }
        let steps = (second.region.checked_sub(first.region), second.offset.checked_sub(first.offset));
        let (Some(region_per_layer), Some(layer_stride)) = steps else {
            return bad("offset", second.offset, "regions and offsets have to grow with the layer");
        };
        cells.push(CellStrides {
            region: first.region,
            region_per_layer,
            offset: first.offset,
            layer_stride,
            block_stride: first.block_stride,
            token_stride: first.token_stride,
            head_stride: first.head_stride,
            elem_stride: first.elem_stride,
        });
    }
    let made = StridedLayout::new(config.clone(), layout.regions().to_vec(), cells)?;
    if same_places(&made, layout)? {
        return Ok(made);
    }
    let (value, rule) = (u64::from(config.num_layers), "layers are not at equal distances".to_owned());
    Err(LayoutError::Strides { cell: "any cell".to_owned(), field: "num_layers", value, rule })
}

impl From<FullyContiguous> for AnyLayout {
    fn from(layout: FullyContiguous) -> Self {
        Self::FullyContiguous(layout)
    }
}

impl From<LayerSeparate> for AnyLayout {
    fn from(layout: LayerSeparate) -> Self {
        Self::LayerSeparate(layout)
    }
}

impl From<StridedLayout> for AnyLayout {
    fn from(layout: StridedLayout) -> Self {
        Self::Strided(layout)
    }
}

impl BlockLayout for AnyLayout {
    fn config(&self) -> &LayoutConfig {
        self.inner().config()
    }

    fn layout_type(&self) -> LayoutType {
        self.inner().layout_type()
    }

    fn axis_order(&self) -> AxisOrder {
        self.inner().axis_order()
    }

    fn regions(&self) -> &[RegionSpec] {
        self.inner().regions()
    }

    fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError> {
        self.inner().view(layer, cell)
    }
}
