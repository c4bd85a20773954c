//! Batches of sizes around what is looked up, told and evicted at a time: the ids and counts that
//! come of them, whatever else happens to blocks meanwhile, and what the policy is told of them.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockMemory, BlockUse, Cached, Complete, Duplicates, EventRecordKind,
    EvictionPolicy, G1, GroupConfig, PolicyKind, Quarantine, RegisterError, Registry, RegistryConfig,
    RequestPart, Share, SlotNumbers, SlotSet, TenantConfig, TierMask,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

const GROUP: GroupId = GroupId(0);
/// Its blocks outlive their parents: a block whose parent is nowhere needs two entries.
const STATE: GroupId = GroupId(1);
const SIZES: [usize; 11] = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129];
const BLOCKS: u32 = 1000;

fn config(blocks: u32) -> RegistryConfig {
    let groups = vec![GroupConfig::full(16), GroupConfig { kind: GroupKind::State, tokens_per_block: 16 }];
    RegistryConfig { groups, event_capacity: 1 << 14, ..RegistryConfig::new([blocks, 0, 0]) }
}

fn hash(number: u64) -> SequenceHash {
    SequenceHash::from_bytes(
        u128::from(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_le_bytes(),
    )
}

fn hashes(first: u64, count: usize) -> Vec<SequenceHash> {
    (first..first + count as u64).map(hash).collect()
}

/// Blocks of a chain from the one at `from` on, to be registered; nothing where there is no room.
fn complete(
    registry: &Registry,
    (namespace, group): (NamespaceId, GroupId),
    chain: &[SequenceHash],
    from: usize,
) -> Option<BlockBatch<G1, Complete>> {
    let blocks = registry.pool::<G1>().get_mutable_blocks_for(namespace, chain.len() - from).ok()?;
    let partial = blocks.init_sequence(namespace, group, from as u32).unwrap();
    Some(partial.commit(BlockChain::of_hashes(chain)).unwrap().0)
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// A registry, what it said, and what is in somebody's hands.
struct World {
    registry: Registry,
    random: Random,
    /// Number of the next block.
    next: u64,
    chains: Vec<(NamespaceId, Vec<SequenceHash>)>,
    held: Vec<Cached<G1>>,
    /// What is there, as events tell.
    told: BTreeSet<SequenceHash>,
    quarantined: BTreeSet<BlockId>,
    /// Batches in which a block came twice.
    twice: usize,
}

impl World {
    fn new(config: &RegistryConfig, seed: u64) -> Self {
        Self {
            registry: Registry::new(config).unwrap(),
            random: Random(seed),
            next: 0,
            chains: Vec::new(),
            held: Vec::new(),
            told: BTreeSet::new(),
            quarantined: BTreeSet::new(),
            twice: 0,
        }
    }

    fn step(&mut self) {
        match self.random.below(32) {
            0..=19 => self.register(),
            20..=24 => self.let_go(),
            25 | 26 => self.quarantine(),
            27..=29 => self.orphans(),
            30 => self.remove(),
            _ => self.lose(),
        }
        self.check();
    }

    /// A chain with a batch of new blocks at its end: a new one, or one of which something may be
    /// there.
    fn chain(&mut self, size: usize) -> (NamespaceId, Vec<SequenceHash>) {
        let (namespace, mut chain) = if self.chains.is_empty() || self.random.one_in(3) {
            (NamespaceId(self.random.below(3) as u32), Vec::new())
        } else {
            let at = self.random.below(self.chains.len());
            let (namespace, chain) = self.chains[at].clone();
            (namespace, chain[..=self.random.below(chain.len())].to_vec())
        };
        chain.extend(hashes(self.next, size));
        self.next += size as u64;
        (namespace, chain)
    }

    fn register(&mut self) {
        let size = SIZES[self.random.below(SIZES.len())];
        let (namespace, mut chain) = self.chain(size);
        // What is there is held while it is continued; a part of it may be registered once more.
        let known = self.registry.pool::<G1>().match_sequence_hashes(GROUP, &chain);
        let from = if self.random.one_in(3) { known.len() / 2 } else { known.len() };
        let many = chain.len() - from;
        let is_repeated = many > 2 && self.random.one_in(3);
        if is_repeated {
            // Not one after the other: no block continues itself.
            let second = 2 + self.random.below(many - 2);
            chain[from + second] = chain[from + self.random.below(second - 1)];
            self.twice += 1;
        }
        let duplicates = if self.random.one_in(2) { Duplicates::Reuse } else { Duplicates::Allow };
        let Some(batch) = complete(&self.registry, (namespace, GROUP), &chain, from) else {
            return self.let_go();
        };
        let given = batch.block_ids().to_vec();
        let is_there = |hash: &&SequenceHash| self.registry.slot_of(Tier::G1, GROUP, **hash).is_some();
        let there = chain[from..].iter().filter(is_there).copied().collect();
        let cached = self.registry.pool::<G1>().register(batch, duplicates).unwrap();
        self.check_ids(&chain[from..], [&given, cached.block_ids()], duplicates, &there);
        if !is_repeated {
            let found = self.registry.pool::<G1>().match_sequence_hashes(GROUP, &chain);
            assert_eq!(found.len(), chain.len(), "all of the chain is there");
            let identities: Vec<_> = BlockIdentity::chain(namespace, GROUP, &chain).collect();
            assert_eq!(cached.identities(), identities[from..]);
            self.chains.push((namespace, chain));
        }
        self.held.push(cached);
    }

    /// A block that was not there is in the slot that it was written to. One that was is there once
    /// more under `Allow`, else it is the one that was.
    fn check_ids(
        &self,
        batch: &[SequenceHash],
        [given, ids]: [&[BlockId]; 2],
        duplicates: Duplicates,
        was_there: &BTreeSet<SequenceHash>,
    ) {
        let mut there = was_there.clone();
        for (at, hash) in batch.iter().enumerate() {
            let primary = self.registry.slot_of(Tier::G1, GROUP, *hash).expect("it was registered");
            let is_new = there.insert(*hash);
            assert_eq!(primary == given[at], is_new, "block {at} of {}", batch.len());
            assert_eq!(ids[at], if duplicates == Duplicates::Allow { given[at] } else { primary });
        }
    }

    /// Lets go of a batch, or of a part of it.
    fn let_go(&mut self) {
        if !self.held.is_empty() {
            let mut batch = self.held.swap_remove(self.random.below(self.held.len()));
            let end = batch.split_off(self.random.below(batch.len() + 1));
            let [stays, goes] = if self.random.one_in(2) { [batch, end] } else { [end, batch] };
            drop(goes);
            if self.random.one_in(3) && !stays.is_empty() {
                self.held.push(stays);
            }
        }
    }

    /// Bad bytes in a slot of somebody's.
    fn quarantine(&mut self) {
        let Some(batch) = self.held.last().filter(|_| self.quarantined.len() < 20) else { return };
        let block = batch.block_ids()[self.random.below(batch.len())];
        if self.registry.quarantine(Tier::G1, block) == Quarantine::AfterLastUser {
            self.quarantined.insert(block);
        }
    }

    /// Blocks with two entries each, so that entries run out.
    fn orphans(&mut self) {
        for _ in 0..self.random.below(60) {
            let chain = hashes(self.next, 2);
            self.next += 2;
            let Some(batch) = complete(&self.registry, (NamespaceId(0), STATE), &chain, 1) else { return };
            self.held.push(self.registry.pool::<G1>().register(batch, Duplicates::Reuse).unwrap());
        }
    }

    /// A block and all that continues it.
    fn remove(&mut self) {
        let top = hash(self.random.below(1 + self.next as usize) as u64);
        self.registry.remove_subtree(GROUP, top, TierMask::ALL);
    }

    /// A batch from before the tier lost what it held.
    fn lose(&mut self) {
        let (namespace, chain) = self.chain(65);
        let known = self.registry.pool::<G1>().match_sequence_hashes(GROUP, &chain);
        let batch = complete(&self.registry, (namespace, GROUP), &chain, known.len());
        self.registry.lose(TierMask::only(Tier::G1));
        if let Some(batch) = batch {
            let refused = self.registry.pool::<G1>().register(batch, Duplicates::Reuse).unwrap_err();
            assert!(matches!(refused.error, RegisterError::Lost(_)));
        }
        assert!(self.registry.snapshot(Tier::G1).0.is_empty());
    }

    /// Events, counts and what is there agree.
    fn check(&mut self) {
        self.listen();
        let (snapshot, _) = self.registry.snapshot(Tier::G1);
        let there: BTreeSet<SequenceHash> = snapshot.iter().map(|(_, identity)| identity.hash).collect();
        let slots: BTreeSet<BlockId> = snapshot.iter().map(|&(block, _)| block).collect();
        assert_eq!((slots.len(), there.len()), (snapshot.len(), snapshot.len()), "each in a slot of its own");
        assert_eq!(there, self.told);
        for batch in &self.held {
            for (identity, stays) in batch.identities().iter().zip(batch.registered()) {
                assert!(!stays || there.contains(&identity.hash), "what is held stays");
            }
        }
        let status = self.registry.occupancy(Tier::G1);
        let used = status.active + status.inactive + status.detached;
        assert_eq!((status.held, status.free + used + status.quarantined), (0, BLOCKS), "{status:?}");
        let tenants = self.registry.tenants(Tier::G1);
        if tenants.len() > 1 {
            assert_eq!(tenants.iter().map(|tenant| tenant.blocks).sum::<u32>(), used, "{status:?}");
            assert!(tenants.iter().all(|tenant| tenant.held == 0));
        }
    }

    fn listen(&mut self) {
        let mut events = Vec::with_capacity(1 << 14);
        assert_eq!(self.registry.drain_events(&mut events, 1 << 14).lost, 0);
        for event in events {
            let changes = match event.kind {
                EventRecordKind::Store => self.told.insert(event.identity.hash),
                EventRecordKind::Remove => self.told.remove(&event.identity.hash),
            };
            assert!(changes, "{event:?} tells what was told");
        }
    }

    /// Nothing is left when all goes: no count is too high, or too low.
    fn finish(mut self) -> usize {
        self.held.clear();
        self.check();
        let status = self.registry.occupancy(Tier::G1);
        assert_eq!(
            (status.active, status.detached, status.quarantined),
            (0, 0, self.quarantined.len() as u32)
        );
        let all = BLOCKS as usize - self.quarantined.len();
        assert_eq!(self.registry.pool::<G1>().get_mutable_blocks(all).unwrap().len(), all);
        assert_eq!(self.registry.known_blocks(), 0, "nothing keeps an entry");
        self.check();
        self.twice
    }
}

#[test]
fn batches_of_all_sizes_end_with_the_truth() {
    let tenant = |share, namespace| TenantConfig {
        share: Share::new(share).unwrap(),
        namespaces: vec![NamespaceId(namespace)],
    };
    let tenants = || vec![tenant(0.5, 1), tenant(0.3, 2)];
    let setups = [
        (PolicyKind::LruLeaf, Vec::new()),
        (PolicyKind::Hazard, Vec::new()),
        (PolicyKind::LruLeaf, tenants()),
        (PolicyKind::Hazard, tenants()),
    ];
    for (policy, tenants) in setups {
        let config = RegistryConfig { policy, tenants, ..config(BLOCKS) };
        let mut twice = 0;
        for seed in 0..12 {
            let mut world = World::new(&config, seed);
            (0..150).for_each(|_| world.step());
            twice += world.finish();
        }
        assert!(twice > 50, "{twice} batches had a block twice");
    }
}

/// What a policy is told of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PolicyCall {
    Begins { blocks: usize },
    Looks { every: u64 },
    Comes { from_tail: u32 },
}

/// A policy that records its calls; any block that may go goes.
struct Listener(Arc<Mutex<Vec<PolicyCall>>>, BTreeSet<u32>);

impl Listener {
    fn record(&self, call: PolicyCall) {
        self.0.lock().unwrap().push(call);
    }
}

impl EvictionPolicy for Listener {
    fn begin(&mut self, _: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        assert_eq!(part, RequestPart::Registered);
        self.record(PolicyCall::Begins { blocks });
    }

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        self.record(PolicyCall::Comes { from_tail: block.from_tail });
        BlockMemory::default()
    }

    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        self.record(PolicyCall::Looks { every });
        memory
    }

    fn evictable(&mut self, _: SlotSet, slot: u32, _: BlockMemory, _: u8, _: &mut SlotNumbers<'_>) {
        self.1.insert(slot);
    }

    fn kept(&mut self, _: SlotSet, slot: u32, _: &mut SlotNumbers<'_>) {
        self.1.remove(&slot);
    }

    fn victims(&mut self, _: SlotSet, _: usize, out: &mut Vec<u32>, _: &mut SlotNumbers<'_>) {
        out.extend(self.1.pop_first());
    }

    fn has_victim(&self, _: SlotSet) -> bool {
        !self.1.is_empty()
    }
}

