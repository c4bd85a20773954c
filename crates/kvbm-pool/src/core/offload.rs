//! Which blocks to copy down before they would be evicted.

use super::slot::Usage;
use super::{Core, NONE, Pin, Presence};
use kvbm_plan::BlockId;

/// Places of the eviction order looked at in one hold of the lock.
const MAX_LOOKED_AT: usize = 4096;

impl Core {
    /// Pins up to `out`'s spare room of unpinned blocks of `tier`, oldest first, that are neither on `not_on` nor on
    /// their way there and were not used for `min_idle` iterations. A block comes after its ancestors that are missing
    /// on `not_on`; one of whose ancestors is on neither tier is left out. Starts where the
    /// last call stopped.
    pub(crate) fn coldest(
        &mut self,
        tier: usize,
        n: usize,
        not_on: usize,
        min_idle: u64,
        out: &mut Vec<BlockId>,
    ) {
        let (first, end) = (self.tiers[tier].order.first(), self.tiers[tier].order.end());
        let cursor = self.tiers[tier].cursor;
        let start = if (first..end).contains(&cursor) { cursor } else { first };
        // From the cursor to the young end, then what lies before it: nothing is missed for having been looked at.
        let places = (start..end).chain(first..start).take(MAX_LOOKED_AT);
        let mut missing = Vec::new();
        self.tiers[tier].cursor = first;
        for at in places {
            if out.len() == n {
                self.tiers[tier].cursor = at;
                return;
            }
            self.choose(tier, at, n, not_on, min_idle, &mut missing, out);
            self.tiers[tier].cursor = at + 1;
        }
    }

    /// Pins up to `n` blocks that are among the next victims of `tier`, as far as these are the oldest `share` of its
    /// eviction order, and are neither on `not_on` nor on their way there; ancestors first, as for
    /// [`coldest`](Self::coldest). Each place of the order is looked at once: what was passed over then (because its
    /// copy was under way, for instance) is not found again before its next use.
    pub(crate) fn uncopied_victims(
        &mut self,
        tier: usize,
        share: f64,
        n: usize,
        not_on: usize,
        out: &mut Vec<BlockId>,
    ) {
        let order = &self.tiers[tier].order;
        let (first, end) = (order.first(), order.end());
        let target = first + ((end - first) as f64 * share.clamp(0.0, 1.0)) as u64;
        let start = order.watched().max(first);
        let end = target.min(start + MAX_LOOKED_AT as u64);
        let mut missing = Vec::new();
        let mut at = start;
        while at < end && out.len() < n {
            self.choose(tier, at, n, not_on, 0, &mut missing, out);
            // Where room ended there may be only ancestors in it: the block itself comes next time.
            if out.len() < n {
                at += 1;
            }
        }
        self.tiers[tier].order.watch(at);
    }

    /// Pins the block at place `at`, if it is cold, with the ancestors that must go before it.
    #[expect(clippy::too_many_arguments, reason = "the parameters of one call of `coldest`, passed on")]
    fn choose(
        &mut self,
        tier: usize,
        at: u64,
        n: usize,
        not_on: usize,
        min_idle: u64,
        missing: &mut Vec<u32>,
        out: &mut Vec<BlockId>,
    ) {
        let Some(slot) = self.tiers[tier].order.at(at, &self.tiers[tier].slots) else { return };
        if !self.is_cold(tier, slot, not_on, min_idle) {
            return;
        }
        missing.clear();
        let index = self.tiers[tier].slots[slot as usize].entry;
        if self.missing_ancestors(index, tier, not_on, out, missing) {
            // Topmost first; where room ends, what is in stays a chain.
            for &slot in missing.iter().rev().take(n - out.len()) {
                self.pin(tier, slot, Pin::Transfer);
                out.push(BlockId(slot));
            }
        }
    }

    fn is_cold(&self, tier: usize, slot: u32, not_on: usize, min_idle: u64) -> bool {
        let state = &self.tiers[tier].slots[slot as usize];
        if state.usage() != Usage::Registered || state.refs() > 0 {
            return false;
        }
        let entry = &self.entries[state.entry];
        let idle = u64::from(self.short_step().wrapping_sub(entry.last_step));
        entry.presence(not_on) == Presence::Absent && idle >= min_idle.min(u64::from(u16::MAX))
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
        let chain = self.is_full(self.entries[index].group());
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
