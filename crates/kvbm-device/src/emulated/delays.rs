//! Seeded disorder: delays before operations, and pieces of a batch in random order.

use std::time::Duration;

/// Makes streams slow and uneven, so that code that relies on luck fails in tests. Every stream
/// derives its own sequence from the seed and the order of its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomDelays {
    /// Root of all randomness.
    pub seed: u64,
    /// Longest delay of one operation; most are much shorter, some are none.
    pub max: Duration,
}

/// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub(super) struct Disorder {
    state: u64,
    max: Duration,
}

impl Disorder {
    pub(super) fn new(delays: RandomDelays, stream: u64) -> Self {
        Self { state: delays.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15), max: delays.max }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A third of the operations run at once, a third yields, a third sleeps.
    pub(super) fn pause(&mut self) {
        let draw = self.next();
        match draw % 3 {
            0 => {}
            1 => std::thread::yield_now(),
            _ => {
                let share = u32::from((draw >> 48) as u16);
                std::thread::sleep((self.max / (1 << 16)).saturating_mul(share));
            }
        }
    }

    /// Fisher-Yates.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.next() % (last as u64 + 1);
            items.swap(last, other as usize);
        }
    }
}
