//! From two layouts to segments: compare what they hold, then pair their cells.

use super::{Dim, Dims, PlanError, Segment, Side, merge};
use crate::config::LayoutConfig;
use crate::layout::{BlockLayout, Cell, CellView};
use crate::slice::{Planes, Selection, Span};
use std::ops::Range;

pub(super) fn segments(
    src: &dyn BlockLayout,
    dst: &dyn BlockLayout,
    selection: &Selection,
) -> Result<Vec<Segment>, PlanError> {
    let (a, b) = (src.config(), dst.config());
    let layers = span("layers", selection.layers, a.num_layers, b.num_layers)?;
    let heads = span("heads", selection.heads, a.num_heads, b.num_heads)?;
    same_contents(a, b, selection)?;
    if selection.planes != Planes::Skip {
        planes_are_whole(a, b, heads)?;
    }
    let planes = selected_planes(a, selection.planes)?;
    let is_selected = |cell: &Cell| match cell {
        Cell::Kv(_) => true,
        Cell::Plane(plane) => planes.contains(plane),
    };
    let cells: Vec<Cell> = a.cells().filter(is_selected).collect();
    if cells.is_empty() {
        return Err(PlanError::Nothing);
    }
    let mut rows = Vec::with_capacity(layers.len as usize);
    for layer in 0..layers.len {
        let mut row = Vec::with_capacity(cells.len());
        for &cell in &cells {
            let from = src.view(layers.src + layer, cell)?;
            let to = dst.view(layers.dst + layer, cell)?;
            row.push(pair(src, dst, (from, to), heads)?);
        }
        rows.push(row);
    }
    Ok(merge::rows(rows))
}

/// The selected range, or all if both sides have the same.
fn span(axis: &'static str, selected: Option<Span>, src: u32, dst: u32) -> Result<Span, PlanError> {
    let Some(span) = selected else {
        if src == dst {
            return Ok(Span { src: 0, dst: 0, len: src });
        }
        let (field, hint) = if axis == "layers" {
            ("num_layers", "select a layer range that both have")
        } else {
            ("num_heads", "select a head range that both have")
        };
        return Err(PlanError::Mismatch { field, src: src.to_string(), dst: dst.to_string(), hint });
    };
    for (side, first, count) in [(Side::Source, span.src, src), (Side::Destination, span.dst, dst)] {
        let bad = |rule| Err(PlanError::Range { axis, side, first, len: span.len, rule });
        if span.len == 0 {
            return bad("must not be empty".to_owned());
        }
        if first.checked_add(span.len).is_none_or(|end| end > count) {
            return bad(format!("the layout has {count} {axis}"));
        }
    }
    Ok(span)
}

/// The planes that a copy moves; both sides have the same.
fn selected_planes(config: &LayoutConfig, planes: Planes) -> Result<Range<u32>, PlanError> {
    let all = config.cells_per_layer() - config.outer_dim;
    let (first, len) = match planes {
        Planes::All => return Ok(0..all),
        Planes::Skip => return Ok(0..0),
        Planes::Some { first, count } => (first, count),
    };
    match first.checked_add(len) {
        Some(end) if len > 0 && end <= all => Ok(first..end),
        _ => {
            let rule = format!("must not be empty, and the layouts have {all} planes");
            Err(PlanError::Range { axis: "planes", side: Side::Source, first, len, rule })
        }
    }
}

fn same_contents(a: &LayoutConfig, b: &LayoutConfig, selection: &Selection) -> Result<(), PlanError> {
    let hint = "both layouts must hold the same model";
    let differ = |field, src: String, dst: String, hint| Err(PlanError::Mismatch { field, src, dst, hint });
    if a.dtype != b.dtype {
        return differ(
            "dtype",
            a.dtype.to_string(),
            b.dtype.to_string(),
            "kvbm copies bytes and never converts them",
        );
    }
    for (field, x, y) in [("outer_dim", a.outer_dim, b.outer_dim), ("page_size", a.page_size, b.page_size)] {
        if x != y {
            return differ(field, x.to_string(), y.to_string(), hint);
        }
    }
    for outer in 0..a.outer_dim {
        let (x, y) = (a.head_dim_of(outer), b.head_dim_of(outer));
        if x != y {
            let value = outer == 1 && (a.value_inner_dim.is_some() || b.value_inner_dim.is_some());
            let field = if value { "value_inner_dim / num_heads" } else { "inner_dim / num_heads" };
            return differ(field, x.to_string(), y.to_string(), hint);
        }
    }
    if selection.planes != Planes::Skip && a.planes != b.planes {
        let list = |config: &LayoutConfig| {
            let planes =
                config.planes.iter().map(|plane| format!("{}:{}", plane.name, plane.bytes_per_layer));
            format!("[{}]", planes.collect::<Vec<_>>().join(", "))
        };
        return differ("planes", list(a), list(b), "give both the same planes, or select without planes");
    }
    Ok(())
}

fn planes_are_whole(a: &LayoutConfig, b: &LayoutConfig, heads: Span) -> Result<(), PlanError> {
    for (side, config, first) in [(Side::Source, a, heads.src), (Side::Destination, b, heads.dst)] {
        if let Some(plane) = config.planes.first().filter(|_| heads.len != config.num_heads) {
            return Err(PlanError::PlaneSplit { plane: plane.name.clone(), side, first, len: heads.len });
        }
    }
    Ok(())
}

/// The segment that copies the selected heads of one cell.
fn pair(
    src: &dyn BlockLayout,
    dst: &dyn BlockLayout,
    (from, to): (CellView, CellView),
    heads: Span,
) -> Result<Segment, PlanError> {
    let opaque = from.opaque || to.opaque;
    if opaque {
        let whole = [src, dst].iter().all(|layout| layout.config().num_heads == heads.len);
        if !(from.opaque && to.opaque && whole && from.bytes() == to.bytes()) {
            let (side, layout) = if from.opaque { (Side::Source, src) } else { (Side::Destination, dst) };
            return Err(PlanError::OpaqueInner { side, order: layout.axis_order() });
        }
    }
    let (len, first) = if opaque { (1, (0, 0)) } else { (heads.len, (heads.src, heads.dst)) };
    let mut segment = Segment {
        src_region: from.region,
        dst_region: to.region,
        src_offset: from.offset + u64::from(first.0) * from.head_stride,
        dst_offset: to.offset + u64::from(first.1) * to.head_stride,
        src_block_stride: block_stride(src, from),
        dst_block_stride: block_stride(dst, to),
        run_bytes: u64::from(from.elem_bytes),
        dims: Dims::default(),
    };
    for (count, src_stride, dst_stride) in [
        (u64::from(from.tokens), from.token_stride, to.token_stride),
        (u64::from(len), from.head_stride, to.head_stride),
        (from.elems, from.elem_stride, to.elem_stride),
    ] {
        if count > 1 {
            segment.dims.push(Dim { count, src_stride, dst_stride });
        }
    }
    merge::coalesce(&mut segment);
    Ok(segment)
}

/// Bytes between blocks; a lone block has none, and then differing strides must not keep its cells
/// apart.
fn block_stride(layout: &dyn BlockLayout, view: CellView) -> u64 {
    if layout.config().num_blocks == 1 { 0 } else { view.block_stride }
}
