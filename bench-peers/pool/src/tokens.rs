//! Token hashing: tokens to the hashes of all their blocks.

use crate::clock::{cpu_seconds, median};
use dynamo_tokens::{TokenBlockSequence, Tokens};
use kvbm_tokens::{HashAlgorithm, Namespace, TokenSequence};

/// Million tokens per second: ours with BLAKE3, ours with xxh3, the peer's.
pub struct Hashing {
    pub default: f64,
    pub xxh3: f64,
    pub peer: f64,
}

/// Prompts that each side hashes before time is taken, and how many are taken at least.
const WARM_UP: usize = 10;
const LEAST: usize = 25;

pub fn hashing(tokens: usize, per_block: u32, rounds: usize) -> Hashing {
    let prompt: Vec<u32> = (0..tokens as u32).map(|n| n.wrapping_mul(2_654_435_761) >> 15).collect();
    let hasher = |algorithm| {
        let namespace = Namespace::new("model").page_size(per_block).algorithm(algorithm);
        namespace.hasher().expect("a valid namespace")
    };
    let (blake3, xxh3) = (hasher(HashAlgorithm::Blake3), hasher(HashAlgorithm::Xxh3_128));
    let ours = |hasher: &kvbm_tokens::BlockHasher| {
        let sequence = TokenSequence::from_tokens(*hasher, &prompt);
        assert_eq!(sequence.num_blocks(), tokens / per_block as usize);
    };
    let peer = || {
        let sequence = TokenBlockSequence::new(Tokens::from(&prompt[..]), per_block, Some(7));
        assert_eq!(sequence.blocks().len(), tokens / per_block as usize);
    };
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    // The heap grows while the first prompts are hashed, which costs whoever asks for more of it: that is over when time is taken.
    // A repetition takes less than a millisecond.
    for round in 0..WARM_UP + rounds.max(LEAST) {
        let times = [cpu_seconds(|| ours(&blake3)), cpu_seconds(|| ours(&xxh3)), cpu_seconds(peer)];
        if round >= WARM_UP {
            a.push(times[0]);
            b.push(times[1]);
            c.push(times[2]);
        }
    }
    let rate = |seconds| tokens as f64 / median(seconds) / 1e6;
    Hashing { default: rate(a), xxh3: rate(b), peer: rate(c) }
}
