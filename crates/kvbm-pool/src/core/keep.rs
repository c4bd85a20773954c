//! Blocks that the caller has pinned until an iteration: nobody evicts them before.
//!
//! Costs nothing where nothing is pinned: one bit of the entry says whether to look here.

use super::evict::MAX_VICTIMS;
use super::slot::Usage;
use super::{Core, NONE, Presence};
use crate::config::RegistryConfig;
use crate::error::PinError;
use crate::status::TierStatus;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

/// A block on a tier: its entry, and the tier.
type Place = (u32, u8);

/// Until when a block stays on a tier.
struct Keep {
    until: u64,
    /// Pinned blocks that continue it: it stays pinned as long as they are.
    children: u32,
}

/// Everything that is pinned.
#[derive(Default)]
pub(crate) struct Keeps {
    all: HashMap<Place, Keep>,
    /// In the order in which pins end: of those that end together, the end of a chain first.
    ends: BTreeSet<(u64, Reverse<u32>, Place)>,
    counts: [u32; TIERS],
}

impl Core {
    /// Whether an entry's block is pinned on `tier`.
    #[inline]
    pub(crate) fn is_kept(&self, index: u32, tier: usize) -> bool {
        self.entries[index].is_kept() && self.keeps.all.contains_key(&(index, tier as u8))
    }

    /// Pins what is Present of a chain on `tiers`, with its ancestors there, until an iteration; or nothing, where a tier
    /// would have too much pinned. Returns how many blocks of the chain are there.
    pub(crate) fn keep(
        &mut self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        if until <= self.step {
            return Err(PinError::Past { until, now: self.step });
        }
        let chain: Vec<u32> = hashes.iter().filter_map(|&hash| self.entries.find(group, hash)).collect();
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
        in_order.sort_by_key(|&(index, _)| self.entries[index].position);
        for (index, tier) in in_order {
            self.keep_one(index, usize::from(tier), until);
        }
        let there = |&&index: &&u32| slotted().any(|tier| self.is_kept(index, tier));
        Ok(chain.iter().filter(there).count())
    }

    /// The block's place on the tier and those of its ancestors, as far as they are not in yet.
    fn with_ancestors(&self, mut index: u32, tier: usize, seen: &mut HashSet<Place>, out: &mut Vec<Place>) {
        let is_full = self.is_full(self.entries[index].group());
        while index != NONE
            && self.entries[index].presence(tier) == Presence::Present
            && seen.insert((index, tier as u8))
        {
            out.push((index, tier as u8));
            index = if is_full { self.entries[index].parent } else { NONE };
        }
    }

    fn check_pins(&self, tier: usize, places: &[Place]) -> Result<(), PinError> {
        let is_new = |place: &&Place| usize::from(place.1) == tier && !self.keeps.all.contains_key(*place);
        let asked = places.iter().filter(is_new).count();
        let capacity = self.tiers[tier].slots.len() as u32;
        let limit = RegistryConfig::most_pinned(capacity);
        let pinned = self.keeps.counts[tier];
        if asked > (limit - pinned) as usize {
            return Err(PinError::Limit { tier: Tier::SLOTTED[tier], asked, pinned, limit, capacity });
        }
        Ok(())
    }

    /// A pin that ends later than another counts.
    fn keep_one(&mut self, index: u32, tier: usize, until: u64) {
        let entry = &mut self.entries[index];
        let (parent, position) = (entry.parent, Reverse(entry.position));
        let place = (index, tier as u8);
        if let Some(keep) = self.keeps.all.get_mut(&place) {
            if keep.until < until {
                self.keeps.ends.remove(&(keep.until, position, place));
                self.keeps.ends.insert((until, position, place));
                keep.until = until;
            }
            return;
        }
        entry.set_kept(true);
        self.keeps.all.insert(place, Keep { until, children: 0 });
        self.keeps.ends.insert((until, position, place));
        self.keeps.counts[tier] += 1;
        if let Some(above) = self.keeps.all.get_mut(&(parent, tier as u8)) {
            above.children += 1;
        }
        self.update_evictable(index, tier);
    }

    /// Takes the pins of a chain on `tiers` back, from its end on; a block that another pinned one continues stays pinned.
    /// Returns how many places were pinned and are not any more.
    pub(crate) fn unkeep(&mut self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        let mut ended = 0;
        for &hash in hashes.iter().rev() {
            let Some(index) = self.entries.find(group, hash) else { continue };
            for tier in tiers.iter().map(Tier::index) {
                if self.keeps.all.get(&(index, tier as u8)).is_some_and(|keep| keep.children == 0) {
                    self.end_keep(index, tier);
                    ended += 1;
                }
            }
        }
        ended
    }

    /// Ends up to [`MAX_VICTIMS`] pins whose time is over. Says whether there are more.
    pub(crate) fn end_keeps(&mut self) -> bool {
        for _ in 0..MAX_VICTIMS {
            match self.keeps.ends.first() {
                Some(&(until, _, (index, tier))) if until <= self.step => {
                    self.end_keep(index, usize::from(tier));
                }
                _ => return false,
            }
        }
        true
    }

    /// The block may be evicted again. If it came up for that before, it is among the oldest.
    fn end_keep(&mut self, index: u32, tier: usize) {
        self.forget_keep(index, tier);
        let slot = self.entries[index].slots[tier];
        let tier_core = &mut self.tiers[tier];
        let state = &tier_core.slots[slot as usize];
        if state.usage() == Usage::Registered && state.refs() == 0 && state.place == NONE {
            tier_core.order.push_old(slot, &mut tier_core.slots);
        }
        self.update_evictable(index, tier);
    }

    /// The block is not pinned on `tier` any more: its time is over, or it was removed.
    pub(crate) fn forget_keep(&mut self, index: u32, tier: usize) {
        let place = (index, tier as u8);
        let Some(keep) = self.keeps.all.remove(&place) else { return };
        let entry = &self.entries[index];
        let (parent, position) = (entry.parent, Reverse(entry.position));
        self.keeps.ends.remove(&(keep.until, position, place));
        self.keeps.counts[tier] -= 1;
        if let Some(above) = self.keeps.all.get_mut(&(parent, tier as u8)) {
            above.children = above.children.saturating_sub(1);
        }
        let elsewhere = (0..TIERS).any(|tier| self.keeps.all.contains_key(&(index, tier as u8)));
        self.entries[index].set_kept(elsewhere);
    }

    /// Where the slots of a slotted tier are.
    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        let on = tier.index();
        TierStatus { pinned: self.keeps.counts[on], ..self.tiers[on].status(tier) }
    }

    /// Blocks of `tier` that could be evicted at most, counted no more exactly than it takes to say whether these are
    /// `wanted`.
    pub(crate) fn evictable_at_most(&self, tier: usize, wanted: usize) -> usize {
        let inactive = self.tiers[tier].inactive as usize;
        if wanted + self.keeps.counts[tier] as usize <= inactive || wanted > inactive {
            return inactive;
        }
        let idle = |&&(index, on): &&Place| {
            usize::from(on) == tier
                && self.tiers[tier].slots[self.entries[index].slots[tier] as usize].refs() == 0
        };
        inactive - self.keeps.all.keys().filter(idle).count()
    }
}
