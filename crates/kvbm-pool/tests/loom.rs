//! The lock and handle protocols under every order of events that threads can make (`--cfg kvbm_loom`).
//!
//! In each model a few threads do one thing each; whatever the order, the last event of a block tells the truth and no
//! slot is lost.
#![cfg(kvbm_loom)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "threads/world.rs"]
mod world;

use kvbm_plan::{BlockId, RecoveredBlock, Tier};
use kvbm_pool::{
    BlockMetadata, Completion, Duplicates, EventKind, EventRecord, G1, G2, Lost, PolicyKind, RegisterError,
    TierMask,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use world::{GROUP, World, hashes};

/// Runs `model` in every order of its threads in which these are interrupted no more than a few times.
fn every_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(4));
    builder.check(model);
}

/// Policies and numbers of shards.
const SETUPS: [(PolicyKind, u32); 4] =
    [(PolicyKind::LruLeaf, 1), (PolicyKind::Hazard, 1), (PolicyKind::LruLeaf, 2), (PolicyKind::Hazard, 2)];

const G1_LOST: RegisterError = RegisterError::Lost(Lost { tier: Tier::G1 });

#[test]
fn the_last_drop_races_eviction() {
    for (policy, shards) in SETUPS {
        every_order(move || {
            let world = World::sharded([2, 0, 0], policy, shards);
            let held = world.register(&hashes(1, 2), 0, Duplicates::Reuse).unwrap();
            let other = world.clone();
            let evicting =
                thread::spawn(move || other.pool().get_mutable_blocks(2).map(|blocks| blocks.len()));
            drop(held);
            // All or nothing: the blocks were in use, or both are gone.
            if let Ok(count) = evicting.join().unwrap() {
                assert_eq!(count, 2);
                assert!(world.present(&hashes(1, 2)).is_empty());
            }
            world.check();
        });
    }
}

#[test]
fn two_threads_register_the_same_blocks() {
    for (duplicates, shards) in [(Duplicates::Reuse, 1), (Duplicates::Allow, 1), (Duplicates::Reuse, 2)] {
        every_order(move || {
            let world = World::sharded([4, 0, 0], PolicyKind::LruLeaf, shards);
            let other = world.clone();
            let register = move |world: &World| world.register(&hashes(1, 2), 0, duplicates).unwrap();
            let there = thread::spawn(move || drop(register(&other)));
            let here = register(&world);
            there.join().unwrap();
            assert_eq!(world.present(&hashes(1, 2)).len(), 2, "what one thread holds stays");
            drop(here);
            world.check();
            let (blocks, _) = world.registry.snapshot(Tier::G1);
            assert_eq!(blocks.len(), 2, "one block for each hash");
            assert_eq!(world.registry.occupancy(Tier::G1).free, 2, "no duplicate is left over");
        });
    }
}

#[test]
fn registration_races_the_last_drop_and_eviction() {
    every_order(|| {
        let world = World::new([2, 0, 0], PolicyKind::LruLeaf);
        let held = world.register(&hashes(1, 1), 0, Duplicates::Reuse).unwrap();
        let (registering, evicting) = (world.clone(), world.clone());
        let registering =
            thread::spawn(move || drop(registering.register(&hashes(1, 1), 0, Duplicates::Reuse)));
        let evicting = thread::spawn(move || drop(evicting.pool().get_mutable_blocks(2)));
        drop(held);
        registering.join().unwrap();
        evicting.join().unwrap();
        world.check();
    });
}

#[test]
fn what_was_matched_stays_while_it_is_held() {
    every_order(|| {
        let world = World::new([2, 0, 0], PolicyKind::LruLeaf);
        drop(world.register(&hashes(1, 2), 0, Duplicates::Reuse));
        let other = world.clone();
        let evicting = thread::spawn(move || drop(other.register(&hashes(2, 2), 0, Duplicates::Reuse)));
        let mut matched = world.registry.match_prefix(GROUP, &hashes(1, 2));
        let found = matched.len();
        assert_eq!(world.present(&hashes(1, 2)).len().min(found), found, "held blocks are not evicted");
        drop(matched.split_off(found / 2));
        assert!(world.present(&hashes(1, 2)).len() >= found / 2);
        drop(matched);
        evicting.join().unwrap();
        world.check();
    });
}

