//! Memory and files that hold KV blocks, and layouts bound to them.
//!
//! **Knows:** how to get memory (host, page-locked, device) and slot files, what frees them, and
//! how to address the bytes of block `n` of a layout in them.
//! **Must never know:** what a block stands for (hashes, tiers, registry), and how blocks move:
//! streams, rings and executors above this crate do that.
//!
//! | storage | memory | made by |
//! |---|---|---|
//! | [`SystemStorage`] | host, aligned, huge pages on request | [`SystemAllocator`] |
//! | [`HostStorage`] | host; the engine's | [`HostStorage::from_external`] |
//! | [`PinnedStorage`] | host, page-locked through a device, on its NUMA node | [`PinnedAllocator`] |
//! | [`SharedStorage`] | host, mapped by several processes, of a sealed size | [`SharedStorage::create`], [`SharedStorage::map`] |
//! | [`DeviceStorage`] | device; ours, or the engine's ([`DeviceStorage::from_external`]) | [`DeviceAllocator`] |
//! | [`DiskStorage`] | a preallocated file of fixed length | [`DiskAllocator`] |
//!
//! A [`BoundLayout`] is a `BlockLayout` with one place in a storage for each of its regions: blocks
//! become addressable.
//!
//! ```
//! use std::sync::Arc;
//! use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayoutConfig};
//! use kvbm_storage::{BoundLayout, SystemAllocator};
//!
//! let config = LayoutConfig::builder()
//!     .num_blocks(8).num_layers(2).outer_dim(2).page_size(16).inner_dim(64).num_heads(4)
//!     .dtype(DType::BF16).alignment(4096)
//!     .build()?;
//! let layout = Arc::new(FullyContiguous::new(config, AxisOrder::Nhd)?);
//! let bound = BoundLayout::allocate(layout, &SystemAllocator::default())?;
//! let fragments = bound.block_fragments(3)?;
//! assert_eq!(fragments.len(), 1, "a contiguous block is one fragment");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bound;
pub mod conformance;
mod description;
mod device;
mod disk;
mod error;
mod fragments;
mod heap;
mod host;
mod mapping;
mod numa;
mod pinned;
mod population;
mod shared;
mod storage;
mod system;
mod thread_placement;

pub use bound::{BoundLayout, RegionBinding, RegionBytes};
pub use device::{DeviceAllocator, DeviceStorage};
pub use disk::{DiskAllocator, DiskStorage, Preallocation};
pub use error::StorageError;
pub use fragments::BoundFragment;
pub use heap::{limit_free_heap, release_free_heap};
pub use host::HostStorage;
pub use numa::NumaPlacement;
pub use pinned::{PinFallback, PinProgress, PinState, PinnedAllocator, PinnedStorage};
pub use population::{Population, PopulationEnd};
pub use shared::SharedStorage;
pub use storage::{Backing, FileRange, Storage, StorageAllocator, StorageExt, StorageKind};
pub use system::{HugePages, PageSize, SystemAllocator, SystemStorage};
pub use thread_placement::{Processors, ThreadPlacement, node_of, run_near};

// Part of this crate's signatures.
pub use kvbm_device::{DeviceId, DeviceMemory, HostRegion, Owner};
