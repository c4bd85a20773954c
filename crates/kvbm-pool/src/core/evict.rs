//! Making room: which block goes, and how it goes.

use super::hold::PARTS_OF_A_HOLD;
use super::homes::Homes;
use super::index::LOOKUPS;
use super::mail::LETTERS_AT_ONCE;
use super::shards::Shard;
use super::slot::Usage;
use super::tenants::Claim;
use super::{Core, NONE, Presence, Store};
use crate::config::RegistryConfig;
use crate::policy::{SlotSet, spares};
use crate::status::TierStatus;
use kvbm_plan::{BlockId, Tier};
use std::sync::atomic::Ordering::Relaxed;

/// Most blocks evicted before others who wait are let in: a part of what one hold does where nobody waits.
pub(crate) const MAX_VICTIMS: usize = RegistryConfig::MOST_EVICTED_AT_ONCE / PARTS_OF_A_HOLD;

/// Most places of the eviction order looked at for them.
pub(crate) const MAX_LOOKED_AT: usize = 16 * MAX_VICTIMS;

/// How much younger a shard's oldest blocks may be than those of all, as a part of the age of these, to be taken as well. With
/// one shard for all victims two threads would wait for each other.
const TOLERANCE: u64 = 8;

/// Holds in a row in which nothing was found to evict: after that all shards are looked at together.
const MOST_FRUITLESS: usize = 8;

/// Parts of victims from one shard at most, before it is asked again which shard it should be.
const PARTS_OF_ONE: usize = 16;

/// Shards that are drawn before a thread waits for one.
const DRAWS: usize = 4;

/// Letters that may wait for a shard before somebody locks it to read them.
pub(super) const MOST_LETTERS: usize = 256;

/// Why there are no slots.
pub(crate) struct NoRoom {
    /// Where the slots are.
    pub status: TierStatus,
    /// Whether who claimed them would be over its share.
    pub over_share: bool,
}

