//! The registry of KV blocks on all tiers: which slot holds which block, which blocks are in use,
//! and which are evicted.
//!
//! **Knows:** slot ids, sequence hashes, reference counts, recency, events. One [`Registry`] holds
//! all blocks of the three slotted tiers; [`BlockPool`] is a typed view of one of them.
//! **Must never know:** bytes, addresses, devices, files, networks, tokens, how a block is moved.
//! It waits for nothing. It runs no code of its callers under its lock, except an
//! [`EvictionPolicy`] that they bring.
//!
//! # Life of a block
//! [`BlockBatch`]`<T, Reset>` - `init_sequence` - [`BlockBatch`]`<T, Partial>` - `commit` -
//! [`BlockBatch`]`<T, Complete>` - [`register`](BlockPool::register) - [`Cached`]`<T>`. An
//! exclusive batch that is dropped returns its blocks to the pool. A dropped [`Cached`] leaves its
//! blocks registered until the tier needs their slots. [`TRANSITIONS`] is the whole table.
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
//! - Tiers are inclusive: each keeps and evicts its own copy. A use counts on every tier that holds
//!   the block.
//! - A Full block leaves a tier only when nothing continues it there.
//! - A block is found on a tier only after it was registered or its arrival completed there.
//! - Slots are handed out only while no registered block is in them.
//! - Every change of what a tier holds is one [`EventRecord`], written under the same lock as the
//!   change.
//!
//! # Modules
//!
//! A module uses only modules in rows below its own.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `registry` | the registry and its calls | `arrivals`, `block_state`, `blocks`, `config`, `core`, `error`, `event`, `found`, `losses`, `metadata`, `pinned`, `policy`, `pool`, `prefix`, `recovery`, `selection`, `share`, `shared`, `slot`, `status`, `sync`, `tier`, `vectors` |
//! | `pool` | a typed view of one tier | `arrivals`, `block_state`, `blocks`, `core`, `error`, `metadata`, `pinned`, `shared`, `status`, `sync`, `tier` |
//! | `prefix` | a matched prefix over several tiers | `core`, `found`, `losses`, `pinned`, `shared`, `sync`, `tier` |
//! | `arrivals` | reserved destinations of a transfer | `arrival`, `blocks`, `core`, `error`, `losses`, `metadata`, `pinned`, `shared`, `sync`, `tier`, `withheld` |
//! | `withheld` | slots that no allocation gets for now | `blocks` |
//! | `pinned` | shared batches of registered blocks | `core`, `entry`, `losses`, `metadata`, `shared`, `sync`, `tier` |
//! | `blocks` | exclusive batches of blocks | `block_state`, `core`, `error`, `losses`, `shared`, `sync`, `tier` |
//! | `shared` | what handles and registry share | `core`, `error`, `status`, `tier`, `vectors` |
//! | `core` | the state under the lock and its operations | `arrival`, `bytes`, `config`, `entry`, `error`, `event`, `found`, `losses`, `metadata`, `policy`, `prefetch`, `probe`, `random`, `recovery`, `selection`, `share`, `slot`, `status`, `sync`, `tier` |
//! | `policy` | eviction policies | `config`, `entry`, `prefetch`, `random`, `slot`, `tier` |
//! | `vectors` | a free list of vectors | `sync` |
//! | `error` | errors | `block_state`, `config`, `losses` |
//! | `config` | the configuration of a registry | `share`, `tier` |
//! | `slot` | what the registry knows of a block id | `entry` |
//! | `entry` | what the registry knows of a block | `random`, `tier` |
//! | `sync` | the lock | `hold_times`, `probe` |
//! | `arrival` | states and outcomes of an arrival | |
//! | `block_state` | the life of a block as a table and as types | |
//! | `event` | records and ring of events | |
//! | `found` | blocks that a lookup found | |
//! | `losses` | losses of whole tiers | |
//! | `metadata` | what the caller says about blocks | |
//! | `recovery` | the outcome of restoring a tier | |
//! | `selection` | which blocks a removal takes, and what it did | |
//! | `share` | tenants and their shares | |
//! | `status` | counts for people and metrics | |
//! | `tier` | tier tags | |
//! | `bytes` | comparison of sixteen bytes at once | |
//! | `prefetch` | reading a cache line early | |
//! | `random` | pseudo-random numbers | |
//! | `hold_times` | hold times of the lock, for benchmarks | |
//! | `probe` | counters for tests | |
//! | `test_chains` | chains of blocks for tests | |
//!
//! `DESIGN.md` beside this crate's manifest says how it is built and why.

#![deny(unsafe_code)]

mod arrival;
mod arrivals;
mod block_state;
mod blocks;
mod bytes;
mod config;
mod core;
mod entry;
mod error;
mod event;
mod found;
#[cfg(feature = "hold-times")]
mod hold_times;
mod losses;
mod metadata;
mod pinned;
mod policy;
mod pool;
mod prefetch;
mod prefix;
#[cfg(test)]
mod probe;
mod random;
mod recovery;
mod registry;
mod selection;
mod share;
mod shared;
mod slot;
mod status;
mod sync;
#[cfg(test)]
mod test_chains;
mod tier;
mod vectors;
mod withheld;

pub use arrival::{Arrival, ArrivalOutcome, Refusal};
pub use arrivals::{AnyArrivals, Arrivals};
pub use block_state::{
    BatchPosition, BatchState, BlockState, BlockTrigger, Complete, IllegalTransition, Partial, Reset,
    TRANSITIONS,
};
pub use blocks::{BlockBatch, MutableBlock};
pub use config::{ConfigError, GroupConfig, PolicyKind, RegistryConfig};
pub use core::match_groups::FoundOutside;
pub use entry::BlockMemory;
pub use error::{AllocError, PinError, RegisterError, RejectedBatch, SequenceError, TtlError};
pub use event::{Drained, EventBacklog, EventRecord, EventRecordKind};
pub use found::{ArrivingBlock, Outside, PrefixBlock};
#[cfg(feature = "hold-times")]
pub use hold_times::measure_holds;
pub use losses::{Losses, Lost};
pub use metadata::{BlockMetadata, Duplicates};
pub use pinned::{Cached, ImmutableBlock, Pinned, PublishHandle, RegistrationHandle};
pub use policy::{BlockUse, EvictionPolicy, Hazard, RequestPart, SlotNumbers, SlotSet};
pub use pool::BlockPool;
pub use prefix::{Prefix, PrefixParts};
pub use recovery::{RestoreError, Restored};
pub use registry::Registry;
pub use selection::{BlockSelection, Quarantine, Removed};
pub use share::{Share, TenantConfig, TenantError, TenantId, TenantUsage};
pub use status::{EvictionReason, TierCounters, TierStatus};
pub use tier::{G1, G2, G3, TierMask, TierTag};
pub use withheld::Withheld;

pub use kvbm_plan::SequenceHash;
pub use kvbm_tokens::BlockChain;
