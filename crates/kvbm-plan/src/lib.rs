//! The vocabulary of leader and workers: plain data that both sides, and every crate above, agree
//! on.
//!
//! **Knows:** tiers, ids, block identities, rank slices, transfer plans and reports, and their wire
//! form.
//! **Must never know:** how anything moves, where memory is, which blocks exist. There is no
//! logic here beyond validation and encoding, so a worker in another process (or language) needs
//! nothing else.
//!
//! Wire form: MessagePack maps-as-arrays inside a versioned [`wire::Envelope`]. Everything read
//! from a wire is untrusted: [`wire::decode_command`] bounds the size before it allocates and the
//! content after.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `slice` | the part of a block that a rank holds | `ids` |
//! | `striping` | which directory of a disk a slot lies in | `ids` |
//! | `fuzz` | bodies of the fuzz targets | `wire` |
//! | `wire` | versioned encoding of commands and messages | `message`, `volume`, `report`, `plan` |
//! | `message` | commands of the leader, messages of a worker | `volume`, `report`, `plan`, `tier`, `identity`, `ids` |
//! | `volume` | descriptors of volumes | `ids` |
//! | `report` | outcome of each block of a plan | `path`, `ids` |
//! | `plan` | transfer plans: blocks, gates, priority | `comparison`, `path`, `location`, `tier`, `identity`, `ids` |
//! | `comparison` | comparing blocks instead of copying them | - |
//! | `path` | source and destination tier of a transfer | `tier` |
//! | `location` | tier, node and volume of a copy | `tier`, `ids` |
//! | `tier` | G1 to G4 | - |
//! | `identity` | what identifies a block | `ids` |
//! | `clock` | the clock of leaders | `simulation`, `deadline` |
//! | `simulation` | hooks of the simulator | `ids` |
//! | `ids` | ids of blocks, plans, ranks and nodes | - |
//! | `log_limit` | rate limit of repeated warnings in the log | - |
//! | `deadline` | deadlines from durations, without overflow | - |
//! | `access` | owner and mode of files that hold KV | - |

#![forbid(unsafe_code)]

mod access;
pub mod clock;
mod comparison;
mod deadline;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod identity;
mod ids;
mod location;
mod log_limit;
mod message;
mod path;
mod plan;
mod report;
pub mod simulation;
mod slice;
mod striping;
mod tier;
mod volume;
pub mod wire;

pub use access::{FileAccess, FileOwner};
pub use comparison::{Comparison, Elements};
pub use deadline::deadline_after;
pub use identity::{BlockIdentity, GroupKind};
pub use ids::{BlockId, BlockSetId, Epoch, GroupId, LeaseId, NamespaceId, NodeId, PlanId, Rank, VolumeId};
pub use location::{Endpoint, Location};
pub use log_limit::LogLimit;
pub use message::{
    Command, FlushOutcome, KeyNotice, Message, RecoveredBlock, StoredBlock, VolumeAnswer, VolumeRequest,
};
pub use path::Path;
pub use plan::{BlockTransfer, ChecksumMode, Gate, LayerRange, PlanError, Priority, TransferPlan};
pub use report::{BlockOutcome, Failure, FailureKind, TransferReport};
pub use slice::{HeadRange, RankSlice, Replication};
pub use striping::Striping;
pub use tier::Tier;
pub use volume::{VolumeDescriptor, VolumePlace, shown_uri};

pub use kvbm_tokens::{LocalHash, NamespaceTag, SequenceHash};
