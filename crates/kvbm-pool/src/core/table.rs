//! The hash table from (group, 128-bit sequence hash) to the index of an entry.
//!
//! A bucket is one cache bucket with twelve tags of 7 bits and twelve 32-bit entry indices. A key
//! is in its home bucket or, when that is full, in one further on; the step from bucket to bucket
//! depends on the key's class, one of eight. Every full bucket that a key passed counts it, by
//! class. So a lookup stops at the first bucket that no key of this class passed, and a removal
//! leaves no tombstone and moves nothing.
//!
//! A tag only filters: equality is always that of all 128 bits and the group, compared in the
//! entry. The bits of an index that the largest entry does not need hold more of the tag, so a
//! lookup hardly ever reads a wrong entry.

use super::bucket::{Bucket, CLASSES, EMPTY};
use crate::entry::Entry;
use crate::prefetch::prefetch;
use kvbm_plan::{GroupId, SequenceHash};

/// Keys per bucket of a full table; more than this and too many buckets overflow.
const FULL: usize = 10;

/// The primes that steps of one to eight buckets are made of.
const STEP_FACTORS: [usize; 4] = [2, 3, 5, 7];
const _: () = assert!(CLASSES == 8);

/// More than a step.
const FEWEST_LINES: usize = 11;

/// Heap of a full table, rounded up.
pub(crate) const BYTES_PER_KEY: usize = size_of::<Bucket>().div_ceil(FULL);

/// A mixed key: its home bucket and its tags are made of it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Mixed(u64);

/// A key, hashed once.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub group: GroupId,
    pub hash: SequenceHash,
    pub mixed: Mixed,
}

/// The hash table.
pub(crate) struct Table {
    buckets: Box<[Bucket]>,
    seed: u64,
    /// Which bits of `Bucket::entries` are the index.
    index_mask: u32,
}

/// Ones for all bits that indices below `entries` need. No index is all ones.
fn index_mask(entries: usize) -> u32 {
    u32::try_from((entries + 1).next_power_of_two() - 1).unwrap_or(u32::MAX)
}

/// How many buckets a table for so many keys has: a number that no step from bucket to bucket
/// divides, so that each leads to all buckets.
fn buckets_for(entries: usize) -> usize {
    let all_are_reached = |&buckets: &usize| STEP_FACTORS.iter().all(|factor| buckets % factor != 0);
    let least = entries.div_ceil(FULL).max(FEWEST_LINES);
    // Of ten numbers in a row at least one is a multiple of none of them.
    (least..least + 10).find(all_are_reached).unwrap_or(least)
}

impl Table {
    /// A table for `entries` keys. `seed` makes the home of a key unpredictable: hashes of an
    /// engine may be chosen by its users.
    pub(crate) fn new(entries: usize, seed: u64) -> Self {
        let buckets = (0..buckets_for(entries)).map(|_| Bucket::new()).collect();
        Self { buckets, seed, index_mask: index_mask(entries) }
    }

    #[inline]
    pub(crate) fn key(&self, group: GroupId, hash: SequenceHash) -> Key {
        Key { group, hash, mixed: self.mix(group, hash) }
    }

