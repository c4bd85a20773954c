//! Which blocks to copy down before they would be evicted.
//!
//! Shards are looked at one after the other, one lock at a time, the one with the oldest blocks first. A block goes after its ancestors
//! that are missing below; where one of these belongs to another shard, all are locked for that block. A hold makes so many steps (places
//! of the order, ancestors) before others are let in, and no ancestor is looked at twice in a call.

use super::slot::Usage;
use super::{Core, MAX_SHARDS, NONE, Pin, Presence, Store};
use kvbm_plan::{BlockId, GroupId, SequenceHash};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Places of eviction orders looked at in one call.
const MAX_LOOKED_AT: usize = 4096;

/// Steps until others are let in.
const STEPS_AT_ONCE: usize = 256;

/// A shard's next victims are looked at when this part of them is new, so that not every call locks every shard.
const LAG: u64 = 16;

/// Where a walk along an order stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// Where the next call goes on.
    Cursor,
    /// Places before it are done with.
    Watched,
}

/// What a walk along the eviction orders looks for, and what it has found.
struct Search<'a> {
    mark: Mark,
    /// Whose order.
    shard: usize,
    tier: usize,
    not_on: usize,
    /// Most blocks in `out`.
    n: usize,
    min_idle: u64,
    /// Whether blocks that somebody holds are wanted as well.
    pinned_too: bool,
    /// Places that may be looked at.
    budget: usize,
    /// Steps since others were let in.
    steps: usize,
    /// A block whose ancestors are in several shards: its place and slot.
    across: Option<(u64, u32)>,
    /// Entries of the blocks in `out`, and of those that lack an ancestor on both tiers.
    chosen: HashSet<u32>,
    broken: HashSet<u32>,
    missing: Vec<u32>,
    out: &'a mut Vec<BlockId>,
}

impl<'a> Search<'a> {
    fn new(mark: Mark, [tier, not_on]: [usize; 2], n: usize, out: &'a mut Vec<BlockId>) -> Self {
        Self {
            mark,
            shard: 0,
            tier,
            not_on,
            n,
            min_idle: 0,
            pinned_too: false,
            budget: MAX_LOOKED_AT,
            steps: 0,
            across: None,
            chosen: HashSet::new(),
            broken: HashSet::new(),
            missing: Vec::new(),
            out,
        }
    }

    fn has_room(&self) -> bool {
        self.out.len() < self.n
    }

    fn is_over(&self) -> bool {
        !self.has_room() || self.budget == 0
    }
}

/// What stands before a block on its way down.
enum Line {
    /// Its ancestors are below, on their way there, chosen, or in `missing` with it.
    Whole,
    /// One of them is on neither tier.
    Broken,
    /// One of them belongs to a shard that is not held.
    Elsewhere,
}

impl Store {
    /// Shards by the age of the oldest blocks in their orders, the oldest first.
    fn by_age(&self, tier: usize) -> impl Iterator<Item = usize> + use<> {
        let (ages, _) = self.ages(tier);
        let mut shards: [usize; MAX_SHARDS] = std::array::from_fn(|shard| shard);
        let count = self.shards.len();
        shards[..count].sort_by_key(|&shard| ages[shard]);
        shards.into_iter().take(count)
    }

    /// Pins up to `n` unpinned blocks of `tier`, oldest first, that are neither on `not_on` nor on their way there and were not used for
    /// `min_idle` iterations. A block comes after its ancestors that are missing on `not_on`; one of whose ancestors is on neither
    /// tier is left out. Starts where the last call stopped.
    pub(crate) fn coldest(&self, tiers: [usize; 2], n: usize, min_idle: u64, out: &mut Vec<BlockId>) {
        let mut search = Search { min_idle, ..Search::new(Mark::Cursor, tiers, n, out) };
        let next = &self.coldest_next[search.tier];
        let (begin, count) = (next.swap(NONE, Relaxed) as usize, self.shards.len());
        let mut shards: Vec<usize> = self.by_age(search.tier).collect();
        if begin < count {
            // In turn, however their ages change meanwhile.
            shards = (begin..count).chain(0..begin).collect();
        }
        for shard in shards {
            search.shard = shard;
            let mut core = self.lock(shard);
            let order = &core.first().tiers[search.tier].order;
            let (first, cursor) = (order.first(), core.first().tiers[search.tier].cursor);
            let start = if (first..order.end()).contains(&cursor) { cursor } else { first };
            // From the cursor to the young end, then what lies before it: nothing is missed for having been looked at.
            core = self.walk(core, start..u64::MAX, &mut search);
            if !search.is_over() {
                drop(self.walk(core, first..start, &mut search));
            }
            if search.is_over() {
                // Where there was no more room there may be more; where it took too long the others come first.
                let after = if search.has_room() { shard + 1 } else { shard };
                next.store((after % count) as u32, Relaxed);
                return;
            }
        }
    }

