//! Finding entries, making them and giving them up.

use super::state::Core;
use super::table::Key;
use crate::entry::{Entry, NONE, Presence};
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

/// Blocks whose cache lines are prefetched together.
pub(crate) const BATCH: usize = 32;

impl Core {
    /// The entry of a block.
    #[inline]
    pub(crate) fn find(&self, group: GroupId, hash: SequenceHash) -> Option<u32> {
        self.table.find(&self.table.key(group, hash), &self.entries)
    }

    /// Prefetches the buckets of up to [`BATCH`] blocks.
    #[inline]
    pub(crate) fn prefetch_buckets(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        for (group, hash) in blocks.take(BATCH) {
            self.table.prefetch(self.table.mix(group, hash));
        }
    }

    /// The entry of `identity`, made if there is none. The entry of its parent is made with it if
    /// need be: in some groups blocks outlive their parents. `before` is the entry of the block
    /// before it, where the caller knows one.
    #[inline]
    pub(crate) fn find_or_insert(&mut self, identity: &BlockIdentity, before: Option<u32>) -> u32 {
        let BlockIdentity { group, hash, namespace, position, .. } = *identity;
        let key = self.table.key(group, hash);
        let index = match self.table.find(&key, &self.entries) {
            Some(index) => index,
            None => self.insert(&key, namespace, position),
        };
        let Some(parent) = identity.parent.filter(|_| self.entry(index).parent.get() == NONE) else {
            return index;
        };
        let is_parent = |&before: &u32| self.entry(before).is_block(group, parent);
        let above = before.filter(is_parent).or_else(|| self.find(group, parent));
        let above = above.unwrap_or_else(|| {
            let key = self.table.key(group, parent);
            self.insert(&key, namespace, position.saturating_sub(1))
        });
        self.link(index, above);
        index
    }

    /// Makes `above` the parent of an entry that has none. Positions that rise along every chain
    /// keep chains free of cycles, whatever the caller names as parent: where they do not, nothing
    /// happens.
    #[inline]
    fn link(&mut self, index: u32, above: u32) {
        let (entry, parent) = (self.entry(index), self.entry(above));
        if parent.comes_before(entry.position.get()) {
            entry.parent.set(above);
            parent.add_link();
            if !entry.is_nowhere() {
                self.count_late_child(index, above);
            }
        }
    }

    /// The entry is on some tier already, for it came in a batch that contradicted itself.
    #[cold]
    fn count_late_child(&mut self, index: u32, above: u32) {
        for tier in 0..TIERS {
            if self.entry(index).presence(tier) != Presence::Absent {
                self.entry(above).add_child(tier);
                self.update_evictable(above, tier);
            }
        }
    }

    /// A new entry of a block that has none.
    #[inline]
    fn insert(&mut self, key: &Key, namespace: NamespaceId, position: u32) -> u32 {
        let index = self.take_vacant();
        self.entry(index).begin(key.group, key.hash, namespace, position);
        self.table.insert(key.mixed, index);
        self.used += 1;
        index
    }

    #[inline]
    fn take_vacant(&mut self) -> u32 {
        let first = self.vacant;
        if first != NONE {
            self.vacant = self.entry(first).parent.get();
            return first;
        }
        if self.fresh as usize == self.entries.len() {
            self.grow();
        }
        self.fresh += 1;
        self.fresh - 1
    }

    /// Doubles the entries and the table.
    #[cold]
    fn grow(&mut self) {
        let len = self.entries.len();
        assert!(
            len <= (NONE / 4) as usize,
            "a registry has at most three times 2^28 slots, and entries for as many again"
        );
        self.entries.extend(Entry::many(len));
        self.table = self.table.grown(&self.entries);
    }

    /// Something that kept an entry is gone. Where nothing else keeps it, it becomes vacant, and
    /// then its ancestors that it kept. The caller does not use the entry afterwards.
    #[inline]
    pub(crate) fn give_up_unused(&mut self, index: u32) {
        let mut index = index;
        while index != NONE {
            let entry = &self.entries[index as usize];
            if !entry.in_use() || !entry.is_nowhere() || entry.links.get() > 0 {
                return;
            }
            self.table.remove(self.table.mix(entry.group(), entry.hash()), index);
            let parent = entry.parent.get();
            entry.end();
            entry.parent.set(self.vacant);
            self.vacant = index;
            self.used -= 1;
            if parent != NONE {
                self.entry(parent).drop_link();
            }
            index = parent;
        }
    }
}
