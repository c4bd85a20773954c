//! What an engine knows of the future, and of itself.

use super::KvBlockManager;
use crate::config::FIRST_GROUP;
use crate::prefetch::{self, Prefetched};
use kvbm_tokens::BlockChain;
use std::time::Duration;

impl<G> KvBlockManager<G> {
    /// The engine computed `tokens` tokens of prompts in `elapsed`: a step, whatever else was in
    /// it. From such steps kvbm knows what computing a block costs, where
    /// `policy.prefill_tokens_per_s` does not say it. What would come from a lower tier later than
    /// it is computed is not promised then. Steps of fewer than 64 tokens, and pauses of more than
    /// 30 s, do not count; whether this one did.
    pub fn prefilled(&self, tokens: u64, elapsed: Duration) -> bool {
        self.leader.transfers.saw_prefill(tokens, elapsed)
    }

    /// A request for `chain` will come: copies what only G3 has of it to G2, in the background and
    /// within a budget (`policy.prefetch_share`). Asks no volume. Returns at once.
    pub fn prefetch<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Prefetched {
        prefetch::ahead(&self.leader, chain.into())
    }

    /// The session of `chain` goes on soon: its blocks count as used now, and
    /// [`prefetch`](Self::prefetch) begins. The opposite of [`branch_ends`](Self::branch_ends).
    pub fn session_resumes<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Prefetched {
        let chain = chain.into();
        self.leader.registry.touch(FIRST_GROUP, chain.hashes());
        prefetch::ahead(&self.leader, chain)
    }
}
