//! Which plans are known, and their reports while these are kept: a repeated plan is answered,
//! never executed again.
//!
//! Reports are kept in buffers that grow to their bound once. A report for each plan would be two
//! allocations that live for minutes. They lie between those of copies under way, on the heaps of
//! many threads, and keep their pages from going back to the system.

use kvbm_plan::{BlockOutcome, Epoch, Failure, Path, PlanId, Rank, TransferReport};
use std::collections::{HashMap, VecDeque};

/// Plan ids that are remembered: seven seconds at 1,000 plans a second, and nearly seven times the
/// plans that a path queues by default. A plan that waits or runs is known beside these. They are
/// less than half of what a table of 16,384 places takes: such a table is cleaned, not doubled.
pub(crate) const MAX_PLANS: usize = 7000;
/// Block outcomes in the reports that are kept.
pub(crate) const MAX_BLOCKS: usize = 65_536;

/// What is remembered about a plan id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Never seen.
    New,
    /// Finished; `ok` where every block arrived.
    Finished { ok: bool },
    /// Perhaps seen: older than everything that is remembered.
    TooOld,
}

/// A finished plan: its report without the outcomes of its blocks.
struct Finished {
    plan_id: PlanId,
    path: Path,
    /// The place of its first checksum, counted from the first checksum of all.
    first: u64,
    blocks: usize,
    /// Of blocks that did not arrive, by their place in the plan.
    failures: Vec<(usize, Failure)>,
    ok: bool,
    bytes: u64,
    queued_us: u64,
    busy_us: u64,
}

/// Finished plans, newest last. Memory is bounded by [`MAX_PLANS`] and [`MAX_BLOCKS`].
#[derive(Default)]
pub(crate) struct History {
    /// The place of each plan in `plans`, counted from the first plan of all.
    places: HashMap<PlanId, u64>,
    plans: VecDeque<Finished>,
    /// Plans that were forgotten.
    forgotten: u64,
    /// Plans at the front of `plans` whose outcomes are gone.
    bare: usize,
    /// Checksums of the blocks of all plans behind those; 0 for a block that did not arrive.
    checksums: VecDeque<u64>,
    /// Checksums that are gone.
    dropped: u64,
    /// Largest id that was forgotten.
    floor: Option<PlanId>,
}

impl History {
    pub(crate) fn get(&self, plan_id: PlanId) -> Known {
        match self.place(plan_id) {
            Some(place) => Known::Finished { ok: self.plans[place].ok },
            None if self.floor.is_some_and(|floor| plan_id <= floor) => Known::TooOld,
            None => Known::New,
        }
    }

    /// The report of a finished plan, while it is kept.
    pub(crate) fn report(&self, plan_id: PlanId, epoch: Epoch, rank: Rank) -> Option<TransferReport> {
        let place = self.place(plan_id).filter(|place| *place >= self.bare)?;
        let Finished { path, first, blocks, failures, bytes, queued_us, busy_us, .. } = &self.plans[place];
        let first = (first - self.dropped) as usize;
        let checksums = self.checksums.range(first..first + blocks);
        let mut outcomes: Vec<_> = checksums.map(|&checksum| BlockOutcome::Done { checksum }).collect();
        for (block, failure) in failures {
            outcomes[*block] = BlockOutcome::Failed(failure.clone());
        }
        Some(TransferReport {
            plan_id,
            epoch,
            rank,
            path: *path,
            blocks: outcomes,
            bytes: *bytes,
            queued_us: *queued_us,
            busy_us: *busy_us,
        })
    }

    pub(crate) fn insert(&mut self, report: &TransferReport) {
        self.make_room(report.blocks.len());
        let first = self.dropped + self.checksums.len() as u64;
        let mut failures = Vec::new();
        for (block, outcome) in report.blocks.iter().enumerate() {
            self.checksums.push_back(match outcome {
                BlockOutcome::Done { checksum } => *checksum,
                BlockOutcome::Failed(failure) => {
                    failures.push((block, failure.clone()));
                    0
                }
            });
        }
        let TransferReport { plan_id, path, bytes, queued_us, busy_us, .. } = *report;
        self.places.insert(plan_id, self.forgotten + self.plans.len() as u64);
        let (blocks, ok) = (report.blocks.len(), failures.is_empty());
        self.plans.push_back(Finished {
            plan_id,
            path,
            first,
            blocks,
            failures,
            ok,
            bytes,
            queued_us,
            busy_us,
        });
    }

    /// Room for a plan of so many blocks. It is made before the plan comes: a buffer that holds one
    /// more than its bound has twice the capacity.
    fn make_room(&mut self, blocks: usize) {
        while self.checksums.len() + blocks > MAX_BLOCKS && self.bare < self.plans.len() {
            self.drop_oldest_outcomes();
        }
        while self.plans.len() >= MAX_PLANS {
            if self.bare == 0 {
                self.drop_oldest_outcomes();
            }
            self.forget_oldest();
        }
    }

