//! Races of real threads, and identities that contradict each other.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::world::{GROUP, World, hashes};
use kvbm_plan::{BlockId, GroupKind, NamespaceId, RecoveredBlock, SequenceHash, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockMetadata, BlockPool, Complete, Duplicates, G1, G2, GroupConfig, PolicyKind,
    RegisterError, Registry, RegistryConfig, TierMask, TierTag,
};
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Set to a number of rounds for a long run.
const ROUNDS: &str = "KVBM_RACE_ROUNDS";

fn rounds() -> u64 {
    std::env::var(ROUNDS).ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2000)
}

fn hash(number: u64) -> SequenceHash {
    SequenceHash::from_bytes(u128::from(number + 1).to_le_bytes())
}

/// The block after the others of a chain of these hashes.
fn last_of<T: TierTag>(pool: &BlockPool<T>, chain: &[u64]) -> BlockBatch<T, Complete> {
    let chain: Vec<_> = chain.iter().map(|&number| hash(number)).collect();
    let blocks = pool.get_mutable_blocks(1).unwrap();
    let partial = blocks.init_sequence(NamespaceId(0), GROUP, chain.len() as u32 - 1).unwrap();
    partial.commit(BlockChain::of_hashes(&chain)).unwrap().0
}

/// One thread evicts a block, another registers it at that moment: the last event is true.
#[test]
fn a_block_evicted_here_and_registered_there_ends_with_the_truth() {
    const OTHERS: u64 = 15;
    let world = World::new([OTHERS as u32 + 2, 0, 0], PolicyKind::LruLeaf);
    let (start, end) = (Barrier::new(2), Barrier::new(2));
    let again = Mutex::new(None);
    let (go, delay) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds() {
                start.wait();
                let block = again.lock().unwrap().take().unwrap();
                while go.load(Ordering::Acquire) < round {
                    spin_loop();
                }
                (0..delay.load(Ordering::Relaxed)).for_each(|_| spin_loop());
                let held = world.pool().register(block, Duplicates::Reuse).unwrap();
                end.wait();
                end.wait();
                drop(held);
            }
        });
        for round in 1..=rounds() {
            world.registry.clear(Tier::G1);
            for chain in 0..=OTHERS {
                drop(world.register(&hashes(chain, 1), 0, Duplicates::Reuse).unwrap());
            }
            *again.lock().unwrap() = world.complete::<G1>(&hashes(0, 1), 0);
            world.check_events();
            delay.store(round * 7 % 300, Ordering::Relaxed);
            start.wait();
            go.store(round, Ordering::Release);
            (0..round * 11 % 150).for_each(|_| spin_loop());
            let taken = world.pool().get_mutable_blocks(OTHERS as usize);
            end.wait();
            world.check_events();
            drop(taken);
            end.wait();
        }
    });
}

/// A block that names itself as its parent has no place in any chain.
#[test]
fn a_block_that_continues_itself_is_refused() {
    for kind in [GroupKind::State, GroupKind::Full] {
        let mut config = RegistryConfig::new([64, 64, 0]);
        config.groups = vec![GroupConfig { kind, tokens_per_block: 16 }];
        let registry = Registry::new(&config).unwrap();
        let refused =
            registry.pool::<G1>().register(last_of(&registry.pool::<G1>(), &[5, 5]), Duplicates::Reuse);
        let error = refused.map_err(|refused| refused.error).map(|_| ()).unwrap_err();
        assert!(matches!(error, RegisterError::BadIdentity { index: 0, .. }), "{error}");
        let block = last_of(&registry.pool::<G1>(), &[5, 5]);
        let recovered = RecoveredBlock { block: BlockId(3), identity: block.identities()[0] };
        let restored = registry.restore(Tier::G2, &[recovered], BlockMetadata::default()).unwrap();
        assert_eq!((restored.restored, restored.invalid), (0, 1));
        assert_eq!(registry.known_blocks(), 0);
    }
}

/// The same hash with one parent on one tier and with another parent on the next: the block counts
/// for one parent only.
#[test]
fn contradictory_parents_are_counted_once() {
    for between in 0..20 {
        let world = World::new([64, 64, 0], PolicyKind::LruLeaf);
        let (first, second) = (world.registry.pool::<G1>(), world.registry.pool::<G2>());
        let one = |chain: &[u64]| first.register(last_of(&first, chain), Duplicates::Reuse).unwrap();
        let mut held = vec![one(&[1]), one(&[1, 2])];
        held.extend((0..between).map(|number| one(&[100 + number])));
        held.push(one(&[1, 3]));
        held.extend((0..between).map(|number| one(&[200 + number])));
        held.push(one(&[50]));
        // Block 3 again, now behind block 50.
        drop(second.register(last_of(&second, &[50]), Duplicates::Reuse).unwrap());
        drop(second.register(last_of(&second, &[50, 3]), Duplicates::Reuse));
        drop(second.get_mutable_blocks(64).unwrap());
        drop(held);
        world.check_events();
        assert_eq!(first.get_mutable_blocks(64).unwrap().len(), 64, "nothing keeps a block");
        assert_eq!(world.registry.known_blocks(), 0);
        world.check();
    }
}

/// A request that cannot be met evicts nothing, also where it is pins that leave too little.
#[test]
fn hopeless_requests_evict_nothing() {
    let world = World::new([16, 0, 0], PolicyKind::LruLeaf);
    for chain in 0..16 {
        drop(world.register(&hashes(chain, 1), 0, Duplicates::Reuse).unwrap());
    }
    for chain in 0..8 {
        assert_eq!(world.registry.pin(GROUP, &hashes(chain, 1), TierMask::ALL, 10).unwrap(), 1);
    }
    let error = world.pool().get_mutable_blocks(9).unwrap_err();
    assert_eq!((error.inactive, error.pinned), (16, 8));
    assert_eq!(world.registry.occupancy(Tier::G1).inactive, 16);
    assert_eq!(world.pool().get_mutable_blocks(8).unwrap().len(), 8);
    world.check_events();
}

/// Chains of two threads meet in the blocks that they share: each block has one entry, and what is
/// held stays.
#[test]
fn threads_that_continue_the_same_blocks_make_one_of_each() {
    // The ring has room for the events of so many rounds.
    const PART: u64 = 2000;
    let world = World::new([96, 0, 0], PolicyKind::LruLeaf);
    for from in (0..rounds()).step_by(PART as usize) {
        let part = from..rounds().min(from + PART);
        continue_the_same_blocks(&world, &part);
        world.check();
    }
    let known = world.registry.known_blocks();
    assert_eq!(known, world.registry.snapshot(Tier::G1).0.len(), "no entry is left over");
}

fn continue_the_same_blocks(world: &World, rounds: &Range<u64>) {
    let shared = hashes(0, 8);
    let chain = |number: u64| [&shared[..], &hashes(number, 12)[8..]].concat();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let chain = &chain;
            scope.spawn(move || {
                for round in rounds.clone() {
                    // Half of the chains are those of the next thread as well.
                    let chain = chain(1 + u64::midpoint(round * 3, thread) % 40);
                    let known = world.registry.match_prefix(GROUP, &chain);
                    let from = known.len().min(chain.len() - 1);
                    let held = world.register(&chain, from, Duplicates::Reuse);
                    if let Some(held) = &held {
                        assert_eq!(held.len(), chain.len() - from);
                        assert_eq!(
                            world.present(&chain).len(),
                            chain.len(),
                            "what is held stays, and its parents"
                        );
                    }
                    drop(known);
                }
            });
        }
    });
}
