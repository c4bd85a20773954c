//! The one workload: sequences of 128 blocks, eight of which share their first 32.

/// Blocks of a sequence.
pub const LENGTH: usize = 128;
/// Blocks that the sequences of a family share.
pub const SHARED: usize = 32;
/// Events that are made at a time, outside the clock.
pub const PORTION: usize = 100_000;
/// Sequences of a family.
const FAMILY: usize = 8;
/// Blocks of a family, each once.
const FAMILY_BLOCKS: usize = SHARED + FAMILY * (LENGTH - SHARED);

/// A pseudo-random number: splitmix64 of `n`.
pub fn random(n: u64) -> u64 {
    let mut z = n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Which blocks there are, and in which order workers store them.
pub struct Workload {
    families: usize,
    workers: usize,
}

/// A stretch of a sequence that one worker stores.
#[derive(Clone, Copy)]
pub struct Step {
    pub worker: usize,
    pub sequence: usize,
    /// First block that the worker does not have yet: 0 or [`SHARED`].
    pub from: usize,
}

impl Workload {
    /// Every worker stores all of `blocks` (a little less, in whole families).
    pub fn new(blocks: usize, workers: usize) -> Self {
        Self { families: (blocks / FAMILY_BLOCKS).max(1), workers }
    }

    pub fn blocks(&self) -> usize {
        self.families * FAMILY_BLOCKS
    }

    /// Blocks times workers.
    pub fn holdings(&self) -> usize {
        self.blocks() * self.workers
    }

    pub fn workers(&self) -> usize {
        self.workers
    }

    pub fn sequences(&self) -> usize {
        self.families * FAMILY
    }

    /// Number of block `at` of a sequence; hashes are made from it.
    pub fn block(&self, sequence: usize, at: usize) -> u64 {
        let (family, member) = (sequence / FAMILY, sequence % FAMILY);
        let within = if at < SHARED { at } else { SHARED + member * (LENGTH - SHARED) + at - SHARED };
        (family * FAMILY_BLOCKS + within) as u64
    }

    /// Calls `step` for each stretch: workers take turns, each with an order of the sequences of
    /// its own.
    pub fn steps(&self, mut step: impl FnMut(Step)) {
        let sequences = self.sequences();
        let mut seen = vec![false; self.workers * self.families];
        for turn in 0..sequences {
            for worker in 0..self.workers {
                // A permutation for each worker: a stride that shares no factor with the count, and
                // a start.
                let stride = (random(worker as u64) as usize % sequences..).find(|s| coprime(*s, sequences));
                let stride = stride.expect("1 is coprime to every number");
                let sequence = (turn * stride + random(worker as u64 + 1_000) as usize) % sequences;
                let seen = &mut seen[worker * self.families + sequence / FAMILY];
                let from = if std::mem::replace(seen, true) { SHARED } else { 0 };
                step(Step { worker, sequence, from });
            }
        }
    }

    /// Sequences to ask for, in an order that jumps around.
    pub fn queries(&self, count: usize) -> impl Iterator<Item = usize> {
        let sequences = self.sequences();
        (0..count).map(move |n| random(n as u64 + 77) as usize % sequences)
    }
}

fn coprime(a: usize, b: usize) -> bool {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}
