//! Our side, as it ships: the three-tier registry with its event ring on and drained.

use crate::side::{Side, TOKENS_PER_BLOCK, mix};
use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockPool, Cached, Duplicates, EventRecord, G1, PolicyKind, Registry,
    RegistryConfig, Reset,
};
use kvbm_tokens::{BlockHasher, Namespace, TokenSequence};
use std::sync::{LazyLock, Mutex};

static HASHER: LazyLock<BlockHasher> = LazyLock::new(|| {
    let namespace = Namespace::new("model").page_size(TOKENS_PER_BLOCK);
    namespace.hasher().expect("a valid namespace")
});

const GROUP: GroupId = GroupId(0);
/// Lower tiers exist, so that nothing is specialised for one tier, and are small, so that bytes per
/// block are G1's.
const LOWER: u32 = 1024;
const EVENTS: usize = 1 << 9;

pub struct Ours {
    pub registry: Registry,
    pool: BlockPool<G1>,
    events: Mutex<Vec<EventRecord>>,
}

impl Ours {
    pub fn with_policy(capacity: usize, policy: PolicyKind) -> Self {
        let mut config = RegistryConfig::new([capacity as u32, LOWER, LOWER]);
        config.policy = policy;
        let registry = Registry::new(&config).expect("a valid configuration");
        let pool = registry.pool();
        Self { registry, pool, events: Mutex::new(Vec::with_capacity(EVENTS)) }
    }
}

impl Side for Ours {
    type Chain = Vec<SequenceHash>;
    type Held = Cached<G1>;
    type Fresh = BlockBatch<G1, Reset>;

    fn new(capacity: usize) -> Self {
        Self::with_policy(capacity, PolicyKind::LruLeaf)
    }

    fn name() -> &'static str {
        "ours"
    }

    fn chain_of(length: usize, number: impl Fn(usize) -> u64) -> Self::Chain {
        let hash = |index| {
            let low = number(index);
            SequenceHash::from_bytes((u128::from(mix(low)) << 64 | u128::from(low)).to_le_bytes())
        };
        (0..length).map(hash).collect()
    }

    fn allocate(&self, blocks: usize) -> Self::Fresh {
        self.pool.get_mutable_blocks(blocks).expect("enough is evictable")
    }

    fn register(&self, fresh: Self::Fresh, chain: &Self::Chain, from: usize) -> Self::Held {
        let end = from + fresh.len();
        let partial = fresh.init_sequence(NamespaceId(0), GROUP, from as u32).expect("a position in range");
        let (complete, _) = partial.commit(BlockChain::of_hashes(&chain[..end])).expect("a whole chain");
        self.pool.register(complete, Duplicates::Reuse).expect("the parent is there")
    }

    fn lookup(&self, chain: &Self::Chain) -> Self::Held {
        self.pool.match_sequence_hashes(GROUP, chain)
    }

    fn answer(&self, tokens: &[u32]) -> Self::Held {
        let sequence = TokenSequence::from_tokens(*HASHER, tokens);
        self.pool.match_sequence_hashes(GROUP, sequence.hashes())
    }

    fn chain_of_tokens(tokens: &[u32]) -> Self::Chain {
        TokenSequence::from_tokens(*HASHER, tokens).hashes().to_vec()
    }

    fn touch(&self, chain: &Self::Chain) {
        self.registry.touch(GROUP, chain);
    }

    fn len(held: &Self::Held) -> usize {
        held.len()
    }

    fn keep_house(&self) {
        let mut events = self.events.lock().expect("no panic while it is held");
        loop {
            events.clear();
            self.registry.drain_events(&mut events, EVENTS);
            if events.len() < EVENTS {
                return;
            }
        }
    }
}