    #[inline]
    pub(crate) fn mix(&self, group: GroupId, hash: SequenceHash) -> Mixed {
        let value = hash.to_u128();
        let low = value as u64 ^ self.seed;
        let high = (value >> 64) as u64 ^ 0x9e37_79b9_7f4a_7c15 ^ (u64::from(group.0) << 40);
        // Fold a full multiplication, then multiply again: every bit of the key reaches the upper
        // half.
        let wide = u128::from(low) * u128::from(high);
        Mixed((wide as u64 ^ (wide >> 64) as u64 ^ low.rotate_left(32)).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    #[inline]
    fn home(&self, Mixed(mixed): Mixed) -> usize {
        (((mixed >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn tag(Mixed(mixed): Mixed) -> u8 {
        0x80 | (mixed as u8)
    }

    /// Bits that are not in the tag of a bucket's words, and in the home bucket only where there
    /// are more buckets than memory.
    #[inline]
    fn class(Mixed(mixed): Mixed) -> u64 {
        mixed >> 32
    }

    /// An index as a lane has it.
    #[inline]
    fn tagged(&self, Mixed(mixed): Mixed, index: u32) -> u32 {
        (mixed >> 8) as u32 & !self.index_mask | index
    }

    /// The index in a lane whose tag fits, if the rest of the tag does.
    #[inline]
    fn untagged(&self, mixed: Mixed, lane: u32) -> Option<u32> {
        let index = lane & self.index_mask;
        (lane == self.tagged(mixed, index) && index != self.index_mask).then_some(index)
    }

    /// The bucket that a key is in or behind, if it passed this one. Keys that pass the same bucket
    /// go to different ones, by their class.
    #[inline]
    fn next(&self, bucket: usize, key: Mixed) -> usize {
        let next = bucket + 1 + (Self::class(key) % CLASSES) as usize;
        if next < self.buckets.len() { next } else { next - self.buckets.len() }
    }

    /// Where `key` is: the entry of its block.
    #[inline]
    pub(crate) fn find(&self, key: &Key, entries: &[Entry]) -> Option<u32> {
        let fits = |index| entries[index as usize].is_block(key.group, key.hash);
        self.locate(key.mixed, fits).map(|(_, _, index)| index)
    }

    /// The bucket, lane and index of the first lane that has the key's tags and an index that
    /// `fits`.
    #[inline]
    fn locate(&self, key: Mixed, fits: impl Fn(u32) -> bool) -> Option<(usize, usize, u32)> {
        let tag = Self::tag(key);
        let home = self.home(key);
        let mut at = home;
        loop {
            let bucket = &self.buckets[at];
            let mut lanes = bucket.lanes(tag);
            while lanes != 0 {
                let lane = Bucket::first(lanes);
                if let Some(index) = self.untagged(key, bucket.entries[lane].get())
                    && fits(index)
                {
                    return Some((at, lane, index));
                }
                lanes &= lanes - 1;
            }
            if !bucket.was_passed(Self::class(key)) {
                return None;
            }
            at = self.next(at, key);
            if at == home {
                return None;
            }
        }
    }

    /// Reads the home bucket of a key into the cache, for later.
    #[inline]
    pub(crate) fn prefetch(&self, key: Mixed) {
        prefetch(&self.buckets[self.home(key)]);
    }

    /// The first entry in the home bucket of a key that its tag fits: most often the key's own.
    #[inline]
    pub(crate) fn guess(&self, key: Mixed) -> Option<u32> {
        let bucket = &self.buckets[self.home(key)];
        let lanes = bucket.lanes(Self::tag(key));
        (lanes != 0)
            .then(|| bucket.entries[Bucket::first(lanes)].get())
            .and_then(|lane| self.untagged(key, lane))
    }

    /// Adds a key that is not there; `index` is below the number that the table is for.
    #[inline]
    pub(crate) fn insert(&self, key: Mixed, index: u32) {
        self.put(key, index);
    }

    /// A table has more lanes than there are entries: there is room.
    #[inline]
    fn put(&self, key: Mixed, index: u32) {
        let mut at = self.home(key);
        loop {
            let bucket = &self.buckets[at];
            let empty = bucket.lanes(EMPTY);
            if empty != 0 {
                bucket.fill(Bucket::first(empty), Self::tag(key), self.tagged(key, index));
                return;
            }
            bucket.count_passing(Self::class(key), true);
            at = self.next(at, key);
        }
    }

    /// Takes a key out; nothing happens where it is not there.
    #[inline]
    pub(crate) fn remove(&self, key: Mixed, index: u32) {
        let Some((found, lane, _)) = self.locate(key, |other| other == index) else { return };
        self.buckets[found].clear(lane);
        let mut at = self.home(key);
        while at != found {
            self.buckets[at].count_passing(Self::class(key), false);
            at = self.next(at, key);
        }
    }

    /// The same keys in a table for all of `entries`.
    #[cold]
    pub(crate) fn grown(&self, entries: &[Entry]) -> Self {
        let larger = Self::new(entries.len(), self.seed);
        for index in 0..entries.len() as u32 {
            let entry = &entries[index as usize];
            if entry.in_use() {
                larger.put(larger.mix(entry.group(), entry.hash()), index);
            }
        }
        larger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::bucket::LANES;
    use crate::entry::Entry;
    use kvbm_plan::NamespaceId;
    use std::collections::HashMap;

    fn hash(number: u128) -> SequenceHash {
        SequenceHash::from_bytes(number.to_le_bytes())
    }

    /// A table with its entries; vacant ones are taken again.
    struct World {
        table: Table,
        entries: Vec<Entry>,
        vacant: Vec<u32>,
    }

    impl World {
        fn new(entries: usize, seed: u64) -> Self {
            let entries = Entry::many(entries);
            let vacant = (0..entries.len() as u32).rev().collect();
            Self { table: Table::new(entries.len(), seed), entries, vacant }
        }

        fn insert(&mut self, group: u16, number: u128) -> u32 {
            if self.vacant.is_empty() {
                let old = self.entries.len() as u32;
                self.entries.extend(Entry::many(self.entries.len()));
                self.table = self.table.grown(&self.entries);
                self.vacant = (old..self.entries.len() as u32).rev().collect();
            }
            let index = self.vacant.pop().unwrap();
            self.entries[index as usize].begin(GroupId(group), hash(number), NamespaceId(0), 0);
            self.table.insert(self.table.mix(GroupId(group), hash(number)), index);
            index
        }

        fn remove(&mut self, key: &Key, index: u32) {
            self.table.remove(key.mixed, index);
            self.entries[index as usize].end();
            self.vacant.push(index);
        }
    }

    /// Random inserts and removals of few and badly distributed keys against a map, with growth.
    #[test]
    fn agrees_with_a_map_over_random_inserts_and_removals() {
        let mut world = World::new(16, 7);
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
            let key = world.table.key(GroupId(group), hash(number));
            let known = oracle.get(&(group, number)).copied();
            assert_eq!(world.table.find(&key, &world.entries), known, "step {step}");
            // Grow for a while, then shrink, so that removals leave buckets behind that keys had
            // passed.
            let remove = random >> 8 & 7 < if step / 10_000 % 2 == 0 { 2 } else { 6 };
            match known {
                Some(index) if remove => {
                    world.remove(&key, index);
                    oracle.remove(&(group, number));
                }
                None if !remove => {
                    oracle.insert((group, number), world.insert(group, number));
                }
                _ => {}
            }
        }
        assert!((512..=8192).contains(&world.entries.len()), "it grew with the keys");
    }

    #[test]
    fn every_step_leads_to_every_bucket() {
        for entries in 0..3000 {
            let buckets = buckets_for(entries);
            assert!(
                buckets * FULL >= entries && buckets < entries / FULL + FEWEST_LINES + 10,
                "{entries}: {buckets}"
            );
            for step in 1..=CLASSES as usize {
                let mut reached = vec![false; buckets];
                (0..buckets).for_each(|turn| reached[turn * step % buckets] = true);
                assert!(
                    reached.iter().all(|&reached| reached),
                    "{entries} entries, {buckets} buckets, step {step}"
                );
            }
        }
    }

    /// Where all entries are in use and keys come and go, a key that is not there is missed after
    /// two buckets.
    #[test]
    fn what_is_not_there_is_missed_soon_in_a_full_table() {
        let mut world = World::new(10_000, 5);
        let mut looked_at = 0;
        for number in 0..50_000_u128 {
            let key = world.table.key(GroupId(0), hash(number * 77_777));
            let mut bucket = world.table.home(key.mixed);
            looked_at += 1;
            while world.table.buckets[bucket].was_passed(Table::class(key.mixed)) {
                bucket = world.table.next(bucket, key.mixed);
                looked_at += 1;
            }
            let index = world.insert(0, number * 77_777);
            if let Some(oldest) = number.checked_sub(9_999) {
                let oldest = world.table.key(GroupId(0), hash(oldest * 77_777));
                let index = world.table.find(&oldest, &world.entries).expect("it was put in");
                world.remove(&oldest, index);
            }
            assert!((index as usize) < 10_000, "no more entries than there were");
        }
        assert!(looked_at < 2 * 50_000, "{looked_at} buckets for 50,000 keys");
    }

    /// Keys that are made to share one home bucket are still told apart, and can all be removed.
    #[test]
    fn crafted_collisions_are_just_different_keys() {
        let mut world = World::new(1000, 1);
        let mut keys = Vec::new();
        for number in 0..200_000_u128 {
            let key = world.table.key(GroupId(0), hash(number));
            if world.table.home(key.mixed) == 3 && keys.len() < 400 {
                keys.push((key, world.insert(0, number)));
            }
        }
        assert_eq!(keys.len(), 400);
        for (key, index) in &keys {
            assert_eq!(world.table.find(key, &world.entries), Some(*index));
        }
        for (at, (key, index)) in keys.iter().enumerate() {
            world.remove(key, *index);
            assert_eq!(world.table.find(key, &world.entries), None);
            if let Some((next, index)) = keys.get(at + 1) {
                assert_eq!(world.table.find(next, &world.entries), Some(*index));
            }
        }
        let untouched = |bucket: &Bucket| bucket.lanes(EMPTY).count_ones() == LANES as u32;
        assert!(world.table.buckets.iter().all(untouched));
        assert!(world.table.buckets.iter().all(Bucket::has_no_known_passing));
    }
}
