//! Arrivals of chains behind parents that are there, on their way, or gone.
#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::world::{GROUP, World, hashes, identities};
use kvbm_plan::{SequenceHash, Tier};
use kvbm_pool::{
    AnyArrivals, Arrival, ArrivalOutcome, Duplicates, G2, PolicyKind, Quarantine, Refusal, TierMask,
};

const G2_ONLY: TierMask = TierMask::only(Tier::G2);

fn world() -> World {
    World::new([64, 64, 0], PolicyKind::LruLeaf)
}

/// Brings all of a chain to G2 and lets go of it.
fn copy(world: &World, chain: &[SequenceHash]) -> Vec<ArrivalOutcome> {
    world.registry.begin_arrivals(Tier::G2, &identities(chain)).unwrap().complete_all()
}

fn begin(world: &World, chain: &[SequenceHash], from: usize) -> AnyArrivals {
    world.registry.begin_arrivals(Tier::G2, &identities(chain)[from..]).unwrap()
}

fn is_copied(world: &World, hash: SequenceHash) -> bool {
    world.registry.tiers_of(GROUP, hash).contains(Tier::G2)
}

/// Chains that share their first blocks and end differently.
fn forks(world: &World, shared: usize) -> Vec<Vec<SequenceHash>> {
    let root = hashes(1, shared as u64);
    let fork = |tail: u64| [root.clone(), hashes(100 + tail, 4)].concat();
    let chains: Vec<_> = (0..8).map(fork).collect();
    drop(world.register(&chains[0], 0, Duplicates::Reuse).unwrap());
    for chain in &chains[1..] {
        drop(world.register(chain, shared, Duplicates::Reuse).unwrap());
    }
    chains
}

#[test]
fn ends_of_a_shared_beginning_are_copied_behind_it() {
    let world = world();
    let chains = forks(&world, 3);
    for chain in &chains {
        assert!(matches!(
            begin(&world, chain, 3).arrivals()[0],
            Arrival::Refused(Refusal::MissingParent { .. })
        ));
    }
    copy(&world, &chains[0][..3]);
    for chain in &chains {
        let mut arrivals = begin(&world, chain, 3);
        assert_eq!(arrivals.reserved().count(), 4);
        let joined = begin(&world, chain, 3);
        assert!(joined.arrivals().iter().all(|arrival| matches!(arrival, Arrival::Joined { .. })));
        drop(joined);
        assert_eq!(arrivals.complete_all(), [ArrivalOutcome::Stored; 4]);
        let again = begin(&world, chain, 2);
        assert!(again.arrivals().iter().all(|arrival| matches!(arrival, Arrival::Present { .. })));
    }
    assert_eq!(world.registry.occupancy(Tier::G1).not_copied_lower, 0);
    assert_eq!(world.registry.not_copied_lower(Tier::G1), 0);
    // What continues the shared blocks keeps them: 28 of 35 are others.
    let some = world.registry.pool::<G2>().get_mutable_blocks(64 - 3 - 4).unwrap();
    assert_eq!(world.registry.snapshot(Tier::G2).0.len(), 7);
    drop(some);
    world.all_may_go();
}

#[test]
fn blocks_that_nobody_knows_begin_and_fail_and_leave_nothing_behind() {
    let world = world();
    let chain = hashes(1, 40);
    for failed in [0, 7, 39] {
        let mut arrivals = begin(&world, &chain, 0);
        assert_eq!(arrivals.reserved().count(), 40);
        arrivals.fail(failed);
    }
    let orphan = begin(&world, &chain, 5);
    assert!(orphan.arrivals().iter().all(|arrival| matches!(arrival, Arrival::Refused(_))));
    drop(orphan);
    assert_eq!((world.registry.known_blocks(), world.registry.occupancy(Tier::G2).free), (0, 64));
    copy(&world, &chain);
    world.all_may_go();
}

