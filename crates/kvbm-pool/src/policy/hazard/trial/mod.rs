//! Whether the policy does better than recency, found out by simulating both in small. There are
//! two caches for a sample of all blocks, drawn by tag. They are as many times smaller than the
//! tier as the sample is. Each says which of the sampled blocks it would have had, whichever of the
//! two the tier itself follows.
//!
//! What each use would have been worth is the same for both, so their difference is told apart from
//! chance sooner than either.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `rated` | a small cache by worth | `index` |
//! | `recent` | a small cache by recency | `index` |
//! | `index` | numbers of the blocks in a small cache | |

mod index;
mod rated;
mod recent;

use crate::entry::BlockMemory;
use crate::random::mix;
pub(super) use rated::Rate;
use rated::Rated;
use recent::Recent;

/// Blocks of the small caches, where the tier has as many.
const SIZE: usize = 2048;
/// How many standard deviations the policy must be ahead to be followed from then on; it is as long
/// as it is ahead at all.
const AHEAD: f32 = 0.5;
/// What is kept of old requests when as many blocks came as the tier holds.
const KEEP: f32 = 0.97;
/// Bits that draw the sample.
const DRAWN: u32 = 24;

/// The trial of a tier: both caches, and which is ahead.
pub(super) struct Trial {
    /// A block is in the sample if its tag, multiplied by `salt`, begins with less than `drawn`.
    salt: u64,
    drawn: u64,
    rated: Rated,
    recent: Recent,
    /// How many more blocks of the request the policy had, and whether either has missed one
    /// already.
    difference: i32,
    rated_missed: bool,
    recent_missed: bool,
    /// By how many blocks the policy is ahead, and the sum of the squares of each request's.
    lead: f32,
    squares: f32,
    ahead: bool,
    /// Blocks that recency had not, since older requests last lost weight; and how many blocks it
    /// has.
    came: usize,
    size: usize,
}

impl Trial {
    /// For a tier of `capacity` slots, at least one.
    pub(super) fn new(capacity: usize, seed: u64) -> Self {
        let size = SIZE.min(capacity);
        Self {
            salt: mix(seed) | 1,
            drawn: ((size as u128) << DRAWN).div_ceil(capacity as u128) as u64,
            rated: Rated::new(size, seed),
            recent: Recent::new(size),
            difference: 0,
            rated_missed: false,
            recent_missed: false,
            lead: 0.0,
            squares: 0.0,
            ahead: false,
            came: 0,
            size,
        }
    }

    /// Whether the policy is ahead of recency by more than chance explains. Not until it has shown
    /// it.
    #[inline]
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// Whether the block is in the sample.
    #[inline]
    pub(super) fn draws(&self, tag: u64) -> bool {
        tag.wrapping_mul(self.salt) >> (u64::BITS - DRAWN) < self.drawn
    }

    /// The request is over, and another begins.
    pub(super) fn begin(&mut self) {
        let difference = std::mem::take(&mut self.difference) as f32;
        (self.rated_missed, self.recent_missed) = (false, false);
        self.lead += difference;
        self.squares += difference * difference;
        let least = if self.ahead { 0.0 } else { AHEAD * self.squares.sqrt() };
        self.ahead = self.lead > least;
        if self.came > self.size {
            self.came = 0;
            self.lead *= KEEP;
            self.squares *= KEEP;
        }
        self.rated.begin();
        self.recent.begin();
    }

    /// The next block of the request that is in the sample.
    pub(super) fn used(&mut self, tag: u64, memory: BlockMemory, rate: impl Fn(BlockMemory) -> Rate) {
        let had = [self.rated.used(tag, memory, rate), self.recent.used(tag)];
        self.came += usize::from(!had[1]);
        // Only the prefix counts as found.
        self.rated_missed |= !had[0];
        self.recent_missed |= !had[1];
        self.difference += i32::from(self.recent_missed) - i32::from(self.rated_missed);
    }

    /// What is kept of a block of the sample has changed.
    pub(super) fn changed(&mut self, tag: u64, memory: BlockMemory) {
        self.rated.changed(tag, memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a cache of two, a policy that keeps block 1 is right while three blocks come in turn,
    /// which recency finds never. It is wrong when two others do, which recency finds always.
    #[test]
    fn the_policy_is_followed_while_it_is_ahead() {
        let mut trial = Trial::new(2, 0);
        let mut request = |tag: u64| {
            let rate = |memory: BlockMemory| Rate { worth: f32::from(u8::from(memory.class == 1)), age: 0 };
            trial.used(tag, BlockMemory { time: 0, class: tag as u8 }, rate);
            trial.begin();
            trial.is_ahead()
        };
        let right: Vec<bool> = (0..300).map(|turn| request(1 + turn % 3)).collect();
        assert!(!right[0] && right[20] && right[299]);
        let wrong: Vec<bool> = (0..3000).map(|turn| request(8 + turn % 2)).collect();
        assert!(wrong[0] && !wrong[2999]);
    }

    #[test]
    fn the_sample_is_as_large_as_the_cache_is_small() {
        for capacity in [1, 100, 2048, 5000, 100_000, 1 << 28] {
            let trial = Trial::new(capacity, 7);
            let drawn = (0..200_000).filter(|&tag| trial.draws(mix(tag))).count() as f64 / 200_000.0;
            let expected = (SIZE as f64 / capacity as f64).min(1.0);
            assert!((drawn - expected).abs() < 0.1 * expected + 1e-4, "{capacity}: {drawn}");
        }
    }
}
