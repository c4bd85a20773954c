//! The evictable slots of a tier: a dense array of packed records, so that a sample is a few cache lines.

use crate::core::NONE;
use crate::policy::BlockMemory;

/// A slot with all that its value depends on.
#[derive(Clone, Copy)]
pub(crate) struct Leaf(u64);

impl Leaf {
    fn new(slot: u32, memory: BlockMemory, priority: u8) -> Self {
        let above = u64::from(memory.time) | u64::from(memory.class) << 16 | u64::from(priority) << 24;
        Self(u64::from(slot) | above << 32)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn time(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    pub(crate) fn class(self) -> usize {
        usize::from((self.0 >> 48) as u8)
    }

    #[inline]
    pub(crate) fn priority(self) -> u8 {
        (self.0 >> 56) as u8
    }
}

/// The array, and where each slot is in it.
pub(crate) struct Leaves {
    leaves: Vec<Leaf>,
    places: Box<[u32]>,
}

impl Leaves {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { leaves: Vec::with_capacity(capacity), places: vec![NONE; capacity].into_boxed_slice() }
    }

    /// Adds `slot`, or changes what is known of it.
    pub(crate) fn put(&mut self, slot: u32, memory: BlockMemory, priority: u8) {
        let leaf = Leaf::new(slot, memory, priority);
        let place = &mut self.places[slot as usize];
        if *place == NONE {
            *place = self.leaves.len() as u32;
            self.leaves.push(leaf);
        } else {
            self.leaves[*place as usize] = leaf;
        }
    }

    /// Takes `slot` out, if it is in.
    pub(crate) fn remove(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.places[slot as usize], NONE);
        if place != NONE {
            self.leaves.swap_remove(place as usize);
            if let Some(moved) = self.leaves.get(place as usize) {
                self.places[moved.slot() as usize] = place;
            }
        }
    }

    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.places[slot as usize] != NONE
    }

    pub(crate) fn len(&self) -> usize {
        self.leaves.len()
    }

    /// `count` leaves from place `from` on, fewer at the end of the array.
    #[inline]
    pub(crate) fn window(&self, from: usize, count: usize) -> &[Leaf] {
        &self.leaves[from..(from + count).min(self.leaves.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_change_and_go() {
        let mut leaves = Leaves::new(8);
        let memory = |time, class| BlockMemory { time, class };
        for slot in 0..8 {
            leaves.put(slot, memory(slot as u16, slot as u8), 1);
        }
        leaves.put(3, memory(300, 200), 2);
        leaves.remove(0);
        leaves.remove(0);
        leaves.remove(7);
        let mut rest: Vec<_> = leaves.window(0, 99).iter().map(|leaf| (leaf.slot(), leaf.time())).collect();
        rest.sort_unstable();
        assert_eq!(rest, [(1, 1), (2, 2), (3, 300), (4, 4), (5, 5), (6, 6)]);
        let changed = leaves.window(0, 99).iter().find(|leaf| leaf.slot() == 3).unwrap();
        assert_eq!((changed.class(), changed.priority()), (200, 2));
        for slot in 0..8 {
            leaves.remove(slot);
        }
        assert_eq!(leaves.len(), 0);
        assert!(leaves.window(0, 4).is_empty());
    }
}
