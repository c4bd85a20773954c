//! Copies that were complete before that of their parent, which failed: they leave the tier as
//! well, with all blocks that continue them there.
//!
//! A block that is complete before its parent is noted behind the parent. The note goes when the
//! parent's arrival ends. Where the arrival failed, the caller that ends it removes the noted
//! blocks afterwards.

use super::remove::{Reach, Removal};
use super::select::Choice;
use super::state::Core;
use super::store::{Hold, Store};
use crate::status::EvictionReason;
use crate::tier::TierMask;
use kvbm_plan::Tier;

impl Store {
    /// Removes the blocks that were complete before their parent failed. The caller has ended
    /// arrivals in `hold`.
    pub(crate) fn remove_orphans(&self, mut hold: Hold<'_>) {
        let Core { early_copies, entries, .. } = &mut *hold;
        let mut orphaned = std::mem::take(&mut early_copies.orphaned);
        for (tier, blocks) in orphaned.iter_mut().enumerate() {
            blocks.retain(|&block| early_copies.stays_orphan(entries, tier, block));
        }
        drop(hold);
        for (tier, blocks) in orphaned.iter().enumerate().filter(|(_, blocks)| !blocks.is_empty()) {
            let tiers = TierMask::only(Tier::SLOTTED[tier]);
            let mut removal = Removal::new(tiers, Reach::Ends, EvictionReason::ParentFailed);
            self.remove_in_parts(&Choice::Subtrees(blocks), &mut removal);
        }
    }
}