    /// Where `plan_id` lies in `plans`.
    fn place(&self, plan_id: PlanId) -> Option<usize> {
        self.places.get(&plan_id).map(|place| (place - self.forgotten) as usize)
    }

    fn drop_oldest_outcomes(&mut self) {
        if let Some(plan) = self.plans.get_mut(self.bare) {
            self.checksums.drain(..plan.blocks);
            self.dropped += plan.blocks as u64;
            plan.failures = Vec::new();
            self.bare += 1;
        }
    }

    /// The oldest plan has no outcomes any more.
    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.plans.pop_front() {
            self.forgotten += 1;
            self.bare -= 1;
            self.places.remove(&oldest.plan_id);
            self.floor = self.floor.max(Some(oldest.plan_id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::FailureKind;

    const AT: (Epoch, Rank) = (Epoch(1), Rank(0));

    fn report(plan: u64, blocks: usize) -> TransferReport {
        TransferReport {
            plan_id: PlanId(plan),
            epoch: AT.0,
            rank: AT.1,
            path: Path::G1_G2,
            blocks: (0..blocks)
                .map(|block| BlockOutcome::Done { checksum: plan << 32 | block as u64 })
                .collect(),
            bytes: plan + 1,
            queued_us: plan + 2,
            busy_us: plan + 3,
        }
    }

    #[test]
    fn reports_are_dropped_before_ids_and_ids_before_memory_grows() {
        let mut history = History::default();
        let kept = |history: &History, plan: u64| history.report(PlanId(plan), AT.0, AT.1);
        for plan in 0..20 {
            history.insert(&report(plan, 4096));
        }
        assert!(history.checksums.len() <= MAX_BLOCKS);
        assert_eq!(history.get(PlanId(0)), Known::Finished { ok: true });
        assert_eq!(kept(&history, 0), None);
        for plan in 4..20 {
            assert_eq!(kept(&history, plan), Some(report(plan, 4096)));
        }
        assert_eq!((history.get(PlanId(20)), kept(&history, 20)), (Known::New, None));
        for plan in 20..20 + MAX_PLANS as u64 {
            history.insert(&report(plan, 1));
        }
        assert_eq!((history.plans.len(), history.places.len()), (MAX_PLANS, MAX_PLANS));
        assert!(history.plans.capacity() <= 8192 && history.checksums.capacity() <= MAX_BLOCKS);
        assert_eq!(history.get(PlanId(19)), Known::TooOld);
        assert_eq!(history.get(PlanId(20)), Known::Finished { ok: true });
        let mut most = 0;
        for plan in 20 + MAX_PLANS as u64..20 + 16 * MAX_PLANS as u64 {
            history.insert(&report(plan, 1));
            most = most.max(history.places.capacity());
        }
        assert!(most <= 14_336, "room for {most} plans");
        let last = 19 + 16 * MAX_PLANS as u64;
        assert_eq!(kept(&history, last), Some(report(last, 1)));
        let first = last + 1 - MAX_PLANS as u64;
        assert_eq!(kept(&history, first), Some(report(first, 1)));
        assert_eq!(history.get(PlanId(first - 1)), Known::TooOld);
    }

    #[test]
    fn a_report_comes_back_with_every_failure_in_its_place() {
        let mut history = History::default();
        history.insert(&report(1, 3));
        let mut failed = report(2, 4);
        failed.blocks[0] = BlockOutcome::Failed(Failure::new(FailureKind::Io, "planted"));
        failed.blocks[3] = BlockOutcome::Failed(Failure::new(FailureKind::Missing, "gone"));
        history.insert(&failed);
        history.insert(&report(3, 0));
        assert_eq!(history.get(PlanId(2)), Known::Finished { ok: false });
        assert_eq!(history.get(PlanId(3)), Known::Finished { ok: true });
        assert_eq!(history.report(PlanId(2), AT.0, AT.1), Some(failed));
        assert_eq!(history.report(PlanId(3), AT.0, AT.1), Some(report(3, 0)));
        // A plan of more blocks than are kept has its report until the next one.
        history.insert(&report(4, MAX_BLOCKS + 1));
        assert_eq!(history.report(PlanId(4), AT.0, AT.1), Some(report(4, MAX_BLOCKS + 1)));
        history.insert(&report(5, 1));
        assert_eq!(history.report(PlanId(4), AT.0, AT.1), None);
        assert_eq!(history.report(PlanId(5), AT.0, AT.1), Some(report(5, 1)));
    }
}
