//! Which blocks to copy down before they are evicted.
//!
//! A block is copied after its ancestors that are missing below. One hold of the lock makes so many
//! steps (positions of the order, ancestors) before other threads have their turn, and one call
//! looks at no ancestor twice.

use super::registered::Reference;
use super::state::Core;
use super::store::{Hold, Store};
use crate::entry::{NONE, Presence};
use crate::slot::Usage;
use kvbm_plan::{BlockId, GroupId, SequenceHash};
use std::collections::HashSet;
use std::ops::Range;

/// Positions of eviction orders looked at in one call.
const MAX_LOOKED_AT: usize = 4096;

/// Steps until other threads have their turn.
const STEPS_PER_HOLD: usize = 256;

/// Which position in the eviction order a search moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// Where the next call goes on.
    Cursor,
    /// The search is done with the positions before it.
    Watched,
}

/// A search along the eviction order, and what it has found.
struct Search<'a> {
    mark: Mark,
    tier: usize,
    not_on: usize,
    /// Most blocks in `out`.
    n: usize,
    min_idle: u64,
    /// Whether blocks in use are wanted as well.
    active_too: bool,
    /// Positions that may be looked at.
    budget: usize,
    /// Steps since other threads had their turn.
    steps: usize,
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
            tier,
            not_on,
            n,
            min_idle: 0,
            active_too: false,
            budget: MAX_LOOKED_AT,
            steps: 0,
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

    /// The position up to which the search, or an earlier one, has come.
    fn mark(&self, core: &Core) -> u64 {
        let on = &core.tiers[self.tier];
        match self.mark {
            Mark::Cursor => on.cursor,
            Mark::Watched => on.order.watched(),
        }
    }

    fn set_mark(&self, core: &mut Core, number: u64) {
        let on = &mut core.tiers[self.tier];
        match self.mark {
            Mark::Cursor => on.cursor = number,
            Mark::Watched => on.order.watch(number),
        }
    }

    fn wants(&self, core: &Core, slot: u32) -> bool {
        let state = core.slot(self.tier, slot);
        if state.usage() != Usage::Registered || (state.refs() > 0 && !self.active_too) {
            return false;
        }
        let entry = core.entry(state.entry.get());
        let idle = u64::from(core.short_step().wrapping_sub(entry.last_step.get()));
        let min_idle = self.min_idle.min(u64::from(u16::MAX));
        entry.presence(self.not_on) == Presence::Absent && idle >= min_idle
    }

    /// Whether a slot still has the block with this entry and key. Then the block's ancestors are
    /// what they were.
    fn is_still(&self, core: &Core, slot: u32, index: u32, (group, hash): (GroupId, SequenceHash)) -> bool {
        let state = core.slot(self.tier, slot);
        state.usage() == Usage::Registered
            && state.entry.get() == index
            && core.entry(index).is_block(group, hash)
    }
}

impl Store {
    /// Pins up to `n` inactive blocks of `tier`, oldest first, that are neither on `not_on` nor on
    /// their way there and were not used for `min_idle` iterations. A block comes after its
    /// ancestors that are missing on `not_on`; a block with an ancestor on neither tier is left
    /// out. Starts where the last call stopped.
    pub(crate) fn coldest(&self, tiers: [usize; 2], n: usize, min_idle: u64, out: &mut Vec<BlockId>) {
        let mut search = Search { min_idle, ..Search::new(Mark::Cursor, tiers, n, out) };
        let mut hold = self.lock();
        let counts = &hold.tiers[search.tier];
        let (first, cursor) = (counts.order.first(), counts.cursor);
        let start = if (first..counts.order.end()).contains(&cursor) { cursor } else { first };
        // From the cursor to the young end, then the positions before it: none is missed because it
        // was looked at.
        hold.search(start..u64::MAX, &mut search);
        if !search.is_over() {
            hold.search(first..start, &mut search);
        }
    }

