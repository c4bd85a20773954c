//! Every pair of shapes moves every byte to its place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    slice_for_rank,
};
use kvbm_nixl::{
    BlockSet, InProcessAgent, InProcessNetwork, Lease, NixlEnabledStorage, ReadPlan, Registration,
    RemoteAgent, RemoteRequest, ShapeError, TransferDirection, UnixMillis,
};
use kvbm_plan::{
    BlockSetId, GroupId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication,
};
use kvbm_storage::{BoundLayout, StorageExt, SystemAllocator};
use proptest::prelude::*;

const LAYERS: u32 = 4;
const HEADS: u32 = 8;
const TOKENS: u32 = 4;
const HEAD_DIM: u32 = 8;
const BLOCKS: u32 = 6;

/// How one side is laid out.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tp: u32,
    pp: u32,
    order: AxisOrder,
    is_separate: bool,
}

fn slice(shape: Shape, rank: u32) -> RankSlice {
    let (stage, tp_rank) = (rank / shape.tp, rank % shape.tp);
    let heads = slice_for_rank(HEADS, shape.tp, tp_rank).expect("as set up").heads;
    RankSlice {
        rank: Rank(rank as u16),
        first_layer: stage * (LAYERS / shape.pp),
        num_layers: LAYERS / shape.pp,
        heads: HeadRange { start: heads.start, count: heads.len() as u32 },
        replication: Replication::None,
    }
}

fn config(slice: &RankSlice, dtype: DType, tokens: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(BLOCKS)
        .num_layers(slice.num_layers)
        .outer_dim(2)
        .page_size(tokens)
        .inner_dim(slice.heads.count * HEAD_DIM)
        .num_heads(slice.heads.count)
        .dtype(dtype)
        .alignment(64)
        .build()
        .expect("as set up")
}

fn layout(shape: Shape, config: LayoutConfig) -> Arc<dyn BlockLayout> {
    // A layer-separate layout has no universal order: the nearest is HND.
    if shape.is_separate {
        let order = if shape.order == AxisOrder::Universal { AxisOrder::Hnd } else { shape.order };
        return Arc::new(LayerSeparate::new(config, order, OuterPlacement::KvOuter).expect("as set up"));
    }
    Arc::new(FullyContiguous::new(config, shape.order).expect("as set up"))
}

struct Ranks {
    slices: Vec<RankSlice>,
    bound: Vec<BoundLayout>,
    _registrations: Vec<Registration>,
}

fn ranks(agent: &dyn RemoteAgent, shape: Shape) -> Ranks {
    let slices: Vec<_> = (0..shape.tp * shape.pp).map(|rank| slice(shape, rank)).collect();
    let bound: Vec<_> = slices
        .iter()
        .map(|slice| {
            let layout = layout(shape, config(slice, DType::BF16, TOKENS));
            BoundLayout::allocate(layout, &SystemAllocator::default()).expect("as set up")
        })
        .collect();
    let registrations = bound.iter().map(|bound| bound.nixl_register(agent).expect("as set up")).collect();
    Ranks { slices, bound, _registrations: registrations }
}

fn sets(agent: &dyn RemoteAgent, ranks: &Ranks) -> Vec<BlockSet> {
    let sets = ranks.slices.iter().zip(&ranks.bound).map(|(slice, bound)| BlockSet {
        id: BlockSetId(u64::from(slice.rank.0)),
        namespace: NamespaceTag::from_bytes([1; 16]),
        group: GroupId(0),
        node: NodeId(1),
        slice: *slice,
        layout: bound.describe().expect("as set up"),
        agent: agent.name().into(),
        agent_metadata: agent.metadata().expect("as set up"),
        lease: Lease { id: LeaseId(0), expires: UnixMillis(u64::MAX) },
    });
    sets.collect()
}

/// Visits every element of a block: (storage, offset in it, what it must hold).
fn each_element(ranks: &Ranks, block: u32, content: u32, mut visit: impl FnMut(&BoundLayout, u32, u64, u16)) {
    for (slice, bound) in ranks.slices.iter().zip(&ranks.bound) {
        for layer in 0..slice.num_layers {
            for outer in 0..2 {
                let view = bound.layout().block_view(block, layer, Cell::Kv(outer)).expect("as set up");
                for token in 0..TOKENS {
                    for head in 0..slice.heads.count {
                        for element in 0..HEAD_DIM {
                            let at = view.offset
                                + u64::from(token) * view.cell.token_stride
                                + u64::from(head) * view.cell.head_stride
                                + u64::from(element) * view.cell.elem_stride;
                            let layer = slice.first_layer + layer;
                            let head = slice.heads.start + head;
                            let place = ((((content * LAYERS + layer) * 2 + outer) * TOKENS + token) * HEADS
                                + head)
                                * HEAD_DIM
                                + element;
                            visit(bound, view.region, at, place as u16);
                        }
                    }
                }
            }
        }
    }
}

fn fill(ranks: &Ranks, block: u32, content: u32) {
    each_element(ranks, block, content, |bound, region, at, value| {
        let binding = &bound.bindings()[region as usize];
        // SAFETY: nobody else touches the storages of this test.
        unsafe { binding.storage.write_at(binding.offset + at, &value.to_le_bytes()) }.expect("as set up");
    });
}

fn wrong_elements(ranks: &Ranks, block: u32, content: u32) -> usize {
    let mut wrong = 0;
    each_element(ranks, block, content, |bound, region, at, value| {
        let binding = &bound.bindings()[region as usize];
        let mut bytes = [0; 2];
        // SAFETY: nobody else touches the storages of this test.
        unsafe { binding.storage.read_at(binding.offset + at, &mut bytes) }.expect("as set up");
        wrong += usize::from(u16::from_le_bytes(bytes) != value);
    });
    wrong
}

