//! Looking up, pinning and touching.

use super::entry::LOOKUPS;
use super::slot::Usage;
use super::{Core, NONE, Pin, Presence};
use crate::prefix::{ArrivingBlock, PrefixBlock};
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};

/// What a lookup found: `count` blocks from `start` on, all pinned, are what a prefix of `start + count` blocks needs.
pub(crate) struct Found {
    /// Namespace of the blocks, where there is one.
    pub namespace: NamespaceId,
    pub start: usize,
    pub count: usize,
}

impl Core {
    #[inline]
    pub(crate) fn find_present(
        &self,
        group: GroupId,
        hash: SequenceHash,
        tiers: TierMask,
    ) -> Option<(u32, usize)> {
        let index = self.entries.find(group, hash)?;
        self.nearest_of(index, tiers).map(|tier| (index, tier))
    }

    /// The longest useful prefix on `tiers`, each block pinned on its nearest tier and given to `out`, which has room.
    pub(crate) fn match_prefix(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        mut out: impl FnMut(PrefixBlock),
    ) -> Found {
        let range = self.useful_range(group, hashes, tiers);
        let start = range.start;
        let mut namespace = NamespaceId::default();
        let mut count = 0;
        let useful = &hashes[range];
        // Most often nothing is there.
        let first = useful.first().and_then(|&hash| self.find_present(group, hash, tiers));
        let useful = if first.is_some() { useful } else { &[] };
        let mut found = [NONE; LOOKUPS];
        let mut parts = useful.chunks(LOOKUPS).peekable();
        'all: while let Some(part) = parts.next() {
            self.entries.find_many(group, part, parts.peek().copied().unwrap_or_default(), &mut found);
            self.fetch_slots(&found[..part.len()], tiers);
            for &index in &found[..part.len()] {
                let Some(tier) = self.nearest_of(index, tiers) else { break 'all };
                let entry = &self.entries[index];
                let slot = entry.slots[tier];
                namespace = entry.namespace;
                self.pin(tier, slot, Pin::Use);
                out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
                count += 1;
            }
        }
        Found { namespace, start, count }
    }

    /// Reads the slots of entries for no other reason than to have them near.
    #[inline]
    fn fetch_slots(&self, found: &[u32], tiers: TierMask) {
        let read = |all: u32, &index: &u32| match self.nearest_of(index, tiers) {
            Some(tier) => all | self.tiers[tier].slots[self.entries[index].slots[tier] as usize].entry,
            None => all,
        };
        std::hint::black_box(found.iter().fold(0, read));
    }

    /// The nearest of `tiers` on which an entry's block is.
    #[inline]
    fn nearest_of(&self, index: u32, tiers: TierMask) -> Option<usize> {
        if index == NONE {
            return None;
        }
        let entry = &self.entries[index];
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
        let Some(config) = self.group(group) else { return 0..0 };
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

    /// Blocks from `hashes[from]` on that are on their way to some tier, as far as every block is on a tier or on
    /// its way.
    pub(crate) fn arriving_after(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        from: usize,
        out: &mut Vec<ArrivingBlock>,
    ) {
        for (index, &hash) in hashes.iter().enumerate().skip(from) {
            let Some(found) = self.entries.find(group, hash) else { return };
            let entry = &self.entries[found];
            if entry.nearest().is_some() {
                continue;
            }
            let Some(tier) = (0..TIERS).find(|&tier| entry.presence(tier) == Presence::Arriving) else {
                return;
            };
            let ticket = self.tiers[tier].slots[entry.slots[tier] as usize].ticket();
            out.push(ArrivingBlock { index, tier: Tier::SLOTTED[tier], ticket });
        }
    }

    /// On which tiers a block is.
    pub(crate) fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        let Some(index) = self.entries.find(group, hash) else { return TierMask::NONE };
        let entry = &self.entries[index];
        let present = (0..TIERS).filter(|&tier| entry.presence(tier) == Presence::Present);
        present.map(|tier| Tier::SLOTTED[tier]).collect()
    }

    /// A use of these blocks: tail to head, on every tier that holds them.
    pub(crate) fn touch(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        let mut entries = [NONE; LOOKUPS];
        let mut parts = hashes.chunks(LOOKUPS).peekable();
        while let Some(part) = parts.next() {
            self.entries.find_many(group, part, parts.peek().copied().unwrap_or_default(), &mut entries);
            found.extend(entries[..part.len()].iter().map(|&index| self.used_entry(index)));
        }
        self.touch_entries(&found);
        self.touched = found;
    }

