//! Finished plans that somebody on this side of the line wants to know of: those with a tag.

use kvbm_plan::{BlockOutcome, Path, PlanId, TransferReport};
use std::collections::VecDeque;

/// Finished plans that are kept until they are taken. An engine takes them each step.
pub(crate) const MAX_FINISHED: usize = 4_096;

/// A plan with a tag, that is over on this rank: nothing of it touches the memory of its blocks any
/// more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedPlan {
    /// The plan's tag. The leader may have made several plans with it.
    pub tag: u64,
    /// The plan.
    pub plan_id: PlanId,
    /// Its path.
    pub path: Path,
    /// Blocks that arrived on this rank.
    pub arrived: usize,
    /// Blocks that did not.
    pub failed: usize,
}

/// Those that nobody has taken, oldest first.
#[derive(Default)]
pub(crate) struct FinishedPlans {
    plans: VecDeque<FinishedPlan>,
    /// Dropped because nobody took them.
    pub(crate) dropped: u64,
}

impl FinishedPlans {
    pub(crate) fn push(&mut self, tag: u64, report: &TransferReport) {
        if tag == 0 {
            return;
        }
        if self.plans.len() == MAX_FINISHED {
            self.plans.pop_front();
            self.dropped += 1;
        }
        let arrived = report.blocks.iter().filter(|outcome| BlockOutcome::is_done(outcome)).count();
        let (plan_id, path, failed) = (report.plan_id, report.path, report.blocks.len() - arrived);
        self.plans.push_back(FinishedPlan { tag, plan_id, path, arrived, failed });
    }

    pub(crate) fn drain(&mut self) -> Vec<FinishedPlan> {
        self.plans.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{Epoch, Failure, FailureKind, Rank};

    #[test]
    fn plans_with_a_tag_are_kept_up_to_the_bound() {
        let failed = BlockOutcome::Failed(Failure::new(FailureKind::Io, "planted"));
        let report = |plan: u64| TransferReport {
            plan_id: PlanId(plan),
            epoch: Epoch(1),
            rank: Rank(0),
            path: Path::G2_G1,
            blocks: vec![BlockOutcome::Done { checksum: 1 }, failed.clone()],
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
        };
        let mut finished = FinishedPlans::default();
        finished.push(0, &report(1));
        finished.push(7, &report(2));
        let path = Path::G2_G1;
        assert_eq!(
            finished.drain(),
            [FinishedPlan { tag: 7, plan_id: PlanId(2), path, arrived: 1, failed: 1 }]
        );
        for plan in 0..MAX_FINISHED as u64 + 3 {
            finished.push(1, &report(plan));
        }
        assert_eq!(finished.dropped, 3);
        let left = finished.drain();
        assert_eq!((left.len(), left[0].plan_id), (MAX_FINISHED, PlanId(3)));
    }
}
