//! The peer's side: `kvbm-logical` with its default back end, through its public interface. Its registry counts no uses: only another
//! back end needs that, and it would cost it a lock and four cold counters for each block.

use crate::side::Side;
use dynamo_tokens::PositionalLineageHash;
use kvbm_logical::{BlockManager, BlockRegistry, ImmutableBlock, MutableBlock};

const TOKENS_PER_BLOCK: usize = 16;

/// What the peer keeps with a block: nothing.
#[derive(Clone, Debug)]
pub struct Meta;

pub struct Peer {
    manager: BlockManager<Meta>,
}

impl Side for Peer {
    type Chain = Vec<PositionalLineageHash>;
    type Held = Vec<ImmutableBlock<Meta>>;
    type Fresh = Vec<MutableBlock<Meta>>;

    fn new(capacity: usize) -> Self {
        let manager = BlockManager::builder()
            .block_count(capacity)
            .block_size(TOKENS_PER_BLOCK)
            .registry(BlockRegistry::new())
            .build()
            .expect("a valid configuration");
        Self { manager }
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
        let complete = staged.map(|(block, &hash)| match block.stage(hash, TOKENS_PER_BLOCK) {
            Ok(complete) => complete,
            Err(_) => unreachable!("the block size is the manager's"),
        });
        self.manager.register_blocks(complete.collect())
    }

    fn lookup(&self, chain: &Self::Chain) -> Self::Held {
        self.manager.match_blocks(chain)
    }

    /// A block that was matched goes back to the young end of its order with its last user.
    fn touch(&self, _chain: &Self::Chain) {}

    fn len(held: &Self::Held) -> usize {
        held.len()
    }

    fn keep_house(&self) {}
}
