//! Tensors of an engine in host memory.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use kvbm::device::HostBuffer;
use kvbm::layout::BlockLayout;
use kvbm::storage::{BoundLayout, HostStorage, RegionBinding};
use std::ptr::NonNull;
use std::sync::Arc;

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
