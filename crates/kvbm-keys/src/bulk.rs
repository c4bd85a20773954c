//! Keyed checksums of much content, at the speed of a CRC.
//!
//! The content is divided by two secret irreducible polynomials of degree 64 over GF(2): CRCs whose
//! polynomials nobody else knows (H. Krawczyk, "LFSR-based hashing and authentication", CRYPTO
//! 1994). The remainders and the length go through [`MacKey`], so that nobody sees them.
//!
//! Why that binds content, where a CRC does not: two contents of one length have the same
//! remainders only if both polynomials divide their difference. A difference of `m` bits has at
//! most `m / 64` irreducible factors of degree 64, of some `2^58` that there are. So content that
//! is chosen without knowing the polynomials has the same sum with a probability of
//! `(m / 2^64)^2` at most: `2^-82` for 1 MiB, `2^-76` for 8 MiB. Guessing the 64 bits of the result
//! is easier.

use crate::{DeploymentKey, MacKey};
use crc_fast::{CrcParams, Digest};
use std::fmt;

/// Parts that are read twice while they are in the first cache.
const PART_BYTES: usize = 16 << 10;

/// The element x of a field of remainders.
const X: u64 = 2;

/// A key for the checksums of much content, for one purpose.
#[derive(Clone)]
pub struct BulkKey {
    divisors: [CrcParams; 2],
    mac: MacKey,
}

impl DeploymentKey {
    /// The key for the content of one purpose, which `context` names.
    pub fn derive_bulk(&self, context: &str) -> BulkKey {
        let mut stream = self.stream(&format!("{context}: polynomials"));
        let mut next = || loop {
            let mut bytes = [0; 8];
            stream.fill(&mut bytes);
            let low = u64::from_le_bytes(bytes) | 1;
            if is_irreducible(low) {
                return CrcParams::new("secret", 64, low, 0, true, 0, 0);
            }
        };
        let first = next();
        let second = loop {
            let second = next();
            if second.poly != first.poly {
                break second;
            }
        };
        BulkKey { divisors: [first, second], mac: self.derive(context) }
    }
}

impl BulkKey {
    /// The checksum of bytes in parts, in order. Where the parts are cut makes no difference.
    pub fn of(&self, parts: &[&[u8]]) -> u64 {
        let mut sum = self.begin();
        for part in parts {
            sum.update(part);
        }
        sum.finish()
    }

    /// For bytes that come one after the other.
    pub fn begin(&self) -> BulkMac {
        let remainders = self.divisors.map(Digest::new_with_params);
        BulkMac(Box::new(State { remainders, bytes: 0, mac: self.mac.clone() }))
    }
}

impl fmt::Debug for BulkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BulkKey(..)")
    }
}

/// A checksum of bytes that come one after the other.
pub struct BulkMac(Box<State>);

struct State {
    remainders: [Digest; 2],
    bytes: u64,
    mac: MacKey,
}

impl BulkMac {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.bytes += bytes.len() as u64;
        for part in bytes.chunks(PART_BYTES) {
            for remainder in &mut self.0.remainders {
                remainder.update(part);
            }
        }
    }

    /// The checksum of everything added.
    pub fn finish(&self) -> u64 {
        let [first, second] =
            self.0.remainders.each_ref().map(|remainder| remainder.finalize().to_le_bytes());
        self.0.mac.of(&[&first, &second, &self.0.bytes.to_le_bytes()])
    }
}

impl fmt::Debug for BulkMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BulkMac(..)")
    }
}

/// Whether `x^64 + low` is irreducible over GF(2) (Rabin's test; 2 is the only prime factor of 64).
fn is_irreducible(low: u64) -> bool {
    let mut power = X;
    for turn in 1..=64 {
        power = square(power, low);
        if turn == 32 && !is_coprime(power ^ X, low) {
            return false;
        }
    }
    power == X
}

