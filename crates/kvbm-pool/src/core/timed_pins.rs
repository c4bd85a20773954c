//! Blocks that the caller has pinned until an iteration: they are not evicted before.
//!
//! Blocks without such a pin pay nothing: one bit of the entry tells whether to look here.

use super::pin_ends::{TierEntry, TimedPin};
use super::state::Core;
use super::store::BLOCKS_PER_HOLD;
use crate::config::RegistryConfig;
use crate::entry::{NONE, Presence};
use crate::error::PinError;
use crate::slot::Usage;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use std::cmp::Reverse;
use std::collections::HashSet;

impl Core {
    /// Whether an entry's block is pinned on `tier`.
    #[inline]
    pub(crate) fn is_pinned(&self, index: u32, tier: usize) -> bool {
        self.entry(index).is_pinned() && self.is_in_timed_pins(index, tier)
    }

    /// The same of one that is pinned on some tier.
    #[cold]
    pub(super) fn is_in_timed_pins(&self, index: u32, tier: usize) -> bool {
        self.pins.all.contains_key(&(index, tier as u8))
    }

    /// Pins what is Present of a chain on `tiers`, with its ancestors there, until an iteration; or
    /// nothing, where a tier would have too much pinned. Returns how many blocks of the chain are
    /// there.
    pub(crate) fn pin_chain(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        let now = self.step;
        if until <= now {
            return Err(PinError::Past { until, now });
        }
        let chain: Vec<u32> = hashes.iter().filter_map(|&hash| self.find(group, hash)).collect();
        let mut places = HashSet::new();
        let mut in_order = Vec::new();
        let slotted = || tiers.iter().map(Tier::index).filter(|&tier| tier < TIERS);
        for tier in slotted() {
            for &index in &chain {
                self.with_ancestors(index, tier, &mut places, &mut in_order);
            }
            self.check_pins(tier, &in_order)?;
        }
        // Parents first: each knows the pinned blocks that continue it.
        in_order.sort_by_key(|&(index, _)| self.entry(index).position.get());
        for (index, tier) in in_order {
            self.pin_one(index, usize::from(tier), until);
        }
        let there = |&&index: &&u32| slotted().any(|tier| self.is_pinned(index, tier));
        Ok(chain.iter().filter(there).count())
    }

    /// Collects the block on the tier and its ancestors there that are not collected yet.
    fn with_ancestors(
        &self,
        mut index: u32,
        tier: usize,
        seen: &mut HashSet<TierEntry>,
        out: &mut Vec<TierEntry>,
    ) {
        let is_full = self.is_full(self.entry(index).group());
        while index != NONE
            && self.entry(index).presence(tier) == Presence::Present
            && seen.insert((index, tier as u8))
        {
            out.push((index, tier as u8));
            index = if is_full { self.entry(index).parent.get() } else { NONE };
        }
    }

    fn check_pins(&self, tier: usize, places: &[TierEntry]) -> Result<(), PinError> {
        let pins = &self.pins;
        let is_new = |place: &&TierEntry| usize::from(place.1) == tier && !pins.all.contains_key(*place);
        let asked = places.iter().filter(is_new).count();
        let capacity = self.slots[tier].len() as u32;
        let check = |limit: u32, pinned: u32| {
            if asked > limit.saturating_sub(pinned) as usize {
                return Err(PinError::Limit { tier: Tier::SLOTTED[tier], asked, pinned, limit, capacity });
            }
            Ok(())
        };
        check(RegistryConfig::most_pinned(capacity), pins.counts[tier])?;
        // A chain is of one namespace.
        let namespace = places.first().map(|&(index, _)| self.entry(index).namespace());
        let of_tenant = namespace.and_then(|namespace| self.tenants.pins(tier, self.usable(tier), namespace));
        of_tenant.map_or(Ok(()), |(limit, pinned)| check(limit, pinned))
    }

    /// A pin that ends later than another counts.
    fn pin_one(&mut self, index: u32, tier: usize, until: u64) {
        let entry = &self.entries[index as usize];
        let (parent, position) = (entry.parent.get(), Reverse(entry.position.get()));
        let place = (index, tier as u8);
        let pins = &mut self.pins;
        if let Some(pin) = pins.all.get_mut(&place) {
            if pin.until < until {
                pins.ends.remove(&(pin.until, position, place));
                pins.ends.insert((until, position, place));
                pin.until = until;
            }
            return;
        }
        entry.set_pinned(true);
        pins.all.insert(place, TimedPin { until, parent });
        pins.ends.insert((until, position, place));
        pins.counts[tier] += 1;
        if parent != NONE {
            *pins.children.entry((parent, tier as u8)).or_default() += 1;
        }
        self.tenants.count_pin(entry.namespace(), tier, true);
        self.update_evictable(index, tier);
    }

    /// Ends the pins of a chain on `tiers`, from its end on; a block that another pinned one
    /// continues stays pinned. Returns how many pins ended.
    pub(crate) fn unpin_chain(&mut self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        let mut ended = 0;
        for &hash in hashes.iter().rev() {
            let Some(index) = self.find(group, hash) else { continue };
            for tier in tiers.iter().map(Tier::index) {
                if self.pins.is_end((index, tier as u8)) {
                    self.end_timed_pin(index, tier);
                    ended += 1;
                }
            }
        }
        ended
    }

    /// Ends up to [`BLOCKS_PER_HOLD`] pins whose time is over. Returns whether there are more.
    pub(crate) fn end_timed_pins(&mut self) -> bool {
        for _ in 0..BLOCKS_PER_HOLD {
            match self.pins.ends.first() {
                Some(&(until, _, (index, tier))) if until <= self.step => {
                    self.end_timed_pin(index, usize::from(tier));
                }
                _ => return false,
            }
        }
        true
    }

    /// The block may be evicted again. If it came up for that before, it is among the oldest.
    fn end_timed_pin(&mut self, index: u32, tier: usize) {
        self.forget_timed_pin(index, tier);
        let slot = self.entry(index).slot(tier);
        let state = self.slot(tier, slot);
        if state.usage() == Usage::Registered && state.refs() == 0 && state.order_position.get() == NONE {
            self.tiers[tier].order.push_old(slot, &self.slots[tier]);
        }
        self.update_evictable(index, tier);
    }

    /// The block is not pinned on `tier` any more: its time is over, or it was removed.
    #[cold]
    pub(crate) fn forget_timed_pin(&mut self, index: u32, tier: usize) {
        let place = (index, tier as u8);
        let pins = &mut self.pins;
        let Some(pin) = pins.all.remove(&place) else { return };
        let entry = &self.entries[index as usize];
        pins.ends.remove(&(pin.until, Reverse(entry.position.get()), place));
        pins.counts[tier] -= 1;
        pins.child_left((pin.parent, tier as u8));
        let on_others = (0..TIERS).any(|tier| pins.all.contains_key(&(index, tier as u8)));
        entry.set_pinned(on_others);
        self.tenants.count_pin(entry.namespace(), tier, false);
    }

    /// Blocks of `tier` that could be evicted at most, counted no more exactly than it takes to say
    /// whether these are `wanted`.
    pub(crate) fn evictable_at_most(&self, tier: usize, wanted: usize) -> usize {
        let inactive = self.tiers[tier].inactive as usize;
        let pinned = self.pins.counts[tier] as usize;
        if wanted + pinned <= inactive || wanted > inactive {
            return inactive;
        }
        let idle = |&&(index, on): &&TierEntry| {
            usize::from(on) == tier && self.slot(tier, self.entry(index).slot(tier)).refs() == 0
        };
        inactive - self.pins.all.keys().filter(idle).count()
    }
}
