//! The six transitions, their validations, and drop.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockPool, BlockState, BlockTrigger, Cached, Complete, Duplicates, G1, Partial,
    PolicyKind, RegisterError, Registry, RegistryConfig, SequenceError, TRANSITIONS,
};

const NAMESPACE: NamespaceId = NamespaceId(0);
const GROUP: GroupId = GroupId(0);

fn pool(capacity: u32) -> (Registry, BlockPool<G1>) {
    let registry = Registry::new(&RegistryConfig::new([capacity, 0, 0])).unwrap();
    let pool = registry.pool();
    (registry, pool)
}

fn hashes(seed: u8, count: u8) -> Vec<SequenceHash> {
    (0..count)
        .map(|index| SequenceHash::from_bytes([seed, index, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
        .collect()
}

fn partial(pool: &BlockPool<G1>, count: usize, position: u32) -> BlockBatch<G1, Partial> {
    pool.get_mutable_blocks(count).unwrap().init_sequence(NAMESPACE, GROUP, position).unwrap()
}

fn complete(pool: &BlockPool<G1>, chain: &[SequenceHash]) -> BlockBatch<G1, Complete> {
    partial(pool, chain.len(), 0).commit(BlockChain::of_hashes(chain)).unwrap().0
}

/// Every pair of state and trigger, whether it is in the table or not.
#[test]
fn the_table_has_exactly_the_six_transitions_of_the_reference() {
    use BlockState::{Complete, Partial, Registered, Reset};
    let expected = [
        (Reset, BlockTrigger::InitSequence, Some(Partial), "must not be in use"),
        (Partial, BlockTrigger::Commit, Some(Complete), "must be full"),
        (Complete, BlockTrigger::Register, Some(Registered), "must be finalized"),
        (Registered, BlockTrigger::Evict, Some(Reset), ""),
        (Partial, BlockTrigger::Reset, Some(Reset), ""),
        (Complete, BlockTrigger::Reset, Some(Reset), ""),
    ];
    let mut legal = 0;
    for from in BlockState::ALL {
        for trigger in BlockTrigger::ALL {
            let row = expected.iter().find(|row| (row.0, row.1) == (from, trigger));
            match from.after(trigger) {
                Ok(to) => {
                    assert_eq!(row.and_then(|row| row.2), Some(to), "{from} {trigger}");
                    legal += 1;
                }
                Err(error) => {
                    assert!(row.is_none(), "{from} {trigger}");
                    assert!(error.to_string().contains(trigger.rule()), "{error}");
                    assert!(error.to_string().contains(&from.to_string()), "{error}");
                }
            }
            if let Some((.., rule)) = row {
                assert!(trigger.rule().contains(rule));
            }
        }
    }
    assert_eq!((legal, TRANSITIONS.len()), (6, 6));
}

/// `BLESS=1` writes the file anew.
#[test]
fn the_graph_in_the_documentation_is_the_table() {
    let edges = TRANSITIONS.map(|(from, trigger, to)| {
        format!("    {from} -> {to} [label=\"{trigger}: {}\"];\n", trigger.rule())
    });
    let states = BlockState::ALL.map(|state| format!("    {state};\n"));
    let graph = format!("digraph block {{\n{}{}}}\n", states.concat(), edges.concat());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/states.dot");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &graph).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert_eq!(written, graph, "states.dot is out of date: run this test once with BLESS=1");
}

#[test]
fn a_block_goes_through_its_whole_life() {
    let (registry, pool) = pool(2);
    let chain = hashes(1, 2);
    let reset = pool.get_mutable_blocks(2).unwrap();
    assert_eq!((reset.state(), reset.len()), (BlockState::Reset, 2));
    let partial = reset.init_sequence(NAMESPACE, GROUP, 0).unwrap();
    assert_eq!(partial.state(), BlockState::Partial);
    let (complete, rest) = partial.commit(BlockChain::of_hashes(&chain)).unwrap();
    assert_eq!((complete.state(), rest.len()), (BlockState::Complete, 0));
    let identities: Vec<BlockIdentity> = BlockIdentity::chain(NAMESPACE, GROUP, &chain).collect();
    assert_eq!(complete.identities(), identities);
    let cached = pool.register(complete, Duplicates::Reuse).unwrap();
    assert_eq!(cached.identities(), identities);
    let handle = cached.registration(1).unwrap();
    let published = cached.publication(1).unwrap();
    assert!(handle.is_registered());
    assert_eq!(handle.identity(), identities[1]);
    assert!(pool.get_mutable_blocks(1).is_err(), "registered blocks in use are not evicted");

    drop(cached);
    assert!(handle.is_registered(), "the last user's drop only makes the block evictable");
    let evicted = pool.get_mutable_blocks(2).unwrap();
    assert!(!handle.is_registered());
    assert_eq!(evicted.state(), BlockState::Reset);

    let mut events = Vec::new();
    registry.drain_events(&mut events, 10);
    assert_eq!(events.len(), 4);
    let stored = events.iter().find(|event| event.identity == identities[1]).unwrap();
    assert!(stored.seq < published.announced_before);
}

#[test]
fn commit_must_be_full() {
    let (_registry, pool) = pool(8);
    let chain = hashes(1, 3);
    let error = partial(&pool, 2, 3).commit(BlockChain::of_hashes(&chain)).unwrap_err();
    assert_eq!(error.error, SequenceError::NotFull { position: 3, full: 3 });
    assert!(error.to_string().contains("must be full"));
    assert_eq!(error.batch.len(), 2, "the batch comes back");

    let (complete, rest) = partial(&pool, 3, 1).commit(BlockChain::of_hashes(&chain)).unwrap();
    assert_eq!((complete.len(), rest.len(), rest.origin().position), (2, 1, 3));
    assert_eq!(complete.identities()[0].parent, Some(chain[0]));

    let late = BlockChain::of_hashes(&chain).slice(2..3);
    let error = partial(&pool, 1, 1).commit(late).unwrap_err();
    assert_eq!(error.error, SequenceError::ChainStart { position: 1, first: 2 });
}

#[test]
fn positions_must_fit() {
    let (_registry, pool) = pool(2);
    let error = pool.get_mutable_blocks(2).unwrap().init_sequence(NAMESPACE, GROUP, u32::MAX).unwrap_err();
    assert_eq!(error.error, SequenceError::TooLong { position: u32::MAX, blocks: 2 });
    assert_eq!(error.batch.len(), 2);
}

#[test]
fn register_refuses_and_gives_the_batch_back() {
    let (_registry, pool) = pool(8);
    let chain = hashes(1, 3);
    let (orphan, _) = partial(&pool, 1, 2).commit(BlockChain::of_hashes(&chain)).unwrap();
    let rejected = pool.register(orphan, Duplicates::Reuse).unwrap_err();
    let expected = RegisterError::MissingParent { index: 0, hash: chain[2], parent: chain[1] };
    assert_eq!(rejected.error, expected);
    drop(pool.register(complete(&pool, &chain[..2]), Duplicates::Reuse).unwrap());
    let cached = pool.register(rejected.batch, Duplicates::Reuse).unwrap();
    assert_eq!(cached.identities()[0].hash, chain[2]);

    let unknown = pool.get_mutable_blocks(1).unwrap().init_sequence(NAMESPACE, GroupId(9), 0).unwrap();
    let (unknown, _) = unknown.commit(BlockChain::of_hashes(&chain)).unwrap();
    let rejected = pool.register(unknown, Duplicates::Reuse).unwrap_err();
    assert_eq!(rejected.error, RegisterError::UnknownGroup { index: 0, group: GroupId(9), groups: 1 });

    let (_other, other) = self::pool(2);
    let foreign = complete(&other, &hashes(2, 1));
    let rejected = pool.register(foreign, Duplicates::Reuse).unwrap_err();
    assert_eq!(rejected.error, RegisterError::ForeignBatch);
}

#[test]
fn reset_is_explicit_or_by_drop() {
    let (registry, pool) = pool(6);
    let chain = hashes(1, 2);
    let free = || registry.occupancy(Tier::G1).free;
    drop(pool.get_mutable_blocks(2).unwrap());
    assert_eq!(free(), 6);
    drop(partial(&pool, 2, 0));
    assert_eq!(free(), 6);
    drop(complete(&pool, &chain));
    assert_eq!(free(), 6);
    let reset = partial(&pool, 2, 0).into_reset();
    assert_eq!((reset.state(), free()), (BlockState::Reset, 4));
    let again = complete(&pool, &chain).into_reset();
    assert_eq!((again.state(), free()), (BlockState::Reset, 2));
    drop((reset, again));
    assert_eq!((free(), registry.occupancy(Tier::G1).held), (6, 0));
}

#[test]
fn batches_split_with_all_that_they_know() {
    let (_registry, pool) = pool(12);
    let chain = hashes(1, 4);
    let mut complete = complete(&pool, &chain);
    let ids = complete.block_ids().to_vec();
    let tail = complete.split_off(3);
    assert_eq!((complete.block_ids(), tail.block_ids()), (&ids[..3], &ids[3..]));
    assert_eq!(tail.identities()[0].position, 3);
    assert!(complete.split_off(99).is_empty());

    let mut partial = partial(&pool, 4, 10);
    let tail = partial.split_off(1);
    assert_eq!((partial.len(), tail.len(), tail.origin().position), (1, 3, 11));

    let mut reset = pool.get_mutable_blocks(4).unwrap();
    assert_eq!((reset.split_off(1).len(), reset.len()), (3, 1));
}

#[test]
fn duplicates_are_reused_or_kept_while_held() {
    let (registry, pool) = pool(6);
    let chain = hashes(1, 2);
    let first = pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap();
    let reused = pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap();
    assert_eq!(reused.block_ids(), first.block_ids());
    assert_eq!(registry.occupancy(Tier::G1).free, 4);
    let copy = pool.register(complete(&pool, &chain), Duplicates::Allow).unwrap();
    assert_ne!(copy.block_ids(), first.block_ids());
    let copy_ids = copy.block_ids().to_vec();
    assert_eq!(registry.counters(Tier::G1).duplicates, 4);

    // The primaries go, their duplicates take over: nobody is told, the blocks are still there.
    drop((first, reused));
    let mut events = Vec::new();
    registry.drain_events(&mut events, 100);
    assert_eq!(events.len(), 2);
    let fresh = pool.get_mutable_blocks(4).unwrap();
    assert_eq!(pool.match_sequence_hashes(GROUP, &chain).block_ids(), copy_ids);
    assert_eq!(registry.drain_events(&mut events, 100).records, 0);
    drop((fresh, copy));
    let last = pool.get_mutable_blocks(6).unwrap();
    assert_eq!((last.len(), registry.drain_events(&mut events, 100).records), (6, 2));
}

fn pool_under(policy: PolicyKind, capacity: u32) -> (Registry, BlockPool<G1>) {
    let registry =
        Registry::new(&RegistryConfig { policy, ..RegistryConfig::new([capacity, 0, 0]) }).unwrap();
    let pool = registry.pool();
    (registry, pool)
}

/// Two blocks, each with a user.
fn parent_and_child(pool: &BlockPool<G1>, chain: &[SequenceHash]) -> (Cached<G1>, Cached<G1>) {
    let mut parent = pool.register(complete(pool, chain), Duplicates::Reuse).unwrap();
    let child = parent.split_off(1);
    (parent, child)
}

/// A block without users whose child has one, three of four slots taken: its copy lets it go, also
/// where it was passed over before. Mutation that makes it fail: `register_one` without
/// `waits_no_more`.
#[test]
fn a_block_that_was_passed_over_goes_when_it_has_a_copy() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        let (_registry, pool) = pool_under(policy, 4);
        let chain = hashes(1, 2);
        let (parent, child) = parent_and_child(&pool, &chain);
        let (parent_slot, copy) = (parent.block_ids()[0], complete(&pool, &chain[..1]));
        let other = pool.get_mutable_blocks(1).unwrap();
        drop(parent);
        pool.get_mutable_blocks(1).unwrap_err();
        let copy = pool.register(copy, Duplicates::Allow).unwrap();
        let given = pool.get_mutable_blocks(1).unwrap();
        assert_eq!(given.block_ids(), [parent_slot], "{policy:?}");
        drop((given, other, copy, child));
    }
}

/// The copy of a block turns out to be bad: the block waits for its child again.
/// Mutation that makes it fail: `quarantine_registered` without `update_evictable`.
#[test]
fn a_block_waits_for_its_child_again_when_its_copy_is_quarantined() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        let (registry, pool) = pool_under(policy, 4);
        let chain = hashes(1, 2);
        let (parent, child) = parent_and_child(&pool, &chain);
        drop(parent);
        let copy = pool.register(complete(&pool, &chain[..1]), Duplicates::Allow).unwrap();
        registry.quarantine(Tier::G1, copy.block_ids()[0]);
        let other = pool.get_mutable_blocks(1).unwrap();
        pool.get_mutable_blocks(1).unwrap_err();
        assert_eq!(pool.match_sequence_hashes(GROUP, &chain).len(), 2, "{policy:?}");
        drop((other, copy, child));
    }
}

