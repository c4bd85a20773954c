//! The registry's state and the operations on it, without handles and tier types. One lock protects
//! all of it.
//!
//! The state consists of parts, each with its own data and methods: entries, tiers, policy,
//! tenants, timed pins, early copies, times to live, events. [`state::Core`] holds them. Its
//! methods are the changes that concern several parts. The modules above are operations: they read
//! the parts that they need and call these changes.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `allocate` | allocation of slots | `evict`, `room`, `shares`, `state`, `store` |
//! | `room` | whether a request can be met, known before any block is evicted for it | `evict`, `shares`, `state`, `store` |
//! | `evict` | which blocks leave a tier that needs room | `entries`, `shares`, `state`, `store` |
//! | `assign` | a namespace becomes a tenant's | `state` |
//! | `register` | registration of a batch | `entries`, `registered`, `shares`, `state` |
//! | `restore` | a persistent tier's blocks after a restart | `policy_calls`, `state` |
//! | `hints` | uses, ends of branches, timed pins, times to live | `batch_lookup`, `remove`, `state`, `store`, `timed_pins` |
//! | `orphans` | copies that were complete before that of their parent, which failed | `remove`, `select`, `state`, `store` |
//! | `remove` | removal of a selection | `select`, `state`, `store` |
//! | `select` | which blocks a removal takes | `entries`, `store` |
//! | `offload` | which blocks to copy down before they are evicted | `registered`, `state`, `store` |
//! | `match_groups` | the longest prefix that every group can serve | `batch_lookup`, `entries`, `lookup`, `registered`, `state` |
//! | `lookup` | which blocks of a sequence are on the tiers | `batch_lookup`, `entries`, `registered`, `state` |
//! | `batch_lookup` | entries of a chain's blocks, batch by batch | `entries` |
//! | `arrivals` | arrivals begin and end | `policy_calls`, `registered`, `state` |
//! | `registered` | slots of registered blocks: users, duplicates, bad bytes | `policy_calls`, `state` |
//! | `presence` | the only place where a block comes to a tier or leaves it | `state` |
//! | `store` | the lock | `losses`, `state` |
//! | `state` | the parts that the lock protects | `early_copies`, `entries`, `policy_calls`, `shares`, `tier_state`, `time_to_live`, `timed_pins` |
//! | `policy_calls` | the eviction policy | `entries`, `tier_state` |
//! | `timed_pins` | timed pins and their order | `entries`, `shares`, `tier_state` |
//! | `early_copies` | complete copies whose parent is on its way | `entries` |
//! | `tier_state` | slots, counts and eviction order of a tier | `free_slots`, `order` |
//! | `free_slots` | slots without a block | |
//! | `order` | the eviction order of a tier | |
//! | `entries` | the entries of all blocks | `table` |
//! | `table` | the hash table | `bucket` |
//! | `bucket` | one cache line of the table | |
//! | `shares` | counts of tenants' blocks against their shares | |
//! | `time_to_live` | times to live of namespaces | |
//! | `losses` | losses of whole tiers, counted | |

pub(crate) mod allocate;
pub(crate) mod arrivals;
pub(crate) mod assign;
pub(crate) mod batch_lookup;
pub(crate) mod bucket;
pub(crate) mod early_copies;
pub(crate) mod entries;
pub(crate) mod evict;
pub(crate) mod free_slots;
pub(crate) mod hints;
#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod holds_tests;
pub(crate) mod lookup;
pub(crate) mod losses;
pub(crate) mod match_groups;
pub(crate) mod offload;
pub(crate) mod order;
pub(crate) mod orphans;
pub(crate) mod policy_calls;
pub(crate) mod presence;
pub(crate) mod register;
pub(crate) mod registered;
pub(crate) mod remove;
pub(crate) mod restore;
pub(crate) mod room;
pub(crate) mod select;
pub(crate) mod shares;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod table;
pub(crate) mod tier_state;
pub(crate) mod time_to_live;
pub(crate) mod timed_pins;

/// What a cached block costs in heap: its entry, its slot, its share of a full table and of the
/// eviction order.
const HEAP_BYTES_PER_BLOCK: usize = size_of::<crate::entry::Entry>()
    + size_of::<crate::slot::Slot>()
    + table::BYTES_PER_KEY
    + order::BYTES_PER_SLOT;
const _: () = assert!(HEAP_BYTES_PER_BLOCK <= 96);
