//! Cheap pseudo-random numbers and a mixing function (splitmix64).

/// Numbers that look random; cheap.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `end`, which must not be 0.
    #[inline]
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

/// Every bit of the number reaches every bit of the result (splitmix64's finalizer).
#[inline]
pub(crate) fn mix(number: u64) -> u64 {
    let z = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
