//! A bucket of the table: one cache line with the tags and entry indices of up to twelve keys.

use crate::bytes::equal_bytes;
use std::cell::Cell;

pub(super) const LANES: usize = 12;
const ALL_LANES: u32 = (1 << LANES) - 1;
/// Lanes whose tags are in the first word.
const LOW_LANES: usize = 8;
/// Tag of a lane without a key.
pub(super) const EMPTY: u8 = 0;
/// Keys are of so many classes, by some of their bits.
pub(super) const CLASSES: u64 = 8;
/// Where the counts of the classes begin in the second word, and their bits each.
const PASSED_SHIFT: u64 = 32;
const PASSED_BITS: u64 = 4;
/// A count that is no longer known.
const MANY: u64 = (1 << PASSED_BITS) - 1;
/// A lane without an entry, whatever the mask: its index is the mask itself, which is none.
const NO_ENTRY: u32 = u32::MAX;

#[repr(C, align(64))]
pub(super) struct Bucket {
    /// Tags of the first eight lanes, a byte each: `0x80 | 7 bits of the hash`, or `EMPTY`.
    low: Cell<u64>,
    /// Those of the other four, then for each class how many of its keys passed this bucket because
    /// it was full; sticks at 15.
    high: Cell<u64>,
    /// Entry indices, with more of the tag above them.
    pub entries: [Cell<u32>; LANES],
}

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    pub(super) fn new() -> Self {
        Self { low: Cell::new(0), high: Cell::new(0), entries: [const { Cell::new(NO_ENTRY) }; LANES] }
    }

    /// Bit `i` is set where lane `i` has `tag`, and no other bit.
    #[inline]
    pub(super) fn lanes(&self, tag: u8) -> u32 {
        equal_bytes([self.low.get(), self.high.get()], tag) & ALL_LANES
    }

    /// The first lane of a mask that is not 0.
    #[inline]
    pub(super) fn first(mask: u32) -> usize {
        mask.trailing_zeros() as usize
    }

    /// Whether keys passed this bucket that are of the class of `bits`, as far as that is known:
    /// then this one may be further on.
    #[inline]
    pub(super) fn was_passed(&self, bits: u64) -> bool {
        self.high.get() >> shift_of(bits) & MANY != 0
    }

    /// One key more, or one less, of the class of `bits` passed this bucket. A saturated count is
    /// no longer known, so it stays: lookups just look further than they must.
    #[inline]
    pub(super) fn count_passing(&self, bits: u64, up: bool) {
        let (word, shift) = (self.high.get(), shift_of(bits));
        match (word >> shift & MANY, up) {
            (MANY, _) => {}
            (_, true) => self.high.set(word + (1 << shift)),
            (_, false) => self.high.set(word - (1 << shift)),
        }
    }

    #[cfg(test)]
    pub(super) fn has_no_known_passing(&self) -> bool {
        let count = |class: u64| self.high.get() >> shift_of(class) & MANY;
        (0..CLASSES).all(|class| matches!(count(class), 0 | MANY))
    }

    #[inline]
    fn tag_of(&self, lane: usize) -> (&Cell<u64>, u32) {
        if lane < LOW_LANES {
            (&self.low, 8 * lane as u32)
        } else {
            (&self.high, 8 * (lane - LOW_LANES) as u32)
        }
    }

    /// Fills an empty lane.
    #[inline]
    pub(super) fn fill(&self, lane: usize, tag: u8, entry: u32) {
        self.entries[lane].set(entry);
        let (word, shift) = self.tag_of(lane);
        word.set(word.get() | u64::from(tag) << shift);
    }

    #[inline]
    pub(super) fn clear(&self, lane: usize) {
        let (word, shift) = self.tag_of(lane);
        word.set(word.get() & !(0xff << shift));
        self.entries[lane].set(NO_ENTRY);
    }
}

/// Where the count of the class of `bits` stands in the second word.
#[inline]
fn shift_of(bits: u64) -> u64 {
    PASSED_SHIFT + PASSED_BITS * (bits % CLASSES)
}
