//! Blocks that are removed, or lost with their tier.

use super::forks::Fork;
use super::*;

/// The numbers of the events of a kind that are about a block.
fn numbers(events: &[EventRecord], kind: EventRecordKind, hash: kvbm_pool::SequenceHash) -> Vec<u64> {
    let is = |event: &&EventRecord| event.kind == kind && event.identity.hash == hash;
    events.iter().filter(is).map(|event| event.seq).collect()
}

/// A removal of a parent holds the lock: a child that another thread registers sees it, and does
/// not come after it; nor before its parent, where that comes again at the same moment.
#[test]
fn a_child_does_not_come_after_its_parent_was_removed() {
    for again in [false, true] {
        every_order(move || {
            let Fork { world, left, right } = Fork::new([4, 0, 0]);
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
            let stored = numbers(&events, EventRecordKind::Store, right[1]);
            assert_eq!(stored.len(), usize::from(registered.is_ok()));
            // The parent was there when it began, went once, and came again or did not.
            let gone = numbers(&events, EventRecordKind::Remove, root)[0];
            let back = numbers(&events, EventRecordKind::Store, root).first().copied().unwrap_or(u64::MAX);
            assert!(stored.iter().all(|&stored| stored < gone || back < stored), "{events:?}");
            drop((held, registered, parent));
        });
    }
}

/// What comes behind a block whose subtree is removed goes with it, or does not come: a block
/// leaves only when nothing continues it.
#[test]
fn a_child_comes_while_the_subtree_of_its_parent_is_removed() {
    for elsewhere in [true, false] {
        every_order(move || {
            let Fork { world, left, right } = Fork::new([4, 0, 0]);
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

/// Whatever comes first, nothing is there afterwards that was allocated before the loss; and what
/// is told of it is true.
#[test]
fn a_registration_races_a_loss() {
    for policy in POLICIES {
        every_order(move || {
            let world = World::new([4, 0, 0], policy);
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

/// The parent, elsewhere, is in use and stays for as long; what would continue it goes with it or
/// does not come.
#[test]
fn a_child_comes_while_the_tier_is_lost() {
    every_order(|| {
        let Fork { world, left, right } = Fork::new([4, 0, 0]);
        let held = world.register(&left, 0, Duplicates::Reuse).unwrap();
        let child = world.complete::<G1>(&right, 1).unwrap();
        let other = world.clone();
        let losing = thread::spawn(move || other.registry.lose(TierMask::only(Tier::G1)));
        let registered = world.pool().register(child, Duplicates::Reuse);
        losing.join().unwrap();
        // The parent goes a moment before the loss is counted: then that it is missing is what is
        // known.
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
    for policy in POLICIES {
        every_order(move || {
            let world = World::new([3, 0, 0], policy);
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
    every_order(move || {
        let world = World::new([0, 3, 0], PolicyKind::LruLeaf);
        let identities = world::identities(&hashes(1, 1));
        let mut arrivals = world.registry.pool::<G2>().begin_arrivals(&identities).unwrap();
        let other = world.clone();
        let losing = thread::spawn(move || other.registry.lose(TierMask::ALL));
        let completion = arrivals.complete(0);
        let lost = losing.join().unwrap();
        match completion {
            ArrivalOutcome::Stored => assert_eq!((lost.blocks, lost.cancelled), (1, 0)),
            completion => assert_eq!((completion, lost.cancelled), (ArrivalOutcome::Removed, 1)),
        }
        assert!(world.present(&hashes(1, 1)).is_empty());
        assert!(arrivals.erase().into_pinned().is_lost());
        world.check();
    });
}
