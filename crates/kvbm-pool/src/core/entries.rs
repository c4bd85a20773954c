//! The entries of all blocks: found by group and hash, made, and given up.

use super::table::{Key, Table};
use crate::config::GroupConfig;
use crate::entry::{Entry, NONE, Presence, identity_of};
use crate::error::RegisterError;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};
use std::ops::{Index, Range};

/// Blocks whose cache lines are prefetched together.
pub(crate) const BATCH: usize = 32;

/// The blocks that the registry knows, on whichever tiers they are, and the groups they are in.
pub(crate) struct Entries {
    groups: Box<[GroupConfig]>,
    all: Vec<Entry>,
    table: Table,
    /// First of the vacant entries, a list through `Entry::parent`.
    vacant: u32,
    /// Entries from here on were never used.
    fresh: u32,
    /// Entries in use.
    used: usize,
}

impl Index<u32> for Entries {
    type Output = Entry;
    #[inline]
    fn index(&self, index: u32) -> &Entry {
        &self.all[index as usize]
    }
}

impl Entries {
    /// With room for `count` blocks; it grows where more are known. `seed` places the keys of the
    /// table.
    pub(crate) fn new(groups: &[GroupConfig], count: usize, seed: u64) -> Self {
        let all = Entry::many(count);
        let table = Table::new(all.len(), seed);
        Self { groups: groups.into(), all, table, vacant: NONE, fresh: 0, used: 0 }
    }

    /// All entries, also those that are not in use.
    #[inline]
    pub(crate) fn all(&self) -> &[Entry] {
        &self.all
    }

    /// How many entries are in use.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Entries with an index in use are below this.
    pub(crate) fn end(&self) -> usize {
        self.fresh as usize
    }

    pub(crate) fn groups(&self) -> &[GroupConfig] {
        &self.groups
    }

    pub(crate) fn group(&self, group: GroupId) -> Option<GroupConfig> {
        self.groups.get(usize::from(group.0)).copied()
    }

    /// Whether the group's blocks are useless without their parents.
    #[inline]
    pub(crate) fn is_full(&self, group: GroupId) -> bool {
        self.groups.get(usize::from(group.0)).is_some_and(|config| config.kind == GroupKind::Full)
    }

    /// Identity of the block of an entry in use.
    #[inline]
    pub(crate) fn identity(&self, index: u32) -> BlockIdentity {
        identity_of(&self.all, index)
    }

    /// The entry of a block.
    #[inline]
    pub(crate) fn find(&self, group: GroupId, hash: SequenceHash) -> Option<u32> {
        self.table.find(&self.table.key(group, hash), &self.all)
    }

    /// The entry that a block has most likely, without a look at the entry itself.
    #[inline]
    pub(crate) fn guess(&self, group: GroupId, hash: SequenceHash) -> Option<u32> {
        self.table.guess(self.table.mix(group, hash))
    }

    /// Prefetches the bucket of a block.
    #[inline]
    pub(crate) fn prefetch_bucket(&self, group: GroupId, hash: SequenceHash) {
        self.table.prefetch(self.table.mix(group, hash));
    }

    /// Prefetches the buckets of up to [`BATCH`] blocks.
    #[inline]
    pub(crate) fn prefetch_buckets(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        for (group, hash) in blocks.take(BATCH) {
            self.prefetch_bucket(group, hash);
        }
    }

    /// The entry of `identity`, made if there is none. The entry of its parent is made with it if
    /// need be: in some groups blocks outlive their parents. `before` is the entry of the block
    /// before it, where the caller knows one. The second answer is the parent's entry where that
    /// has become the parent of a block that is on some tier already.
    #[inline]
    pub(crate) fn find_or_insert(
        &mut self,
        identity: &BlockIdentity,
        before: Option<u32>,
    ) -> (u32, Option<u32>) {
        let BlockIdentity { group, hash, namespace, position, .. } = *identity;
        let key = self.table.key(group, hash);
        let index = match self.table.find(&key, &self.all) {
            Some(index) => index,
            None => self.insert(&key, namespace, position),
        };
        let Some(parent) = identity.parent.filter(|_| self[index].parent.get() == NONE) else {
            return (index, None);
        };
        let is_parent = |&before: &u32| self[before].is_block(group, parent);
        let above = before.filter(is_parent).or_else(|| self.find(group, parent));
        let above = above.unwrap_or_else(|| {
            let key = self.table.key(group, parent);
            self.insert(&key, namespace, position.saturating_sub(1))
        });
        (index, self.link(index, above).then_some(above))
    }

    /// Makes `above` the parent of an entry that has none. Positions that rise along every chain
    /// keep chains free of cycles, whatever the caller names as parent: where they do not, nothing
    /// happens. Whether the entry's block is on some tier already.
    #[inline]
    fn link(&mut self, index: u32, above: u32) -> bool {
        let (entry, parent) = (&self[index], &self[above]);
        if !parent.comes_before(entry.position.get()) {
            return false;
        }
        entry.parent.set(above);
        parent.add_link();
        let is_late = !entry.is_nowhere();
        if is_late {
            self.count_late_child(index, above);
        }
        is_late
    }

    /// The entry is on some tier already, for it came in a batch that contradicted itself.
    #[cold]
    fn count_late_child(&self, index: u32, above: u32) {
        for tier in 0..TIERS {
            if self[index].presence(tier) != Presence::Absent {
                self[above].add_child(tier);
            }
        }
    }

