//! Which blocks are pinned until some iteration, and in which order the pins end: such a block is
//! not evicted before.
//!
//! Blocks without such a pin pay nothing: one bit of the entry tells whether to look here.

use super::entries::Entries;
use super::shares::TenantShares;
use super::tier_state::TierState;
use crate::config::RegistryConfig;
use crate::entry::{NONE, Presence};
use crate::error::PinError;
use crate::tier::TIERS;
use kvbm_plan::{NamespaceId, Tier};
use std::cmp::Reverse;
use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeSet, HashMap, HashSet};

/// A block on a tier: its entry, and the tier.
pub(crate) type TierEntry = (u32, u8);

/// Until when a block stays on a tier.
struct TimedPin {
    until: u64,
    /// Entry of the block that it continues, as far as that was known.
    parent: u32,
}

/// All timed pins.
#[derive(Default)]
pub(crate) struct TimedPins {
    all: HashMap<TierEntry, TimedPin>,
    /// How many pinned blocks continue a block on the tier: it stays pinned as long as they are. It
    /// may have left the tier meanwhile and come again.
    children: HashMap<TierEntry, u32>,
    /// In the order in which pins end: of those that end together, the end of a chain first.
    ends: BTreeSet<(u64, Reverse<u32>, TierEntry)>,
    counts: [u32; TIERS],
}

impl TimedPins {
    /// How many blocks are pinned on a tier.
    pub(crate) fn count(&self, tier: usize) -> u32 {
        self.counts[tier]
    }

    /// Whether an entry's block is pinned on `tier`.
    #[inline]
    pub(crate) fn is_pinned(&self, entries: &Entries, index: u32, tier: usize) -> bool {
        entries[index].is_pinned() && self.contains(index, tier)
    }

    /// The same of one that is pinned on some tier.
    #[cold]
    fn contains(&self, index: u32, tier: usize) -> bool {
        self.all.contains_key(&(index, tier as u8))
    }

    /// Whether a block is pinned and no pinned block continues it.
    pub(crate) fn is_end(&self, place: TierEntry) -> bool {
        self.all.contains_key(&place) && !self.children.contains_key(&place)
    }

    /// A pin whose time is over at iteration `step`.
    pub(crate) fn ended(&self, step: u64) -> Option<TierEntry> {
        self.ends.first().filter(|(until, ..)| *until <= step).map(|&(.., place)| place)
    }

    /// How many blocks of a namespace are pinned on each tier.
    pub(crate) fn of_namespace(&self, entries: &Entries, namespace: NamespaceId) -> [u32; TIERS] {
        let mut counts = [0; TIERS];
        let is_theirs = |&&(index, _): &&TierEntry| entries[index].namespace() == namespace;
        for &(_, tier) in self.all.keys().filter(is_theirs) {
            counts[usize::from(tier)] += 1;
        }
        counts
    }

    /// Blocks of a tier that could be evicted at most, counted no more exactly than it takes to say
    /// whether these are `wanted`. `on` is the tier's number.
    pub(crate) fn evictable_at_most(
        &self,
        on: usize,
        tier: &TierState,
        entries: &Entries,
        wanted: usize,
    ) -> usize {
        let inactive = tier.inactive as usize;
        let pinned = self.counts[on] as usize;
        if wanted + pinned <= inactive || wanted > inactive {
            return inactive;
        }
        let idle = |&&(index, at): &&TierEntry| {
            usize::from(at) == on && tier.slot(entries[index].slot(on)).refs() == 0
        };
        inactive - self.all.keys().filter(idle).count()
    }

    /// Whether so many more blocks may be pinned: those of `places` on a tier, which is `on`.
    pub(crate) fn check(
        &self,
        on: usize,
        tier: &TierState,
        entries: &Entries,
        tenants: &TenantShares,
        places: &[TierEntry],
    ) -> Result<(), PinError> {
        let is_new = |place: &&TierEntry| usize::from(place.1) == on && !self.all.contains_key(*place);
        let asked = places.iter().filter(is_new).count();
        let capacity = tier.capacity();
        let check = |limit: u32, pinned: u32| {
            if asked > limit.saturating_sub(pinned) as usize {
                return Err(PinError::Limit { tier: Tier::SLOTTED[on], asked, pinned, limit, capacity });
            }
            Ok(())
        };
        check(RegistryConfig::most_pinned(capacity), self.counts[on])?;
        // A chain is of one namespace.
        let namespace = places.first().map(|&(index, _)| entries[index].namespace());
        let of_tenant = namespace.and_then(|namespace| tenants.pins(on, tier.usable(), namespace));
        of_tenant.map_or(Ok(()), |(limit, pinned)| check(limit, pinned))
    }

    /// Pins a block on a tier until an iteration; of two pins the one that ends later counts.
    /// Whether the block was not pinned there before.
    pub(crate) fn pin(
        &mut self,
        place: TierEntry,
        until: u64,
        entries: &Entries,
        tenants: &mut TenantShares,
    ) -> bool {
        let (index, tier) = (place.0, usize::from(place.1));
        let entry = &entries[index];
        let (parent, position) = (entry.parent.get(), Reverse(entry.position.get()));
        if let Some(pin) = self.all.get_mut(&place) {
            if pin.until < until {
                self.ends.remove(&(pin.until, position, place));
                self.ends.insert((until, position, place));
                pin.until = until;
            }
            return false;
        }
        entry.set_pinned(true);
        self.all.insert(place, TimedPin { until, parent });
        self.ends.insert((until, position, place));
        self.counts[tier] += 1;
        if parent != NONE {
            *self.children.entry((parent, place.1)).or_default() += 1;
        }
        tenants.count_pin(entry.namespace(), tier, true);
        true
    }

    /// The block is not pinned on the tier any more: its time is over, or it was removed.
    #[cold]
    pub(crate) fn forget(&mut self, place: TierEntry, entries: &Entries, tenants: &mut TenantShares) {
        let (index, tier) = (place.0, usize::from(place.1));
        let Some(pin) = self.all.remove(&place) else { return };
        let entry = &entries[index];
        self.ends.remove(&(pin.until, Reverse(entry.position.get()), place));
        self.counts[tier] -= 1;
        self.child_left((pin.parent, place.1));
        entry.set_pinned((0..TIERS).any(|tier| self.contains(index, tier)));
        tenants.count_pin(entry.namespace(), tier, false);
    }

    /// One pinned block less continues the block there.
    fn child_left(&mut self, place: TierEntry) {
        if let MapEntry::Occupied(mut children) = self.children.entry(place) {
            match children.get_mut() {
                1 => drop(children.remove()),
                count => *count -= 1,
            }
        }
    }
}

/// Collects a block on a tier and its ancestors there that are not collected yet.
pub(crate) fn with_ancestors(
    entries: &Entries,
    mut index: u32,
    tier: usize,
    seen: &mut HashSet<TierEntry>,
    out: &mut Vec<TierEntry>,
) {
    let is_full = entries.is_full(entries[index].group());
    while index != NONE
        && entries[index].presence(tier) == Presence::Present
        && seen.insert((index, tier as u8))
    {
        out.push((index, tier as u8));
        index = if is_full { entries[index].parent.get() } else { NONE };
    }
}
