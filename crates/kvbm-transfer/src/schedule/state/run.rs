//! Gives blocks to executors and takes their outcomes.

use super::{State, index_of};
use crate::schedule::job::{Job, Portion};
use kvbm_plan::{BlockOutcome, Path, PlanId, Tier, TransferPlan, TransferReport};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Paths that go first where they share a resource with path `index`: disk reads before disk
/// writes.
fn goes_before(index: usize) -> &'static [Path] {
    if Path::ALL[index].dst == Tier::G3 { &[Path::G3_G2, Path::G3_G1] } else { &[] }
}

impl State {
    /// Blocks of the plan that is first on `path`, of those that there is `room` for: how many of a
    /// plan, and of any other of its volume, there is. `busy` says whether the caller has blocks in
    /// flight: then it gets nothing while a path that goes before it has plans to issue.
    pub(crate) fn take(
        &mut self,
        path: Path,
        busy: bool,
        room: impl Fn(&TransferPlan) -> usize,
        now: Instant,
    ) -> Option<Portion> {
        let index = index_of(path)?;
        let portion = self.next_portion(index, busy, room, now);
        self.hungry[index] |= portion.is_none();
        portion
    }

    fn next_portion(
        &mut self,
        index: usize,
        busy: bool,
        room: impl Fn(&TransferPlan) -> usize,
        now: Instant,
    ) -> Option<Portion> {
        if busy && self.must_yield(index) {
            self.yielded[index] = true;
            return None;
        }
        loop {
            let room = |plan_id: PlanId| self.jobs.get(&plan_id).map_or(0, |job| room(&job.plan));
            let (plan_id, limit) = self.queues[index].next(room)?;
            let job = self.jobs.get_mut(&plan_id)?;
            if job.deadline.is_some_and(|deadline| deadline <= now) {
                self.expire(now);
                continue;
            }
            let indices = job.take(limit);
            let plan = Arc::clone(&job.plan);
            let (issued, seq, first, deadline) =
                (job.is_issued(), job.seq, job.started.is_none(), job.deadline);
            if first {
                job.started = Some(now);
                self.queues[index].leaves(&plan);
                self.queues[index].stats.running_plans += 1;
            }
            if issued {
                self.queues[index].remove(&plan, seq);
                self.wake_followers(index);
            }
            return Some(Portion { plan, indices, deadline });
        }
    }

    fn must_yield(&self, index: usize) -> bool {
        goes_before(index)
            .iter()
            .filter_map(|path| index_of(*path))
            .any(|first| self.queues[first].is_ready())
    }

    /// Lets the paths look again that yielded to path `index`. Others are left asleep: to wake a
    /// thread costs more than to look.
    pub(super) fn wake_followers(&mut self, index: usize) {
        for follower in 0..Path::ALL.len() {
            if self.yielded[follower] && goes_before(follower).contains(&Path::ALL[index]) {
                (self.yielded[follower], self.wake[follower]) = (false, true);
            }
        }
    }

    /// Blocks of a staged path are about to be copied to their destinations: for each whether it
    /// may be. One that may not has failed meanwhile, and its destination is another's by now.
    pub(crate) fn begin_copies(&mut self, plan_id: PlanId, indices: &[u32]) -> Vec<bool> {
        let job = self.jobs.get_mut(&plan_id);
        job.map_or_else(
            || vec![false; indices.len()],
            |job| indices.iter().map(|index| job.begin_copy(*index as usize)).collect(),
        )
    }

    /// Records the results of issued blocks; `bytes` is what arrived.
    pub(crate) fn settle(
        &mut self,
        plan_id: PlanId,
        outcomes: impl IntoIterator<Item = (u32, BlockOutcome)>,
        bytes: u64,
        now: Instant,
    ) {
        let Some(job) = self.jobs.get_mut(&plan_id) else { return };
        for (index, outcome) in outcomes {
            job.settle(index as usize, outcome);
        }
        job.add_bytes(bytes);
        self.close_if_over(plan_id, now);
    }

    pub(super) fn close_if_over(&mut self, plan_id: PlanId, now: Instant) {
        if self.jobs.get(&plan_id).is_some_and(Job::is_over)
            && let Some(job) = self.jobs.remove(&plan_id)
        {
            self.leave_queue(&job);
            self.close_job(job, now);
        }
    }

    /// Takes a job that is over out of everything that knows it.
    fn leave_queue(&mut self, job: &Job) {
        let plan = &job.plan;
        if let Some(deadline) = job.deadline {
            self.deadlines.remove(&(deadline, plan.plan_id));
        }
        if job.gated {
            self.gates.forget(plan.plan_id, plan.gate);
        }
        for before in &plan.after {
            if let Some(waiting) = self.dependents.get_mut(before) {
                waiting.retain(|plan_id| *plan_id != plan.plan_id);
                if waiting.is_empty() {
                    self.dependents.remove(before);
                }
            }
        }
        if let Some(index) = index_of(plan.path()) {
            let queue = &mut self.queues[index];
            if job.started.is_some() {
                queue.stats.running_plans -= 1;
            } else {
                queue.leaves(plan);
            }
        }
    }

    /// Reports a job that is over, remembers it, and notes whom [`State::ripple`] has to tell.
    pub(super) fn close_job(&mut self, job: Job, now: Instant) {
        let plan = Arc::clone(&job.plan);
        let started = job.started.unwrap_or(now);
        let (accepted, bytes) = (job.accepted, job.bytes());
        let (blocks, replies) = job.into_outcomes();
        let report = Arc::new(TransferReport {
            plan_id: plan.plan_id,
            epoch: plan.epoch,
            rank: self.limits.rank,
            path: plan.path(),
            blocks,
            bytes,
            queued_us: micros(started.saturating_duration_since(accepted)),
            busy_us: micros(now.saturating_duration_since(started)),
        });
        self.count(&report);
        self.history.insert(&report);
        self.finished.push(plan.tag, &report);
        self.deliver(&report, replies);
        let ok = report.blocks.iter().all(BlockOutcome::is_done);
        let waiting = self.dependents.remove(&plan.plan_id).unwrap_or_default();
        self.ripple.extend(waiting.into_iter().map(|dependent| (plan.plan_id, ok, dependent)));
    }

    fn count(&mut self, report: &TransferReport) {
        let Some(index) = index_of(report.path) else { return };
        let stats = &mut self.queues[index].stats;
        stats.reports += 1;
        stats.bytes += report.bytes;
        for outcome in &report.blocks {
            match outcome {
                BlockOutcome::Done { .. } => stats.blocks += 1,
                BlockOutcome::Failed(failure) => stats.count_failure(failure.kind),
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
