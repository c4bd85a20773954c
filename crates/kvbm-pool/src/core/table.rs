//! From (group, 128-bit hash) to the index of an entry.
//!
//! Lines of one cache line each: twelve tags of 7 bits and twelve 32-bit entry indices. A key lives in its home line or,
//! when that is full, in one further on, by steps that its class says, one of eight; every full line that it passed counts it, by its class. So a
//! lookup stops at the first line that nothing of the key's class passed, and deletion leaves no tombstone and moves nothing.
//! A tag only filters: equality is always that of all 128 bits and the group, compared in the entry. The bits of an index
//! that the largest entry does not need hold more of the tag, so that hardly ever a wrong entry is read for nothing.
//!
//! Lookups lock nothing. Keys come and go under the one lock of the table ([`Writing`]), for many blocks at a time, so
//! lines have one writer, and under that lock it is known whether a key is there: of two threads that register a block in two
//! shards one makes the entry.
//!
//! What a lookup finds without that lock, it finds like this. A key whose entry belongs to a shard that the caller has locked
//! came before that lock was taken, and cannot go: its lane is seen, whatever happens to the other lanes of its line (a writer
//! stores the words that it read under the same lock, so none of them lacks a lane that was there). Of other shards' keys it
//! sees some moment's state, or a lane half written: a hint, which the caller checks at
//! [`Entry::shard`](super::entry::Entry::shard), under that shard's lock.

use super::entry::Arena;
use super::line::{CLASSES, EMPTY, Line};
use crate::near;
use crate::sync::{SeenLeaf, SeenLeafGuard};
use kvbm_plan::{GroupId, SequenceHash};

/// Keys per line of a full table; more than this and too many lines overflow.
const FULL: usize = 10;

/// The primes that steps of one to eight lines are made of.
const STEP_FACTORS: [usize; 4] = [2, 3, 5, 7];
const _: () = assert!(CLASSES == 8);

/// More than a step.
const FEWEST_LINES: usize = 11;

/// Heap of a full table, rounded up.
pub(crate) const BYTES_PER_KEY: usize = size_of::<Line>().div_ceil(FULL);

/// A key's place in the table: what its home line and its tags are made of.
#[derive(Clone, Copy, Default)]
pub(crate) struct Mixed(u64);

/// A key, hashed once.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub group: GroupId,
    pub hash: SequenceHash,
    pub mixed: Mixed,
}

/// A few keys, as far as eight of their bits tell them apart: says of every key that comes again that it may have come.
#[derive(Default)]
pub(crate) struct Few([u64; 4]);

impl Few {
    /// Adds a key. Whether it, or another one that looks like it, is there already.
    #[inline]
    pub(crate) fn may_have(&mut self, Mixed(key): Mixed) -> bool {
        let (word, bit) = ((key >> 6) as usize & 3, 1 << (key & 63));
        let had = self.0[word] & bit != 0;
        self.0[word] |= bit;
        had
    }
}

/// Which line of a key is looked at.
#[derive(Clone, Copy)]
pub(crate) enum Looked {
    Home,
    /// The one behind it.
    Next,
}

/// What a line says of a key.
pub(crate) enum Guess {
    Entry(u32),
    /// It is in a line further on, if it is anywhere.
    Further,
    Nothing,
}

/// The right to change the table: its lock, a leaf lock; or nothing, where there is one shard, whose lock is all that it takes.
pub(crate) struct Writing<'a>(Option<SeenLeafGuard<'a, ()>>);

impl<'a> Writing<'a> {
    #[inline]
    pub(crate) fn begin(lock: Option<&'a SeenLeaf<()>>) -> Self {
        Self(lock.map(SeenLeaf::lock))
    }

    /// Whether others could have changed the table since it was last looked at.
    #[inline]
    pub(crate) fn has_others(&self) -> bool {
        self.0.is_some()
    }
}

pub(crate) struct Table {
    lines: Box<[Line]>,
    seed: u64,
    /// Which bits of `Line::entries` are the index.
    index_mask: u32,
}

/// Ones for all bits that indices below `entries` need. No index is all ones.
fn index_mask(entries: usize) -> u32 {
    u32::try_from((entries + 1).next_power_of_two() - 1).unwrap_or(u32::MAX)
}

/// How many lines a table for so many keys has: a number that no step from line to line divides, so that each leads to all lines.
fn lines_for(entries: usize) -> usize {
    let all_are_reached = |&lines: &usize| STEP_FACTORS.iter().all(|factor| lines % factor != 0);
    let least = entries.div_ceil(FULL).max(FEWEST_LINES);
    // Of ten numbers in a row at least one is a multiple of none of them.
    (least..least + 10).find(all_are_reached).unwrap_or(least)
}

