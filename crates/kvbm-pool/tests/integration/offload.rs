//! Which blocks are offered for offload, when, and in which order.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockChain, BlockPool, BlockSelection, Cached, Duplicates, G1, GroupConfig, PolicyKind, Registry,
    RegistryConfig, TierMask,
};

const GROUP: GroupId = GroupId(0);

fn hashes(chain: u32, count: u32) -> Vec<SequenceHash> {
    (0..count)
        .map(|index| SequenceHash::from_bytes((u128::from(chain) << 64 | u128::from(index)).to_le_bytes()))
        .collect()
}

fn hold(pool: &BlockPool<G1>, group: GroupId, chain: &[SequenceHash]) -> Cached<G1> {
    let partial =
        pool.get_mutable_blocks(chain.len()).unwrap().init_sequence(NamespaceId(0), group, 0).unwrap();
    let (complete, _) = partial.commit(BlockChain::of_hashes(chain)).unwrap();
    pool.register(complete, Duplicates::Reuse).unwrap()
}

fn register(pool: &BlockPool<G1>, group: GroupId, chain: &[SequenceHash]) {
    drop(hold(pool, group, chain));
}

/// Registers what `chain` has behind `root`, which is there.
fn register_behind(pool: &BlockPool<G1>, root: &[SequenceHash], chain: &[SequenceHash]) {
    let known = pool.match_sequence_hashes(GROUP, root);
    let more = chain.len() - root.len();
    let partial = pool.get_mutable_blocks(more).unwrap();
    let partial = partial.init_sequence(NamespaceId(0), GROUP, root.len() as u32).unwrap();
    drop(pool.register(partial.commit(BlockChain::of_hashes(chain)).unwrap().0, Duplicates::Reuse).unwrap());
    drop(known);
}

fn chosen(registry: &Registry, n: usize, min_idle: u64) -> Vec<SequenceHash> {
    let blocks = registry.coldest(Tier::G1, n, Tier::G2, min_idle);
    blocks.identities().iter().map(|identity| identity.hash).collect()
}

#[test]
fn parents_come_first_and_what_is_copied_does_not_come() {
    let registry = Registry::new(&RegistryConfig::new([20, 20, 0])).unwrap();
    let pool = registry.pool::<G1>();
    let (old, young) = (hashes(1, 4), hashes(2, 3));
    register(&pool, GROUP, &old);
    register(&pool, GROUP, &young);
    // The oldest leaf needs its ancestors, so they come, topmost first.
    assert_eq!(chosen(&registry, 2, 0), old[..2]);
    let all = chosen(&registry, 20, 0);
    assert_eq!(all.len(), 7);
    for chain in [&old, &young] {
        let places = chain.iter().map(|hash| all.iter().position(|other| other == hash).unwrap());
        assert!(places.clone().zip(places.skip(1)).all(|(parent, child)| parent < child));
    }

    let identities: Vec<BlockIdentity> = BlockIdentity::chain(NamespaceId(0), GROUP, &old[..3]).collect();
    let mut arrivals = registry.begin_arrivals(Tier::G2, &identities).unwrap();
    arrivals.complete(0);
    let held = pool.match_sequence_hashes(GROUP, &old);
    assert_eq!(held.prefix_on(Tier::G2), 1, "what is on its way does not count");
    assert_eq!([Tier::G1, Tier::G3, Tier::G4].map(|tier| held.prefix_on(tier)), [4, 0, 0]);
    drop(held);
    let mut rest = chosen(&registry, 20, 0);
    rest.sort();
    let mut expected: Vec<SequenceHash> = old[3..].iter().chain(&young).copied().collect();
    expected.sort();
    assert_eq!(rest, expected, "neither what is there nor what is on its way");
    let status = registry.occupancy(Tier::G1);
    assert_eq!((status.copied_lower, status.copying_lower, status.not_copied_lower), (1, 2, 6));
    assert!((status.occupancy() - 0.3).abs() < 1e-9);
}

#[test]
fn only_blocks_that_were_idle_long_enough() {
    let registry = Registry::new(&RegistryConfig::new([20, 20, 0])).unwrap();
    let pool = registry.pool::<G1>();
    register(&pool, GROUP, &hashes(1, 2));
    for _ in 0..10 {
        registry.step();
    }
    register(&pool, GROUP, &hashes(2, 2));
    assert_eq!(chosen(&registry, 20, 10), hashes(1, 2));
    assert!(chosen(&registry, 20, 11).is_empty());
    registry.touch(GROUP, &hashes(1, 2));
    assert!(chosen(&registry, 20, 1).is_empty());
    assert_eq!(registry.step(), 11);
    assert_eq!(chosen(&registry, 20, 1).len(), 4);
}

