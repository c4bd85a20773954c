//! Removal on request: of a selection, or of one slot whose bytes are bad. What is in use becomes invisible at once
//! and its slot comes back after its last user.

use super::hold::BLOCKS_OF_A_PART;
use super::select::{Choice, Selected};
use super::slot::Usage;
use super::{Core, NONE, Presence, Store};
use crate::near;
use crate::registry::{Quarantine, Removed};
use crate::status::EvictionReason;
use crate::tier::TierMask;
use kvbm_plan::{BlockId, Tier};

/// The slots of a block are asked for so many blocks before it is removed, its entry twice as many.
const STEPS_AHEAD: usize = 8;

/// How far a removal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Only blocks without users that nothing on the tier continues.
    Unused,
    /// Blocks in use and on their way too, but none that something on the tier continues.
    Ends,
    /// All.
    All,
}

/// Which of the selected blocks go, and what for.
pub(crate) type How = (Reach, EvictionReason);

/// Turns of a removal in which others are let in, where blocks come all the time behind those that are to go.
const MOST_TURNS: usize = 4;

impl Store {
    /// Removes what is chosen from `tiers`, in parts between which others have their turn. What comes meanwhile behind a block that was
    /// selected keeps it, and both go in the next turn; what is left after some turns goes in one hold, for nobody is waited for who brings
    /// more and more.
    pub(crate) fn remove_in_parts(
        &self,
        choice: &Choice<'_>,
        tiers: TierMask,
        how: How,
        removed: &mut Removed,
    ) {
        if self.remove_in_turns(choice, tiers, how, removed) {
            self.lock_all().remove_now(choice, tiers, how.1, removed);
        }
    }

    /// The turns of a removal. Says whether blocks were left after the last that something continues.
    pub(crate) fn remove_in_turns(
        &self,
        choice: &Choice<'_>,
        tiers: TierMask,
        how: How,
        removed: &mut Removed,
    ) -> bool {
        (0..MOST_TURNS).all(|_| self.remove_once(choice, tiers, how, removed))
    }

    /// One turn of a removal. Says whether blocks were left that something continues.
    fn remove_once(
        &self,
        choice: &Choice<'_>,
        tiers: TierMask,
        (reach, reason): How,
        removed: &mut Removed,
    ) -> bool {
        let selected = self.select(choice, tiers);
        let (mut left, mut done) = (false, 0);
        if selected.is_empty() {
            return left;
        }
        let mut core = self.lock_all();
        for at in 0..selected.len() {
            core.come_near(&selected[at..], tiers);
            let before = removed.blocks + removed.cancelled;
            left |= core.remove(&selected[at], tiers, reach, reason, removed);
            done += (removed.blocks + removed.cancelled - before).max(1);
            if done >= BLOCKS_OF_A_PART as u64 {
                done = 0;
                core.let_others_in();
            }
        }
        left
    }
}

