//! Ranks of any shape, and blocks that move between them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, DType, FullyContiguous, Holders, LayerSeparate, LayoutConfig,
    OuterPlacement, slice_for_rank,
};
use kvbm_nixl::{
    BlockSet, NixlEnabledStorage, ReadPlan, Registration, RemoteAgent, RemoteRequest, TransferDirection,
};
use kvbm_plan::{BlockSetId, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication};
use kvbm_storage::{BoundLayout, StorageExt, SystemAllocator};

pub(crate) const LAYERS: u32 = 4;
pub(crate) const TOKENS: u32 = 4;
pub(crate) const HEAD_DIM: u32 = 8;
pub(crate) const BLOCKS: u32 = 6;

/// What both sides hold: KV heads, and tensors of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) heads: u32,
    pub(crate) outer: u32,
}

pub(crate) const EIGHT_HEADS: Model = Model { heads: 8, outer: 2 };
pub(crate) const FOUR_HEADS: Model = Model { heads: 4, outer: 2 };
/// One latent for all heads, in one tensor, which every rank holds.
pub(crate) const MLA: Model = Model { heads: 1, outer: 1 };

/// How one side is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) model: Model,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) order: AxisOrder,
    pub(crate) is_separate: bool,
}

pub(crate) fn slice(shape: Shape, rank: u32) -> RankSlice {
    let (stage, tp_rank) = (rank / shape.tp, rank % shape.tp);
    let of = slice_for_rank(shape.model.heads, shape.tp, tp_rank).expect("as set up");
    let heads = of.heads;
    let replication = match of.holders {
        Holders::One => Replication::None,
        Holders::Several { writer, .. } => {
            Replication::Replicated { writer: Rank((stage * shape.tp + writer) as u16) }
        }
    };
    RankSlice {
        rank: Rank(rank as u16),
        first_layer: stage * (LAYERS / shape.pp),
        num_layers: LAYERS / shape.pp,
        heads: HeadRange { start: heads.start, count: heads.len() as u32 },
        replication,
    }
}

pub(crate) fn config(outer: u32, slice: &RankSlice, dtype: DType, tokens: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(BLOCKS)
        .num_layers(slice.num_layers)
        .outer_dim(outer)
        .page_size(tokens)
        .inner_dim(slice.heads.count * HEAD_DIM)
        .num_heads(slice.heads.count)
        .dtype(dtype)
        .alignment(64)
        .build()
        .expect("as set up")
}

pub(crate) fn layout(shape: Shape, config: LayoutConfig) -> Arc<dyn BlockLayout> {
    if shape.is_separate {
        let placement = OuterPlacement::KvOuter;
        return Arc::new(LayerSeparate::new(config, shape.order, placement).expect("as set up"));
    }
    Arc::new(FullyContiguous::new(config, shape.order).expect("as set up"))
}

pub(crate) struct Ranks {
    pub(crate) model: Model,
    pub(crate) slices: Vec<RankSlice>,
    pub(crate) bound: Vec<BoundLayout>,
    _registrations: Vec<Registration>,
}

pub(crate) fn ranks(agent: &dyn RemoteAgent, shape: Shape) -> Ranks {
    let slices: Vec<_> = (0..shape.tp * shape.pp).map(|rank| slice(shape, rank)).collect();
    let bound: Vec<_> = slices
        .iter()
        .map(|slice| {
            let layout = layout(shape, config(shape.model.outer, slice, DType::BF16, TOKENS));
            BoundLayout::allocate(layout, &SystemAllocator::default()).expect("as set up")
        })
        .collect();
    let registrations = bound.iter().map(|bound| bound.nixl_register(agent).expect("as set up")).collect();
    Ranks { model: shape.model, slices, bound, _registrations: registrations }
}

pub(crate) fn sets(agent: &dyn RemoteAgent, ranks: &Ranks) -> Vec<BlockSet> {
    let sets = ranks.slices.iter().zip(&ranks.bound).map(|(slice, bound)| BlockSet {
        id: BlockSetId(u64::from(slice.rank.0)),
        namespace: NamespaceTag::from_bytes([1; 16]),
        group: GroupId(0),
        node: NodeId(1),
        slice: *slice,
        layout: bound.describe().expect("as set up"),
        agent: agent.name().into(),
        agent_metadata: agent.metadata().expect("as set up"),
    });
    sets.collect()
}

/// Visits every element of a block: (storage, offset in it, what it must hold).
pub(crate) fn each_element(
    ranks: &Ranks,
    block: u32,
    content: u32,
    mut visit: impl FnMut(&BoundLayout, u32, u64, u16),
) {
    for (slice, bound) in ranks.slices.iter().zip(&ranks.bound) {
        for layer in 0..slice.num_layers {
            for outer in 0..ranks.model.outer {
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
                            let Model { heads, outer: tensors } = ranks.model;
                            let place = (content * LAYERS + layer) * tensors + outer;
                            let place = ((place * TOKENS + token) * heads + head) * HEAD_DIM + element;
                            visit(bound, view.region, at, place as u16);
                        }
                    }
                }
            }
        }
    }
}

pub(crate) fn fill(ranks: &Ranks, block: u32, content: u32) {
    each_element(ranks, block, content, |bound, region, at, value| {
        let binding = &bound.bindings()[region as usize];
        // SAFETY: nobody else touches the storages of this test.
        unsafe { binding.storage.write_at(binding.offset + at, &value.to_le_bytes()) }.expect("as set up");
    });
}

/// How many elements of a block are wrong, of how many.
pub(crate) fn wrong_elements(ranks: &Ranks, block: u32, content: u32) -> (usize, usize) {
    let (mut wrong, mut all) = (0, 0);
    each_element(ranks, block, content, |bound, region, at, value| {
        let binding = &bound.bindings()[region as usize];
        let mut bytes = [0; 2];
        // SAFETY: nobody else touches the storages of this test.
        unsafe { binding.storage.read_at(binding.offset + at, &mut bytes) }.expect("as set up");
        wrong += usize::from(u16::from_le_bytes(bytes) != value);
        all += 1;
    });
    (wrong, all)
}

/// Moves blocks and checks each element; how many. `push`: the source writes, else the destination
/// reads.
pub(crate) fn moves_exactly(
    [source, target]: [&dyn RemoteAgent; 2],
    [from, to]: [Shape; 2],
    blocks: &[(u32, u32)],
    push: bool,
) -> usize {
    let (holders, takers) = (ranks(source, from), ranks(target, to));
    for (index, (theirs, _)) in (0..).zip(blocks) {
        fill(&holders, *theirs, index);
    }
    let run = |agent: &dyn RemoteAgent,
               other: &dyn RemoteAgent,
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
        run(source, target, &holders, &takers, &turned);
    } else {
        run(target, source, &takers, &holders, blocks);
    }
    let mut elements = 0;
    for (index, (_, ours)) in (0..).zip(blocks) {
        let (wrong, all) = wrong_elements(&takers, *ours, index);
        assert_eq!(wrong, 0, "{from:?} to {to:?}, block {index}");
        elements += all;
    }
    elements
}
