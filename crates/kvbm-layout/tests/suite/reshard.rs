//! A model's cache copied from one tensor- and pipeline-parallel deployment to another, byte by
//! byte.

use kvbm_layout::{
    AxisOrder, BlockLayout, BlockPart, CopyPlan, DType, FullyContiguous, LayerSeparate, LayoutConfig,
    OuterPlacement, slice_for_rank,
};

use crate::naive::Memory;
use crate::shapes::config;

const LAYERS: u32 = 3;
const TOKENS: u32 = 4;
const HEAD_DIM: u32 = 2;
const BLOCK: u32 = 1;

/// A rank: its part of the model, how its memory is laid out, and the memory.
struct Rank {
    part: BlockPart,
    layout: Box<dyn BlockLayout>,
    memory: Memory,
    /// Whether it is the one that sends its heads.
    writes: bool,
}

fn shape(part: &BlockPart, outer_dim: u32) -> LayoutConfig {
    let dense = config(2, part.layers.len() as u32, TOKENS, part.heads.len() as u32, HEAD_DIM, DType::BF16);
    LayoutConfig { outer_dim, ..dense }
}

/// The ranks of a deployment, pipeline stages with `split` as their border, each with zeroed
/// memory.
fn ranks(
    (heads, outer_dim): (u32, u32),
    tp: u32,
    split: u32,
    lay_out: impl Fn(LayoutConfig) -> Box<dyn BlockLayout>,
) -> Vec<Rank> {
    let stages = [0..split, split..LAYERS];
    let stages = stages.into_iter().filter(|layers| !layers.is_empty());
    stages
        .flat_map(|layers| (0..tp).map(move |rank| (layers.clone(), rank)))
        .map(|(layers, rank)| {
            let slice = slice_for_rank(heads, tp, rank).unwrap();
            let writes = slice.is_writer(rank);
            let part = BlockPart { layers, heads: slice.heads };
            let layout = lay_out(shape(&part, outer_dim));
            let memory = layout.regions().iter().map(|region| vec![0; region.bytes as usize]).collect();
            Rank { part, layout, memory, writes }
        })
        .collect()
}

/// What the model has at a place, as two bytes that no other place has.
fn value(layer: u32, outer: u32, token: u32, head: u32, elem: u32) -> [u8; 2] {
    let place = (((layer * 2 + outer) * TOKENS + token) * 8 + head) * HEAD_DIM + elem + 1;
    (place as u16).to_le_bytes()
}

impl Rank {
    /// Every element of the block: where its two bytes are, and what they have to be.
    fn elements(&self) -> Vec<(usize, usize, [u8; 2])> {
        let mut elements = Vec::new();
        for layer in self.part.layers.clone() {
            for cell in self.layout.config().cells() {
                let kvbm_layout::Cell::Kv(outer) = cell else { panic!("no planes here") };
                let view = self.layout.block_view(BLOCK, layer - self.part.layers.start, cell).unwrap();
                for (token, head, elem) in (0..TOKENS).flat_map(|token| {
                    let heads = self.part.heads.clone();
                    heads.flat_map(move |head| (0..HEAD_DIM).map(move |elem| (token, head, elem)))
                }) {
                    let offset = view.offset
                        + u64::from(token) * view.cell.token_stride
                        + u64::from(head - self.part.heads.start) * view.cell.head_stride
                        + u64::from(elem) * view.cell.elem_stride;
                    elements.push((
                        view.region as usize,
                        offset as usize,
                        value(layer, outer, token, head, elem),
                    ));
                }
            }
        }
        elements
    }

    fn receive(&mut self, from: &Self) {
        let Some(selection) = from.part.overlap(&self.part) else { return };
        let plan = CopyPlan::between(&*from.layout, &*self.layout, &selection).unwrap();
        plan.for_each_run(BLOCK, BLOCK, |run| {
            let source = &from.memory[run.src_region as usize][run.src_offset as usize..][..run.len as usize];
            self.memory[run.dst_region as usize][run.dst_offset as usize..][..run.len as usize]
                .copy_from_slice(source);
        })
        .unwrap();
    }
}

#[test]
fn every_rank_of_another_deployment_gets_exactly_its_part() {
    let engine = |config| -> Box<dyn BlockLayout> {
        Box::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap())
    };
    let slot = |config| -> Box<dyn BlockLayout> {
        Box::new(FullyContiguous::new(config, AxisOrder::Universal).unwrap())
    };
    // One head and one tensor a layer is MLA.
    for model in [(1, 1), (1, 2), (2, 2), (4, 2), (8, 2)] {
        for (from_tp, to_tp) in (1..=16).flat_map(|from| (1..=16).map(move |to| (from, to))) {
            let (from_split, to_split) = (from_tp % LAYERS, to_tp % 2);
            let mut from = ranks(model, from_tp, from_split, engine);
            for rank in &mut from {
                for (region, offset, value) in rank.elements() {
                    rank.memory[region][offset..offset + 2].copy_from_slice(&value);
                }
            }
            for (index, mut rank) in ranks(model, to_tp, to_split, slot).into_iter().enumerate() {
                from.iter().filter(|from| from.writes).for_each(|from| rank.receive(from));
                for (region, offset, value) in rank.elements() {
                    assert_eq!(
                        rank.memory[region][offset..offset + 2],
                        value,
                        "{model:?}, tp {from_tp} to {to_tp}, rank {index}, byte {offset}"
                    );
                }
            }
        }
    }
}
