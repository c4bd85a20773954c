//! What a worker has done so far, for metrics.

use kvbm_plan::{FailureKind, Path};

/// Counters of one path. All but `queued` and `running` only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// The path.
    pub path: Path,
    /// Plans accepted and not started.
    pub queued_plans: usize,
    /// Their blocks.
    pub queued_blocks: usize,
    /// Plans started and not reported.
    pub running_plans: usize,
    /// Reports made, refusals included.
    pub reports: u64,
    /// Blocks that arrived.
    pub blocks: u64,
    /// Bytes that arrived.
    pub bytes: u64,
    /// Blocks that did not, in the order of [`FailureKind::ALL`].
    pub failures: [u64; FailureKind::ALL.len()],
}

impl PathStats {
    pub(crate) const fn new(path: Path) -> Self {
        Self {
            path,
            queued_plans: 0,
            queued_blocks: 0,
            running_plans: 0,
            reports: 0,
            blocks: 0,
            bytes: 0,
            failures: [0; FailureKind::ALL.len()],
        }
    }

    /// Blocks that failed for this reason.
    pub fn failed(&self, kind: FailureKind) -> u64 {
        FailureKind::ALL.iter().position(|known| *known == kind).map_or(0, |index| self.failures[index])
    }

    pub(crate) fn count_failure(&mut self, kind: FailureKind) {
        if let Some(index) = FailureKind::ALL.iter().position(|known| *known == kind) {
            self.failures[index] += 1;
        }
    }
}

/// A snapshot of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStats {
    /// One entry per path of [`Path::ALL`], in that order.
    pub paths: [PathStats; Path::ALL.len()],
    /// Reports and messages that wait for the sink.
    pub outgoing: usize,
    /// Host blocks whose bytes were compared with their checksum before they were sent on.
    pub host_verified: u64,
    /// Finished plans with a tag that nobody took in time.
    pub finished_dropped: u64,
    /// Times that the sink panicked; the message was lost to it.
    pub sink_panics: u64,
}

impl WorkerStats {
    /// The counters of `path`, if it is one of [`Path::ALL`].
    pub fn path(&self, path: Path) -> Option<&PathStats> {
        self.paths.iter().find(|stats| stats.path == path)
    }
}
