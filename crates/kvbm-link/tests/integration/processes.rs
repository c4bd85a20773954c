//! A worker in another process, which is killed and stopped. It is this test program, started anew.

use crate::echo::{Echo, Leader, PATIENCE, TIMES, leader_terms, soon, worker_terms};
use kvbm_link::{
    Lane, LineSendError, LineStatus, PeerId, ProcessState, Service, WorkerAddress, WorkerListener,
};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Set in a process that is a worker: its socket.
const WORKER: &str = "KVBM_TEST_LINK_WORKER";

/// Not a test but a worker, where the variable says so.
#[test]
fn worker_process() {
    let Ok(path) = std::env::var(WORKER) else { return };
    let listener = WorkerListener::bind(Path::new(&path), worker_terms(), TIMES).unwrap();
    assert_eq!(*listener.address(), WorkerAddress::from(&path));
    let service: Arc<dyn Service> = Arc::new(Echo::default());
    listener.serve(&service);
}

/// A worker's process; it ends with this.
pub(crate) struct Process(Child);

impl Process {
    /// `value` says where it listens, in the variable that starts the worker of a kind.
    pub(crate) fn of(test: &str, variable: &str, value: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--test-threads", "1"]).env(variable, value);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn start(path: &Path) -> Self {
        Self::of("processes::worker_process", WORKER, path)
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_killed_worker_is_noticed_at_once_and_its_successor_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let leader = Leader::start(&path, leader_terms(1));
    for round in 0..5 {
        let process = Process::start(&path);
        leader.send(&[round]);
        soon(|| (leader.echoes().len() > round as usize).then_some(())).unwrap();
        let LineStatus::Connected { peer, .. } = leader.line.status() else { panic!("{:?}", leader.line) };
        assert_eq!(peer, PeerId::Process(process.0.id().cast_signed()));
        drop(process);
        let start = Instant::now();
        soon(|| matches!(leader.line.status(), LineStatus::Connecting { .. }).then_some(())).unwrap();
        assert!(start.elapsed() < PATIENCE / 2, "the kernel says when a process is gone");
    }
    assert_eq!(leader.echoes(), [[0], [1], [2], [3], [4]]);
    assert_eq!(*leader.ended.lock().unwrap(), [ProcessState::Ended; 5]);
}

#[test]
fn a_stopped_worker_is_silent_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let leader = Leader::start(&path, leader_terms(1));
    let process = Process::start(&path);
    leader.send(b"before");
    leader.expect_echoes(&[b"before"]);
    process.signal("-STOP");
    let refused = soon(|| leader.line.send(Lane::Bulk, b"x").err()).unwrap();
    assert!(matches!(refused, LineSendError::Silent { .. }), "{refused}");
    assert!(matches!(leader.line.status(), LineStatus::Connected { .. }), "a timeout alone ends no life");
    process.signal("-CONT");
    soon(|| leader.line.send(Lane::Bulk, b"after").ok()).unwrap();
    soon(|| (leader.echoes().last().map(Vec::as_slice) == Some(b"after")).then_some(())).unwrap();
}
