//! Which blocks are pinned until some iteration, and in which order the pins end.

use crate::tier::TIERS;
use std::cmp::Reverse;
use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeSet, HashMap};

/// A block on a tier: its entry, and the tier.
pub(crate) type TierEntry = (u32, u8);

/// Until when a block stays on a tier.
pub(crate) struct TimedPin {
    pub until: u64,
    /// Entry of the block that it continues, as far as that was known.
    pub parent: u32,
}

/// All timed pins.
#[derive(Default)]
pub(crate) struct TimedPins {
    pub all: HashMap<TierEntry, TimedPin>,
    /// How many pinned blocks continue a block on the tier: it stays pinned as long as they are. It
    /// may have left the tier meanwhile and come again.
    pub children: HashMap<TierEntry, u32>,
    /// In the order in which pins end: of those that end together, the end of a chain first.
    pub ends: BTreeSet<(u64, Reverse<u32>, TierEntry)>,
    pub counts: [u32; TIERS],
}

impl TimedPins {
    /// Whether a block is pinned and no pinned block continues it.
    pub(crate) fn is_end(&self, place: TierEntry) -> bool {
        self.all.contains_key(&place) && !self.children.contains_key(&place)
    }

    /// One pinned block less continues the block there.
    pub(crate) fn child_left(&mut self, place: TierEntry) {
        if let MapEntry::Occupied(mut children) = self.children.entry(place) {
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
