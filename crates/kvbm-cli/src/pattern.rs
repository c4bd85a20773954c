//! The bytes that stand for keys and values in a replay. Every 8-byte word depends on the block's
//! sequence hash, the rank, the layer, the outer index and the word's place. So a wrong, shifted,
//! swapped or stale byte shows.

use std::fmt;

/// Odd, so that every place gives another word (2^64 / golden ratio).
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// Words compared before looking at the result: enough for vector code, little enough to find the
/// place at once.
const CHUNK_WORDS: usize = 512;
const WORD: usize = 8;

/// One cell of one block: what its pattern depends on, mixed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellPattern {
    start: u64,
    mask: u64,
}

/// The first byte that is not the pattern's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Byte offset in the cell of the 8-byte word.
    pub offset: u64,
    /// The word that should be there, little-endian.
    pub expected: u64,
    /// The word that is there; bytes beyond the end of the data count as 0.
    pub found: u64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: expected {:#018x}, found {:#018x}", self.offset, self.expected, self.found)
    }
}

/// The finaliser of `SplitMix64`: a bijection in which every input bit moves every output bit.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl CellPattern {
    /// The pattern of outer index `outer` of layer `layer` of rank `rank`'s slice of the block
    /// `hash`.
    pub fn new(hash: [u8; 16], rank: u32, layer: u32, outer: u32) -> Self {
        let hash = u128::from_le_bytes(hash);
        let (low, high) = (hash as u64, (hash >> 64) as u64);
        let place = mix((u64::from(rank) << 32 | u64::from(layer)).wrapping_add(STEP))
            ^ mix(u64::from(outer).wrapping_mul(STEP) ^ 0x5851_F42D_4C95_7F2D);
        let start = mix(low ^ place).wrapping_add(mix(high ^ place.rotate_left(32)));
        Self { start, mask: mix(high.wrapping_add(start).wrapping_add(place)) }
    }

    /// The word at byte offset `8 * index`.
    #[inline]
    const fn word(self, index: u64) -> u64 {
        let x = self.start.wrapping_add(index.wrapping_mul(STEP));
        (x ^ (x >> 29)) ^ self.mask
    }

    /// The bytes of the word in which byte `offset` lies, from that byte on.
    fn tail_of_word(self, offset: u64) -> ([u8; WORD], usize) {
        (self.word(offset / WORD as u64).to_le_bytes(), (offset % WORD as u64) as usize)
    }

    /// Fills `bytes`, which begin at byte `offset` of the cell.
    pub fn fill(self, offset: u64, bytes: &mut [u8]) {
        let (head, body) = bytes.split_at_mut(head_bytes(offset, bytes.len()));
        let (word, skip) = self.tail_of_word(offset);
        head.copy_from_slice(&word[skip..skip + head.len()]);

        let offset = offset + head.len() as u64;
        let first = offset / WORD as u64;
        let (words, tail) = body.as_chunks_mut::<WORD>();
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(first.wrapping_add(i as u64)).to_le_bytes();
        }
        let (word, _) = self.tail_of_word(offset + (words.len() * WORD) as u64);
        tail.copy_from_slice(&word[..tail.len()]);
    }

    /// Compares `bytes`, which begin at byte `offset` of the cell, with the pattern.
    pub fn verify(self, offset: u64, bytes: &[u8]) -> Result<(), Mismatch> {
        let (head, body) = bytes.split_at(head_bytes(offset, bytes.len()));
        self.verify_part(offset, head)?;

        let offset = offset + head.len() as u64;
        let first = offset / WORD as u64;
        let (words, tail) = body.as_chunks::<WORD>();
        for (chunk, words) in words.chunks(CHUNK_WORDS).enumerate() {
            let index = first.wrapping_add((chunk * CHUNK_WORDS) as u64);
            let difference = words.iter().enumerate().fold(0, |difference, (i, word)| {
                difference | (u64::from_le_bytes(*word) ^ self.word(index.wrapping_add(i as u64)))
            });
            if difference != 0 {
                for (i, word) in words.iter().enumerate() {
                    self.verify_part((index + i as u64) * WORD as u64, word)?;
                }
            }
        }
        self.verify_part(offset + (words.len() * WORD) as u64, tail)
    }

    /// Compares at most the rest of one word.
    fn verify_part(self, offset: u64, bytes: &[u8]) -> Result<(), Mismatch> {
        let (word, skip) = self.tail_of_word(offset);
        if bytes == &word[skip..skip + bytes.len()] {
            return Ok(());
        }
        let mut found = [0; WORD];
        found[skip..skip + bytes.len()].copy_from_slice(bytes);
        Err(Mismatch {
            offset: offset - skip as u64,
            expected: u64::from_le_bytes(word),
            found: u64::from_le_bytes(found),
        })
    }
}

