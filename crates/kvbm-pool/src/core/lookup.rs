//! Looking up.

use super::ahead::Ahead;
use super::entry::PresentOn;
use super::index::LOOKUPS;
use super::{Core, NONE, Pin, Presence, Store};
use crate::near;
use crate::prefix::{ArrivingBlock, PrefixBlock};
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};

/// What a lookup found: `count` blocks from `start` on, all pinned, are what a prefix of `start + count` blocks needs.
#[derive(Default)]
pub(crate) struct Found {
    /// Namespace of the blocks, where there is one.
    pub namespace: NamespaceId,
    pub start: usize,
    pub count: usize,
}

impl Store {
    /// The longest useful prefix on `tiers`, each block pinned on its nearest tier and given to `out`, which has room. Then
    /// what is on its way behind it, where it is asked for.
    pub(crate) fn match_prefix(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        mut out: impl FnMut(PrefixBlock),
        arriving: Option<&mut Vec<ArrivingBlock>>,
    ) -> Found {
        // A Full prefix is found from the front on, in one shard after the other: what is pinned stays.
        let walks = !self.is_whole() && self.is_full(group);
        let mut core = if walks { self.lock_any() } else { self.lock_all() };
        let range = core.useful_range(group, hashes, tiers);
        let mut found = Found { start: range.start, ..Found::default() };
        let useful = &hashes[range];
        let mut stops = 0;
        while let Some(shard) = core.match_part(group, useful, tiers, &mut out, &mut found) {
            // Entries that change at every look: no end of it can be foretold, but while nothing changes.
            stops += 1;
            if stops > MOST_STOPS + found.count {
                drop(core);
                core = self.lock_all();
            } else {
                core = core.go(shard);
            }
        }
        if let Some(arriving) = arriving {
            self.arriving_after(core, group, hashes, found.start + found.count, arriving);
        }
        found
    }

    /// Blocks from `hashes[from]` on that are on their way to some tier, as far as every block is on a tier or on
    /// its way.
    fn arriving_after(
        &self,
        mut core: Core<'_>,
        group: GroupId,
        hashes: &[SequenceHash],
        from: usize,
        out: &mut Vec<ArrivingBlock>,
    ) {
        for (index, &hash) in hashes.iter().enumerate().skip(from) {
            let found;
            (core, found) = core.seek(group, hash);
            let Some(found) = found else { return };
            let entry = &self.entries[found];
            if entry.nearest().is_some() {
                continue;
            }
            let Some(tier) = (0..TIERS).find(|&tier| entry.presence(tier) == Presence::Arriving) else {
                return;
            };
            let ticket = self.slots[tier][entry.slot(tier) as usize].ticket();
            out.push(ArrivingBlock { index, tier: Tier::SLOTTED[tier], ticket });
        }
    }

    /// On which tiers blocks are, up to the first that is on none.
    pub(crate) fn tiers_of_each(&self, group: GroupId, hashes: &[SequenceHash], out: &mut Vec<TierMask>) {
        let Some(&first) = hashes.first() else { return };
        // Most often nothing is there.
        let (mut core, Some(_)) = self.lock_any().seek(group, first) else { return };
        let (mut ahead, mut hashes) = (Ahead::new(&core, group, hashes.chunks(LOOKUPS)), hashes.iter());
        while let Some(found) = ahead.next(&core) {
            for (&index, &hash) in found.iter().zip(&mut hashes) {
                if index == NONE {
                    return;
                }
                let mut there = Some(index);
                if !core.holds(index) || !self.entries[index].is_block(group, hash) {
                    (core, there) = core.seek(group, hash);
                }
                let tiers = there.map_or(TierMask::NONE, |index| core.tiers_of(index));
                if tiers.is_empty() {
                    return;
                }
                out.push(tiers);
            }
        }
    }

    /// On which tiers a block is.
    pub(crate) fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        let (core, found) = self.lock_any().seek(group, hash);
        found.map_or(TierMask::NONE, |index| core.tiers_of(index))
    }

    /// In which slot of `tier` a block is.
    pub(crate) fn slot_of(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> Option<BlockId> {
        let (core, found) = self.lock_any().seek(group, hash);
        let there = found.filter(|&index| core.tiers_of(index).contains(tier));
        there.map(|index| BlockId(core.store.entries[index].slot(tier.index())))
    }
}

/// What a match takes of a part of its blocks.
#[derive(Default)]
struct Useful {
    slots: [u32; LOOKUPS],
    tiers: [u8; LOOKUPS],
    count: usize,
    namespace: Option<NamespaceId>,
    then: Then,
}

