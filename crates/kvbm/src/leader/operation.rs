//! One movement of blocks, from its request to its last answer.
//!
//! An operation may need several plans (one per source tier and per chunk), on several ranks. It settles once, when all of
//! them are over: only then are its sources let go and its destinations made visible or given back.

use crate::error::BlockFailure;
use crate::signal::Signal;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, Path, Tier};
use kvbm_pool::{AnyArrivals, Pinned};
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// One block of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) identity: BlockIdentity,
    pub(crate) from: Tier,
    pub(crate) src: BlockId,
    pub(crate) dst: BlockId,
}

/// Why blocks move, hence what follows when they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Somebody waits for a prefix.
    Onboard,
    /// Copies are made on the next tier.
    Offload,
    /// Private blocks move; nothing becomes visible.
    Private,
}

/// Says whether the source of block `index` still was what it should be when the copy was over.
pub(crate) type SourceCheck = Box<dyn Fn(usize) -> Option<Failure> + Send>;

/// Where the blocks arrive.
pub(crate) enum Destination {
    /// Slots of one of our tiers: move `i` fills reservation `places[i]`.
    Reserved { arrivals: AnyArrivals, places: Vec<usize> },
    /// Memory that the caller keeps (the engine's, or a private batch): nothing to make visible.
    Unregistered,
}

/// What an operation holds until the hardware is done.
pub(crate) struct Parts {
    pub(crate) moves: Vec<Move>,
    pub(crate) destination: Destination,
    /// Pins, private batches, engine holds: dropped when no worker touches the blocks any more.
    pub(crate) keep: Vec<Box<dyn Any + Send>>,
    pub(crate) source_check: Option<SourceCheck>,
}

/// What became of an operation.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Blocks that are visible at the destination now: pinned until the last caller has seen the outcome.
    pub(crate) arrived: Option<Pinned>,
    /// The others.
    pub(crate) failures: Vec<BlockFailure>,
}

/// See the module.
pub(crate) struct Operation {
    pub(crate) purpose: Purpose,
    pub(crate) to: Tier,
    pub(crate) deadline: Instant,
    pub(crate) settled: Signal,
    /// Callers that still want the result.
    interested: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    parts: Option<Parts>,
    failures: Vec<Option<Failure>>,
    plans_left: usize,
    abandoned: Option<Failure>,
    outcome: Outcome,
}

/// The part of an operation that one plan moves.
#[derive(Clone)]
pub(crate) struct PlanPart {
    pub(crate) operation: Arc<Operation>,
    /// Index in `moves` of the plan's first block.
    pub(crate) first: usize,
}

/// An operation whose plans are all over, to be settled by the leader.
pub(crate) struct Unsettled {
    pub(crate) parts: Parts,
    pub(crate) failures: Vec<Option<Failure>>,
}

impl Operation {
    /// An operation that `plans` plans carry out.
    pub(crate) fn new(
        purpose: Purpose,
        to: Tier,
        deadline: Instant,
        parts: Parts,
        plans: usize,
    ) -> Arc<Self> {
        let failures = vec![None; parts.moves.len()];
        let state = State {
            parts: Some(parts),
            failures,
            plans_left: plans,
            abandoned: None,
            outcome: Outcome::default(),
        };
        Arc::new(Self {
            purpose,
            to,
            deadline,
            settled: Signal::default(),
            interested: AtomicUsize::new(0),
            state: Mutex::new(state),
        })
    }

    /// Takes the failures of a finished plan. The whole operation, if that was the last one.
    pub(crate) fn merge(&self, first: usize, failures: Vec<Option<Failure>>) -> Option<Unsettled> {
        let mut state = self.state.lock();
        for (slot, failure) in state.failures.iter_mut().skip(first).zip(failures) {
            if slot.is_none() {
                *slot = failure;
            }
        }
        state.plans_left = state.plans_left.saturating_sub(1);
        if state.plans_left > 0 {
            return None;
        }
        let parts = state.parts.take()?;
        let mut failures = std::mem::take(&mut state.failures);
        if let Some(reason) = &state.abandoned {
            for slot in &mut failures {
                slot.get_or_insert_with(|| reason.clone());
            }
        }
        Some(Unsettled { parts, failures })
    }

    /// Publishes the outcome to whoever waits.
    pub(crate) fn settle(&self, outcome: Outcome) {
        let arrived = outcome.arrived.as_ref().map_or(0, Pinned::len);
        tracing::trace!(purpose = ?self.purpose, to = %self.to, arrived, failed = outcome.failures.len(), "settled");
        let mut state = self.state.lock();
        // An abandoned operation has told its failure already.
        if state.abandoned.is_none() {
            state.outcome = outcome;
        }
        drop(state);
        self.settled.set();
    }

    /// Gives up: whatever still arrives is not made visible. Waiters are told `reason` now; the slots come back when the
    /// workers are done with them. `false` if the operation had settled.
    pub(crate) fn abandon(&self, reason: &Failure) -> bool {
        {
            let mut state = self.state.lock();
            let Some(parts) = &state.parts else { return false };
            if state.abandoned.is_some() {
                return false;
            }
            let failures = parts.moves.iter().map(|step| step.failed(self.to, reason.clone())).collect();
            state.outcome = Outcome { arrived: None, failures };
            state.abandoned = Some(reason.clone());
        }
        self.settled.set();
        true
    }

    /// Whether the operation is under way and reads nothing but these blocks of `tier`.
    pub(crate) fn reads_only(&self, tier: Tier, ids: &[BlockId]) -> bool {
        let state = self.state.lock();
        state
            .parts
            .as_ref()
            .is_some_and(|parts| parts.moves.iter().all(|step| step.from == tier && ids.contains(&step.src)))
    }

    /// Looks at the outcome. Meaningful once `settled` is set.
    pub(crate) fn with_outcome<R>(&self, read: impl FnOnce(&Outcome) -> R) -> R {
        read(&self.state.lock().outcome)
    }

    /// A caller that wants the result: while there is one, nobody else's loss of interest abandons the operation.
    pub(crate) fn interest(self: &Arc<Self>) -> Interest {
        self.interested.fetch_add(1, Ordering::Relaxed);
        Interest { operation: Arc::clone(self) }
    }
}

impl Move {
    pub(crate) fn failed(&self, to: Tier, failure: Failure) -> BlockFailure {
        BlockFailure { identity: self.identity, path: Path::new(self.from, to), failure }
    }
}

/// A caller's share in an operation.
pub(crate) struct Interest {
    pub(crate) operation: Arc<Operation>,
}

impl Interest {
    /// Lets go. Whether this was the last share of an operation that has not settled, so that it should be cancelled.
    pub(crate) fn release(&self) -> bool {
        self.operation.interested.fetch_sub(1, Ordering::AcqRel) == 1 && !self.operation.settled.is_set()
    }
}

/// The failure of an operation whose time ran out.
pub(crate) fn expired(what: &str, limit: std::time::Duration) -> Failure {
    Failure::new(FailureKind::Deadline, format!("{what} not complete after {} ms", limit.as_millis()))
}
