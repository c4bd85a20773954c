//! Bookkeeping of KV blocks on all tiers: which block is where, who uses it, which one goes when room is needed.
//!
//! **Knows:** slot ids, sequence hashes, reference counts, recency, events. One [`Registry`] holds all blocks of the
//! three slotted tiers; [`BlockPool`] is a typed view of one of them.
//! **Must never know:** bytes, addresses, devices, files, networks, tokens, how a block is moved; it waits for
//! nothing and runs no code of its callers under its locks, except an [`EvictionPolicy`] that they bring.
//!
//! # Life of a block
//! [`Blocks`]`<T, Reset>` - `init_sequence` - [`Blocks`]`<T, Partial>` - `commit` - [`Blocks`]`<T, Complete>` -
//! [`register`](BlockPool::register) - [`Cached`]`<T>`. An exclusive batch that is dropped returns its blocks to the
//! pool. A dropped [`Cached`] leaves its blocks registered, for whoever asks next, until the tier needs their slots.
//! [`TRANSITIONS`] is the whole table.
//!
//! ```
//! use kvbm_plan::{GroupId, NamespaceId};
//! use kvbm_pool::{BlockChain, Duplicates, G1, Registry, RegistryConfig, SequenceHash};
//!
//! let registry = Registry::new(&RegistryConfig::new([8, 0, 0]))?;
//! let pool = registry.pool::<G1>();
//! let hashes = [SequenceHash::from_bytes([1; 16]), SequenceHash::from_bytes([2; 16])];
//!
//! let fresh = pool.get_mutable_blocks(2)?;
//! let (done, rest) = fresh.init_sequence(NamespaceId(0), GroupId(0), 0)?.commit(BlockChain::of_hashes(&hashes))?;
//! assert!(rest.is_empty());
//! drop(pool.register(done, Duplicates::Reuse)?);
//!
//! let cached = pool.match_sequence_hashes(GroupId(0), &hashes);
//! assert_eq!(cached.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//! - Tiers are inclusive: each keeps and evicts its own copy. A use counts on every tier that holds the block.
//! - A Full block leaves a tier only when nothing continues it there.
//! - A block is found on a tier only after it was registered or its arrival completed there.
//! - Slots are handed out only while no registered block is in them.
//! - Every change of what a tier holds is one [`EventRecord`], written under the same lock as the change.
//!
//! `DESIGN.md` beside this crate's manifest says how it is built and why.

#![deny(unsafe_code)]

mod arrivals;
mod blocks;
mod bytes;
mod config;
mod core;
mod error;
mod event;
#[cfg(feature = "hold-times")]
mod hold_times;
mod losses;
mod metadata;
mod near;
mod pinned;
mod policy;
mod pool;
mod prefix;
mod registry;
mod shared;
mod spares;
mod state;
mod status;
mod sync;
mod tenants;
mod tier;
mod withheld;

pub use arrivals::{AnyArrivals, Arrival, Arrivals, Completion, Refusal};
pub use blocks::{Blocks, MutableBlock};
pub use config::{ConfigError, GroupConfig, PolicyKind, RegistryConfig};
pub use error::{AllocError, PinError, RegisterError, Rejected, SequenceError, TtlError};
pub use event::{Drained, EventBacklog, EventKind, EventRecord};
#[cfg(feature = "hold-times")]
pub use hold_times::measure_holds;
pub use losses::{Losses, Lost};
pub use metadata::BlockMetadata;
pub use pinned::{Cached, ImmutableBlock, Pinned, PublishHandle, RegistrationHandle};
pub use policy::{BlockMemory, BlockUse, EvictionPolicy, Hazard, Numbers, RequestPart, S3Fifo, SlotSet};
pub use pool::{BlockPool, Duplicates};
pub use prefix::{ArrivingBlock, Prefix, PrefixBlock, PrefixParts};
pub use registry::{Quarantine, Registry, Removed, RestoreError, Restored, Selection};
pub use state::{
    BlockState, Complete, IllegalTransition, Origin, Partial, Reset, State, TRANSITIONS, Trigger,
};
pub use status::{Counters, EvictionReason, TierStatus};
pub use tenants::{Share, TenantConfig, TenantError, TenantId, TenantStatus};
pub use tier::{G1, G2, G3, TierMask, TierTag};
pub use withheld::Withheld;

pub use kvbm_plan::SequenceHash;
pub use kvbm_tokens::BlockChain;