    /// The same for pinned blocks of a tier.
    pub(crate) fn touch_pinned(&mut self, tier: usize, blocks: &[BlockId]) {
        let mut found = std::mem::take(&mut self.touched);
        found.clear();
        let entry = |block: &BlockId| self.used_entry(self.tiers[tier].slots[block.index()].entry);
        found.extend(blocks.iter().map(entry));
        self.touch_entries(&found);
        self.touched = found;
    }

    /// An entry that is more than a name in a chain.
    fn used_entry(&self, index: u32) -> u32 {
        if index == NONE || self.entries[index].is_nowhere() { NONE } else { index }
    }

    /// Blocks of one request, in order; `NONE` where there is none.
    fn touch_entries(&mut self, found: &[u32]) {
        self.note_use(found);
        for &index in found.iter().rev().filter(|&&index| index != NONE) {
            self.touch_entry(index);
        }
    }

    #[inline]
    fn touch_entry(&mut self, index: u32) {
        let step = self.short_step();
        let entry = &mut self.entries[index];
        entry.last_step = step;
        for tier in 0..TIERS {
            if entry.presence(tier) == Presence::Present {
                let tier_core = &mut self.tiers[tier];
                tier_core.order.push_young(entry.slots[tier], &mut tier_core.slots);
            }
        }
        self.refresh_prospects(index);
    }

    /// One more user of a Registered slot.
    #[inline]
    pub(crate) fn pin(&mut self, tier: usize, slot: u32, pin: Pin) {
        if self.tiers[tier].slots[slot as usize].is_listed() {
            self.unlist(tier, slot);
        }
        let tier_core = &mut self.tiers[tier];
        let state = &mut tier_core.slots[slot as usize];
        if state.refs() == 0 && state.usage() == Usage::Registered {
            tier_core.inactive -= 1;
            tier_core.active += 1;
        }
        state.add_ref();
        if pin == Pin::Transfer {
            tier_core.transfer_pins += 1;
        }
    }

    /// One more user of each of `blocks`, which the caller already pins.
    pub(crate) fn pin_again(&mut self, tier: usize, blocks: &[BlockId], pin: Pin) {
        for block in blocks {
            self.pin(tier, block.0, pin);
        }
    }

    /// One user less of each of `blocks`, the last block first, so that the first is the youngest.
    pub(crate) fn unpin_all(&mut self, tier: usize, blocks: &[BlockId], pin: Pin) {
        for block in blocks.iter().rev() {
            self.unpin(tier, block.0, pin);
        }
    }

    /// One user less.
    #[inline]
    pub(crate) fn unpin(&mut self, tier: usize, slot: u32, pin: Pin) {
        let step = self.short_step();
        let tier_core = &mut self.tiers[tier];
        if pin == Pin::Transfer {
            tier_core.transfer_pins -= 1;
        }
        let state = &mut tier_core.slots[slot as usize];
        let left = state.drop_ref();
        let (usage, index, placed) = (state.usage(), state.entry, state.place != NONE);
        if usage != Usage::Registered {
            if left == 0 {
                self.last_user_of_removed(tier, slot);
            }
            return;
        }
        let entry = &mut self.entries[index];
        if entry.slots[tier] != slot {
            if left == 0 {
                self.drop_duplicate(tier, slot);
            }
            return;
        }
        if left == 0 {
            tier_core.active -= 1;
            tier_core.inactive += 1;
        }
        match pin {
            Pin::Use => {
                entry.last_step = step;
                tier_core.order.push_young(slot, &mut tier_core.slots);
            }
            // It came up for eviction while it was copied: it is still among the oldest.
            Pin::Transfer if left == 0 && !placed => tier_core.order.push_old(slot, &mut tier_core.slots),
            Pin::Transfer => {}
        }
        if left == 0 {
            self.entries[index].take_fresh();
            self.update_evictable(index, tier);
        }
    }

    /// The last user of a slot that is no longer in the registry is gone.
    fn last_user_of_removed(&mut self, tier: usize, slot: u32) {
        let tier_core = &mut self.tiers[tier];
        let state = &mut tier_core.slots[slot as usize];
        let index = state.entry;
        match state.usage() {
            Usage::Detached => {
                tier_core.detached -= 1;
                tier_core.put_free(slot);
            }
            Usage::Tainted => {
                tier_core.detached -= 1;
                tier_core.retire(slot);
            }
            _ => return,
        }
        self.entries[index].links -= 1;
        self.entries.release_unused(index);
    }

    /// Identities of pinned blocks.
    pub(crate) fn identities(&self, tier: usize, blocks: &[BlockId], out: &mut Vec<BlockIdentity>) {
        out.extend(
            blocks.iter().map(|block| self.entries.identity(self.tiers[tier].slots[block.index()].entry)),
        );
    }
}
