//! Remote memory: what workers tell each other about their blocks, and whether NIXL can move them.
//!
//! A worker *exports* a [`BlockSet`]: where its memory is, how blocks lie in it, which slice of which namespace it holds, and
//! under which lease it may be read. A peer *imports* it from a [`SerializedBlockSet`], which is untrusted until then.
//!
//! **Knows:** the description of remote memory, and NIXL.
//! **Must never know:** which blocks exist or are worth reading; it decides nothing.
//!
//! This version links no NIXL and moves no bytes: [`Availability`] says so, and what to install.
//!
//! ```
//! use kvbm_nixl::{BlockSet, Lease, MemoryKind, MemoryRegion, SerializedBlockSet, UnixMillis};
//! use kvbm_plan::{BlockSetId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication};
//!
//! let namespace = NamespaceTag::from_bytes([1; 16]);
//! let heads = HeadRange { start: 0, count: 8 };
//! let slice = RankSlice { rank: Rank(0), first_layer: 0, num_layers: 32, heads, replication: Replication::None };
//! let set = BlockSet {
//!     id: BlockSetId(1),
//!     namespace,
//!     node: NodeId(1),
//!     slice,
//!     num_blocks: 1024,
//!     memory: MemoryKind::Dram,
//!     regions: vec![MemoryRegion { address: 0x7f00_0000_0000, length_bytes: 1 << 30 }],
//!     layout: b"bytes of the layout".to_vec(),
//!     agent: "worker-0".into(),
//!     agent_metadata: Vec::new(),
//!     lease: Lease { id: LeaseId(9), expires: UnixMillis(2_000) },
//! };
//! let sent = set.export()?;
//! let received = SerializedBlockSet::from_bytes(sent.as_bytes().to_vec());
//! assert_eq!(received.import(&namespace, UnixMillis(1_000))?, set);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod availability;
mod block_set;
mod codec;
mod error;

pub use availability::{Availability, LIBRARY, LibrarySearch, NixlOptions, OptionsError};
pub use block_set::{BlockSet, Lease, MemoryKind, MemoryRegion, SerializedBlockSet, UnixMillis};
pub use error::{ExportError, ImportError};
