//! A preempted sequence's private blocks: saved, brought back, never anybody else's.
#![cfg(feature = "worker")]

use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{compute, holds, serve, soon, tokens, two_tiers};
use kvbm::{
    BlockBatch, FailureKind, G1, KvBlockManager, Owned, ParkError, Partial, Path, Tier, TokenSequence,
};
use std::time::Duration;

/// `blocks` private blocks behind the one full block of a sequence of 1.5 blocks.
fn private(manager: &KvBlockManager<Owned>, blocks: usize) -> BlockBatch<G1, Partial> {
    let one = tokens(manager, 50, 1);
    let fresh = manager.allocate(1 + blocks).unwrap();
    let (done, partial) = manager.commit(fresh, &one, 0).unwrap();
    drop(done);
    assert_eq!(partial.len(), blocks);
    partial
}

fn names(manager: &KvBlockManager<Owned>, count: u32) -> TokenSequence {
    tokens(manager, 77, count)
}

#[test]
fn private_blocks_with_a_partial_tail_come_back_byte_for_byte() {
    let manager = two_tiers(8, 16);
    let partial = private(&manager, 3);
    let origin = partial.origin();
    let contents = names(&manager, 3);
    for (&id, &hash) in partial.block_ids().iter().zip(contents.hashes()) {
        compute(&manager, id, hash);
    }
    let parked = manager.park(partial).unwrap();
    assert_eq!((parked.len(), parked.origin()), (3, origin));
    let tiers = manager.status().tiers;
    assert_eq!((tiers[0].free, tiers[1].held), (8, 3), "their slots in G1 are free for others");
    for other in 1..6 {
        serve(&manager, &tokens(&manager, other, 8));
        assert!(manager.wait_offloads(soon()));
    }
    let back = manager.resume(parked).unwrap();
    assert_eq!(back.origin(), origin);
    assert!(back.block_ids().iter().zip(contents.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
    assert_eq!(manager.status().tiers[1].held, 0);
    // The sequence goes on where it stopped.
    let longer = tokens(&manager, 50, 3);
    drop(manager.register(manager.commit(manager.allocate(1).unwrap(), &longer, 0).unwrap().0).unwrap());
    let (done, tail) = back.commit(&longer).unwrap();
    assert_eq!((done.len(), tail.len()), (2, 1));
    assert_eq!(manager.register(done).unwrap().len(), 2);
}

#[test]
fn parked_blocks_are_found_by_nobody() {
    let manager = two_tiers(8, 16);
    let mut subscriber = manager.events().subscribe().unwrap();
    let parked = manager.park(private(&manager, 2)).unwrap();
    assert!(manager.events().pump());
    assert!(subscriber.next(Duration::ZERO).unwrap().is_none(), "no event tells of them");
    assert_eq!(manager.status().tiers[1].inactive, 0);
    assert_eq!(manager.clear(Tier::G2), Ok(0));
    drop(parked);
    assert_eq!(manager.status().tiers[1].free, 16, "forgotten");
}

#[test]
fn what_cannot_be_parked_stays_where_it_is() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([8, 2, 0], |_| ());
    let rejected = manager.park(private(&manager, 3)).unwrap_err();
    assert!(matches!(&rejected.error, ParkError::Alloc(error) if error.tier == Tier::G2), "{rejected}");
    assert_eq!(rejected.blocks.unwrap().len(), 3);

    ranks.set_all(Mode::Hold);
    let partial = private(&manager, 2);
    let (ids, origin) = (partial.block_ids().to_vec(), partial.origin());
    let answer = {
        let ranks = ranks.clone();
        std::thread::spawn(move || ranks.fail(0, &ranks.next_plan(0), 1, FailureKind::Device))
    };
    let rejected = manager.park(partial).unwrap_err();
    answer.join().unwrap();
    let ParkError::Failed(failures) = &rejected.error else { panic!("{rejected}") };
    assert_eq!((failures.len(), failures[0].path), (1, Path::G1_G2));
    let back = rejected.blocks.expect("no worker touches them any more");
    assert_eq!((back.block_ids(), back.origin()), (&ids[..], origin));
    assert_eq!(manager.status().tiers[1].free, 2);
}

#[test]
fn what_cannot_be_resumed_stays_parked() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([4, 4, 0], |_| ());
    let parked = manager.park(private(&manager, 2)).unwrap();
    let all = manager.allocate(4).unwrap();
    let rejected = manager.resume(parked).unwrap_err();
    assert!(matches!(&rejected.error, ParkError::Alloc(error) if error.tier == Tier::G1), "{rejected}");
    drop(all);
    ranks.set_all(Mode::Hold);
    let mut parked = rejected.blocks.unwrap();
    for kind in [FailureKind::Io, FailureKind::Missing] {
        let answer = {
            let ranks = ranks.clone();
            std::thread::spawn(move || ranks.fail(0, &ranks.next_plan(0), 0, kind))
        };
        let rejected = manager.resume(parked).unwrap_err();
        answer.join().unwrap();
        assert!(matches!(rejected.error, ParkError::Failed(_)), "{rejected}");
        parked = rejected.blocks.unwrap();
        assert_eq!((parked.len(), manager.status().tiers[0].free), (2, 4));
    }
    ranks.set_all(Mode::Answer);
    assert_eq!(manager.resume(parked).unwrap().len(), 2);
}

#[test]
fn a_park_that_stalls_gives_its_blocks_back_when_it_is_over() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([8, 8, 0], |config| config.transfer.deadline = IN_TIME);
    ranks.set_all(Mode::Hold);
    let rejected = manager.park(private(&manager, 2)).unwrap_err();
    assert!(rejected.blocks.is_none(), "a worker may still read them");
    assert!(rejected.to_string().contains("deadline"), "{rejected}");
    let tiers = manager.status().tiers;
    assert_eq!((tiers[0].held, tiers[1].held), (2, 2));
    ranks.execute(0);
    let tiers = manager.status().tiers;
    assert_eq!((tiers[0].free, tiers[1].free), (8, 8));
}

#[test]
fn parking_and_resuming_many_times_never_loses_a_batch() {
    let manager = two_tiers(8, 8);
    let mut partial = private(&manager, 3);
    let contents = names(&manager, 3);
    for (&id, &hash) in partial.block_ids().iter().zip(contents.hashes()) {
        compute(&manager, id, hash);
    }
    for round in 0..200 {
        let parked = manager.park(partial).unwrap_or_else(|rejected| panic!("{round}: {rejected}"));
        partial = manager.resume(parked).unwrap_or_else(|rejected| panic!("{round}: {rejected}"));
    }
    assert!(partial.block_ids().iter().zip(contents.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
}

#[test]
fn another_manager_s_blocks_are_not_taken() {
    let [ours, theirs] = [two_tiers(8, 8), two_tiers(8, 8)];
    let rejected = ours.park(private(&theirs, 2)).unwrap_err();
    assert!(matches!(rejected.error, ParkError::Foreign) && rejected.blocks.is_some());
    let parked = theirs.park(private(&theirs, 2)).unwrap();
    let rejected = ours.resume(parked).unwrap_err();
    assert!(matches!(rejected.error, ParkError::Foreign));
    assert_eq!(theirs.resume(rejected.blocks.unwrap()).unwrap().len(), 2);
}
