//! Token hashing: tokens to the hashes of all their blocks.
//!
//! The peer allocates for each block, so its figure is that of its heap: whether that is given back
//! after each prompt, reused at once, or spread over many prompts. So each case has a process of
//! its own, in which nothing else has shaped the heap.

use crate::clock::{cpu_seconds, median};
use dynamo_tokens::TokenBlockSequence;
use kvbm_tokens::{HashAlgorithm, Namespace, TokenSequence};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::error::Error;
use std::process::{Command, Stdio};

/// The first argument of a process that measures one [`Case`], which is the second.
pub const PROCESS: &str = "measure-hashing";

/// Prompts that each side hashes before time is taken, besides those that stay, and how many are
/// taken at least.
const WARM_UP: usize = 10;
const LEAST: usize = 25;

/// What is hashed, and how long it is kept.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Case {
    pub tokens: u32,
    pub per_block: u32,
    /// Earlier prompts of each side whose sequences exist while one is hashed. Each that is hashed
    /// replaces the oldest.
    pub live: usize,
    pub rounds: usize,
}

/// Million tokens per second: ours with BLAKE3, ours with xxh3, the peer's.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Rates {
    pub default: f64,
    pub xxh3: f64,
    pub peer: f64,
}

/// Measures `case` in a process of its own.
pub fn rates(case: Case) -> Result<Rates, Box<dyn Error>> {
    let mut process = Command::new(std::env::current_exe()?);
    process.args([PROCESS, &serde_json::to_string(&case)?]).stderr(Stdio::inherit());
    let output = process.output()?;
    if !output.status.success() {
        return Err(
            format!("measuring token hashing in a process of its own ended with {}", output.status).into()
        );
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What such a process does: prints the rates of the case that its argument names.
pub fn process(case: &str) -> Result<(), Box<dyn Error>> {
    println!("{}", serde_json::to_string(&measure(serde_json::from_str(case)?))?);
    Ok(())
}

fn measure(case: Case) -> Rates {
    let Case { tokens, per_block, live, rounds } = case;
    let blocks = (tokens / per_block) as usize;
    let prompt: Vec<u32> = (0..tokens).map(|n| n.wrapping_mul(2_654_435_761) >> 15).collect();
    let hasher = |algorithm| {
        let namespace = Namespace::new("model").page_size(per_block).algorithm(algorithm);
        namespace.hasher().expect("a valid namespace")
    };
    let (blake3, xxh3) = (hasher(HashAlgorithm::Blake3), hasher(HashAlgorithm::Xxh3_128));
    let ours = |hasher| {
        let sequence = TokenSequence::from_tokens(hasher, &prompt);
        assert_eq!(sequence.num_blocks(), blocks);
        sequence
    };
    let peer = || {
        let sequence = TokenBlockSequence::from_slice(&prompt, per_block, Some(7));
        assert_eq!(sequence.blocks().len(), blocks);
        sequence
    };
    let (mut kept_blake3, mut kept_xxh3, mut kept_peer) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    let warm_up = WARM_UP + live;
    for round in 0..warm_up + rounds.max(LEAST) {
        let mut times = [0.0; 3];
        // The sides take turns in going first: what one leaves in the caches serves the next.
        for side in 0..times.len() {
            let side = (side + round) % times.len();
            times[side] = match side {
                0 => cpu_seconds(|| keep(&mut kept_blake3, live, ours(blake3))),
                1 => cpu_seconds(|| keep(&mut kept_xxh3, live, ours(xxh3))),
                _ => cpu_seconds(|| keep(&mut kept_peer, live, peer())),
            };
        }
        if round >= warm_up {
            a.push(times[0]);
            b.push(times[1]);
            c.push(times[2]);
        }
    }
    let rate = |seconds| f64::from(tokens) / median(seconds) / 1e6;
    Rates { default: rate(a), xxh3: rate(b), peer: rate(c) }
}

/// Keeps `sequence` with the `live` before it, and drops the oldest.
fn keep<T>(kept: &mut VecDeque<T>, live: usize, sequence: T) {
    kept.push_back(sequence);
    if kept.len() > live {
        kept.pop_front();
    }
}
