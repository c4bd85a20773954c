//! Ends of waits: the model's progress, events, predecessors, cancellation, deadlines, closing.

use super::{State, index_of};
use crate::schedule::gates::point;
use crate::schedule::job::Job;
use kvbm_plan::{Failure, FailureKind, Path, PlanId, Tier};
use std::time::{Duration, Instant};

/// Who cancels a plan so shortly before its budget is over does so for that: a caller's clock runs
/// from before the plan was sent.
const LAST_MOMENT: Duration = Duration::from_millis(5);

impl State {
    /// The model got there.
    pub(crate) fn advance(&mut self, iteration: u64, layer: Option<u32>) {
        for plan_id in self.gates.advance(point(iteration, layer)) {
            self.open_gate(plan_id);
        }
    }

    fn open_gate(&mut self, plan_id: PlanId) {
        if let Some(job) = self.jobs.get_mut(&plan_id) {
            job.gated = false;
            if job.is_ready() {
                self.enqueue(plan_id);
            }
        }
    }

    /// Registers a device event; the generation goes back into [`State::event_over`].
    pub(crate) fn register_event(&mut self, id: u64, now: Instant) -> u64 {
        let (generation, lost) = self.gates.register_event(id);
        for plan_id in lost {
            let detail =
                "its gate event was forgotten: too many later events were registered while it was pending";
            self.fail(plan_id, FailureKind::Device, detail, now);
        }
        generation
    }

    /// A registered event completed or failed.
    pub(crate) fn event_over(&mut self, id: u64, generation: u64, result: Result<(), String>, now: Instant) {
        let failure = result.as_ref().err().map(|reason| event_failure(id, reason));
        for plan_id in self.gates.finish_event(id, generation, result) {
            match &failure {
                None => self.open_gate(plan_id),
                Some(Failure { kind, detail }) => self.fail(plan_id, *kind, detail, now),
            }
        }
    }

    /// Drops a plan that has not started, and of one on a staged path the blocks whose last copy
    /// has not begun. One whose budget is over says what it waited for, whoever saw that first.
    pub(crate) fn cancel(&mut self, plan_id: PlanId, now: Instant) {
        let may_end = |job: &&Job| job.started.is_none() || job.is_staged();
        let Some(job) = self.jobs.get(&plan_id).filter(may_end) else { return };
        let is_over =
            job.deadline.is_some_and(|deadline| deadline <= kvbm_plan::deadline_after(now, LAST_MOMENT));
        let (kind, detail) = if is_over {
            expired(job, now)
        } else {
            (FailureKind::Cancelled, "cancelled before it was copied".to_owned())
        };
        self.fail(plan_id, kind, &detail, now);
    }

    /// Fails what is still queued after its budget; of started plans, the blocks that were not
    /// issued, and on a staged path those whose last copy has not begun.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some(&(deadline, plan_id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            let Some(job) = self.jobs.get(&plan_id) else { continue };
            let (kind, detail) = expired(job, now);
            self.fail(plan_id, kind, &detail, now);
        }
    }

    /// When [`State::expire`] has something to do.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Takes no more plans and fails those that have not started.
    pub(crate) fn close(&mut self, now: Instant) {
        self.closing = true;
        let queued: Vec<PlanId> =
            self.jobs.iter().filter(|(_, job)| job.started.is_none()).map(|(plan_id, _)| *plan_id).collect();
        for plan_id in queued {
            self.fail(
                plan_id,
                FailureKind::ShuttingDown,
                "the worker shut down before the plan started",
                now,
            );
        }
        self.wake = [true; Path::ALL.len()];
    }

    /// `path` has lost an executor: nothing more is issued there.
    pub(crate) fn retire(&mut self, path: Path, now: Instant) {
        let reason = "its executor failed; restart the worker";
        if let Some(index) = index_of(path) {
            self.queues[index].limits = Err(reason.to_owned());
        }
        let stuck: Vec<PlanId> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.plan.path() == path)
            .map(|(plan_id, _)| *plan_id)
            .collect();
        for plan_id in stuck {
            self.fail(plan_id, FailureKind::Unsupported, &format!("path {path}: {reason}"), now);
        }
    }

    /// Fails every block of a plan that was not issued, and on a staged path every block whose last
    /// copy has not begun.
    pub(super) fn fail(&mut self, plan_id: PlanId, kind: FailureKind, detail: &str, now: Instant) {
        let Some(job) = self.jobs.get_mut(&plan_id) else { return };
        job.fail_untouched(kind, detail);
        if let Some(index) = index_of(job.plan.path()) {
            self.queues[index].remove(&job.plan, job.seq);
            self.wake_followers(index);
        }
        self.close_if_over(plan_id, now);
    }

    /// Tells plans whose predecessors are over, and those that wait for them: a loop, because
    /// chains are long. The owner of the state calls it before it lets go of the lock.
    pub(crate) fn ripple(&mut self, now: Instant) {
        while let Some((before, ok, dependent)) = self.ripple.pop_front() {
            if ok {
                self.predecessor_over(dependent);
            } else {
                self.fail(dependent, FailureKind::Predecessor, &format!("plan {before} failed"), now);
            }
        }
    }

    fn predecessor_over(&mut self, plan_id: PlanId) {
        if let Some(job) = self.jobs.get_mut(&plan_id) {
            job.predecessors = job.predecessors.saturating_sub(1);
            if job.is_ready() {
                self.enqueue(plan_id);
            }
        }
    }
}

/// What a plan has waited for until its budget was over.
fn expired(job: &Job, now: Instant) -> (FailureKind, String) {
    let budget = Duration::from_millis(u64::from(job.plan.budget_ms));
    // A disk that was asked in the last moment cannot be blamed. Whether a volume was asked is not
    // known here: its threads may all wait for other calls.
    let started = job.started.filter(|_| job.is_staged() && job.plan.path().src == Tier::G3);
    let was_asked = started.is_some_and(|started| now.saturating_duration_since(started) >= budget / 2);
    let (kind, waited) = if was_asked {
        (FailureKind::Deadline, "its source did not answer in time")
    } else if job.gated {
        (FailureKind::GateShut, "its gate is shut")
    } else if job.predecessors > 0 {
        (FailureKind::GateShut, "a predecessor is not over")
    } else {
        (FailureKind::PathBusy, "its path is busy")
    };
    let (budget, path) = (job.plan.budget_ms, job.plan.path());
    (kind, format!("budget of {budget} ms ran out on path {path} ({waited})"))
}

pub(super) fn event_failure(id: u64, reason: &str) -> Failure {
    Failure::new(
        FailureKind::Device,
        format!("gate event {id} failed, so the source may never have been written: {reason}"),
    )
}