#[test]
fn clones_of_a_batch_end_on_different_threads() {
    every_order(|| {
        let world = World::new([2, 0, 0], PolicyKind::Hazard);
        let mut held = world.register(&hashes(1, 2), 0, Duplicates::Reuse).unwrap();
        let copy = held.clone();
        let tail = held.split_off(1);
        let ends = thread::spawn(move || drop(copy));
        drop(held);
        drop(tail);
        ends.join().unwrap();
        world.check();
        assert_eq!(world.registry.occupancy(Tier::G1).inactive, 2);
    });
}

#[test]
fn an_arrival_completes_while_its_block_is_removed_or_registered() {
    for removed in [true, false] {
        every_order(move || {
            let world = World::new([0, 3, 0], PolicyKind::LruLeaf);
            let identities = world::identities(&hashes(1, 1));
            let mut arrivals = world.registry.pool::<G2>().begin_arrivals(&identities).unwrap();
            let other = world.clone();
            let meanwhile = thread::spawn(move || {
                if removed {
                    other.registry.remove_subtree(GROUP, hashes(1, 1)[0], TierMask::ALL);
                } else {
                    drop(other.register_on::<G2>(&hashes(1, 1), 0, Duplicates::Reuse));
                }
            });
            let completion = arrivals.complete(0);
            let seen = world.registry.tiers_of(GROUP, hashes(1, 1)[0]);
            if !removed {
                assert_ne!(completion, Completion::Removed);
                assert!(seen.contains(Tier::G2), "complete and nobody removes it");
            }
            drop(arrivals);
            meanwhile.join().unwrap();
            assert_eq!(world.registry.tiers_of(GROUP, hashes(1, 1)[0]).is_empty(), removed);
            world.check();
        });
    }
}

#[test]
fn pools_let_go_of_unfinished_batches_on_any_thread() {
    every_order(|| {
        let world = World::new([3, 0, 0], PolicyKind::LruLeaf);
        let mut blocks = world.registry.pool::<G1>().get_mutable_blocks(3).unwrap();
        let rest = blocks.split_off(1);
        let other = world.clone();
        let there = thread::spawn(move || {
            drop(rest);
            drop(other.pool().get_mutable_blocks(3));
        });
        drop(blocks);
        drop(world.pool().get_mutable_blocks(3));
        there.join().unwrap();
        assert_eq!(world.registry.occupancy(Tier::G1).free, 3, "all or nothing, and nothing is kept");
        world.check();
    });
}

/// Two chains with the same first block, and a registry of two shards in which the ends of the two are in different ones.
struct Fork {
    world: World,
    left: Vec<kvbm_pool::SequenceHash>,
    right: Vec<kvbm_pool::SequenceHash>,
}

impl Fork {
    fn new(capacity: u32) -> Self {
        let left = hashes(1, 2);
        let right = vec![left[0], hashes(2, 2)[1]];
        Self { world: World::sharded([capacity, 0, 0], PolicyKind::LruLeaf, 2), left, right }
    }

    fn register_right(world: &World, right: &[kvbm_pool::SequenceHash]) {
        let Some(held) = world.register(right, 1, Duplicates::Reuse) else { return };
        assert_eq!(world.present(right).len(), 2, "a block in use keeps its parent, wherever that is");
        drop(held);
    }
}

#[test]
fn a_child_comes_to_another_shard_while_its_parent_goes() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new(3);
        drop(world.register(&left, 0, Duplicates::Reuse));
        let other = world.clone();
        let registering = thread::spawn(move || Fork::register_right(&other, &right));
        drop(world.pool().get_mutable_blocks(2));
        registering.join().unwrap();
        world.check();
    });
}

#[test]
fn a_child_in_another_shard_goes_while_its_parent_goes() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new(3);
        drop(world.register(&left, 0, Duplicates::Reuse));
        Fork::register_right(&world, &right);
        let other = world.clone();
        let evicting = thread::spawn(move || other.pool().get_mutable_blocks(1).map(|blocks| blocks.len()));
        let here = world.pool().get_mutable_blocks(2).map(|blocks| blocks.len());
        assert_eq!((evicting.join().unwrap().unwrap(), here.unwrap()), (1, 2), "there is room for both");
        world.check();
        assert_eq!(world.pool().get_mutable_blocks(3).unwrap().len(), 3, "nothing keeps a block");
    });
}

