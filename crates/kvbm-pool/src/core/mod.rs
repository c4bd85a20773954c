//! The registry's state and the operations on it, without handles and tier types. One lock protects
//! all of it.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `orphans` | copies that were complete before that of their parent, which failed | `early_copies`, `remove`, `select`, `state`, `store` |
//! | `begin_arrivals` | arrivals begin: which blocks come, and which stay meanwhile | `policy_calls`, `reference`, `state` |
//! | `end_arrivals` | arrivals end: blocks become visible, or their slots are free | `reference`, `state` |
//! | `restore` | a persistent tier's blocks after a restart | `policy_calls`, `state` |
//! | `register` | registration of a batch | `entries`, `reference`, `shares`, `state` |
//! | `tenant_shares` | requests and victims by tenants' shares | `evict`, `shares`, `state`, `store` |
//! | `evict` | allocation and eviction | `entries`, `shares`, `state`, `store` |
//! | `expire` | removal of blocks whose time to live is over | `state`, `store` |
//! | `remove` | removal of a selection, or of a slot with bad bytes | `select`, `state`, `store` |
//! | `select` | which blocks a removal takes | `state`, `store` |
//! | `offload` | which blocks to copy down before they are evicted | `reference`, `state`, `store` |
//! | `match_groups` | the longest prefix that every group can serve | `batch_lookup`, `lookup`, `state` |
//! | `lookup` | which blocks of a sequence are on the tiers | `batch_lookup`, `entries`, `reference`, `state` |
//! | `touch` | uses of blocks | `batch_lookup`, `state` |
//! | `batch_lookup` | entries of a chain's blocks, batch by batch | `entries`, `state` |
//! | `timed_pins` | pins until some iteration | `pin_ends`, `state`, `store` |
//! | `reference` | references of users and transfers | `policy_calls`, `state` |
//! | `policy_calls` | calls of the eviction policy | `entries`, `state`, `store` |
//! | `presence` | the only place where a block comes to a tier or leaves it | `state` |
//! | `entries` | finding, making and giving up entries | `state`, `table` |
//! | `store` | the lock | `losses`, `state` |
//! | `state` | everything that the lock protects | `early_copies`, `free_slots`, `pin_ends`, `shares`, `table`, `tier_state`, `time_to_live` |
//! | `tier_state` | counts and eviction order of a tier | `free_slots`, `order` |
//! | `free_slots` | slots without a block | |
//! | `order` | the eviction order of a tier | |
//! | `table` | the hash table | `bucket` |
//! | `bucket` | one cache line of the table | |
//! | `shares` | counts of tenants' blocks against their shares | |
//! | `pin_ends` | timed pins and their order | |
//! | `time_to_live` | times to live of namespaces | |
//! | `early_copies` | complete copies whose parent is on its way | |
//! | `losses` | losses of whole tiers, counted | |

pub(crate) mod batch_lookup;
pub(crate) mod begin_arrivals;
pub(crate) mod bucket;
pub(crate) mod early_copies;
pub(crate) mod end_arrivals;
pub(crate) mod entries;
pub(crate) mod evict;
pub(crate) mod expire;
pub(crate) mod free_slots;
#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod holds_tests;
pub(crate) mod lookup;
pub(crate) mod losses;
pub(crate) mod match_groups;
pub(crate) mod offload;
pub(crate) mod order;
pub(crate) mod orphans;
pub(crate) mod pin_ends;
pub(crate) mod policy_calls;
pub(crate) mod presence;
pub(crate) mod reference;
pub(crate) mod register;
pub(crate) mod remove;
pub(crate) mod restore;
pub(crate) mod select;
pub(crate) mod shares;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod table;
pub(crate) mod tenant_shares;
pub(crate) mod tier_state;
pub(crate) mod time_to_live;
pub(crate) mod timed_pins;
pub(crate) mod touch;

/// What a cached block costs in heap: its entry, its slot, its share of a full table and of the
/// eviction order.
const HEAP_BYTES_PER_BLOCK: usize = size_of::<crate::entry::Entry>()
    + size_of::<crate::slot::Slot>()
    + table::BYTES_PER_KEY
    + order::BYTES_PER_SLOT;
const _: () = assert!(HEAP_BYTES_PER_BLOCK <= 96);
