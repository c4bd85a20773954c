//! Keyed BLAKE3 of one chunk (at most 1,024 bytes), in scalar registers.
//!
//! Blocks of a chain are hashed one after the other, each keyed by the one before. So a chain is as
//! slow as one compression takes from end to end: 14 half-rounds of 12 dependent operations, of
//! which the last needs 11. Vector code computes the four columns of a half-round side by side. But
//! each of its operations takes as long or longer, and it turns rows to diagonals in between.
//! Scalar code has the operations of all four columns in flight anyway. At 16 tokens a block and
//! 4.27 GHz (Zen 5) that bound is 39 ns; this takes 45 ns, the crate's vector code 87 to 104 ns.
//! Mixings one after the other instead of side by side: 48 ns, in pairs 49 ns.
//!
//! Source: the BLAKE3 paper, sections 2.1 to 2.4. `agrees_with_the_reference` compares with the
//! crate for every length.

use crate::Token;

/// Most tokens of a chunk.
pub(crate) const MAX_TOKENS: usize = 256;
/// Words, and so tokens, of a BLAKE3 block.
const WORDS: usize = 16;

const CHUNK_START: u32 = 1 << 0;
const CHUNK_END: u32 = 1 << 1;
const ROOT: u32 = 1 << 3;
const KEYED_HASH: u32 = 1 << 4;

/// The first half of the initialisation vector; a chunk needs no more.
const IV: [u32; 4] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a];

/// Which message word each of a round's eight mixings takes first and second.
const SCHEDULE: [[usize; WORDS]; 7] = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8],
    [3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1],
    [10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6],
    [12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4],
    [9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7],
    [11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13],
];

/// One half of a mixing: takes in a message word, turns by `$first` and `$second`.
macro_rules! mix {
    ($v:ident, $word:expr, $first:literal, $second:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
        $v[$a] = $v[$a].wrapping_add($word).wrapping_add($v[$b]);
        $v[$d] = ($v[$d] ^ $v[$a]).rotate_right($first);
        $v[$c] = $v[$c].wrapping_add($v[$d]);
        $v[$b] = ($v[$b] ^ $v[$c]).rotate_right($second);
    };
}

/// A round, written out so that every index is known to the compiler and the state stays in
/// registers. First halves of the four mixings come together: the processor then starts all four
/// before it waits for one.
macro_rules! round {
    ($v:ident, $m:ident, $n:literal) => {
        let s = SCHEDULE[$n];
        mix!($v, $m[s[0]], 16, 12, 0, 4, 8, 12);
        mix!($v, $m[s[2]], 16, 12, 1, 5, 9, 13);
        mix!($v, $m[s[4]], 16, 12, 2, 6, 10, 14);
        mix!($v, $m[s[6]], 16, 12, 3, 7, 11, 15);
        mix!($v, $m[s[1]], 8, 7, 0, 4, 8, 12);
        mix!($v, $m[s[3]], 8, 7, 1, 5, 9, 13);
        mix!($v, $m[s[5]], 8, 7, 2, 6, 10, 14);
        mix!($v, $m[s[7]], 8, 7, 3, 7, 11, 15);
        mix!($v, $m[s[8]], 16, 12, 0, 5, 10, 15);
        mix!($v, $m[s[10]], 16, 12, 1, 6, 11, 12);
        mix!($v, $m[s[12]], 16, 12, 2, 7, 8, 13);
        mix!($v, $m[s[14]], 16, 12, 3, 4, 9, 14);
        mix!($v, $m[s[9]], 8, 7, 0, 5, 10, 15);
        mix!($v, $m[s[11]], 8, 7, 1, 6, 11, 12);
        mix!($v, $m[s[13]], 8, 7, 2, 7, 8, 13);
        mix!($v, $m[s[15]], 8, 7, 3, 4, 9, 14);
    };
}

/// The compression function, cut to its chaining value. The counter of the first chunk is 0.
#[expect(clippy::inline_always, reason = "a call costs a tenth: state then goes through memory")]
#[inline(always)]
fn compress(h: [u32; 8], m: &[Token; WORDS], bytes: u32, flags: u32) -> [u32; 8] {
    let [h0, h1, h2, h3, h4, h5, h6, h7] = h;
    let mut v = [h0, h1, h2, h3, h4, h5, h6, h7, IV[0], IV[1], IV[2], IV[3], 0, 0, bytes, flags];
    round!(v, m, 0);
    round!(v, m, 1);
    round!(v, m, 2);
    round!(v, m, 3);
    round!(v, m, 4);
    round!(v, m, 5);
    round!(v, m, 6);
    std::array::from_fn(|i| v[i] ^ v[i + 8])
}

/// The first 16 bytes of the keyed hash of `tokens` (little-endian), as little-endian words; so is
/// the key.
///
/// `tokens` must be at most [`MAX_TOKENS`].
#[inline(always)]
pub(crate) fn keyed_128(key: [u32; 8], tokens: &[Token]) -> [u32; 4] {
    const ONLY: u32 = KEYED_HASH | CHUNK_START | CHUNK_END | ROOT;
    let [a, b, c, d, ..] = match <&[Token; WORDS]>::try_from(tokens) {
        Ok(block) => compress(key, block, 64, ONLY),
        Err(_) => of_blocks(key, tokens),
    };
    [a, b, c, d]
}

#[inline(never)]
fn of_blocks(key: [u32; 8], tokens: &[Token]) -> [u32; 8] {
    debug_assert!(tokens.len() <= MAX_TOKENS, "a chunk has 1,024 bytes");
    let before_last = tokens.len().saturating_sub(1) / WORDS * WORDS;
    let (blocks, last) = tokens.split_at(before_last);
    let (mut value, mut start) = (key, CHUNK_START);
    for block in blocks.as_chunks::<WORDS>().0 {
        value = compress(value, block, 64, KEYED_HASH | start);
        start = 0;
    }
    let mut padded = [0; WORDS];
    padded[..last.len()].copy_from_slice(last);
    compress(value, &padded, last.len() as u32 * 4, KEYED_HASH | start | CHUNK_END | ROOT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    #[test]
    fn agrees_with_the_reference() {
        let mut random = 7_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 32) as u32
        };
        for count in 0..=MAX_TOKENS {
            let key: [u32; 8] = std::array::from_fn(|_| next());
            let tokens: Vec<Token> = (0..count).map(|_| next()).collect();
            let key_bytes: Vec<u8> = key.iter().flat_map(|word| word.to_le_bytes()).collect();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let expected = blake3::keyed_hash(key_bytes.as_slice().try_into().unwrap(), &bytes);
            let hash = keyed_128(key, &tokens);
            assert_eq!(hash, words(&expected.as_bytes()[..16])[..], "{count} tokens");
        }
    }
}
