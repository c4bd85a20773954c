//! One transfer, from its request to its last report.
//!
//! A transfer may need several plans (one per source tier and per part), on several ranks. It
//! settles once, when all plans are over: only then are its sources released and its destinations
//! made visible or given back.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `interest` | the callers that want the result | - |
//! | `results` | what ranks said of the stores at its ends | - |

mod interest;
mod results;

use super::layers::LayerSteps;
use super::plans::Part;
use super::{Destination, Fence, Move, OnArrival, Purpose, Request, VolumeEnd};
use crate::error::BlockFailure;
use crate::signal::{Signal, Woken};
pub(crate) use interest::{Interest, Released};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, Comparison, Endpoint, Failure, FailureKind, Path, Tier, VolumeId, deadline_after};
use kvbm_pool::{Losses, Pinned};
use parking_lot::Mutex;
pub(crate) use results::{DiskResults, RankResults};
use std::any::Any;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What a transfer holds until the hardware is done.
pub(crate) struct Parts {
    pub(super) destination: Destination,
    pub(super) losses: Losses,
    pub(super) holds: Vec<Box<dyn Any + Send>>,
    pub(super) check: Option<super::Check>,
}

/// How a transfer ended.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Blocks that are visible at the destination now: pinned until the last caller has seen the
    /// outcome.
    pub(crate) arrived: Option<Pinned>,
    /// The others.
    pub(crate) failures: Vec<BlockFailure>,
}

/// See the module.
pub(crate) struct Transfer {
    pub(crate) purpose: Purpose,
    pub(crate) to: Tier,
    pub(super) moves: Box<[Move]>,
    /// The volume at one of its ends, where there is one.
    pub(super) volume: Option<Arc<dyn VolumeEnd>>,
    pub(super) on_arrival: Option<OnArrival>,
    pub(super) fence: Option<Fence>,
    /// Plans wait for the end of this iteration, or for their layers in it.
    pub(super) iteration: Option<u64>,
    /// Its steps, where it goes layer by layer.
    pub(super) layers: Option<LayerSteps>,
    /// For each of them: its plans are over, or all is.
    steps_over: Box<[Signal]>,
    pub(super) compare: Option<Comparison>,
    /// What a worker's own side knows its plans by; 0 where nobody asks there.
    pub(crate) tag: u64,
    /// How long it may take.
    pub(crate) limit: Duration,
    pub(crate) began: Instant,
    pub(crate) deadline: Instant,
    /// The outcome is known: the transfer is over, or was given up.
    pub(crate) settled: Signal,
    /// Open from the first plan to the settlement.
    pub(crate) span: tracing::Span,
    /// What it says of the disk that it reads from has been taken.
    has_spoken: AtomicBool,
    /// Its deadline was seen to pass.
    has_expired: AtomicBool,
    state: Mutex<TransferProgress>,
}

struct TransferProgress {
    parts: Option<Parts>,
    failures: Vec<Option<Failure>>,
    /// For each block, plans that not all ranks have answered.
    owed: Vec<u32>,
    /// For each step of layers, plans that it still needs.
    step_plans: Vec<usize>,
    /// Some block failed, or all were given up.
    has_failed: bool,
    results: RankResults,
    /// When a block last arrived from G3; from the start on.
    disk_gave: Instant,
    /// It was late, and no block had arrived from G3 for so long at least, although some were owed.
    quiet_disk: Option<Duration>,
    /// Blocks from the front that count as arrived although the transfer is not over.
    kept: usize,
    /// Pins of those, of a transfer that was given up and joined again.
    front: Option<Pinned>,
    plans_left: usize,
    abandoned: Option<Failure>,
    /// Callers that still want the result.
    interested: usize,
    outcome: Outcome,
}

