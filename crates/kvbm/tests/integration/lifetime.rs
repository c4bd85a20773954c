//! Ends: of handles, of managers, of the service.
#![cfg(feature = "worker")]

use crate::support::script::{Mode, Ranks};
use crate::support::{books, compute, fill, model, namespace, serve, soon, three_tiers, tokens, two_tiers};
use kvbm::metrics::DropReason;
use kvbm::{EngineError, FailureKind, FlushError, OffloadError, ParkError, Path, Tier};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Runs `body` on a thread of its own: a hang is a failure, not a test run that never ends.
fn in_time(body: impl FnOnce() + Send + 'static) {
    let (done, over) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    let over = over.recv_timeout(Duration::from_secs(60));
    assert!(over != Err(mpsc::RecvTimeoutError::Timeout), "it hangs");
    thread.join().unwrap();
}

#[test]
fn invariant_6_a_manager_may_go_with_transfers_in_flight() {
    in_time(|| {
        let ranks = Ranks::new(2);
        let manager = ranks.manager([16, 64, 0], |_| ());
        let sequence = tokens(&manager, 1, 4);
        let blocks = fill(&manager, &sequence, 0);
        manager.offload(&blocks, Tier::G2).unwrap();
        assert!(manager.wait_offloads(soon()));
        drop(blocks);
        assert_eq!(manager.clear(Tier::G1), Ok(4));
        ranks.set_all(Mode::Hold);
        let other = fill(&manager, &tokens(&manager, 2, 4), 0);
        manager.offload(&other, Tier::G2).unwrap();
        let offload = ranks.next_plan(0);
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        let onboard = ranks.next_plan(0);
        drop(manager);
        // The workers still answer, to a leader that an onboard keeps alive and then to none.
        ranks.done(0, &offload);
        ranks.done(0, &onboard);
        assert!(!onboarding.is_done(), "rank 1 owes its answer");
        drop(onboarding);
        ranks.execute(1);
        ranks.execute(1);
        drop(other);
    });
}

#[test]
fn invariant_6_handles_may_outlive_their_manager() {
    in_time(|| {
        let manager = two_tiers(16, 16);
        let sequence = tokens(&manager, 1, 4);
        serve(&manager, &sequence);
        let prefix = manager.match_prefix(&sequence);
        let cached = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
        let pinned = cached.clone();
        let reset = manager.allocate(2).unwrap();
        let (complete, partial) =
            manager.commit(manager.allocate(3).unwrap(), &tokens(&manager, 2, 1), 0).unwrap();
        let parked = manager.park(partial).unwrap();
        let subscriber = manager.events().subscribe().unwrap();
        let ids = cached.block_ids().to_vec();
        drop(manager);
        assert_eq!(pinned.block_ids(), ids);
        drop((prefix, cached, pinned, reset, complete, parked, subscriber));
    });
}

#[test]
fn invariant_6_real_workers_stop_with_their_manager_however_busy() {
    in_time(|| {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..8 {
            let manager = three_tiers([64, 64, 64], &dir.path().join(round.to_string()), |_| ());
            for start in 0..6 {
                let sequence = tokens(&manager, start, 8);
                let fresh = manager.allocate(8).unwrap();
                for (&block, &hash) in fresh.block_ids().iter().zip(sequence.hashes()) {
                    compute(&manager, block, hash);
                }
                let (done, _) = manager.commit(fresh, &sequence, 0).unwrap();
                drop(manager.register(done).unwrap());
            }
            let onboarding = manager.onboard(manager.match_prefix(&tokens(&manager, 0, 8)));
            drop(manager);
            let wanted = onboarding.len();
            match onboarding.wait() {
                Ok(cached) => assert_eq!(cached.len(), wanted),
                Err(error) => assert!(!error.failures.is_empty(), "{error}"),
            }
        }
    });
}

#[test]
fn invariant_6_no_timeout_is_too_long_for_the_clock() {
    let manager = books([16, 16, 16], |config| config.transfer.deadline = Duration::MAX);
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert_eq!(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap().len(), 4);
    assert_eq!(manager.flush(Duration::MAX).unwrap().durable_blocks, 0);
    assert!(manager.shutdown(Duration::MAX).drained);
}

#[test]
fn invariant_6_a_flush_that_a_rank_ignores_ends_at_its_deadline() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |_| ());
    ranks.set(1, Mode::Dead);
    let Err(FlushError::Rank { rank, failure }) = manager.flush(Duration::from_secs(60)) else {
        panic!("rank 1 cannot flush");
    };
    assert_eq!((rank.0, failure.kind), (1, FailureKind::Io));
    ranks.set_all(Mode::Hold);
    let blocks = fill(&manager, &tokens(&manager, 1, 1), 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    let started = Instant::now();
    assert_eq!(manager.flush(Duration::from_millis(20)), Err(FlushError::Busy));
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_flush_does_not_wait_for_offloads_that_begin_meanwhile() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([64, 64, 64], |config| config.offload.g1_g2.write_through = true);
    ranks.set(0, Mode::Hold);
    let register = |start| drop(fill(&manager, &tokens(&manager, start, 1), 0));
    register(0);
    ranks.wait_held(0, 1);
    let flushed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // There is always one under way.
            for start in 1.. {
                if flushed.load(Ordering::Acquire) {
                    break;
                }
                register(start);
                ranks.wait_held(0, 2);
                ranks.execute(0);
            }
        });
        let report = manager.flush(Duration::from_secs(60));
        flushed.store(true, Ordering::Release);
        report.unwrap();
    });
    assert_eq!(ranks.held(0), 1);
    assert!(!manager.wait_offloads(Instant::now()));
    ranks.execute(0);
    assert!(manager.wait_offloads(soon()));
}

