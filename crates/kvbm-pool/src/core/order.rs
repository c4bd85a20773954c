//! The eviction order of a tier: a ring of slot ids, the old end at the head.
//!
//! A use appends the slot again and remembers the new place in the slot; places that the slot does not point to are
//! stale and skipped when they come up. So a use costs one sequential write, nothing is ever unlinked from the middle,
//! and the next victims can be prefetched. When stale places fill the ring, it is compacted in place.

use super::NONE;
use super::slot::Slot;

/// Heap of the ring, for each slot of the tier.
pub(crate) const BYTES_PER_SLOT: usize = size_of::<u32>() * 3 / 2;

pub(crate) struct Order {
    ring: Box<[u32]>,
    head: usize,
    len: usize,
    /// Number of the place at the head, counted over the life of the ring: a cursor survives pops.
    base: u64,
    /// Places before this number were looked at by whoever copies victims before they go.
    watched: u64,
}

impl Order {
    /// For a tier of `capacity` slots. At most that many places are valid, so compaction always frees a third.
    pub(crate) fn new(capacity: usize) -> Self {
        let ring = vec![NONE; capacity + capacity / 2 + 8].into_boxed_slice();
        Self { ring, head: 0, len: 0, base: 1 << 32, watched: 0 }
    }

    #[inline]
    fn index(&self, offset: usize) -> usize {
        let index = self.head + offset;
        if index >= self.ring.len() { index - self.ring.len() } else { index }
    }

    /// Makes `slot` the youngest.
    #[inline]
    pub(crate) fn push_young(&mut self, slot: u32, slots: &mut [Slot]) {
        if self.len == self.ring.len() {
            self.compact(slots);
        }
        let index = self.index(self.len);
        self.ring[index] = slot;
        self.len += 1;
        slots[slot as usize].place = index as u32;
    }

    /// Makes `slot` the oldest.
    pub(crate) fn push_old(&mut self, slot: u32, slots: &mut [Slot]) {
        if self.len == self.ring.len() {
            self.compact(slots);
        }
        self.head = if self.head == 0 { self.ring.len() - 1 } else { self.head - 1 };
        self.ring[self.head] = slot;
        self.len += 1;
        self.base -= 1;
        slots[slot as usize].place = self.head as u32;
    }

    /// Takes the oldest slot out; `None` when none is left. `budget` counts down for every place looked at, and 0
    /// ends the search.
    #[inline]
    pub(crate) fn pop_old(&mut self, slots: &mut [Slot], budget: &mut usize) -> Option<u32> {
        while self.len > 0 && *budget > 0 {
            *budget -= 1;
            let index = self.head;
            let slot = self.ring[index];
            self.head = self.index(1);
            self.len -= 1;
            self.base += 1;
            if slots[slot as usize].place == index as u32 {
                slots[slot as usize].place = NONE;
                return Some(slot);
            }
        }
        None
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of the oldest place.
    pub(crate) fn first(&self) -> u64 {
        self.base
    }

    /// Number after the youngest place.
    pub(crate) fn end(&self) -> u64 {
        self.base + self.len as u64
    }

    /// Places before this number were looked at.
    pub(crate) fn watched(&self) -> u64 {
        self.watched
    }

    /// Places before `number` have been looked at.
    pub(crate) fn watch(&mut self, number: u64) {
        self.watched = number;
    }

    /// The slot at place `number`, unless the place is stale or gone.
    pub(crate) fn at(&self, number: u64, slots: &[Slot]) -> Option<u32> {
        let offset = number.checked_sub(self.base)? as usize;
        if offset >= self.len {
            return None;
        }
        let index = self.index(offset);
        let slot = self.ring[index];
        (slots[slot as usize].place == index as u32).then_some(slot)
    }

    #[cold]
    fn compact(&mut self, slots: &mut [Slot]) {
        let mut kept = 0;
        for offset in 0..self.len {
            let from = self.index(offset);
            let slot = self.ring[from];
            if slots[slot as usize].place == from as u32 {
                let to = self.index(kept);
                self.ring[to] = slot;
                slots[slot as usize].place = to as u32;
                kept += 1;
            }
        }
        self.len = kept;
        // Places have new numbers.
        self.watched = self.base;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn agrees_with_a_list_over_random_uses() {
        let count = 9_u32;
        let mut slots = vec![Slot::NEW; count as usize];
        let mut order = Order::new(slots.len());
        let mut oracle: VecDeque<u32> = VecDeque::new();
        let mut random = 99_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (random >> 33) as u32 % count;
            match random >> 60 {
                0..=1 => {
                    let expected = oracle.pop_front();
                    assert_eq!(order.pop_old(&mut slots, &mut 1000), expected);
                }
                2 => {
                    oracle.retain(|&other| other != slot);
                    oracle.push_front(slot);
                    order.push_old(slot, &mut slots);
                }
                3 => {
                    // A slot that leaves for another reason only forgets its place.
                    oracle.retain(|&other| other != slot);
                    slots[slot as usize].place = NONE;
                }
                _ => {
                    oracle.retain(|&other| other != slot);
                    oracle.push_back(slot);
                    order.push_young(slot, &mut slots);
                }
            }
            let walked: Vec<u32> =
                (order.first()..order.end()).filter_map(|place| order.at(place, &slots)).collect();
            assert_eq!(walked, oracle.iter().copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn budget_bounds_the_search() {
        let mut slots = vec![Slot::NEW; 4];
        let mut order = Order::new(4);
        for _ in 0..5 {
            order.push_young(0, &mut slots);
        }
        let mut budget = 3;
        assert_eq!(order.pop_old(&mut slots, &mut budget), None);
        assert_eq!(budget, 0);
        assert!(!order.is_empty());
        assert_eq!(order.pop_old(&mut slots, &mut 1000), Some(0));
    }
}
