//! Checks that any [`BlockLayout`] has to pass; run them in the tests of every implementation.
//!
//! They visit every byte, so give them small shapes.

use crate::config::LayoutConfig;
use crate::layout::{BlockLayout, Cell, CellView, LayoutError};

/// Largest layout, in bytes over all regions, that [`check`] is willing to visit.
pub const MAX_CHECKED_BYTES: u64 = 64 << 20;

/// Runs every check of this module.
///
/// # Errors
/// The first rule that the layout breaks, in words.
pub fn check(layout: &dyn BlockLayout) -> Result<(), String> {
    layout.config().validate().map_err(|error| error.to_string())?;
    check_shape(layout)?;
    check_bounds(layout)?;
    check_alignment(layout)?;
    check_disjoint(layout)?;
    check_contiguous_block(layout)
}

/// Every cell has the shape that the config says.
pub fn check_shape(layout: &dyn BlockLayout) -> Result<(), String> {
    let config = layout.config();
    for_each_view(layout, |layer, cell, view| {
        if view.bytes() != config.cell_bytes(cell) {
            return Err(format!("{} bytes, the config says {}", view.bytes(), config.cell_bytes(cell)));
        }
        let plane = matches!(cell, Cell::Plane(_));
        if plane && !view.opaque {
            return Err("an opaque plane is not opaque".to_owned());
        }
        if view.opaque && !view.is_contiguous() {
            return Err("opaque, but not one run of bytes".to_owned());
        }
        if !view.opaque && (view.tokens, view.heads) != (config.page_size, config.num_heads) {
            return Err(format!("{} tokens x {} heads differ from the config", view.tokens, view.heads));
        }
        let block = config.num_blocks - 1;
        let last = layout.block_view(block, layer, cell).map_err(|error| error.to_string())?;
        let expected = view.offset + u64::from(block) * view.block_stride;
        if (last.region, last.offset, last.cell) != (view.region, expected, view) {
            return Err(format!("block_view({block}) disagrees with view"));
        }
        Ok(())
    })
}

/// Indices beyond the config are errors, not wrong answers.
pub fn check_bounds(layout: &dyn BlockLayout) -> Result<(), String> {
    let config = layout.config();
    let Some(cell) = config.cells().next() else { return Err("the layout has no cells".to_owned()) };
    let planes = config.cells_per_layer() - config.outer_dim;
    let answers = [
        ("block", layout.block_view(config.num_blocks, 0, cell).map(|_| ())),
        ("layer", layout.view(config.num_layers, cell).map(|_| ())),
        ("outer", layout.view(0, Cell::Kv(config.outer_dim)).map(|_| ())),
        ("plane", layout.view(0, Cell::Plane(planes)).map(|_| ())),
    ];
    for (wanted, answer) in answers {
        if !matches!(answer, Err(LayoutError::OutOfRange { axis, .. }) if axis == wanted) {
            return Err(format!("{wanted} beyond the config: expected OutOfRange, got {answer:?}"));
        }
    }
    Ok(())
}

/// Regions, blocks and elements keep their alignment.
pub fn check_alignment(layout: &dyn BlockLayout) -> Result<(), String> {
    let config = layout.config();
    for (index, region) in layout.regions().iter().enumerate() {
        if !region.alignment.is_power_of_two() || region.alignment < config.alignment {
            return Err(format!("region {index}: alignment {} is below the config's", region.alignment));
        }
    }
    for_each_view(layout, |_, _, view| {
        let unit = u64::from(view.elem_bytes);
        if !view.block_stride.is_multiple_of(config.alignment) {
            return Err(format!("block stride {} is not aligned to {}", view.block_stride, config.alignment));
        }
        for value in [view.offset, view.block_stride, view.token_stride, view.head_stride, view.elem_stride] {
            if !value.is_multiple_of(unit) {
                return Err(format!("offset or stride {value} misaligns elements of {unit} bytes"));
            }
        }
        match layout.regions().get(view.region as usize) {
            Some(region) if region.alignment >= unit => Ok(()),
            Some(region) => {
                Err(format!("region alignment {} is below the element width {unit}", region.alignment))
            }
            None => Err(format!("region {} does not exist", view.region)),
        }
    })
}

/// Every element of every block lies inside its region, and no two share a byte.
pub fn check_disjoint(layout: &dyn BlockLayout) -> Result<(), String> {
    let total = layout.total_bytes();
    if total > MAX_CHECKED_BYTES {
        return Err(format!(
            "{total} bytes are too many to visit: use a shape of at most {MAX_CHECKED_BYTES} bytes"
        ));
    }
    let mut used: Vec<Vec<bool>> =
        layout.regions().iter().map(|region| vec![false; region.bytes as usize]).collect();
    for_each_element(layout, |region, offset, bytes| {
        let range = offset as usize..offset.saturating_add(bytes) as usize;
        let taken = used.get_mut(region as usize).and_then(|region| region.get_mut(range));
        let taken = taken.ok_or_else(|| format!("offset {offset} is outside region {region}"))?;
        if taken.iter().any(|&taken| taken) {
            return Err(format!("shares bytes with another element at region {region}, offset {offset}"));
        }
        taken.fill(true);
        Ok(())
    })
}

/// A layout that calls its blocks contiguous has each block's bytes there and nowhere else.
pub fn check_contiguous_block(layout: &dyn BlockLayout) -> Result<(), String> {
    let Some(block_run) = layout.contiguous_block() else { return Ok(()) };
    if block_run.bytes != layout.bytes_per_block() {
        return Err(format!(
            "contiguous block of {} bytes, payload {}",
            block_run.bytes,
            layout.bytes_per_block()
        ));
    }
    for_each_view(layout, |_, _, view| {
        let inside = view.offset >= block_run.offset
            && view.offset + view.span() <= block_run.offset + block_run.bytes
            && (view.region, view.block_stride) == (block_run.region, block_run.stride);
        if inside { Ok(()) } else { Err("outside its contiguous block".to_owned()) }
    })
}

fn for_each_view(
    layout: &dyn BlockLayout,
    mut check: impl FnMut(u32, Cell, CellView) -> Result<(), String>,
) -> Result<(), String> {
    let config: &LayoutConfig = layout.config();
    for layer in 0..config.num_layers {
        for cell in config.cells() {
            let view = layout.view(layer, cell).map_err(|error| format!("layer {layer}, {cell}: {error}"))?;
            check(layer, cell, view).map_err(|rule| format!("layer {layer}, {cell}: {rule}"))?;
        }
    }
    Ok(())
}

/// Calls `visit(region, offset, bytes)` for every element of every block.
fn for_each_element(
    layout: &dyn BlockLayout,
    mut visit: impl FnMut(u32, u64, u64) -> Result<(), String>,
) -> Result<(), String> {
    let blocks = u64::from(layout.config().num_blocks);
    for_each_view(layout, |_, _, view| {
        for block in 0..blocks {
            for token in 0..u64::from(view.tokens) {
                for head in 0..u64::from(view.heads) {
                    for elem in 0..view.elems {
                        let offset = view.offset
                            + block * view.block_stride
                            + token * view.token_stride
                            + head * view.head_stride
                            + elem * view.elem_stride;
                        visit(view.region, offset, u64::from(view.elem_bytes))
                            .map_err(|rule| format!("block {block}, token {token}, head {head}: {rule}"))?;
                    }
                }
            }
        }
        Ok(())
    })
}
