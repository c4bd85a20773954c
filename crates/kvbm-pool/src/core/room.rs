//! Whether a request can be met, known before anything goes for it: one that is refused takes
//! nothing.
//!
//! Counts of idle blocks refuse most of those. But some of these may have to stay, because
//! something in use continues them, or because they are pinned. Where a tenant has such blocks,
//! those that could go are counted one by one, and no more than are needed. The count has parts,
//! between which others have their turn.

use super::evict::MAX_LOOKED_AT;
use super::shares::{Claim, Number, TierCounts};
use super::state::Core;
use super::store::Hold;
use crate::entry::{NONE, Presence};
use crate::policy::SlotSet;
use crate::slot::Usage;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Positions of the order that are looked at in one part of a count.
const PLACES_AT_ONCE: usize = 128;

/// Counts of a request, where what was counted moved meanwhile and did not suffice.
const MOST_COUNTS: usize = 2;

/// Whether `wanted` blocks of `tier` might be given to the tenant that claims them. If not, no
/// tenant gives one.
pub(super) fn might_give(core: &Core, tier: usize, claim: Claim, wanted: usize) -> bool {
    let (tenants, on) = (&core.tenants, &core.tiers[tier]);
    let idle = |number: Number| tenants.all[number].on[tier].idle;
    wanted <= core.pins.evictable_at_most(tier, on, &core.entries, wanted)
        && (!tenants.are_configured() || wanted <= tenants.given(tier, on.usable(), claim, idle))
}

impl Hold<'_> {
    /// Whether they will be, as things are now. Exact where there are tenants and no other thread
    /// changes anything meanwhile; where others go on changing things, true rather than false.
    pub(super) fn will_give(&mut self, tier: usize, claim: Claim, wanted: usize) -> bool {
        let might = might_give(self, tier, claim, wanted);
        if !might || !self.tenants.are_configured() {
            return might;
        }
        // What others put into the order, or moved in it, while they were let in may have been
        // missed.
        let ends = |core: &Core| (core.tiers[tier].order.first(), core.tiers[tier].order.end());
        for _ in 0..MOST_COUNTS {
            let before = ends(self);
            if self.counts_suffice(tier, claim, wanted) {
                return true;
            }
            if ends(self) == before {
                return false;
            }
        }
        // Nothing says that it cannot: so it is tried.
        true
    }

    /// Whether what each could give, counted one by one, is enough.
    fn counts_suffice(&mut self, tier: usize, claim: Claim, wanted: usize) -> bool {
        let usable = self.tiers[tier].usable();
        let tenants = &self.tenants;
        // In the order in which tenants give.
        let mut numbers: Vec<Number> = (0..tenants.all.len()).collect();
        numbers.sort_by_key(|&number| std::cmp::Reverse(tenants.excess(number, tier, usable)));
        let mut counted = vec![0; numbers.len()];
        numbers.into_iter().any(|number| {
            counted[number] = self.count_evictable(SlotSet { tier, tenant: number }, wanted);
            wanted <= self.tenants.given(tier, usable, claim, |number| counted[number])
        })
    }

    /// How many blocks of a set could go one after the other, as far as `enough`.
    fn count_evictable(&mut self, set: SlotSet, enough: usize) -> u32 {
        let SlotSet { tier, tenant } = set;
        let TierCounts { blocks, idle, pinned, .. } = self.tenants.all[tenant].on[tier];
        // The order has the positions of all tenants: it is not searched for what a count says
        // already.
        if idle == 0 || blocks == idle && pinned == 0 {
            return idle;
        }
        // What others put behind it meanwhile is not looked at: there may be no end to that.
        let until = self.tiers[tier].order.end();
        let turns = (until - self.tiers[tier].order.first()) / MAX_LOOKED_AT as u64;
        for _ in 0..=turns {
            if pass_over(self, set) {
                break;
            }
            self.let_others_in();
        }
        let mut gone = Gone::new(set, enough);
        let mut from = 0;
        while let Some(next) = gone.count_part(self, from..until) {
            from = next;
            self.let_others_in();
        }
        gone.slots
    }
}

/// Passes over what is first in the order and none of the set's, or may not go: it was looked at
/// then, as in an eviction. False where there may be more of that.
fn pass_over(core: &mut Core, set: SlotSet) -> bool {
    let SlotSet { tier, tenant } = set;
    let mut budget = MAX_LOOKED_AT;
    while budget > 0 {
        let Core { entries, tenants, tiers, .. } = core;
        let is_theirs = |index: u32| index != NONE && tenants.number_of(entries[index].namespace()) == tenant;
        let on = &mut tiers[tier];
        let Some(slot) = on.order.look_for(tenant, &on.slots, &mut budget, is_theirs) else {
            return budget > 0;
        };
        if core.may_go(tier, slot) {
            return true;
        }
        core.slot(tier, slot).order_position.set(NONE);
    }
    false
}

/// Entries of a set that would be evicted.
struct Gone {
    set: SlotSet,
    /// As many slots as are needed.
    enough: u32,
    all: HashSet<u32>,
    /// How many of them continue others that stay so far.
    children: HashMap<u32, u32>,
    /// Slots that they leave.
    slots: u32,
    /// Slots without users that were looked at, also those that stay.
    idle: HashSet<u32>,
}

impl Gone {
    fn new(set: SlotSet, enough: usize) -> Self {
        let (all, children, idle) = (HashSet::new(), HashMap::new(), HashSet::new());
        Self { set, enough: enough as u32, all, children, slots: 0, idle }
    }

    /// Counts among the next positions of the order with these numbers. Where to go on, if there
    /// may be more.
    fn count_part(&mut self, core: &Core, numbers: Range<u64>) -> Option<u64> {
        let SlotSet { tier, tenant } = self.set;
        let idle = core.tenants.all[tenant].on[tier].idle as usize;
        let on = &core.tiers[tier];
        let positions = on.order.unseen(tenant, numbers, &on.slots);
        for (looked_at, (number, slot)) in positions.enumerate() {
            if self.slots >= self.enough || self.idle.len() >= idle {
                return None;
            }
            if looked_at == PLACES_AT_ONCE {
                return Some(number);
            }
            if let Some(slot) = slot
                && core.set_of(on.slot(slot).entry.get(), tier) == self.set
            {
                self.take(core, slot);
            }
        }
        None
    }

    /// The block in a slot would be evicted, if it may be, and then those before it that nothing
    /// else continues, as far as they are needed.
    fn take(&mut self, core: &Core, slot: u32) {
        let tier = self.set.tier;
        let mut slot = slot;
        loop {
            let state = core.slot(tier, slot);
            let index = state.entry.get();
            let entry = core.entry(index);
            let in_use = state.usage() != Usage::Registered || state.refs() > 0;
            if in_use {
                return;
            }
            self.idle.insert(slot);
            if core.pins.is_pinned(&core.entries, index, tier) || self.all.contains(&index) {
                return;
            }
            // Where there is a copy, that takes over.
            let goes = state.link.get() == NONE;
            let is_full = core.entries.is_full(entry.group());
            let left = entry.children(tier).saturating_sub(self.children.get(&index).copied().unwrap_or(0));
            if goes && is_full && left > 0 {
                return;
            }
            self.all.insert(index);
            self.slots += 1;
            let parent = entry.parent.get();
            let enough = self.slots >= self.enough;
            if enough
                || !goes
                || !is_full
                || parent == NONE
                || core.entry(parent).presence(tier) != Presence::Present
            {
                return;
            }
            *self.children.entry(parent).or_default() += 1;
            slot = core.entry(parent).slot(tier);
        }
    }
}
