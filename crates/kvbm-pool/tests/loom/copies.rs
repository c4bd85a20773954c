//! Copies to another tier, behind parents elsewhere.

use super::forks::Fork;
use super::*;

/// A fork with room on G2, whose right end is elsewhere than its first block, which is on G2 as
/// well.
fn copied_fork() -> Fork {
    let fork = Fork::new([3, 3, 0]);
    drop(fork.world.register(&fork.left, 0, Duplicates::Reuse));
    Fork::register_right(&fork.world, &fork.right);
    assert_eq!(fork.copy(0..1), [Some(ArrivalOutcome::Stored)]);
    fork
}

impl Fork {
    /// Copies blocks of the right chain to G2; nothing of those that are not brought there.
    fn copy(&self, blocks: std::ops::Range<usize>) -> Vec<Option<ArrivalOutcome>> {
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

/// The parent counts what comes before it can go: a copy never comes behind a parent that was
/// evicted.
#[test]
fn a_copy_begins_while_its_parent_is_evicted() {
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
            && arrivals.complete(0) == ArrivalOutcome::Stored
        {
            assert!(fork.is_copied(0), "what is held keeps its parent");
        }
        evicting.join().unwrap();
        fork.world.all_may_go();
    });
}

#[test]
fn a_copy_begins_while_its_parent_is_removed() {
    every_order(|| {
        let fork = copied_fork();
        let (world, root) = (fork.world.clone(), fork.right[0]);
        let removing =
            thread::spawn(move || world.registry.remove_subtree(GROUP, root, TierMask::only(Tier::G2)));
        let completion = fork.copy(1..2);
        removing.join().unwrap();
        assert!(!fork.is_copied(0));
        assert!(!fork.is_copied(1) || completion == [Some(ArrivalOutcome::Stored)]);
        fork.world.all_may_go();
    });
}

/// Whoever is second joins the first, and takes the place back that it had.
#[test]
fn two_threads_copy_the_same_block_behind_a_parent() {
    every_order(|| {
        let fork = copied_fork();
        let other = Fork { world: fork.world.clone(), left: fork.left.clone(), right: fork.right.clone() };
        let there = thread::spawn(move || other.copy(1..2));
        let here = fork.copy(1..2);
        let there = there.join().unwrap();
        assert!([here, there].contains(&vec![Some(ArrivalOutcome::Stored)]), "one of them brings it");
        assert!(fork.is_copied(1));
        fork.world.all_may_go();
    });
}

#[test]
fn an_arrival_completes_while_that_of_its_parent_fails() {
    every_order(|| {
        let fork = copied_fork();
        fork.world.registry.remove_subtree(GROUP, fork.right[0], TierMask::only(Tier::G2));
        let identities = world::identities(&fork.right);
        let parent = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        let mut child = fork.world.registry.begin_arrivals(Tier::G2, &identities[1..]).unwrap();
        let failing = thread::spawn(move || drop(parent));
        let completion = child.complete(0);
        assert!(!fork.is_copied(1) || completion == ArrivalOutcome::Stored);
        failing.join().unwrap();
        assert!(!fork.is_copied(0) && !fork.is_copied(1), "nothing stays behind a block that failed");
        drop(child);
        fork.world.all_may_go();
    });
}

/// The parent is on its way when its child's copy begins. One that had failed already has no copy
/// become visible behind it; one that arrives has its child come, whenever that begins.
#[test]
fn a_copy_begins_while_its_parent_is_on_its_way() {
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
            assert!(!fork.is_copied(1) || completion == ArrivalOutcome::Stored);
            assert!(!too_late || completion == ArrivalOutcome::Removed, "its parent had failed");
            assert!(fails || completion == ArrivalOutcome::Stored, "its parent comes");
            ending.join().unwrap();
            assert_eq!(fork.is_copied(1), !fails, "it goes with its parent");
            drop(child);
            fork.world.all_may_go();
        });
    }
}

/// A parent that failed is on its way again before who failed it removes what was complete behind
/// it, and fails once more.
#[test]
fn a_copy_goes_although_its_parent_that_failed_is_on_its_way_again() {
    every_order(|| {
        let fork = copied_fork();
        fork.world.registry.remove_subtree(GROUP, fork.right[0], TierMask::only(Tier::G2));
        let identities = world::identities(&fork.right);
        let mut parent = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        let mut child = fork.world.registry.begin_arrivals(Tier::G2, &identities[1..]).unwrap();
        assert_eq!(child.complete(0), ArrivalOutcome::Stored, "its parent is on its way");
        let failing = thread::spawn(move || parent.fail(0));
        let mut again = fork.world.registry.begin_arrivals(Tier::G2, &identities[..1]).unwrap();
        again.fail(0);
        failing.join().unwrap();
        assert!(!fork.is_copied(0) && !fork.is_copied(1), "nothing stays behind a block that failed");
        drop((child, again));
        fork.world.all_may_go();
    });
}
