//! Which blocks a removal takes. It looks at all entries, in parts between which other threads have
//! their turn.

use super::entries::Entries;
use super::store::Store;
use crate::entry::NONE;
use crate::selection::BlockSelection;
use crate::tier::TierMask;
use kvbm_plan::{GroupId, SequenceHash};
use std::borrow::Cow;
use std::ops::Range;

/// Entries looked at in one part.
const LOOKED_AT: usize = 1024;

/// A block that was selected; checked again when it is removed, for the lock was open in between.
pub(crate) struct Selected {
    index: u32,
    position: u32,
    group: GroupId,
    hash: SequenceHash,
}

/// What is selected.
pub(crate) enum Choice<'a> {
    By(BlockSelection),
    /// These blocks and everything that continues one of them.
    Subtrees(&'a [(GroupId, SequenceHash)]),
}

impl Choice<'_> {
    /// The blocks at the top of subtrees, where those are chosen.
    fn tops(&self) -> Option<Cow<'_, [(GroupId, SequenceHash)]>> {
        match *self {
            Self::By(BlockSelection::Subtree { group, hash }) => Some(Cow::Owned(vec![(group, hash)])),
            Self::By(_) => None,
            Self::Subtrees(tops) => Some(Cow::Borrowed(tops)),
        }
    }
}

/// For entries that the selection has looked at: whether they are a top of a subtree or below one.
/// The answer of an entry holds a part of the block's tag, so it ends when the entry becomes
/// another block's. The 30 bits are no secret: another block passes for the first once in a
/// thousand million times, or if its hash was chosen for that.
#[derive(Default)]
struct Below {
    answers: Vec<u32>,
}

const KNOWN: u32 = 0b10;
const YES: u32 = 0b01;

impl Below {
    /// With room for so many entries, made without the lock, because that takes time.
    fn of(entries: usize) -> Self {
        Self { answers: vec![0; entries] }
    }

    fn note(&mut self, index: u32, tag: u64, is_below: bool) {
        let index = index as usize;
        if self.answers.len() <= index {
            // The entries doubled meanwhile, under the lock as well.
            #[cfg(test)]
            crate::probe::removal_grows();
            self.answers.resize(index + 1, 0);
        }
        self.answers[index] = part_of(tag) | KNOWN | if is_below { YES } else { 0 };
    }

    fn get(&self, index: u32, tag: u64) -> Option<bool> {
        let answer = *self.answers.get(index as usize)?;
        (answer & !YES == part_of(tag) | KNOWN).then_some(answer & YES != 0)
    }

    /// Notes the blocks at the top of subtrees.
    fn note_tops(&mut self, entries: &Entries, tops: &[(GroupId, SequenceHash)]) {
        for &(group, hash) in tops {
            if let Some(index) = entries.find(group, hash) {
                self.note(index, entries[index].tag(), true);
            }
        }
    }

    /// Whether an entry is one of the noted blocks or continues one, found by walking up until an
    /// answer is known.
    fn contains(&mut self, entries: &Entries, start: u32) -> bool {
        let known = |below: &Self, at: u32| {
            if at == NONE { Some(false) } else { below.get(at, entries[at].tag()) }
        };
        let mut at = start;
        let answer = loop {
            match known(self, at) {
                Some(answer) => break answer,
                None => at = entries[at].parent.get(),
            }
        };
        let mut at = start;
        while known(self, at).is_none() {
            self.note(at, entries[at].tag(), answer);
            at = entries[at].parent.get();
        }
        answer
    }
}

fn part_of(tag: u64) -> u32 {
    tag as u32 & !(KNOWN | YES)
}

impl Store {
    /// Blocks of a choice that are on `tiers`, children before their parents. Blocks that come and
    /// go meanwhile may be among them.
    pub(crate) fn select(&self, choice: &Choice<'_>, tiers: TierMask) -> Vec<Selected> {
        let mut below = Below::default();
        let tops = choice.tops();
        if let Some(tops) = &tops {
            let core = self.lock();
            if let Some(ends) = select_ends(&core.entries, tops, tiers) {
                return ends;
            }
            let entries = core.entries.all().len();
            drop(core);
            below = Below::of(entries);
        }
        let mut core = self.lock();
        below.note_tops(&core.entries, tops.as_deref().unwrap_or_default());
        // Each part has a vector of its own: one for all would be copied under the lock when it
        // grows.
        let (mut found, mut at) = (Vec::new(), 0);
        while at < core.entries.end() {
            let part = at..(at + LOOKED_AT).min(core.entries.end());
            at = part.end;
            let mut selected = Vec::new();
            choice.select_among(&core.entries, part, tiers, &mut below, &mut selected);
            found.push(selected);
            core.let_others_in();
        }
        drop(core);
        let mut found: Vec<Selected> = found.into_iter().flatten().collect();
        sort(&mut found);
        found
    }
}

