//! Looking up the blocks of a chain, batch by batch.
//!
//! A lookup of one block waits for memory twice: for a bucket of the table, and for the entry that it names. A batch
//! lookup prefetches both: while it compares one batch, the entries of the next batch and the buckets of the one after
//! that are on their way.

use super::entries::BATCH;
use super::state::Core;
use crate::entry::NONE;
use crate::prefetch::prefetch;
use kvbm_plan::{GroupId, SequenceHash};

/// The entries of a chain's blocks, in order.
pub(crate) struct BatchLookup<'h> {
    group: GroupId,
    hashes: &'h [SequenceHash],
    /// Hashes whose batch was returned.
    done: usize,
    found: [u32; BATCH],
}

impl<'h> BatchLookup<'h> {
    pub(crate) fn new(core: &Core, group: GroupId, hashes: &'h [SequenceHash]) -> Self {
        let lookup = Self { group, hashes, done: 0, found: [NONE; BATCH] };
        lookup.prefetch_buckets(core, 0);
        lookup.prefetch_buckets(core, BATCH);
        lookup.prefetch_entries(core, 0);
        lookup
    }

    /// The entries of the next [`BATCH`] blocks, `NONE` for those that have none; fewer at the end of the chain.
    #[inline]
    pub(crate) fn next(&mut self, core: &Core) -> Option<&[u32]> {
        let from = self.done;
        let batch = self.batch(from);
        if batch.is_empty() {
            return None;
        }
        self.done += batch.len();
        self.prefetch_buckets(core, from + 2 * BATCH);
        self.prefetch_entries(core, from + BATCH);
        for (found, &hash) in self.found.iter_mut().zip(batch) {
            *found = core.find(self.group, hash).unwrap_or(NONE);
        }
        Some(&self.found[..batch.len()])
    }

    fn batch(&self, from: usize) -> &'h [SequenceHash] {
        let rest = &self.hashes[from.min(self.hashes.len())..];
        &rest[..rest.len().min(BATCH)]
    }

    #[inline]
    fn prefetch_buckets(&self, core: &Core, from: usize) {
        core.prefetch_buckets(self.batch(from).iter().map(|&hash| (self.group, hash)));
    }

    /// The buckets of the batch are in the cache by now.
    #[inline]
    fn prefetch_entries(&self, core: &Core, from: usize) {
        for &hash in self.batch(from) {
            if let Some(index) = core.table.guess(core.table.mix(self.group, hash)) {
                prefetch(core.entry(index));
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

    fn found_in_batches(core: &Core, group: GroupId, hashes: &[SequenceHash]) -> Vec<u32> {
        let mut lookup = BatchLookup::new(core, group, hashes);
        let mut all = Vec::new();
        while let Some(found) = lookup.next(core) {
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
                wanted.iter().map(|&hash| core.find(group, hash).unwrap_or(NONE)).collect::<Vec<_>>()
            };
            assert_eq!(found_in_batches(&core, GROUP, &wanted), one_by_one(GROUP), "round {round}");
            assert!(found_in_batches(&core, GroupId(1), &wanted).iter().all(|&index| index == NONE));
            drop(core);
            let tiers = wanted.iter().map(|&hash| registry.tiers_of(GROUP, hash));
            let there: Vec<_> = tiers.take_while(|tiers| !tiers.is_empty()).collect();
            assert_eq!(registry.peek_prefix(GROUP, &wanted), there, "round {round}");
        }
    }
}
