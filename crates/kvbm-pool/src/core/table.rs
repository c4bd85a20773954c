//! From (group, 128-bit hash) to the index of an entry.
//!
//! Lines of one cache line each: twelve tags of 7 bits and twelve 32-bit entry indices. A key lives in its home line or,
//! when that is full, in the next line with room; every full line that it passed counts it in `overflow`. So a
//! lookup stops at the first line that nothing passed, and deletion leaves no tombstone and moves nothing.
//! A tag only filters: equality is always that of all 128 bits and the group, compared in the entry. The bits of an index
//! that the largest entry does not need hold more of the tag, so that hardly ever a wrong entry is read for nothing.

use super::entry::Entry;
use crate::near;
use kvbm_plan::{GroupId, SequenceHash};

const LANES: usize = 12;
/// Keys per line at which the table grows; more than this and too many lines overflow.
const FULL: usize = 10;
const EMPTY: u8 = 0;

/// Heap of a full table, rounded up.
pub(crate) const BYTES_PER_KEY: usize = size_of::<Line>().div_ceil(FULL);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line {
    /// `0x80 | 7 bits of the hash`, or `EMPTY`.
    tags: [u8; LANES],
    /// Keys that passed this line because it was full; sticks at 255.
    overflow: u8,
    spare: [u8; 3],
    /// Entry indices, with more of the tag above them.
    entries: [u32; LANES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    const NEW: Self = Self { tags: [EMPTY; LANES], overflow: 0, spare: [0; 3], entries: [0; LANES] };

    /// The top bit of byte `i` is set where lane `i` has `tag`, and no other bit.
    #[inline]
    fn lanes(&self, tag: u8) -> u128 {
        let [a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3] = self.tags;
        let low =
            zero_bytes(u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]) ^ u64::from_le_bytes([tag; 8]));
        let other = !tag;
        let high =
            u64::from_le_bytes([b0, b1, b2, b3, other, other, other, other]) ^ u64::from_le_bytes([tag; 8]);
        u128::from(low) | u128::from(zero_bytes(high)) << 64
    }

    /// The first lane of a mask that is not 0.
    #[inline]
    fn first(mask: u128) -> usize {
        (mask.trailing_zeros() / 8) as usize
    }
}

/// The top bit of every byte that is zero. Exact: the addition of 7-bit values carries into no neighbour.
#[inline]
fn zero_bytes(word: u64) -> u64 {
    const SEVEN: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    !(((word & SEVEN) + SEVEN) | word | SEVEN)
}

/// A key, hashed once.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub group: GroupId,
    pub hash: SequenceHash,
    mixed: u64,
}

impl Key {
    pub(crate) const NONE: Self =
        Self { group: GroupId(0), hash: SequenceHash::from_bytes([0; 16]), mixed: 0 };
}

pub(crate) struct Table {
    lines: Vec<Line>,
    len: usize,
    seed: u64,
    /// Which bits of `Line::entries` are the index.
    index_mask: u32,
}

/// Ones for all bits that indices below `entries` need.
fn index_mask(entries: usize) -> u32 {
    u32::try_from(entries.next_power_of_two() - 1).unwrap_or(u32::MAX)
}

impl Table {
    /// A table that holds `entries` keys before it grows. `seed` makes the home of a key unpredictable: hashes of an
    /// engine may be chosen by its users.
    pub(crate) fn new(entries: usize, seed: u64) -> Self {
        let lines = vec![Line::NEW; entries.div_ceil(FULL).max(2)];
        Self { lines, len: 0, seed, index_mask: index_mask(entries) }
    }

