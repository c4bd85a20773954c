//! Which end comes first, which comes again, and which is refused.

use crate::echo::{Leader, PATIENCE, Worker, leader_terms, soon};
use kvbm_link::{Lane, LineSendError, LineStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn either_end_may_come_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let leader = Leader::start(&path, leader_terms(1));
    let refused = leader.line.send(Lane::Bulk, b"early").unwrap_err();
    assert!(matches!(refused, LineSendError::Closed { .. }), "{refused}");
    let worker = Worker::start(&path);
    leader.send(b"one");
    leader.send(b"two");
    leader.expect_echoes(&[b"one", b"two"]);
    drop(leader);
    let second = Leader::start(&path, leader_terms(2));
    second.send(b"three");
    second.expect_echoes(&[b"three"]);
    assert_eq!(worker.echo.started.load(Ordering::SeqCst), 2);
    assert_eq!(
        worker.echo.ended.load(Ordering::SeqCst),
        1,
        "the first session ended before the second began"
    );
}

#[test]
fn a_worker_that_comes_again_gets_nothing_that_was_sent_to_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let worker = Worker::start(&path);
    let leader = Leader::start(&path, leader_terms(1));
    leader.send(b"first life");
    leader.expect_echoes(&[b"first life"]);
    drop(worker);
    soon(|| matches!(leader.line.status(), LineStatus::Connecting { .. }).then_some(())).unwrap();
    assert!(leader.line.send(Lane::Bulk, b"lost").is_err());
    let _worker = Worker::start(&path);
    leader.send(b"second life");
    leader.expect_echoes(&[b"first life", b"second life"]);
}

#[test]
fn a_second_leader_and_an_old_one_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    let leader = Leader::start(&path, leader_terms(5));
    leader.send(b"mine");
    leader.expect_echoes(&[b"mine"]);
    let reason = |other: &Leader, part: &str| {
        soon(|| match other.line.status() {
            LineStatus::Connecting { reason } | LineStatus::Refused { reason } if reason.contains(part) => {
                Some(())
            }
            _ => None,
        })
        .unwrap_or_else(|| panic!("{:?}", other.line));
    };
    let second = Leader::start(&path, leader_terms(6));
    reason(&second, "whose session has not ended");
    drop(leader);
    second.send(b"now");
    second.expect_echoes(&[b"now"]);
    drop(second);
    // A leader that comes back after its successor has served.
    let old = Leader::start(&path, leader_terms(5));
    reason(&old, "epoch differs");
}

#[test]
fn a_worker_that_gets_no_command_hangs_up_and_serves_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let worker = Worker::start(&path);
    let leader = Leader::start(&path, leader_terms(1));
    leader.send(b"nonsense");
    soon(|| (worker.echo.started.load(Ordering::SeqCst) == 2).then_some(())).unwrap();
    leader.send(b"sense");
    leader.expect_echoes(&[b"sense"]);
}

#[test]
fn settings_that_differ_are_named_and_a_worker_that_does_not_start_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    let mut terms = leader_terms(1);
    terms.settings[0].value = "3".into();
    let other = Leader::start(&path, terms);
    let differs = "blocks of G1 differs: the leader has 3, the worker has 2";
    soon(|| match other.line.status() {
        LineStatus::Refused { reason } if reason.contains(differs) => Some(()),
        _ => None,
    })
    .unwrap_or_else(|| panic!("{:?}", other.line));
    drop(other);
    // An epoch that the echo does not start in.
    let unlucky = Leader::start(&path, leader_terms(13));
    soon(|| match unlucky.line.status() {
        LineStatus::Connecting { reason } if reason.contains("the disk is in use") => Some(()),
        _ => None,
    })
    .unwrap_or_else(|| panic!("{:?}", unlucky.line));
}

/// What is sent to a worker before it has said that it is ready, the leader could not tell from
/// what its successor was sent.
#[test]
fn a_worker_gets_no_command_before_it_is_ready_not_even_the_first_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    // An epoch in which the echo never says so.
    let leader = Leader::start(&path, leader_terms(14));
    soon(|| matches!(leader.line.status(), LineStatus::Connected { is_open: false, .. }).then_some(()))
        .unwrap();
    let refused = leader.line.send(Lane::Bulk, b"early").unwrap_err();
    assert!(refused.to_string().contains("not ready yet"), "{refused}");
    assert_eq!(leader.echoes(), [[0_u8; 0]; 0]);
}

/// The worker waits for the word of its leader, behind everything that it has sent before.
#[test]
fn a_worker_that_is_about_to_end_waits_until_it_is_dismissed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let worker = Worker::start(&path);
    assert!(worker.listener.leave(PATIENCE), "there is no leader to wait for");
    let leader = Leader::start(&path, leader_terms(1));
    leader.send(b"before");
    leader.expect_echoes(&[b"before"]);
    // It has not asked, so this says nothing to it, nor later.
    leader.line.dismiss();
    let short = Duration::from_millis(50);
    assert!(!worker.listener.leave(short), "the leader said nothing");
    soon(|| (*leader.leaves.lock().unwrap() == [short]).then_some(())).unwrap();
    // It serves on meanwhile.
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| worker.listener.leave(PATIENCE));
        leader.send(b"save this");
        leader.expect_echoes(&[b"before", b"save this"]);
        assert!(!leaving.is_finished());
        leader.line.dismiss();
        assert!(leaving.join().unwrap());
    });
    assert_eq!(leader.leaves.lock().unwrap().len(), 1, "it says so once");
    // A leader that goes is not waited for.
    let second = Worker::start(folder.path().join("rank-1.sock"));
    let leader = Leader::start(folder.path().join("rank-1.sock"), leader_terms(1));
    leader.send(b"x");
    leader.expect_echoes(&[b"x"]);
    std::thread::scope(|scope| {
        let began = Instant::now();
        let leaving = scope.spawn(|| second.listener.leave(PATIENCE));
        soon(|| (leader.leaves.lock().unwrap().len() == 1).then_some(())).unwrap();
        drop(leader);
        assert!(leaving.join().unwrap() && began.elapsed() < PATIENCE / 2);
    });
}
