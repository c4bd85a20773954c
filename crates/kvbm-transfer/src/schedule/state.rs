//! The state of a worker's plans and its transitions: queued -> started -> over.

use super::gates::{EventState, Gates, point};
use super::history::{History, Known};
use super::job::{Job, Portion, Replies};
use super::queue::{PathLimits, PathQueue};
use crate::error::SubmitError;
use crate::handle::Slot;
use crate::stats::PathStats;
use kvbm_plan::{
    BlockOutcome, Endpoint, Epoch, Failure, FailureKind, Gate, GroupId, Message, Path, PlanId, Rank, Tier,
    TransferPlan, TransferReport,
};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a worker is, as far as scheduling goes.
pub(crate) struct Limits {
    pub(crate) rank: Rank,
    pub(crate) epoch: Epoch,
    pub(crate) group: GroupId,
    /// Slots per tier, 0 where there is none.
    pub(crate) slots: [u32; Tier::ALL.len()],
    /// Layers of a block.
    pub(crate) layers: u32,
    /// Queue bounds of each path of [`Path::LOCAL`], or why the worker does not have it.
    pub(crate) paths: [Result<PathLimits, String>; Path::LOCAL.len()],
    /// Reports and messages that may wait for the sink before submissions are refused.
    pub(crate) outgoing: usize,
}

/// Who asked for a plan.
pub(crate) enum Reply {
    /// The leader, through the sink.
    Sink,
    /// A handle.
    Handle(Arc<Slot>),
}

/// Something for the sink.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// The report, this many times.
    Report(Arc<TransferReport>, u32),
    /// Anything else.
    Message(Message),
}

/// Plans, queues, gates and history. See the module's documentation.
pub(crate) struct State {
    limits: Limits,
    queues: [PathQueue; Path::LOCAL.len()],
    jobs: HashMap<PlanId, Job>,
    /// Plans that wait for the end of the key.
    dependents: HashMap<PlanId, Vec<PlanId>>,
    deadlines: BTreeSet<(Instant, PlanId)>,
    gates: Gates,
    history: History,
    seq: u64,
    closing: bool,
    /// (finished plan, whether all of it arrived, plan that waited for it), not yet told.
    ripple: VecDeque<(PlanId, bool, PlanId)>,
    outgoing: VecDeque<Delivery>,
    /// Reports for handles, to be put without the lock.
    notices: Vec<(Arc<Slot>, Arc<TransferReport>)>,
    /// Paths whose executors have something new to look at.
    wake: [bool; Path::LOCAL.len()],
}

/// Index of `path` in [`Path::LOCAL`].
fn index_of(path: Path) -> Option<usize> {
    Path::LOCAL.iter().position(|known| *known == path)
}

/// Paths that go first where they share a resource with path `index`: disk reads before disk writes.
fn goes_before(index: usize) -> &'static [Path] {
    if Path::LOCAL[index] == Path::G2_G3 { &[Path::G3_G2, Path::G3_G1] } else { &[] }
}

impl State {
    pub(crate) fn new(limits: Limits) -> Self {
        let queues =
            std::array::from_fn(|index| PathQueue::new(Path::LOCAL[index], limits.paths[index].clone()));
        Self {
            limits,
            queues,
            jobs: HashMap::new(),
            dependents: HashMap::new(),
            deadlines: BTreeSet::new(),
            gates: Gates::default(),
            history: History::default(),
            seq: 0,
            closing: false,
            ripple: VecDeque::new(),
            outgoing: VecDeque::new(),
            notices: Vec::new(),
            wake: [false; Path::LOCAL.len()],
        }
    }

    // --- admission ---

    /// Takes a plan in, or answers it at once. Every `Ok` leads to exactly one report for `reply`; it says whether the plan
    /// was new.
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
            Known::Finished(finished) => {
                let report = finished.report.clone().ok_or(SubmitError::Forgotten { plan_id })?;
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
        let deadline = (plan.budget_ms > 0).then(|| now + Duration::from_millis(u64::from(plan.budget_ms)));
        self.seq += 1;
        let mut job = Job::new(Arc::new(plan), self.seq, now, deadline);
        add_reply(&mut job.replies, reply);
        let index = match self.check_plan(&job.plan) {
            Ok(index) => index,
            Err(Failure { kind, detail }) => {
                job.fail_unissued(kind, &detail);
                self.close_job(job, now);
                return;
            }
        };
        self.settle_bad_blocks(&mut job);
        if job.is_over() {
            self.close_job(job, now);
            return;
        }
        let stats = &mut self.queues[index].stats;
        stats.queued_plans += 1;
        stats.queued_blocks += job.plan.blocks.len();
        self.arm(job, now);
    }

