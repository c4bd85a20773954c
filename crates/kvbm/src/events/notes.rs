//! What events say of a block beyond what the pool knows: its own tokens.

use kvbm_events::vllm::{EngineBlock, EngineBlocks};
use kvbm_plan::{LocalHash, SequenceHash};
use kvbm_tokens::{BlockChain, BlockHasher};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::hashing::Keyed;

/// Blocks that wait to be taken into the map at most, as a rule: 24 bytes each.
const MOST_FRESH: usize = 1 << 15;

/// A side table, filled when blocks are committed, since the pool's small records have no tokens.
/// It holds a fixed number of the newest blocks. Events of older blocks have no tokens.
pub(super) struct Notes {
    limit: usize,
    /// Their tokens, where events say them.
    tokens: Option<Arc<EngineBlocks>>,
    table: Mutex<Table>,
    /// Whether anything was ever noted. Where the engine hashes for itself, look-ups can be
    /// skipped.
    used: AtomicBool,
}

/// New notes wait in `fresh`, in order. A commit only appends there; a look-up moves them into the
/// map.
#[derive(Default)]
struct Table {
    fresh: Vec<(SequenceHash, LocalHash)>,
    local: HashMap<SequenceHash, LocalHash, Keyed>,
    /// In the order in which they came.
    order: VecDeque<SequenceHash>,
}

impl Notes {
    /// For `limit` blocks. Tokens are kept only where `keep_tokens` says so: nobody else asks for
    /// them.
    pub(super) fn new(limit: usize, keep_tokens: bool) -> Self {
        let tokens = keep_tokens.then(|| Arc::new(EngineBlocks::new(limit)));
        Self { limit, tokens, table: Mutex::default(), used: AtomicBool::new(false) }
    }

    /// Tokens of the blocks, where they are kept.
    pub(super) fn tokens(&self) -> Option<Arc<EngineBlocks>> {
        self.tokens.clone()
    }

    /// Notes the blocks of a chain from `first` on, as far as `blocks` go. A chain without tokens
    /// has nothing to tell.
    pub(super) fn add(&self, chain: &BlockChain<'_>, first: usize, blocks: usize) {
        let range = first..first.saturating_add(blocks).min(chain.len());
        if let Some(kept) = &self.tokens {
            for index in range.clone() {
                let Some(tokens) = chain.tokens_of(index) else { break };
                let known = EngineBlock { token_ids: tokens.into(), ..EngineBlock::default() };
                kept.note(chain.hashes()[index], known);
            }
        }
        let hashed = range.map_while(|index| Some((chain.hashes()[index], chain.local_hash_of(index)?)));
        let mut hashed = hashed.peekable();
        if hashed.peek().is_some() {
            self.write(hashed);
        }
    }

    /// Notes what an engine knows of a block, as far as events say it.
    pub(super) fn describe(&self, hash: SequenceHash, known: EngineBlock, hasher: &BlockHasher) {
        // Extra keys of an engine are not ours: a hash of the tokens alone would be that of another
        // block.
        if !known.token_ids.is_empty() && known.extra_keys.is_none() {
            self.write(std::iter::once((hash, hasher.local_hash(&known.token_ids, &[]))));
        }
        if let Some(kept) = &self.tokens {
            kept.note(hash, known);
        }
    }

    fn write(&self, blocks: impl Iterator<Item = (SequenceHash, LocalHash)>) {
        let mut table = self.table.lock();
        table.fresh.extend(blocks);
        if table.fresh.len() >= MOST_FRESH.min(self.limit) {
            table.settle(self.limit);
        }
        self.used.store(true, Ordering::Release);
    }

    /// What is known of blocks. Commits wait while it is held, so hold it for a moment only.
    pub(super) fn read(&self) -> Known<'_> {
        Known(self.used.load(Ordering::Acquire).then(|| {
            let mut table = self.table.lock();
            table.settle(self.limit);
            table
        }))
    }
}

impl Table {
    /// Moves the new notes into the map.
    fn settle(&mut self, limit: usize) {
        let mut fresh = std::mem::take(&mut self.fresh);
        for (hash, local) in fresh.drain(..) {
            self.insert(hash, local, limit);
        }
        self.fresh = fresh;
    }

    fn insert(&mut self, hash: SequenceHash, local: LocalHash, limit: usize) {
        if self.local.insert(hash, local).is_some() {
            return;
        }
        self.order.push_back(hash);
        if self.order.len() > limit
            && let Some(oldest) = self.order.pop_front()
        {
            self.local.remove(&oldest);
        }
    }
}

/// The table, held.
pub(super) struct Known<'a>(Option<MutexGuard<'a, Table>>);

impl Known<'_> {
    pub(super) fn local_hash(&self, hash: &SequenceHash) -> Option<LocalHash> {
        self.0.as_ref()?.local.get(hash).copied()
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
        let there = |index: usize| notes.read().local_hash(&sequence.hashes()[index]);
        assert_eq!((there(0), there(1), there(2)), (None, None, sequence.local_hash(2)), "the oldest went");
        assert_eq!(there(4), sequence.local_hash(4));
        notes.add(&chain, 0, 1);
        assert_eq!((there(2), there(0)), (None, sequence.local_hash(0)));
        assert_eq!(notes.tokens().unwrap().len(), 3);

        let notes = Notes::new(3, false);
        notes.add(&chain, 0, 1);
        assert!(notes.tokens().is_none());
        assert_eq!(notes.read().local_hash(&sequence.hashes()[0]), sequence.local_hash(0));
        notes.add(&BlockChain::of_hashes(&sequence.hashes()[1..]), 0, 1);
        assert_eq!(notes.read().local_hash(&sequence.hashes()[1]), None, "a chain without tokens");
    }
}
