//! Workers that are about to end and say so.

use crate::support::tokens;
use crate::{put, start};
use kvbm::{FlushError, Tier, WorkerServer};
use std::path::Path;
use std::time::{Duration, Instant};

/// Where it is there, blocks go to disk only when there is a reason.
pub(super) const KEEPS: &str = "keeps";
/// Where it is there, workers leave.
const LEAVE: &str = "leave";
const PATIENCE: Duration = Duration::from_secs(30);

/// What a worker's process does when the file is there.
pub(super) fn leave_when_told(server: &WorkerServer, folder: &Path) {
    while !folder.join(LEAVE).exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(server.leave(PATIENCE), "the leader saves in time");
    (server.stopper())();
}

fn folder_that_keeps() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("disk")).unwrap();
    std::fs::write(folder.path().join(KEEPS), "").unwrap();
    folder
}

/// Mutation that makes it fail: `worker_leaves` dismisses the worker and saves nothing.
#[test]
fn what_workers_hold_is_on_disk_before_they_end() {
    let folder = folder_that_keeps();
    let (manager, mut workers) = start(folder.path());
    let sequence = tokens(&manager, 1, 6);
    put(&manager, &sequence);
    assert_eq!(manager.status().tiers[Tier::G3.index()].inactive, 0, "nothing is on disk yet");
    let began = Instant::now();
    std::fs::write(folder.path().join(LEAVE), "").unwrap();
    workers.wait(0);
    workers.wait(1);
    assert!(began.elapsed() < PATIENCE / 2, "they did not wait for the end of their patience");
    let report = manager.shutdown(Duration::from_secs(10));
    assert!(report.is_complete(), "{report:?}");
    assert_eq!(report.durable_blocks, Some(6));
    drop((manager, workers));
    std::fs::remove_file(folder.path().join(LEAVE)).unwrap();
    let (manager, _workers) = start(folder.path());
    assert_eq!(manager.look_up(&sequence).len(), 6);
    assert_eq!(manager.status().tiers[Tier::G3.index()].inactive, 6);
}

#[test]
fn what_workers_that_are_killed_held_is_counted_as_lost() {
    let folder = folder_that_keeps();
    let (manager, mut workers) = start(folder.path());
    put(&manager, &tokens(&manager, 1, 6));
    manager.flush(Duration::from_secs(10)).unwrap();
    workers.kill(0);
    workers.kill(1);
    let report = manager.shutdown(Duration::from_secs(2));
    assert_eq!((report.not_saved, report.is_complete()), (6, false), "{report:?}");
    drop((manager, workers));

    // What was written and not flushed may be lost too, and the report says so.
    std::fs::remove_file(folder.path().join(KEEPS)).unwrap();
    let (manager, mut workers) = start(folder.path());
    put(&manager, &tokens(&manager, 2, 4));
    workers.kill(1);
    let report = manager.shutdown(Duration::from_secs(5));
    assert!(matches!(report.flush_error, Some(FlushError::Rank { .. })), "{report:?}");
    assert_eq!((report.durable_blocks, report.is_complete()), (None, false), "{report:?}");
}
