//! A block from its registration to its last user, and slots.

use super::*;

#[test]
fn the_last_drop_races_eviction() {
    for policy in POLICIES {
        every_order(move || {
            let world = World::new([2, 0, 0], policy);
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
    for duplicates in [Duplicates::Reuse, Duplicates::Allow] {
        every_order(move || {
            let world = World::new([4, 0, 0], PolicyKind::LruLeaf);
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
                assert_ne!(completion, ArrivalOutcome::Removed);
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

/// Nobody gets a slot while blocks are restored: the tier is in use, or the slots with blocks are
/// not free.
#[test]
fn an_allocation_races_restoring() {
    every_order(move || {
        let world = World::new([0, 3, 0], PolicyKind::LruLeaf);
        let blocks: Vec<_> = world::identities(&hashes(1, 2))
            .into_iter()
            .zip([0, 2])
            .map(|(identity, block)| RecoveredBlock { block: BlockId(block), identity })
            .collect();
        let other = world.clone();
        let allocating = thread::spawn(move || other.registry.pool::<G2>().get_mutable_blocks(1).unwrap());
        let restored = world.registry.restore(Tier::G2, &blocks, BlockMetadata::default());
        let before = world.registry.occupancy(Tier::G2).quarantined;
        world.registry.retire(Tier::G2, &[BlockId(1)]);
        let retired = world.registry.occupancy(Tier::G2).quarantined - before;
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