    #[inline]
    pub(crate) fn key(&self, group: GroupId, hash: SequenceHash) -> Key {
        let value = hash.to_u128();
        let low = value as u64 ^ self.seed;
        let high = (value >> 64) as u64 ^ 0x9e37_79b9_7f4a_7c15 ^ (u64::from(group.0) << 40);
        // Fold a full multiplication, then multiply again: every bit of the key reaches the upper half.
        let wide = u128::from(low) * u128::from(high);
        let mixed =
            (wide as u64 ^ (wide >> 64) as u64 ^ low.rotate_left(32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        Key { group, hash, mixed }
    }

    #[inline]
    fn home(&self, mixed: u64) -> usize {
        (((mixed >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn tag(mixed: u64) -> u8 {
        0x80 | (mixed as u8)
    }

    /// An index as a lane has it.
    #[inline]
    fn tagged(&self, mixed: u64, index: u32) -> u32 {
        (mixed >> 8) as u32 & !self.index_mask | index
    }

    /// The index in a lane whose tag fits, if the rest of the tag does.
    #[inline]
    fn untagged(&self, mixed: u64, lane: u32) -> Option<u32> {
        let index = lane & self.index_mask;
        (lane == self.tagged(mixed, index)).then_some(index)
    }

    #[inline]
    fn next(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }

    /// Where `key` is: line, lane and entry.
    #[inline]
    fn locate(&self, key: &Key, entries: &[Entry]) -> Option<(usize, usize, u32)> {
        let tag = Self::tag(key.mixed);
        let home = self.home(key.mixed);
        let mut at = home;
        loop {
            let line = &self.lines[at];
            let mut lanes = line.lanes(tag);
            while lanes != 0 {
                let lane = Line::first(lanes);
                if let Some(index) = self.untagged(key.mixed, line.entries[lane]) {
                    let entry = &entries[index as usize];
                    if entry.hash == key.hash && entry.group() == key.group {
                        return Some((at, lane, index));
                    }
                }
                lanes &= lanes - 1;
            }
            if line.overflow == 0 {
                return None;
            }
            at = self.next(at);
            if at == home {
                return None;
            }
        }
    }

    #[inline]
    pub(crate) fn find(&self, key: &Key, entries: &[Entry]) -> Option<u32> {
        self.locate(key, entries).map(|(_, _, index)| index)
    }

    /// Asks for the home lines of `keys`, for later.
    #[inline]
    pub(crate) fn fetch(&self, keys: &[Key]) {
        for key in keys {
            self.prefetch(key);
        }
    }

    /// Asks for the home line of `key`, for later.
    #[inline]
    pub(crate) fn prefetch(&self, key: &Key) {
        near::prefetch(&self.lines[self.home(key.mixed)]);
    }

    /// The first entry in the home line of `key` that its tag fits: its entry most often, if it has one.
    #[inline]
    pub(crate) fn guess(&self, key: &Key) -> Option<u32> {
        let line = &self.lines[self.home(key.mixed)];
        let mut lanes = line.lanes(Self::tag(key.mixed));
        while lanes != 0 {
            let index = self.untagged(key.mixed, line.entries[Line::first(lanes)]);
            if index.is_some() {
                return index;
            }
            lanes &= lanes - 1;
        }
        None
    }

    /// Adds a key that is not there; `entries` already holds it at `index`.
    pub(crate) fn insert(&mut self, key: &Key, index: u32, entries: &[Entry]) {
        if self.len >= self.lines.len() * FULL || index > self.index_mask {
            self.grow(entries);
        }
        self.place(key.mixed, index);
    }

    fn place(&mut self, mixed: u64, index: u32) {
        let mut at = self.home(mixed);
        let tagged = self.tagged(mixed, index);
        loop {
            let line = &mut self.lines[at];
            let empty = line.lanes(EMPTY);
            if empty != 0 {
                let lane = Line::first(empty);
                line.tags[lane] = Self::tag(mixed);
                line.entries[lane] = tagged;
                self.len += 1;
                return;
            }
            line.overflow = line.overflow.saturating_add(1);
            at = self.next(at);
        }
    }

    /// Takes a key out; nothing happens where it is not there.
    pub(crate) fn remove(&mut self, key: &Key, entries: &[Entry]) {
        let Some((found, lane, _)) = self.locate(key, entries) else { return };
        self.lines[found].tags[lane] = EMPTY;
        self.len -= 1;
        let mut at = self.home(key.mixed);
        while at != found {
            let passed = &mut self.lines[at].overflow;
            // A saturated count is no longer known, so it stays: lookups just look further than they must.
            if *passed != u8::MAX {
                *passed -= 1;
            }
            at = self.next(at);
        }
    }

    #[cold]
    fn grow(&mut self, entries: &[Entry]) {
        let lines = if self.len >= self.lines.len() * FULL { 2 * self.lines.len() } else { self.lines.len() };
        let old = std::mem::replace(&mut self.lines, vec![Line::NEW; lines]);
        let old_mask = std::mem::replace(&mut self.index_mask, index_mask(entries.len()));
        self.len = 0;
        for line in &old {
            for (lane, &tag) in line.tags.iter().enumerate() {
                if tag != EMPTY {
                    let index = line.entries[lane] & old_mask;
                    let entry = &entries[index as usize];
                    self.place(self.key(entry.group(), entry.hash).mixed, index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn hash(number: u128) -> SequenceHash {
        SequenceHash::from_bytes(number.to_le_bytes())
    }

    fn entry(group: u16, number: u128) -> Entry {
        Entry::of(GroupId(group), hash(number))
    }

    /// Random inserts and removals of few and badly distributed keys against a map, with growth.
    #[test]
    fn agrees_with_a_map_over_random_inserts_and_removals() {
        let mut table = Table::new(16, 7);
        let mut entries: Vec<Entry> = Vec::new();
        let mut oracle: HashMap<(u16, u128), u32> = HashMap::new();
        let mut random = 0x1234_5678_9abc_def0_u64;
        for step in 0..60_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let group = (random >> 60) as u16 & 1;
            // Keys that differ in the upper 64 bits alone, or the lower alone.
            let number = u128::from(random >> 20 & 0x3ff);
            let number = if random & 1 == 0 { number << 100 } else { number };
            let key = table.key(GroupId(group), hash(number));
            let known = oracle.get(&(group, number)).copied();
            assert_eq!(table.find(&key, &entries), known, "step {step}");
            // Grow for a while, then shrink, so that removals leave lines with overflow behind.
            let remove = random >> 8 & 7 < if step / 10_000 % 2 == 0 { 2 } else { 6 };
            match known {
                Some(_) if remove => {
                    table.remove(&key, &entries);
                    oracle.remove(&(group, number));
                }
                None if !remove => {
                    entries.push(entry(group, number));
                    let index = entries.len() as u32 - 1;
                    table.insert(&key, index, &entries);
                    oracle.insert((group, number), index);
                }
                _ => {}
            }
            assert_eq!(table.len, oracle.len());
        }
    }

    /// Keys that are made to share one home line are still told apart, and can all be removed.
    #[test]
    fn crafted_collisions_are_just_different_keys() {
        let mut table = Table::new(1000, 1);
        let mut entries = Vec::new();
        let mut keys = Vec::new();
        for number in 0..200_000_u128 {
            let key = table.key(GroupId(0), hash(number));
            if table.home(key.mixed) == 3 && keys.len() < 400 {
                entries.push(entry(0, number));
                table.insert(&key, entries.len() as u32 - 1, &entries);
                keys.push(key);
            }
        }
        assert_eq!(keys.len(), 400);
        for (index, key) in keys.iter().enumerate() {
            assert_eq!(table.find(key, &entries), Some(index as u32));
        }
        for (index, key) in keys.iter().enumerate() {
            table.remove(key, &entries);
            assert_eq!(table.find(key, &entries), None);
            if let Some(next) = keys.get(index + 1) {
                assert_eq!(table.find(next, &entries), Some(index as u32 + 1));
            }
        }
        assert_eq!(table.len, 0);
        assert!(table.lines.iter().all(|line| line.overflow == 0 || line.overflow == u8::MAX));
    }
}
