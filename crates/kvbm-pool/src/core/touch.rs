//! Uses of blocks: a request touches its blocks once, tail to head, on every tier that holds them. The policy learns of it first, head to
//! tail.
//!
//! Where a request's blocks are in several shards, one is locked after the other. Entries that were looked up before that are hints; what
//! has moved meanwhile is looked for again.

use super::ahead::Ahead;
use super::homes::Homes;
use super::index::LOOKUPS;
use super::{Core, NONE, Presence, Store};
use crate::policy::BlockMemory;
use crate::tier::TIERS;
use kvbm_plan::{BlockId, GroupId, SequenceHash};

/// Threads that have room of their own for the entries of a request.
pub(super) const ROOMS: usize = 8;

impl Store {
    /// An empty vector for entries, which goes back afterwards.
    pub(super) fn room(&self) -> Vec<u32> {
        let mut room = std::mem::take(&mut *self.touched[Homes::thread(ROOMS)].lock());
        room.clear();
        room
    }

    pub(super) fn keep_room(&self, room: Vec<u32>) {
        *self.touched[Homes::thread(ROOMS)].lock() = room;
    }

    /// A use of these blocks.
    pub(crate) fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        let core = self.lock_any();
        let mut found = self.room();
        core.find_used(group, hashes, &mut found);
        self.touch_entries(core, &found, |at| Some((group, hashes[at])));
        self.keep_room(found);
    }

    /// A use of blocks that the caller pins.
    pub(crate) fn touch_pinned(&self, tier: usize, blocks: &[BlockId]) {
        let core = self.lock_any();
        let mut found = self.room();
        let slots = &self.slots[tier];
        found.extend(blocks.iter().map(|block| core.used_entry(slots[block.index()].entry.get())));
        self.touch_entries(core, &found, |_| None);
        self.keep_room(found);
    }

    /// Blocks of one request, in order; `NONE` where there is none. `name` says which they are, unless the caller pins them: then they stay
    /// what they are.
    fn touch_entries(
        &self,
        core: Core<'_>,
        found: &[u32],
        name: impl Fn(usize) -> Option<(GroupId, SequenceHash)>,
    ) {
        let mut core = core;
        if self.is_whole() {
            core.note_use(found);
        } else if self.choice.has_policy {
            core = core.note_use_in_parts(found, &name);
        }
        for at in (0..found.len()).rev().filter(|&at| found[at] != NONE) {
            let reached;
            (core, reached) = core.reach(found[at], name(at));
            if let Some(index) = reached {
                core.touch_entry(index);
            }
        }
    }
}

impl Core<'_> {
    /// The policy learns of a request, in one shard after the other.
    fn note_use_in_parts(
        self,
        found: &[u32],
        name: impl Fn(usize) -> Option<(GroupId, SequenceHash)>,
    ) -> Self {
        let mut core = self;
        let Some(uses) = core.begin_use(found) else { return core };
        for at in (0..found.len()).filter(|&at| found[at] != NONE) {
            let number = core.number();
            let reached;
            (core, reached) = core.reach(found[at], name(at));
            if core.number() != number {
                core.go_on_with_use(found);
            }
            if let Some(index) = reached {
                core.note_block(index, found.len() - 1 - at);
            }
        }
        core.show(uses);
        core
    }

    /// The entries of blocks that are somewhere, `NONE` for others. Of a shard that is not held they are hints.
    fn find_used(&self, group: GroupId, hashes: &[SequenceHash], found: &mut Vec<u32>) {
        let mut ahead = Ahead::new(self, group, hashes.chunks(LOOKUPS));
        while let Some(entries) = ahead.next(self) {
            found.extend(entries.iter().map(|&index| self.used_entry(index)));
        }
    }

    /// An entry that is more than a name in a chain.
    fn used_entry(&self, index: u32) -> u32 {
        if index == NONE || self.store.entries[index].is_nowhere() { NONE } else { index }
    }

    /// The entry under its shard's lock, if the block is somewhere.
    #[inline]
    fn reach(self, index: u32, block: Option<(GroupId, SequenceHash)>) -> (Self, Option<u32>) {
        let store = self.store;
        if store.is_whole() {
            return (self, Some(index));
        }
        let core = if self.holds(index) { self } else { self.go(store.entries[index].shard()) };
        let is_block = |(group, hash)| store.entries[index].is_block(group, hash);
        let (core, found) = match block {
            Some((group, hash)) if !core.holds(index) || !is_block((group, hash)) => core.seek(group, hash),
            _ => (core, Some(index)),
        };
        let used = found.map_or(NONE, |index| core.used_entry(index));
        (core, (used != NONE).then_some(used))
    }

    #[inline]
    fn touch_entry(&mut self, index: u32) {
        let store = self.store;
        let entry = &store.entries[index];
        entry.last_step.set(self.short_step());
        if !store.choice.has_policy {
            entry.set_memory(BlockMemory::default());
        }
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                self.part(index, tier).order.push_young(entry.slot(tier), &store.slots[tier]);
            }
        }
        self.refresh_prospects(index);
    }
}
