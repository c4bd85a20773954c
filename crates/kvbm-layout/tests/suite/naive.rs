//! The oracle: one element at a time, as slowly and plainly as possible.

use kvbm_layout::{BlockLayout, Cell, Planes, Selection, Span};

/// The bytes of all regions of a layout.
pub(crate) type Memory = Vec<Vec<u8>>;

/// Memory for `layout` in which every byte is different from its neighbours and from `salt` to
/// `salt`.
pub(crate) fn memory(layout: &dyn BlockLayout, salt: u64) -> Memory {
    let byte = |region: usize, offset: u64| {
        let mixed = (offset ^ (region as u64) << 40 ^ salt << 56).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 56) as u8
    };
    let regions = layout.regions().iter().enumerate();
    regions.map(|(index, region)| (0..region.bytes).map(|offset| byte(index, offset)).collect()).collect()
}

/// One byte and where it has to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) src: (u32, u64),
    pub(crate) dst: (u32, u64),
}

/// Every byte that a copy has to move, element by element.
pub(crate) fn moves(
    (src, src_block): (&dyn BlockLayout, u32),
    (dst, dst_block): (&dyn BlockLayout, u32),
    selection: &Selection,
) -> Vec<Move> {
    let config = src.config();
    let layers = selection.layers.unwrap_or(Span { src: 0, dst: 0, len: config.num_layers });
    let heads = selection.heads.unwrap_or(Span { src: 0, dst: 0, len: config.num_heads });
    let mut moves = Vec::new();
    for layer in 0..layers.len {
        for cell in config.cells() {
            if let Cell::Plane(plane) = cell {
                let is_selected = match selection.planes {
                    Planes::All => true,
                    Planes::Skip => false,
                    Planes::Some { first, count } => (first..first + count).contains(&plane),
                };
                if !is_selected {
                    continue;
                }
            }
            let from = src.block_view(src_block, layers.src + layer, cell).unwrap();
            let to = dst.block_view(dst_block, layers.dst + layer, cell).unwrap();
            let heads = if from.cell.opaque { Span { src: 0, dst: 0, len: 1 } } else { heads };
            for token in 0..u64::from(from.cell.tokens) {
                for head in 0..heads.len {
                    for elem in 0..from.cell.elems {
                        for byte in 0..u64::from(from.cell.elem_bytes) {
                            let at = |view: &kvbm_layout::BlockView, head: u32| {
                                let strides = view.cell;
                                let offset = view.offset
                                    + token * strides.token_stride
                                    + u64::from(head) * strides.head_stride
                                    + elem * strides.elem_stride;
                                (view.region, offset + byte)
                            };
                            moves.push(Move {
                                src: at(&from, heads.src + head),
                                dst: at(&to, heads.dst + head),
                            });
                        }
                    }
                }
            }
        }
    }
    moves
}

pub(crate) fn apply(moves: &[Move], src: &Memory, dst: &mut Memory) {
    for step in moves {
        dst[step.dst.0 as usize][step.dst.1 as usize] = src[step.src.0 as usize][step.src.1 as usize];
    }
}

/// The fewest contiguous copies that do `moves`.
pub(crate) fn fewest_runs(moves: &[Move]) -> u64 {
    let mut sorted = moves.to_vec();
    sorted.sort_by_key(|step| step.dst);
    let follows = |a: &Move, b: &Move| (b.src, b.dst) == ((a.src.0, a.src.1 + 1), (a.dst.0, a.dst.1 + 1));
    1 + sorted.windows(2).filter(|pair| !follows(&pair[0], &pair[1])).count() as u64
}
