//! Copies that were complete before that of their parent, which failed: they leave the tier as
//! well, with all blocks that continue them there.
//!
//! A block that is complete before its parent is noted behind the parent. The note goes when the
//! parent's arrival ends. Where the arrival failed, the caller that ends it removes the noted
//! blocks afterwards.

use super::early_copies::BlockKey;
use super::remove::Reach;
use super::select::Choice;
use super::state::Core;
use super::store::{Hold, Store};
use crate::entry::{NONE, Presence};
use crate::selection::Removed;
use crate::status::EvictionReason;
use crate::tier::TierMask;
use kvbm_plan::Tier;

impl Store {
    /// Removes the blocks that were complete before their parent failed. The caller has ended
    /// arrivals in `hold`.
    pub(crate) fn remove_orphans(&self, mut hold: Hold<'_>) {
        let mut orphaned = std::mem::take(&mut hold.early_copies.orphaned);
        for (tier, blocks) in orphaned.iter_mut().enumerate() {
            blocks.retain(|&block| hold.stays_orphan(tier, block));
        }
        drop(hold);
        for (tier, blocks) in orphaned.iter().enumerate().filter(|(_, blocks)| !blocks.is_empty()) {
            let (tiers, mut removed) = (TierMask::only(Tier::SLOTTED[tier]), Removed::default());
            let how = (Reach::Ends, EvictionReason::ParentFailed);
            self.remove_in_parts(&Choice::Subtrees(blocks), tiers, how, &mut removed);
        }
    }
}

impl Core {
    /// Whether a block is on `tier`, or on its way there, and its parent is neither. Where the
    /// parent is on its way again, the block is noted behind it once more.
    fn stays_orphan(&mut self, tier: usize, (group, hash): BlockKey) -> bool {
        let Some(index) = self.find(group, hash) else { return false };
        let (parent, presence) = (self.entry(index).parent.get(), self.entry(index).presence(tier));
        presence != Presence::Absent && parent != NONE && !self.awaits(parent, tier, index)
    }
}