/// More blocks than there is room for: the first ones come, and the chain is whole as far as it
/// goes.
#[test]
fn where_room_ends_nothing_is_kept_for_what_does_not_come() {
    let world = world();
    let chains = forks(&world, 1);
    copy(&world, &chains[0][..1]);
    let held = world.registry.pool::<G2>().get_mutable_blocks(63).unwrap();
    let refused = world.registry.begin_arrivals(Tier::G2, &identities(&chains[5])[1..]);
    assert!(refused.is_err(), "the parent is not evicted for its children");
    assert!(is_copied(&world, chains[0][0]));
    drop(held);
    world.all_may_go();
}

/// A prefix whose middle is missing is never found: what comes behind a block that did not arrive
/// does not stay.
#[test]
fn what_completes_behind_a_parent_that_failed_is_not_there() {
    for shared in [2, 4] {
        let world = world();
        let chains = forks(&world, shared);
        let mut head = begin(&world, &chains[0], 0);
        let mut tails: Vec<_> = chains[1..].iter().map(|chain| begin(&world, chain, shared)).collect();
        assert!(tails.iter().all(|tail| tail.reserved().count() == 4));
        // One ends before the parent does, which is still awaited, and goes with it.
        assert_eq!(tails[0].complete_all(), [ArrivalOutcome::Stored; 4]);
        head.complete(0);
        head.fail_each(1..head.len());
        assert!(!chains[1][shared..].iter().any(|&hash| is_copied(&world, hash)));
        assert_eq!(world.registry.counters(Tier::G2).orphaned, 4);
        for (tail, chain) in tails[1..].iter_mut().zip(&chains[2..]) {
            let failed = world.registry.counters(Tier::G2).arrivals_failed;
            assert_eq!(tail.complete_all(), [ArrivalOutcome::Removed; 4]);
            assert_eq!(world.registry.counters(Tier::G2).arrivals_failed, failed + 4);
            assert!(!chain[shared..].iter().any(|&hash| is_copied(&world, hash)));
        }
        drop((head, tails));
        assert_eq!(world.registry.occupancy(Tier::G2).free, 64 - 1);
        world.all_may_go();
    }
}

/// What is complete too early is not found without its parent, and what was begun behind it does
/// not come; the copies above stay.
#[test]
fn what_was_complete_before_its_parent_failed_goes_with_it() {
    let world = world();
    let chains = forks(&world, 3);
    let chain = &chains[6];
    let mut head = begin(&world, &chain[..3], 0);
    let mut tail = begin(&world, &chain[..5], 3);
    assert_eq!(tail.complete_all(), [ArrivalOutcome::Stored; 2]);
    let held = tail.into_pinned();
    let mut end = begin(&world, chain, 5);
    assert_eq!(end.complete(0), ArrivalOutcome::Stored);
    head.complete(0);
    head.complete(1);
    drop(head);
    let there: Vec<_> = chain.iter().map(|&hash| is_copied(&world, hash)).collect();
    assert_eq!(there, [true, true, false, false, false, false, false]);
    let (status, counters) = (world.registry.occupancy(Tier::G2), world.registry.counters(Tier::G2));
    assert_eq!((status.detached, counters.orphaned), (3, 3));
    assert_eq!(end.complete(1), ArrivalOutcome::Removed);
    assert_eq!(world.present(chain), *chain);
    drop((held, end));
    // Nothing is in the way of the next copy.
    assert_eq!(copy(&world, chain).iter().filter(|&&end| end == ArrivalOutcome::Stored).count(), 5);
    world.all_may_go();
}

/// What is complete too early stays where its parent arrives after all, however that comes about.
#[test]
fn what_was_complete_before_its_parent_stays_with_it() {
    for registered in [false, true] {
        let world = world();
        let chains = forks(&world, 3);
        let mut head = begin(&world, &chains[5][..3], 0);
        let mut tail = begin(&world, &chains[5], 3);
        assert_eq!(tail.complete_all(), [ArrivalOutcome::Stored; 4]);
        if registered {
            drop(world.register_on::<G2>(&chains[5][..3], 0, Duplicates::Reuse).unwrap());
        } else {
            head.complete_all();
        }
        drop((head, tail));
        assert!(chains[5].iter().all(|&hash| is_copied(&world, hash)));
        world.all_may_go();
    }
}