/// A registry whose policy records its calls, and these calls.
fn listened_to(blocks: u32) -> (Registry, Arc<Mutex<Vec<PolicyCall>>>) {
    let heard = Arc::<Mutex<Vec<PolicyCall>>>::default();
    let policy = Box::new(Listener(Arc::clone(&heard), BTreeSet::new()));
    (Registry::with_policy(&config(blocks), policy).unwrap(), heard)
}

fn come(registry: &Registry, group: GroupId, chain: &[SequenceHash], from: usize) -> Cached<G1> {
    let batch = complete(registry, (NamespaceId(0), group), chain, from).unwrap();
    registry.pool::<G1>().register(batch, Duplicates::Reuse).unwrap()
}

/// A policy learns of a batch while its blocks are not there: what it looks at then is what was
/// there before, and as many of that as there were. Then it learns of each block how far that is
/// from the end.
#[test]
fn a_policy_learns_of_a_batch_before_its_blocks_have_entries() {
    let (registry, heard) = listened_to(BLOCKS);
    let (mut held, mut there) = (Vec::new(), 0);
    for size in SIZES {
        held.push(come(&registry, GROUP, &hashes(there as u64, size), 0));
        let looks = vec![PolicyCall::Looks { every: (there / 2).max(1) as u64 }; (2 * size).min(there)];
        let mut expected = vec![PolicyCall::Begins { blocks: size }];
        expected.extend(looks);
        expected.extend((0..size as u32).rev().map(|from_tail| PolicyCall::Comes { from_tail }));
        assert_eq!(std::mem::take(&mut *heard.lock().unwrap()), expected, "{size} behind {there}");
        there += size;
    }
}

/// A batch that is entered twice, for a hash comes twice in it or no entry is vacant, is one
/// request to the policy.
#[test]
fn a_policy_learns_once_of_a_batch_that_is_entered_twice() {
    for (orphans, repeats) in [(0, true), (40, false), (40, true)] {
        let (registry, heard) = listened_to(100);
        let held: Vec<_> =
            (0..orphans).map(|number| come(&registry, STATE, &hashes(1000 + 2 * number, 2), 1)).collect();
        heard.lock().unwrap().clear();
        let mut chain = hashes(0, 33);
        if repeats {
            chain[20] = chain[7];
        }
        drop(come(&registry, GROUP, &chain, 0));
        let heard = std::mem::take(&mut *heard.lock().unwrap());
        let begun = heard.iter().filter(|told| matches!(told, PolicyCall::Begins { .. })).collect::<Vec<_>>();
        assert_eq!(begun, [&PolicyCall::Begins { blocks: 33 }], "{orphans} orphans");
        let came = heard.iter().filter(|told| matches!(told, PolicyCall::Comes { .. })).count();
        assert_eq!(came, 33 - usize::from(repeats));
        assert_eq!(registry.known_blocks(), 2 * orphans as usize + came);
        drop(held);
    }
}
