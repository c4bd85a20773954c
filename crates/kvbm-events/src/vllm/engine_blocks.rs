//! What engines said of their blocks.

use super::event::{EngineHash, Raw};
use kvbm_plan::SequenceHash;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// What an engine knows of a block and kvbm's events do not carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineBlock {
    /// The engine's own hash of it; without one, its sequence hash is published.
    pub hash: Option<EngineHash>,
    /// Its tokens; empty where they are not known.
    pub token_ids: Box<[u32]>,
    /// What else went into its hash: a list in MessagePack, as the engine would publish it.
    pub extra_keys: Option<Raw>,
    /// Whose it is.
    pub adapter: Option<Arc<Adapter>>,
}

/// An adapter of the model, `LoRA` for instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapter {
    /// Its number in the engine.
    pub id: Option<u64>,
    /// Its name.
    pub name: Option<String>,
}

impl EngineBlock {
    /// Most bytes of [`extra_keys`](Self::extra_keys), and of an adapter's name.
    pub const MAX_EXTRA_BYTES: usize = 4096;

    /// Adds what `newer` says; what it leaves out stays.
    fn learn(&mut self, newer: Self) {
        let Self { hash, token_ids, extra_keys, adapter } = newer;
        if !token_ids.is_empty() {
            self.token_ids = token_ids;
        }
        self.hash = hash.or(self.hash.take());
        self.extra_keys = extra_keys.or(self.extra_keys.take());
        self.adapter = adapter.or(self.adapter.take());
    }
}

/// A side table of what engines said of their blocks when they were registered. Bounded: the oldest
/// entries are dropped, and their blocks are published without tokens.
#[derive(Debug)]
pub struct EngineBlocks {
    max_blocks: usize,
    state: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    blocks: HashMap<SequenceHash, EngineBlock>,
    order: VecDeque<SequenceHash>,
}

impl EngineBlocks {
    /// Room for `max_blocks`, at least one.
    pub fn new(max_blocks: usize) -> Self {
        Self { max_blocks: max_blocks.max(1), state: Mutex::default() }
    }

    /// Notes a block, before it is registered. What was noted of it before and is not said again
    /// stays.
    pub fn note(&self, block: SequenceHash, known: EngineBlock) {
        let mut state = self.state.lock();
        if let Some(before) = state.blocks.get_mut(&block) {
            before.learn(known);
            return;
        }
        state.blocks.insert(block, known);
        state.order.push_back(block);
        while state.blocks.len() > self.max_blocks {
            let Some(oldest) = state.order.pop_front() else { break };
            state.blocks.remove(&oldest);
        }
    }

    /// Blocks noted.
    pub fn len(&self) -> usize {
        self.state.lock().blocks.len()
    }

    /// Whether nothing is noted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn get(&self, block: &SequenceHash) -> Option<EngineBlock> {
        self.state.lock().blocks.get(block).cloned()
    }

    /// The engine's name of a block.
    pub(super) fn name(&self, block: &SequenceHash) -> Option<EngineHash> {
        self.state.lock().blocks.get(block).and_then(|known| known.hash.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_bit_by_bit_adds_up_and_the_oldest_goes() {
        let blocks = EngineBlocks::new(2);
        let [a, b, c] = [1, 2, 3].map(|byte| SequenceHash::from_bytes([byte; 16]));
        let named = EngineBlock { hash: Some(EngineHash::Uint(7)), ..EngineBlock::default() };
        let tokens = EngineBlock { token_ids: [1, 2].into(), ..EngineBlock::default() };
        blocks.note(a, named.clone());
        blocks.note(a, tokens.clone());
        assert_eq!(blocks.get(&a).unwrap(), EngineBlock { token_ids: [1, 2].into(), ..named.clone() });
        blocks.note(a, EngineBlock { hash: Some(EngineHash::Uint(8)), ..EngineBlock::default() });
        assert_eq!(
            (blocks.name(&a), blocks.get(&a).unwrap().token_ids.len()),
            (Some(EngineHash::Uint(8)), 2)
        );
        blocks.note(b, tokens.clone());
        blocks.note(c, tokens);
        assert_eq!((blocks.len(), blocks.get(&a), blocks.name(&c)), (2, None, None));
    }
}
