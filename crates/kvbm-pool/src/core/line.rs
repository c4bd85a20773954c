//! A line of the table: one cache line. One thread at a time changes it; any number look at it meanwhile.

use super::field::{U32, U64};
use crate::bytes::equal_bytes;

pub(super) const LANES: usize = 12;
const ALL_LANES: u32 = (1 << LANES) - 1;
/// Lanes whose tags are in the first word.
const LOW_LANES: usize = 8;
/// Tag of a lane without a key.
pub(super) const EMPTY: u8 = 0;
/// Where `overflow` begins in the second word, and its mask there.
const OVERFLOW_SHIFT: u32 = 32;
const OVERFLOW: u64 = 0xff << OVERFLOW_SHIFT;
/// A lane without an entry, whatever the mask: its index is the mask itself, which is none.
const NO_ENTRY: u32 = u32::MAX;

#[repr(C, align(64))]
pub(super) struct Line {
    /// Tags of the first eight lanes, a byte each: `0x80 | 7 bits of the hash`, or `EMPTY`.
    low: U64,
    /// Those of the other four, then `overflow`: keys that passed this line because it was full; sticks at 255.
    high: U64,
    /// Entry indices, with more of the tag above them.
    pub entries: [U32; LANES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    pub(super) fn new() -> Self {
        Self { low: U64::new(0), high: U64::new(0), entries: [const { U32::new(NO_ENTRY) }; LANES] }
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

    #[inline]
    pub(super) fn overflow(&self) -> u8 {
        (self.high.get() >> OVERFLOW_SHIFT) as u8
    }

    /// One key more, or one less, passed this line. A saturated count is no longer known, so it stays: lookups just look
    /// further than they must.
    #[cold]
    pub(super) fn count_overflow(&self, up: bool) {
        let word = self.high.get();
        match (word & OVERFLOW, up) {
            (OVERFLOW, _) => {}
            (_, true) => self.high.set(word + (1 << OVERFLOW_SHIFT)),
            (_, false) => self.high.set(word - (1 << OVERFLOW_SHIFT)),
        }
    }

    #[inline]
    fn tag_of(&self, lane: usize) -> (&U64, u32) {
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
