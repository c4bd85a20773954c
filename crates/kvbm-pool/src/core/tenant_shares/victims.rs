//! Which block of the tenant that gives one goes.
//!
//! Victims of one tenant come from the policy, which keeps the slots of each tenant apart, or from
//! the tier's order, which remembers how far a tenant's blocks were looked for.

use super::super::shares::Claim;
use super::super::state::Core;
use super::super::store::MAX_VICTIMS;
use crate::entry::NONE;
use crate::policy::{SlotNumbers, SlotSet};
use crate::slot::Slot;
use kvbm_plan::BlockId;

impl Core {
    /// As [`Core::evict`], by shares.
    pub(crate) fn evict_by_share(
        &mut self,
        tier: usize,
        want: usize,
        looks: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> bool {
        let (mut budget, mut tried) = (looks, 0);
        let usable = self.usable(tier);
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
        if let Some(policy) = self.policy.as_ref().filter(|policy| !policy.follows_recency(set)) {
            if !policy.has_victim(set) {
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
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        if let Some(policy) = &mut self.policy {
            policy.victims(
                set,
                1,
                &mut chosen,
                &mut SlotNumbers::for_victims(&self.slots[set.tier], &self.entries),
            );
        }
        let mut victim = None;
        for &slot in &chosen {
            if !self.slots[set.tier].get(slot as usize).is_some_and(Slot::is_listed) {
                continue;
            }
            let index = self.entry_of(set.tier, slot);
            self.count_listed(set.tier, slot, false);
            if victim.is_none() && self.set_of(index, set.tier) == set {
                victim = Some(slot);
            } else {
                self.update_evictable(index, set.tier);
            }
        }
        self.chosen = chosen;
        victim
    }

    /// The least recently used slot of the set that may be evicted.
    fn oldest_of(&mut self, set: SlotSet, budget: &mut usize) -> Option<u32> {
        let SlotSet { tier, tenant } = set;
        loop {
            let Self { entries, slots, tenants, tiers, .. } = self;
            let is_theirs = |index: u32| {
                index != NONE && tenants.number_of(entries[index as usize].namespace()) == tenant
            };
            let slot = tiers[tier].order.pop_old_of(tenant, &slots[tier], budget, is_theirs)?;
            if self.may_go(tier, slot) && !self.is_spared(tier, slot) {
                return Some(slot);
            }
        }
    }
}