/// What was in use when the search came by is found by the next search.
#[test]
fn repeated_calls_miss_nothing() {
    let registry = Registry::new(&RegistryConfig::new([12, 12, 0])).unwrap();
    let pool = registry.pool::<G1>();
    for chain in 0..4 {
        register(&pool, GROUP, &hashes(chain, 3));
    }
    let busy = pool.match_sequence_hashes(GROUP, &hashes(0, 3)).erase().into_transfer();
    assert_eq!(chosen(&registry, 5, 0).len(), 5);
    drop(busy);
    for _ in 0..5 {
        assert_eq!(chosen(&registry, 12, 0).len(), 12);
        assert_eq!(chosen(&registry, 5, 0).len(), 5);
    }
}

/// Only the part of the order that is evicted next, each place once until its block is used again.
#[test]
fn victims_are_offered_once_before_they_go() {
    let registry = Registry::new(&RegistryConfig::new([20, 20, 0])).unwrap();
    let pool = registry.pool::<G1>();
    for chain in 0..10 {
        register(&pool, GROUP, &hashes(chain, 2));
    }
    let next = |share| {
        let blocks = registry.uncopied_victims(Tier::G1, share, 20, Tier::G2);
        blocks.identities().iter().map(|identity| identity.hash).collect::<Vec<_>>()
    };
    let first = registry.uncopied_victims(Tier::G1, 0.3, 1, Tier::G2);
    assert_eq!(first.identities()[0].hash, hashes(0, 1)[0], "room for one: the parent");
    drop(first);
    let oldest: Vec<SequenceHash> = (0..3).flat_map(|chain| hashes(chain, 2)).collect();
    assert_eq!(next(0.3), oldest);
    assert!(next(0.3).is_empty());
    assert_eq!(next(0.4), hashes(3, 2));
    registry.touch(GROUP, &hashes(0, 2));
    assert_eq!(next(1.0).len(), 14, "the twelve that were not looked at, and two that were used");
    assert!(registry.uncopied_victims(Tier::G3, 1.0, 20, Tier::G2).is_empty());
}

/// Being copied is no use: the blocks leave in the order in which they would have left.
#[test]
fn offload_does_not_make_blocks_young() {
    let registry = Registry::new(&RegistryConfig::new([6, 6, 0])).unwrap();
    let pool = registry.pool::<G1>();
    register(&pool, GROUP, &hashes(1, 3));
    register(&pool, GROUP, &hashes(2, 3));
    let copied = registry.coldest(Tier::G1, 3, Tier::G2, 0);
    let held = pool.get_mutable_blocks(1).unwrap();
    assert!(registry.tiers_of(GROUP, hashes(2, 3)[2]).is_empty(), "what is being copied is not evicted");
    drop(copied);
    let more = pool.get_mutable_blocks(3).unwrap();
    assert!(registry.peek_prefix(GROUP, &hashes(1, 3)).is_empty());
    assert_eq!(registry.peek_prefix(GROUP, &hashes(2, 3)).len(), 2);
    drop((held, more));
}