#[test]
fn an_allocation_error_says_what_would_free_blocks() {
    let (registry, pool) = pool(4);
    let cached = pool.register(complete(&pool, &hashes(1, 3)), Duplicates::Reuse).unwrap();
    let error = pool.get_mutable_blocks(2).unwrap_err();
    assert_eq!((error.tier, error.asked, error.free, error.inactive, error.in_use), (Tier::G1, 2, 1, 0, 3));
    assert!(error.to_string().contains("drop handles"), "{error}");
    let transfer = cached.erase().into_transfer();
    assert!(pool.get_mutable_blocks(2).unwrap_err().to_string().contains("wait for transfers"));
    drop(transfer);
    let held = pool.get_mutable_blocks(4).unwrap();
    assert!(pool.get_mutable_blocks(1).unwrap_err().to_string().contains("exclusive batches"));
    assert!(pool.get_mutable_blocks(5).unwrap_err().to_string().contains("fewer blocks"));
    drop(held);
    let error = registry.pool::<kvbm_pool::G3>().get_mutable_blocks(1).unwrap_err();
    assert!(error.to_string().contains("configure the tier"), "{error}");
}

/// More blocks than one hold of the lock evicts, and all or nothing.
#[test]
fn large_allocations_evict_in_parts() {
    let (registry, pool) = pool(5000);
    let chain: Vec<SequenceHash> = (0..4000_u32)
        .map(|index| {
            let mut bytes = [7; 16];
            bytes[..4].copy_from_slice(&index.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        })
        .collect();
    let cached = pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap();
    // Stale places pile up in the eviction order.
    for _ in 0..5 {
        registry.touch(GROUP, &chain);
    }
    drop(cached);
    let blocks = pool.get_mutable_blocks(4500).unwrap();
    assert_eq!(blocks.len(), 4500);
    assert_eq!(registry.peek_prefix(GROUP, &chain).len(), 500, "the head of the chain stays");
    drop(blocks);
    let keep = pool.match_sequence_hashes(GROUP, &chain[..400]);
    assert!(pool.get_mutable_blocks(4601).is_err());
    assert_eq!(registry.occupancy(Tier::G1).held, 0);
    assert_eq!(pool.get_mutable_blocks(4600).unwrap().len(), 4600);
    assert_eq!(keep.len(), 400);
}

/// A full pool of chains: the victim is always a leaf, whatever was used last.
#[test]
fn a_block_outlives_what_continues_it() {
    let (registry, pool) = pool(4);
    let chain = hashes(1, 4);
    drop(pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap());
    // Only the tail is used again: by recency alone the head would go first.
    registry.touch(GROUP, &chain[3..]);
    registry.touch(GROUP, &chain[2..3]);
    let mut held = Vec::new();
    for left in (0..4).rev() {
        let one = pool.get_mutable_blocks(1).unwrap();
        assert_eq!(registry.peek_prefix(GROUP, &chain).len(), left);
        held.push(one);
    }
}

#[test]
fn a_slot_of_a_block_that_came_back_elsewhere_is_known_for_what_it_is() {
    let config = RegistryConfig::new([64, 0, 0]);
    let registry = Registry::new(&config).unwrap();
    let pool: BlockPool<G1> = registry.pool();
    let chain = hashes(1, 3);
    let old = pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap();
    let prefix = registry.match_prefix(GROUP, &chain);
    assert_eq!((old.registered(), prefix.registered()), (vec![true; 3], vec![true; 3]));
    registry.remove_subtree(GROUP, chain[1], kvbm_pool::TierMask::ALL);
    assert_eq!(old.registered(), [true, false, false], "it is pinned, and gone");
    let again = pool.register(complete(&pool, &chain), Duplicates::Reuse).unwrap();
    assert_eq!(again.block_ids()[0], old.block_ids()[0], "that was there");
    assert_eq!(again.registered(), [true; 3]);
    assert_eq!((old.registered(), prefix.registered()), (vec![true, false, false], vec![true, false, false]));
    assert_eq!(registry.pool::<G1>().match_sequence_hashes(GROUP, &chain).block_ids(), again.block_ids());
}
