//! A sample of the pairs of shapes that `tests/shapes.rs` moves between agents of one process.

use kvbm_layout::AxisOrder::{self, Hnd, Nhd, Universal};

use crate::agent;
use crate::support::{EIGHT_HEADS, FOUR_HEADS, MLA, Model, Shape, moves_exactly};

fn shape(model: Model, tp: u32, order: AxisOrder, is_separate: bool) -> Shape {
    Shape { model, tp, pp: 1, order, is_separate }
}

/// Each element of each block is compared. Every number of ranks, order and layout is in it, ranks
/// that hold the same heads, reads and writes.
#[test]
fn a_sample_of_shapes_moves_exact_bytes() {
    let eight = |tp, order, is_separate| shape(EIGHT_HEADS, tp, order, is_separate);
    let sample = [
        (eight(1, Nhd, false), eight(1, Nhd, true), true),
        (eight(4, Nhd, false), eight(2, Nhd, false), false),
        (eight(2, Hnd, true), eight(8, Universal, false), true),
        (eight(8, Universal, false), eight(1, Nhd, true), false),
        (eight(1, Hnd, false), eight(8, Nhd, true), true),
        (eight(4, Universal, false), eight(4, Hnd, true), false),
        (shape(FOUR_HEADS, 8, Hnd, false), shape(FOUR_HEADS, 2, Nhd, true), false),
        (shape(MLA, 8, Nhd, true), shape(MLA, 4, Universal, false), false),
    ];
    for (at, (from, to, push)) in (0..).zip(sample) {
        // Metadata goes stale with its memory: each pair has agents of its own.
        let agents = ["source", "target"].map(|side| agent(&format!("shapes-{side}-{at}")));
        let blocks = [(1, 4), (2, 5), (5, 0)];
        let elements = moves_exactly([&agents[0], &agents[1]], [from, to], &blocks, push);
        // Four layers of four tokens with heads of eight elements, those of replicas too.
        let heads = from.model.heads.max(to.tp);
        assert_eq!(elements as u32, 3 * 4 * from.model.outer * 4 * heads * 8, "{from:?} to {to:?}");
    }
}
