//! Every pair of shapes moves every byte to its place.

#[path = "support/shapes.rs"]
mod support;

use kvbm_layout::{AxisOrder, DType, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm_nixl::{BlockSet, InProcessNetwork, ReadPlan, ShapeError};
use kvbm_plan::{GroupId, HeadRange, Rank, Replication};
use kvbm_storage::{BoundLayout, SystemAllocator};
use proptest::prelude::*;

use support::{
    BLOCKS, EIGHT_HEADS, FOUR_HEADS, MLA, Model, Shape, TOKENS, config, layout, moves_exactly, ranks, sets,
    slice,
};

/// Between agents of one process.
fn moves(shapes: [Shape; 2], blocks: &[(u32, u32)], push: bool) {
    let network = InProcessNetwork::new();
    let agents = ["source", "target"].map(|name| network.agent(name).expect("as set up"));
    assert!(moves_exactly([&agents[0], &agents[1]], shapes, blocks, push) > 0);
}

/// Both layouts in each order that they have: a layer-separate one has no universal order.
const LAYOUTS: [(AxisOrder, bool); 5] = [
    (AxisOrder::Nhd, false),
    (AxisOrder::Hnd, false),
    (AxisOrder::Universal, false),
    (AxisOrder::Nhd, true),
    (AxisOrder::Hnd, true),
];

/// Every pair of these numbers of ranks and all layouts, by reads and by writes in turn; how many.
fn every_pair_moves_exactly(model: Model, ranks: &[u32]) -> usize {
    let mut shapes = Vec::new();
    for tp in ranks {
        shapes.extend(LAYOUTS.map(|(order, is_separate)| Shape {
            model,
            tp: *tp,
            pp: 1,
            order,
            is_separate,
        }));
    }
    let mut pairs = 0;
    for from in &shapes {
        for to in &shapes {
            // A replica that is written twice at once is no case of a push.
            let push = pairs % 2 == 1 && from.tp.max(to.tp) <= model.heads;
            moves([*from, *to], &[(1, 4), (2, 5), (5, 0)], push);
            pairs += 1;
        }
    }
    pairs
}

/// All of {TP 1, 2, 4, 8} x {contiguous: NHD, HND, universal; layer-separate: NHD, HND}.
#[test]
fn every_pair_of_shapes_moves_exact_bytes() {
    assert_eq!(every_pair_moves_exactly(EIGHT_HEADS, &[1, 2, 4, 8]), 20 * 20);
}

#[test]
fn a_layer_separate_layout_has_no_universal_order() {
    let whole = Shape { model: EIGHT_HEADS, tp: 1, pp: 1, order: AxisOrder::Universal, is_separate: true };
    let config = config(2, &slice(whole, 0), DType::BF16, TOKENS);
    let error = LayerSeparate::new(config, AxisOrder::Universal, OuterPlacement::KvOuter).expect_err("none");
    assert!(error.to_string().contains("universal"), "{error}");
}

#[test]
fn eight_ranks_on_four_heads_move_exact_bytes() {
    assert_eq!(every_pair_moves_exactly(FOUR_HEADS, &[1, 4, 8]), 15 * 15);
    let shape = Shape { model: FOUR_HEADS, tp: 8, pp: 1, order: AxisOrder::Nhd, is_separate: false };
    let heads = [0, 1, 4, 7].map(|rank| (slice(shape, rank).heads, slice(shape, rank).replication));
    let of =
        |start, writer| (HeadRange { start, count: 1 }, Replication::Replicated { writer: Rank(writer) });
    assert_eq!(heads, [of(0, 0), of(0, 0), of(2, 4), of(3, 6)], "two ranks hold each head");
}

#[test]
fn mla_moves_exact_bytes_between_any_numbers_of_ranks() {
    assert_eq!(every_pair_moves_exactly(MLA, &[1, 2, 8]), 15 * 15);
    let shape = Shape { model: MLA, tp: 8, pp: 1, order: AxisOrder::Nhd, is_separate: false };
    assert_eq!(slice(shape, 7).replication, Replication::Replicated { writer: Rank(0) });
}

fn any_shape(model: Model) -> impl Strategy<Value = Shape> {
    let (ranks, stages) = (prop::sample::select(vec![1, 2, 4, 8, 16]), prop::sample::select(vec![1, 2, 4]));
    (ranks, stages, prop::sample::select(&LAYOUTS[..]))
        .prop_map(move |(tp, pp, (order, is_separate))| Shape { model, tp, pp, order, is_separate })
}

fn two_shapes() -> impl Strategy<Value = (Shape, Shape)> {
    let model = prop::sample::select(&[EIGHT_HEADS, FOUR_HEADS, MLA][..]);
    model.prop_flat_map(|model| (any_shape(model), any_shape(model)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Stages of a pipeline too, and more ranks than heads.
    #[test]
    fn stages_and_replicas_move_exact_bytes(
        (from, to) in two_shapes(),
        theirs in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
        ours in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        // A replica that is written twice at once is no case of a push.
        let blocks: Vec<_> = theirs.into_iter().zip(ours).take(3).collect();
        moves([from, to], &blocks, false);
    }
}

#[test]
fn equal_shapes_move_each_run_of_blocks_as_one_range() {
    let network = InProcessNetwork::new();
    let agent = network.agent("a").expect("as set up");
    let shape = Shape { model: EIGHT_HEADS, tp: 1, pp: 1, order: AxisOrder::Nhd, is_separate: false };
    let ranks = ranks(&agent, shape);
    let plan = ReadPlan::new(&ranks.slices[0], &ranks.bound[0], GroupId(0), &sets(&agent, &ranks))
        .expect("as set up");
    assert_eq!(plan.ranges_per_block(), 1);
    let lists = plan.lists(&[(0, 2), (1, 3), (2, 4), (5, 0)]).expect("as set up");
    let ranges: Vec<_> = lists.iter().map(|lists| lists.local.entries.len()).collect();
    assert_eq!(ranges, [2], "three neighbours, and one apart");
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let network = InProcessNetwork::new();
    let agent = network.agent("a").expect("as set up");
    let shape = Shape { model: EIGHT_HEADS, tp: 2, pp: 1, order: AxisOrder::Nhd, is_separate: false };
    let ranks = ranks(&agent, shape);
    let sets = sets(&agent, &ranks);
    let whole = slice(Shape { tp: 1, ..shape }, 0);
    let refusal = |config: LayoutConfig, sets: &[BlockSet]| {
        let local =
            BoundLayout::allocate(layout(shape, config), &SystemAllocator::default()).expect("as set up");
        ReadPlan::new(&whole, &local, GroupId(0), sets).unwrap_err()
    };
    let fitting = config(2, &whole, DType::BF16, TOKENS);
    let error = refusal(fitting.clone(), &[]);
    assert!(matches!(error, ShapeError::NoSets { .. }), "{error}");
    let error = refusal(fitting, &sets[..1]);
    assert!(matches!(error, ShapeError::Uncovered { needed: 32, found: 16, .. }), "{error}");
    let error = refusal(config(2, &whole, DType::F8E4M3, TOKENS), &sets).to_string();
    assert!(error.contains("layouts differ in dtype: source bf16"), "{error}");
    let error = refusal(config(2, &whole, DType::BF16, TOKENS * 2), &sets).to_string();
    assert!(error.contains("layouts differ in page_size: source 4, destination 8"), "{error}");
}
