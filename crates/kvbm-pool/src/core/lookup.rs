//! Which blocks of a sequence are on the tiers.

use super::batch_lookup::BatchLookup;
use super::entries::{BATCH, Entries};
use super::registered::Reference;
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

/// A lookup of the blocks of a sequence in one group, on some tiers.
#[derive(Clone, Copy)]
pub(crate) struct PrefixLookup<'h> {
    group: GroupId,
    hashes: &'h [SequenceHash],
    tiers: PresentOn,
}

impl<'h> PrefixLookup<'h> {
    pub(crate) fn new(group: GroupId, hashes: &'h [SequenceHash], tiers: TierMask) -> Self {
        Self { group, hashes, tiers: PresentOn::some_of(tiers) }
    }

    /// The longest useful prefix: pins each block on its nearest tier and passes it to `out`, which
    /// has room.
    pub(crate) fn pin(self, core: &mut Core, mut out: impl FnMut(PrefixBlock)) -> FoundPrefix {
        match core.entries.group(self.group).and_then(GroupConfig::blocks_needed) {
            None => self.pin_full(core, &mut out),
            Some(needed) => self.pin_end(core, needed, &mut out),
        }
    }

    /// Pins the blocks from the first on that are there, whatever the kind of the group.
    pub(crate) fn pin_run(self, core: &mut Core, mut out: impl FnMut(PrefixBlock)) -> FoundPrefix {
        self.pin_full(core, &mut out)
    }

    /// A Full prefix: every block from the first on.
    fn pin_full(self, core: &mut Core, out: &mut impl FnMut(PrefixBlock)) -> FoundPrefix {
        let Self { group, hashes, tiers } = self;
        let mut result = FoundPrefix::default();
        // Most often not even the first block is there: then nothing is prefetched for it.
        let first = hashes.first().and_then(|&hash| core.entries.find(group, hash));
        if first.and_then(|index| core.entry(index).nearest_of(tiers)).is_none() {
            return result;
        }
        let mut lookup = BatchLookup::new(&core.entries, group, hashes);
        let mut batch = NearestSlots::default();
        let mut more = lookup.next(&core.entries).is_some_and(|found| batch.fill(core, found, tiers));
        loop {
            // The next batch is looked up while the slots of this one are on their way.
            let mut following = NearestSlots::default();
            let goes_on =
                more && lookup.next(&core.entries).is_some_and(|found| following.fill(core, found, tiers));
            for (&slot, &tier) in batch.slots.iter().zip(&batch.tiers).take(batch.count) {
                let tier = usize::from(tier);
                if !core.slot(tier, slot).add_another_ref() {
                    core.add_reference(tier, slot, Reference::Use);
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
    fn pin_end(self, core: &mut Core, needed: usize, out: &mut impl FnMut(PrefixBlock)) -> FoundPrefix {
        let Self { group, hashes, tiers } = self;
        let mut found = std::mem::take(&mut core.touched);
        found.clear();
        let mut result = FoundPrefix::default();
        for (index, &hash) in hashes.iter().enumerate().rev() {
            let entry = core.entries.find(group, hash);
            match entry.filter(|&entry| core.entry(entry).nearest_of(tiers).is_some()) {
                Some(entry) => found.push(entry),
                None => found.clear(),
            }
            if !found.is_empty() && (found.len() == needed || index == 0) {
                result = FoundPrefix { start: index, count: found.len(), ..result };
                break;
            }
        }
        for &index in found[..result.count].iter().rev() {
            let entry = core.entry(index);
            result.namespace = entry.namespace();
            if let Some(tier) = entry.nearest_of(tiers) {
                let slot = entry.slot(tier);
                core.add_reference(tier, slot, Reference::Use);
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
            }
        }
        core.touched = found;
        result
    }

    /// Blocks from `hashes[from]` on that are on their way to some tier, up to the first block that
    /// is neither on a tier nor on its way.
    pub(crate) fn arriving_after(self, core: &Core, from: usize) -> Vec<ArrivingBlock> {
        let mut arriving = Vec::new();
        for (index, &hash) in self.hashes.iter().enumerate().skip(from) {
            let Some(found) = core.entries.find(self.group, hash) else { break };
            let entry = core.entry(found);
            if entry.nearest().is_some() {
                continue;
            }
            let Some(tier) = (0..TIERS).find(|&tier| entry.presence(tier) == Presence::Arriving) else {
                break;
            };
            let ticket = core.slot(tier, entry.slot(tier)).ticket();
            arriving.push(ArrivingBlock { index, tier: Tier::SLOTTED[tier], ticket });
        }
        arriving
    }
}

/// The tiers of each block, up to the first block that is on none.
pub(crate) fn tiers_of_prefix(
    entries: &Entries,
    group: GroupId,
    hashes: &[SequenceHash],
    out: &mut Vec<TierMask>,
) {
    // Most often not even the first block is there.
    if hashes.first().is_none_or(|&hash| entries.find(group, hash).is_none()) {
        return;
    }
    let mut lookup = BatchLookup::new(entries, group, hashes);
    while let Some(found) = lookup.next(entries) {
        for &index in found {
            let tiers = if index == NONE { TierMask::NONE } else { entries.tiers_of(index) };
            if tiers.is_empty() {
                return;
            }
            out.push(tiers);
        }
    }
}

/// The tiers of each block, one for each of `hashes`.
pub(crate) fn tiers_of_each(
    entries: &Entries,
    group: GroupId,
    hashes: &[SequenceHash],
    out: &mut Vec<TierMask>,
) {
    let mut lookup = BatchLookup::new(entries, group, hashes);
    while let Some(found) = lookup.next(entries) {
        let tiers = |&index: &u32| if index == NONE { TierMask::NONE } else { entries.tiers_of(index) };
        out.extend(found.iter().map(tiers));
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
