//! Which blocks of a sequence are on the tiers.

use super::batch_lookup::BatchLookup;
use super::entries::BATCH;
use super::reference::Reference;
use super::state::Core;
use crate::config::GroupConfig;
use crate::entry::{NONE, Presence, PresentOn};
use crate::found::{ArrivingBlock, PrefixBlock};
use crate::prefetch::prefetch;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, GroupId, NamespaceId, SequenceHash, Tier};

/// What a lookup found: a prefix of `start + count` blocks needs `count` blocks from `start` on,
/// all pinned.
#[derive(Default)]
pub(crate) struct FoundPrefix {
    /// Namespace of the blocks, where there is one.
    pub namespace: NamespaceId,
    pub start: usize,
    pub count: usize,
}

impl Core {
    /// The longest useful prefix on `tiers`: pins each block on its nearest tier and passes it to
    /// `out`, which has room. Then the blocks that are on their way behind it, where they are asked
    /// for.
    pub(crate) fn match_prefix(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        mut out: impl FnMut(PrefixBlock),
        arriving: Option<&mut Vec<ArrivingBlock>>,
    ) -> FoundPrefix {
        let tiers = PresentOn::some_of(tiers);
        let needed = self.group(group).and_then(GroupConfig::blocks_needed);
        let found = match needed {
            None => self.match_full(group, hashes, tiers, &mut out),
            Some(needed) => self.match_end(group, hashes, tiers, needed, &mut out),
        };
        if let Some(arriving) = arriving {
            self.arriving_after(group, hashes, found.start + found.count, arriving);
        }
        found
    }

    /// A Full prefix: every block from the first on.
    fn match_full(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: PresentOn,
        out: &mut impl FnMut(PrefixBlock),
    ) -> FoundPrefix {
        let mut result = FoundPrefix::default();
        // Most often not even the first block is there: then nothing is prefetched for it.
        let first = hashes.first().and_then(|&hash| self.find(group, hash));
        if first.and_then(|index| self.entry(index).nearest_of(tiers)).is_none() {
            return result;
        }
        let mut lookup = BatchLookup::new(self, group, hashes);
        let mut batch = NearestSlots::default();
        let mut more = lookup.next(self).is_some_and(|found| batch.fill(self, found, tiers));
        loop {
            // The next batch is looked up while the slots of this one are on their way.
            let mut following = NearestSlots::default();
            let goes_on = more && lookup.next(self).is_some_and(|found| following.fill(self, found, tiers));
            for (&slot, &tier) in batch.slots.iter().zip(&batch.tiers).take(batch.count) {
                let tier = usize::from(tier);
                if !self.slot(tier, slot).add_another_ref() {
                    self.add_reference(tier, slot, Reference::Use);
                }
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
            }
            result.count += batch.count;
            result.namespace = batch.namespace.unwrap_or(result.namespace);
            if following.count == 0 {
                return result;
            }
            (batch, more) = (following, goes_on);
        }
    }

    /// The longest prefix whose last `needed` blocks are there, or all where it is shorter.
    fn match_end(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: PresentOn,
        needed: usize,
        out: &mut impl FnMut(PrefixBlock),
    ) -> FoundPrefix {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        let mut result = FoundPrefix::default();
        for (index, &hash) in hashes.iter().enumerate().rev() {
            let entry = self.find(group, hash).filter(|&entry| self.entry(entry).nearest_of(tiers).is_some());
            match entry {
                Some(entry) => found.push(entry),
                None => found.clear(),
            }
            if !found.is_empty() && (found.len() == needed || index == 0) {
                result = FoundPrefix { start: index, count: found.len(), ..result };
                break;
            }
        }
        for &index in found[..result.count].iter().rev() {
            let entry = self.entry(index);
            result.namespace = entry.namespace();
            if let Some(tier) = entry.nearest_of(tiers) {
                let slot = entry.slot(tier);
                self.add_reference(tier, slot, Reference::Use);
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
            }
        }
        self.touched = found;
        result
    }

    /// Blocks from `hashes[from]` on that are on their way to some tier, up to the first block that
    /// is neither on a tier nor on its way.
    fn arriving_after(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        from: usize,
        out: &mut Vec<ArrivingBlock>,
    ) {
        for (index, &hash) in hashes.iter().enumerate().skip(from) {
            let Some(found) = self.find(group, hash) else { return };
            let entry = self.entry(found);
            if entry.nearest().is_some() {
                continue;
            }
            let Some(tier) = (0..TIERS).find(|&tier| entry.presence(tier) == Presence::Arriving) else {
                return;
            };
            let ticket = self.slot(tier, entry.slot(tier)).ticket();
            out.push(ArrivingBlock { index, tier: Tier::SLOTTED[tier], ticket });
        }
    }

    /// Whether a copy of the block is on its way to `tier`.
    pub(crate) fn is_arriving(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> bool {
        let slotted = Tier::SLOTTED.iter().position(|&slotted| slotted == tier);
        let found = slotted.zip(self.find(group, hash));
        found.is_some_and(|(tier, index)| self.entry(index).presence(tier) == Presence::Arriving)
    }

    /// The tiers of each block, up to the first block that is on none.
    pub(crate) fn tiers_of_each(&self, group: GroupId, hashes: &[SequenceHash], out: &mut Vec<TierMask>) {
        // Most often not even the first block is there.
        if hashes.first().is_none_or(|&hash| self.find(group, hash).is_none()) {
            return;
        }
        let mut lookup = BatchLookup::new(self, group, hashes);
        while let Some(found) = lookup.next(self) {
            for &index in found {
                let tiers = if index == NONE { TierMask::NONE } else { self.tiers_of(index) };
                if tiers.is_empty() {
                    return;
                }
                out.push(tiers);
            }
        }
    }

    /// The tiers that an entry's block is on.
    pub(crate) fn tiers_of(&self, index: u32) -> TierMask {
        let entry = self.entry(index);
        let present = (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present);
        present.map(|tier| Tier::SLOTTED[tier]).collect()
    }
}

/// The slots of a batch of blocks on their nearest tiers.
#[derive(Default)]
struct NearestSlots {
    slots: [u32; BATCH],
    tiers: [u8; BATCH],
    count: usize,
    namespace: Option<NamespaceId>,
}

impl NearestSlots {
    /// Takes the slots of these entries up to the first that is on none of `tiers`, and prefetches
    /// them. Returns whether all of them are there.
    #[inline]
    fn fill(&mut self, core: &Core, found: &[u32], tiers: PresentOn) -> bool {
        for &index in found {
            if index == NONE {
                return false;
            }
            let entry = core.entry(index);
            let Some(tier) = entry.nearest_of(tiers) else { return false };
            let slot = entry.slot(tier);
            prefetch(core.slot(tier, slot));
            (self.slots[self.count], self.tiers[self.count]) = (slot, tier as u8);
            self.count += 1;
            self.namespace = Some(entry.namespace());
        }
        true
    }
}