/// The same where the parent was there and went alone.
#[test]
fn what_completes_behind_a_parent_with_bad_bytes_is_not_there() {
    let world = world();
    let chains = forks(&world, 2);
    let head = copy_and_hold(&world, &chains[0][..2]);
    let mut tail = begin(&world, &chains[7], 2);
    let Arrival::Present { block } = head.arrivals()[1] else { panic!("{head:?}") };
    assert_eq!(world.registry.quarantine(Tier::G2, block), Quarantine::AfterLastUser);
    assert_eq!(tail.complete_all(), [ArrivalOutcome::Removed; 4]);
    drop((head, tail));
    assert_eq!(world.registry.occupancy(Tier::G2).quarantined, 1);
}

fn copy_and_hold(world: &World, chain: &[SequenceHash]) -> AnyArrivals {
    copy(world, chain);
    begin(world, chain, 0)
}

#[test]
fn several_subtrees_go_as_they_would_one_after_the_other() {
    let worlds = [world(), world()];
    let chains = worlds.each_ref().map(|world| forks(world, 3)).into_iter().next().unwrap();
    for world in &worlds {
        for chain in &chains {
            copy(world, chain);
        }
    }
    let unknown = hashes(77, 1)[0];
    // An end, two nested ones, a whole end, and one that is not there.
    let tops = [chains[1][6], chains[2][4], chains[2][5], chains[3][3], unknown];
    let pairs = tops.map(|hash| (GROUP, hash));
    let one = worlds[0].registry.remove_subtrees(&pairs, G2_ONLY);
    let mut each = kvbm_pool::Removed::default();
    for (group, hash) in pairs {
        each.blocks += worlds[1].registry.remove_subtree(group, hash, G2_ONLY).blocks;
    }
    assert_eq!((one.blocks, each.blocks), (1 + 3 + 4, 1 + 3 + 4));
    for chain in &chains {
        let there = |world: &World| chain.iter().map(|&hash| is_copied(world, hash)).collect::<Vec<_>>();
        assert_eq!(there(&worlds[0]), there(&worlds[1]));
    }
    assert_eq!(worlds[0].registry.remove_subtrees(&[], TierMask::ALL), kvbm_pool::Removed::default());
    let root = worlds[0].registry.remove_subtrees(&[(GROUP, chains[0][0])], TierMask::ALL);
    assert_eq!(root.blocks, 35 + 35 - 8);
    assert_eq!(worlds[0].registry.known_blocks(), 0);
    worlds[1].all_may_go();
}

#[test]
fn a_front_becomes_visible_up_to_the_first_block_that_was_removed() {
    let world = world();
    let chain = hashes(1, 6);
    let mut arrivals = begin(&world, &chain, 0);
    world.registry.remove_subtree(GROUP, chain[3], G2_ONLY);
    assert_eq!(arrivals.complete_front(0..2), 2);
    assert_eq!(arrivals.complete_front(2..6), 1, "what comes behind a hole is of no use");
    assert!(matches!(
        arrivals.arrivals()[3..],
        [Arrival::Failed, Arrival::Reserved { .. }, Arrival::Reserved { .. }]
    ));
    let there: Vec<_> = chain.iter().map(|&hash| world.registry.slot_of(Tier::G2, GROUP, hash)).collect();
    let slots: Vec<_> = arrivals.take_pinned().block_ids().iter().copied().map(Some).collect();
    assert_eq!((&there[..3], &there[3..]), (&slots[..], &[None; 3][..]));
    assert_eq!(world.registry.slot_of(Tier::G4, GROUP, chain[0]), None);
    drop(arrivals);
    world.all_may_go();
}