impl Table {
    /// A table for `entries` keys. `seed` makes the home of a key unpredictable: hashes of an engine may be chosen by its users.
    pub(crate) fn new(entries: usize, seed: u64) -> Self {
        let lines = (0..lines_for(entries)).map(|_| Line::new()).collect();
        Self { lines, seed, index_mask: index_mask(entries) }
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
        // Fold a full multiplication, then multiply again: every bit of the key reaches the upper half.
        let wide = u128::from(low) * u128::from(high);
        Mixed((wide as u64 ^ (wide >> 64) as u64 ^ low.rotate_left(32)).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    #[inline]
    fn home(&self, Mixed(mixed): Mixed) -> usize {
        (((mixed >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn tag(Mixed(mixed): Mixed) -> u8 {
        0x80 | (mixed as u8)
    }

    /// Bits that are not in the tag of a line's words, and in the home line only where there are more lines than memory.
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

    /// The line that a key is in or behind, if it passed this one. Keys that pass the same line go to different ones, by their class.
    #[inline]
    fn next(&self, line: usize, key: Mixed) -> usize {
        let next = line + 1 + (Self::class(key) % CLASSES) as usize;
        if next < self.lines.len() { next } else { next - self.lines.len() }
    }

    /// Where `key` is: the entry of its block.
    #[inline]
    pub(crate) fn find(&self, key: &Key, entries: &Arena) -> Option<u32> {
        let fits = |index| entries[index].is_block(key.group, key.hash);
        self.locate(key.mixed, fits).map(|(_, _, index)| index)
    }

    /// The line, lane and index of the first lane that has the key's tags and an index that `fits`.
    #[inline]
    fn locate(&self, key: Mixed, fits: impl Fn(u32) -> bool) -> Option<(usize, usize, u32)> {
        let tag = Self::tag(key);
        let home = self.home(key);
        let mut at = home;
        loop {
            let line = &self.lines[at];
            let mut lanes = line.lanes(tag);
            while lanes != 0 {
                let lane = Line::first(lanes);
                if let Some(index) = self.untagged(key, line.entries[lane].get())
                    && fits(index)
                {
                    return Some((at, lane, index));
                }
                lanes &= lanes - 1;
            }
            if !line.was_passed(Self::class(key)) {
                return None;
            }
            at = self.next(at, key);
            if at == home {
                return None;
            }
        }
    }

    /// Asks for the home line of a key, for later.
    #[inline]
    pub(crate) fn prefetch(&self, key: Mixed) {
        self.prefetch_line(key, Looked::Home);
    }

    /// Asks for a line of a key, for later.
    #[inline]
    pub(crate) fn prefetch_line(&self, key: Mixed, which: Looked) {
        near::prefetch(&self.lines[self.line(key, which)]);
    }

    #[inline]
    fn line(&self, key: Mixed, which: Looked) -> usize {
        let home = self.home(key);
        match which {
            Looked::Home => home,
            Looked::Next => self.next(home, key),
        }
    }

    /// The first entry in a line of a key that its tag fits: its entry most often, if it has one.
    #[inline]
    pub(crate) fn guess(&self, key: Mixed, which: Looked) -> Guess {
        let line = &self.lines[self.line(key, which)];
        let mut lanes = line.lanes(Self::tag(key));
        while lanes != 0 {
            if let Some(index) = self.untagged(key, line.entries[Line::first(lanes)].get()) {
                return Guess::Entry(index);
            }
            lanes &= lanes - 1;
        }
        if line.was_passed(Self::class(key)) { Guess::Further } else { Guess::Nothing }
    }

    /// Adds a key that is not there; `index` is below the number that the table is for.
    #[inline]
    pub(crate) fn insert(&self, _writing: &Writing<'_>, key: Mixed, index: u32) {
        self.place(key, index);
    }

    /// A table has more lanes than there are entries: there is room.
    #[inline]
    fn place(&self, key: Mixed, index: u32) {
        let mut at = self.home(key);
        loop {
            let line = &self.lines[at];
            let empty = line.lanes(EMPTY);
            if empty != 0 {
                line.fill(Line::first(empty), Self::tag(key), self.tagged(key, index));
                return;
            }
            line.count_passing(Self::class(key), true);
            at = self.next(at, key);
        }
    }

    /// Takes a key out; nothing happens where it is not there.
    #[inline]
    pub(crate) fn remove(&self, _writing: &Writing<'_>, key: Mixed, index: u32) {
        let Some((found, lane, _)) = self.locate(key, |other| other == index) else { return };
        self.lines[found].clear(lane);
        let mut at = self.home(key);
        while at != found {
            self.lines[at].count_passing(Self::class(key), false);
            at = self.next(at, key);
        }
    }

    /// The same keys in a table for all of `entries`. Nothing else happens meanwhile.
    #[cold]
    pub(crate) fn grown(&self, entries: &Arena) -> Self {
        let larger = Self::new(entries.len(), self.seed);
        for index in 0..entries.len() as u32 {
            let entry = &entries[index];
            if entry.in_use() {
                larger.place(larger.mix(entry.group(), entry.hash()), index);
            }
        }
        larger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::entry::Arena;
    use crate::core::line::LANES;
    use kvbm_plan::NamespaceId;
    use std::collections::HashMap;

    fn hash(number: u128) -> SequenceHash {
        SequenceHash::from_bytes(number.to_le_bytes())
    }

    /// A table with its entries; vacant ones are taken again.
    struct World {
        table: Table,
        entries: Arena,
        vacant: Vec<u32>,
    }

    impl World {
        fn new(entries: usize, seed: u64) -> Self {
            let entries = Arena::new(entries);
            let vacant = (0..entries.len() as u32).rev().collect();
            Self { table: Table::new(entries.len(), seed), entries, vacant }
        }

        fn insert(&mut self, group: u16, number: u128) -> u32 {
            if self.vacant.is_empty() {
                let old = self.entries.len() as u32;
                assert!(self.entries.grow());
                self.table = self.table.grown(&self.entries);
                self.vacant = (old..self.entries.len() as u32).rev().collect();
            }
            let index = self.vacant.pop().unwrap();
            self.entries[index].begin(0, GroupId(group), hash(number), NamespaceId(0), 0);
            self.table.insert(&Writing::begin(None), self.table.mix(GroupId(group), hash(number)), index);
            index
        }

        fn remove(&mut self, key: &Key, index: u32) {
            self.table.remove(&Writing::begin(None), key.mixed, index);
            self.entries[index].end();
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
            // Grow for a while, then shrink, so that removals leave lines behind that keys had passed.
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
        assert!((1024..=8192).contains(&world.entries.len()), "it grew with the keys");
    }

    #[test]
    fn every_step_leads_to_every_line() {
        for entries in 0..3000 {
            let lines = lines_for(entries);
            assert!(
                lines * FULL >= entries && lines < entries / FULL + FEWEST_LINES + 10,
                "{entries}: {lines}"
            );
            for step in 1..=CLASSES as usize {
                let mut reached = vec![false; lines];
                (0..lines).for_each(|turn| reached[turn * step % lines] = true);
                assert!(
                    reached.iter().all(|&reached| reached),
                    "{entries} entries, {lines} lines, step {step}"
                );
            }
        }
    }

    /// Where all entries are in use and keys come and go, a key that is not there is missed after two lines.
    #[test]
    fn what_is_not_there_is_missed_soon_in_a_full_table() {
        let mut world = World::new(10_000, 5);
        let mut looked_at = 0;
        for number in 0..50_000_u128 {
            let key = world.table.key(GroupId(0), hash(number * 77_777));
            let mut line = world.table.home(key.mixed);
            looked_at += 1;
            while world.table.lines[line].was_passed(Table::class(key.mixed)) {
                line = world.table.next(line, key.mixed);
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
        assert!(looked_at < 2 * 50_000, "{looked_at} lines for 50,000 keys");
    }

    /// Keys that are made to share one home line are still told apart, and can all be removed.
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
        let untouched = |line: &Line| line.lanes(EMPTY).count_ones() == LANES as u32;
        assert!(world.table.lines.iter().all(untouched));
        assert!(world.table.lines.iter().all(Line::has_no_known_passing));
    }

    /// Threads whose keys meet in the same lines take nothing from each other, and look at lines that others write.
    #[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
    #[test]
    fn what_a_thread_has_put_in_is_found_while_others_write() {
        let lock = SeenLeaf::default();
        let table = Table::new(400, 3);
        let entries = Arena::new(400);
        let key = |index: u32| table.key(GroupId(0), hash(u128::from(index)));
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let (table, entries, key, lock) = (&table, &entries, &key, &lock);
                scope.spawn(move || {
                    for round in 0..200_u32 {
                        for index in (thread * 100)..(thread * 100 + 100) {
                            entries[index].begin(0, GroupId(0), hash(u128::from(index)), NamespaceId(0), 0);
                            table.insert(&Writing::begin(Some(lock)), key(index).mixed, index);
                        }
                        for index in (thread * 100)..(thread * 100 + 100) {
                            assert_eq!(table.find(&key(index), entries), Some(index), "round {round}");
                            table.remove(&Writing::begin(Some(lock)), key(index).mixed, index);
                            entries[index].end();
                            assert_eq!(table.find(&key(index), entries), None);
                        }
                    }
                });
            }
        });
        assert!(table.lines.iter().all(|line| line.lanes(EMPTY).count_ones() == LANES as u32));
        assert!(table.lines.iter().all(Line::has_no_known_passing));
    }
}