#[test]
fn a_user_lets_go_in_one_shard_while_a_child_is_registered_from_another() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new(3);
        let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
        let other = world.clone();
        let registering = thread::spawn(move || Fork::register_right(&other, &right));
        drop(held);
        registering.join().unwrap();
        world.check();
    });
}

#[test]
fn two_threads_continue_the_same_parent_with_the_same_block() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new(4);
        let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
        let (other, again) = (world.clone(), right.clone());
        let registering = thread::spawn(move || Fork::register_right(&other, &again));
        Fork::register_right(&world, &right);
        registering.join().unwrap();
        drop(held);
        let (blocks, _) = world.registry.snapshot(Tier::G1);
        assert_eq!(blocks.len(), 3, "one entry for each block");
        assert_eq!(world.registry.known_blocks(), 3);
        world.check();
    });
}

/// The block goes in one shard and comes in the other: its key is free only when its Remove has a number.
#[test]
fn a_block_is_evicted_in_one_shard_and_registered_in_another() {
    every_order(|| {
        let world = World::sharded([2, 0, 0], PolicyKind::LruLeaf, 2);
        let chain = hashes(1, 1);
        drop(world.register(&chain, 0, Duplicates::Reuse));
        let again = world.complete::<G1>(&chain, 0).unwrap();
        let other = world.clone();
        let evicting = thread::spawn(move || drop(other.pool().get_mutable_blocks(1)));
        let held = world.pool().register(again, Duplicates::Reuse).unwrap();
        evicting.join().unwrap();
        assert_eq!(world.present(&chain).len(), 1, "somebody holds it");
        world.check_events();
        drop(held);
        world.check();
    });
}

/// The numbers of the events of a kind that are about a block.
fn numbers(events: &[EventRecord], kind: EventKind, hash: kvbm_pool::SequenceHash) -> Vec<u64> {
    let is = |event: &&EventRecord| event.kind == kind && event.identity.hash == hash;
    events.iter().filter(is).map(|event| event.seq).collect()
}

/// What removes a parent locks all shards: a child that comes to another shard sees it, and does not come after it; nor
/// before its parent, where that comes again at the same moment.
#[test]
fn a_child_does_not_come_to_another_shard_after_its_parent_was_removed() {
    for again in [false, true] {
        every_order(move || {
            let Fork { world, left, right } = Fork::new(4);
            let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
            let child = world.complete::<G1>(&right, 1).unwrap();
            let parent = again.then(|| world.complete::<G1>(&left[..1], 0).unwrap());
            world.check_events();
            let (other, root) = (world.clone(), left[0]);
            let removing = thread::spawn(move || {
                other.registry.remove_subtree(GROUP, root, TierMask::ALL);
                parent.map(|parent| other.pool().register(parent, Duplicates::Reuse).unwrap())
            });
            let registered = world.pool().register(child, Duplicates::Reuse);
            let parent = removing.join().unwrap();
            let events = world.events();
            let stored = numbers(&events, EventKind::Store, right[1]);
            assert_eq!(stored.len(), usize::from(registered.is_ok()));
            // The parent was there when it began, went once, and came again or did not.
            let gone = numbers(&events, EventKind::Remove, root)[0];
            let back = numbers(&events, EventKind::Store, root).first().copied().unwrap_or(u64::MAX);
            assert!(stored.iter().all(|&stored| stored < gone || back < stored), "{events:?}");
            drop((held, registered, parent));
        });
    }
}

