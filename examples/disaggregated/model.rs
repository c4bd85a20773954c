//! The model that both processes run: its shape, a prompt, and what it computes for a block.

use std::sync::Arc;

use anyhow::{Result, ensure};
use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    slice_for_rank,
};
use kvbm_nixl::LocalRank;
use kvbm_plan::{GroupId, HeadRange, NamespaceTag, Rank, RankSlice, Replication, SequenceHash};
use kvbm_storage::{BoundLayout, RegionBytes, SystemAllocator};
use kvbm_tokens::{Namespace, TokenSequence};

pub(crate) const GROUP: GroupId = GroupId(0);
/// Blocks of the prompt.
pub(crate) const BLOCKS: u32 = 64;
const PAGE_SIZE: u32 = 16;
const LAYERS: u32 = 8;
const HEADS: u32 = 8;
const HEAD_DIM: u32 = 64;
const ELEMENT_BYTES: u64 = 2;

/// How a process lays out its ranks.
pub(crate) struct Shape {
    pub(crate) ranks: u32,
    pub(crate) is_layer_separate: bool,
}

impl Shape {
    /// Memory of all ranks.
    pub(crate) fn allocate(&self) -> Result<Vec<LocalRank>> {
        (0..self.ranks).map(|rank| self.rank(rank)).collect()
    }

    fn rank(&self, rank: u32) -> Result<LocalRank> {
        let heads = slice_for_rank(HEADS, self.ranks, rank)?.heads;
        let count = heads.len() as u32;
        let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(LAYERS).outer_dim(2);
        let config = config.page_size(PAGE_SIZE).inner_dim(count * HEAD_DIM).num_heads(count);
        let config = config.dtype(DType::BF16).alignment(4096).build()?;
        let layout: Arc<dyn BlockLayout> = if self.is_layer_separate {
            Arc::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter)?)
        } else {
            Arc::new(FullyContiguous::new(config, AxisOrder::Universal)?)
        };
        let slice = RankSlice {
            rank: Rank(rank as u16),
            first_layer: 0,
            num_layers: LAYERS,
            heads: HeadRange { start: heads.start, count },
            replication: Replication::None,
        };
        Ok(LocalRank::new(slice, BoundLayout::allocate(layout, &SystemAllocator::default())?))
    }
}

/// The namespace of the model and the hashes of a prompt's blocks.
pub(crate) fn prompt() -> Result<(NamespaceTag, Vec<SequenceHash>)> {
    let namespace = Namespace::new("example-model").weights("1").page_size(PAGE_SIZE);
    let hasher = namespace.hasher()?;
    let tokens: Vec<u32> = (0..BLOCKS * PAGE_SIZE).map(|at| at.wrapping_mul(2_654_435_761) >> 15).collect();
    let tag = hasher.tag();
    Ok((tag, TokenSequence::from_tokens(hasher, &tokens).hashes().to_vec()))
}

/// What the model computes for one element, from all that it depends on.
fn value(hash: &SequenceHash, place: [u32; 5]) -> [u8; 2] {
    let seed =
        hash.as_bytes().iter().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
    let mixed = place.iter().fold(seed, |sum, part| (sum ^ part).wrapping_mul(0x9e37_79b1).rotate_left(11));
    ((mixed >> 16) as u16).to_le_bytes()
}

/// Visits every element of a rank's part of a block: its region, its offset, what it must hold.
fn each_element(
    rank: &LocalRank,
    slot: u32,
    hash: &SequenceHash,
    mut visit: impl FnMut(&RegionBytes, u64, [u8; 2]) -> Result<()>,
) -> Result<()> {
    let heads = rank.slice.heads;
    for layer in 0..LAYERS {
        for outer in 0..2 {
            let view = rank.bound.layout().block_view(slot, layer, Cell::Kv(outer))?;
            let region = rank.bound.region(view.region)?;
            for token in 0..PAGE_SIZE {
                for head in 0..heads.count {
                    let row = view.offset
                        + u64::from(token) * view.cell.token_stride
                        + u64::from(head) * view.cell.head_stride;
                    for element in 0..HEAD_DIM {
                        let at = row + u64::from(element) * view.cell.elem_stride;
                        let place = [layer, outer, token, heads.start + head, element];
                        visit(region, at, value(hash, place))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Computes a block into a slot of a rank.
pub(crate) fn compute(rank: &LocalRank, slot: u32, hash: &SequenceHash) -> Result<()> {
    each_element(rank, slot, hash, |region, at, value| {
        let RegionBytes::Host(memory) = region else { anyhow::bail!("the example uses host memory") };
        // SAFETY: nobody else uses the slot yet.
        Ok(unsafe { memory.write_at(at, &value) }?)
    })
}

/// Compares a slot of a rank with what the model computes; bytes that were compared.
pub(crate) fn compare(rank: &LocalRank, slot: u32, hash: &SequenceHash) -> Result<u64> {
    let mut bytes = 0;
    each_element(rank, slot, hash, |region, at, value| {
        let RegionBytes::Host(memory) = region else { anyhow::bail!("the example uses host memory") };
        let mut found = [0; 2];
        // SAFETY: the read into the slot is over.
        unsafe { memory.read_at(at, &mut found) }?;
        ensure!(
            found == value,
            "rank {}, slot {slot}, byte {at}: {found:?} is not {value:?}",
            rank.slice.rank
        );
        bytes += ELEMENT_BYTES;
        Ok(())
    })?;
    Ok(bytes)
}