    /// A new entry of a block that has none.
    #[inline]
    fn insert(&mut self, key: &Key, namespace: NamespaceId, position: u32) -> u32 {
        let index = self.take_vacant();
        self[index].begin(key.group, key.hash, namespace, position);
        self.table.insert(key.mixed, index);
        self.used += 1;
        index
    }

    #[inline]
    fn take_vacant(&mut self) -> u32 {
        let first = self.vacant;
        if first != NONE {
            self.vacant = self[first].parent.get();
            return first;
        }
        if self.fresh as usize == self.all.len() {
            self.grow();
        }
        self.fresh += 1;
        self.fresh - 1
    }

    /// Doubles the entries and the table.
    #[cold]
    fn grow(&mut self) {
        let len = self.all.len();
        assert!(
            len <= (NONE / 4) as usize,
            "a registry has at most three times 2^28 slots, and entries for as many again"
        );
        self.all.extend(Entry::many(len));
        self.table = self.table.grown(&self.all);
    }

    /// Something that kept an entry is gone. Where nothing else keeps it, it becomes vacant, and
    /// then its ancestors that it kept. The caller does not use the entry afterwards.
    #[inline]
    pub(crate) fn give_up_unused(&mut self, index: u32) {
        let mut index = index;
        while index != NONE {
            let entry = &self.all[index as usize];
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
                self[parent].drop_link();
            }
            index = parent;
        }
    }
}

/// What is asked of blocks and where they are.
impl Entries {
    /// Whether a block with this identity can exist here. `at` is its index in the caller's batch.
    pub(crate) fn check_identity(&self, at: usize, identity: &BlockIdentity) -> Result<(), RegisterError> {
        let (group, hash) = (identity.group, identity.hash);
        if self.group(group).is_none() {
            let groups = self.groups.len();
            return Err(RegisterError::UnknownGroup { index: at, group, groups });
        }
        if !identity.is_consistent() || identity.parent == Some(hash) {
            return Err(RegisterError::BadIdentity { index: at, hash, position: identity.position });
        }
        Ok(())
    }

    /// Whether the parent that a block needs is on some tier, at the position before.
    pub(crate) fn has_parent(&self, identity: &BlockIdentity) -> bool {
        let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) else { return true };
        self.find(identity.group, parent).is_some_and(|found| {
            let entry = &self[found];
            entry.nearest().is_some() && entry.comes_before(identity.position)
        })
    }

    /// Presence of a block on `tier`, and its slot there.
    pub(crate) fn presence_of(
        &self,
        tier: usize,
        group: GroupId,
        hash: SequenceHash,
    ) -> (Presence, Option<u32>) {
        match self.find(group, hash) {
            Some(found) => (self[found].presence(tier), Some(self[found].slot(tier))),
            None => (Presence::Absent, None),
        }
    }

    /// Whether a copy of a block is on its way to `tier`.
    pub(crate) fn is_arriving(&self, tier: usize, group: GroupId, hash: SequenceHash) -> bool {
        self.presence_of(tier, group, hash).0 == Presence::Arriving
    }

    /// The tiers that an entry's block is on.
    pub(crate) fn tiers_of(&self, index: u32) -> TierMask {
        let entry = &self[index];
        let present = (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present);
        present.map(|tier| Tier::SLOTTED[tier]).collect()
    }

    /// Whether an entry's block is on one of `tiers`, or on its way there.
    pub(crate) fn is_on_any(&self, index: u32, tiers: TierMask) -> bool {
        tiers.iter().any(|tier| self[index].presence(tier.index()) != Presence::Absent)
    }

    /// Whether a block is on `tier`, or on its way there, and something there cannot be found
    /// without it.
    pub(crate) fn is_continued(&self, index: u32, tier: usize) -> bool {
        let entry = &self[index];
        entry.presence(tier) != Presence::Absent && entry.children(tier) > 0 && self.is_full(entry.group())
    }

    /// Collects the entries of a chain's last known block and of its ancestors, up to the first
    /// that another block continues.
    pub(crate) fn branch(&self, group: GroupId, hashes: &[SequenceHash], branch: &mut Vec<u32>) {
        let last = hashes.iter().rev().find_map(|&hash| self.find(group, hash));
        let mut index = last.unwrap_or(NONE);
        // Where the block nearer to the end is the child of this one.
        let mut below = [0; TIERS];
        while index != NONE {
            let entry = &self[index];
            if (0..TIERS).any(|tier| entry.children(tier) > below[tier]) {
                break;
            }
            below = std::array::from_fn(|tier| u32::from(entry.presence(tier) != Presence::Absent));
            branch.push(index);
            index = entry.parent.get();
        }
    }

    /// Copies the blocks of the entries with these indices that are on `tiers`.
    pub(crate) fn copy_blocks(
        &self,
        indices: Range<u32>,
        tiers: &[Tier],
        copied: &mut Vec<(Tier, BlockId, BlockIdentity)>,
    ) {
        for index in indices.filter(|&index| self[index].in_use()) {
            #[cfg(test)]
            crate::probe::block_changes();
            for &tier in tiers.iter().filter(|tier| tier.index() < TIERS) {
                let entry = &self[index];
                if entry.presence(tier.index()) == Presence::Present {
                    copied.push((tier, BlockId(entry.slot(tier.index())), self.identity(index)));
                }
            }
        }
    }
}