/// A square modulo `x^64 + low`.
fn square(element: u64, low: u64) -> u64 {
    let (mut result, mut times) = (0, element);
    for bit in 0..64 {
        if element >> bit & 1 == 1 {
            result ^= times;
        }
        let carry = times >> 63;
        times = (times << 1) ^ (low & carry.wrapping_neg());
    }
    result
}

/// Whether an element has no factor in common with `x^64 + low`.
fn is_coprime(element: u64, low: u64) -> bool {
    let (mut a, mut b) = (1_u128 << 64 | u128::from(low), u128::from(element));
    while b != 0 {
        while a != 0 && a.leading_zeros() <= b.leading_zeros() {
            a ^= b << (b.leading_zeros() - a.leading_zeros());
        }
        (a, b) = (b, a);
    }
    a == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> BulkKey {
        DeploymentKey::from_secret(b"secret").derive_bulk("context")
    }

    /// Bit by bit: the remainder of the content, times `x^64`, least significant bit first.
    fn remainder(bytes: &[u8], low: u64) -> u64 {
        let reflected = low.reverse_bits();
        let mut remainder = 0;
        for byte in bytes {
            remainder ^= u64::from(*byte);
            for _ in 0..8 {
                remainder = remainder >> 1 ^ (reflected & (remainder & 1).wrapping_neg());
            }
        }
        remainder
    }

    #[test]
    fn polynomials_are_irreducible_differ_and_belong_to_the_key() {
        // By the tables: ECMA-182's is x + 1 times another; this one of the ISO is irreducible.
        assert!(is_irreducible(0x1B) && !is_irreducible(0x42F0_E1EB_A9EA_3693));
        // (x^32 + x^7 + x^3 + x^2 + 1)^2 and a multiple of x^2 + x + 1.
        assert!(!is_irreducible(0x4051) && !is_irreducible(0x1));
        let polynomials = |secret: &[u8], context| {
            DeploymentKey::from_secret(secret).derive_bulk(context).divisors.map(|divisor| divisor.poly)
        };
        let all = [polynomials(b"a", "x"), polynomials(b"b", "x"), polynomials(b"a", "y")].concat();
        assert!(all.iter().all(|low| is_irreducible(*low)));
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), 6);
        assert_eq!(polynomials(b"a", "x"), all[..2]);
    }

    /// How often a random polynomial is: one in 64, so that the bound of the page holds.
    #[test]
    fn one_odd_polynomial_in_32_is_irreducible() {
        let found =
            (0..4096_u64).filter(|n| is_irreducible(n.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)).count();
        assert!((80..190).contains(&found), "{found} of 4096, 128 are expected");
    }

    #[test]
    fn nothing_secret_is_shown() {
        let key = key();
        let shown = format!("{key:?} {:?}", key.begin());
        assert_eq!(shown, "BulkKey(..) BulkMac(..)");
    }

    #[test]
    fn zeros_before_and_behind_count() {
        let key = key();
        let sums = [&b""[..], b"\0", b"\0\0", b"a", b"\0a", b"a\0"].map(|bytes| key.of(&[bytes]));
        assert_eq!(sums.iter().collect::<std::collections::BTreeSet<_>>().len(), 6);
    }

    proptest! {
        #[test]
        fn the_sum_is_that_of_the_page(bytes in proptest::collection::vec(any::<u8>(), 0..700), cut in 0_usize..700) {
            let key = key();
            let [first, second] =
                key.divisors.map(|divisor| remainder(&bytes, divisor.poly).to_le_bytes());
            let length = (bytes.len() as u64).to_le_bytes();
            let (a, b) = bytes.split_at(cut.min(bytes.len()));
            prop_assert_eq!(key.of(&[a, b]), key.mac.of(&[&first, &second, &length]));
        }

        #[test]
        fn any_flip_is_noticed(bytes in proptest::collection::vec(any::<u8>(), 1..40_000), bit in any::<usize>()) {
            let key = key();
            let mut flipped = bytes.clone();
            flipped[bit / 8 % bytes.len()] ^= 1 << (bit % 8);
            prop_assert_ne!(key.of(&[&bytes]), key.of(&[&flipped]));
        }
    }
}
