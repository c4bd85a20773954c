//! Remote memory: descriptions of the blocks that workers offer to peers, and whether NIXL can move
//! them.
//!
//! A worker *exports* a [`BlockSet`]: where its memory is, how blocks lie in it, which slice of
//! which namespace it holds, and under which lease it may be read. A peer *imports* it from a
//! [`SerializedBlockSet`], which is untrusted until then.
//!
//! **Knows:** the description of remote memory, and NIXL.
//! **Must never know:** which blocks exist or are worth reading; it decides nothing.
//!
//! This version does not link NIXL and moves no bytes. [`Availability`] reports that, and what to
//! install.
//!
//! ```
//! use kvbm_layout::{AnyLayout, AxisOrder, DType, FullyContiguous, LayoutConfig, LayoutDescriptor, MemoryKind, RegionMemory};
//! use kvbm_nixl::{BlockSet, Lease, SerializedBlockSet, UnixMillis};
//! use kvbm_plan::{BlockSetId, GroupId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication};
//!
//! let config = LayoutConfig::builder().num_blocks(1024).num_layers(32).outer_dim(2).page_size(16).inner_dim(8 * 128);
//! let config = config.num_heads(8).dtype(DType::BF16).alignment(4096).build()?;
//! let bytes = config.num_blocks as u64 * config.bytes_per_block();
//! let layout = AnyLayout::FullyContiguous(FullyContiguous::new(config, AxisOrder::Nhd)?);
//! let memory = RegionMemory { kind: MemoryKind::Pinned, device_id: 0, address: 0x7f00_0000_0000, bytes, base_offset: 0 };
//!
//! let namespace = NamespaceTag::from_bytes([1; 16]);
//! let heads = HeadRange { start: 0, count: 8 };
//! let set = BlockSet {
//!     id: BlockSetId(1),
//!     namespace,
//!     group: GroupId(0),
//!     node: NodeId(1),
//!     slice: RankSlice { rank: Rank(0), first_layer: 0, num_layers: 32, heads, replication: Replication::None },
//!     layout: LayoutDescriptor::new(layout, vec![memory])?,
//!     agent: "worker-0".into(),
//!     agent_metadata: Vec::new(),
//!     lease: Lease { id: LeaseId(9), expires: UnixMillis(2_000) },
//! };
//! let sent = set.export()?;
//! let received = SerializedBlockSet::from_bytes(sent.as_bytes().to_vec());
//! assert_eq!(received.import(&namespace, UnixMillis(1_000))?, set);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | bodies of the fuzz targets | `exchange`, `codec`, `error`, `block_set`, `lease` |
//! | `exchange` | export and import of a block set | `codec`, `error`, `block_set`, `lease` |
//! | `codec` | bytes of a block set | `error`, `block_set`, `lease` |
//! | `error` | errors | `lease` |
//! | `block_set` | description of the blocks that a node offers to peers | `lease` |
//! | `lease` | time limit of a remote read | - |
//! | `availability` | whether NIXL is installed | - |
#![forbid(unsafe_code)]

mod availability;
mod block_set;
mod codec;
mod error;
mod exchange;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod lease;

pub use availability::{Availability, LIBRARY, LibrarySearch, NixlOptions, OptionsError};
pub use block_set::BlockSet;
pub use error::{ExportError, ImportError};
pub use exchange::SerializedBlockSet;
pub use lease::{Lease, UnixMillis};
