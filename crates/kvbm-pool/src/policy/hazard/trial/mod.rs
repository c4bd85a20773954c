//! Whether the policy does better than recency, found out by playing both in small: two caches for a sample of all blocks, drawn by
//! tag, as many times smaller than the tier as the sample is. Each says which of the sampled blocks it would have had, whichever
//! of the two the tier itself follows.
//!
//! What each use would have been worth is the same for both, so their difference is told apart from chance sooner than either.
//!
//! All shards have one trial of a tier: what is kept of a request that goes through several, and of two that two threads make at the same
//! time, stays apart. Its lock is taken for blocks of the sample alone, several at a time.

mod index;
mod rated;
mod recent;

use crate::policy::{BlockMemory, mix};
use crate::sync::Leaf;
pub(super) use rated::Rate;
use rated::Rated;
use recent::Recent;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Blocks of the small caches, where the tier has as many.
const SIZE: usize = 2048;
/// Where several threads play, no more than one block in so many is played, unless the small caches would have fewer than that: what one
/// thread has changed is far from the other.
const SHARED: usize = 32;
const LEAST: usize = 64;
/// How many standard deviations the policy must be ahead to be followed from then on; it is as long as it is ahead at all.
const AHEAD: f32 = 0.5;
/// What is kept of old requests when as many blocks came as the tier holds.
const KEEP: f32 = 0.97;
/// Bits that draw the sample.
const DRAWN: u32 = 24;

/// The trial of a tier.
pub(super) struct Trial {
    /// Blocks are in the sample whose tag, multiplied by this, begins with less than that.
    salt: u64,
    drawn: u64,
    ahead: AtomicBool,
    both: Leaf<Both>,
}

/// Both caches, and which is ahead.
struct Both {
    rated: Rated,
    recent: Recent,
    /// Requests that are under way, and which of them was played last.
    requests: Box<[Request]>,
    current: usize,
    /// By how many blocks the policy is ahead, and the sum of the squares of each request's.
    lead: f32,
    squares: f32,
    ahead: bool,
    /// Blocks that recency had not, since older requests last lost weight; and how many blocks it has.
    came: usize,
    size: usize,
}

#[derive(Clone, Default)]
struct Request {
    /// How many more blocks of the request the policy had, and whether either has missed one already.
    difference: i32,
    rated_missed: bool,
    recent_missed: bool,
    /// The last block of it in each cache, while another request is played.
    above: [Option<u64>; 2],
}

impl Trial {
    /// For a tier of `capacity` slots, at least one, and so many requests at the same time.
    pub(super) fn new(capacity: usize, seed: u64, requests: usize) -> Self {
        let size = if requests == 1 { SIZE } else { SIZE.min((capacity / SHARED).max(LEAST)) }.min(capacity);
        let both = Both {
            rated: Rated::new(size, seed),
            recent: Recent::new(size),
            requests: vec![Request::default(); requests].into_boxed_slice(),
            current: 0,
            lead: 0.0,
            squares: 0.0,
            ahead: false,
            came: 0,
            size,
        };
        Self {
            salt: mix(seed) | 1,
            drawn: ((size as u128) << DRAWN).div_ceil(capacity as u128) as u64,
            ahead: AtomicBool::new(false),
            both: Leaf::new(both),
        }
    }

    /// Whether the policy is ahead of recency by more than chance explains. Not until it has shown it.
    #[inline]
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead.load(Relaxed)
    }

    /// Whether the block is in the sample.
    #[inline]
    pub(super) fn draws(&self, tag: u64) -> bool {
        tag.wrapping_mul(self.salt) >> (u64::BITS - DRAWN) < self.drawn
    }

    /// The next blocks of the request with this number that are in the sample; then it is over, perhaps, and another with this number begins.
    pub(super) fn play(
        &self,
        request: usize,
        blocks: impl Iterator<Item = (u64, BlockMemory)>,
        is_over: bool,
        rate: impl Fn(BlockMemory) -> Rate,
    ) {
        let mut both = self.both.lock();
        for (tag, memory) in blocks {
            both.used(request, tag, memory, &rate);
        }
        if is_over {
            both.begin(request);
            self.ahead.store(both.ahead, Relaxed);
        }
    }

    /// What is kept of a block of the sample has changed.
    pub(super) fn changed(&self, tag: u64, memory: BlockMemory) {
        self.both.lock().rated.changed(tag, memory);
    }
}

impl Both {
    fn begin(&mut self, request: usize) {
        self.turn_to(request);
        let difference = std::mem::take(&mut self.requests[request]).difference as f32;
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

    fn used(&mut self, request: usize, tag: u64, memory: BlockMemory, rate: impl Fn(BlockMemory) -> Rate) {
        self.turn_to(request);
        let had = [self.rated.used(tag, memory, rate), self.recent.used(tag)];
        self.came += usize::from(!had[1]);
        // Only the prefix counts as found.
        let request = &mut self.requests[request];
        request.rated_missed |= !had[0];
        request.recent_missed |= !had[1];
        request.difference += i32::from(request.recent_missed) - i32::from(request.rated_missed);
    }

    /// Goes on with another request than the last one.
    fn turn_to(&mut self, request: usize) {
        if request != self.current {
            self.requests[self.current].above = [self.rated.above(), self.recent.above()];
            self.current = request;
            let [rated, recent] = self.requests[request].above;
            self.rated.go_on_behind(rated);
            self.recent.go_on_behind(recent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a cache of two, a policy that keeps block 1 is right while three blocks come in turn, which recency finds never, and wrong
    /// when two others do, which recency finds always.
    #[test]
    fn the_policy_is_followed_while_it_is_ahead() {
        let trial = Trial::new(2, 0, 1);
        let request = |tag: u64| {
            let rate = |memory: BlockMemory| Rate { worth: f32::from(u8::from(memory.class == 1)), age: 0 };
            trial.play(0, [(tag, BlockMemory { time: 0, class: tag as u8 })].into_iter(), true, rate);
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
            let trial = Trial::new(capacity, 7, 1);
            let drawn = (0..200_000).filter(|&tag| trial.draws(mix(tag))).count() as f64 / 200_000.0;
            let expected = (SIZE as f64 / capacity as f64).min(1.0);
            assert!((drawn - expected).abs() < 0.1 * expected + 1e-4, "{capacity}: {drawn}");
        }
    }

    /// What two requests make of the caches that are played in turn, block by block, is what they make of them one after the other, as
    /// long as there is room.
    #[test]
    fn requests_at_the_same_time_stay_apart() {
        let rate = |_| Rate { worth: 1.0, age: 0 };
        let trial = Trial::new(8, 0, 2);
        let play = |turns: &[(usize, u64)]| {
            (0..2).for_each(|request| trial.play(request, std::iter::empty(), true, rate));
            for &(request, tag) in turns {
                trial.play(request, [(tag, BlockMemory::default())].into_iter(), false, rate);
            }
            let both = trial.both.lock();
            both.requests
                .iter()
                .map(|request| (request.rated_missed, request.recent_missed))
                .collect::<Vec<_>>()
        };
        let turns = [(0, 1), (1, 11), (0, 2), (1, 12), (1, 13), (0, 3)];
        assert_eq!(play(&turns), [(true, true); 2]);
        assert_eq!(play(&turns), [(false, false); 2]);
        assert_eq!(play(&[(0, 21), (0, 22), (0, 23)]), [(true, true), (false, false)]);
        assert_eq!(play(&[(0, 1), (0, 2), (1, 11), (1, 12)]), [(false, false); 2], "their ends went first");
    }
}
