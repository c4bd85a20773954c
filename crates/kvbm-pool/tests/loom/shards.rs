//! Chains that lie in two shards.

use super::*;

/// Two chains with the same first block, and a registry of two shards in which the ends of the two are in different ones.
pub(super) struct Fork {
    pub(super) world: World,
    pub(super) left: Vec<kvbm_pool::SequenceHash>,
    pub(super) right: Vec<kvbm_pool::SequenceHash>,
}

impl Fork {
    pub(super) fn new(capacity: [u32; 3]) -> Self {
        let left = hashes(1, 2);
        let right = vec![left[0], hashes(2, 2)[1]];
        Self { world: World::sharded(capacity, PolicyKind::LruLeaf, 2), left, right }
    }

    pub(super) fn register_right(world: &World, right: &[kvbm_pool::SequenceHash]) {
        let Some(held) = world.register(right, 1, Duplicates::Reuse) else { return };
        assert_eq!(world.present(right).len(), 2, "a block in use keeps its parent, wherever that is");
        drop(held);
    }
}

#[test]
fn a_child_comes_to_another_shard_while_its_parent_goes() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new([3, 0, 0]);
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
        let Fork { world, left, right } = Fork::new([3, 0, 0]);
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
        let Fork { world, left, right } = Fork::new([3, 0, 0]);
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
        let Fork { world, left, right } = Fork::new([4, 0, 0]);
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
