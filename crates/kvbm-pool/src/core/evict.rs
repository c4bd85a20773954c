//! Making room: allocation of slots, and eviction where too few are free.

use super::entries::BATCH;
use super::shares::Claim;
use super::state::Core;
use super::store::{Hold, MAX_VICTIMS, Store};
use crate::entry::{NONE, Presence};
use crate::policy::SlotSet;
use crate::random::Random;
use crate::slot::Usage;
use crate::status::TierStatus;
use kvbm_plan::{BlockId, Tier};

/// Most positions of the eviction order looked at for them.
pub(crate) const MAX_LOOKED_AT: usize = 8 * MAX_VICTIMS;

/// Why there are no slots.
pub(crate) struct NoRoom {
    /// The slots of the tier by usage.
    pub status: TierStatus,
    /// Whether the tenant that claimed them would be over its share.
    pub over_share: bool,
}

impl Store {
    /// Puts `n` Held slots of `tier` into `out`, or none.
    pub(crate) fn allocate(
        &self,
        tier: Tier,
        n: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> Result<(), NoRoom> {
        self.lock().allocate(tier, n, claim, out)
    }
}

impl Hold<'_> {
    /// See [`Store::allocate`]. Releases the lock after every [`MAX_VICTIMS`] victims.
    fn allocate(&mut self, tier: Tier, n: usize, claim: Claim, out: &mut Vec<BlockId>) -> Result<(), NoRoom> {
        let (index, start) = (tier.index(), out.len());
        if n > self.slots[index].len() {
            return Err(self.no_room(tier, n, claim));
        }
        self.tenants.hold(index, claim, n);
        let (mut hopeful, mut in_vain) = (false, 0);
        loop {
            self.take_free(index, n - (out.len() - start), out);
            let missing = n - (out.len() - start);
            if missing == 0 {
                return Ok(());
            }
            // A hopeless request evicts nothing. One that was hopeful may become hopeless: others
            // were let in.
            hopeful = if hopeful {
                self.might_give(index, claim, missing)
            } else {
                self.will_give(index, claim, missing)
            };
            let (before, looks) = (out.len(), self.looks(index, in_vain));
            let more = hopeful && self.evict(index, missing, looks, claim, out);
            in_vain = if out.len() > before { 0 } else { in_vain + MAX_LOOKED_AT };
            // Others were let in, and may have given something back.
            if out.len() - start < n && !more && self.free[index].free == 0 {
                self.give_back(index, &out[start..]);
                out.truncate(start);
                self.tenants.let_go(index, claim, n);
                return Err(self.no_room(tier, n, claim));
            }
            if out.len() - start == n {
                return Ok(());
            }
            self.let_others_in();
        }
    }
}

impl Core {
    #[cold]
    fn no_room(&mut self, tier: Tier, n: usize, claim: Claim) -> NoRoom {
        self.tiers[tier.index()].counters.allocations_failed += 1;
        NoRoom { over_share: self.is_over_share(tier.index(), claim, n), status: self.status(tier) }
    }