/// What comes behind a block whose subtree is removed goes with it, or does not come: a block leaves only when nothing continues it.
#[test]
fn a_child_comes_while_the_subtree_of_its_parent_is_removed() {
    for elsewhere in [true, false] {
        every_order(move || {
            let Fork { world, left, right } = Fork::new(4);
            let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
            let chain = if elsewhere { right } else { [&left[..], &hashes(3, 3)[2..]].concat() };
            let child = world.complete::<G1>(&chain, chain.len() - 1).unwrap();
            let (other, root) = (world.clone(), left[0]);
            let removing =
                thread::spawn(move || other.registry.remove_subtree(GROUP, root, TierMask::ALL).blocks);
            let registered = world.pool().register(child, Duplicates::Reuse);
            assert_eq!(removing.join().unwrap(), if registered.is_ok() { 3 } else { 2 });
            // Events say that each went before the block that it continues.
            world.check_events();
            assert!(world.present(&chain).is_empty() && world.present(&left).is_empty());
            drop((held, registered));
            world.all_may_go();
        });
    }
}

/// Whatever comes first, nothing is there afterwards that was allocated before the loss; and what is told of it is true.
#[test]
fn a_registration_races_a_loss() {
    for (policy, shards) in SETUPS {
        every_order(move || {
            let world = World::sharded([4, 0, 0], policy, shards);
            let chain = hashes(1, 2);
            let before = world.complete::<G1>(&chain, 0).unwrap();
            let other = world.clone();
            let losing = thread::spawn(move || other.registry.lose(TierMask::ALL));
            let held = world.pool().register(before, Duplicates::Reuse);
            let lost = losing.join().unwrap();
            assert_eq!(lost.blocks, if held.is_ok() { 2 } else { 0 });
            assert_eq!(
                held.as_ref().err().map(|rejected| rejected.error),
                held.as_ref().err().map(|_| G1_LOST)
            );
            assert!(held.as_ref().is_ok_and(|held| held.is_lost()) || held.is_err());
            assert!(world.present(&chain).is_empty());
            drop(held);
            world.check();
        });
    }
}

/// The parent, in another shard, is in use and stays for as long; what would continue it goes with it or does not come.
#[test]
fn a_child_comes_to_another_shard_while_the_tier_is_lost() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new(4);
        let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
        let child = world.complete::<G1>(&right, 1).unwrap();
        let other = world.clone();
        let losing = thread::spawn(move || other.registry.lose(TierMask::only(Tier::G1)));
        let registered = world.pool().register(child, Duplicates::Reuse);
        losing.join().unwrap();
        // The parent goes a moment before the loss is counted: then that it is missing is what is known.
        let told = |error| matches!(error, G1_LOST | RegisterError::MissingParent { .. });
        assert!(registered.as_ref().err().is_none_or(|rejected| told(rejected.error)));
        assert!(world.present(&right).is_empty() && held.is_lost());
        drop((held, registered));
        world.check();
        assert_eq!(world.registry.known_blocks(), 0, "no place is kept");
    });
}

/// What is allocated while a tier is lost is from before or from after it: as it says itself.
#[test]
fn an_allocation_races_a_loss() {
    for (policy, shards) in SETUPS {
        every_order(move || {
            let world = World::sharded([3, 0, 0], policy, shards);
            let other = world.clone();
            let losing = thread::spawn(move || {
                other.registry.lose(TierMask::only(Tier::G1));
                other.registry.losses()
            });
            let batch = world.complete::<G1>(&hashes(1, 2), 0).unwrap();
            let allocated = batch.losses();
            let registered = world.pool().register(batch, Duplicates::Reuse);
            let after = losing.join().unwrap();
            assert_eq!(world.present(&hashes(1, 2)).len(), if allocated == after { 2 } else { 0 });
            assert!(registered.is_ok() || allocated < after);
            drop(registered);
            world.check();
        });
    }
}

/// An arrival ends before the loss and goes with it, or after it and does not become visible.
#[test]
fn an_arrival_completes_while_its_tier_is_lost() {
    for shards in [1, 2] {
        every_order(move || {
            let world = World::sharded([0, 3, 0], PolicyKind::LruLeaf, shards);
            let identities = world::identities(&hashes(1, 1));
            let mut arrivals = world.registry.pool::<G2>().begin_arrivals(&identities).unwrap();
            let other = world.clone();
            let losing = thread::spawn(move || other.registry.lose(TierMask::ALL));
            let completion = arrivals.complete(0);
            let lost = losing.join().unwrap();
            match completion {
                Completion::Stored => assert_eq!((lost.blocks, lost.cancelled), (1, 0)),
                completion => assert_eq!((completion, lost.cancelled), (Completion::Removed, 1)),
            }
            assert!(world.present(&hashes(1, 1)).is_empty());
            assert!(arrivals.erase().into_pinned().is_lost());
            world.check();
        });
    }
}