    /// Pins up to `n` blocks that are among the next victims of a tier and are neither on the other nor on their way
    /// there; ancestors first, as for [`coldest`](Self::coldest). The next victims are the oldest `share` of the
    /// eviction orders; a policy that goes by something else may take any block next, and so may tenants' shares: with these they
    /// all count.
    ///
    /// Each place of an order is looked at once. What is pinned then is copied as well: it would not be found again
    /// before its next use.
    pub(crate) fn uncopied_victims(&self, tiers: [usize; 2], share: f64, n: usize, out: &mut Vec<BlockId>) {
        let any = (self.choice.has_policy || self.has_tenants) && share > 0.0;
        let share = if any { 1.0 } else { share.clamp(0.0, 1.0) };
        let mut search = Search { pinned_too: true, ..Search::new(Mark::Watched, tiers, n, out) };
        for shard in self.by_age(search.tier) {
            if search.is_over() {
                return;
            }
            if !self.is_due(shard, search.tier, share, if any { u64::MAX } else { LAG }) {
                continue;
            }
            search.shard = shard;
            let core = self.lock(shard);
            let order = &core.first().tiers[search.tier].order;
            let (first, end) = (order.first(), order.end());
            let target = first + ((end - first) as f64 * share) as u64;
            let start = order.watched().max(first);
            drop(self.walk(core, start..target.max(start), &mut search));
        }
    }

    /// Whether more than one of `lag` of a shard's next victims have not been looked at; as its last hold left it, without its lock.
    fn is_due(&self, shard: usize, tier: usize, share: f64, lag: u64) -> bool {
        let shown = &self.shards[shard].shown;
        let next = (shown.places[tier].load(Relaxed) as f64 * share) as u64;
        let new = next.saturating_sub(shown.watched[tier].load(Relaxed));
        self.is_whole() || new > next / lag
    }

    /// Walks along the order of the shard that is held, and locks all where a block needs that. The shard is held again at the end.
    fn walk<'a>(&'a self, core: Core<'a>, numbers: Range<u64>, search: &mut Search<'_>) -> Core<'a> {
        let mut core = core;
        core.set_mark(search, numbers.start);
        loop {
            core.search(numbers.end, search);
            let Some((number, slot)) = search.across.take() else { return core };
            drop(core);
            let mut all = self.lock_all();
            all.choose(slot, search);
            drop(all);
            core = self.lock(search.shard);
            core.pass(number, number + 1, search);
        }
    }
}