/// Bytes up to the next word, at most `len`.
fn head_bytes(offset: u64, len: usize) -> usize {
    ((offset.wrapping_neg() % WORD as u64) as usize).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn filled(pattern: CellPattern, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xA5; len];
        pattern.fill(offset, &mut bytes);
        bytes
    }

    #[test]
    fn everything_that_a_word_depends_on_changes_every_word() {
        let base = CellPattern::new([7; 16], 0, 0, 0);
        let mut others = vec![
            CellPattern::new([7; 16], 1, 0, 0),
            CellPattern::new([7; 16], 0, 1, 0),
            CellPattern::new([7; 16], 0, 0, 1),
            CellPattern::new([7; 16], 1, 1, 0),
            CellPattern::new([7; 16], 1, 0, 1),
            CellPattern::new([7; 16], 0, 1, 1),
        ];
        for byte in 0..16 {
            let mut hash = [7; 16];
            hash[byte] ^= 1;
            others.push(CellPattern::new(hash, 0, 0, 0));
        }
        let mut seen: HashSet<u64> = (0..1000).map(|i| base.word(i)).collect();
        assert_eq!(seen.len(), 1000, "every offset has another word");
        for other in &others {
            for i in 0..1000 {
                assert_ne!(base.word(i), other.word(i));
                assert!(seen.insert(other.word(i)), "words of two cells are equal");
            }
        }
    }

    #[test]
    fn the_pattern_never_changes() {
        let bytes = filled(CellPattern::new([1; 16], 2, 3, 1), 0, 16);
        assert_eq!(bytes, GOLDEN, "replays over an old directory would see corruption");
    }

    /// Computed by an independent program from the description.
    const GOLDEN: [u8; 16] = [200, 80, 153, 91, 108, 94, 49, 63, 239, 152, 32, 171, 210, 208, 9, 209];

    proptest! {
        #[test]
        fn parts_agree_with_the_whole_and_each_flipped_bit_is_found(
            hash: [u8; 16], len in 1_usize..9000, cut in 0_usize..9000, flip in 0_usize..9000, bit in 0_u8..8, start in 0_u64..64
        ) {
            let pattern = CellPattern::new(hash, 1, 2, 0);
            let whole = filled(pattern, start, len);
            let cut = cut % (len + 1);
            let mut parts = filled(pattern, start, cut);
            parts.extend(filled(pattern, start + cut as u64, len - cut));
            prop_assert_eq!(&parts, &whole);
            prop_assert_eq!(pattern.verify(start, &whole), Ok(()));
            prop_assert_eq!(pattern.verify(start + cut as u64, &whole[cut..]), Ok(()));

            let flip = flip % len;
            let mut wrong = whole.clone();
            wrong[flip] ^= 1 << bit;
            let mismatch = pattern.verify(start, &wrong).unwrap_err();
            prop_assert_eq!(mismatch.offset, (start + flip as u64) / 8 * 8);
            prop_assert_ne!(mismatch.expected, mismatch.found);
        }
    }
}
