//! How the side tables of events hash sequence hashes: keyed, in a few nanoseconds.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Sequence hashes may be an engine's own, so that a program could choose them: without the keys it
/// does not know which ones meet in a table. The default hasher is as safe and takes several times
/// as long, which the publisher's thread pays for every event.
#[derive(Clone, Copy)]
pub(super) struct Keyed {
    keys: [u64; 2],
}

impl Default for Keyed {
    fn default() -> Self {
        let random = RandomState::new();
        Self { keys: [random.hash_one(0), random.hash_one(1) | 1] }
    }
}

impl BuildHasher for Keyed {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded { state: self.keys[0], key: self.keys[1] }
    }
}

/// Multiplies by the key and folds the halves of the product, for each word.
pub(super) struct Folded {
    state: u64,
    key: u64,
}

impl Folded {
    fn fold(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.key);
        self.state = (product as u64 ^ (product >> 64) as u64).rotate_left(23);
    }
}

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }

    fn write_u128(&mut self, word: u128) {
        self.fold(word as u64);
        self.fold((word >> 64) as u64);
    }

    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }

    fn finish(&self) -> u64 {
        let product = u128::from(self.state) * u128::from(self.key);
        product as u64 ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::SequenceHash;
    use std::collections::HashSet;

    /// Hashes that differ in few bits, at either end, as a careless engine has them.
    #[test]
    fn hashes_that_look_alike_are_spread_evenly() {
        let keyed = Keyed::default();
        let low = (0..20_000u128).map(u128::to_le_bytes);
        let high = (1..20_000u128).map(|n| (n << 100).to_le_bytes());
        let hashed = low.chain(high).map(|bytes| keyed.hash_one(SequenceHash::from_bytes(bytes)));
        let hashed: Vec<u64> = hashed.collect();
        let different: HashSet<u64> = hashed.iter().copied().collect();
        assert_eq!(different.len(), hashed.len());
        // The table goes by the lowest bits and the highest seven.
        for bits in [|hash: u64| hash & 0xFF, |hash: u64| hash >> 56] {
            let mut counts = [0u32; 256];
            for hash in &hashed {
                counts[bits(*hash) as usize] += 1;
            }
            let (least, most) = (counts.iter().min(), counts.iter().max());
            assert!(least > Some(&80) && most < Some(&260), "of 156: {least:?} to {most:?}");
        }
        assert_ne!(keyed.hash_one(7u64), Keyed::default().hash_one(7u64), "another table, another order");
    }
}
