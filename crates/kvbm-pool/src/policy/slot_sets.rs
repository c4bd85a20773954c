//! A value for each set of slots.

use super::eviction::SlotSet;
use crate::tier::TIERS;

/// Something for each set of slots; sets come into being when they are needed.
pub(crate) struct SlotSets<T> {
    new: fn(usize) -> T,
    capacity: [usize; TIERS],
    all: Vec<[T; TIERS]>,
}

impl<T> SlotSets<T> {
    /// `new` makes the one of a set, from the slots of its tier.
    pub(crate) fn new(capacity: [usize; TIERS], new: fn(usize) -> T) -> Self {
        Self { new, capacity, all: vec![capacity.map(new)] }
    }

    #[inline]
    pub(crate) fn get(&self, set: SlotSet) -> Option<&T> {
        self.all.get(set.tenant).map(|tiers| &tiers[set.tier])
    }

    #[inline]
    pub(crate) fn at(&mut self, set: SlotSet) -> &mut T {
        while self.all.len() <= set.tenant {
            self.all.push(self.capacity.map(self.new));
        }
        &mut self.all[set.tenant][set.tier]
    }

    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.iter_mut().flatten()
    }
}