/// A fork with room on G2, whose right end is in another shard than its first block, which is on G2 as well.
fn copied_fork() -> Fork {
    let left = hashes(1, 2);
    let right = vec![left[0], hashes(2, 2)[1]];
    let fork = Fork { world: World::sharded([3, 3, 0], PolicyKind::LruLeaf, 2), left, right };
    drop(fork.world.register(&fork.left, 0, Duplicates::Reuse));
    Fork::register_right(&fork.world, &fork.right);
    assert_eq!(fork.copy(0..1), [Some(Completion::Stored)]);
    fork
}

impl Fork {
    /// Copies blocks of the right chain to G2; nothing of those that are not brought there.
    fn copy(&self, blocks: std::ops::Range<usize>) -> Vec<Option<Completion>> {
        let identities = &world::identities(&self.right)[blocks];
        let Ok(mut arrivals) = self.world.registry.begin_arrivals(Tier::G2, identities) else {
            return Vec::new();
        };
        let reserved: Vec<usize> = arrivals.reserved().map(|(index, ..)| index).collect();
        let mut completions = vec![None; identities.len()];
        for index in reserved {
            completions[index] = Some(arrivals.complete(index));
        }
        completions
    }

    fn is_copied(&self, block: usize) -> bool {
        self.world.registry.tiers_of(GROUP, self.right[block]).contains(Tier::G2)
    }
}

/// The parent counts what comes before it can go: a copy never comes behind a parent that was evicted.
#[test]
fn a_copy_begins_in_one_shard_while_its_parent_is_evicted_in_another() {
    every_order(|| {
        let fork = copied_fork();
        let world = fork.world.clone();
        let evicting = thread::spawn(move || {
            let pool = world.registry.pool::<G2>();
            // Beside the copy there is room for one more, and for two only where its parent goes.
            drop(pool.get_mutable_blocks(3).or_else(|_| pool.get_mutable_blocks(2)));
        });
        if let Ok(mut arrivals) =
            fork.world.registry.begin_arrivals(Tier::G2, &world::identities(&fork.right)[1..])
            && arrivals.complete(0) == Completion::Stored
        {
            assert!(fork.is_copied(0), "what is held keeps its parent");
        }
        evicting.join().unwrap();
        fork.world.all_may_go();
    });
}

#[test]
fn a_copy_begins_in_one_shard_while_its_parent_is_removed_in_another() {
    every_order(|| {
        let fork = copied_fork();
        let (world, root) = (fork.world.clone(), fork.right[0]);
        let removing =
            thread::spawn(move || world.registry.remove_subtree(GROUP, root, TierMask::only(Tier::G2)));
        let completion = fork.copy(1..2);
        removing.join().unwrap();
        assert!(!fork.is_copied(0));
        assert!(!fork.is_copied(1) || completion == [Some(Completion::Stored)]);
        fork.world.all_may_go();
    });
}

/// Whoever is second joins the first, and takes the place back that it had.
#[test]
fn two_threads_copy_the_same_block_behind_a_parent_in_another_shard() {
    every_order(|| {
        let fork = copied_fork();
        let other = Fork { world: fork.world.clone(), left: fork.left.clone(), right: fork.right.clone() };
        let there = thread::spawn(move || other.copy(1..2));
        let here = fork.copy(1..2);
        let there = there.join().unwrap();
        assert!([here, there].contains(&vec![Some(Completion::Stored)]), "one of them brings it");
        assert!(fork.is_copied(1));
        fork.world.all_may_go();
    });
}

#[test]
fn an_arrival_completes_while_that_of_its_parent_in_another_shard_fails() {
    every_order(|| {
        let fork = copied_fork();
        fork.world.registry.remove_subtree(GROUP, fork.right[0], TierMask::only(Tier::G2));
        let identities = world::identities(&fork.right);
        let parent = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        let mut child = fork.world.registry.begin_arrivals(Tier::G2, &identities[1..]).unwrap();
        let failing = thread::spawn(move || drop(parent));
        let completion = child.complete(0);
        assert!(!fork.is_copied(1) || completion == Completion::Stored);
        failing.join().unwrap();
        assert!(!fork.is_copied(0) && !fork.is_copied(1), "nothing stays behind a block that failed");
        drop(child);
        fork.world.all_may_go();
    });
}

