//! What both sides must be able to do, in the terms of an engine.

/// Tokens of a block on both sides.
pub const TOKENS_PER_BLOCK: u32 = 16;

/// One block bookkeeping under measurement. `C` is its own form of a chain of block hashes, made
/// outside of the clock.
pub trait Side: Sync + Sized {
    /// Hashes of one sequence from its first block.
    type Chain: Send + Sync;
    /// Blocks in use.
    type Held;
    /// Blocks allocated and not yet written.
    type Fresh;

    fn new(capacity: usize) -> Self;
    fn name() -> &'static str;

    /// The chain of blocks with these numbers.
    fn chain_of(length: usize, number: impl Fn(usize) -> u64) -> Self::Chain;

    /// The chain whose blocks are told apart by `seed`; the first `shared` blocks are those of
    /// every chain.
    fn chain(seed: u64, length: usize, shared: usize) -> Self::Chain {
        Self::chain_of(length, |index| block_number(seed, index, shared))
    }

    /// Exclusive blocks; the pool must have that many free or evictable.
    fn allocate(&self, blocks: usize) -> Self::Fresh;

    /// Registers `fresh` as blocks `from ..` of `chain`.
    fn register(&self, fresh: Self::Fresh, chain: &Self::Chain, from: usize) -> Self::Held;

    /// The longest cached prefix, in use until it is dropped.
    fn lookup(&self, chain: &Self::Chain) -> Self::Held;

    /// From the tokens of a prompt to the longest cached prefix: hashing and looking up.
    fn answer(&self, tokens: &[u32]) -> Self::Held;

    /// The chain of a prompt's whole blocks.
    fn chain_of_tokens(tokens: &[u32]) -> Self::Chain;

    /// What an engine says of a request once, so that the blocks it uses count as used. Nothing
    /// where looking up and letting go say it.
    fn touch(&self, chain: &Self::Chain);

    fn len(held: &Self::Held) -> usize;

    /// Takes every event that waits, so that none piles up or is overwritten.
    fn keep_house(&self);

    /// A request that finds nothing: allocate, register, let go.
    fn churn(&self, chain: &Self::Chain, length: usize) {
        let fresh = self.allocate(length);
        drop(self.register(fresh, chain, 0));
        self.keep_house();
    }

    /// As an engine serves a request: what is there of it is looked up and counts as used, the rest
    /// is registered, all is let go of. Says how many blocks were there.
    fn request(&self, chain: &Self::Chain, length: usize) -> usize {
        let known = self.lookup(chain);
        self.touch(chain);
        let from = Self::len(&known);
        let fresh = self.allocate(length - from);
        drop(self.register(fresh, chain, from));
        drop(known);
        self.keep_house();
        from
    }
}

/// Numbers that look random: splitmix64.
pub fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A 64-bit number for block `index` of the chain with `seed`.
pub fn block_number(seed: u64, index: usize, shared: usize) -> u64 {
    if index < shared { mix(index as u64) } else { mix(mix(seed) ^ index as u64) }
}
