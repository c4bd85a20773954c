//! Tensors of an engine in host memory.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use kvbm::config::ModelConfig;
use kvbm::device::HostBuffer;
use kvbm::layout::{AxisOrder, BlockLayout, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::storage::{BoundLayout, HostStorage, RegionBinding};
use std::ptr::NonNull;
use std::sync::Arc;

/// The shape of a rank's tensors: `blocks` blocks of a model, with `heads` of its KV heads.
pub fn rank_shape(model: &ModelConfig, heads: u32, blocks: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(model.num_layers)
        .outer_dim(model.outer_dim)
        .page_size(model.page_size)
        .inner_dim(heads * model.head_dim)
        .num_heads(heads)
        .dtype(model.dtype)
        .build()
        .unwrap()
}

/// A rank's layout that has all parts of a block in one place.
pub fn contiguous(model: &ModelConfig, heads: u32, blocks: u32) -> Arc<dyn BlockLayout> {
    Arc::new(FullyContiguous::new(rank_shape(model, heads, blocks), AxisOrder::Nhd).unwrap())
}

/// The layout of an engine's only rank that has a tensor for each layer.
pub fn layer_separate(model: &ModelConfig, blocks: u32) -> Arc<dyn BlockLayout> {
    let shape = rank_shape(model, model.num_kv_heads, blocks);
    Arc::new(LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap())
}

/// A tensor for each region.
pub fn host_tensors(layout: Arc<dyn BlockLayout>) -> BoundLayout {
    let bind = |bytes: u64| {
        let tensor = HostBuffer::zeroed(bytes as usize);
        let start = NonNull::new(tensor.as_ptr()).unwrap();
        // SAFETY: the buffer is its own owner; tests touch a block only while no transfer does.
        let storage = unsafe { HostStorage::from_external(start, bytes, Arc::new(tensor)) }.unwrap();
        RegionBinding::new(Arc::new(storage))
    };
    let bindings = layout.regions().iter().map(|region| bind(region.bytes)).collect();
    BoundLayout::bind(layout, bindings).unwrap()
}
