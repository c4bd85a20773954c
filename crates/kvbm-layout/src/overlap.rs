//! Proof that no two elements of a strided layout share a byte.
//!
//! A cell is an offset and a set of (count, stride) axes. Cells whose byte ranges do not touch are
//! apart. Cells that touch are apart if they share their widest axis and, without it, all fit into
//! one stride of it and are apart there. This proves every layout whose axes nest, interleaved or
//! not; what it cannot prove is refused.

use std::collections::BTreeMap;

use crate::geometry::{Geometry, width};
use crate::layout::{Cell, LayoutError};

/// One cell within one region: blocks, layers, tokens, heads, elements.
#[derive(Debug, Clone)]
struct Piece {
    cell: Cell,
    start: u64,
    /// Bytes from the first to after the last byte.
    span: u64,
    /// (stride, count) of axes longer than 1, by growing stride, so that the widest is last.
    axes: Vec<(u64, u64)>,
}

impl Piece {
    fn new(cell: Cell, start: u64, unit: u64, dims: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut axes: Vec<_> =
            dims.filter(|&(count, _)| count > 1).map(|(count, stride)| (stride, count)).collect();
        axes.sort_unstable();
        let span = axes.iter().fold(unit, |span, &(stride, count)| span + stride * (count - 1));
        Self { cell, start, span, axes }
    }

    fn end(&self) -> u64 {
        self.start + self.span
    }

    /// Removes the widest axis.
    fn strip(&mut self) -> Option<(u64, u64)> {
        let (stride, count) = self.axes.pop()?;
        self.span -= stride * (count - 1);
        Some((stride, count))
    }
}

/// Proves that all elements are apart. Every cell must already be known to end inside its regions.
pub(crate) fn prove_apart(geometry: &Geometry) -> Result<(), LayoutError> {
    let config = &geometry.config;
    let mut by_region: BTreeMap<u32, Vec<Piece>> = BTreeMap::new();
    for (cell, at) in config.cells().zip(&geometry.cells) {
        let unit = if matches!(cell, Cell::Plane(_)) { 1 } else { width(config) };
        let dims = at.block_dims(config, cell).into_iter();
        if at.region_per_layer == 0 {
            let dims = dims.chain([(u64::from(config.num_layers), at.layer_stride)]);
            by_region.entry(at.region).or_default().push(Piece::new(cell, at.offset, unit, dims));
            continue;
        }
        for layer in 0..config.num_layers {
            let start = at.offset + u64::from(layer) * at.layer_stride;
            let region = at.region + layer * at.region_per_layer;
            by_region.entry(region).or_default().push(Piece::new(cell, start, unit, dims.clone()));
        }
    }
    by_region.into_values().try_for_each(apart)
}

fn apart(mut pieces: Vec<Piece>) -> Result<(), LayoutError> {
    pieces.sort_by_key(|piece| piece.start);
    let mut rest = pieces.into_iter().peekable();
    while let Some(first) = rest.next() {
        let mut end = first.end();
        let mut touching = vec![first];
        while let Some(next) = rest.next_if(|next| next.start < end) {
            end = end.max(next.end());
            touching.push(next);
        }
        apart_in_one_stride(touching)?;
    }
    Ok(())
}

/// `touching` is not empty and sorted by start.
fn apart_in_one_stride(mut touching: Vec<Piece>) -> Result<(), LayoutError> {
    let overlap = {
        let (first, second) = (touching[0].cell, touching[touching.len() - 1].cell);
        move || LayoutError::Overlap { first: first.to_string(), second: second.to_string() }
    };
    let alone = touching.len() == 1;
    let start = touching[0].start;
    let Some(&axis) = touching[0].axes.last() else {
        return if alone { Ok(()) } else { Err(overlap()) };
    };
    let mut end = start;
    for piece in &mut touching {
        if piece.strip() != Some(axis) {
            return Err(overlap());
        }
        end = end.max(piece.end());
    }
    if end - start > axis.0 {
        return Err(overlap());
    }
    if alone { apart_in_one_stride(touching) } else { apart(touching) }
}
