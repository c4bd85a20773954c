//! Processes of this binary that are workers or leaders.

use super::{RANKS, WORKER};
use crate::support::soon;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process of this binary that plays a part.
pub(super) struct Process(Child);

impl Process {
    pub(super) fn start(test: &str, variable: &str, value: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--test-threads", "1"]).env(variable, value);
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    pub(super) fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.0.id().cast_signed(), signal) }, 0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The workers' processes; they end with the test, however it ends.
pub(super) struct Processes {
    folder: PathBuf,
    ranks: Vec<Option<Process>>,
}

impl Processes {
    pub(super) fn start_all(folder: &Path) -> Self {
        let ranks = (0..RANKS).map(|_| None).collect();
        let mut processes = Self { folder: folder.to_owned(), ranks };
        (0..RANKS as usize).for_each(|rank| processes.start(rank));
        processes
    }

    pub(super) fn start(&mut self, rank: usize) {
        let line = format!("{} {rank}", self.folder.display());
        self.ranks[rank] = Some(Process::start("worker_process", WORKER, &line));
    }

    pub(super) fn kill(&mut self, rank: usize) {
        self.ranks[rank] = None;
    }

    /// Waits until a process has ended by itself.
    pub(super) fn wait(&mut self, rank: usize) {
        let Process(child) = self.ranks[rank].as_mut().unwrap();
        let until = soon();
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the process ends");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops a process, and waits until each of its threads stands.
    pub(super) fn stop(&self, rank: usize) {
        self.signal(rank, libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.ranks[rank].as_ref().unwrap().0.id());
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        let until = soon();
        while !std::fs::read_dir(&tasks).unwrap().all(stands) {
            assert!(Instant::now() < until, "the process stops");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn signal(&self, rank: usize, signal: i32) {
        self.ranks[rank].as_ref().unwrap().signal(signal);
    }
}
