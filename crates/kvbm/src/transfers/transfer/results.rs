//! What ranks said of the stores that a transfer copied from or to.

use crate::circuit_breaker::RequestResults;
use kvbm_plan::{Failure, FailureKind, Path, Tier};

/// What the ranks themselves said of the stores that they copied from or to, whatever became of the
/// transfer.
#[derive(Debug, Default)]
pub(crate) struct RankResults {
    pub(crate) disk: DiskResults,
    pub(crate) volume: RequestResults,
    /// Blocks that could not be written to G3.
    pub(crate) unwritten: Vec<usize>,
}

/// What ranks said of reads from G3. Blocks are indices in `moves`.
#[derive(Debug, Default)]
pub(crate) struct DiskResults {
    pub(crate) blocks: Vec<(usize, Option<Failure>)>,
    /// Blocks that a disk was asked for in time and did not serve before the transfer was late.
    pub(crate) late_blocks: Vec<usize>,
    pub(crate) late: Option<Failure>,
}

impl DiskResults {
    pub(crate) fn are_conclusive(&self) -> bool {
        !self.blocks.is_empty() || self.late.is_some()
    }

    /// A plan took so long that its disk counts as late: the disks of the blocks that failed, or of
    /// all where none did.
    pub(super) fn add_late(&mut self, first: usize, failures: &[Option<Failure>], late: Failure) {
        let failed = (first..).zip(failures).filter(|(_, failure)| failure.is_some()).map(|(at, _)| at);
        let before = self.late_blocks.len();
        self.late_blocks.extend(failed);
        if self.late_blocks.len() == before {
            self.late_blocks.extend(first..first + failures.len());
        }
        self.late = Some(late);
    }
}

impl RankResults {
    pub(super) fn add(&mut self, path: Path, first: usize, blocks: &[Option<Failure>]) {
        for (index, block) in (first..).zip(blocks) {
            if path.src == Tier::G3 {
                self.disk.blocks.push((index, block.clone()));
            }
            if path.src == Tier::G4 || path.dst == Tier::G4 {
                self.volume.add(block.as_ref());
            }
            if path.dst == Tier::G3 && block.as_ref().is_some_and(|failure| failure.kind == FailureKind::Io) {
                self.unwritten.push(index);
            }
        }
    }
}
