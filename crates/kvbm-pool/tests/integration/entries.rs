//! Entries that a batch makes, finds, links and gives up again: chains longer than what is looked
//! up at a time, batches that contradict themselves, no vacant entry, more entries.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::world::{GROUP, World};
use kvbm_plan::{
    BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, RecoveredBlock, SequenceHash, Tier,
};
use kvbm_pool::{
    BlockChain, BlockMetadata, BlockPool, Cached, Duplicates, G1, G2, GroupConfig, PolicyKind, Registry,
    RegistryConfig, Restored,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// Its blocks outlive their parents: a block whose parent is nowhere needs two entries.
const STATE: GroupId = GroupId(1);

fn registry(blocks: u32) -> Registry {
    let mut config = RegistryConfig::new([blocks, 0, 0]);
    config.groups = vec![GroupConfig::full(16), GroupConfig { kind: GroupKind::State, tokens_per_block: 16 }];
    Registry::new(&config).unwrap()
}

fn hash(number: u64) -> SequenceHash {
    SequenceHash::from_bytes(u128::from(number + 1).to_le_bytes())
}

/// Registers the blocks of a chain from the one at `from` on.
fn register(pool: &BlockPool<G1>, group: GroupId, chain: &[u64], from: usize) -> Cached<G1> {
    let chain: Vec<_> = chain.iter().map(|&number| hash(number)).collect();
    let blocks = pool.get_mutable_blocks(chain.len() - from).unwrap();
    let partial = blocks.init_sequence(NamespaceId(0), group, from as u32).unwrap();
    let complete = partial.commit(BlockChain::of_hashes(&chain)).unwrap().0;
    pool.register(complete, Duplicates::Reuse).unwrap()
}

/// Registers the last block of a chain.
fn last(pool: &BlockPool<G1>, chain: &[u64]) -> Cached<G1> {
    register(pool, GROUP, chain, chain.len() - 1)
}

/// Blocks of the other group, each without its parent.
fn orphans(pool: &BlockPool<G1>, numbers: Range<u64>) -> Vec<Cached<G1>> {
    numbers.map(|number| register(pool, STATE, &[1_000_000 + number, 2_000_000 + number], 1)).collect()
}

fn is_on_g1(registry: &Registry, number: u64) -> bool {
    !registry.tiers_of(GROUP, hash(number)).is_empty()
}

/// Nothing is left when all goes: no count is too high, or too low.
fn assert_all_goes(registry: &Registry, blocks: usize) {
    assert_eq!(
        registry.pool::<G1>().get_mutable_blocks(blocks).unwrap().len(),
        blocks,
        "nothing keeps a block"
    );
    assert_eq!(registry.known_blocks(), 0, "nothing keeps an entry");
}

/// A long chain behind a parent that has another child: the parent stays for it, and goes after
/// it.
#[test]
fn a_long_chain_goes_behind_a_parent_that_keeps_a_place() {
    for (between, blocks) in [(0, 31), (1, 32), (2, 33), (3, 64), (4, 65), (5, 100), (6, 100), (7, 100)] {
        let registry = registry(128);
        let pool = registry.pool();
        let mut others = vec![last(&pool, &[1]), last(&pool, &[1, 2])];
        others.extend((0..between).map(|number| last(&pool, &[100 + number])));
        let chain: Vec<u64> = std::iter::once(1).chain(1000..1000 + blocks).collect();
        let long = register(&pool, GROUP, &chain, 1);
        drop(others);
        // All that may go goes.
        drop(pool.get_mutable_blocks(128 - chain.len()).unwrap());
        assert!(pool.get_mutable_blocks(129 - chain.len()).is_err());
        assert!(
            chain.iter().all(|&number| is_on_g1(&registry, number)),
            "what is held stays, and its parents"
        );
        let found =
            registry.match_prefix(GROUP, &chain.iter().map(|&number| hash(number)).collect::<Vec<_>>());
        assert_eq!(found.len(), chain.len());
        drop((long, found));
        assert_all_goes(&registry, 128);
    }
}

/// A chain whose later part repeats a hash of its first part, which holds the place at the parent:
/// that place is given back once.
#[test]
fn a_place_is_taken_back_once() {
    for between in 0..20 {
        let world = World::new([128, 0, 0], PolicyKind::LruLeaf);
        let pool = world.pool();
        let mut held = vec![last(&pool, &[1]), last(&pool, &[1, 2])];
        held.extend((0..between).map(|number| last(&pool, &[100 + number])));
        // The same hash twice, in two parts of what is looked up at a time.
        let mut chain: Vec<u64> = std::iter::once(1).chain(1000..1040).collect();
        chain[40] = 1000;
        let long = register(&pool, GROUP, &chain, 1);
        assert!((1000..1039).all(|number| is_on_g1(&world.registry, number)));
        drop((long, held));
        world.check_events();
        assert_all_goes(&world.registry, 128);
        world.check();
    }
}

/// No vacant entry in the middle of a chain: it is entered again, with more entries.
#[test]
fn a_chain_for_which_entries_run_out_is_entered_again() {
    for orphaned in (520..680).step_by(4) {
        let registry = registry(1000);
        let pool = registry.pool();
        let mut held = vec![last(&pool, &[1]), last(&pool, &[1, 2])];
        held.extend(orphans(&pool, 0..orphaned));
        held.extend((0..60).map(|number| last(&pool, &[100 + number])));
        let chain: Vec<u64> = std::iter::once(1).chain(1000..1190).collect();
        held.push(register(&pool, GROUP, &chain, 1));
        assert_eq!(registry.known_blocks() as u64, 2 + 2 * orphaned + 60 + 190);
        assert!(chain.iter().all(|&number| is_on_g1(&registry, number)));
        drop(held);
        assert_all_goes(&registry, 1000);
    }
}

/// Entries run out in a batch that has found, or made, entries which nothing keeps yet: these are
/// its own, and stay.
#[test]
fn a_batch_keeps_the_entries_that_it_has_entered() {
    for orphaned in 0..40 {
        let registry = registry(64);
        let pool = registry.pool();
        let held = orphans(&pool, 0..orphaned);
        // The third is the first again, after one that it cannot follow.
        let cached = register(&pool, GROUP, &[1, 2, 1, 3], 0);
        let ids: Vec<BlockId> = cached.block_ids().to_vec();
        assert_eq!(ids[0], ids[2]);
        assert_eq!(
            ids.iter().collect::<BTreeSet<_>>().len(),
            3,
            "blocks of different hashes in one slot: {ids:?}"
        );
        let (snapshot, _) = registry.snapshot(Tier::G1);
        for (number, id) in [(1, ids[0]), (2, ids[1]), (3, ids[3])] {
            let there: Vec<BlockId> = snapshot
                .iter()
                .filter(|(_, identity)| identity.group == GROUP && identity.hash == hash(number))
                .map(|&(id, _)| id)
                .collect();
            assert_eq!(there, [id], "block {number}");
            assert!(is_on_g1(&registry, number), "block {number} is found");
        }
        drop((cached, held));
        assert_all_goes(&registry, 64);
    }
}

/// The same hash twice in one chain, in one part of what is looked up at a time and in two: that is
/// one block, with two users.
#[test]
fn a_hash_that_comes_twice_in_a_chain_is_one_block() {
    let kinds = [PolicyKind::LruLeaf, PolicyKind::Hazard];
    for (kind, from) in kinds.into_iter().flat_map(|kind| [(kind, 0), (kind, 1)]) {
        for (first, second) in [(1, 3), (1, 31), (1, 40), (30, 33), (34, 39), (34, 70), (66, 68)] {
            let world = World::new([128, 0, 0], kind);
            let pool = world.pool();
            let parent = last(&pool, &[1]);
            let mut chain: Vec<u64> = std::iter::once(1).chain(1000..1079).collect();
            chain[second] = chain[first];
            let cached = register(&pool, GROUP, &chain, from);
            let ids: Vec<BlockId> = cached.block_ids().to_vec();
            assert_eq!(ids[first - from], ids[second - from], "{first} and {second} of {kind:?}");
            let different = ids.iter().collect::<BTreeSet<_>>().len();
            assert_eq!(different, ids.len() - 1, "blocks of different hashes in one slot");
            assert_eq!(world.registry.known_blocks(), 79);
            drop((cached, parent));
            world.check_events();
            assert_all_goes(&world.registry, 128);
            world.check();
        }
    }
}

/// A block that came without its parent, for the batch contradicted itself, is counted by the
/// parent that it is said to have afterwards, on every tier where it is.
#[test]
fn a_block_that_is_there_without_a_parent_gets_the_one_of_its_chain() {
    let registry = registry(64);
    let pool = registry.pool();
    let alone = register(&pool, GROUP, &[1, 2, 1, 3], 0);
    // It is said to be the third of a chain and was the fourth: that is no parent either.
    let elsewhere = register(&pool, GROUP, &[20, 21, 3], 0);
    drop(elsewhere);
    drop(pool.get_mutable_blocks(61).unwrap());
    assert!(![20, 21].into_iter().any(|number| is_on_g1(&registry, number)), "nothing continues them");
    let again = register(&pool, GROUP, &[10, 11, 12, 3], 0);
    let held = last(&pool, &[10, 11, 12, 3]);
    let (snapshot, _) = registry.snapshot(Tier::G1);
    let third = snapshot.iter().find(|(_, identity)| identity.hash == hash(3)).unwrap();
    assert_eq!(third.1.parent, Some(hash(12)));
    drop((alone, again));
    // All that may go goes: what block 3 continues stays for it.
    drop(pool.get_mutable_blocks(60).unwrap());
    assert!(pool.get_mutable_blocks(61).is_err());
    assert!([10, 11, 12, 3].into_iter().all(|number| is_on_g1(&registry, number)));
    drop(held);
    // It goes by what has counted it: 12 stays for the other that continues it.
    let next = last(&pool, &[10, 11, 12, 4]);
    drop(pool.get_mutable_blocks(60).unwrap());
    assert!(!is_on_g1(&registry, 3));
    assert!([10, 11, 12, 4].into_iter().all(|number| is_on_g1(&registry, number)));
    drop(next);
    assert_all_goes(&registry, 64);
}

/// Identities of blocks of the other group, each behind a parent that is nowhere.
fn orphan_identities(numbers: Range<u64>) -> Vec<BlockIdentity> {
    let identity = |number: u64| BlockIdentity {
        namespace: NamespaceId(0),
        group: STATE,
        hash: hash(4_000_000 + number),
        parent: Some(hash(3_000_000 + number)),
        position: 1,
    };
    numbers.map(identity).collect()
}

/// G1 is full of blocks whose parents are nowhere: as many entries are in use as there are slots on
/// both tiers.
fn registry_without_vacant_entries() -> (Registry, Vec<Cached<G1>>) {
    let mut config = RegistryConfig::new([600, 600, 0]);
    config.groups = vec![GroupConfig::full(16), GroupConfig { kind: GroupKind::State, tokens_per_block: 16 }];
    let registry = Registry::new(&config).unwrap();
    let held = orphans(&registry.pool(), 0..600);
    (registry, held)
}

/// What is on G2 is what `identities` say, each in a slot of its own; and nothing is left when all
/// goes.
fn assert_is_on_g2(registry: &Registry, identities: &[BlockIdentity]) {
    let (snapshot, _) = registry.snapshot(Tier::G2);
    let slots: BTreeSet<BlockId> = snapshot.iter().map(|&(block, _)| block).collect();
    assert_eq!((slots.len(), snapshot.len()), (identities.len(), identities.len()));
    let there: BTreeSet<_> = snapshot.iter().map(|(_, identity)| (identity.hash, identity.parent)).collect();
    assert_eq!(there, identities.iter().map(|identity| (identity.hash, identity.parent)).collect());
    assert_eq!(registry.known_blocks(), 2 * (600 + identities.len()));
}

#[test]
fn arrivals_for_which_entries_run_out_get_more() {
    let (registry, held) = registry_without_vacant_entries();
    let identities = orphan_identities(0..600);
    let mut begun = Vec::new();
    for part in identities.chunks(7) {
        let mut arrivals = registry.begin_arrivals(Tier::G2, part).unwrap();
        assert_eq!(arrivals.reserved().count(), part.len());
        arrivals.complete_all();
        begun.push(arrivals);
    }
    assert_is_on_g2(&registry, &identities);
    drop((begun, held));
    drop(registry.pool::<G2>().get_mutable_blocks(600).unwrap());
    assert_all_goes(&registry, 600);
}

#[test]
fn restored_blocks_for_which_entries_run_out_get_more() {
    let (registry, held) = registry_without_vacant_entries();
    let identities = orphan_identities(0..600);
    let numbered = identities.iter().zip(0..);
    let recovered: Vec<_> =
        numbered.map(|(&identity, slot)| RecoveredBlock { block: BlockId(slot), identity }).collect();
    let restored = registry.restore(Tier::G2, &recovered, BlockMetadata::default()).unwrap();
    assert_eq!(restored, Restored { restored: 600, ..Restored::default() });
    assert_is_on_g2(&registry, &identities);
    drop(held);
    drop(registry.pool::<G2>().get_mutable_blocks(600).unwrap());
    assert_all_goes(&registry, 600);
}

/// The array of entries grows while other threads register and look up: everybody finds what is
/// there.
#[test]
fn entries_grow_under_threads_that_use_them() {
    let registry = registry(2048);
    let pool = registry.pool();
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (registry, pool) = (&registry, &pool);
            scope.spawn(move || {
                for round in 0..300 {
                    let chain: Vec<u64> = (0..40).map(|at| (thread * 300 + round) * 100 + at).collect();
                    let held = register(pool, GROUP, &chain, 0);
                    let chain: Vec<_> = chain.into_iter().map(hash).collect();
                    assert_eq!(registry.match_prefix(GROUP, &chain).len(), 40);
                    drop(held);
                }
            });
        }
        // Twice as many entries as blocks.
        let held = orphans(&pool, 0..1900);
        assert_eq!(held.len(), 1900);
        for number in 0..1900 {
            assert!(!registry.tiers_of(STATE, hash(2_000_000 + number)).is_empty());
        }
    });
    assert_all_goes(&registry, 2048);
}
