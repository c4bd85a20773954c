//! From a block's hash to its run.

use super::run::Run;
use super::workers::At;
use hashbrown::HashTable;
use kvbm_plan::{GroupId, SequenceHash};
use std::hash::{BuildHasher, RandomState};

/// A place in a run, packed: five bytes without padding, since there is one for each block.
#[derive(Clone, Copy, Debug)]
struct Packed([u8; 5]);

impl Packed {
    fn new(at: At) -> Self {
        let [a, b, c, d] = at.run.to_le_bytes();
        Self([a, b, c, d, at.block])
    }

    fn at(self) -> At {
        let [a, b, c, d, block] = self.0;
        At { run: u32::from_le_bytes([a, b, c, d]), block }
    }
}

/// Every block of every run. The hashes themselves stand in the runs only.
#[derive(Debug)]
pub(super) struct Table {
    places: HashTable<Packed>,
    /// Secret of this table, so that nobody can send hashes that all fall into one bucket.
    seed: [u64; 2],
}

impl Default for Table {
    fn default() -> Self {
        let random = RandomState::new();
        Self { places: HashTable::new(), seed: [random.hash_one(1), random.hash_one(2)] }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.places.allocation_size()
    }

    pub(super) fn find(&self, runs: &[Run], group: GroupId, hash: &SequenceHash) -> Option<At> {
        let is = |packed: &Packed| is_block(runs, packed.at(), group, hash);
        self.places.find(mix(self.seed, group, hash), is).map(|packed| packed.at())
    }

    /// Adds a block that is not there and stands in its run already.
    pub(super) fn insert(&mut self, runs: &[Run], at: At) {
        let seed = self.seed;
        let key = |packed: &Packed| {
            let At { run, block } = packed.at();
            let run = &runs[run as usize];
            mix(seed, run.group, &run.hashes()[usize::from(block)])
        };
        let packed = Packed::new(at);
        self.places.insert_unique(key(&packed), packed, key);
    }

    /// Removes the entry of `hash` that says `at`.
    pub(super) fn remove(&mut self, group: GroupId, hash: &SequenceHash, at: At) {
        let packed = Packed::new(at);
        if let Ok(entry) = self.places.find_entry(mix(self.seed, group, hash), |other| other.0 == packed.0) {
            entry.remove();
        }
    }

    /// Gives memory back when most of it is unused.
    pub(super) fn shrink(&mut self, runs: &[Run]) {
        if self.places.capacity() > 1024 && self.places.len() < self.places.capacity() / 4 {
            let seed = self.seed;
            self.places.shrink_to(2 * self.places.len(), |packed| {
                let At { run, block } = packed.at();
                let run = &runs[run as usize];
                mix(seed, run.group, &run.hashes()[usize::from(block)])
            });
        }
    }
}

fn is_block(runs: &[Run], at: At, group: GroupId, hash: &SequenceHash) -> bool {
    let run = &runs[at.run as usize];
    run.hashes()[usize::from(at.block)] == *hash && run.group == group
}

/// A folded multiplication: both halves of the hash reach every bit.
fn mix(seed: [u64; 2], group: GroupId, hash: &SequenceHash) -> u64 {
    let hash = hash.to_u128();
    let low = hash as u64 ^ seed[0] ^ u64::from(group.0);
    let high = (hash >> 64) as u64 ^ seed[1];
    let product = u128::from(low) * u128::from(high);
    product as u64 ^ (product >> 64) as u64
}
