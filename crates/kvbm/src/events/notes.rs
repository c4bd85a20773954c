//! What events say of a block beyond what the pool knows: its own tokens.

use kvbm_plan::{LocalHash, SequenceHash};
use kvbm_tokens::{BlockChain, Token};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// A side table, filled when blocks are committed: the pool's records are small and know no tokens. It holds the newest blocks, a
/// fixed number of them; what is not there any more is left out of events.
pub(super) struct Notes {
    limit: usize,
    keep_tokens: bool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    notes: HashMap<SequenceHash, Note>,
    /// In the order in which they came.
    order: VecDeque<SequenceHash>,
}

#[derive(Clone)]
struct Note {
    local: LocalHash,
    tokens: Arc<[Token]>,
}

impl Notes {
    /// For `limit` blocks. Tokens are kept only where `keep_tokens` says so: nobody else asks for them.
    pub(super) fn new(limit: usize, keep_tokens: bool) -> Self {
        Self { limit, keep_tokens, table: Mutex::default() }
    }

    /// Notes the blocks of a chain from `first` on, as far as `blocks` go. A chain without tokens has nothing to tell.
    pub(super) fn add(&self, chain: &BlockChain<'_>, first: usize, blocks: usize) {
        let nothing: Arc<[Token]> = Arc::default();
        for index in first..first.saturating_add(blocks).min(chain.len()) {
            let (Some(tokens), Some(local)) = (chain.tokens_of(index), chain.local_hash_of(index)) else {
                return;
            };
            let tokens = if self.keep_tokens { tokens.into() } else { Arc::clone(&nothing) };
            self.insert(chain.hashes()[index], Note { local, tokens });
        }
    }

    fn insert(&self, hash: SequenceHash, note: Note) {
        let mut table = self.table.lock();
        if table.notes.insert(hash, note).is_some() {
            return;
        }
        table.order.push_back(hash);
        if table.order.len() > self.limit
            && let Some(oldest) = table.order.pop_front()
        {
            table.notes.remove(&oldest);
        }
    }

    pub(super) fn local_hash(&self, hash: &SequenceHash) -> Option<LocalHash> {
        self.table.lock().notes.get(hash).map(|note| note.local)
    }

    /// Tokens of a block, where they are kept and it is still there.
    pub(super) fn tokens(&self, hash: &SequenceHash) -> Option<Arc<[Token]>> {
        let tokens = self.table.lock().notes.get(hash).map(|note| Arc::clone(&note.tokens));
        tokens.filter(|tokens| !tokens.is_empty())
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
        let there = |index: usize| notes.tokens(&sequence.hashes()[index]).map(|tokens| tokens.to_vec());
        assert_eq!((there(0), there(1), there(2)), (None, None, Some(vec![8, 9, 10, 11])), "the oldest went");
        assert_eq!(notes.local_hash(&sequence.hashes()[4]), sequence.local_hash(4));
        notes.add(&chain, 0, 1);
        assert_eq!((there(2), there(0)), (None, Some(vec![0, 1, 2, 3])));

        let notes = Notes::new(3, false);
        notes.add(&chain, 0, 1);
        assert_eq!(notes.tokens(&sequence.hashes()[0]), None);
        assert_eq!(notes.local_hash(&sequence.hashes()[0]), sequence.local_hash(0));
        notes.add(&BlockChain::of_hashes(&sequence.hashes()[1..]), 0, 1);
        assert_eq!(notes.local_hash(&sequence.hashes()[1]), None, "a chain without tokens");
    }
}
