//! Blocks and slots that the caller takes out: of a model or tenant, of a chain, with bad bytes.

use super::handle::Registry;
use crate::core::remove::{Reach, Removal};
use crate::core::select::Choice;
use crate::core::store::BLOCKS_PER_HOLD;
use crate::core::tier_state::TierState;
use crate::losses::Losses;
use crate::selection::{BlockSelection, Quarantine, Removed};
use crate::slot::Usage;
use crate::status::EvictionReason;
use crate::tier::TierMask;
use kvbm_plan::{BlockId, GroupId, NamespaceId, SequenceHash, Tier};

impl Registry {
    /// Removes every block from `tier` that has no users and that no block in use continues.
    pub fn clear(&self, tier: Tier) -> Removed {
        self.remove_chosen(&Choice::By(BlockSelection::All), TierMask::only(tier), Reach::Unused)
    }

    /// Removes the blocks of a namespace from all tiers.
    pub fn forget(&self, namespace: NamespaceId) -> Removed {
        self.remove(BlockSelection::Namespace(namespace), TierMask::ALL)
    }

    /// Removes a block and everything that continues it from `tiers`. In groups that are not Full,
    /// blocks are known to continue it only as long as the blocks between are on some tier.
    pub fn remove_subtree(&self, group: GroupId, hash: SequenceHash, tiers: TierMask) -> Removed {
        self.remove(BlockSelection::Subtree { group, hash }, tiers)
    }

    /// The same for several blocks at once: the registry is looked through for all of them
    /// together.
    pub fn remove_subtrees(&self, blocks: &[(GroupId, SequenceHash)], tiers: TierMask) -> Removed {
        self.remove_chosen(&Choice::Subtrees(blocks), tiers, Reach::Ends)
    }

    /// Removes the blocks of a selection that are on `tiers` now. Blocks in use become invisible
    /// too; their slots come back after their last user. Blocks on their way will not become
    /// visible. Looks the registry through, then removes, both in small parts between which others
    /// have their turn: of what is registered meanwhile some may go as well. A block behind which
    /// something came meanwhile goes in another turn, of which there are a few, the last in one
    /// hold.
    pub fn remove(&self, selection: BlockSelection, tiers: TierMask) -> Removed {
        self.remove_chosen(&Choice::By(selection), tiers, Reach::Ends)
    }

    fn remove_chosen(&self, choice: &Choice<'_>, tiers: TierMask, reach: Reach) -> Removed {
        let mut removal = Removal::new(tiers, reach, EvictionReason::Removed);
        self.shared.store.remove_in_parts(choice, &mut removal);
        removal.removed
    }

    /// The bytes on `tiers` are gone (the memory of a worker that has a part of every block, for
    /// one). Removes all that is there, as [`remove`](Self::remove) does, and makes sure that
    /// nothing from before becomes visible later. Batches that were allocated before are refused
    /// when they are registered ([`RegisterError::Lost`](crate::RegisterError::Lost)), arrivals
    /// that began before end as [`ArrivalOutcome::Removed`](crate::ArrivalOutcome::Removed), and
    /// what reads or writes slots without the registry asks [`is_lost`](Self::is_lost). Most goes
    /// in small parts, in a few turns where others bring more behind it; the loss is counted in the
    /// last hold, in which the rest goes.
    pub fn lose(&self, tiers: TierMask) -> Removed {
        let mut lost = Removal::new(tiers, Reach::Ends, EvictionReason::Lost);
        let all = Choice::By(BlockSelection::All);
        let store = &self.shared.store;
        store.remove_in_turns(&all, &mut lost);
        let mut hold = store.lock();
        store.losses.count(tiers);
        lost.take_all(&mut hold, &all);
        lost.removed
    }

    /// How many losses there were: what is given out from now on, or was looked at after this,
    /// belongs to the time after them.
    pub fn losses(&self) -> Losses {
        self.shared.store.losses.now()
    }

    /// Whether `tier` lost what it held [since then](Self::losses). Never for a tier without slots
    /// of its own here ([`Tier::G4`]).
    pub fn is_lost(&self, tier: Tier, since: Losses) -> bool {
        self.shared.store.losses.is_lost(tier.index(), since)
    }

    /// The bytes in a slot of `tier` are bad: the block is absent there from now on and the slot is
    /// never used again. What continues the block on this tier cannot be found until the block
    /// returns.
    pub fn quarantine(&self, tier: Tier, block: BlockId) -> Quarantine {
        if tier.index() >= crate::tier::TIERS {
            return Quarantine::NotRegistered;
        }
        self.shared.store.lock().quarantine(tier.index(), block)
    }

    /// Slots of `tier` that hold no block and that nothing is on its way to, and those that are out
    /// of use for good, though they may have a last user. Takes time in proportion to the tier,
    /// under the lock.
    pub fn vacant_slots(&self, tier: Tier) -> Vec<BlockId> {
        let hold = self.shared.store.lock();
        let Some(TierState { slots, .. }) = hold.tiers.get(tier.index()) else { return Vec::new() };
        let is_vacant = |&slot: &BlockId| {
            matches!(slots[slot.index()].usage(), Usage::Free | Usage::Tainted | Usage::Quarantined)
        };
        (0..slots.len() as u32).map(BlockId).filter(is_vacant).collect()
    }

    /// Takes slots out of use for good, with the blocks in them: their medium is known to be bad.
    /// Returns those that are held, or that something is on its way to. Retire them again when that
    /// has ended. Slots beyond the tier are left out.
    pub fn retire(&self, tier: Tier, blocks: &[BlockId]) -> Vec<BlockId> {
        let capacity = self.capacity(tier);
        let mut in_use = Vec::new();
        let mut hold = self.shared.store.lock();
        for part in blocks.chunks(BLOCKS_PER_HOLD) {
            let left = part.iter().filter(|block| block.0 < capacity && !hold.retire(tier.index(), **block));
            in_use.extend(left);
            hold.let_others_in();
        }
        in_use
    }
}
