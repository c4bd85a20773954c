//! Blocks that the caller has pinned until an iteration: nobody evicts them before.
//!
//! Costs nothing where nothing is pinned: one bit of the entry says whether to look here. All shards share it, behind a leaf lock.

use super::evict::MAX_VICTIMS;
use super::slot::Usage;
use super::tiers::{self, TierPart};
use super::{Core, NONE, Presence, Store};
use crate::config::RegistryConfig;
use crate::error::PinError;
use crate::status::TierStatus;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::Ordering::Relaxed;

/// A block on a tier: its entry, and the tier.
type Place = (u32, u8);

/// Until when a block stays on a tier.
struct Keep {
    until: u64,
    /// Entry of the block that it continues, as far as that was known.
    parent: u32,
}

/// Everything that is pinned.
#[derive(Default)]
pub(crate) struct Keeps {
    all: HashMap<Place, Keep>,
    /// Pinned blocks that continue a block there: it stays pinned as long as they are. It may have gone meanwhile and come again.
    children: HashMap<Place, u32>,
    /// In the order in which pins end: of those that end together, the end of a chain first.
    ends: BTreeSet<(u64, Reverse<u32>, Place)>,
    counts: [u32; TIERS],
}

impl Keeps {
    /// Whether a block is pinned that no pinned one continues.
    fn is_end(&self, place: Place) -> bool {
        self.all.contains_key(&place) && !self.children.contains_key(&place)
    }

    /// A pinned block continues the one there no more.
    fn child_left(&mut self, place: Place) {
        if let Entry::Occupied(mut children) = self.children.entry(place) {
            match children.get_mut() {
                1 => drop(children.remove()),
                count => *count -= 1,
            }
        }
    }

    /// How many blocks are pinned on each tier, of entries for which `theirs` says so.
    pub(crate) fn of(&self, theirs: impl Fn(u32) -> bool) -> [u32; TIERS] {
        let mut counts = [0; TIERS];
        for &(_, tier) in self.all.keys().filter(|&&(index, _)| theirs(index)) {
            counts[usize::from(tier)] += 1;
        }
        counts
    }
}

impl Store {
    /// Where the slots of a tier are.
    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        if tier.index() >= TIERS {
            return TierStatus::without_slots(tier);
        }
        self.lock_all().status(tier)
    }
}