fn sort(found: &mut [Selected]) {
    found.sort_unstable_by_key(|selected| std::cmp::Reverse(selected.position));
}

impl Selected {
    fn new(entries: &Entries, index: u32) -> Self {
        let entry = &entries[index];
        Self { index, position: entry.position.get(), group: entry.group(), hash: entry.hash() }
    }

    /// The entry of the block, if it is still that block's.
    pub(super) fn still(&self, entries: &Entries) -> Option<u32> {
        let &Self { index, position, group, hash } = self;
        let entry = &entries[index];
        (entry.is_block(group, hash) && entry.position.get() == position).then_some(index)
    }
}

impl Choice<'_> {
    /// Blocks that are on `tiers`, children before their parents, in this hold of the lock.
    pub(super) fn select_now(&self, entries: &Entries, tiers: TierMask) -> Vec<Selected> {
        let (tops, mut below) = (self.tops(), Below::default());
        if let Some(tops) = &tops {
            if let Some(ends) = select_ends(entries, tops, tiers) {
                return ends;
            }
            below.note_tops(entries, tops);
        }
        let mut found = Vec::new();
        self.select_among(entries, 0..entries.end(), tiers, &mut below, &mut found);
        sort(&mut found);
        found
    }

    /// Those among the entries with these indices.
    fn select_among(
        &self,
        entries: &Entries,
        indices: Range<usize>,
        tiers: TierMask,
        below: &mut Below,
        found: &mut Vec<Selected>,
    ) {
        for index in indices.start as u32..indices.end as u32 {
            let entry = &entries[index];
            if !entry.in_use() || !entries.is_on_any(index, tiers) {
                continue;
            }
            let is_chosen = match *self {
                Self::By(BlockSelection::All) => true,
                Self::By(BlockSelection::Group(group)) => entry.group() == group,
                Self::By(BlockSelection::Namespace(namespace)) => entry.namespace() == namespace,
                Self::By(BlockSelection::Subtree { .. }) | Self::Subtrees(_) => {
                    below.contains(entries, index)
                }
            };
            if is_chosen {
                found.push(Selected::new(entries, index));
            }
        }
    }
}

/// The blocks at the top of subtrees on `tiers`, children before their parents, where no block
/// continues one of them.
fn select_ends(
    entries: &Entries,
    tops: &[(GroupId, SequenceHash)],
    tiers: TierMask,
) -> Option<Vec<Selected>> {
    let found: Vec<u32> = tops.iter().filter_map(|&(group, hash)| entries.find(group, hash)).collect();
    let is_end = |&index: &u32| entries[index].links.get() == 0;
    if !found.iter().all(is_end) {
        return None;
    }
    let is_on = |index: &&u32| entries.is_on_any(**index, tiers);
    let mut ends: Vec<_> = found.iter().filter(is_on).map(|&index| Selected::new(entries, index)).collect();
    sort(&mut ends);
    Some(ends)
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use super::super::remove::{Reach, Removal};
    use super::*;
    use crate::entry::tag_of;
    use crate::test_chains::register_as;
    use crate::{EvictionReason, G1, GroupConfig, Registry, RegistryConfig, Removed};
    use kvbm_plan::NamespaceId;

    fn hash(number: u8) -> SequenceHash {
        SequenceHash::from_bytes([number; 16])
    }

    /// What was selected may be gone when it is removed, and another group's block with the same
    /// hash have its entry.
    #[test]
    fn a_block_of_another_group_with_the_same_hash_is_another_block() {
        let groups = vec![GroupConfig::full(16); 2];
        let config = RegistryConfig { groups, ..RegistryConfig::new([8, 0, 0]) };
        let registry = Registry::new(&config).expect("a valid configuration");
        let store = &registry.shared.store;
        drop(register_as::<G1>((NamespaceId(0), GroupId(0)), &registry, &[hash(1)], 0));
        let selected = store.select(&Choice::By(BlockSelection::All), TierMask::ALL);
        registry.remove(BlockSelection::All, TierMask::ALL);
        drop(register_as::<G1>((NamespaceId(0), GroupId(1)), &registry, &[hash(1)], 0));
        let mut core = store.lock();
        assert_eq!(
            core.entries.find(GroupId(1), hash(1)),
            Some(selected[0].index),
            "the entry is used again"
        );
        let mut removal = Removal::new(TierMask::ALL, Reach::Ends, EvictionReason::Removed);
        removal.take(&mut core, &selected[0]);
        assert_eq!(removal.removed, Removed::default());

        let mut below = Below::default();
        below.note(0, tag_of(GroupId(0), hash(1)), true);
        assert_eq!(below.get(0, tag_of(GroupId(0), hash(1))), Some(true));
        assert_eq!(below.get(0, tag_of(GroupId(1), hash(1))), None);
    }
}
