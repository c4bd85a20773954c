//! Shapes and forms of the layouts of `kvbm-layout`.

use kvbm_layout::{AxisOrder, InnerOrder, LayoutConfig};

use crate::{BlockForm, BlockShape, ChunkOrder, KernelError};

impl BlockShape {
    /// The shape of a layout's blocks.
    ///
    /// Keys and values must be equally wide, and there must be no opaque planes: those have no
    /// rows, they are copied whole.
    pub fn of_config(config: &LayoutConfig) -> Result<Self, KernelError> {
        if let Some(value) = config.value_inner_dim.filter(|value| *value != config.inner_dim) {
            let rule = "rows need keys and values of the same width";
            return Err(KernelError::Layout { field: "value_inner_dim", value: value.to_string(), rule });
        }
        if !config.planes.is_empty() {
            let rule = "opaque planes have no rows; copy them apart";
            return Err(KernelError::Layout {
                field: "planes",
                value: config.planes.len().to_string(),
                rule,
            });
        }
        let heads = config.num_heads;
        if heads == 0 || !config.inner_dim.is_multiple_of(heads) {
            let rule = "it must divide inner_dim";
            return Err(KernelError::Layout { field: "num_heads", value: heads.to_string(), rule });
        }
        Self::new(
            config.num_layers as usize,
            config.outer_dim as usize,
            heads as usize,
            config.page_size as usize,
            (config.inner_dim / heads) as usize,
            config.dtype.width() as usize,
        )
    }
}

impl BlockForm {
    /// The form of a block that lies in one contiguous range in this order.
    ///
    /// An operational block whose inner order is not known can be moved whole, but not converted;
    /// strided memory has no form.
    pub fn of_contiguous(order: AxisOrder) -> Result<Self, KernelError> {
        match order {
            AxisOrder::Nhd | AxisOrder::Operational(InnerOrder::Nhd) => {
                Ok(Self::Operational(ChunkOrder::Nhd))
            }
            AxisOrder::Hnd | AxisOrder::Operational(InnerOrder::Hnd) => {
                Ok(Self::Operational(ChunkOrder::Hnd))
            }
            AxisOrder::Universal => Ok(Self::Universal),
            AxisOrder::Operational(InnerOrder::Opaque) | AxisOrder::Strided => Err(KernelError::Layout {
                field: "axis order",
                value: order.to_string(),
                rule: "nhd, hnd, operational-nhd, operational-hnd or universal is needed; use a copy plan for anything else",
            }),
        }
    }
}