impl Core<'_> {
    /// Whether an entry's block is pinned on `tier`.
    #[inline]
    pub(crate) fn is_kept(&self, index: u32, tier: usize) -> bool {
        self.store.entries[index].is_kept() && self.is_in_keeps(index, tier)
    }

    /// The same of one that is pinned on some tier.
    #[cold]
    pub(super) fn is_in_keeps(&self, index: u32, tier: usize) -> bool {
        self.store.keeps.lock().all.contains_key(&(index, tier as u8))
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
        let now = self.store.step();
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
        in_order.sort_by_key(|&(index, _)| self.store.entries[index].position.get());
        for (index, tier) in in_order {
            self.keep_one(index, usize::from(tier), until);
        }
        let there = |&&index: &&u32| slotted().any(|tier| self.is_kept(index, tier));
        Ok(chain.iter().filter(there).count())
    }

    /// The block's place on the tier and those of its ancestors, as far as they are not in yet.
    fn with_ancestors(&self, mut index: u32, tier: usize, seen: &mut HashSet<Place>, out: &mut Vec<Place>) {
        let entries = &self.store.entries;
        let is_full = self.store.is_full(entries[index].group());
        while index != NONE
            && entries[index].presence(tier) == Presence::Present
            && seen.insert((index, tier as u8))
        {
            out.push((index, tier as u8));
            index = if is_full { entries[index].parent.get() } else { NONE };
        }
    }

    fn check_pins(&self, tier: usize, places: &[Place]) -> Result<(), PinError> {
        let keeps = self.store.keeps.lock();
        let is_new = |place: &&Place| usize::from(place.1) == tier && !keeps.all.contains_key(*place);
        let asked = places.iter().filter(is_new).count();
        let capacity = self.store.slots[tier].len() as u32;
        let check = |limit: u32, pinned: u32| {
            if asked > limit.saturating_sub(pinned) as usize {
                return Err(PinError::Limit { tier: Tier::SLOTTED[tier], asked, pinned, limit, capacity });
            }
            Ok(())
        };
        check(RegistryConfig::most_pinned(capacity), keeps.counts[tier])?;
        drop(keeps);
        // A chain is of one namespace.
        let namespace = places.first().map(|&(index, _)| self.store.entries[index].namespace());
        let pins =
            namespace.and_then(|namespace| self.first().tenants.pins(tier, self.usable(tier), namespace));
        pins.map_or(Ok(()), |(limit, pinned)| check(limit, pinned))
    }

    /// A block is pinned on a tier, or is no more.
    fn count_pin(&mut self, index: u32, tier: usize, more: bool) {
        let mut pins = [0; TIERS];
        pins[tier] = 1;
        let namespace = self.store.entries[index].namespace();
        self.first_mut().tenants.count_pins(namespace, pins, more);
    }

    /// A pin that ends later than another counts.
    fn keep_one(&mut self, index: u32, tier: usize, until: u64) {
        let entry = &self.store.entries[index];
        let (parent, position) = (entry.parent.get(), Reverse(entry.position.get()));
        let place = (index, tier as u8);
        let mut guard = self.store.keeps.lock();
        let keeps = &mut *guard;
        if let Some(keep) = keeps.all.get_mut(&place) {
            if keep.until < until {
                keeps.ends.remove(&(keep.until, position, place));
                keeps.ends.insert((until, position, place));
                keep.until = until;
            }
            return;
        }
        entry.set_kept(true);
        keeps.all.insert(place, Keep { until, parent });
        keeps.ends.insert((until, position, place));
        keeps.counts[tier] += 1;
        self.store.kept[tier].store(keeps.counts[tier], Relaxed);
        if parent != NONE {
            *keeps.children.entry((parent, tier as u8)).or_default() += 1;
        }
        drop(guard);
        self.count_pin(index, tier, true);
        self.update_evictable(index, tier);
    }

    /// Takes the pins of a chain on `tiers` back, from its end on; a block that another pinned one continues stays pinned.
    /// Returns how many places were pinned and are not any more.
    pub(crate) fn unkeep(&mut self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        let mut ended = 0;
        for &hash in hashes.iter().rev() {
            let Some(index) = self.find(group, hash) else { continue };
            for tier in tiers.iter().map(Tier::index) {
                let ends = self.store.keeps.lock().is_end((index, tier as u8));
                if ends {
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
            let first = self.store.keeps.lock().ends.first().copied();
            match first {
                Some((until, _, (index, tier))) if until <= self.store.step() => {
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
        let slots = &self.store.slots[tier];
        let slot = self.store.entries[index].slot(tier);
        let state = &slots[slot as usize];
        if state.usage() == Usage::Registered && state.refs() == 0 && state.place.get() == NONE {
            self.part(index, tier).order.push_old(slot, slots);
        }
        self.update_evictable(index, tier);
    }

    /// The block is not pinned on `tier` any more: its time is over, or it was removed.
    pub(crate) fn forget_keep(&mut self, index: u32, tier: usize) {
        let place = (index, tier as u8);
        let mut keeps = self.store.keeps.lock();
        let Some(keep) = keeps.all.remove(&place) else { return };
        let entry = &self.store.entries[index];
        keeps.ends.remove(&(keep.until, Reverse(entry.position.get()), place));
        keeps.counts[tier] -= 1;
        self.store.kept[tier].store(keeps.counts[tier], Relaxed);
        keeps.child_left((keep.parent, tier as u8));
        let elsewhere = (0..TIERS).any(|tier| keeps.all.contains_key(&(index, tier as u8)));
        entry.set_kept(elsewhere);
        drop(keeps);
        self.count_pin(index, tier, false);
    }

    /// Where the slots of a slotted tier are. All shards are held.
    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        let on = tier.index();
        let store = self.store;
        let pinned = store.keeps.lock().counts[on];
        let free = store.free[on].lock();
        tiers::status(tier, store.slots[on].len() as u32, &free, pinned, self.parts(on))
    }

    /// What each shard that is held keeps of a tier.
    pub(crate) fn parts(&self, tier: usize) -> impl Iterator<Item = &TierPart> {
        self.shards().map(move |shard| &shard.tiers[tier])
    }

    /// Blocks of `tier` that could be evicted at most, counted no more exactly than it takes to say whether these are
    /// `wanted`.
    pub(crate) fn evictable_at_most(&self, tier: usize, wanted: usize) -> usize {
        let store = self.store;
        let inactive = self.parts(tier).map(|part| part.inactive as usize).sum();
        let keeps = store.keeps.lock();
        if wanted + keeps.counts[tier] as usize <= inactive || wanted > inactive {
            return inactive;
        }
        let idle = |&&(index, on): &&Place| {
            usize::from(on) == tier && store.slots[tier][store.entries[index].slot(tier) as usize].refs() == 0
        };
        inactive - keeps.all.keys().filter(idle).count()
    }
}