/// How a match goes on behind a part.
#[derive(Clone, Copy, Default)]
enum Then {
    /// With the next part, if there is one.
    #[default]
    Part,
    /// In another shard.
    Shard(usize),
    Nothing,
}

/// Times that a walk may change its shard without having found a block.
const MOST_STOPS: usize = 8;

impl Core<'_> {
    #[inline]
    pub(crate) fn find_present(
        &self,
        group: GroupId,
        hash: SequenceHash,
        tiers: TierMask,
    ) -> Option<(u32, usize)> {
        let index = self.find(group, hash)?;
        self.store.entries[index].nearest_of(PresentOn::some_of(tiers)).map(|tier| (index, tier))
    }

    /// Goes on with a match as far as the blocks belong to shards that are held. Returns the shard of the next one, if there
    /// may be more.
    fn match_part(
        &mut self,
        group: GroupId,
        useful: &[SequenceHash],
        tiers: TierMask,
        out: &mut impl FnMut(PrefixBlock),
        result: &mut Found,
    ) -> Option<usize> {
        let useful = &useful[result.count..];
        // Most often nothing is there.
        let first = useful.first().and_then(|&hash| self.find(group, hash))?;
        if !self.holds(first) {
            return Some(self.store.entries[first].shard());
        }
        let tiers = PresentOn::some_of(tiers);
        self.store.entries[first].nearest_of(tiers)?;
        let mut ahead = Ahead::new(self, group, useful.chunks(LOOKUPS));
        let mut part = self.useful_of(ahead.next(self)?, tiers);
        loop {
            // The next part is looked up while the slots of this one come near.
            let following = match part.then {
                Then::Part => ahead.next(self).map(|found| self.useful_of(found, tiers)),
                Then::Nothing | Then::Shard(_) => None,
            };
            for (&slot, &tier) in part.slots.iter().zip(&part.tiers).take(part.count) {
                let tier = usize::from(tier);
                if !self.store.slots[tier][slot as usize].add_another_ref() {
                    self.pin(tier, slot, Pin::Use);
                }
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
            }
            result.count += part.count;
            result.namespace = part.namespace.unwrap_or(result.namespace);
            if let Then::Shard(shard) = part.then {
                return Some(shard);
            }
            part = following?;
        }
    }

    /// The slots of the blocks of these entries on their nearest tiers, up to the first that is on none of `tiers` or not held.
    /// They are asked for, for soon.
    #[inline]
    fn useful_of(&self, found: &[u32], tiers: PresentOn) -> Useful {
        let store = self.store;
        let own = if self.holds_all() { None } else { Some(self.number()) };
        let mut useful = Useful::default();
        for ((&index, slot), on) in found.iter().zip(&mut useful.slots).zip(&mut useful.tiers) {
            if index == NONE {
                useful.then = Then::Nothing;
                break;
            }
            let entry = &store.entries[index];
            let shard = entry.shard();
            if own.is_some_and(|own| own != shard) {
                useful.then = Then::Shard(shard);
                break;
            }
            let Some(tier) = entry.nearest_of(tiers) else {
                useful.then = Then::Nothing;
                break;
            };
            (*slot, *on) = (entry.slot(tier), tier as u8);
            near::prefetch(&store.slots[tier][*slot as usize]);
            useful.count += 1;
        }
        let last = useful.count.checked_sub(1).map(|last| found[last]);
        useful.namespace = last.map(|index| store.entries[index].namespace());
        useful
    }

    /// Which blocks the longest useful prefix consists of. A Full prefix is taken from the front as far as it goes,
    /// so all hashes are candidates; the other kinds look for the longest prefix whose needed end is there.
    fn useful_range(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
    ) -> std::ops::Range<usize> {
        let Some(config) = self.store.group(group) else { return 0..0 };
        let needed = match config.kind {
            GroupKind::Full => return 0..hashes.len(),
            GroupKind::SlidingWindow(tokens) => tokens.div_ceil(config.tokens_per_block) as usize,
            GroupKind::State => 1,
        };
        let mut run = 0;
        for (index, &hash) in hashes.iter().enumerate().rev() {
            run = if self.find_present(group, hash, tiers).is_some() { run + 1 } else { 0 };
            if run > 0 && (run == needed || index == 0) {
                return index..index + run;
            }
        }
        0..0
    }

    /// On which tiers an entry's block is.
    pub(crate) fn tiers_of(&self, index: u32) -> TierMask {
        let entry = &self.store.entries[index];
        let present = (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present);
        present.map(|tier| Tier::SLOTTED[tier]).collect()
    }
}
