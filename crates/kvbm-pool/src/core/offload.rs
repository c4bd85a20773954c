//! Which blocks to copy down before they would be evicted.

use super::slot::Usage;
use super::{Core, NONE, Pin, Presence};
use kvbm_plan::BlockId;

/// Places of the eviction order looked at in one hold of the lock.
const MAX_LOOKED_AT: u64 = 4096;

impl Core {
    /// Pins up to `out`'s spare room of unpinned blocks of `tier`, oldest first, that are neither on `not_on` nor on
    /// their way there and were not used for `min_idle` iterations. A block comes after its ancestors that are missing
    /// on `not_on`; one of whose ancestors is on neither tier is left out. Continues where the last call stopped.
    pub(crate) fn coldest(
        &mut self,
        tier: usize,
        n: usize,
        not_on: usize,
        min_idle: u64,
        out: &mut Vec<BlockId>,
    ) {
        let (first, end) = (self.tiers[tier].order.first(), self.tiers[tier].order.end());
        let start =
            if (first..end).contains(&self.tiers[tier].cursor) { self.tiers[tier].cursor } else { first };
        let mut missing = Vec::new();
        let mut at = start;
        while at < end && at < start + MAX_LOOKED_AT && out.len() < n {
            if let Some(slot) = self.tiers[tier].order.at(at, &self.tiers[tier].slots)
                && self.is_cold(tier, slot, not_on, min_idle)
            {
                missing.clear();
                let index = self.tiers[tier].slots[slot as usize].entry;
                if self.missing_ancestors(index, tier, not_on, out, &mut missing) {
                    // Topmost first; where room ends, what is in stays a chain.
                    for &slot in missing.iter().rev().take(n - out.len()) {
                        self.pin(tier, slot, Pin::Transfer);
                        out.push(BlockId(slot));
                    }
                }
            }
            at += 1;
        }
        self.tiers[tier].cursor = if at >= end { 0 } else { at };
    }

    fn is_cold(&self, tier: usize, slot: u32, not_on: usize, min_idle: u64) -> bool {
        let state = &self.tiers[tier].slots[slot as usize];
        if state.usage() != Usage::Registered || state.refs() > 0 {
            return false;
        }
        let entry = &self.entries[state.entry];
        let idle = u64::from(self.short_step().wrapping_sub(entry.last_step));
        entry.presence(not_on) == Presence::Absent && idle >= min_idle
    }

    /// Slots of the block and of its ancestors that are missing on `not_on` and not in `chosen`, lowest first. False
    /// where one of them is not on `tier` either.
    fn missing_ancestors(
        &self,
        mut index: u32,
        tier: usize,
        not_on: usize,
        chosen: &[BlockId],
        missing: &mut Vec<u32>,
    ) -> bool {
        let chain = self.is_full(self.entries[index].group);
        while index != NONE {
            let entry = &self.entries[index];
            if entry.presence(not_on) != Presence::Absent {
                return true;
            }
            if entry.presence(tier) != Presence::Present {
                return false;
            }
            let slot = entry.slots[tier];
            if chosen.contains(&BlockId(slot)) {
                return true;
            }
            missing.push(slot);
            if !chain {
                return true;
            }
            index = entry.parent;
        }
        true
    }
}
