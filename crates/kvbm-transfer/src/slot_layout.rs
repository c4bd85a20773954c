//! How a block of G2 lies in a slot of G3 and of the staging ring.

use crate::error::StartError;
use crate::geometry::SLOT_ALIGNMENT;
use kvbm_layout::{AxisOrder, BlockLayout, FullyContiguous, LayoutError};
use kvbm_plan::Tier;
use std::fmt::Display;

/// The layout of the slots of a disk below host memory of layout `host`. It is contiguous, with the
/// axis order of `host` where a contiguous block can have it (then a block is one fragment), else
/// NHD. The disk engine is opened with its `bytes_per_block` and its description of the geometry.
///
/// # Errors
/// A size beyond 2^63 - 1 bytes.
pub fn disk_layout(host: &dyn BlockLayout, slots: u32) -> Result<FullyContiguous, LayoutError> {
    ring_layout(host, slots, 0)
}

/// The same in slots of `slot_bytes` bytes, which hold blocks of other cache groups too.
pub(crate) fn ring_layout(
    host: &dyn BlockLayout,
    slots: u32,
    slot_bytes: u64,
) -> Result<FullyContiguous, LayoutError> {
    let mut config = host.config().clone();
    config.num_blocks = slots;
    config.alignment = config.alignment.max(SLOT_ALIGNMENT);
    let order = match host.axis_order() {
        AxisOrder::Strided => AxisOrder::Nhd,
        order => order,
    };
    FullyContiguous::in_slots(config, order, slot_bytes)
}

pub(crate) fn layouts(from: Tier, to: Tier, reason: &impl Display) -> StartError {
    StartError::Layouts { from, to, reason: reason.to_string() }
}
