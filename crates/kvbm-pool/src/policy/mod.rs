//! Which block goes when room is needed: the seam, and the policies that ship.
//!
//! The registry keeps every policy to the rules: it names as evictable only blocks without users
//! and, in Full groups, that nothing on the tier continues. A policy only chooses among these. What
//! it wants to remember of a block lies in the block's own entry ([`BlockMemory`], three bytes), so
//! a use of a block costs no further cache miss.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `hazard` | the default policy | `eviction`, `slot_sets` |
//! | `slot_sets` | a value for each set of slots | `eviction` |
//! | `eviction` | the interface | |

mod eviction;
mod hazard;
mod slot_sets;

pub use eviction::{BlockUse, EvictionPolicy, RequestPart, SlotNumbers, SlotSet};
pub use hazard::Hazard;

use crate::config::PolicyKind;
use crate::tier::TIERS;

/// The policy of that name; none for the one that the registry has built in.
pub(crate) fn build(
    kind: PolicyKind,
    capacity: [usize; TIERS],
    seed: u64,
) -> Option<Box<dyn EvictionPolicy>> {
    match kind {
        PolicyKind::LruLeaf => None,
        PolicyKind::Hazard => Some(Box::new(Hazard::new(capacity, seed))),
    }
}