    /// Checks that fail the whole plan. The path's index if it may be queued.
    fn check_plan(&self, plan: &TransferPlan) -> Result<usize, Failure> {
        let unsupported = |detail: String| Failure::new(FailureKind::Unsupported, detail);
        for end in [plan.src, plan.dst] {
            match end {
                Endpoint::Local(_) => {}
                Endpoint::Remote { .. } => {
                    return Err(unsupported(
                        "a peer's memory needs kvbm-nixl, which this worker runs without".into(),
                    ));
                }
                Endpoint::Volume(id) => {
                    return Err(unsupported(format!(
                        "volume {id}: no G4 volume is registered with this worker"
                    )));
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
        if plan.group != self.limits.group {
            return Err(unsupported(format!(
                "group {}: this worker holds group {}",
                plan.group, self.limits.group
            )));
        }
        self.check_layers(plan).map_err(unsupported)?;
        queue.check_room(plan.blocks.len()).map_err(|detail| Failure::new(FailureKind::QueueFull, detail))?;
        Ok(index)
    }

    fn check_layers(&self, plan: &TransferPlan) -> Result<(), String> {
        let Some(range) = plan.layers else { return Ok(()) };
        let path = plan.path();
        if path.src == Tier::G3 || path.dst == Tier::G3 {
            return Err(format!(
                "path {path} moves whole blocks only: kvbm-disk keeps one checksum per block; send the plan without layers"
            ));
        }
        match range.first.checked_add(range.count) {
            Some(end) if end <= self.limits.layers => Ok(()),
            _ => Err(format!(
                "layers {}..+{}: this rank has {} layers",
                range.first, range.count, self.limits.layers
            )),
        }
    }

    /// Fails blocks whose slots do not exist or are written twice; the others go on.
    fn settle_bad_blocks(&self, job: &mut Job) {
        let plan = Arc::clone(&job.plan);
        let path = plan.path();
        let mut written = HashSet::with_capacity(plan.blocks.len());
        for (index, block) in plan.blocks.iter().enumerate() {
            let missing = [(path.src, block.src), (path.dst, block.dst)]
                .into_iter()
                .find(|(tier, slot)| slot.0 >= self.limits.slots[tier.index()]);
            let detail = match missing {
                Some((tier, slot)) => {
                    format!(
                        "path {path}: slot {slot} of {tier} does not exist, it has {} slots",
                        self.limits.slots[tier.index()]
                    )
                }
                None if !written.insert(block.dst) => {
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
                Known::Finished(finished) if finished.ok => {}
                Known::Finished(_) => return failed(format!("plan {before} failed before")),
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

    fn enqueue(&mut self, plan_id: PlanId) {
        let Some(job) = self.jobs.get(&plan_id) else { return };
        let Some(index) = index_of(job.plan.path()) else { return };
        self.queues[index].push(job.plan.priority, job.seq, plan_id);
        self.wake[index] = true;
    }

    // --- what opens, ends or breaks a wait ---

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

    /// Drops a plan that has not started.
    pub(crate) fn cancel(&mut self, plan_id: PlanId, now: Instant) {
        if self.jobs.get(&plan_id).is_some_and(|job| job.started.is_none()) {
            self.fail(plan_id, FailureKind::Cancelled, "cancelled before it started", now);
        }
    }

    /// Fails what is still queued after its budget; of started plans, the blocks that were not issued.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some(&(deadline, plan_id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            let Some(job) = self.jobs.get(&plan_id) else { continue };
            let waited = if job.gated {
                "its gate is shut"
            } else if job.predecessors > 0 {
                "a predecessor is not over"
            } else {
                "its path is busy"
            };
            let detail =
                format!("budget of {} ms ran out on path {} ({waited})", job.plan.budget_ms, job.plan.path());
            self.fail(plan_id, FailureKind::Deadline, &detail, now);
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
        self.wake = [true; Path::LOCAL.len()];
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

    /// Fails every block of a plan that was not issued.
    fn fail(&mut self, plan_id: PlanId, kind: FailureKind, detail: &str, now: Instant) {
        let Some(job) = self.jobs.get_mut(&plan_id) else { return };
        job.fail_unissued(kind, detail);
        if let Some(index) = index_of(job.plan.path()) {
            self.queues[index].remove(job.plan.priority, job.seq, plan_id);
            self.wake_followers(index);
        }
        self.close_if_over(plan_id, now);
    }

    // --- execution ---

    /// Up to `limit` blocks of the plan that is first on `path`. `busy` says whether the caller has blocks in flight:
    /// then it gets nothing while a path that goes before it has plans to issue.
    pub(crate) fn take(&mut self, path: Path, busy: bool, limit: usize, now: Instant) -> Option<Portion> {
        let index = index_of(path)?;
        if limit == 0 || (busy && self.must_yield(index)) {
            return None;
        }
        loop {
            let plan_id = self.queues[index].first()?;
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
                let stats = &mut self.queues[index].stats;
                stats.queued_plans -= 1;
                stats.queued_blocks -= plan.blocks.len();
                stats.running_plans += 1;
            }
            if issued {
                self.queues[index].remove(plan.priority, seq, plan_id);
                self.wake_followers(index);
            }
            return Some(Portion { plan, indices, deadline });
        }
    }

    fn must_yield(&self, index: usize) -> bool {
        goes_before(index)
            .iter()
            .filter_map(|path| index_of(*path))
            .any(|first| self.queues[first].first().is_some())
    }

    /// Lets the paths look again that yielded to path `index`.
    fn wake_followers(&mut self, index: usize) {
        for follower in 0..Path::LOCAL.len() {
            if goes_before(follower).contains(&Path::LOCAL[index]) {
                self.wake[follower] = true;
            }
        }
    }

    /// Records what came of issued blocks; `bytes` is what arrived.
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

    fn close_if_over(&mut self, plan_id: PlanId, now: Instant) {
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
            let stats = &mut self.queues[index].stats;
            if job.started.is_some() {
                stats.running_plans -= 1;
            } else {
                stats.queued_plans -= 1;
                stats.queued_blocks -= plan.blocks.len();
            }
        }
    }

    /// Reports a job that is over, remembers it, and notes whom [`State::ripple`] has to tell.
    fn close_job(&mut self, job: Job, now: Instant) {
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
        self.history.insert(Arc::clone(&report));
        self.deliver(&report, replies);
        let ok = report.blocks.iter().all(BlockOutcome::is_done);
        let waiting = self.dependents.remove(&plan.plan_id).unwrap_or_default();
        self.ripple.extend(waiting.into_iter().map(|dependent| (plan.plan_id, ok, dependent)));
    }

    /// Tells plans whose predecessors are over, and those that wait for them: a loop, because chains are long. The owner
    /// of the state calls it before it lets go of the lock.
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

    // --- what goes out ---

    fn deliver(&mut self, report: &Arc<TransferReport>, replies: Replies) {
        if replies.sink > 0 {
            self.outgoing.push_back(Delivery::Report(Arc::clone(report), replies.sink));
        }
        self.notices.extend(replies.handles.into_iter().map(|slot| (slot, Arc::clone(report))));
    }

    /// Queues a message for the sink.
    pub(crate) fn send(&mut self, message: Message) {
        self.outgoing.push_back(Delivery::Message(message));
    }

    pub(crate) fn next_delivery(&mut self) -> Option<Delivery> {
        self.outgoing.pop_front()
    }

    pub(crate) fn take_notices(&mut self) -> Vec<(Arc<Slot>, Arc<TransferReport>)> {
        std::mem::take(&mut self.notices)
    }

    pub(crate) fn take_wakes(&mut self) -> [bool; Path::LOCAL.len()] {
        std::mem::take(&mut self.wake)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Accepted plans without a report.
    pub(crate) fn live_plans(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn outgoing_len(&self) -> usize {
        self.outgoing.len()
    }

    pub(crate) fn path_stats(&self) -> [PathStats; Path::LOCAL.len()] {
        std::array::from_fn(|index| self.queues[index].stats)
    }
}

fn add_reply(replies: &mut Replies, reply: Reply) {
    match reply {
        Reply::Sink => replies.sink = replies.sink.saturating_add(1),
        Reply::Handle(slot) => replies.handles.push(slot),
    }
}

fn event_failure(id: u64, reason: &str) -> Failure {
    Failure::new(
        FailureKind::Device,
        format!("gate event {id} failed, so the source may never have been written: {reason}"),
    )
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