impl Core<'_> {
    fn mark(&self, search: &Search<'_>) -> u64 {
        let part = &self.first().tiers[search.tier];
        match search.mark {
            Mark::Cursor => part.cursor,
            Mark::Watched => part.order.watched(),
        }
    }

    fn set_mark(&mut self, search: &Search<'_>, number: u64) {
        let part = &mut self.first_mut().tiers[search.tier];
        match search.mark {
            Mark::Cursor => part.cursor = number,
            Mark::Watched => part.order.watch(number),
        }
    }

    /// Chooses among the places from the mark to number `end`, until the search is over or a block needs all locks. One shard is held.
    fn search(&mut self, end: u64, search: &mut Search<'_>) {
        while !search.is_over() && search.across.is_none() {
            self.step_on(search);
            let slots = &self.store.slots[search.tier];
            let order = &self.first().tiers[search.tier].order;
            let Some((number, slot)) = order.places(self.mark(search)..end, slots).next() else { return };
            search.budget -= 1;
            let mark = self.mark(search);
            if let Some(slot) = slot
                && !self.choose(slot, search)
            {
                search.across = Some((number, slot));
                // Up to the block, which stays ahead of the mark until it was chosen.
                self.pass(mark, number, search);
                return;
            }
            self.pass(mark, number + 1, search);
        }
    }

    /// A place was dealt with: the mark goes on from `mark` to `next`. Not where room ended, for then there may be only ancestors in it and
    /// the block itself comes next time; nor where the mark was moved by others who were let in, since they put something before it.
    fn pass(&mut self, mark: u64, next: u64, search: &Search<'_>) {
        if search.has_room() && self.mark(search) == mark {
            self.set_mark(search, next);
        }
    }

    /// One step more. Says whether others were let in before it.
    fn step_on(&mut self, search: &mut Search<'_>) -> bool {
        search.steps += 1;
        let enough = search.steps > STEPS_AT_ONCE;
        if enough {
            search.steps = 0;
            self.let_others_in();
        }
        enough
    }

    /// Pins the block in `slot`, if it is wanted, with the ancestors that must go before it. False where that takes all locks.
    fn choose(&mut self, slot: u32, search: &mut Search<'_>) -> bool {
        if !self.is_wanted(slot, search) {
            return true;
        }
        let index = self.store.slots[search.tier][slot as usize].entry.get();
        match self.line(slot, index, search) {
            Line::Whole => self.pin_line(search),
            Line::Broken => search.broken.extend(&search.missing),
            Line::Elsewhere => return false,
        }
        true
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

    /// Collects the entries of the block in `slot` and of its ancestors that are missing below, lowest first. Of those in other shards
    /// it sees some moment's state, which is all that the answer is worth to whoever copies them.
    fn line(&mut self, slot: u32, index: u32, search: &mut Search<'_>) -> Line {
        let store = self.store;
        let name = (store.entries[index].group(), store.entries[index].hash());
        let chain = store.is_full(name.0);
        let mut above = index;
        search.missing.clear();
        while above != NONE {
            if self.step_on(search) && !self.is_in(search.tier, slot, index, name) {
                // Gone meanwhile.
                search.missing.clear();
                return Line::Broken;
            }
            let entry = &store.entries[above];
            if entry.presence(search.not_on) != Presence::Absent || search.chosen.contains(&above) {
                return Line::Whole;
            }
            if entry.presence(search.tier) != Presence::Present || search.broken.contains(&above) {
                return Line::Broken;
            }
            if !self.holds(above) {
                return Line::Elsewhere;
            }
            search.missing.push(above);
            above = if chain { entry.parent.get() } else { NONE };
        }
        Line::Whole
    }

    /// Whether the block with this entry and name is (still) the one in a slot. Then its ancestors are what they were.
    fn is_in(&self, tier: usize, slot: u32, index: u32, (group, hash): (GroupId, SequenceHash)) -> bool {
        let state = &self.store.slots[tier][slot as usize];
        state.usage() == Usage::Registered
            && state.entry.get() == index
            && self.holds(index)
            && self.store.entries[index].is_block(group, hash)
    }

    /// Pins what [`line`](Self::line) has collected, topmost first; where room ends, what is in stays a chain.
    fn pin_line(&mut self, search: &mut Search<'_>) {
        let store = self.store;
        while search.has_room()
            && let Some(index) = search.missing.pop()
        {
            self.step_on(search);
            let entry = &store.entries[index];
            // Others may have been let in since it was collected.
            let is_there = self.holds(index) && entry.presence(search.tier) == Presence::Present;
            if !is_there {
                return;
            }
            if entry.presence(search.not_on) != Presence::Absent {
                continue;
            }
            let slot = entry.slot(search.tier);
            self.pin(search.tier, slot, Pin::Transfer);
            search.chosen.insert(index);
            search.out.push(BlockId(slot));
        }
    }
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests;
