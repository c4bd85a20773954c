//! What events say of a block beyond what the pool knows: its own tokens.

use kvbm_events::vllm::{EngineBlock, EngineBlocks};
use kvbm_plan::{LocalHash, SequenceHash};
use kvbm_tokens::BlockChain;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// A side table, filled when blocks are committed: the pool's records are small and know no tokens. It holds the newest blocks, a
/// fixed number of them; what is not there any more is left out of events.
pub(super) struct Notes {
    limit: usize,
    /// Their tokens, where events say them.
    tokens: Option<Arc<EngineBlocks>>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    local: HashMap<SequenceHash, LocalHash>,
    /// In the order in which they came.
    order: VecDeque<SequenceHash>,
}

impl Notes {
    /// For `limit` blocks. Tokens are kept only where `keep_tokens` says so: nobody else asks for them.
    pub(super) fn new(limit: usize, keep_tokens: bool) -> Self {
        let tokens = keep_tokens.then(|| Arc::new(EngineBlocks::new(limit)));
        Self { limit, tokens, table: Mutex::default() }
    }

    /// Tokens of the blocks, where they are kept.
    pub(super) fn tokens(&self) -> Option<Arc<EngineBlocks>> {
        self.tokens.clone()
    }

    /// Notes the blocks of a chain from `first` on, as far as `blocks` go. A chain without tokens has nothing to tell.
    pub(super) fn add(&self, chain: &BlockChain<'_>, first: usize, blocks: usize) {
        for index in first..first.saturating_add(blocks).min(chain.len()) {
            let (Some(tokens), Some(local)) = (chain.tokens_of(index), chain.local_hash_of(index)) else {
                return;
            };
            let hash = chain.hashes()[index];
            if let Some(kept) = &self.tokens {
                kept.note(hash, EngineBlock { hash: None, token_ids: tokens.into() });
            }
            self.insert(hash, local);
        }
    }

    fn insert(&self, hash: SequenceHash, local: LocalHash) {
        let mut table = self.table.lock();
        if table.local.insert(hash, local).is_some() {
            return;
        }
        table.order.push_back(hash);
        if table.order.len() > self.limit
            && let Some(oldest) = table.order.pop_front()
        {
            table.local.remove(&oldest);
        }
    }

    pub(super) fn local_hash(&self, hash: &SequenceHash) -> Option<LocalHash> {
        self.table.lock().local.get(hash).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_tokens::{Namespace, TokenSequence};

    #[test]
    fn the_newest_blocks_are_kept() {
        let notes = Notes::new(3, true);
        let mut sequence = TokenSequence::new(Namespace::new("m").page_size(4).hasher().unwrap());
        sequence.add_tokens(&(0..20).collect::<Vec<_>>());
        let chain = sequence.chain();
        notes.add(&chain, 1, 2);
        notes.add(&chain, 2, 9);
        let there = |index: usize| notes.local_hash(&sequence.hashes()[index]);
        assert_eq!((there(0), there(1), there(2)), (None, None, sequence.local_hash(2)), "the oldest went");
        assert_eq!(there(4), sequence.local_hash(4));
        notes.add(&chain, 0, 1);
        assert_eq!((there(2), there(0)), (None, sequence.local_hash(0)));
        assert_eq!(notes.tokens().unwrap().len(), 3);

        let notes = Notes::new(3, false);
        notes.add(&chain, 0, 1);
        assert!(notes.tokens().is_none());
        assert_eq!(notes.local_hash(&sequence.hashes()[0]), sequence.local_hash(0));
        notes.add(&BlockChain::of_hashes(&sequence.hashes()[1..]), 0, 1);
        assert_eq!(notes.local_hash(&sequence.hashes()[1]), None, "a chain without tokens");
    }
}
