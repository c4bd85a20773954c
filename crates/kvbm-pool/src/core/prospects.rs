//! What the eviction policy is told: uses of blocks, and which slots may be evicted.
//!
//! A slot is evictable when its block is registered in it, nobody uses it, and nothing on the tier continues the block
//! (or its group does not care, or another copy takes over). [`Core::update_evictable`] follows every change of that;
//! the slot itself says whether the policy knows it as evictable, so telling is cheap where nothing changed.

use super::entry::{Entry, tag_of};
use super::evict::MAX_VICTIMS;
use super::index::LOOKUPS;
use super::shards::Shard;
use super::slot::{Slot, Usage};
use super::{Core, NONE, Presence, Store};
use crate::near;
use crate::policy::{BlockMemory, BlockUse, Numbers, RequestPart, SlotSet};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

/// Where the end of a block's request is not known.
pub(crate) const FAR_FROM_TAIL: u32 = u32::MAX;

/// What is kept under `lru-leaf` of a block whose branch is said to have ended, until it is used again.
pub(crate) const ENDED: BlockMemory = BlockMemory { time: 0, class: 1 };

/// Blocks shown to the policy for each block used.
const LOOKS_PER_USE: usize = 2;

/// How many victims before its turn all is asked for that evicting a block of a chain reads.
const VICTIMS_AHEAD: usize = 3;

/// Ancestors looked at with one victim, until they are so many. What was asked for a moment ago is hardly there.
const STEPS: usize = 2;

/// Victims of one chain, the last of which has the entry `next` above it. For `ahead` ancestors from there on all was asked for; of the
/// one above these, `scout`, the entry. Nothing but time hangs on it: entries may have become others' since.
#[derive(Clone, Copy)]
pub(super) struct Run {
    next: u32,
    ahead: usize,
    scout: u32,
}

impl Run {
    pub(super) const NONE: Self = Self { next: NONE, ahead: 0, scout: NONE };
}

impl Store {
    /// What the policy expects of pinned blocks, in order.
    pub(crate) fn expected_reuse(&self, tier: usize, blocks: &[BlockId]) -> Vec<Option<f32>> {
        if !self.choice.has_policy {
            return vec![None; blocks.len()];
        }
        let mut expected = Vec::with_capacity(blocks.len());
        self.for_each(blocks.iter().map(|&block| (tier, block)), |core, tier, slot| {
            let memory = core.store.entries[core.store.slots[tier][slot as usize].entry.get()].memory();
            expected.push(core.first().policy.as_ref().and_then(|policy| policy.expected_reuse(memory)));
        });
        expected
    }
}