impl TransferProgress {
    /// A plan is over, of a step or of whole blocks: the steps that need no other plan now.
    fn step_over(&mut self, of: Option<usize>) -> Vec<usize> {
        let mut over = Vec::new();
        for (step, plans) in self.step_plans.iter_mut().enumerate() {
            if of.is_none_or(|of| of == step) && *plans > 0 {
                *plans -= 1;
                if *plans == 0 {
                    over.push(step);
                }
            }
        }
        over
    }

    /// Whether reports on blocks of G3 are missing.
    fn owes_disk(&self, moves: &[Move]) -> bool {
        let mut unanswered = moves.iter().zip(&self.owed).filter(|(_, owed)| **owed > 0);
        self.parts.is_some() && unanswered.any(|(block, _)| block.from == Tier::G3)
    }
}

/// The part of a transfer that one plan moves.
#[derive(Clone)]
pub(crate) struct PlanPart {
    pub(crate) transfer: Arc<Transfer>,
    /// Index in `moves` of the plan's first block.
    pub(crate) first: usize,
    /// The step of layers that it moves; whole blocks where there is none.
    pub(crate) step: Option<usize>,
}

impl PlanPart {
    /// The part of each block that the plan moves.
    pub(super) fn share(&self) -> f64 {
        self.transfer.layers.zip(self.step).map_or(1.0, |(steps, step)| steps.share(step))
    }

    /// Whether no other plan moves a later part of its blocks.
    pub(super) fn is_last_step(&self) -> bool {
        self.transfer.layers.zip(self.step).is_none_or(|(steps, step)| step + 1 == steps.count())
    }
}

/// A transfer whose plans are all over, to be settled by the leader.
pub(crate) struct Unsettled {
    pub(crate) parts: Parts,
    pub(crate) failures: Vec<Option<Failure>>,
    /// Blocks from the front that have counted as arrived before, and did.
    pub(crate) kept: usize,
    pub(crate) results: RankResults,
    pub(crate) settlement: Settlement,
}

/// The duty to publish the outcome of a transfer. Dropped before that, which only a defect (a
/// panic) can cause, it publishes that the transfer failed.
pub(crate) struct Settlement {
    transfer: Arc<Transfer>,
    published: bool,
}

impl Settlement {
    /// Publishes the outcome to all waiters.
    pub(crate) fn publish(mut self, outcome: Outcome) {
        self.published = true;
        self.transfer.settle(outcome);
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        let why = "the leader failed while it settled the transfer (a defect of kvbm: please report the log)";
        // Not as cancelled: a caller that joined would start it again and again.
        let reason = Failure::new(FailureKind::Io, why);
        let failures = self.transfer.failures(0, &reason);
        self.transfer.settle(Outcome { arrived: None, failures });
    }
}

/// For each block, plans that move a part of it.
fn plans_of_blocks(parts: &[Part], blocks: usize) -> Vec<u32> {
    let mut plans = vec![0; blocks];
    parts.iter().flat_map(|part| part.moves.clone()).for_each(|at| plans[at] += 1);
    plans
}

/// For each step of layers, plans that it needs.
fn plans_of_steps(parts: &[Part], steps: usize) -> Vec<usize> {
    // Whole blocks have every layer.
    let needs = |step| parts.iter().filter(|part| part.step.is_none_or(|of| of == step)).count();
    (0..steps).map(needs).collect()
}

fn span(purpose: Purpose, to: Tier, blocks: usize, plans: usize) -> tracing::Span {
    match purpose {
        Purpose::Onboard | Purpose::EngineOnboard => {
            tracing::debug_span!(target: "kvbm", "onboard", %to, blocks, plans)
        }
        Purpose::Stage => tracing::debug_span!(target: "kvbm", "stage", %to, blocks, plans),
        Purpose::Prefetch => tracing::debug_span!(target: "kvbm", "prefetch", %to, blocks, plans),
        Purpose::Audit => tracing::debug_span!(target: "kvbm", "audit", blocks, plans),
        Purpose::Offload => tracing::debug_span!(target: "kvbm", "offload", %to, blocks, plans),
        Purpose::Private => tracing::debug_span!(target: "kvbm", "private", %to, blocks, plans),
    }
}

