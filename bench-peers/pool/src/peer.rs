//! The peer's side: `kvbm-logical` through its public interface, with its default back end unless a
//! row names another. The registry counts uses for the back end `multi_lru` alone: no other needs
//! it, and counting costs a lock and four cold counters a block.

use crate::side::{Side, TOKENS_PER_BLOCK};
use dynamo_tokens::{PositionalLineageHash, TokenBlockSequence};
use kvbm_logical::manager::FrequencyTrackingCapacity;
use kvbm_logical::{BlockManager, BlockRegistry, ImmutableBlock, MutableBlock};

/// The peer's back ends: how it keeps the blocks without users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackEnd {
    /// Leaves first; its default.
    Lineage,
    Lru,
    MultiLru,
    HashMap,
}

impl BackEnd {
    /// All but the default, by the suffix of their rows.
    pub const OTHERS: [(&'static str, Self); 3] =
        [("_lru", Self::Lru), ("_multi_lru", Self::MultiLru), ("_hashmap", Self::HashMap)];
}

/// What the peer keeps with a block: nothing.
#[derive(Clone, Debug)]
pub struct Meta;

pub struct Peer {
    manager: BlockManager<Meta>,
}

impl Peer {
    pub fn with_back_end(capacity: usize, back_end: BackEnd) -> Self {
        let registry = match back_end {
            BackEnd::MultiLru => {
                let tracker = FrequencyTrackingCapacity::default().create_tracker();
                BlockRegistry::builder().frequency_tracker(tracker).build()
            }
            _ => BlockRegistry::new(),
        };
        let builder = BlockManager::builder()
            .block_count(capacity)
            .block_size(TOKENS_PER_BLOCK as usize)
            .registry(registry);
        let builder = match back_end {
            BackEnd::Lineage => builder,
            BackEnd::Lru => builder.with_lru_backend(),
            BackEnd::MultiLru => builder.with_multi_lru_backend(),
            BackEnd::HashMap => builder.with_hashmap_backend(),
        };
        Self { manager: builder.build().expect("a valid configuration") }
    }
}

fn hashed(tokens: &[u32]) -> Vec<PositionalLineageHash> {
    let sequence = TokenBlockSequence::from_slice(tokens, TOKENS_PER_BLOCK, Some(7));
    sequence.blocks().iter().map(|block| block.positional_lineage_hash()).collect()
}

impl Side for Peer {
    type Chain = Vec<PositionalLineageHash>;
    type Held = Vec<ImmutableBlock<Meta>>;
    type Fresh = Vec<MutableBlock<Meta>>;

    fn new(capacity: usize) -> Self {
        Self::with_back_end(capacity, BackEnd::Lineage)
    }

    fn name() -> &'static str {
        "peer"
    }

    fn chain_of(length: usize, number: impl Fn(usize) -> u64) -> Self::Chain {
        let hash = |index: usize| {
            let parent = index.checked_sub(1).map(&number);
            PositionalLineageHash::new(number(index), parent, index as u64)
        };
        (0..length).map(hash).collect()
    }

    fn allocate(&self, blocks: usize) -> Self::Fresh {
        self.manager.allocate_blocks(blocks).expect("enough is evictable")
    }

    fn register(&self, fresh: Self::Fresh, chain: &Self::Chain, from: usize) -> Self::Held {
        let staged = fresh.into_iter().zip(&chain[from..]);
        let complete = staged.map(|(block, &hash)| match block.stage(hash, TOKENS_PER_BLOCK as usize) {
            Ok(complete) => complete,
            Err(_) => unreachable!("the block size is the manager's"),
        });
        self.manager.register_blocks(complete.collect())
    }

    fn lookup(&self, chain: &Self::Chain) -> Self::Held {
        self.manager.match_blocks(chain)
    }

    fn answer(&self, tokens: &[u32]) -> Self::Held {
        self.manager.match_blocks(&hashed(tokens))
    }

    fn chain_of_tokens(tokens: &[u32]) -> Self::Chain {
        hashed(tokens)
    }

    /// A block that was matched goes back to the young end of its order with its last user.
    fn touch(&self, _chain: &Self::Chain) {}

    fn len(held: &Self::Held) -> usize {
        held.len()
    }

    fn keep_house(&self) {}
}