impl Core<'_> {
    /// What removing the blocks that come next will read is asked for, a step further for what is nearer.
    fn come_near(&self, next: &[Selected], tiers: TierMask) {
        let store = self.store;
        if let Some(far) = next.get(2 * STEPS_AHEAD) {
            near::prefetch(&store.entries[far.index()]);
        }
        if let Some(near) = next.get(STEPS_AHEAD) {
            let entry = &store.entries[near.index()];
            for tier in tiers.iter().map(Tier::index) {
                if let Some(slot) = store.slots[tier].get(entry.slot(tier) as usize) {
                    near::prefetch(slot);
                }
            }
        }
    }

    /// Removes all that is chosen from `tiers` in this hold, of all shards.
    pub(crate) fn remove_now(
        &mut self,
        choice: &Choice<'_>,
        tiers: TierMask,
        reason: EvictionReason,
        removed: &mut Removed,
    ) {
        for selected in self.select_now(choice, tiers) {
            self.remove(&selected, tiers, Reach::All, reason, removed);
            self.settle_many();
        }
    }

    /// Removes a selected block that still is what it was. Says whether it was left for being no end.
    pub(crate) fn remove(
        &mut self,
        selected: &Selected,
        tiers: TierMask,
        reach: Reach,
        reason: EvictionReason,
        removed: &mut Removed,
    ) -> bool {
        let Some(index) = self.still(selected) else { return false };
        let mut left = false;
        for tier in tiers.iter() {
            let goes = match reach {
                Reach::Unused => self.is_unused(index, tier.index()),
                Reach::Ends => !self.is_continued(index, tier.index()),
                Reach::All => true,
            };
            left |= reach == Reach::Ends && !goes;
            if goes {
                self.expel(index, tier, reason, removed);
            }
        }
        left
    }

    /// Whether a block is on `tier`, or on its way there, and something there cannot be found without it.
    fn is_continued(&self, index: u32, tier: usize) -> bool {
        let entry = &self.store.entries[index];
        entry.presence(tier) != Presence::Absent
            && entry.children(tier) > 0
            && self.store.is_full(entry.group())
    }

    /// Whether nobody uses the block on `tier` and nothing continues it there.
    pub(crate) fn is_unused(&self, index: u32, tier: usize) -> bool {
        let store = self.store;
        let entry = &store.entries[index];
        if entry.presence(tier) != Presence::Present || self.is_continued(index, tier) {
            return false;
        }
        let state = &store.slots[tier][entry.slot(tier) as usize];
        state.refs() == 0 && state.link.get() == NONE
    }

    /// Makes the block invisible on `tier`, with all its duplicates.
    pub(crate) fn expel(&mut self, index: u32, tier: Tier, reason: EvictionReason, removed: &mut Removed) {
        let tier_index = tier.index();
        let store = self.store;
        let slot_of = &store.entries[index].slots[tier_index];
        match store.entries[index].presence(tier_index) {
            Presence::Absent => return,
            Presence::Arriving => {
                self.cancel_arrival(index, tier_index);
                self.set_presence(index, tier_index, Presence::Absent);
                slot_of.set(NONE);
                removed.cancelled += 1;
            }
            Presence::Present => {
                #[cfg(test)]
                super::counts::one_changes();
                self.set_presence(index, tier_index, Presence::Absent);
                let mut slot = slot_of.get();
                slot_of.set(NONE);
                self.count_eviction(index, tier_index, reason);
                removed.blocks += 1;
                while slot != NONE {
                    let next = store.slots[tier_index][slot as usize].link.get();
                    if self.detach(tier_index, slot, Usage::Detached) {
                        removed.in_use += 1;
                    }
                    slot = next;
                }
            }
        }
        self.unused(index);
    }

    fn count_eviction(&mut self, index: u32, tier: usize, reason: EvictionReason) {
        let counters = &mut self.part(index, tier).counters;
        match reason {
            EvictionReason::Capacity => counters.evicted += 1,
            EvictionReason::Removed => counters.removed += 1,
            EvictionReason::Expired => counters.expired += 1,
            EvictionReason::Quarantined => counters.quarantined += 1,
            EvictionReason::Lost => counters.lost += 1,
            EvictionReason::ParentFailed => counters.orphaned += 1,
        }
    }

    /// Takes a Registered slot from its entry. With users it becomes `usage` and says so; without it is free, or out
    /// of use where the bytes are bad. The caller has already made the entry forget the slot.
    fn detach(&mut self, tier: usize, slot: u32, usage: Usage) -> bool {
        self.empty(tier, slot);
        let store = self.store;
        let state = &store.slots[tier][slot as usize];
        let index = state.entry.get();
        let part = self.part(index, tier);
        if state.refs() > 0 {
            part.active -= 1;
            part.detached += 1;
            state.set_usage(usage);
            state.place.set(NONE);
            state.link.set(NONE);
            store.entries[index].add_link();
            return true;
        }
        part.inactive -= 1;
        self.count_idle_for_tenant(index, tier, false);
        self.count_for_tenant(index, tier, false);
        let mut free = store.free[tier].lock();
        if usage == Usage::Tainted {
            free.retire(&store.slots[tier], slot);
        } else {
            free.put(&store.slots[tier], slot);
        }
        false
    }

    /// The bytes in a slot are bad: it must not be found, nor handed out again.
    pub(crate) fn quarantine(&mut self, tier: usize, block: BlockId) -> Quarantine {
        let Some(state) = self.store.slots[tier].get(block.index()) else {
            return Quarantine::NotRegistered;
        };
        match state.usage() {
            Usage::Registered => self.quarantine_registered(tier, block.0),
            Usage::Detached => {
                state.set_usage(Usage::Tainted);
                Quarantine::AfterLastUser
            }
            Usage::Tainted => Quarantine::AfterLastUser,
            Usage::Quarantined => Quarantine::Done,
            Usage::Free | Usage::Held | Usage::Arriving | Usage::Cancelled => Quarantine::NotRegistered,
        }
    }

    fn quarantine_registered(&mut self, tier: usize, slot: u32) -> Quarantine {
        let store = self.store;
        let state = &store.slots[tier][slot as usize];
        let (index, heir) = (state.entry.get(), state.link.get());
        self.count_eviction(index, tier, EvictionReason::Quarantined);
        let slot_of = &store.entries[index].slots[tier];
        if slot_of.get() != slot {
            self.unlink_duplicate(tier, slot);
            // Its primary may have to wait for children again.
            self.update_evictable(index, tier);
        } else if heir == NONE {
            self.set_presence(index, tier, Presence::Absent);
            slot_of.set(NONE);
        } else {
            slot_of.set(heir);
        }
        let in_use = self.detach(tier, slot, Usage::Tainted);
        self.unused(index);
        if in_use { Quarantine::AfterLastUser } else { Quarantine::Done }
    }

    /// Everything on `tier`, parents before children.
    pub(crate) fn snapshot(&self, tier: usize) -> Vec<(BlockId, kvbm_plan::BlockIdentity)> {
        let entries = &self.store.entries;
        let present = |&index: &u32| entries[index].presence(tier) == Presence::Present;
        let block = |index: u32| (BlockId(entries[index].slot(tier)), entries.identity(index));
        let mut all: Vec<_> = self.in_use().filter(present).map(block).collect();
        all.sort_by_key(|(_, identity)| identity.position);
        all
    }
}
