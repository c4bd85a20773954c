//! Which blocks a removal takes. It looks at all entries, in parts between which other threads have
//! their turn.

use super::state::Core;
use super::store::Store;
use crate::entry::{NONE, Presence};
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
            if let Some(ends) = core.select_ends(tops, tiers) {
                return ends;
            }
            let entries = core.entries.len();
            drop(core);
            below = Below::of(entries);
        }
        let mut core = self.lock();
        core.note_tops(tops.as_deref().unwrap_or_default(), &mut below);
        // Each part has a vector of its own: one for all would be copied under the lock when it
        // grows.
        let (mut found, mut at) = (Vec::new(), 0);
        while at < core.end() {
            let part = at..(at + LOOKED_AT).min(core.end());
            at = part.end;
            let mut selected = Vec::new();
            core.select_among(part, choice, tiers, &mut below, &mut selected);
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

impl Core {
    /// Blocks of a choice that are on `tiers`, children before their parents, in this hold of the
    /// lock.
    pub(crate) fn select_now(&self, choice: &Choice<'_>, tiers: TierMask) -> Vec<Selected> {
        let (tops, mut below) = (choice.tops(), Below::default());
        if let Some(tops) = &tops {
            if let Some(ends) = self.select_ends(tops, tiers) {
                return ends;
            }
            self.note_tops(tops, &mut below);
        }
        let mut found = Vec::new();
        self.select_among(0..self.end(), choice, tiers, &mut below, &mut found);
        sort(&mut found);
        found
    }

    /// The blocks at the top of subtrees on `tiers`, children before their parents, where no block
    /// continues one of them.
    fn select_ends(&self, tops: &[(GroupId, SequenceHash)], tiers: TierMask) -> Option<Vec<Selected>> {
        let found: Vec<u32> = tops.iter().filter_map(|&(group, hash)| self.find(group, hash)).collect();
        let is_end = |&index: &u32| self.entry(index).links.get() == 0;
        if !found.iter().all(is_end) {
            return None;
        }
        let mut ends: Vec<Selected> = found
            .iter()
            .filter(|&&index| self.is_on_any(index, tiers))
            .map(|&index| self.selected(index))
            .collect();
        sort(&mut ends);
        Some(ends)
    }

    /// Notes the blocks at the top of subtrees.
    fn note_tops(&self, tops: &[(GroupId, SequenceHash)], below: &mut Below) {
        for &(group, hash) in tops {
            if let Some(index) = self.find(group, hash) {
                below.note(index, self.entry(index).tag(), true);
            }
        }
    }

    fn selected(&self, index: u32) -> Selected {
        let entry = self.entry(index);
        Selected { index, position: entry.position.get(), group: entry.group(), hash: entry.hash() }
    }

    /// The entry of a block that was selected, if it is still that block's.
    pub(super) fn still(&self, selected: &Selected) -> Option<u32> {
        let &Selected { index, position, group, hash } = selected;
        let entry = self.entry(index);
        (entry.is_block(group, hash) && entry.position.get() == position).then_some(index)
    }

    /// Those of a choice among the entries with these indices.
    fn select_among(
        &self,
        indices: Range<usize>,
        choice: &Choice<'_>,
        tiers: TierMask,
        below: &mut Below,
        found: &mut Vec<Selected>,
    ) {
        for index in indices.start as u32..indices.end as u32 {
            let entry = self.entry(index);
            if !entry.in_use() || !self.is_on_any(index, tiers) {
                continue;
            }
            let is_chosen = match *choice {
                Choice::By(BlockSelection::All) => true,
                Choice::By(BlockSelection::Group(group)) => entry.group() == group,
                Choice::By(BlockSelection::Namespace(namespace)) => entry.namespace() == namespace,
                Choice::By(BlockSelection::Subtree { .. }) | Choice::Subtrees(_) => {
                    self.is_below(index, below)
                }
            };
            if is_chosen {
                found.push(self.selected(index));
            }
        }
    }

    fn is_on_any(&self, index: u32, tiers: TierMask) -> bool {
        let entry = self.entry(index);
        tiers.iter().any(|tier| entry.presence(tier.index()) != Presence::Absent)
    }

    /// Whether an entry is one of the blocks noted in `below` or continues one, found by walking up
    /// until an answer is known.
    fn is_below(&self, start: u32, below: &mut Below) -> bool {
        let known = |below: &Below, at: u32| {
            if at == NONE { Some(false) } else { below.get(at, self.entry(at).tag()) }
        };
        let mut at = start;
        let answer = loop {
            match known(below, at) {
                Some(answer) => break answer,
                None => at = self.entry(at).parent.get(),
            }
        };
        let mut at = start;
        while known(below, at).is_none() {
            below.note(at, self.entry(at).tag(), answer);
            at = self.entry(at).parent.get();
        }
        answer
    }
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use super::super::remove::Reach;
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
        assert_eq!(core.find(GroupId(1), hash(1)), Some(selected[0].index), "the entry is used again");
        let mut removed = Removed::default();
        core.remove(&selected[0], TierMask::ALL, Reach::All, EvictionReason::Removed, &mut removed);
        assert_eq!(removed, Removed::default());

        let mut below = Below::default();
        below.note(0, tag_of(GroupId(0), hash(1)), true);
        assert_eq!(below.get(0, tag_of(GroupId(0), hash(1))), Some(true));
        assert_eq!(below.get(0, tag_of(GroupId(1), hash(1))), None);
    }
}
