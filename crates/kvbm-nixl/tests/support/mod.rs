//! Ranks in ordinary memory, and their bytes.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
};
use kvbm_nixl::LocalRank;
use kvbm_plan::{HeadRange, Rank, RankSlice, Replication, SequenceHash};
use kvbm_storage::{BoundLayout, SystemAllocator};

/// Blocks of a rank.
pub(crate) const BLOCKS: u32 = 8;

/// Ranks that divide the heads; of more ranks than heads, several have the same.
pub(crate) fn ranks(tp: u32, heads: u32, is_separate: bool) -> Vec<LocalRank> {
    let each = (heads / tp).max(1);
    (0..tp).map(|rank| local_rank(rank, (rank * heads / tp) / each * each, each, is_separate)).collect()
}

pub(crate) fn local_rank(rank: u32, first: u32, heads: u32, is_separate: bool) -> LocalRank {
    let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(2).outer_dim(2).page_size(4);
    let config = config.inner_dim(heads * 16).num_heads(heads).dtype(DType::BF16).alignment(64);
    let config = config.build().expect("a small shape");
    let layout: Arc<dyn BlockLayout> = if is_separate {
        let placement = OuterPlacement::KvOuter;
        Arc::new(LayerSeparate::new(config, AxisOrder::Hnd, placement).expect("a layout"))
    } else {
        Arc::new(FullyContiguous::new(config, AxisOrder::Nhd).expect("a layout"))
    };
    let slice = RankSlice {
        rank: Rank(rank as u16),
        first_layer: 0,
        num_layers: 2,
        heads: HeadRange { start: first, count: heads },
        replication: Replication::None,
    };
    LocalRank::new(slice, BoundLayout::allocate(layout, &SystemAllocator::default()).expect("memory"))
}

/// Writes bytes that depend on the block into a rank.
pub(crate) fn fill(rank: &LocalRank, block: u32, seed: u8) {
    let bytes: Vec<u8> = (0..rank.bound.bytes_per_block())
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed.wrapping_mul(17))
        .collect();
    // SAFETY: nobody else touches the block.
    unsafe { rank.bound.write_block(block, &bytes) }.expect("a block");
}

pub(crate) fn content(rank: &LocalRank, block: u32) -> Vec<u8> {
    let mut bytes = vec![0; rank.bound.bytes_per_block() as usize];
    // SAFETY: nobody writes the block.
    unsafe { rank.bound.read_block(block, &mut bytes) }.expect("a block");
    bytes
}

pub(crate) fn hash(block: u32) -> SequenceHash {
    SequenceHash::from_bytes([block as u8 + 1; 16])
}

pub(crate) fn hashes(count: u32) -> Vec<SequenceHash> {
    (0..count).map(hash).collect()
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub(crate) fn nothing() -> Arc<dyn Any + Send + Sync> {
    Arc::new(())
}