    /// Pins up to `n` blocks that are among the next victims of a tier and are neither on the other
    /// nor on their way there; ancestors first, as for [`coldest`](Self::coldest). The next victims
    /// are the oldest `share` of the eviction order. A policy, or tenants with shares, may take any
    /// block next: then all blocks are.
    ///
    /// The search looks at each position of an order once. It also takes blocks in use: it would
    /// not find them again before their next use.
    pub(crate) fn uncopied_victims(&self, tiers: [usize; 2], share: f64, n: usize, out: &mut Vec<BlockId>) {
        let mut search = Search { active_too: true, ..Search::new(Mark::Watched, tiers, n, out) };
        let mut hold = self.lock();
        let any = (hold.policy.is_some() || hold.tenants.are_configured()) && share > 0.0;
        let share = if any { 1.0 } else { share.clamp(0.0, 1.0) };
        let order = &hold.tiers[search.tier].order;
        let (first, end) = (order.first(), order.end());
        let target = first + ((end - first) as f64 * share) as u64;
        let start = order.watched().max(first);
        hold.search(start..target.max(start), &mut search);
    }
}

impl Hold<'_> {
    /// Chooses among the positions with these numbers until the search is over.
    fn search(&mut self, numbers: Range<u64>, search: &mut Search<'_>) {
        search.set_mark(self, numbers.start);
        while !search.is_over() {
            self.step_on(search);
            let mark = search.mark(self);
            let on = &self.tiers[search.tier];
            let mut positions = on.order.positions(mark..numbers.end, &on.slots);
            let Some((number, slot)) = positions.next() else { return };
            drop(positions);
            search.budget -= 1;
            if let Some(slot) = slot {
                self.choose(slot, search);
            }
            // Not where room ended: there may be only ancestors in it, and the block itself comes
            // next time. Nor where another thread moved the mark meanwhile, because it put a
            // position before it.
            if search.has_room() && search.mark(self) == mark {
                search.set_mark(self, number + 1);
            }
        }
    }

    /// One step more. Returns whether other threads had their turn before it.
    fn step_on(&mut self, search: &mut Search<'_>) -> bool {
        search.steps += 1;
        let enough = search.steps > STEPS_PER_HOLD;
        if enough {
            search.steps = 0;
            self.let_others_in();
        }
        enough
    }

    /// Pins the block in `slot`, if it is wanted, with the ancestors that must be copied before it.
    fn choose(&mut self, slot: u32, search: &mut Search<'_>) {
        if search.wants(self, slot) {
            let index = self.entry_of(search.tier, slot);
            if self.collect_missing(slot, index, search) {
                self.pin_missing(search);
            } else {
                search.broken.extend(&search.missing);
            }
        }
    }

    /// Collects the entries of the block in `slot` and of its ancestors that are missing below,
    /// lowest first. False where an ancestor is on neither tier, or the block is gone.
    fn collect_missing(&mut self, slot: u32, index: u32, search: &mut Search<'_>) -> bool {
        let key = (self.entry(index).group(), self.entry(index).hash());
        let chain = self.entries.is_full(key.0);
        let mut above = index;
        search.missing.clear();
        while above != NONE {
            if self.step_on(search) && !search.is_still(self, slot, index, key) {
                search.missing.clear();
                return false;
            }
            let entry = self.entry(above);
            if entry.presence(search.not_on) != Presence::Absent || search.chosen.contains(&above) {
                return true;
            }
            if entry.presence(search.tier) != Presence::Present || search.broken.contains(&above) {
                return false;
            }
            search.missing.push(above);
            above = if chain { entry.parent.get() } else { NONE };
        }
        true
    }

    /// Pins the collected blocks, topmost first; where room ends, the pinned ones are a chain.
    fn pin_missing(&mut self, search: &mut Search<'_>) {
        while search.has_room()
            && let Some(index) = search.missing.pop()
        {
            self.step_on(search);
            // Other threads may have had their turn since it was collected.
            let entry = self.entry(index);
            if entry.presence(search.tier) != Presence::Present {
                return;
            }
            if entry.presence(search.not_on) != Presence::Absent {
                continue;
            }
            let slot = entry.slot(search.tier);
            self.add_reference(search.tier, slot, Reference::Transfer);
            search.chosen.insert(index);
            search.out.push(BlockId(slot));
        }
    }
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use crate::test_chains::{GROUP, chain, register};
    use crate::{G1, Registry, RegistryConfig, probe};
    use kvbm_plan::{BlockIdentity, SequenceHash, Tier};
    use std::collections::BTreeSet;

    fn registry(capacity: u32) -> Registry {
        Registry::new(&RegistryConfig::new([capacity, capacity, 0])).expect("a valid configuration")
    }

    fn next_victims(registry: &Registry, n: usize) -> (crate::Pinned, Vec<BlockIdentity>) {
        let blocks = registry.uncopied_victims(Tier::G1, 1.0, n, Tier::G2);
        let identities = blocks.identities();
        (blocks, identities)
    }

    /// Registers a beginning, looks at all of its positions, and registers an end, which is next to
    /// be looked at.
    fn parted_chain(registry: &Registry, shared: u64, more: u64) -> Vec<SequenceHash> {
        let root = chain(1, shared);
        drop(register::<G1>(registry, &root, 0));
        drop(next_victims(registry, usize::MAX));
        let whole = [&root[..], &chain(2, more)].concat();
        drop(register::<G1>(registry, &whole, root.len()));
        whole
    }

    /// Where a call has room for ancestors alone, the block itself comes in a later one.
    #[test]
    fn a_victim_for_whose_ancestors_alone_there_was_room_comes_later() {
        let registry = registry(200);
        let parted = parted_chain(&registry, 6, 6);
        let (mut begun, mut chosen) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let (blocks, identities) = next_victims(&registry, 5);
            chosen.extend(identities.iter().map(|identity| identity.hash));
            begun.push((registry.begin_arrivals(Tier::G2, &identities).expect("there is room"), blocks));
        }
        assert_eq!(chosen, parted);
    }

    /// While the search looks at a long line of ancestors, other threads have their turn. Where
    /// they move the mark back, since cleaning has brought a position before it, the search goes on
    /// from there.
    #[test]
    fn a_place_that_comes_before_the_mark_while_ancestors_are_looked_at_is_looked_at() {
        let registry = registry(2000);
        let parted = parted_chain(&registry, 1, 600);
        let others: BTreeSet<SequenceHash> = (0..5).map(|number| chain(1000 + number, 1)[0]).collect();
        for &hash in &others {
            drop(register::<G1>(&registry, &[hash], 0));
        }
        registry.touch(GROUP, &parted);
        // In the order: others, then the chain, its end first. The mark says that all before that
        // end was looked at.
        let mut core = registry.shared.store.lock();
        let end = core.entries.find(GROUP, parted[600]).expect("it was registered");
        let slot = core.entry(end).slot(0);
        let position = core.tiers[0]
            .order
            .positions(0..u64::MAX, &core.tiers[0].slots)
            .find(|(_, found)| *found == Some(slot));
        core.tiers[0].order.watch(position.expect("it has a position").0);
        drop(core);
        let (other, mut once) = (registry.clone(), Some(()));
        let others_move_it = move || {
            if once.take().is_some() {
                let mut core = other.shared.store.lock();
                let order = &mut core.tiers[0].order;
                order.watch(order.first());
            }
        };
        let (_blocks, identities) = probe::while_others(others_move_it, || next_victims(&registry, 2000));
        let chosen: BTreeSet<SequenceHash> = identities.iter().map(|identity| identity.hash).collect();
        assert!(parted.iter().all(|hash| chosen.contains(hash)));
        assert!(others.is_subset(&chosen), "they are before the mark since others had their turn");
    }
}
