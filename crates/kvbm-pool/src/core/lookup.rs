//! Looking up.

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
        let mut core = self.lock_any();
        for &hash in hashes {
            let found;
            (core, found) = core.seek(group, hash);
            let tiers = found.map_or(TierMask::NONE, |index| core.tiers_of(index));
            if tiers.is_empty() {
                return;
            }
            out.push(tiers);
        }
    }

    /// On which tiers a block is.
    pub(crate) fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        let (core, found) = self.lock_any().seek(group, hash);
        found.map_or(TierMask::NONE, |index| core.tiers_of(index))
    }
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
        self.nearest_of(index, tiers).map(|tier| (index, tier))
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
        let store = self.store;
        let useful = &useful[result.count..];
        // Most often nothing is there.
        let first = useful.first().and_then(|&hash| self.find(group, hash))?;
        if !self.holds(first) {
            return Some(store.entries[first].shard());
        }
        self.nearest_of(first, tiers)?;
        // The next part is looked up while the slots of this one come near.
        let mut parts = useful.chunks(LOOKUPS).peekable();
        let (mut found, mut next) = ([NONE; LOOKUPS], [NONE; LOOKUPS]);
        let mut part = parts.next()?;
        self.find_many(group, part, parts.peek().copied().unwrap_or_default(), &mut found);
        loop {
            self.fetch_slots(&found[..part.len()], tiers);
            let is_whole = found[part.len() - 1] != NONE;
            let following = parts.next().filter(|_| is_whole);
            if let Some(following) = following {
                self.find_many(group, following, parts.peek().copied().unwrap_or_default(), &mut next);
            }
            for &index in &found[..part.len()] {
                if index != NONE && !self.holds(index) {
                    return Some(store.entries[index].shard());
                }
                let tier = self.nearest_of(index, tiers)?;
                let entry = &store.entries[index];
                let slot = entry.slot(tier);
                result.namespace = entry.namespace();
                self.pin(tier, slot, Pin::Use);
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
                result.count += 1;
            }
            part = following?;
            std::mem::swap(&mut found, &mut next);
        }
    }

    /// Asks for the slots of entries, for soon.
    #[inline]
    fn fetch_slots(&self, found: &[u32], tiers: TierMask) {
        let store = self.store;
        for &index in found {
            if let Some(tier) = self.nearest_of(index, tiers)
                && let Some(slot) = store.slots[tier].get(store.entries[index].slot(tier) as usize)
            {
                near::prefetch(slot);
            }
        }
    }

    /// The nearest of `tiers` on which an entry's block is.
    #[inline]
    fn nearest_of(&self, index: u32, tiers: TierMask) -> Option<usize> {
        if index == NONE {
            return None;
        }
        let entry = &self.store.entries[index];
        let on =
            |tier: &usize| tiers.contains(Tier::SLOTTED[*tier]) && entry.presence(*tier) == Presence::Present;
        (0..TIERS).find(on)
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
