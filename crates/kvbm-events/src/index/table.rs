//! From a block's hash to its run.
//!
//! Linear probing over words: one cache line for most questions, where a table that keeps its
//! control bytes apart needs two. A word holds the run (32 bits), the block in it (8 bits) and 24
//! bits of the key, so that the run is hardly ever asked in vain. The hashes themselves stand in
//! the runs only.

use super::run::BlockRun;
use super::workers::At;
use kvbm_plan::{GroupId, SequenceHash};
use std::hash::{BuildHasher, RandomState};

/// Nothing was ever here since the table was made.
const EMPTY: u64 = u64::MAX;
/// Something was here: those that had to go further still stand further on.
const REMOVED: u64 = u64::MAX - 1;
/// Lowest word that is none of a run: run numbers are below `u32::MAX`.
const SPECIAL: u64 = (u32::MAX as u64) << 32;

const TAG_BITS: u32 = 24;

const MIN_SLOTS: usize = 64;

/// Every block of every run.
#[derive(Debug)]
pub(super) struct Table {
    /// A power of two of slots.
    slots: Vec<u64>,
    len: usize,
    /// Slots that are not [`EMPTY`].
    used: usize,
    /// Secret of this table, so that nobody can send hashes that all fall into one place.
    seed: [u64; 2],
}

impl Default for Table {
    fn default() -> Self {
        let random = RandomState::new();
        let seed = [random.hash_one(1), random.hash_one(2)];
        Self { slots: vec![EMPTY; MIN_SLOTS], len: 0, used: 0, seed }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u64>()
    }

    /// Slots in the order in which a key is looked for.
    fn probe(&self, key: u64) -> impl Iterator<Item = (usize, u64)> + '_ {
        let mask = self.slots.len() - 1;
        let home = (key >> TAG_BITS) as usize;
        // Never full, so the search ends at an empty slot.
        (0..self.slots.len()).map(move |step| {
            let slot = (home + step) & mask;
            (slot, self.slots[slot])
        })
    }

    pub(super) fn find(&self, runs: &[BlockRun], group: GroupId, hash: &SequenceHash) -> Option<At> {
        let key = mix(self.seed, group, hash);
        for (_, word) in self.probe(key) {
            if word == EMPTY {
                return None;
            }
            if (word ^ key) & TAG == 0 && word < SPECIAL {
                let at = place(word);
                let run = &runs[at.run as usize];
                if run.hashes()[usize::from(at.block)] == *hash && run.group == group {
                    return Some(at);
                }
            }
        }
        None
    }

    /// Where a block belongs; `None` if it is there. [`Self::make_room`] first.
    pub(super) fn vacancy(&self, runs: &[BlockRun], group: GroupId, hash: &SequenceHash) -> Option<Vacant> {
        let key = mix(self.seed, group, hash);
        let mut vacant = None;
        for (slot, word) in self.probe(key) {
            if word >= SPECIAL {
                vacant = vacant.or(Some(slot));
                if word == EMPTY {
                    break;
                }
            } else if (word ^ key) & TAG == 0 {
                let at = place(word);
                let run = &runs[at.run as usize];
                if run.hashes()[usize::from(at.block)] == *hash && run.group == group {
                    return None;
                }
            }
        }
        // There is always an empty slot: a quarter of them at least.
        vacant.map(|slot| Vacant { slot, tag: key & TAG })
    }

    /// Puts a block where [`Self::vacancy`] said, before anything else changes.
    pub(super) fn fill(&mut self, vacant: &Vacant, at: At) {
        let slot = &mut self.slots[vacant.slot];
        self.used += usize::from(*slot == EMPTY);
        *slot = word(at, vacant.tag);
        self.len += 1;
    }

    /// Makes room for one more block. Every block that stands in a run must be there.
    pub(super) fn make_room(&mut self, runs: &[BlockRun]) {
        if self.used >= self.slots.len() / 4 * 3 {
            self.rebuild(runs);
        }
    }

    /// Reads where `hashes` would stand, all before any answer is needed, so that the memory works
    /// on them at once.
    pub(super) fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        let mask = self.slots.len() - 1;
        let home = |hash| self.slots[(mix(self.seed, group, hash) >> TAG_BITS) as usize & mask];
        std::hint::black_box(hashes.iter().fold(0, |all, hash| all ^ home(hash)));
    }

    /// Adds a block that is not there and stands in its run already; every other block that stands
    /// in a run must be there or be added next. Whether the table was rebuilt and has them all now.
    pub(super) fn insert(&mut self, runs: &[BlockRun], at: At) -> bool {
        let rebuild = self.used >= self.slots.len() / 4 * 3;
        if rebuild {
            self.rebuild(runs);
        } else {
            let run = &runs[at.run as usize];
            self.put(mix(self.seed, run.group, &run.hashes()[usize::from(at.block)]), at);
        }
        rebuild
    }

    fn put(&mut self, key: u64, at: At) {
        let found = self.probe(key).find(|(_, word)| *word >= SPECIAL);
        // There is always an empty slot: a quarter of them at least.
        let Some((slot, word)) = found else { return };
        self.slots[slot] = self::word(at, key & TAG);
        self.len += 1;
        self.used += usize::from(word == EMPTY);
    }

    /// Makes a new table with room for as many blocks again. It goes along the runs, where the
    /// hashes lie side by side.
    fn rebuild(&mut self, runs: &[BlockRun]) {
        let slots = (2 * self.len).next_power_of_two().max(MIN_SLOTS);
        (self.slots, self.len, self.used) = (vec![EMPTY; slots], 0, 0);
        for (index, run) in runs.iter().enumerate() {
            self.touch(run.group, run.hashes());
            for (block, hash) in run.hashes().iter().enumerate() {
                self.put(mix(self.seed, run.group, hash), At { run: index as u32, block: block as u8 });
            }
        }
    }

    /// Removes the entry of `hash` that says `at`.
    pub(super) fn remove(&mut self, group: GroupId, hash: &SequenceHash, at: At) {
        let key = mix(self.seed, group, hash);
        let until_empty = self.probe(key).take_while(|(_, word)| *word != EMPTY);
        let found = until_empty.filter(|(_, word)| *word < SPECIAL).find(|(_, word)| place(*word) == at);
        if let Some((slot, _)) = found {
            self.slots[slot] = REMOVED;
            self.len -= 1;
        }
    }

    /// Gives memory back when most of it is unused. Every block that stands in a run must be there.
    pub(super) fn shrink(&mut self, runs: &[BlockRun]) {
        if self.slots.len() > 1024 && self.len < self.slots.len() / 8 {
            self.rebuild(runs);
        }
    }
}

/// Where a block belongs.
pub(super) struct Vacant {
    slot: usize,
    tag: u64,
}

const TAG: u64 = (1 << TAG_BITS) - 1;

fn word(at: At, tag: u64) -> u64 {
    u64::from(at.run) << 32 | u64::from(at.block) << TAG_BITS | tag
}

fn place(word: u64) -> At {
    At { run: (word >> 32) as u32, block: (word >> TAG_BITS) as u8 }
}

/// A folded multiplication: both halves of the hash reach every bit.
fn mix(seed: [u64; 2], group: GroupId, hash: &SequenceHash) -> u64 {
    let hash = hash.to_u128();
    let low = hash as u64 ^ seed[0] ^ u64::from(group.0);
    let high = (hash >> 64) as u64 ^ seed[1];
    let product = u128::from(low) * u128::from(high);
    product as u64 ^ (product >> 64) as u64
}