impl Store {
    /// Puts `n` Held slots of `tier` into `out`, or nothing.
    pub(crate) fn allocate(
        &self,
        tier: Tier,
        n: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> Result<(), NoRoom> {
        let index = tier.index();
        let start = out.len();
        if n > self.slots[index].len() {
            let mut core = self.lock_all();
            core.first_mut().tiers[index].counters.allocations_failed += 1;
            let over_share = core.is_over_share(index, claim, n);
            return Err(NoRoom { over_share, status: core.status(tier) });
        }
        if !self.is_whole() {
            self.allocate_here_and_there(index, n, start, out);
        }
        let mut core = if out.len() - start == n { return Ok(()) } else { self.lock_all() };
        core.first_mut().tenants.hold(index, claim, n);
        let (mut hopeful, mut in_vain) = (false, 0);
        loop {
            let missing = n - (out.len() - start);
            let taken = self.free[index].lock().take(&self.slots[index], missing, out) as usize;
            let missing = missing - taken;
            if missing == 0 {
                return Ok(());
            }
            // Hopeless requests evict nothing. What was hopeful may have become hopeless: others were let in.
            hopeful = if hopeful {
                core.might_give(index, claim, missing)
            } else {
                core.will_give(index, claim, missing)
            };
            let (before, looks) = (out.len(), self.looks(index, in_vain));
            let more = hopeful && core.evict(index, missing, looks, claim, out);
            in_vain = if out.len() > before { 0 } else { in_vain + MAX_LOOKED_AT };
            // Others were let in, who may have given something back.
            if out.len() - start < n && !more && !self.take_free(index, n, start, out) {
                self.give_back(index, &out[start..]);
                out.truncate(start);
                let shard = core.first_mut();
                shard.tenants.let_go(index, claim, n);
                shard.tiers[index].counters.allocations_failed += 1;
                return Err(NoRoom {
                    over_share: core.is_over_share(index, claim, n),
                    status: core.status(tier),
                });
            }
            core.let_others_in();
        }
    }

    /// How many places of a tier's order are looked at in one part, where so many were in vain. Others who use blocks whenever they are let in
    /// may keep what is looked for as far away as it was: once that were more places than there are, all are looked at in one part.
    fn looks(&self, tier: usize, in_vain: usize) -> usize {
        if in_vain > self.most_places(tier) { usize::MAX } else { MAX_LOOKED_AT }
    }

    /// More places than the order of a tier has, most of the time.
    fn most_places(&self, tier: usize) -> usize {
        2 * self.slots[tier].len()
    }

    /// Takes what is free of the `n` slots that are wanted from `start` on. Says whether that was anything.
    fn take_free(&self, tier: usize, n: usize, start: usize, out: &mut Vec<BlockId>) -> bool {
        let missing = n - (out.len() - start);
        self.free[tier].lock().take(&self.slots[tier], missing, out) > 0
    }

    /// Takes what is free, and victims from one shard after the other, as far as that is easy. Letters that this leads to are read
    /// on the way.
    fn allocate_here_and_there(&self, tier: usize, n: usize, start: usize, out: &mut Vec<BlockId>) {
        let taken = self.free[tier].lock().take(&self.slots[tier], n, out) as usize;
        if self.about_evictable(tier) < (n - taken) as u64 {
            return;
        }
        let (mut fruitless, mut in_vain) = (0, 0);
        while out.len() - start < n && fruitless < MOST_FRUITLESS && in_vain <= self.most_places(tier) {
            let Some((mut core, most)) = self.lock_for_victims(tier) else { return };
            let (number, before) = (core.number(), out.len());
            let end = (start + n).min(before + most);
            let mut looked_at = 0;
            for _ in 0..PARTS_OF_ONE {
                let looks = core.evict_from(number, tier, end - out.len(), out);
                looked_at += looks;
                if looks == 0 || out.len() == end {
                    break;
                }
                core.let_others_in();
            }
            Homes::may_take(tier, most - (out.len() - before));
            // A place that was looked at is gone, stale or not, unless chance passed it over: that is on the way to a victim. What the
            // policy chose is one.
            fruitless = if looked_at == 0 { fruitless + 1 } else { 0 };
            in_vain = if out.len() > before { 0 } else { in_vain + looked_at };
            drop(core);
            self.see_to_mail();
        }
    }

    /// Locks a shard for victims, and says how many to take there. None where there is nothing to evict.
    fn lock_for_victims(&self, tier: usize) -> Option<(Core<'_>, usize)> {
        let chosen = self.choice.chooses[tier].load(Relaxed);
        let (core, most) = if chosen { self.lock_with_leaves(tier) } else { self.lock_with_oldest(tier) }?;
        Homes::found_victims(tier, core.number());
        Some((core, most))
    }

    /// Locks a shard for what the policy chooses: drawn, for as good as a sample of all leaves is one of the leaves of a shard, if that is
    /// drawn as often as it has leaves. Rather one that nobody has locked.
    fn lock_with_leaves(&self, tier: usize) -> Option<(Core<'_>, usize)> {
        let listed = |shard: usize| self.shards[shard].shown.listed[tier].load(Relaxed);
        if let Some((shard, left)) = self.homes.stays_for_victims(tier)
            && listed(shard) > 0
            && let Some(core) = self.try_lock(shard)
        {
            return Some((core, left));
        }
        let mut drawn = None;
        for _ in 0..DRAWS {
            drawn = self.try_lock(self.draw(listed)?);
            if drawn.is_some() {
                break;
            }
        }
        let core = match drawn {
            Some(core) => core,
            None => self.lock(self.draw(listed)?),
        };
        let most = self.homes.most_drawn(tier, u64::from(core.first().tiers[tier].inactive));
        Some((core, most))
    }

    /// A shard, each as often as it has leaves; none where none has any.
    fn draw(&self, leaves: impl Fn(usize) -> u64) -> Option<usize> {
        let counts = || (0..self.shards.len()).map(&leaves);
        let all = counts().sum::<u64>() as usize;
        let mut left = self.choice.draw(if all > 0 { all } else { return None });
        let found = counts().position(|count| {
            let here = left < count as usize;
            left = left.saturating_sub(count as usize);
            here
        });
        // What others evict meanwhile is missing at the end.
        Some(found.unwrap_or(0))
    }

    /// Locks a shard with old blocks: the one where the thread found some last, if they are old enough, or one that nobody has
    /// locked.
    fn lock_with_oldest(&self, tier: usize) -> Option<(Core<'_>, usize)> {
        let (oldest, now) = self.ages(tier);
        let first = oldest.into_iter().min().filter(|&first| first != u64::MAX)?;
        let old_enough = first + now.saturating_sub(first) / TOLERANCE;
        let last = self.homes.victims(tier);
        let mut order: [usize; super::MAX_SHARDS] = std::array::from_fn(|shard| shard);
        order.sort_unstable_by_key(|&shard| (shard != last, oldest[shard]));
        let mut candidates = order.into_iter().filter(|&shard| oldest[shard] <= old_enough);
        let free = candidates.clone().find_map(|shard| self.try_lock(shard));
        let core = free.or_else(|| candidates.next().map(|shard| self.lock(shard)))?;
        let most = Homes::most_victims(u64::from(core.first().tiers[tier].inactive));
        Some((core, most))
    }

    /// Letters do not pile up for a shard that nobody uses. No shard is held.
    fn see_to_mail(&self) {
        for (number, place) in self.shards.iter().enumerate() {
            let waiting = place.mail.waiting();
            if waiting > MOST_LETTERS {
                (0..waiting.div_ceil(LETTERS_AT_ONCE)).for_each(|_| drop(self.lock(number)));
            }
        }
    }
}

impl Core<'_> {
    /// Evicts up to `want` blocks of `tier`, at most [`MAX_VICTIMS`], into `out` as Held slots: those of the shard with the
    /// oldest. Looks at so many places of the order for them. All shards are held. Says whether another call could find more.
    fn evict(
        &mut self,
        tier: usize,
        want: usize,
        looks: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> bool {
        if self.first().tenants.are_configured() {
            return self.evict_by_share(tier, want, looks, claim, out);
        }
        if self.chooses(0, tier) {
            let listed = |number: usize| {
                u64::from(self.shards().nth(number).map_or(0, |shard| shard.tiers[tier].listed))
            };
            let drawn = if self.store.is_whole() { Some(0) } else { self.store.draw(listed) };
            if let Some(number) = drawn {
                self.evict_chosen(number, tier, want, looks, out);
            }
            // Not what the policy says: it may be wrong.
            return self.shards().any(|shard| shard.tiers[tier].listed > 0);
        }
        let age = |shard: &Shard| shard.tiers[tier].order.oldest();
        let oldest = self.numbers().zip(self.shards().map(age)).min_by_key(|&(_, age)| age);
        if let Some((number, _)) = oldest {
            self.evict_oldest(number, tier, want, looks, out);
        }
        self.shards().any(|shard| !shard.tiers[tier].order.is_empty())
    }

    /// Whether the policy chooses the victims of a shard that is held, rather than recency.
    fn chooses(&mut self, number: usize, tier: usize) -> bool {
        let policy = self.numbered(number).policy.as_ref();
        policy.is_some_and(|policy| !policy.follows_recency(SlotSet::of_tier(tier)))
    }

    /// Evicts up to `want` blocks of a shard, at most [`MAX_VICTIMS`]: those that the policy chooses, or the oldest. Says how many places
    /// it looked at.
    fn evict_from(&mut self, number: usize, tier: usize, want: usize, out: &mut Vec<BlockId>) -> usize {
        if self.chooses(number, tier) {
            let before = out.len();
            self.evict_chosen(number, tier, want, MAX_LOOKED_AT, out);
            return out.len() - before;
        }
        self.evict_oldest(number, tier, want, MAX_LOOKED_AT, out)
    }

    /// Evicts the oldest blocks of a shard, as [`evict_from`](Self::evict_from), and looks at so many places.
    pub(super) fn evict_oldest(
        &mut self,
        number: usize,
        tier: usize,
        want: usize,
        looks: usize,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let mut budget = looks;
        for turn in 0..want.min(MAX_VICTIMS) {
            if turn.is_multiple_of(LOOKUPS) {
                self.fetch_oldest(number, tier, want - turn);
            }
            let Some(slot) = self.oldest_leaf(number, tier, &mut budget) else { break };
            if self.store.slots[tier][slot as usize].is_listed() {
                self.unlist(tier, slot);
            }
            self.vacate(tier, slot);
            out.push(BlockId(slot));
        }
        looks - budget
    }

    /// Reads what evicting the next `count` blocks will read, all at the same time, as far as that was not asked for before.
    fn fetch_oldest(&mut self, number: usize, tier: usize, count: usize) {
        let store = self.store;
        let slots = &store.slots[tier];
        let (mut next, mut known) = ([NONE; LOOKUPS], 0);
        self.numbered(number).tiers[tier].order.look_ahead(count.min(LOOKUPS), slots, |slot| {
            next[known] = slots[slot as usize].entry.get();
            known += 1;
        });
        let known = next[..known].iter().copied();
        let block = |index: u32| (store.entries[index].group(), store.entries[index].hash());
        self.fetch(known.clone().map(block));
        self.expect(known.map(block));
    }

    /// The oldest unpinned block that nothing on the tier continues. A pinned block comes back into the
    /// order when its last user lets go, a block with children when its last child leaves, one that the caller keeps when
    /// that ends.
    fn oldest_leaf(&mut self, number: usize, tier: usize, budget: &mut usize) -> Option<u32> {
        let store = self.store;
        loop {
            let slot = self.numbered(number).tiers[tier].order.pop_old(&store.slots[tier], budget)?;
            if self.may_go(tier, slot) && !self.is_spared(tier, slot) {
                return Some(slot);
            }
        }
    }

    /// Whether a block that is the least recently used has another turn of the order, for its priority: in the mean as many as that is.
    #[inline]
    pub(crate) fn is_spared(&mut self, tier: usize, slot: u32) -> bool {
        let index = self.store.slots[tier][slot as usize].entry.get();
        self.store.entries[index].priority.get() > 0 && self.may_spare(index, tier, slot)
    }

    #[cold]
    fn may_spare(&mut self, index: u32, tier: usize, slot: u32) -> bool {
        let store = self.store;
        let Shard { random, tiers, .. } = self.shard(index);
        let spared = spares(store.entries[index].priority.get(), random);
        if spared {
            tiers[tier].order.push_young(slot, &store.slots[tier]);
        }
        spared
    }

    /// Whether a slot, whose shard is held, has a block that may be evicted.
    #[expect(
        clippy::inline_always,
        reason = "a call would be a hundredth of what a block costs in a small pool"
    )]
    #[inline(always)]
    pub(crate) fn may_go(&self, tier: usize, slot: u32) -> bool {
        let store = self.store;
        let state = &store.slots[tier][slot as usize];
        if state.usage() != Usage::Registered || state.refs() > 0 {
            return false;
        }
        let (index, has_duplicate) = (state.entry.get(), state.link.get() != NONE);
        let entry = &store.entries[index];
        if entry.is_kept() && self.is_in_keeps(index, tier) {
            return false;
        }
        has_duplicate || entry.children(tier) == 0 || !store.is_full(entry.group())
    }

    /// Takes an unpinned primary out of the registry; its slot becomes Held. A duplicate takes over if there is one:
    /// then the block stays.
    #[inline]
    pub(crate) fn vacate(&mut self, tier: usize, slot: u32) {
        #[cfg(test)]
        super::counts::one_changes();
        let store = self.store;
        let state = &store.slots[tier][slot as usize];
        let (index, heir) = (state.entry.get(), state.link.get());
        let entry = &store.entries[index];
        debug_assert!(!state.is_listed(), "the policy does not know a slot that is evicted");
        state.reset(Usage::Held);
        let part = self.part(index, tier);
        part.inactive -= 1;
        part.add_held(1);
        part.counters.evicted += u64::from(heir == NONE);
        self.count_idle_for_tenant(index, tier, false);
        self.count_for_tenant(index, tier, false);
        if heir != NONE {
            entry.slots[tier].set(heir);
            return;
        }
        self.change_presence((index, entry), tier, Presence::Present, Presence::Absent);
        entry.slots[tier].set(NONE);
        self.remember(entry);
        self.unused(index);
    }

    /// A duplicate without users is worth nothing: its slot is free again.
    pub(crate) fn drop_duplicate(&mut self, tier: usize, slot: u32) {
        let store = self.store;
        self.unlink_duplicate(tier, slot);
        let index = store.slots[tier][slot as usize].entry.get();
        self.update_evictable(index, tier);
        self.count_for_tenant(index, tier, false);
        self.part(index, tier).active -= 1;
        store.free[tier].lock().put(&store.slots[tier], slot);
    }

    /// Takes `slot` off its primary's list.
    pub(crate) fn unlink_duplicate(&mut self, tier: usize, slot: u32) {
        let slots = &self.store.slots[tier];
        let state = &slots[slot as usize];
        let mut at = self.store.entries[state.entry.get()].slot(tier);
        while at != NONE {
            let next = slots[at as usize].link.get();
            if next == slot {
                slots[at as usize].link.set(state.link.get());
                state.link.set(NONE);
                return;
            }
            at = next;
        }
    }
}