/// Moves blocks and checks each element. `push`: the source writes, else the destination reads.
fn moves_exactly(from: Shape, to: Shape, blocks: &[(u32, u32)], push: bool) {
    let network = InProcessNetwork::new();
    let (source, target) =
        (network.agent("source").expect("as set up"), network.agent("target").expect("as set up"));
    let (holders, takers) = (ranks(&source, from), ranks(&target, to));
    for (index, (theirs, _)) in (0..).zip(blocks) {
        fill(&holders, *theirs, index);
    }
    let run = |agent: &InProcessAgent,
               other: &InProcessAgent,
               ours: &Ranks,
               theirs: &Ranks,
               blocks: &[(u32, u32)]| {
        agent.add_peer(&other.metadata().expect("as set up")).expect("as set up");
        let sets = sets(other, theirs);
        for (slice, bound) in ours.slices.iter().zip(&ours.bound) {
            let plan = ReadPlan::new(slice, bound, GroupId(0), &sets).expect("as set up");
            assert_eq!(plan.bytes_per_block(), bound.bytes_per_block());
            for lists in plan.lists(blocks).expect("as set up") {
                let direction = if push { TransferDirection::Write } else { TransferDirection::Read };
                let request = RemoteRequest {
                    direction,
                    peer: lists.agent,
                    local: lists.local,
                    remote: lists.remote,
                    notification: None,
                    keep: Box::new(()),
                };
                // SAFETY: nobody else touches the storages of this test.
                let mut transfer = unsafe { agent.start(request) }.expect("as set up");
                transfer.wait(Instant::now() + Duration::from_secs(60)).expect("as set up");
            }
        }
    };
    if push {
        let turned: Vec<_> = blocks.iter().map(|(theirs, ours)| (*ours, *theirs)).collect();
        run(&source, &target, &holders, &takers, &turned);
    } else {
        run(&target, &source, &takers, &holders, blocks);
    }
    for (index, (_, ours)) in (0..).zip(blocks) {
        assert_eq!(wrong_elements(&takers, *ours, index), 0, "{from:?} to {to:?}, block {index}");
    }
}

const ORDERS: [AxisOrder; 3] = [AxisOrder::Nhd, AxisOrder::Hnd, AxisOrder::Universal];

/// All of {TP 1, 2, 4, 8} x {NHD, HND, universal} x {contiguous, layer-separate}, both ways.
#[test]
fn every_pair_of_shapes_moves_exact_bytes() {
    let mut shapes = Vec::new();
    for tp in [1, 2, 4, 8] {
        for order in ORDERS {
            for is_separate in [false, true] {
                shapes.push(Shape { tp, pp: 1, order, is_separate });
            }
        }
    }
    let mut pairs = 0;
    for from in &shapes {
        for to in &shapes {
            moves_exactly(*from, *to, &[(1, 4), (2, 5), (5, 0)], pairs % 2 == 1);
            pairs += 1;
        }
    }
    assert_eq!(pairs, 24 * 24);
}

fn any_shape() -> impl Strategy<Value = Shape> {
    let order = prop::sample::select(&ORDERS[..]);
    (prop::sample::select(vec![1, 2, 4, 8, 16]), prop::sample::select(vec![1, 2, 4]), order, any::<bool>())
        .prop_map(|(tp, pp, order, is_separate)| Shape { tp, pp, order, is_separate })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Stages of a pipeline too, and more ranks than heads.
    #[test]
    fn stages_and_replicas_move_exact_bytes(
        (from, to) in (any_shape(), any_shape()),
        theirs in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
        ours in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        // A replica that is written twice at once is no case of a push.
        let blocks: Vec<_> = theirs.into_iter().zip(ours).take(3).collect();
        moves_exactly(from, to, &blocks, false);
    }
}

#[test]
fn equal_shapes_move_each_run_of_blocks_as_one_range() {
    let network = InProcessNetwork::new();
    let agent = network.agent("a").expect("as set up");
    let shape = Shape { tp: 1, pp: 1, order: AxisOrder::Nhd, is_separate: false };
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
    let shape = Shape { tp: 2, pp: 1, order: AxisOrder::Nhd, is_separate: false };
    let ranks = ranks(&agent, shape);
    let sets = sets(&agent, &ranks);
    let whole = slice(Shape { tp: 1, ..shape }, 0);
    let refusal = |config: LayoutConfig, sets: &[BlockSet]| {
        let local =
            BoundLayout::allocate(layout(shape, config), &SystemAllocator::default()).expect("as set up");
        ReadPlan::new(&whole, &local, GroupId(0), sets).unwrap_err()
    };
    let fitting = config(&whole, DType::BF16, TOKENS);
    let error = refusal(fitting.clone(), &[]);
    assert!(matches!(error, ShapeError::NoSets { .. }), "{error}");
    let error = refusal(fitting, &sets[..1]);
    assert!(matches!(error, ShapeError::Uncovered { needed: 32, found: 16, .. }), "{error}");
    let error = refusal(config(&whole, DType::F8E4M3, TOKENS), &sets).to_string();
    assert!(error.contains("layouts differ in dtype: source bf16"), "{error}");
    let error = refusal(config(&whole, DType::BF16, TOKENS * 2), &sets).to_string();
    assert!(error.contains("layouts differ in page_size: source 4, destination 8"), "{error}");
}