    /// The slots of a slotted tier by usage.
    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        let on = tier.index();
        self.tiers[on].status(tier, self.slots[on].len() as u32, &self.free[on], self.pins.counts[on])
    }

    /// Takes up to `want` free slots.
    fn take_free(&mut self, tier: usize, want: usize, out: &mut Vec<BlockId>) {
        self.tiers[tier].held += self.free[tier].take(&self.slots[tier], want, out);
    }

    /// Held slots are free again.
    pub(crate) fn give_back(&mut self, tier: usize, blocks: &[BlockId]) {
        self.free[tier].give_back(&self.slots[tier], blocks);
        self.tiers[tier].held -= blocks.len() as u32;
    }

    /// How many positions of a tier's order one part of the search looks at, after so many in vain.
    /// Other threads that use blocks whenever they are let in may keep a victim as far away as it
    /// was. Once a search has looked at more positions than there are, the next part looks at all.
    fn looks(&self, tier: usize, in_vain: usize) -> usize {
        if in_vain > 2 * self.slots[tier].len() { usize::MAX } else { MAX_LOOKED_AT }
    }

    /// Evicts up to `want` blocks of `tier`, at most [`MAX_VICTIMS`], into `out` as Held slots.
    /// Looks at so many positions of the order for them. Returns whether another call may find
    /// more.
    fn evict(
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
        let chooses =
            |policy: &dyn crate::policy::EvictionPolicy| !policy.follows_recency(SlotSet::of_tier(tier));
        if self.policy.as_deref().is_some_and(chooses) {
            self.evict_chosen(tier, want, looks, out);
            // A policy's own answer may be wrong, so the registry's count decides.
            return self.tiers[tier].listed > 0;
        }
        self.evict_oldest(tier, want, looks, out);
        !self.tiers[tier].order.is_empty()
    }

    /// Evicts the oldest blocks, at most [`MAX_VICTIMS`], and looks at so many positions.
    pub(crate) fn evict_oldest(&mut self, tier: usize, want: usize, looks: usize, out: &mut Vec<BlockId>) {
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
        let slots = &self.slots[tier];
        let (mut next, mut known) = ([NONE; BATCH], 0);
        self.tiers[tier].order.prefetch_next(count.min(BATCH), slots, |slot| {
            next[known] = slots[slot as usize].entry.get();
            known += 1;
        });
        let block = |&index: &u32| (self.entry(index).group(), self.entry(index).hash());
        let blocks = next[..known].iter().filter(|index| **index != NONE).map(block);
        self.prefetch_buckets(blocks.clone());
        self.prefetch_policy(blocks);
    }

    /// The oldest inactive block that no block on the tier continues. The order drops blocks that
    /// it passes over: a pinned block returns to it when its last user lets go, a block with
    /// children when its last child leaves, and a block with a timed pin when that ends.
    fn oldest_leaf(&mut self, tier: usize, budget: &mut usize) -> Option<u32> {
        loop {
            let slot = self.tiers[tier].order.pop_old(&self.slots[tier], budget)?;
            if self.may_go(tier, slot) && !self.is_spared(tier, slot) {
                return Some(slot);
            }
        }
    }

    /// Whether the least recently used block stays for another turn of the order, for its priority:
    /// as many turns as its priority says, in the mean.
    #[inline]
    pub(crate) fn is_spared(&mut self, tier: usize, slot: u32) -> bool {
        let priority = self.entry(self.entry_of(tier, slot)).priority.get();
        let spared = priority > 0 && is_spared_by_chance(priority, &mut self.random);
        if spared {
            self.tiers[tier].order.push_young(slot, &self.slots[tier]);
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
        let entry = self.entry(index);
        if entry.is_pinned() && self.is_in_timed_pins(index, tier) {
            return false;
        }
        has_duplicate || entry.children(tier) == 0 || !self.is_full(entry.group())
    }

    /// Takes an inactive block out of its slot, which becomes Held. A duplicate takes over if there
    /// is one: then the block stays on the tier.
    #[inline]
    pub(crate) fn vacate(&mut self, tier: usize, slot: u32) {
        #[cfg(test)]
        crate::probe::block_changes();
        let state = &self.slots[tier][slot as usize];
        debug_assert!(!state.is_listed(), "the policy does not list a slot that is evicted");
        let (index, heir) = (state.entry.get(), state.link.get());
        state.reset(Usage::Held);
        let counts = &mut self.tiers[tier];
        counts.inactive -= 1;
        counts.held += 1;
        let entry = &self.entries[index as usize];
        let namespace = entry.namespace();
        self.tenants.count_idle(tier, namespace, false);
        self.tenants.count(tier, namespace, false);
        if heir != NONE {
            entry.slots[tier].set(heir);
            return;
        }
        counts.counters.evicted += 1;
        self.set_presence(index, tier, Presence::Absent);
        self.entry(index).slots[tier].set(NONE);
        self.remember(index);
        self.give_up_unused(index);
    }

    /// A duplicate lost its last user: its slot is free again.
    pub(crate) fn drop_duplicate(&mut self, tier: usize, slot: u32) {
        self.unlink_duplicate(tier, slot);
        let index = self.entry_of(tier, slot);
        self.update_evictable(index, tier);
        self.tenants.count(tier, self.entries[index as usize].namespace(), false);
        self.tiers[tier].active -= 1;
        self.free[tier].put(&self.slots[tier], slot);
    }

    /// Takes `slot` off its primary's list.
    pub(crate) fn unlink_duplicate(&mut self, tier: usize, slot: u32) {
        let state = self.slot(tier, slot);
        let mut at = self.entry(state.entry.get()).slot(tier);
        while at != NONE {
            let before = self.slot(tier, at);
            let next = before.link.get();
            if next == slot {
                before.link.set(state.link.get());
                state.link.set(NONE);
                return;
            }
            at = next;
        }
    }
}

/// True out of `1 + priority` times all but one, in the mean.
#[inline]
fn is_spared_by_chance(priority: u8, random: &mut Random) -> bool {
    random.below(1 + usize::from(priority)) > 0
}
