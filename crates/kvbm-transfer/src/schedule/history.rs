//! Which plans are known, and their reports while these are kept: a repeated plan is answered,
//! never executed again.

use kvbm_plan::{PlanId, TransferReport};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Plan ids that are remembered: eight seconds at 1,000 plans a second, and eight times the plans
/// that a path queues by default. A plan that waits or runs is known beside these.
pub(crate) const MAX_PLANS: usize = 8192;
/// Block outcomes in the reports that are kept.
pub(crate) const MAX_BLOCKS: usize = 65_536;

/// A finished plan.
pub(crate) struct Finished {
    /// Whether every block arrived.
    pub(crate) ok: bool,
    /// The report, while it is kept.
    pub(crate) report: Option<Arc<TransferReport>>,
}

/// What is remembered about a plan id.
pub(crate) enum Known<'a> {
    /// Never seen.
    New,
    /// Finished.
    Finished(&'a Finished),
    /// Perhaps seen: older than everything that is remembered.
    TooOld,
}

/// Finished plans, newest last. Memory is bounded by [`MAX_PLANS`] and [`MAX_BLOCKS`].
#[derive(Default)]
pub(crate) struct History {
    plans: HashMap<PlanId, Finished>,
    order: VecDeque<PlanId>,
    /// Plans at the front of `order` whose reports are gone.
    bare: usize,
    kept_blocks: usize,
    /// Largest id that was forgotten.
    floor: Option<PlanId>,
}

impl History {
    pub(crate) fn get(&self, plan_id: PlanId) -> Known<'_> {
        match self.plans.get(&plan_id) {
            Some(finished) => Known::Finished(finished),
            None if self.floor.is_some_and(|floor| plan_id <= floor) => Known::TooOld,
            None => Known::New,
        }
    }

    pub(crate) fn insert(&mut self, report: Arc<TransferReport>) {
        let plan_id = report.plan_id;
        let ok = report.blocks.iter().all(kvbm_plan::BlockOutcome::is_done);
        self.kept_blocks += report.blocks.len();
        self.plans.insert(plan_id, Finished { ok, report: Some(report) });
        self.order.push_back(plan_id);
        while self.kept_blocks > MAX_BLOCKS && self.bare + 1 < self.order.len() {
            self.drop_oldest_report();
        }
        while self.order.len() > MAX_PLANS {
            if self.bare == 0 {
                self.drop_oldest_report();
            }
            self.bare -= 1;
            if let Some(oldest) = self.order.pop_front() {
                self.plans.remove(&oldest);
                self.floor = self.floor.max(Some(oldest));
            }
        }
    }

    fn drop_oldest_report(&mut self) {
        let report = self
            .order
            .get(self.bare)
            .and_then(|plan| self.plans.get_mut(plan))
            .and_then(|plan| plan.report.take());
        self.kept_blocks -= report.map_or(0, |report| report.blocks.len());
        self.bare += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockOutcome, Epoch, Path, Rank};

    fn report(plan: u64, blocks: usize) -> Arc<TransferReport> {
        Arc::new(TransferReport {
            plan_id: PlanId(plan),
            epoch: Epoch(1),
            rank: Rank(0),
            path: Path::G1_G2,
            blocks: vec![BlockOutcome::Done { checksum: plan }; blocks],
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
        })
    }

    #[test]
    fn reports_are_dropped_before_ids_and_ids_before_memory_grows() {
        let mut history = History::default();
        for plan in 0..20 {
            history.insert(report(plan, 4096));
        }
        assert!(history.kept_blocks <= MAX_BLOCKS);
        assert!(matches!(history.get(PlanId(0)), Known::Finished(Finished { ok: true, report: None })));
        assert!(matches!(history.get(PlanId(19)), Known::Finished(Finished { report: Some(_), .. })));
        assert!(matches!(history.get(PlanId(20)), Known::New));
        for plan in 20..20 + MAX_PLANS as u64 {
            history.insert(report(plan, 1));
        }
        assert_eq!(history.plans.len(), MAX_PLANS);
        assert!(matches!(history.get(PlanId(19)), Known::TooOld));
        assert!(matches!(history.get(PlanId(20)), Known::Finished(_)));
    }
}
