//! The registry: one index of all blocks on all tiers.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `groups` | lookups over all cache groups | `handle` |
//! | `remove` | removal of blocks and slots on request | `handle` |
//! | `restore` | blocks of a persistent tier after a restart | `handle` |
//! | `tenants` | shares of tenants | `handle` |
//! | `handle` | the handle of a registry and its other calls | |

mod groups;
mod handle;
mod remove;
mod restore;
mod tenants;

pub use handle::Registry;
