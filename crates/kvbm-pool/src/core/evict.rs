//! Eviction: which blocks leave a tier that needs room.
//!
//! Where tenants have shares, the tenant that is furthest over its share gives a block. Its victims
//! come from the policy, which keeps the slots of each tenant apart, or from the tier's order,
//! which remembers how far a tenant's blocks were looked for.

use super::entries::BATCH;
use super::shares::Claim;
use super::state::Core;
use super::store::MAX_VICTIMS;
use crate::entry::{NONE, Presence};
use crate::policy::SlotSet;
use crate::random::Random;
use crate::slot::{Slot, Usage};
use crate::status::EvictionReason;
use kvbm_plan::BlockId;

/// Most positions of the eviction order looked at for one part of an allocation.
pub(crate) const MAX_LOOKED_AT: usize = 8 * MAX_VICTIMS;

impl Core {
    /// Evicts up to `want` blocks of `tier`, at most [`MAX_VICTIMS`], into `out` as Held slots.
    /// Looks at so many positions of the order for them. Returns whether another call may find
    /// more.
    pub(crate) fn evict(
        &mut self,
        tier: usize,
        want: usize,
        looks: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> bool {
        if self.tenants.are_configured() {
            return self.evict_by_share(tier, want, looks, claim, out);
        }
        if self.policy.chooses(SlotSet::of_tier(tier)) {
            self.evict_chosen(tier, want, looks, out);
            // A policy's own answer may be wrong, so the registry's count decides.
            return self.tiers[tier].listed > 0;
        }
        self.evict_oldest(tier, want, looks, out);
        !self.tiers[tier].order.is_empty()
    }

    /// Evicts the blocks that the policy chooses, up to `want` of `tier` and at most
    /// [`MAX_VICTIMS`]. Where none of its answer may go, the oldest go, for which the search looks
    /// at so many positions.
    fn evict_chosen(&mut self, tier: usize, want: usize, looks: usize, out: &mut Vec<BlockId>) {
        let set = SlotSet::of_tier(tier);
        let wanted = want.min(MAX_VICTIMS);
        let mut left = wanted;
        let evicted_before = self.tiers[tier].counters.evicted;
        while left > 0 {
            let chosen = self.policy.choose(set, left, &self.entries, &self.tiers[tier]);
            let before = left;
            for &slot in &chosen {
                // Whatever a policy answers, only evictable blocks go, and no more than are wanted.
                if !self.tiers[tier].slots.get(slot as usize).is_some_and(Slot::is_listed) {
                    continue;
                }
                self.tiers[tier].count_listed(slot, false);
                if left == 0 {
                    self.update_evictable(self.entry_of(tier, slot), tier);
                    continue;
                }
                self.vacate(tier, slot);
                out.push(BlockId(slot));
                left -= 1;
            }
            self.policy.give_back(chosen);
            if left == before {
                break;
            }
        }
        let counters = &mut self.tiers[tier].counters;
        counters.evicted_by_choice += counters.evicted - evicted_before;
        if left == wanted && self.tiers[tier].listed > 0 {
            self.evict_oldest(tier, wanted, looks, out);
        }
    }

    /// Evicts the oldest blocks, at most [`MAX_VICTIMS`], and looks at so many positions.
    fn evict_oldest(&mut self, tier: usize, want: usize, looks: usize, out: &mut Vec<BlockId>) {
        let mut budget = looks;
        for turn in 0..want.min(MAX_VICTIMS) {
            if turn.is_multiple_of(BATCH) {
                self.prefetch_oldest(tier, want - turn);
            }
            let Some(slot) = self.oldest_leaf(tier, &mut budget) else { break };
            if self.slot(tier, slot).is_listed() {
                self.unlist(tier, slot);
            }
            self.vacate(tier, slot);
            out.push(BlockId(slot));
        }
    }

    /// Prefetches the buckets of the next `count` victims, and what the policy remembers of them.
    fn prefetch_oldest(&mut self, tier: usize, count: usize) {
        let on = &mut self.tiers[tier];
        let (slots, mut next, mut known) = (&on.slots, [NONE; BATCH], 0);
        on.order.prefetch_next(count.min(BATCH), slots, |slot| {
            next[known] = slots[slot as usize].entry.get();
            known += 1;
        });
        let block = |&index: &u32| (self.entries[index].group(), self.entries[index].hash());
        let blocks = next[..known].iter().filter(|index| **index != NONE).map(block);
        self.entries.prefetch_buckets(blocks.clone());
        self.policy.prefetch(blocks);
    }

    /// The oldest inactive block that no block on the tier continues. The order drops blocks that
    /// it passes over. A pinned block returns to it when its last user lets go, a block with
    /// children when its last child leaves. A block with a timed pin returns when that ends.
    fn oldest_leaf(&mut self, tier: usize, budget: &mut usize) -> Option<u32> {
        loop {
            let on = &mut self.tiers[tier];
            let slot = on.order.pop_old(&on.slots, budget)?;
            if self.may_go(tier, slot) && !self.is_spared(tier, slot) {
                return Some(slot);
            }
        }
    }

    /// Whether the least recently used block stays for another turn of the order, for its priority:
    /// as many turns as its priority says, in the mean.
    #[inline]
    fn is_spared(&mut self, tier: usize, slot: u32) -> bool {
        let priority = self.entry(self.entry_of(tier, slot)).priority.get();
        let spared = priority > 0 && is_spared_by_chance(priority, &mut self.random);
        if spared {
            self.tiers[tier].push_young(slot);
        }
        spared
    }

    /// Whether a slot has a block that may be evicted.
    #[inline]
    pub(crate) fn may_go(&self, tier: usize, slot: u32) -> bool {
        let state = self.slot(tier, slot);
        if state.usage() != Usage::Registered || state.refs() > 0 {
            return false;
        }
        let (index, has_duplicate) = (state.entry.get(), state.link.get() != NONE);
        if self.pins.is_pinned(&self.entries, index, tier) {
            return false;
        }
        let entry = self.entry(index);
        has_duplicate || entry.children(tier) == 0 || !self.entries.is_full(entry.group())
    }

    /// Takes an inactive block out of its slot, which becomes Held. A duplicate takes over if there
    /// is one: then the block stays on the tier.
    #[inline]
    fn vacate(&mut self, tier: usize, slot: u32) {
        #[cfg(test)]
        crate::probe::block_changes();
        let on = &mut self.tiers[tier];
        let state = &on.slots[slot as usize];
        debug_assert!(!state.is_listed(), "the policy does not list a slot that is evicted");
        let (index, heir) = (state.entry.get(), state.link.get());
        state.reset(Usage::Held);
        on.inactive -= 1;
        on.held += 1;
        let entry = &self.entries[index];
        let namespace = entry.namespace();
        self.tenants.count_idle(tier, namespace, false);
        self.tenants.count(tier, namespace, false);
        if heir != NONE {
            entry.slots[tier].set(heir);
            return;
        }
        on.count_eviction(EvictionReason::Capacity);
        self.set_presence(index, tier, Presence::Absent);
        let entry = &self.entries[index];
        entry.slots[tier].set(NONE);
        self.policy.remember(entry);
        self.entries.give_up_unused(index);
    }

    /// As [`evict`](Self::evict), by shares.
    fn evict_by_share(
        &mut self,
        tier: usize,
        want: usize,
        looks: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> bool {
        let (mut budget, mut tried) = (looks, 0);
        let usable = self.tiers[tier].usable();
        let enough = out.len() + want.min(MAX_VICTIMS);
        while out.len() < enough {
            let Some(number) = self.tenants.giver(tier, usable, claim, tried) else { return false };
            match self.victim_of(SlotSet { tier, tenant: number }, &mut budget) {
                Some((slot, by_choice)) => {
                    let before = self.tiers[tier].counters.evicted;
                    self.vacate(tier, slot);
                    let counters = &mut self.tiers[tier].counters;
                    let gone = counters.evicted - before;
                    counters.evicted_by_choice += if by_choice { gone } else { 0 };
                    self.tenants.count_evicted(number, tier, gone);
                    out.push(BlockId(slot));
                }
                None if budget == 0 => return true,
                None => tried |= 1 << number,
            }
        }
        true
    }

    /// A slot of the set that may be evicted, off every list, and whether the policy chose it.
    fn victim_of(&mut self, set: SlotSet, budget: &mut usize) -> Option<(u32, bool)> {
        if self.policy.chooses(set) {
            if !self.policy.has_victim(set) {
                return None;
            }
            if let Some(slot) = self.chosen_of(set) {
                return Some((slot, true));
            }
        }
        let slot = self.oldest_of(set, budget)?;
        if self.slot(set.tier, slot).is_listed() {
            self.unlist(set.tier, slot);
        }
        Some((slot, false))
    }

    /// What the policy chooses of the set. Whatever it answers: only what is of the set, and
    /// evictable.
    fn chosen_of(&mut self, set: SlotSet) -> Option<u32> {
        let chosen = self.policy.choose(set, 1, &self.entries, &self.tiers[set.tier]);
        let mut victim = None;
        for &slot in &chosen {
            if !self.tiers[set.tier].slots.get(slot as usize).is_some_and(Slot::is_listed) {
                continue;
            }
            let index = self.entry_of(set.tier, slot);
            self.tiers[set.tier].count_listed(slot, false);
            if victim.is_none() && self.set_of(index, set.tier) == set {
                victim = Some(slot);
            } else {
                self.update_evictable(index, set.tier);
            }
        }
        self.policy.give_back(chosen);
        victim
    }

    /// The least recently used slot of the set that may be evicted.
    fn oldest_of(&mut self, set: SlotSet, budget: &mut usize) -> Option<u32> {
        let SlotSet { tier, tenant } = set;
        loop {
            let Self { entries, tenants, tiers, .. } = self;
            let is_theirs =
                |index: u32| index != NONE && tenants.number_of(entries[index].namespace()) == tenant;
            let on = &mut tiers[tier];
            let slot = on.order.pop_old_of(tenant, &on.slots, budget, is_theirs)?;
            if self.may_go(tier, slot) && !self.is_spared(tier, slot) {
                return Some(slot);
            }
        }
    }
}

/// True out of `1 + priority` times all but one, in the mean.
#[inline]
fn is_spared_by_chance(priority: u8, random: &mut Random) -> bool {
    random.below(1 + usize::from(priority)) > 0
}