#[test]
fn window_and_state_groups_match_by_their_own_rules() {
    let groups = vec![
        GroupConfig { kind: GroupKind::SlidingWindow(33), tokens_per_block: 16 },
        GroupConfig { kind: GroupKind::State, tokens_per_block: 16 },
    ];
    let config = RegistryConfig { groups, ..RegistryConfig::new([20, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    let pool = registry.pool::<G1>();
    let chain = hashes(1, 8);
    let (window, state) = (GroupId(0), GroupId(1));
    register(&pool, window, &chain);
    register(&pool, state, &chain);
    registry.remove_subtree(window, chain[7], TierMask::ALL);
    registry.quarantine(Tier::G1, pool.match_sequence_hashes(window, &chain[..3]).block_ids()[2]);
    // 33 tokens are three blocks: 4, 5 and 6 are there; block 2 is gone and not needed.
    let prefix = registry.match_prefix(window, &chain);
    assert_eq!((prefix.len(), prefix.start(), prefix.blocks().len()), (7, 4, 3));
    assert_eq!(prefix.hashes(), &chain[4..7]);
    assert_eq!(prefix.identity(0).map(|identity| identity.position), Some(4));
    // Of five blocks 2, 3 and 4 would be needed; what is left is a prefix of two.
    let short = registry.match_prefix(window, &chain[..5]);
    assert_eq!((short.len(), short.start()), (2, 0));
    let last = registry.match_prefix(state, &chain);
    assert_eq!((last.len(), last.start(), last.blocks().len()), (8, 7, 1));
}

/// What is pinned when its place comes up is offered all the same: it would not be found again.
#[test]
fn victims_that_are_in_use_are_offered_too() {
    let registry = Registry::new(&RegistryConfig::new([20, 20, 0])).unwrap();
    let pool = registry.pool::<G1>();
    register(&pool, GROUP, &hashes(1, 4));
    let held = pool.match_sequence_hashes(GROUP, &hashes(1, 4)).erase().into_transfer();
    assert_eq!(registry.uncopied_victims(Tier::G1, 1.0, 20, Tier::G2).len(), 4);
    drop(held);
}

/// All of the order was looked at and is gone, and the first to come back is what was passed over:
/// what comes then is offered as before.
#[test]
fn victims_are_offered_after_the_order_was_empty() {
    let registry = Registry::new(&RegistryConfig::new([40, 40, 0])).unwrap();
    let pool = registry.pool::<G1>();
    let offered = || registry.uncopied_victims(Tier::G1, 1.0, 40, Tier::G2).len();
    let chain = hashes(1, 2);
    let mut parent = hold(&pool, GROUP, &chain);
    let last = parent.split_off(1);
    drop(parent);
    for number in 2..40 {
        register(&pool, GROUP, &hashes(number, 1));
    }
    assert_eq!(offered(), 39, "all but the one in use");
    assert!(pool.get_mutable_blocks(39).is_err(), "the parent stays for the one in use");
    registry.remove(BlockSelection::Subtree { group: GROUP, hash: chain[1] }, TierMask::ALL);
    assert_eq!(registry.occupancy(Tier::G1).inactive, 1, "only the parent is left, and may go now");
    drop(last);
    offered();
    for number in 40..60 {
        register(&pool, GROUP, &hashes(number, 1));
    }
    assert_eq!(offered(), 20);
}

/// A policy that does not go by the order may take the youngest block next.
#[test]
fn under_a_policy_of_its_own_mind_every_block_is_a_victim() {
    for (policy, expected) in [(PolicyKind::LruLeaf, 4), (PolicyKind::Hazard, 20)] {
        let registry = Registry::new(&RegistryConfig { policy, ..RegistryConfig::new([20, 20, 0]) }).unwrap();
        let pool = registry.pool::<G1>();
        for chain in 0..10 {
            register(&pool, GROUP, &hashes(chain, 2));
        }
        assert!(registry.uncopied_victims(Tier::G1, 0.0, 20, Tier::G2).is_empty(), "{policy:?}: 0 is none");
        assert_eq!(registry.uncopied_victims(Tier::G1, 0.2, 20, Tier::G2).len(), expected, "{policy:?}");
    }
}

/// A chain whose first block is on neither tier cannot go down, however long it is; what else is
/// there goes, and no block twice.
#[test]
fn a_long_backlog_goes_in_order_and_what_lacks_an_ancestor_stays() {
    let config = RegistryConfig::new([2000, 2000, 0]);
    let registry = Registry::new(&config).unwrap();
    let pool = registry.pool::<G1>();
    let (broken, whole, root) = (hashes(1, 700), hashes(2, 700), hashes(3, 20));
    register(&pool, GROUP, &broken);
    register(&pool, GROUP, &whole);
    register(&pool, GROUP, &root);
    // Ends of a shared beginning, eight of them.
    let ends: Vec<_> = (4..12).map(|end| [root.clone(), hashes(end, 20)].concat()).collect();
    for end in &ends {
        register_behind(&pool, &root, end);
    }
    let first = pool.match_sequence_hashes(GROUP, &broken[..1]);
    registry.quarantine(Tier::G1, first.block_ids()[0]);
    drop(first);

    let mut chosen: Vec<SequenceHash> = Vec::new();
    let mut batches = Vec::new();
    for share in [0.5, 1.0, 1.0] {
        let blocks = registry.uncopied_victims(Tier::G1, share, 600, Tier::G2);
        assert!(blocks.len() <= 600);
        let identities = blocks.identities();
        chosen.extend(identities.iter().map(|identity| identity.hash));
        // On its way, so that it is not chosen again.
        let arrivals = registry.begin_arrivals(Tier::G2, &identities).unwrap();
        assert_eq!(arrivals.reserved().count(), blocks.len(), "parents come before their children");
        batches.push((arrivals, blocks));
    }
    let distinct: std::collections::HashSet<_> = chosen.iter().collect();
    assert_eq!(distinct.len(), chosen.len(), "no block twice");
    assert_eq!(chosen.len(), 700 + 20 + 8 * 20, "all but those that lack an ancestor");
    assert!(!broken.iter().any(|hash| distinct.contains(hash)));
    assert!(registry.coldest(Tier::G1, 2000, Tier::G2, 0).is_empty());
}

/// One call looks at a few thousand places, and the next goes on from there.
#[test]
fn calls_after_each_other_reach_every_block() {
    const BLOCKS: u32 = 70_000;
    let registry = Registry::new(&RegistryConfig::new([BLOCKS, 1, 0])).unwrap();
    let pool = registry.pool::<G1>();
    for number in 0..BLOCKS / 100 {
        register(&pool, GROUP, &hashes(number, 100));
    }
    // What was found stays pinned: it is not found twice.
    let mut found = Vec::new();
    for _ in 0..60 {
        found.push(registry.coldest(Tier::G1, BLOCKS as usize, Tier::G2, 0));
    }
    assert_eq!(found.iter().map(kvbm_pool::Pinned::len).sum::<usize>(), BLOCKS as usize);
}
