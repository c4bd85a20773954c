//! The evictable slots of a tier: a dense array of packed records, so that a sample is a few cache
//! lines.

use super::super::eviction::SlotNumbers;
use crate::entry::BlockMemory;

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

/// Leaves of a part of the array: it grows by parts, since most blocks are no leaves most of the
/// time.
pub(super) const PART: usize = 1024;

pub(crate) type LeafPart = Box<[Leaf]>;

/// Parts that no array needs now. All arrays share them, so the heap has as many parts as all
/// arrays need together.
pub(crate) type UnusedParts = Vec<LeafPart>;

/// The array. Where a slot is in it is its number ([`SlotNumbers`]).
pub(crate) struct Leaves {
    /// Those in use, and at most one more: a leaf that comes and goes at the end of a part moves no
    /// part.
    parts: Vec<LeafPart>,
    len: usize,
}

impl Leaves {
    pub(crate) const fn new() -> Self {
        Self { parts: Vec::new(), len: 0 }
    }

    /// Adds `slot`, or changes what is known of it.
    pub(crate) fn put(
        &mut self,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        unused: &mut UnusedParts,
        numbers: &mut SlotNumbers<'_>,
    ) {
        let leaf = Leaf::new(slot, memory, priority);
        if let Some(place) = numbers.get(slot) {
            *self.at(place) = leaf;
            return;
        }
        if self.len == self.parts.len() * PART {
            let part = unused.pop();
            self.parts.push(part.unwrap_or_else(|| vec![Leaf(0); PART].into_boxed_slice()));
        }
        numbers.set(slot, Some(self.len as u32));
        self.len += 1;
        *self.at(self.len as u32 - 1) = leaf;
    }

    #[inline]
    fn at(&mut self, place: u32) -> &mut Leaf {
        &mut self.parts[place as usize / PART][place as usize % PART]
    }

    /// Takes `slot` out, if it is in.
    pub(crate) fn remove(&mut self, slot: u32, unused: &mut UnusedParts, numbers: &mut SlotNumbers<'_>) {
        let Some(place) = numbers.get(slot) else { return };
        numbers.set(slot, None);
        self.len -= 1;
        let last = *self.at(self.len as u32);
        if place as usize != self.len {
            *self.at(place) = last;
            numbers.set(last.slot(), Some(place));
        }
        if self.len.is_multiple_of(PART) && self.parts.len() > self.len / PART + 1 {
            unused.extend(self.parts.pop());
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[cfg(test)]
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// `count` leaves from place `from` on, fewer at the end of the array. A window does not cross
    /// into another part.
    #[inline]
    pub(crate) fn window(&self, from: usize, count: usize) -> &[Leaf] {
        let end = (from + count).min(self.len).min((from / PART + 1) * PART);
        let Some(part) = self.parts.get(from / PART).filter(|_| from < end) else { return &[] };
        &part[from % PART..from % PART + (end - from)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Slot;

    fn listed(slots: u32) -> Box<[Slot]> {
        let all = Slot::many(slots as usize);
        for slot in &all {
            slot.set_listed(true);
        }
        all
    }

    #[test]
    fn grows_by_parts_and_windows_stay_in_one() {
        let slots = 2 * PART as u32 + 100;
        let (mut leaves, mut unused) = (Leaves::new(), UnusedParts::new());
        let states = listed(slots);
        let mut numbers = SlotNumbers::of(&states);
        for slot in 0..slots {
            leaves.put(slot, BlockMemory { time: slot as u16, class: 0 }, 0, &mut unused, &mut numbers);
        }
        for slot in (0..slots).filter(|slot| slot % 3 > 0) {
            leaves.remove(slot, &mut unused, &mut numbers);
        }
        assert_eq!(leaves.len(), slots.div_ceil(3) as usize);
        let mut seen: Vec<u32> = Vec::new();
        for from in (0..leaves.len()).step_by(8) {
            let window = leaves.window(from, 8);
            assert_eq!(window.len(), 8.min(leaves.len() - from).min(PART - from % PART));
            seen.extend(window.iter().map(|leaf| leaf.slot()));
            assert!(window.iter().all(|leaf| leaf.time() == leaf.slot() as u16));
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..slots).step_by(3).collect::<Vec<_>>());
    }

    #[test]
    fn slots_come_change_and_go() {
        let (mut leaves, mut unused) = (Leaves::new(), UnusedParts::new());
        let states = listed(8);
        let mut numbers = SlotNumbers::of(&states);
        let memory = |time, class| BlockMemory { time, class };
        for slot in 0..8 {
            leaves.put(slot, memory(slot as u16, slot as u8), 1, &mut unused, &mut numbers);
        }
        leaves.put(3, memory(300, 200), 2, &mut unused, &mut numbers);
        leaves.remove(0, &mut unused, &mut numbers);
        leaves.remove(0, &mut unused, &mut numbers);
        leaves.remove(7, &mut unused, &mut numbers);
        let mut rest: Vec<_> = leaves.window(0, 99).iter().map(|leaf| (leaf.slot(), leaf.time())).collect();
        rest.sort_unstable();
        assert_eq!(rest, [(1, 1), (2, 2), (3, 300), (4, 4), (5, 5), (6, 6)]);
        let changed = leaves.window(0, 99).iter().find(|leaf| leaf.slot() == 3).unwrap();
        assert_eq!((changed.class(), changed.priority()), (200, 2));
        for slot in 0..8 {
            leaves.remove(slot, &mut unused, &mut numbers);
        }
        assert_eq!(leaves.len(), 0);
        assert!(leaves.window(0, 4).is_empty());
    }
}
