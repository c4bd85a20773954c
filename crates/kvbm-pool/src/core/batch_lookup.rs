//! Looking up the blocks of a chain, batch by batch.
//!
//! A lookup of one block waits for memory twice: for a bucket of the table, and for the entry that
//! it names. A batch lookup takes these steps for four batches at a time, each a step behind the
//! next one, so that memory reads of different batches overlap.
//!
//! Blocks that were registered together mostly have entries in a row, up or down: the free list of
//! entries hands them out so. So a batch first asks the table for its first and its last block.
//! Where these are as far apart as their entries, the entries between are guesses. Every guess is
//! compared in the entry with all 128 bits and the group; a wrong guess costs a lookup in the
//! table.

use super::entries::{BATCH, Entries};
use crate::entry::NONE;
use crate::prefetch::prefetch;
use kvbm_plan::{GroupId, SequenceHash};

/// Batches under way: one in each step.
const STEPS: usize = 4;

/// The entries of a chain's blocks, in order.
pub(crate) struct BatchLookup<'h> {
    group: GroupId,
    /// Hashes whose batch has not begun.
    rest: &'h [SequenceHash],
    /// In a ring; the oldest is compared next.
    batches: [Batch<'h>; STEPS],
    oldest: usize,
    found: [u32; BATCH],
}

/// Blocks that are looked up together.
#[derive(Clone, Copy)]
struct Batch<'h> {
    hashes: &'h [SequenceHash],
    /// Their entries most likely; `NONE` where none is known.
    guesses: [u32; BATCH],
    /// Whether the entries are in a row.
    is_row: bool,
}

impl<'h> BatchLookup<'h> {
    pub(crate) fn new(entries: &Entries, group: GroupId, hashes: &'h [SequenceHash]) -> Self {
        let none = Batch { hashes: &[], guesses: [NONE; BATCH], is_row: true };
        let mut lookup =
            Self { group, rest: hashes, batches: [none; STEPS], oldest: 0, found: [NONE; BATCH] };
        for at in 0..STEPS {
            lookup.begin(entries, at);
        }
        for at in [0, 1] {
            lookup.batches[at].guess_row(entries, group);
        }
        lookup.batches[0].guess_each(entries, group);
        lookup
    }

    /// The entries of the next [`BATCH`] blocks, `NONE` for those that have none; fewer at the end
    /// of the chain.
    #[inline]
    pub(crate) fn next(&mut self, entries: &Entries) -> Option<&[u32]> {
        let oldest = self.oldest;
        self.batches[(oldest + 1) % STEPS].guess_each(entries, self.group);
        self.batches[(oldest + 2) % STEPS].guess_row(entries, self.group);
        let batch = &self.batches[oldest];
        for ((found, &hash), &guess) in self.found.iter_mut().zip(batch.hashes).zip(&batch.guesses) {
            let is_right = guess != NONE && entries[guess].is_block(self.group, hash);
            *found = if is_right { guess } else { entries.find(self.group, hash).unwrap_or(NONE) };
        }
        let count = batch.hashes.len();
        self.begin(entries, oldest);
        self.oldest = (oldest + 1) % STEPS;
        (count > 0).then(|| &self.found[..count])
    }

    /// The first step of the next batch: prefetches the buckets of its first and its last block.
    #[inline]
    fn begin(&mut self, entries: &Entries, at: usize) {
        let hashes;
        (hashes, self.rest) = self.rest.split_at(self.rest.len().min(BATCH));
        let batch = &mut self.batches[at];
        (batch.hashes, batch.guesses) = (hashes, [NONE; BATCH]);
        batch.is_row = hashes.is_empty();
        for &hash in [hashes.first(), hashes.last()].into_iter().flatten() {
            entries.prefetch_bucket(self.group, hash);
        }
    }
}

