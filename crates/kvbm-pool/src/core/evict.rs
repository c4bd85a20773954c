//! Making room: which block goes, and how it goes.

use super::entry::LOOKUPS;
use super::slot::{Slot, Usage};
use super::tiers::TierCore;
use super::{Core, NONE, Presence};
use crate::config::RegistryConfig;
use kvbm_plan::BlockId;

/// Most blocks evicted in one hold of the lock.
pub(crate) const MAX_VICTIMS: usize = RegistryConfig::MOST_EVICTED_AT_ONCE;

/// Most places of the eviction order looked at in one hold of the lock.
const MAX_LOOKED_AT: usize = 16 * MAX_VICTIMS;

impl Core {
    /// Evicts up to `want` blocks of `tier`, at most [`MAX_VICTIMS`], into `out` as Held slots. Says whether another
    /// call could find more.
    pub(crate) fn evict(&mut self, tier: usize, want: usize, out: &mut Vec<BlockId>) -> bool {
        if self.policy.is_some() {
            return self.evict_chosen(tier, want, out);
        }
        let mut budget = MAX_LOOKED_AT;
        for turn in 0..want.min(MAX_VICTIMS) {
            if turn % LOOKUPS == 0 {
                self.fetch_oldest(tier, want - turn);
            }
            let Some(slot) = self.oldest_leaf(tier, &mut budget) else { break };
            self.vacate(tier, slot);
            out.push(BlockId(slot));
        }
        !self.tiers[tier].order.is_empty()
    }

    /// Reads what evicting the next `count` blocks will read, all at the same time.
    fn fetch_oldest(&self, tier: usize, count: usize) {
        let TierCore { order, slots, .. } = &self.tiers[tier];
        let first = order.first();
        let next = order.places(first..u64::MAX, slots).take(count.min(LOOKUPS)).filter_map(|(_, slot)| slot);
        let entries = next.map(|slot| slots[slot as usize].entry).filter(|&index| index != NONE);
        self.entries.fetch(entries.map(|index| (self.entries[index].group(), self.entries[index].hash)));
    }

    /// The oldest unpinned block that nothing on the tier continues. A pinned block comes back into the
    /// order when its last user lets go, a block with children when its last child leaves, one that the caller keeps when
    /// that ends.
    fn oldest_leaf(&mut self, tier: usize, budget: &mut usize) -> Option<u32> {
        loop {
            let tier_core = &mut self.tiers[tier];
            let slot = tier_core.order.pop_old(&mut tier_core.slots, budget)?;
            let state = &tier_core.slots[slot as usize];
            if state.usage() != Usage::Registered || state.refs() > 0 {
                continue;
            }
            let (index, has_duplicate) = (state.entry, state.link != NONE);
            if self.is_kept(index, tier) {
                continue;
            }
            let entry = &self.entries[index];
            if has_duplicate || entry.children[tier] == 0 || !self.is_full(entry.group()) {
                return Some(slot);
            }
        }
    }

    /// Takes an unpinned primary out of the registry; its slot becomes Held. A duplicate takes over if there is one:
    /// then the block stays.
    pub(crate) fn vacate(&mut self, tier: usize, slot: u32) {
        let tier_core = &mut self.tiers[tier];
        let state = &mut tier_core.slots[slot as usize];
        let (index, heir) = (state.entry, state.link);
        debug_assert!(!state.is_listed(), "the policy does not know a slot that is evicted");
        *state = Slot::NEW;
        state.set_usage(Usage::Held);
        tier_core.inactive -= 1;
        tier_core.held += 1;
        if heir != NONE {
            self.entries[index].slots[tier] = heir;
            return;
        }
        tier_core.counters.evicted += 1;
        self.set_presence(index, tier, Presence::Absent);
        self.entries[index].slots[tier] = NONE;
        self.remember(index);
        self.entries.release_unused(index);
    }

    /// A duplicate without users is worth nothing: its slot is free again.
    pub(crate) fn drop_duplicate(&mut self, tier: usize, slot: u32) {
        self.unlink_duplicate(tier, slot);
        let index = self.tiers[tier].slots[slot as usize].entry;
        self.update_evictable(index, tier);
        let tier_core = &mut self.tiers[tier];
        tier_core.active -= 1;
        tier_core.put_free(slot);
    }

    /// Takes `slot` off its primary's list.
    pub(crate) fn unlink_duplicate(&mut self, tier: usize, slot: u32) {
        let slots = &mut self.tiers[tier].slots;
        let mut at = self.entries[slots[slot as usize].entry].slots[tier];
        while at != NONE {
            let next = slots[at as usize].link;
            if next == slot {
                slots[at as usize].link = slots[slot as usize].link;
                slots[slot as usize].link = NONE;
                return;
            }
            at = next;
        }
    }
}