#[test]
fn what_was_flushed_is_found_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let manager = three_tiers([16, 32, 64], dir.path(), |_| ());
    let sequence = tokens(&manager, 1, 6);
    assert_eq!(serve(&manager, &sequence), 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.flush(Duration::from_secs(60)).unwrap().durable_blocks, 6);
    drop(manager);
    let manager = three_tiers([16, 32, 64], dir.path(), |_| ());
    assert!(manager.look_up(&sequence).iter().all(|tiers| tiers.nearest() == Some(Tier::G3)));
    assert_eq!(serve(&manager, &sequence), 6, "byte for byte");
}

#[test]
fn shutdown_saves_what_no_trigger_had_saved() {
    let dir = tempfile::tempdir().unwrap();
    let lazy = |config: &mut kvbm::config::Config| {
        config.offload.g1_g2.write_through = false;
        config.offload.g2_g3.write_through = false;
        // G2 is a quarter of what must pass through it, and batches are small.
        config.offload.g1_g2.queue_share = 0.1;
    };
    let manager = three_tiers([64, 16, 128], dir.path(), lazy);
    let all: Vec<_> = (1..=8).map(|start| tokens(&manager, start, 8)).collect();
    for sequence in &all {
        assert_eq!(serve(&manager, sequence), 0);
    }
    let report = manager.shutdown(Duration::from_secs(60));
    assert!(report.is_complete(), "{report:?}");
    assert_eq!(report.durable_blocks, Some(64));
    drop(manager);
    let manager = three_tiers([64, 16, 128], dir.path(), lazy);
    for sequence in &all {
        assert_eq!(serve(&manager, sequence), 8);
    }
}

#[test]
fn a_shutdown_report_says_what_was_not_saved() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |_| ());
    drop(fill(&manager, &tokens(&manager, 1, 3), 0));
    let in_use = fill(&manager, &tokens(&manager, 2, 5), 0);
    ranks.set_all(Mode::Hold);
    let refuse_disk = {
        let ranks = ranks.clone();
        std::thread::spawn(move || {
            ranks.execute(0);
            let to_disk = ranks.next_plan(0);
            ranks.fail(0, &to_disk, 6, FailureKind::Io);
        })
    };
    let report = manager.shutdown(Duration::from_secs(60));
    refuse_disk.join().unwrap();
    assert!(report.drained && report.flush_error.is_none(), "{report:?}");
    assert_eq!(report.not_saved, 2, "block 6 and its child, although in use: {report:?}");
    assert!(!report.is_complete());
    drop(in_use);
}

#[test]
fn after_a_shutdown_nothing_starts() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 32, 0], |config| config.offload.g1_g2.idle_iterations = 1);
    let sequence = tokens(&manager, 1, 4);
    let blocks = fill(&manager, &sequence, 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    drop(blocks);
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    ranks.set_all(Mode::Hold);
    let busy: Vec<_> = (2..=11).map(|start| fill(&manager, &tokens(&manager, start, 1), 0)).collect();
    for blocks in &busy {
        manager.offload(blocks, Tier::G2).unwrap();
    }
    ranks.wait_held(0, 8);
    assert_eq!(ranks.held(0), 8, "two wait for their turn");
    let report = manager.shutdown(Duration::from_millis(20));
    assert!(!report.drained && manager.status().shut_down);
    assert_eq!(manager.metrics().path(Path::G1_G2).dropped(DropReason::ShuttingDown).get(), 2);
    for _ in 0..8 {
        ranks.execute(0);
    }
    assert!(manager.wait_offloads(soon()));
    assert_eq!(ranks.held(0), 0, "what waited was let go");

    assert_eq!(manager.offload(&busy[0], Tier::G2), Err(OffloadError::ShuttingDown));
    let error = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap_err();
    assert_eq!(error.failures[0].failure.kind, FailureKind::ShuttingDown);
    let (_, partial) = manager.commit(manager.allocate(2).unwrap(), &tokens(&manager, 20, 1), 0).unwrap();
    let rejected = manager.park(partial).unwrap_err();
    assert!(matches!(rejected.error, ParkError::ShuttingDown) && rejected.blocks.is_some());
    drop(fill(&manager, &tokens(&manager, 21, 1), 0));
    for _ in 0..10 {
        manager.step();
    }
    assert_eq!(ranks.held(0), 0);
}

#[test]
fn an_engine_that_was_shut_down_starts_nothing_either() {
    let ranks = Ranks::new(1);
    let builder = kvbm::KvBlockManager::<kvbm::Owned>::builder().model(model()).namespace(namespace());
    let builder = builder.engine_blocks(8).host(kvbm::config::Blocks(8));
    let manager = builder.build_with_workers(|rank, epoch, sink| ranks.connect(rank, epoch, sink)).unwrap();
    let sequence = manager.sequence(&[7; 32], b"").unwrap();
    assert!(manager.shutdown(Duration::from_secs(60)).is_complete());
    let ids = [kvbm::BlockId(0), kvbm::BlockId(1)];
    assert!(matches!(manager.offload(&ids, &sequence, 0, None), Err(EngineError::ShuttingDown)));
    let prefix = manager.match_prefix(&sequence);
    assert!(matches!(manager.onboard(prefix, &[], None), Err(EngineError::ShuttingDown)));
}
