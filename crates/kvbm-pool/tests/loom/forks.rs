//! Chains that share their first block.

use super::*;

/// Two chains with the same first block, and a registry for them.
pub(super) struct Fork {
    pub(super) world: World,
    pub(super) left: Vec<kvbm_pool::SequenceHash>,
    pub(super) right: Vec<kvbm_pool::SequenceHash>,
}

impl Fork {
    pub(super) fn new(capacity: [u32; 3]) -> Self {
        let left = hashes(1, 2);
        let right = vec![left[0], hashes(2, 2)[1]];
        Self { world: World::new(capacity, PolicyKind::LruLeaf), left, right }
    }

    pub(super) fn register_right(world: &World, right: &[kvbm_pool::SequenceHash]) {
        let Some(held) = world.register(right, 1, Duplicates::Reuse) else { return };
        assert_eq!(world.present(right).len(), 2, "a block in use keeps its parent");
        drop(held);
    }
}

#[test]
fn a_child_comes_while_its_parent_goes() {
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
fn a_child_goes_while_its_parent_goes() {
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
fn a_user_lets_go_while_a_child_is_registered() {
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

/// The block goes on one thread and comes on another.
#[test]
fn a_block_is_evicted_and_registered_at_the_same_time() {
    every_order(|| {
        let world = World::new([2, 0, 0], PolicyKind::LruLeaf);
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
