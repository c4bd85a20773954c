//! Blocks and slots that the caller takes out: of a model or tenant, of a chain, with bad bytes.

use super::Registry;
use crate::core::Store;
use crate::core::remove::Reach;
use crate::core::select::Choice;
use crate::core::slot::Usage;
use crate::losses::Losses;
use crate::status::EvictionReason;
use crate::tier::TierMask;
use kvbm_plan::{BlockId, GroupId, NamespaceId, SequenceHash, Tier};

/// Which blocks to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Every block.
    All,
    /// The blocks of a group.
    Group(GroupId),
    /// The blocks of a namespace (a model, a tenant).
    Namespace(NamespaceId),
    /// A block and everything that continues it.
    Subtree {
        /// Group of the block.
        group: GroupId,
        /// The block.
        hash: SequenceHash,
    },
}

/// What a removal did. All of it is invisible now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Blocks that were on a tier (one on two tiers counts twice).
    pub blocks: u64,
    /// Slots of these that come back only after their last user.
    pub in_use: u64,
    /// Blocks on their way, which will not become visible.
    pub cancelled: u64,
}

/// What became of a slot whose bytes are bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quarantine {
    /// Out of use for good.
    Done,
    /// Invisible now, out of use for good after its last user.
    AfterLastUser,
    /// The slot holds no registered block: nothing was done.
    NotRegistered,
}

impl Registry {
    /// Removes every block from `tier` that nobody uses and that nothing in use continues.
    pub fn clear(&self, tier: Tier) -> Removed {
        self.remove_if(Selection::All, TierMask::only(tier), Reach::Unused)
    }

    /// Removes the blocks of a namespace from all tiers.
    pub fn forget(&self, namespace: NamespaceId) -> Removed {
        self.remove(Selection::Namespace(namespace), TierMask::ALL)
    }

    /// Removes a block and everything that continues it from `tiers`. In groups that are not Full, blocks are known to
    /// continue it only as long as the blocks between are on some tier.
    pub fn remove_subtree(&self, group: GroupId, hash: SequenceHash, tiers: TierMask) -> Removed {
        self.remove(Selection::Subtree { group, hash }, tiers)
    }

    /// The same for several blocks at once: the registry is looked through for all of them together.
    pub fn remove_subtrees(&self, blocks: &[(GroupId, SequenceHash)], tiers: TierMask) -> Removed {
        let mut removed = Removed::default();
        let how = (Reach::Ends, EvictionReason::Removed);
        self.shared.store.remove_in_parts(&Choice::Subtrees(blocks), tiers, how, &mut removed);
        removed
    }

    /// Removes the blocks of a selection that are on `tiers` now. Blocks in use become invisible too; their slots come
    /// back after their last user. Blocks on their way will not become visible. Looks the registry through, then removes, both in
    /// small parts between which others have their turn: of what is registered meanwhile some may go as well. A block behind which something
    /// came meanwhile goes in another turn, of which there are a few, the last in one hold.
    pub fn remove(&self, selection: Selection, tiers: TierMask) -> Removed {
        self.remove_if(selection, tiers, Reach::Ends)
    }

    fn remove_if(&self, selection: Selection, tiers: TierMask, reach: Reach) -> Removed {
        let mut removed = Removed::default();
        let how = (reach, EvictionReason::Removed);
        self.shared.store.remove_in_parts(&Choice::By(selection), tiers, how, &mut removed);
        removed
    }

    /// The bytes on `tiers` are gone (the memory of a worker that has a part of every block, for one): removes all that is there, as
    /// [`remove`](Self::remove) does, and makes sure that nothing from before becomes visible later. Batches that were allocated before are
    /// refused when they are registered ([`RegisterError::Lost`](crate::RegisterError::Lost)), arrivals that began before end as
    /// [`Completion::Removed`](crate::Completion::Removed), and what reads or writes slots without the registry asks
    /// [`is_lost`](Self::is_lost). Most goes in small parts, in a few turns where others bring more
    /// behind it; the loss is counted in the last hold, in which the rest goes.
    pub fn lose(&self, tiers: TierMask) -> Removed {
        let mut lost = Removed::default();
        let all = Choice::By(Selection::All);
        let store = &self.shared.store;
        store.remove_in_turns(&all, tiers, (Reach::Ends, EvictionReason::Lost), &mut lost);
        let mut core = store.lock_all();
        core.count_loss(tiers);
        core.remove_now(&all, tiers, EvictionReason::Lost, &mut lost);
        lost
    }

    /// How many losses there were: what is given out from now on, or was looked at after this, belongs to the time after them.
    pub fn losses(&self) -> Losses {
        self.shared.store.losses()
    }

    /// Whether `tier` lost what it held [since then](Self::losses). Never for a tier without slots of its own here ([`Tier::G4`]).
    pub fn is_lost(&self, tier: Tier, since: Losses) -> bool {
        self.shared.store.is_lost(tier.index(), since)
    }

    /// The bytes in a slot of `tier` are bad: the block is absent there from now on and the slot is never used again.
    /// What continues the block on this tier cannot be found until the block returns.
    pub fn quarantine(&self, tier: Tier, block: BlockId) -> Quarantine {
        if tier.index() >= crate::tier::TIERS {
            return Quarantine::NotRegistered;
        }
        self.shared.store.lock_all().quarantine(tier.index(), block)
    }

    /// Slots of `tier` that hold no block and that nothing is on its way to, and those that are out of use for good, though they may have a
    /// last user. Takes time in proportion to the tier, under the lock.
    pub fn vacant_slots(&self, tier: Tier) -> Vec<BlockId> {
        let Store { free, slots, .. } = &self.shared.store;
        let Some(slots) = slots.get(tier.index()) else { return Vec::new() };
        let _all = self.shared.store.lock_all();
        let _free = free[tier.index()].lock();
        let is_vacant = |&slot: &BlockId| {
            matches!(slots[slot.index()].usage(), Usage::Free | Usage::Tainted | Usage::Quarantined)
        };
        (0..slots.len() as u32).map(BlockId).filter(is_vacant).collect()
    }

    /// Takes slots that nothing uses out of use for good (their medium is known to be bad) and returns how many that
    /// were. Slots in use and slots beyond the tier are left alone: a registered block goes by
    /// [`quarantine`](Self::quarantine). Takes time in proportion to the tier, under the lock: for the start, before
    /// [`restore`](Self::restore).
    pub fn retire(&self, tier: Tier, blocks: &[BlockId]) -> u32 {
        let Store { free, slots, .. } = &self.shared.store;
        let Some(slots) = slots.get(tier.index()) else { return 0 };
        // Not while blocks are restored to slots that no list has.
        let _all = self.shared.store.lock_all();
        free[tier.index()].lock().retire_free(slots, blocks)
    }
}