impl Core<'_> {
    /// Tells the policy whether the entry's slot on `tier` may be evicted, if it does not know.
    #[inline]
    pub(crate) fn update_evictable(&mut self, index: u32, tier: usize) {
        if self.store.choice.has_policy {
            self.update_listed(index, tier);
        }
    }

    fn update_listed(&mut self, index: u32, tier: usize) {
        let store = self.store;
        let entry = &store.entries[index];
        if entry.presence(tier) != Presence::Present {
            return;
        }
        let slot = entry.slot(tier);
        let slots = &store.slots[tier];
        let state = &slots[slot as usize];
        let continued = entry.children(tier) > 0 && state.link.get() == NONE && store.is_full(entry.group());
        let evictable = state.usage() == Usage::Registered
            && state.refs() == 0
            && !continued
            && !self.is_kept(index, tier);
        if evictable == state.is_listed() {
            return;
        }
        let set = self.set_of(index, tier);
        if evictable {
            self.count_listed(state, tier, true);
            if let Some(policy) = &mut self.shard(index).policy {
                policy.evictable(set, slot, entry.memory(), entry.priority.get(), &mut Numbers::of(slots));
            }
        } else {
            if let Some(policy) = &mut self.shard(index).policy {
                policy.kept(set, slot, &mut Numbers::of(slots));
            }
            self.count_listed(state, tier, false);
        }
    }

    /// The policy may choose a slot that has a block from now on, or must not any more.
    #[inline]
    pub(super) fn count_listed(&mut self, state: &Slot, tier: usize, listed: bool) {
        state.set_listed(listed);
        let count = &mut self.part(state.entry.get(), tier).listed;
        *count = if listed { *count + 1 } else { *count - 1 };
    }

    /// A listed slot is not evictable any more.
    pub(crate) fn unlist(&mut self, tier: usize, slot: u32) {
        let slots = &self.store.slots[tier];
        let state = &slots[slot as usize];
        let index = state.entry.get();
        let set = self.set_of(index, tier);
        if let Some(policy) = &mut self.shard(index).policy {
            policy.kept(set, slot, &mut Numbers::of(slots));
        }
        self.count_listed(state, tier, false);
    }

    /// The block in `slot` was removed.
    pub(crate) fn empty(&mut self, tier: usize, slot: u32) {
        let slots = &self.store.slots[tier];
        let state = &slots[slot as usize];
        let index = state.entry.get();
        let set = self.set_of(index, tier);
        if let Some(policy) = &mut self.shard(index).policy {
            policy.emptied(set, slot, &mut Numbers::of(slots));
            if state.is_listed() {
                self.count_listed(state, tier, false);
            }
        }
    }

    /// A request uses these entries (`NONE` where it has a block that is nowhere), which are all held.
    pub(crate) fn note_use(&mut self, request: &[u32]) {
        let Some(uses) = self.begin_use(request) else { return };
        for (at, &index) in request.iter().enumerate().filter(|(_, index)| **index != NONE) {
            self.note_block(index, request.len() - 1 - at);
        }
        self.show(uses);
    }

    /// A request uses these entries, some of which may not be held: how many it uses.
    pub(super) fn begin_use(&mut self, request: &[u32]) -> Option<usize> {
        let store = self.store;
        let there = |&&index: &&u32| index != NONE;
        let deepest = request.iter().rfind(there)?;
        let uses = request.iter().filter(there).count();
        let policy = self.first_mut().policy.as_mut()?;
        policy.begin(Some(store.entries[*deepest].memory()), RequestPart::Used, uses);
        Some(uses)
    }

    /// The same request goes on in this hold, the first of another shard.
    pub(super) fn go_on_with_use(&mut self, request: &[u32]) {
        let store = self.store;
        let deepest = request.iter().rfind(|&&index| index != NONE);
        if let Some(policy) = &mut self.first_mut().policy {
            policy.goes_on(deepest.map(|&index| store.entries[index].memory()));
        }
    }

    /// A block of the request, with so many behind it.
    #[inline]
    pub(super) fn note_block(&mut self, index: u32, from_tail: usize) {
        let entry = &self.store.entries[index];
        if !entry.take_fresh()
            && let Some(policy) = &mut self.first_mut().policy
        {
            let block = BlockUse { tag: entry.tag(), from_tail: from_tail as u32 };
            entry.set_memory(policy.used(&block, entry.memory()));
        }
    }

    /// The policy learns what has changed of a block that was touched.
    pub(crate) fn refresh_prospects(&mut self, index: u32) {
        let entry = &self.store.entries[index];
        let Some(policy) = &mut self.shard(index).policy else { return };
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                policy.touched(tier, entry.slot(tier));
            }
        }
        self.refresh_listed(index);
    }

    fn refresh_listed(&mut self, index: u32) {
        let store = self.store;
        let entry = &store.entries[index];
        let Shard { policy: Some(policy), tenants, .. } = self.shard(index) else { return };
        let tenant = tenants.number_of(entry.namespace());
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                let (set, slot) = (SlotSet { tier, tenant }, entry.slot(tier));
                let slots = &store.slots[tier];
                if slots[slot as usize].is_listed() {
                    let (memory, priority) = (entry.memory(), entry.priority.get());
                    policy.evictable(set, slot, memory, priority, &mut Numbers::of(slots));
                }
            }
        }
    }

    /// The caller says that nothing will continue a request: its blocks from the end up to the first that something
    /// else continues.
    pub(crate) fn branch_ends(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let entries = &self.store.entries;
        let last = hashes.iter().rev().find_map(|&hash| self.find(group, hash));
        let mut index = last.unwrap_or(NONE);
        // Where the block before, nearer to the end, counts as one that continues this.
        let mut below = [0; TIERS];
        let mut branch = self.store.room();
        while index != NONE {
            let entry = &entries[index];
            if (0..TIERS).any(|tier| entry.children(tier) > below[tier]) {
                break;
            }
            below = std::array::from_fn(|tier| u32::from(entry.presence(tier) != Presence::Absent));
            branch.push(index);
            index = entry.parent.get();
        }
        // Its end is the oldest then.
        for &index in branch.iter().rev() {
            self.end_of_branch(index);
        }
        self.store.keep_room(branch);
    }

    fn end_of_branch(&mut self, index: u32) {
        let store = self.store;
        let entry = &store.entries[index];
        let Some(policy) = &mut self.shard(index).policy else {
            if entry.memory() == ENDED {
                return;
            }
            entry.set_memory(ENDED);
            for tier in 0..TIERS {
                let (slot, slots) = (entry.slot(tier), &store.slots[tier]);
                if entry.presence(tier) == Presence::Present && slots[slot as usize].refs() == 0 {
                    self.part(index, tier).order.push_old(slot, slots);
                }
            }
            return;
        };
        entry.set_memory(policy.ended(entry.tag(), entry.memory()));
        self.refresh_listed(index);
    }

    /// A request registers these blocks.
    pub(crate) fn note_arrival(&mut self, identities: &[BlockIdentity]) {
        let Some(first) = identities.first().filter(|_| self.first().policy.is_some()) else { return };
        let before = first.parent.and_then(|parent| self.find(first.group, parent));
        let before = before.map(|index| self.store.entries[index].memory());
        let Some(policy) = &mut self.first_mut().policy else { return };
        policy.begin(before, RequestPart::Registered, identities.len());
        self.show(identities.len());
    }

    /// What the policy remembers of these blocks, up to [`LOOKUPS`], is asked for soon.
    pub(crate) fn expect(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        let Some(policy) = &self.first().policy else { return };
        let mut tags = [0; LOOKUPS];
        let mut count = 0;
        for ((group, hash), to) in blocks.zip(&mut tags) {
            *to = tag_of(group, hash);
            count += 1;
        }
        policy.expect(&tags[..count]);
    }

    /// A block comes to a tier: if it was on none, the policy recalls it or gets to know it.
    #[inline]
    pub(crate) fn recall(&mut self, entry: &Entry, from_tail: u32) {
        if entry.is_nowhere() {
            let Some(policy) = &mut self.first_mut().policy else {
                entry.set_memory(BlockMemory::default());
                return;
            };
            let block = BlockUse { tag: entry.tag(), from_tail };
            entry.set_memory(policy.registered(&block));
            if from_tail != FAR_FROM_TAIL {
                entry.set_fresh();
            }
        }
    }

    /// A block was evicted from a tier: if it is on no other, the policy may remember it.
    #[inline]
    pub(crate) fn remember(&mut self, entry: &Entry) {
        let Some(policy) = &mut self.first_mut().policy else { return };
        if entry.is_nowhere() {
            policy.forgotten(entry.tag(), entry.memory());
        }
    }

    /// Shows the policy the next few blocks that are somewhere, in proportion to the uses: also those of shards that are not held. Of
    /// these the time is all that the policy may change, and only as long as nobody else does.
    pub(super) fn show(&mut self, uses: usize) {
        let (store, end, all, number) = (self.store, self.end(), self.holds_all(), self.number());
        let Some(policy) = &mut self.first_mut().policy else { return };
        let every = (end / LOOKS_PER_USE).max(1) as u64;
        let looks = (uses * LOOKS_PER_USE).min(end);
        for index in store.choice.next_looks(looks, end) {
            let entry = &store.entries[index];
            if entry.is_nowhere() {
                continue;
            }
            let before = entry.memory();
            let now = policy.observe(before, every);
            if now == before {
                // Most are as they were: their lines stay with whoever has them.
                continue;
            }
            if all || entry.shard() == number {
                entry.set_memory(now);
            } else if now.time != before.time {
                entry.change_time(before.time, now.time);
            }
        }
    }

    /// A chain goes from its end, most often. Asks for what evicting the victims behind this one reads: an entry that is asked for with
    /// one victim says with the next where the rest is.
    fn follow(&self, run: Run, tier: usize, slot: u32) -> Run {
        let Store { entries, slots, .. } = self.store;
        let index = slots[tier][slot as usize].entry.get();
        let next = entries[index].parent.get();
        if run.next != index {
            self.ask_for(next);
            self.expect_to_go(index, tier);
            return Run { next, ahead: 0, scout: next };
        }
        let ahead = run.ahead.saturating_sub(1);
        let mut run = Run { next, ahead, scout: if ahead == 0 { next } else { run.scout } };
        for _ in 0..STEPS {
            if run.scout == NONE || run.ahead == VICTIMS_AHEAD {
                break;
            }
            self.expect_to_go(run.scout, tier);
            run.scout = entries[run.scout].parent.get();
            run.ahead += 1;
            self.ask_for(run.scout);
        }
        run
    }

    fn ask_for(&self, index: u32) {
        if index != NONE {
            near::prefetch(&self.store.entries[index]);
        }
    }

    /// Asks for what evicting a block reads beside its entry: its slot, its line of the table, and what the policy remembers.
    fn expect_to_go(&self, index: u32, tier: usize) {
        let entry = &self.store.entries[index];
        if let Some(state) = self.store.slots[tier].get(entry.slot(tier) as usize) {
            near::prefetch(state);
        }
        let (group, hash) = (entry.group(), entry.hash());
        let table = self.table();
        table.prefetch(table.mix(group, hash));
        if let Some(policy) = &self.first().policy {
            policy.expect(&[tag_of(group, hash)]);
        }
    }

    /// Evicts what the policy chooses in a shard that is held, up to `want` blocks of `tier` and at most [`MAX_VICTIMS`]; the oldest where
    /// nothing of its answer may go, for which it looks at so many places.
    pub(crate) fn evict_chosen(
        &mut self,
        number: usize,
        tier: usize,
        want: usize,
        looks: usize,
        out: &mut Vec<BlockId>,
    ) {
        let set = SlotSet::of_tier(tier);
        let wanted = want.min(MAX_VICTIMS);
        let mut left = wanted;
        let mut run = self.numbered(number).run;
        let (slots, entries) = (&self.store.slots[tier], &self.store.entries);
        let mut chosen = std::mem::take(&mut self.numbered(number).chosen);
        let evicted_before = self.numbered(number).tiers[tier].counters.evicted;
        while left > 0 {
            chosen.clear();
            let Some(policy) = &mut self.numbered(number).policy else { break };
            let numbers = &mut Numbers::for_victims(slots, entries);
            policy.victims(set, left, &mut chosen, numbers);
            if chosen.is_empty() {
                break;
            }
            let before = left;
            for &slot in &chosen {
                // Whatever a policy answers, only what is evictable goes, and no more than was wanted.
                if !self.is_listed_in(number, tier, slot) {
                    continue;
                }
                let state = &slots[slot as usize];
                self.count_listed(state, tier, false);
                if left == 0 {
                    self.update_evictable(state.entry.get(), tier);
                    continue;
                }
                run = self.follow(run, tier, slot);
                self.vacate(tier, slot);
                out.push(BlockId(slot));
                left -= 1;
            }
            if left == before {
                break;
            }
        }
        let shard = self.numbered(number);
        (shard.chosen, shard.run) = (chosen, run);
        let counters = &mut shard.tiers[tier].counters;
        counters.evicted_by_choice += counters.evicted - evicted_before;
        if left == wanted && self.numbered(number).tiers[tier].listed > 0 {
            self.evict_oldest(number, tier, wanted, looks, out);
        }
    }

    /// Whether a shard that is held has a listed slot with this number.
    #[inline]
    fn is_listed_in(&self, number: usize, tier: usize, slot: u32) -> bool {
        let store = self.store;
        let Some(state) = store.slots[tier].get(slot as usize).filter(|state| state.is_listed()) else {
            return false;
        };
        let index = state.entry.get();
        // Of a slot of another shard all that was read is a hint; what the shard has itself is sure.
        let is_its = |entry: &Entry| entry.shard() == number && entry.slot(tier) == slot;
        store.is_whole() || (index != NONE && is_its(&store.entries[index]))
    }
}