/// The parent is on its way when its child's copy begins. One that had failed already has no copy become visible behind it; one that
/// arrives has its child come, whenever that begins.
#[test]
fn a_copy_begins_while_its_parent_in_another_shard_is_on_its_way() {
    for fails in [true, false] {
        every_order(move || {
            let fork = copied_fork();
            fork.world.registry.remove_subtree(GROUP, fork.right[0], TierMask::only(Tier::G2));
            let identities = world::identities(&fork.right);
            let mut parent = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
            let failed = Arc::new(AtomicBool::new(false));
            let ends = Arc::clone(&failed);
            let ending = thread::spawn(move || {
                if fails {
                    parent.fail(0);
                } else {
                    parent.complete(0);
                }
                ends.store(fails, Ordering::Release);
            });
            let mut child = fork.world.registry.begin_arrivals(Tier::G2, &identities[1..]).unwrap();
            let too_late = failed.load(Ordering::Acquire);
            let completion = child.complete(0);
            assert!(!fork.is_copied(1) || completion == Completion::Stored);
            assert!(!too_late || completion == Completion::Removed, "its parent had failed");
            assert!(fails || completion == Completion::Stored, "its parent comes");
            ending.join().unwrap();
            assert_eq!(fork.is_copied(1), !fails, "it goes with its parent");
            drop(child);
            fork.world.all_may_go();
        });
    }
}

/// A parent that failed is on its way again before who failed it removes what was complete behind it, and fails once more.
#[test]
fn a_copy_goes_although_its_parent_that_failed_is_on_its_way_again() {
    every_order(|| {
        let fork = copied_fork();
        fork.world.registry.remove_subtree(GROUP, fork.right[0], TierMask::only(Tier::G2));
        let identities = world::identities(&fork.right);
        let mut parent = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        let mut child = fork.world.registry.begin_arrivals(Tier::G2, &identities[1..]).unwrap();
        assert_eq!(child.complete(0), Completion::Stored, "its parent is on its way");
        let failing = thread::spawn(move || parent.fail(0));
        let mut again = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        again.fail(0);
        failing.join().unwrap();
        assert!(!fork.is_copied(0) && !fork.is_copied(1), "nothing stays behind a block that failed");
        drop((child, again));
        fork.world.all_may_go();
    });
}

/// Nobody gets a slot while blocks are restored: the tier is in use, or the slots with blocks are not free.
#[test]
fn an_allocation_races_restoring() {
    for shards in [1, 2] {
        every_order(move || {
            let world = World::sharded([0, 3, 0], PolicyKind::LruLeaf, shards);
            let blocks: Vec<_> = world::identities(&hashes(1, 2))
                .into_iter()
                .zip([0, 2])
                .map(|(identity, block)| RecoveredBlock { block: BlockId(block), identity })
                .collect();
            let other = world.clone();
            let allocating =
                thread::spawn(move || other.registry.pool::<G2>().get_mutable_blocks(1).unwrap());
            let restored = world.registry.restore(Tier::G2, &blocks, BlockMetadata::default());
            let retired = world.registry.retire(Tier::G2, &[BlockId(1)]);
            let held = allocating.join().unwrap();
            let there = world.present(&hashes(1, 2)).len();
            let status = world.registry.occupancy(Tier::G2);
            match restored {
                Ok(restored) if held.block_ids()[0] == BlockId(1) => {
                    assert_eq!((restored.restored, there, retired), (2, 2, 0));
                }
                // The free slot was retired first: one of the two blocks made room.
                Ok(restored) => assert_eq!((restored.restored, there, retired), (2, 1, 1)),
                Err(_) => assert_eq!((there, retired), (0, u32::from(held.block_ids()[0] != BlockId(1)))),
            }
            assert_eq!(status.held, 1);
            assert_eq!(status.free + status.inactive + status.held + status.quarantined, 3);
            drop(held);
        });
    }
}