impl Transfer {
    /// A transfer that a plan for each of `parts` carries out.
    pub(crate) fn new(request: Request, tag: u64, limit: Duration, parts: &[Part]) -> Arc<Self> {
        let Request { purpose, to, moves, layers, .. } = request;
        let step_plans = plans_of_steps(parts, layers.map_or(0, LayerSteps::count));
        let steps_over = step_plans.iter().map(|_| Signal::default()).collect();
        let span = span(purpose, to, moves.len(), parts.len());
        let began = kvbm_plan::clock::now();
        let state = TransferProgress {
            parts: Some(Parts {
                destination: request.destination,
                losses: request.losses,
                holds: request.holds,
                check: request.check,
            }),
            failures: vec![None; moves.len()],
            owed: plans_of_blocks(parts, moves.len()),
            step_plans,
            has_failed: false,
            results: RankResults::default(),
            disk_gave: began,
            quiet_disk: None,
            kept: 0,
            front: None,
            plans_left: parts.len(),
            abandoned: None,
            interested: 0,
            outcome: Outcome::default(),
        };
        Arc::new(Self {
            purpose,
            to,
            moves: moves.into_boxed_slice(),
            volume: request.volume,
            on_arrival: request.on_arrival,
            fence: request.fence,
            iteration: request.iteration,
            layers,
            steps_over,
            compare: request.compare,
            tag,
            limit,
            began,
            deadline: deadline_after(kvbm_plan::clock::now(), limit),
            settled: Signal::default(),
            span,
            has_spoken: AtomicBool::new(false),
            has_expired: AtomicBool::new(false),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn volume_id(&self) -> Option<VolumeId> {
        self.volume.as_ref().map(|volume| volume.id())
    }

    /// Its end on `tier`.
    pub(super) fn endpoint(&self, tier: Tier) -> Endpoint {
        match (tier, self.volume_id()) {
            (Tier::G4, Some(volume)) => Endpoint::Volume(volume),
            _ => Endpoint::Local(tier),
        }
    }

    /// The failures of all blocks from `first` on, for one reason.
    pub(super) fn failures(&self, first: usize, reason: &Failure) -> Vec<BlockFailure> {
        self.moves.iter().skip(first).map(|block| block.failed(self.to, reason.clone())).collect()
    }

    /// Takes the failures of a finished plan; how long ranks were at it, where all answered
    /// themselves (`own`). The whole transfer, if that was the last plan.
    pub(crate) fn merge(
        self: &Arc<Self>,
        part: &PlanPart,
        failures: &[Option<Failure>],
        own: Option<Duration>,
    ) -> Option<Unsettled> {
        let first = part.first;
        let mut state = self.state.lock();
        let from = self.moves.get(first).map(|block| block.from);
        if let (Some(from), Some(busy)) = (from, own) {
            state.results.add(Path::new(from, self.to), first, failures);
            if from == Tier::G3 && state.quiet_disk.is_some_and(|quiet| busy >= quiet) {
                state.results.disk.add_late(first, failures, expired("read from G3", self.limit));
            }
        }
        if from == Some(Tier::G3) && failures.iter().any(Option::is_none) {
            state.disk_gave = kvbm_plan::clock::now();
        }
        for (slot, failure) in state.failures.iter_mut().skip(first).zip(failures) {
            if slot.is_none() && !(planted(Planted::RegisterUnverified) && is_corrupt(failure.as_ref())) {
                slot.clone_from(failure);
            }
        }
        state
            .owed
            .iter_mut()
            .skip(first)
            .take(failures.len())
            .for_each(|owed| *owed = owed.saturating_sub(1));
        state.has_failed |= failures.iter().any(Option::is_some);
        let over = state.step_over(part.step);
        // Its waiters look at the state.
        let woken: Vec<Woken> = over.into_iter().map(|step| self.steps_over[step].mark()).collect();
        state.plans_left = state.plans_left.saturating_sub(1);
        let parts = if state.plans_left > 0 { None } else { state.parts.take() };
        let Some(parts) = parts else {
            drop(state);
            woken.into_iter().for_each(Woken::wake);
            return None;
        };
        let mut failures = std::mem::take(&mut state.failures);
        let (kept, results) = (state.kept, std::mem::take(&mut state.results));
        if let Some(reason) = &state.abandoned {
            for slot in failures.iter_mut().skip(kept) {
                slot.get_or_insert_with(|| reason.clone());
            }
        }
        drop(state);
        woken.into_iter().for_each(Woken::wake);
        let settlement = Settlement { transfer: Arc::clone(self), published: false };
        Some(Unsettled { parts, failures, kept, results, settlement })
    }

    /// The slots of G3 of which nothing was reported yet.
    pub(super) fn owed_disk_slots(&self) -> Vec<BlockId> {
        let state = self.state.lock();
        let owed = self.moves.iter().zip(&state.owed);
        let owed = owed.filter(|(block, owed)| block.from == Tier::G3 && **owed > 0);
        owed.map(|(block, _)| block.src).collect()
    }

    /// Whether the caller is the first to record what the transfer says of the disk.
    pub(crate) fn is_first_disk_result(&self) -> bool {
        !self.has_spoken.swap(true, Ordering::Relaxed)
    }

    /// Whether the caller is the first one to see that its deadline has passed.
    pub(crate) fn expires(&self) -> bool {
        !self.has_expired.swap(true, Ordering::Relaxed)
    }

    /// Whether somebody waits for it still.
    pub(crate) fn is_waited_for(&self, now: Instant) -> bool {
        now < self.deadline && !self.settled.is_set()
    }

    /// It is late: whether blocks of G3 are owed and none has arrived for `patience` matters from
    /// now on.
    pub(crate) fn watch_quiet_disk(&self, now: Instant, patience: Duration) {
        let mut state = self.state.lock();
        if state.owes_disk(&self.moves) && now.saturating_duration_since(state.disk_gave) >= patience {
            state.quiet_disk = Some(patience);
        }
    }

    /// Whether that was so, blocks of G3 are still owed, and it has been late for as long. A rank
    /// that started them in the last moment has waited for its disk all that time.
    pub(crate) fn is_owed_by_quiet_disk(&self, now: Instant) -> bool {
        let late = now.saturating_duration_since(self.deadline);
        let state = self.state.lock();
        state.quiet_disk.is_some_and(|patience| late >= patience) && state.owes_disk(&self.moves)
    }

    /// What has arrived from the front on counts from now on, although later blocks are still on
    /// their way. `keep` makes such blocks visible, and says of how many from the first on that is
    /// so. Nothing of a transfer that was given up, or is over.
    pub(crate) fn keep_front(&self, keep: impl FnOnce(&mut Parts, Range<usize>) -> usize) {
        let mut state = self.state.lock();
        let TransferProgress { parts: Some(parts), failures, owed, kept, abandoned: None, .. } = &mut *state
        else {
            return;
        };
        let arrived = owed.iter().zip(failures).skip(*kept);
        let arrived = arrived.take_while(|(owed, failure)| **owed == 0 && failure.is_none()).count();
        if arrived > 0 {
            *kept += keep(parts, *kept..*kept + arrived);
        }
    }

    /// Blocks that were kept of a transfer that was given up are visible like any others.
    pub(super) fn announce_kept(&self) {
        if let Some(on_arrival) = &self.on_arrival
            && let Some(arrived) = self.with_outcome(|outcome| outcome.arrived.clone())
        {
            on_arrival(&arrived);
        }
    }

    fn settle(&self, mut outcome: Outcome) {
        let arrived = outcome.arrived.as_ref().map_or(0, Pinned::len);
        tracing::trace!(purpose = ?self.purpose, to = %self.to, arrived, failed = outcome.failures.len(), "settled");
        let mut state = self.state.lock();
        outcome.arrived = joined(state.front.take(), outcome.arrived);
        state.has_failed |= !outcome.failures.is_empty();
        // An abandoned transfer has published its failure already; what did arrive is dropped
        // without the lock.
        let unwanted = match state.abandoned {
            Some(_) => outcome,
            None => std::mem::replace(&mut state.outcome, outcome),
        };
        let woken = self.mark_settled();
        drop(state);
        drop(unwanted);
        woken.into_iter().for_each(Woken::wake);
    }

    /// Whoever waits for it, or for a step of it, waits no longer.
    #[must_use = "somebody may wait to be woken"]
    fn mark_settled(&self) -> Vec<Woken> {
        self.steps_over.iter().chain([&self.settled]).map(Signal::mark).collect()
    }

    /// Whether `layer` of all its blocks has arrived.
    pub(crate) fn has_layer(&self, layer: u32) -> bool {
        let state = self.state.lock();
        let is_over = match self.layers {
            Some(steps) => state.step_plans.get(steps.of_layer(layer)) == Some(&0),
            None => state.plans_left == 0,
        };
        is_over && !state.has_failed
    }

    /// Waits until it is known whether `layer` arrives, or `deadline` passes.
    pub(crate) fn wait_layer(&self, layer: u32, deadline: Instant) {
        let of_step = self.layers.and_then(|steps| self.steps_over.get(steps.of_layer(layer)));
        of_step.unwrap_or(&self.settled).wait_until(deadline);
    }

    /// Gives up: whatever still arrives is not made visible. Waiters get `reason` now, of all
    /// but what was [kept](Self::keep_front); the slots come back when the workers are done with
    /// them. `false` if the transfer had settled.
    pub(crate) fn abandon(&self, reason: &Failure) -> bool {
        let mut state = self.state.lock();
        if state.parts.is_none() || state.abandoned.is_some() {
            return false;
        }
        self.give_up(&mut state, reason);
        let woken = self.mark_settled();
        drop(state);
        woken.into_iter().for_each(Woken::wake);
        true
    }

    fn give_up(&self, state: &mut TransferProgress, reason: &Failure) {
        let arrived = match state.parts.as_mut().map(|parts| &mut parts.destination) {
            Some(Destination::Reserved { arrivals, .. }) if state.kept > 0 => Some(arrivals.take_pinned()),
            _ => None,
        };
        let arrived = joined(state.front.take(), arrived);
        let failures = self.failures(state.kept, reason);
        state.has_failed = true;
        state.outcome = Outcome { arrived, failures };
        state.abandoned = Some(reason.clone());
        if planted(Planted::FreeSlotsEarly) {
            drop(state.parts.take());
        }
    }

    /// Whether the transfer is under way and reads nothing but these blocks of `tier`.
    pub(crate) fn reads_only(&self, tier: Tier, ids: &HashSet<BlockId>) -> bool {
        let state = self.state.lock();
        state.parts.is_some() && self.moves.iter().all(|block| block.from == tier && ids.contains(&block.src))
    }

    /// Looks at the outcome. Meaningful once `settled` is set.
    pub(crate) fn with_outcome<R>(&self, read: impl FnOnce(&Outcome) -> R) -> R {
        read(&self.state.lock().outcome)
    }
}

fn is_corrupt(failure: Option<&Failure>) -> bool {
    failure.is_some_and(|failure| failure.kind == FailureKind::Corrupt)
}

/// What was kept before and what arrived since, in order.
fn joined(front: Option<Pinned>, rest: Option<Pinned>) -> Option<Pinned> {
    let Some(mut front) = front else { return rest };
    // Both are of one tier of one registry, held for the same.
    let _none = rest.map(|rest| front.append(rest));
    Some(front)
}

/// The failure of a transfer whose time ran out.
pub(crate) fn expired(what: &str, limit: Duration) -> Failure {
    Failure::new(FailureKind::Deadline, format!("{what} not complete after {} ms", limit.as_millis()))
}

#[cfg(test)]
mod tests;
