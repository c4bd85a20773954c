//! Remote memory: descriptions of the blocks that workers offer to peers, and agents that move
//! them.
//!
//! A worker *exports* a [`BlockSet`]: where its memory is, how blocks lie in it, and which slice of
//! which namespace it holds. A peer *imports* it from a [`SerializedBlockSet`], which is untrusted
//! until then.
//!
//! **Knows:** the description of remote memory, and NIXL.
//! **Must never know:** which blocks exist or are worth reading; it decides nothing.
//!
//! A [`RemoteAgent`] moves the bytes: `NixlAgent` (feature `nixl`) over NIXL, whose library is
//! found at run time, or [`InProcessAgent`]. A [`ReadPlan`] turns the shapes and layouts of both
//! sides into lists of ranges. A [`BlockSetRegistry`] keeps what peers announce.
//!
//! ```
//! use kvbm_layout::{AnyLayout, AxisOrder, DType, FullyContiguous, LayoutConfig, LayoutDescriptor};
//! use kvbm_layout::{MemoryKind, RegionMemory};
//! use kvbm_nixl::{BlockSet, SerializedBlockSet};
//! use kvbm_plan::{BlockSetId, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication};
//!
//! let config = LayoutConfig::builder().num_blocks(1024).num_layers(32).outer_dim(2).page_size(16);
//! let config = config.inner_dim(8 * 128).num_heads(8).dtype(DType::BF16).alignment(4096).build()?;
//! let bytes = config.num_blocks as u64 * config.bytes_per_block();
//! let layout = AnyLayout::FullyContiguous(FullyContiguous::new(config, AxisOrder::Nhd)?);
//! let address = 0x7f00_0000_0000;
//! let memory =
//!     RegionMemory { kind: MemoryKind::Pinned, device_id: 0, address, bytes, base_offset: 0 };
//! let slice = RankSlice {
//!     rank: Rank(0),
//!     first_layer: 0,
//!     num_layers: 32,
//!     heads: HeadRange { start: 0, count: 8 },
//!     replication: Replication::None,
//! };
//!
//! let namespace = NamespaceTag::from_bytes([1; 16]);
//! let set = BlockSet {
//!     id: BlockSetId(1),
//!     namespace,
//!     group: GroupId(0),
//!     node: NodeId(1),
//!     slice,
//!     layout: LayoutDescriptor::new(layout, vec![memory])?,
//!     agent: "worker-0".into(),
//!     agent_metadata: Vec::new(),
//! };
//! let sent = set.export()?;
//! let received = SerializedBlockSet::from_bytes(sent.as_bytes().to_vec());
//! assert_eq!(received.import(&namespace)?, set);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | bodies of the fuzz targets | `node`, `in_process`, `announcement`, `exchange`, `codec`, `error`, `block_set` |
//! | `watch` | what a node makes of the announcements that it finds | `node`, `registry`, `announcement` |
//! | `node` | a node among peers: leases, verified reads | `registry`, `announcement`, `shapes`, `digest`, `device_memory`, `agent`, `error`, `block_set` |
//! | `digest` | digests of parts of blocks | `shapes`, `device_memory` |
//! | `conformance` | what every agent must do | `agent` |
//! | `in_process` | agents that reach each other in one process | `device_memory`, `agent`, `availability` |
//! | `nixl` | the agent over NIXL | `agent`, `availability` |
//! | `directory` | announcements in a shared folder | `announcement`, `error` |
//! | `registry` | what peers have announced | `announcement`, `error`, `block_set` |
//! | `announcement` | all that a node tells its peers, in one message | `codec`, `error`, `block_set` |
//! | `shapes` | lists of ranges between ranks of different shapes | `agent`, `storage`, `block_set` |
//! | `storage` | a peer's memory | `agent` |
//! | `agent` | the seam to what moves bytes between nodes | `availability` |
//! | `exchange` | export and import of a block set | `codec`, `error`, `block_set` |
//! | `codec` | bytes of a block set | `error`, `block_set` |
//! | `error` | errors | - |
//! | `block_set` | description of the blocks that a node offers to peers | - |
//! | `device_memory` | device memory for the processor | - |
//! | `availability` | whether NIXL is installed | - |

mod agent;
mod announcement;
mod availability;
mod block_set;
mod codec;
pub mod conformance;
mod device_memory;
mod digest;
mod directory;
mod error;
mod exchange;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod in_process;
#[cfg(feature = "nixl")]
mod nixl;
mod node;
mod registry;
mod shapes;
mod storage;
mod watch;

pub use agent::{
    AgentError, Descriptor, DescriptorList, MAX_DESCRIPTORS, MAX_NOTIFICATION_BYTES, NixlEnabledStorage,
    Notification, Registration, RemoteAgent, RemoteRequest, RemoteTransfer, SegmentKind, TransferDirection,
    TransferState,
};
pub use announcement::{MAX_ANNOUNCEMENT_BYTES, MAX_BLOCK_SETS, NodeAnnouncement};
pub use availability::{
    Availability, BackendOptions, FileBackend, LIBRARY, LibrarySearch, NixlOptions, OptionsError,
};
pub use block_set::BlockSet;
pub use device_memory::DeviceAccess;
pub use directory::{DirectoryError, FileDirectory, LiveFiles};
pub use error::{ExportError, ImportError};
pub use exchange::SerializedBlockSet;
pub use in_process::{AgentFault, InProcessAgent, InProcessNetwork};
#[cfg(feature = "nixl")]
pub use nixl::{NixlAgent, NixlObjects, ObjectError, ObjectTransfer};
pub use node::{
    Arrived, BlockSink, BlockSource, Export, HeldBlock, Landing, LocalRank, NodeCounts, NodeOptions,
    OfferedChain, PeerPlans, Publication, RefusedRead, RemoteBlocks, RemoteError, RemoteNode, RemoteSlots,
    WritePlans, Written,
};
pub use registry::{BlockSetRegistry, Imported, MAX_PEERS, RegistryError};
pub use shapes::{ModelPart, ReadPlan, ShapeError, TransferLists};
pub use storage::NixlStorage;
pub use watch::{OwnAnnouncement, PeerChange, PeerWatch};
