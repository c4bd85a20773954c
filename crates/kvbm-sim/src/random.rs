//! Numbers that a seed decides (splitmix64).

use std::time::Duration;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds have nothing in common.
        let mut random = Self(seed);
        let first = random.next();
        Self(first)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// True once in `times`; never where that is 0.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        times > 0 && self.below(times) == 0
    }

    /// A duration up to `most`; short ones are more likely.
    pub(crate) fn duration(&mut self, most: Duration) -> Duration {
        let share = self.below(1 << 20) as u32 + 1;
        most * share / (1 << 20) * share.trailing_zeros().clamp(1, 3) / 3
    }

    /// One of `list`.
    pub(crate) fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { list.get(self.below(list.len())) }
    }

    /// Takes one out of `list`.
    pub(crate) fn take<T>(&mut self, list: &mut Vec<T>) -> Option<T> {
        if list.is_empty() { None } else { Some(list.swap_remove(self.below(list.len()))) }
    }
}
