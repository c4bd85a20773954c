//! The bounded queue of one path.

use crate::stats::PathStats;
use kvbm_plan::{Path, PlanId, Priority};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Bounds of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathLimits {
    /// Plans that may be queued.
    pub(crate) plans: usize,
    /// Blocks that may be queued.
    pub(crate) blocks: usize,
}

/// Place in the order of a queue: priority first, then arrival.
type Place = (Reverse<Priority>, u64, PlanId);

/// Plans of one path that may be issued, and the path's counters. Plans behind a gate are counted, not listed.
pub(crate) struct PathQueue {
    /// Bounds; `None` where this worker does not have the path, with the reason.
    pub(crate) limits: Result<PathLimits, String>,
    pub(crate) stats: PathStats,
    ready: BTreeSet<Place>,
}

impl PathQueue {
    pub(crate) fn new(path: Path, limits: Result<PathLimits, String>) -> Self {
        Self { limits, stats: PathStats::new(path), ready: BTreeSet::new() }
    }

    /// Whether a plan of `blocks` blocks still fits. Text for the report if not.
    pub(crate) fn check_room(&self, blocks: usize) -> Result<(), String> {
        let Ok(limits) = &self.limits else { return Ok(()) };
        let PathStats { path, queued_plans, queued_blocks, .. } = self.stats;
        if queued_plans >= limits.plans {
            return Err(format!(
                "queue of path {path} holds {queued_plans} plans of at most {}",
                limits.plans
            ));
        }
        if queued_blocks + blocks > limits.blocks {
            return Err(format!(
                "queue of path {path} holds {queued_blocks} blocks of at most {}, {blocks} more do not fit",
                limits.blocks
            ));
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, priority: Priority, seq: u64, plan: PlanId) {
        self.ready.insert((Reverse(priority), seq, plan));
    }

    pub(crate) fn remove(&mut self, priority: Priority, seq: u64, plan: PlanId) {
        self.ready.remove(&(Reverse(priority), seq, plan));
    }

    /// The plan to issue next.
    pub(crate) fn first(&self) -> Option<PlanId> {
        self.ready().next()
    }

    /// The plans, in the order in which they are to be issued.
    pub(crate) fn ready(&self) -> impl Iterator<Item = PlanId> + '_ {
        self.ready.iter().map(|(_, _, plan)| *plan)
    }
}
