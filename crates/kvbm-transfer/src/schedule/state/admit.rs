//! Admits plans: some are answered at once, some wait.

use super::waits::event_failure;
use super::{GroupLimits, Reply, State, index_of};
use crate::error::SubmitError;
use crate::schedule::gates::{EventState, point};
use crate::schedule::history::Known;
use crate::schedule::job::{Job, Replies};
use kvbm_plan::{
    BlockOutcome, Endpoint, Failure, FailureKind, Gate, PlanId, Tier, TransferPlan, deadline_after,
};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl State {
    /// Takes a plan in, or answers it at once. Every `Ok` leads to exactly one report for `reply`;
    /// it says whether the plan was new.
    pub(crate) fn submit(
        &mut self,
        plan: TransferPlan,
        reply: Reply,
        now: Instant,
    ) -> Result<bool, SubmitError> {
        let plan_id = plan.plan_id;
        if plan.epoch != self.limits.epoch {
            return Err(SubmitError::StaleEpoch { plan_id, found: plan.epoch, current: self.limits.epoch });
        }
        if self.closing {
            return Err(SubmitError::ShuttingDown);
        }
        if self.outgoing.len() >= self.limits.outgoing {
            return Err(SubmitError::Backlogged { what: "reports", pending: self.outgoing.len() });
        }
        if let Some(job) = self.jobs.get_mut(&plan_id) {
            add_reply(&mut job.replies, reply);
            return Ok(false);
        }
        match self.history.get(plan_id) {
            Known::New => {}
            Known::Finished { .. } => {
                let report = self.history.report(plan_id, self.limits.epoch, self.limits.rank);
                let report = Arc::new(report.ok_or(SubmitError::Forgotten { plan_id })?);
                let mut replies = Replies::default();
                add_reply(&mut replies, reply);
                self.deliver(&report, replies);
                return Ok(false);
            }
            Known::TooOld => return Err(SubmitError::Forgotten { plan_id }),
        }
        self.admit(plan, reply, now);
        Ok(true)
    }

    fn admit(&mut self, plan: TransferPlan, reply: Reply, now: Instant) {
        let deadline = (plan.budget_ms > 0)
            .then(|| deadline_after(now, Duration::from_millis(u64::from(plan.budget_ms))));
        self.seq += 1;
        let mut job = Job::new(Arc::new(plan), self.seq, now, deadline);
        add_reply(&mut job.replies, reply);
        let index = match self.check_plan(&job.plan) {
            Ok(index) => index,
            Err(Failure { kind, detail }) => {
                job.fail_untouched(kind, &detail);
                self.close_job(job, now);
                return;
            }
        };
        self.settle_bad_blocks(&mut job);
        if job.is_over() {
            self.close_job(job, now);
            return;
        }
        self.queues[index].enters(&job.plan);
        self.arm(job, now);
    }

    /// Checks that fail the whole plan. The path's index if it may be queued.
    fn check_plan(&self, plan: &TransferPlan) -> Result<usize, Failure> {
        let unsupported = |detail: String| Failure::new(FailureKind::Unsupported, detail);
        for end in [plan.src, plan.dst] {
            match end {
                Endpoint::Local(Tier::G4) => {
                    return Err(unsupported("G4 has no slots: name a volume instead".into()));
                }
                Endpoint::Local(_) | Endpoint::Volume(_) => {}
                Endpoint::Remote { .. } => {
                    return Err(unsupported(
                        "plans move nothing between nodes: RemoteHost reads from peers, and writes to them"
                            .into(),
                    ));
                }
            }
        }
        let path = plan.path();
        let index = index_of(path)
            .ok_or_else(|| unsupported(format!("no executor of kvbm-transfer moves blocks along {path}")))?;
        let queue = &self.queues[index];
        if let Err(reason) = &queue.limits {
            return Err(unsupported(format!("path {path}: {reason}")));
        }
        if usize::from(plan.group.0) >= self.limits.groups.len() {
            return Err(unsupported(format!(
                "group {}: this worker holds {} groups",
                plan.group,
                self.limits.groups.len()
            )));
        }
        self.check_layers(plan).map_err(unsupported)?;
        queue.check_room(plan).map_err(|detail| Failure::new(FailureKind::QueueFull, detail))?;
        Ok(index)
    }

    fn check_layers(&self, plan: &TransferPlan) -> Result<(), String> {
        let Some(range) = plan.layers else { return Ok(()) };
        let path = plan.path();
        let implementer = [path.src, path.dst].into_iter().find_map(|tier| match tier {
            Tier::G1 | Tier::G2 => None,
            Tier::G3 => Some("kvbm-disk"),
            Tier::G4 => Some("kvbm-volume"),
        });
        if let Some(implementer) = implementer {
            return Err(format!(
                "path {path} moves whole blocks only: {implementer} keeps whole blocks; send the plan without layers"
            ));
        }
        let layers = self.group_limits(plan).layers;
        match range.first.checked_add(range.count) {
            Some(end) if end <= layers => Ok(()),
            _ => Err(format!("layers {}..+{}: this rank has {layers} layers", range.first, range.count)),
        }
    }

    /// Those of the plan's group; nothing of a group that there is not.
    fn group_limits(&self, plan: &TransferPlan) -> GroupLimits {
        self.limits.groups.get(usize::from(plan.group.0)).copied().unwrap_or_default()
    }

    /// Fails blocks whose slots do not exist or are written twice; the others go on.
    fn settle_bad_blocks(&self, job: &mut Job) {
        let plan = Arc::clone(&job.plan);
        let (path, slots) = (plan.path(), self.group_limits(&plan).slots);
        let mut written = HashSet::with_capacity(plan.blocks.len());
        for (index, block) in plan.blocks.iter().enumerate() {
            // Volumes are addressed by identity.
            let missing = [(path.src, block.src), (path.dst, block.dst)]
                .into_iter()
                .filter(|(tier, _)| *tier != Tier::G4)
                .find(|(tier, slot)| slot.0 >= slots[tier.index()]);
            let detail = match missing {
                Some((tier, slot)) => {
                    format!(
                        "path {path}: slot {slot} of {tier} does not exist, it has {} slots",
                        slots[tier.index()]
                    )
                }
                None if path.dst != Tier::G4 && !written.insert(block.dst) => {
                    format!("path {path}: the plan writes slot {} of {} twice", block.dst, path.dst)
                }
                None => continue,
            };
            job.settle(index, BlockOutcome::Failed(Failure::new(FailureKind::Unsupported, detail)));
        }
    }

    /// Puts an accepted job behind its gate and predecessors, or into the queue.
    fn arm(&mut self, mut job: Job, now: Instant) {
        let plan_id = job.plan.plan_id;
        let failure = self.wait_for_predecessors(&mut job).or_else(|| self.wait_for_gate(&mut job));
        if let Some(deadline) = job.deadline {
            self.deadlines.insert((deadline, plan_id));
        }
        let ready = job.is_ready();
        self.jobs.insert(plan_id, job);
        match failure {
            Some(Failure { kind, detail }) => self.fail(plan_id, kind, &detail, now),
            None if ready => self.enqueue(plan_id),
            None => {}
        }
    }

    fn wait_for_predecessors(&mut self, job: &mut Job) -> Option<Failure> {
        let plan = Arc::clone(&job.plan);
        let failed = |detail: String| Some(Failure::new(FailureKind::Predecessor, detail));
        let distinct: BTreeSet<PlanId> = plan.after.iter().copied().collect();
        for before in distinct {
            if before == plan.plan_id {
                return failed(format!("plan {before} waits for itself"));
            }
            if self.jobs.contains_key(&before) {
                self.dependents.entry(before).or_default().push(plan.plan_id);
                job.predecessors += 1;
                continue;
            }
            match self.history.get(before) {
                Known::Finished { ok: true } => {}
                Known::Finished { ok: false } => return failed(format!("plan {before} failed before")),
                Known::New => {
                    return failed(format!(
                        "plan {before} was never sent to this worker; send predecessors first"
                    ));
                }
                Known::TooOld => {
                    return failed(format!("plan {before} is older than what this worker remembers"));
                }
            }
        }
        None
    }

    fn wait_for_gate(&mut self, job: &mut Job) -> Option<Failure> {
        let plan_id = job.plan.plan_id;
        let at = match job.plan.gate {
            Gate::None => return None,
            Gate::Iteration(iteration) => point(iteration, None),
            Gate::Layer { iteration, layer } => point(iteration, Some(layer)),
            Gate::DeviceEvent(id) => {
                match self.gates.event(id) {
                    EventState::Complete => {}
                    EventState::Failed(reason) => return Some(event_failure(id, &reason)),
                    EventState::Unregistered | EventState::Pending => {
                        self.gates.wait_for_event(id, plan_id);
                        job.gated = true;
                    }
                }
                return None;
            }
        };
        if !self.gates.reached(at) {
            self.gates.wait_for(at, plan_id);
            job.gated = true;
        }
        None
    }

    pub(super) fn enqueue(&mut self, plan_id: PlanId) {
        let Some(job) = self.jobs.get(&plan_id) else { return };
        let Some(index) = index_of(job.plan.path()) else { return };
        self.queues[index].push(&job.plan, job.seq);
        self.wake[index] |= std::mem::take(&mut self.hungry[index]);
    }
}

fn add_reply(replies: &mut Replies, reply: Reply) {
    match reply {
        Reply::Sink => replies.sink = replies.sink.saturating_add(1),
        Reply::Handle(slot) => replies.handles.push(slot),
    }
}
