//! One accepted plan until its report.

use crate::report_slot::ReportSlot;
use kvbm_plan::{BlockOutcome, Failure, FailureKind, Tier, TransferPlan};
use std::sync::Arc;
use std::time::Instant;

/// Who gets the report of a plan.
#[derive(Default)]
pub(crate) struct Replies {
    /// Times that the sink gets it: once per submission.
    pub(crate) sink: u32,
    /// Handles that get it.
    pub(crate) handles: Vec<Arc<ReportSlot>>,
}

/// Blocks of one plan, for an executor.
#[derive(Clone, Debug)]
pub(crate) struct Portion {
    /// The plan.
    pub(crate) plan: Arc<TransferPlan>,
    /// Indices in its `blocks`.
    pub(crate) indices: Vec<u32>,
    /// Work that has not reached the hardware by then fails.
    pub(crate) deadline: Option<Instant>,
}

/// An accepted plan. It is *queued* until its first block is issued, then *started*.
pub(crate) struct Job {
    pub(crate) plan: Arc<TransferPlan>,
    pub(crate) replies: Replies,
    /// Order of arrival.
    pub(crate) seq: u64,
    pub(crate) accepted: Instant,
    pub(crate) deadline: Option<Instant>,
    /// Whether its gate is still shut.
    pub(crate) gated: bool,
    /// Predecessors that are not finished.
    pub(crate) predecessors: usize,
    /// When its first block was issued.
    pub(crate) started: Option<Instant>,
    outcomes: Vec<Option<BlockOutcome>>,
    /// Of a staged path: blocks whose copy out of the staging ring has begun. The others have not
    /// touched the destination, whatever became of their reads.
    copying: Vec<bool>,
    open: usize,
    next: usize,
    bytes: u64,
}

impl Job {
    pub(crate) fn new(
        plan: Arc<TransferPlan>,
        seq: u64,
        accepted: Instant,
        deadline: Option<Instant>,
    ) -> Self {
        let blocks = plan.blocks.len();
        Self {
            plan,
            replies: Replies::default(),
            seq,
            accepted,
            deadline,
            gated: false,
            predecessors: 0,
            started: None,
            outcomes: vec![None; blocks],
            copying: vec![false; blocks],
            open: blocks,
            next: 0,
            bytes: 0,
        }
    }

    /// Whether its blocks are read into a staging ring first, and copied from there.
    pub(crate) fn is_staged(&self) -> bool {
        let path = self.plan.path();
        path.dst == Tier::G1 && matches!(path.src, Tier::G3 | Tier::G4)
    }

    /// The copy of a block out of the staging ring is about to begin. `false` where the block has
    /// its outcome already: then nothing may be copied.
    pub(crate) fn begin_copy(&mut self, index: usize) -> bool {
        let is_open = self.outcomes.get(index).is_some_and(Option::is_none);
        if let Some(copying) = self.copying.get_mut(index).filter(|_| is_open) {
            *copying = true;
        }
        is_open
    }

    /// Whether an executor may take blocks of it.
    pub(crate) fn is_ready(&self) -> bool {
        !self.gated && self.predecessors == 0
    }

    /// Whether every block has its outcome.
    pub(crate) fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Whether every block was issued or has its outcome.
    pub(crate) fn is_issued(&self) -> bool {
        self.next == self.outcomes.len()
    }

    /// Up to `limit` blocks that were not issued yet.
    pub(crate) fn take(&mut self, limit: usize) -> Vec<u32> {
        let mut indices = Vec::with_capacity(limit.min(self.outcomes.len() - self.next));
        while indices.len() < limit && self.next < self.outcomes.len() {
            if self.outcomes[self.next].is_none() {
                indices.push(self.next as u32);
            }
            self.next += 1;
        }
        while self.outcomes.get(self.next).is_some_and(Option::is_some) {
            self.next += 1;
        }
        indices
    }

    /// Records the outcome of block `index`. The first outcome counts; whether it was the first.
    pub(crate) fn settle(&mut self, index: usize, outcome: BlockOutcome) -> bool {
        match self.outcomes.get_mut(index) {
            Some(slot @ None) => {
                *slot = Some(outcome);
                self.open -= 1;
                true
            }
            _ => false,
        }
    }

    /// Fails every block that was not issued, and of a staged path every block whose last copy has
    /// not begun: the destination is not touched any more.
    pub(crate) fn fail_untouched(&mut self, kind: FailureKind, detail: &str) {
        let first = if self.is_staged() { 0 } else { self.next };
        for index in first..self.outcomes.len() {
            if !self.copying[index] {
                self.settle(index, BlockOutcome::Failed(Failure::new(kind, detail)));
            }
        }
        self.next = self.outcomes.len();
    }

    pub(crate) fn add_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The outcomes, in order, of a job that is over.
    pub(crate) fn into_outcomes(self) -> (Vec<BlockOutcome>, Replies) {
        let lost =
            || BlockOutcome::Failed(Failure::new(FailureKind::Device, "the worker lost the block's outcome"));
        (self.outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect(), self.replies)
    }
}
