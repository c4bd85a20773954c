//! Every byte that comes back is the byte that went away.
#![cfg(feature = "worker")]

use crate::support::{compute, fill, holds, serve, soon, three_tiers, tokens, two_tiers};
use kvbm::{FailureKind, KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::time::{Duration, Instant};

#[test]
fn invariant_2_bytes_of_a_registered_block_do_not_change_while_it_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let manager = three_tiers([16, 24, 64], dir.path(), |_| ());
    let sequence = tokens(&manager, 1, 6);
    serve(&manager, &sequence);
    let held = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
    for round in 0..6 {
        for other in 2..8 {
            serve(&manager, &tokens(&manager, other, 8));
            assert!(manager.wait_offloads(soon()));
        }
        let intact = held.block_ids().iter().zip(sequence.hashes());
        assert!(intact.into_iter().all(|(&id, &hash)| holds(&manager, id, hash)), "round {round}");
    }
    let again = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
    assert_eq!(again.block_ids(), held.block_ids(), "and it never moves");
}

#[test]
fn invariant_2_who_registers_a_block_that_is_there_gets_the_one_that_is_there() {
    let manager = two_tiers(16, 16);
    let sequence = tokens(&manager, 1, 4);
    serve(&manager, &sequence);
    let first = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
    // Another request computed the same blocks, with bytes that differ in the last bit.
    let fresh = manager.allocate(4).unwrap();
    let wrong = tokens(&manager, 2, 4);
    for (&id, &hash) in fresh.block_ids().iter().zip(wrong.hashes()) {
        compute(&manager, id, hash);
    }
    let (done, _) = manager.commit(fresh, &sequence, 0).unwrap();
    let second = manager.register(done).unwrap();
    assert_eq!(second.block_ids(), first.block_ids());
    assert!(second.block_ids().iter().zip(sequence.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
    assert_eq!(manager.status().tiers[0].free, 12, "the other copies are free again");
}

#[test]
fn a_block_on_disk_comes_up_without_a_place_in_host_memory() {
    let dir = tempfile::tempdir().unwrap();
    let manager = three_tiers([16, 32, 64], dir.path(), |_| ());
    let sequence = tokens(&manager, 1, 6);
    serve(&manager, &sequence);
    assert!(manager.wait_offloads(soon()));
    assert_eq!((manager.clear(Tier::G1), manager.clear(Tier::G2)), (Ok(6), Ok(6)));
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    assert_eq!(manager.status().tiers[1].free, 32, "not a slot of G2");
    let cached = onboarding.wait().unwrap();
    assert!(cached.block_ids().iter().zip(sequence.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
    let moved = |path| manager.metrics().path(path).blocks.get();
    assert_eq!((moved(Path::G3_G1), moved(Path::G3_G2), moved(Path::G2_G1)), (6, 0, 0));
    assert_eq!(manager.metrics().tier(Tier::G3).hits.get(), 6);
    assert!(manager.wait_offloads(soon()));
    assert!(manager.look_up(&sequence).iter().all(|tiers| tiers.contains(Tier::G2)), "offloaded again");
}

#[test]
fn two_ranks_each_keep_their_own_slice_through_all_tiers() {
    let dir = tempfile::tempdir().unwrap();
    let build = || three_tiers([8, 16, 64], dir.path(), |config| config.parallelism.tensor_parallel = 2);
    let manager = build();
    assert_eq!(manager.workers().iter().len(), 2);
    for start in 1..8 {
        assert_eq!(serve(&manager, &tokens(&manager, start, 6)), 0);
        assert!(manager.wait_offloads(soon()));
    }
    for start in 1..8 {
        assert_eq!(serve(&manager, &tokens(&manager, start, 6)), 6);
        assert!(manager.wait_offloads(soon()));
    }
    assert!(manager.shutdown(Duration::from_secs(60)).is_complete());
    drop(manager);
    let manager = build();
    assert_eq!(serve(&manager, &tokens(&manager, 3, 6)), 6);
}

/// One request of one of several threads. Blocks that were cached; `None` where there was no room
/// just then.
fn try_serve(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> Option<usize> {
    let cached = match manager.onboard(manager.match_prefix(sequence)).wait() {
        Ok(cached) => cached,
        Err(error) => {
            use FailureKind::{Corrupt, Deadline, GateShut, Io, PathBusy};
            let unexpected = |kind| matches!(kind, Corrupt | Deadline | GateShut | Io | PathBusy);
            assert!(!error.failures.iter().any(|failed| unexpected(failed.failure.kind)), "{error}");
            error.arrived
        }
    };
    for (&block, &hash) in cached.block_ids().iter().zip(sequence.hashes()) {
        assert!(holds(manager, block, hash), "block {block} of a hit holds other bytes");
    }
    let fresh = manager.allocate(sequence.num_blocks() - cached.len()).ok()?;
    if fresh.is_empty() {
        return Some(cached.len());
    }
    for (&block, &hash) in fresh.block_ids().iter().zip(&sequence.hashes()[cached.len()..]) {
        compute(manager, block, hash);
    }
    let (done, _) = manager.commit(fresh, sequence, cached.len()).unwrap();
    let registered = manager.register(done).unwrap();
    let (&last, &hash) = (registered.block_ids().last()?, sequence.hashes().last()?);
    assert!(holds(manager, last, hash), "whoever computed it");
    Some(cached.len())
}

#[test]
fn eight_threads_on_one_manager_see_no_wrong_byte() {
    let dir = tempfile::tempdir().unwrap();
    let manager = three_tiers([40, 48, 96], dir.path(), |_| ());
    let requests: Vec<_> =
        (0..10).flat_map(|start| [2, 4, 5].map(|blocks| tokens(&manager, start, blocks))).collect();
    let hits: usize = std::thread::scope(|scope| {
        let (manager, requests) = (&manager, &requests);
        let worker = |thread: usize| {
            move || {
                let mut hits = 0;
                for round in 0..40 {
                    let at = (thread * 7 + round * 11) % requests.len();
                    hits += try_serve(manager, &requests[at]).unwrap_or(0);
                    if round % 5 == thread % 5 {
                        drop(manager.onboard(manager.match_prefix(&requests[(at + 3) % requests.len()])));
                    }
                    match (thread, round % 16) {
                        (0, 15) => drop(manager.clear(Tier::G1).unwrap()),
                        (1, 15) => drop(manager.clear(Tier::G2).unwrap()),
                        (2, 7) => drop(manager.step()),
                        _ => {}
                    }
                }
                hits
            }
        };
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(worker(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 0);
    assert!(manager.wait_offloads(soon()));
    // The copies of onboards that were dropped go on until they are over.
    let (busy, until) = (
        || {
            manager
                .status()
                .tiers
                .iter()
                .any(|tier| tier.arriving + tier.active > 0 || tier.transfer_pins > 0)
        },
        soon(),
    );
    while busy() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    for tier in manager.status().tiers {
        let idle =
            (tier.arriving, tier.held, tier.active, tier.detached, tier.transfer_pins, tier.quarantined);
        assert_eq!(idle, (0, 0, 0, 0, 0, 0), "{tier:?}");
        assert_eq!(manager.metrics().tier(tier.tier).corrupt.get(), 0);
    }
    assert_eq!(manager.metrics().sync_offloads.get(), 0);
    drop(fill(&manager, &tokens(&manager, 99, 30), 0));
}
