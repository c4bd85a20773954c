//! Compares sixteen bytes at once, as every `x86_64` can: safe code cannot say that.

/// Bit `i` is set where byte `i` of two words is `byte`.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "the compiler does not count what every x86_64 has as enabled")]
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "all are safe for the same reason")]
#[inline]
pub(crate) fn equal_bytes([low, high]: [u64; 2], byte: u8) -> u32 {
    use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x};
    let wanted = u64::from_le_bytes([byte; 8]).cast_signed();
    // SAFETY: every x86_64 has SSE2, and none of these touches memory.
    unsafe {
        let bytes = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
        let equal = _mm_cmpeq_epi8(bytes, _mm_set_epi64x(wanted, wanted));
        _mm_movemask_epi8(equal).cast_unsigned()
    }
}

/// Bit `i` is set where byte `i` of two words is `byte`.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn equal_bytes(words: [u64; 2], byte: u8) -> u32 {
    let [low, high] = words.map(|word| equal_in_word(word, byte));
    low | high << 8
}

/// The same of one word.
#[cfg(any(not(target_arch = "x86_64"), test))]
#[inline]
fn equal_in_word(word: u64, byte: u8) -> u32 {
    const SEVEN: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let word = word ^ u64::from_le_bytes([byte; 8]);
    // The top bit of every byte that is zero. Exact: the addition of 7-bit values carries into no
    // neighbour.
    let zero = !(((word & SEVEN) + SEVEN) | word | SEVEN);
    // The multiplication brings these bits together: that of byte `i` to bit `56 + i`.
    ((zero >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_equal_are_found_wherever_they_are() {
        let mut random = 0x1234_5678_9abc_def1_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes: [u8; 16] =
                std::array::from_fn(|at| [0, 1, 0x80, 0x81, 0xff][(random >> (2 * at + 16)) as usize % 5]);
            let word = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[from + at]));
            for wanted in [0, 1, 0x7f, 0x80, 0x81, 0xff] {
                let expected = (0..16).filter(|&at| bytes[at] == wanted).fold(0, |mask, at| mask | 1 << at);
                assert_eq!(equal_bytes([word(0), word(8)], wanted), expected, "{bytes:x?}, {wanted:x}");
                let apart = equal_in_word(word(0), wanted) | equal_in_word(word(8), wanted) << 8;
                assert_eq!(apart, expected, "{bytes:x?}, {wanted:x}");
            }
        }
    }
}