impl Batch<'_> {
    /// The second step: guesses the entries between the first and the last one and prefetches them.
    /// Where they are not in a row, it prefetches all buckets.
    #[inline]
    fn guess_row(&mut self, entries: &Entries, group: GroupId) {
        let (Some(&first), Some(&last)) = (self.hashes.first(), self.hashes.last()) else { return };
        let guess = |hash| entries.guess(group, hash);
        if let (Some(from), Some(to)) = (guess(first), guess(last))
            && from.abs_diff(to) as usize == self.hashes.len() - 1
        {
            self.is_row = true;
            for (guess, at) in self.guesses.iter_mut().zip(0..self.hashes.len() as u32) {
                *guess = if to >= from { from + at } else { from - at };
                prefetch(&entries[*guess]);
            }
            return;
        }
        entries.prefetch_buckets(self.hashes.iter().map(|&hash| (group, hash)));
    }

    /// The third step, where the entries are not in a row: reads the buckets, and prefetches the
    /// entries that they name.
    #[inline]
    fn guess_each(&mut self, entries: &Entries, group: GroupId) {
        if self.is_row {
            return;
        }
        for (guess, &hash) in self.guesses.iter_mut().zip(self.hashes) {
            if let Some(index) = entries.guess(group, hash) {
                prefetch(&entries[index]);
                *guess = index;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::test_chains::{GROUP, register};
    use crate::{G1, Registry, RegistryConfig};

    fn hash(number: u128) -> SequenceHash {
        SequenceHash::from_bytes(number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_le_bytes())
    }

    /// Registers the blocks of `chain` that are not there, in one batch.
    fn register_rest(registry: &Registry, chain: &[SequenceHash]) {
        let known = registry.pool::<G1>().match_sequence_hashes(GROUP, chain);
        if known.len() < chain.len() {
            drop(register::<G1>(registry, chain, known.len()));
        }
    }

    fn found_in_batches(entries: &Entries, group: GroupId, hashes: &[SequenceHash]) -> Vec<u32> {
        let mut lookup = BatchLookup::new(entries, group, hashes);
        let mut all = Vec::new();
        while let Some(found) = lookup.next(entries) {
            all.extend_from_slice(found);
        }
        all
    }

    /// Chains that grow and go, looked up as they are, from their ends, with holes, and in pieces.
    #[test]
    fn a_batch_lookup_finds_what_the_table_has() {
        let registry = Registry::new(&RegistryConfig::new([2000, 0, 0])).unwrap();
        let mut random = Random::new(7);
        let mut below = |end: usize| random.below(end);
        let mut chains: Vec<Vec<SequenceHash>> = Vec::new();
        let mut number = 0;
        for round in 0..600 {
            let at = below(chains.len() + 4);
            if at >= chains.len() {
                chains.push(Vec::new());
            }
            let at = at.min(chains.len() - 1);
            let most = [2, 20, 200][below(3)];
            for _ in 0..=below(most) {
                number += 1;
                chains[at].push(hash(number));
            }
            chains[at].truncate(1500);
            register_rest(&registry, &chains[at]);
            let mut wanted = chains[below(chains.len())].clone();
            let (some, unknown) = (below(64).min(wanted.len()), hash(u128::MAX / 3));
            match round % 4 {
                0 => wanted.reverse(),
                1 => wanted.iter_mut().step_by(1 + below(40)).for_each(|hole| *hole = unknown),
                2 => wanted.rotate_left(some),
                _ => wanted.extend_from_within(..some),
            }
            let core = registry.shared.store.lock();
            let one_by_one = |group: GroupId| {
                wanted.iter().map(|&hash| core.entries.find(group, hash).unwrap_or(NONE)).collect::<Vec<_>>()
            };
            assert_eq!(found_in_batches(&core.entries, GROUP, &wanted), one_by_one(GROUP), "round {round}");
            assert!(found_in_batches(&core.entries, GroupId(1), &wanted).iter().all(|&index| index == NONE));
            drop(core);
            let each: Vec<_> = wanted.iter().map(|&hash| registry.tiers_of(GROUP, hash)).collect();
            assert_eq!(registry.peek_each(GROUP, &wanted), each, "round {round}");
            let there: Vec<_> = each.into_iter().take_while(|tiers| !tiers.is_empty()).collect();
            assert_eq!(registry.peek_prefix(GROUP, &wanted), there, "round {round}");
        }
    }
}
