//! Which blocks to copy down before they would be evicted.

use super::slot::Usage;
use super::tiers::TierPart;
use super::{Core, NONE, Pin, Presence};
use kvbm_plan::BlockId;
use std::ops::Range;

/// Places of the eviction order looked at in one hold of the lock.
const MAX_LOOKED_AT: usize = 4096;

/// What a walk along the eviction order looks for, and what it has found.
struct Search<'a> {
    /// Whose order.
    shard: usize,
    tier: usize,
    not_on: usize,
    /// Most blocks in `out`.
    n: usize,
    min_idle: u64,
    /// Whether blocks that somebody holds are wanted as well.
    pinned_too: bool,
    missing: Vec<u32>,
    out: &'a mut Vec<BlockId>,
}

impl Core<'_> {
    /// Shards by the age of the oldest blocks in their orders, the oldest first.
    fn by_age(&self, tier: usize) -> Vec<usize> {
        let mut shards: Vec<usize> = self.numbers().collect();
        let ages: Vec<u64> = self.parts(tier).map(|part| part.order.oldest()).collect();
        shards.sort_by_key(|&shard| ages.get(shard));
        shards
    }

    /// Pins up to `out`'s spare room of unpinned blocks of `tier`, oldest first, that are neither on `not_on` nor on
    /// their way there and were not used for `min_idle` iterations. A block comes after its ancestors that are missing
    /// on `not_on`; one of whose ancestors is on neither tier is left out. Starts where the
    /// last call stopped. All shards are held.
    pub(crate) fn coldest(
        &mut self,
        tier: usize,
        n: usize,
        not_on: usize,
        min_idle: u64,
        out: &mut Vec<BlockId>,
    ) {
        let missing = Vec::new();
        let mut search = Search { shard: 0, tier, not_on, n, min_idle, pinned_too: false, missing, out };
        let mut budget = MAX_LOOKED_AT;
        for shard in self.by_age(tier) {
            search.shard = shard;
            let TierPart { order, cursor, .. } = &self.numbered(shard).tiers[tier];
            let first = order.first();
            let start = if (first..order.end()).contains(cursor) { *cursor } else { first };
            // From the cursor to the young end, then what lies before it: nothing is missed for having been looked at.
            let mut at = self.search(start..u64::MAX, &mut budget, &mut search);
            if budget > 0 && search.out.len() < n {
                at = self.search(first..start, &mut budget, &mut search);
            }
            self.numbered(shard).tiers[tier].cursor = at;
        }
    }

    /// Chooses among the places with these numbers, until enough is chosen or `budget` places were looked at. Returns
    /// the number to go on from.
    fn search(&mut self, numbers: Range<u64>, budget: &mut usize, search: &mut Search<'_>) -> u64 {
        let mut at = numbers.start;
        while search.out.len() < search.n {
            let slots = &self.store.slots[search.tier];
            let order = &self.numbered(search.shard).tiers[search.tier].order;
            let Some((number, slot)) = order.places(at..numbers.end, slots).next().filter(|_| *budget > 0)
            else {
                return at;
            };
            *budget -= 1;
            if let Some(slot) = slot {
                self.choose(slot, search);
            }
            // Where room ended there may be only ancestors in it: the block itself comes next time.
            at = if search.out.len() < search.n { number + 1 } else { number };
        }
        at
    }

    /// Pins up to `n` blocks that are among the next victims of `tier` and are neither on `not_on` nor on their way
    /// there; ancestors first, as for [`coldest`](Self::coldest). The next victims are the oldest `share` of the
    /// eviction order; a policy that goes by something else may take any block next, and so may tenants' shares: with these they
    /// all count.
    ///
    /// Each place of the order is looked at once. What is pinned then is copied as well: it would not be found again
    /// before its next use.
    pub(crate) fn uncopied_victims(
        &mut self,
        tier: usize,
        share: f64,
        n: usize,
        not_on: usize,
        out: &mut Vec<BlockId>,
    ) {
        let any = self.first().policy.is_some() || self.first().tenants.are_configured();
        let share = if any && share > 0.0 { 1.0 } else { share.clamp(0.0, 1.0) };
        let missing = Vec::new();
        let mut search = Search { shard: 0, tier, not_on, n, min_idle: 0, pinned_too: true, missing, out };
        let mut budget = MAX_LOOKED_AT;
        for shard in self.by_age(tier) {
            search.shard = shard;
            let order = &self.numbered(shard).tiers[tier].order;
            let (first, end) = (order.first(), order.end());
            let target = first + ((end - first) as f64 * share) as u64;
            let start = order.watched().max(first);
            let at = self.search(start..target.max(start), &mut budget, &mut search);
            self.numbered(shard).tiers[tier].order.watch(at);
        }
    }

    /// Pins the block in `slot`, if it is wanted, with the ancestors that must go before it.
    fn choose(&mut self, slot: u32, search: &mut Search<'_>) {
        let &mut Search { tier, not_on, n, .. } = search;
        if !self.is_wanted(slot, search) {
            return;
        }
        search.missing.clear();
        let index = self.store.slots[tier][slot as usize].entry.get();
        if self.missing_ancestors(index, tier, not_on, search.out, &mut search.missing) {
            // Topmost first; where room ends, what is in stays a chain.
            for &slot in search.missing.iter().rev().take(n - search.out.len()) {
                self.pin(tier, slot, Pin::Transfer);
                search.out.push(BlockId(slot));
            }
        }
    }

    fn is_wanted(&self, slot: u32, search: &Search<'_>) -> bool {
        let state = &self.store.slots[search.tier][slot as usize];
        if state.usage() != Usage::Registered || (state.refs() > 0 && !search.pinned_too) {
            return false;
        }
        let entry = &self.store.entries[state.entry.get()];
        let idle = u64::from(self.short_step().wrapping_sub(entry.last_step.get()));
        let min_idle = search.min_idle.min(u64::from(u16::MAX));
        entry.presence(search.not_on) == Presence::Absent && idle >= min_idle
    }

    /// Slots of the block and of its ancestors that are missing on `not_on` and not in `chosen`, lowest first. False
    /// where one of them is not on `tier` either.
    fn missing_ancestors(
        &self,
        mut index: u32,
        tier: usize,
        not_on: usize,
        chosen: &[BlockId],
        missing: &mut Vec<u32>,
    ) -> bool {
        let store = self.store;
        let chain = store.is_full(store.entries[index].group());
        while index != NONE {
            let entry = &store.entries[index];
            if entry.presence(not_on) != Presence::Absent {
                return true;
            }
            if entry.presence(tier) != Presence::Present {
                return false;
            }
            let slot = entry.slot(tier);
            if chosen.contains(&BlockId(slot)) {
                return true;
            }
            missing.push(slot);
            if !chain {
                return true;
            }
            index = entry.parent.get();
        }
        true
    }
}
