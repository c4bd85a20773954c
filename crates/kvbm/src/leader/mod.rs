//! The leader: decides, handles ids, never touches bytes.
//!
//! Callers' threads start operations; workers' threads bring the answers. Answers go through one inbox that whoever
//! comes first empties, so a worker that answers from inside `send` cannot recurse.

pub(crate) mod flush;
pub(crate) mod inflight;
pub(crate) mod offload;
pub(crate) mod operation;
pub(crate) mod plans;
pub(crate) mod recovery;
pub(crate) mod wear;

use crate::error::condemns_source;
use crate::metrics::Metrics;
use crate::onboard::Joins;
use crate::worker::WorkerLink;
use flush::Flushes;
use inflight::{Answer, Finished, Inflight};
use kvbm_plan::{
    ChecksumMode, Command, Endpoint, Epoch, Failure, FailureKind, Gate, Message, Path, PlanId, Priority,
    Rank, SequenceHash, Tier, TransferPlan, wire,
};
use kvbm_pool::{AnyArrivals, Completion, Pinned, Prefix, Registry};
use offload::Offloads;
use operation::{Destination, Move, Operation, Outcome, Parts, PlanPart, Purpose, Unsettled};
use parking_lot::Mutex;
use recovery::Recoveries;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What the leader goes by.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) epoch: Epoch,
    pub(crate) ranks: usize,
    /// Blocks of one plan.
    pub(crate) max_plan_blocks: usize,
    /// After this a transfer counts as failed.
    pub(crate) transfer_deadline: Duration,
    /// After this a read from disk counts as failed: recomputing is faster.
    pub(crate) read_deadline: Duration,
}

/// See the module.
pub(crate) struct Leader {
    pub(crate) registry: Registry,
    pub(crate) settings: Settings,
    pub(crate) metrics: Metrics,
    pub(crate) offloads: Offloads,
    pub(crate) joins: Joins,
    pub(crate) flushes: Flushes,
    pub(crate) recoveries: Recoveries,
    links: OnceLock<Vec<Box<dyn WorkerLink>>>,
    inflight: Inflight<PlanPart>,
    inbox: Mutex<Inbox>,
    /// Number of the last device event that the engine handed over; 0 for none.
    fence: AtomicU64,
    /// Numbers given to device events.
    fences: AtomicU64,
    /// Callers start nothing any more.
    turned_away: AtomicBool,
    /// Nothing starts any more.
    closed: AtomicBool,
}

/// An operation whose plans are cut and not sent.
pub(crate) struct Prepared {
    operation: Arc<Operation>,
    moves: Vec<Move>,
    ranges: Vec<Range<usize>>,
}

impl Prepared {
    pub(crate) fn operation(&self) -> &Arc<Operation> {
        &self.operation
    }
}

#[derive(Default)]
struct Inbox {
    messages: VecDeque<Vec<u8>>,
    busy: bool,
}

impl Leader {
    pub(crate) fn new(
        registry: Registry,
        settings: Settings,
        metrics: Metrics,
        offloads: Offloads,
    ) -> Arc<Self> {
        let (epoch, ranks) = (settings.epoch, settings.ranks);
        Arc::new(Self {
            registry,
            settings,
            metrics,
            offloads,
            joins: Joins::default(),
            flushes: Flushes::default(),
            recoveries: Recoveries::new(ranks),
            links: OnceLock::new(),
            inflight: Inflight::new(epoch, ranks),
            inbox: Mutex::new(Inbox::default()),
            fence: AtomicU64::new(0),
            fences: AtomicU64::new(0),
            turned_away: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        })
    }

    /// Connects the workers, rank by rank. Once.
    pub(crate) fn connect(&self, links: Vec<Box<dyn WorkerLink>>) {
        let connected = self.links.set(links);
        debug_assert!(connected.is_ok(), "workers are connected once");
    }

    /// No caller starts a transfer from now on.
    pub(crate) fn turn_away(&self) {
        self.turned_away.store(true, Ordering::Release);
    }

    pub(crate) fn is_turned_away(&self) -> bool {
        self.turned_away.load(Ordering::Acquire)
    }

    /// No operation starts from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The next number for a device event.
    pub(crate) fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Plans that touch G1 wait for the device event of this number from now on.
    pub(crate) fn set_fence(&self, number: u64) {
        self.fence.fetch_max(number, Ordering::AcqRel);
    }

    /// Plans in the hands of workers.
    pub(crate) fn plans_on(&self, path: Path) -> usize {
        self.inflight.on_path(path)
    }

    /// Sends a command to every worker. The ranks that it did not reach, with the reason.
    pub(crate) fn broadcast(&self, command: &Command) -> Vec<(Rank, Failure)> {
        let links = self.links.get().map_or(&[][..], Vec::as_slice);
        let failed = |detail: String| Failure::new(FailureKind::Io, detail);
        match wire::encode_command(command) {
            Ok(bytes) => {
                let refused =
                    links.iter().map(|link| link.send(&bytes)).zip(0..).filter_map(|(sent, rank)| {
                        sent.err().map(|error| (Rank(rank), failed(error.to_string())))
                    });
                refused.collect()
            }
            Err(error) => {
                let all = 0..self.settings.ranks as u16;
                all.map(|rank| (Rank(rank), failed(error.to_string()))).collect()
            }
        }
    }

    /// Makes an operation that is not under way yet: nothing can answer for it before [`send`](Self::send).
    pub(crate) fn prepare(&self, purpose: Purpose, to: Tier, parts: Parts) -> Prepared {
        let moves = parts.moves.clone();
        let ranges = plans::ranges(&moves, self.settings.max_plan_blocks);
        let deadline = Instant::now() + self.limit(&moves);
        let operation = Operation::new(purpose, to, deadline, parts, ranges.len());
        Prepared { operation, moves, ranges }
    }

    /// How long these moves may take.
    pub(crate) fn limit(&self, moves: &[Move]) -> Duration {
        let reads_disk = moves.iter().any(|step| step.from == Tier::G3);
        let limit = self.settings.transfer_deadline;
        if reads_disk { limit.min(self.settings.read_deadline) } else { limit }
    }

    /// Sends the plans of an operation.
    pub(crate) fn send(self: &Arc<Self>, prepared: Prepared) {
        let Prepared { operation, moves, ranges } = prepared;
        for range in ranges {
            self.send_plan(&operation, &moves, range);
        }
    }

    /// Sends the plan for `moves[range]` to every rank.
    fn send_plan(self: &Arc<Self>, operation: &Arc<Operation>, moves: &[Move], range: Range<usize>) {
        let from = moves[range.start].from;
        let path = Path::new(from, operation.to);
        let part = PlanPart { operation: Arc::clone(operation), first: range.start };
        let plan_id = self.inflight.enter(part, path, range.len());
        self.metrics.path(path).enter();
        let plan = TransferPlan {
            plan_id,
            epoch: self.settings.epoch,
            group: moves[range.start].identity.group,
            src: Endpoint::Local(from),
            dst: Endpoint::Local(operation.to),
            blocks: plans::transfers(&moves[range]),
            layers: None,
            gate: self.gate(path),
            after: Vec::new(),
            priority: match operation.purpose {
                Purpose::Onboard => Priority::Urgent,
                Purpose::Private => Priority::Normal,
                Purpose::Offload => Priority::Background,
            },
            budget_ms: u32::try_from(self.limit(moves).as_millis()).unwrap_or(u32::MAX),
            checksums: ChecksumMode::Required,
        };
        for (rank, failure) in self.broadcast(&Command::Transfer(plan)) {
            let answer = self.inflight.answer_failed(plan_id, rank, path, &failure);
            self.take(answer);
        }
    }

    /// A block of G1 is read after the engine wrote it and overwritten after the engine read it: both are behind the
    /// last event that the engine handed over.
    fn gate(&self, path: Path) -> Gate {
        let fence = self.fence.load(Ordering::Acquire);
        let touches_device = path.src == Tier::G1 || path.dst == Tier::G1;
        if touches_device && fence > 0 { Gate::DeviceEvent(fence) } else { Gate::None }
    }

    /// A message of a worker, in wire form. Malformed ones are counted and dropped: their plan runs into its deadline.
    pub(crate) fn deliver(self: &Arc<Self>, message: Vec<u8>) {
        {
            let mut inbox = self.inbox.lock();
            inbox.messages.push_back(message);
            if inbox.busy {
                return;
            }
            inbox.busy = true;
        }
        loop {
            let next = {
                let mut inbox = self.inbox.lock();
                let next = inbox.messages.pop_front();
                inbox.busy = next.is_some();
                next
            };
            match next {
                Some(message) => self.handle(&message),
                None => return,
            }
        }
    }

    fn handle(self: &Arc<Self>, message: &[u8]) {
        match wire::decode_message(message) {
            Ok(Message::Transfer(report)) => {
                let answer = self.inflight.answer(report);
                self.take(answer);
            }
            Ok(Message::Flushed { rank, epoch, token, outcome }) => {
                if epoch == self.settings.epoch {
                    self.flushes.answer(rank, token, outcome);
                }
            }
            Ok(Message::Recovered { rank, tier, blocks, last }) => {
                self.recoveries.answer(rank, tier, blocks, last);
            }
            Err(error) => {
                self.metrics.malformed_messages.add(1);
                tracing::warn!(%error, "malformed message of a worker dropped");
            }
        }
    }

    fn take(self: &Arc<Self>, answer: Answer<PlanPart>) {
        match answer {
            Answer::Finished(finished) => self.plan_finished(finished),
            Answer::Ignored => self.metrics.ignored_reports.add(1),
            Answer::Waiting => {}
        }
    }

    fn plan_finished(self: &Arc<Self>, finished: Finished<PlanPart>) {
        self.count_plan(&finished);
        let PlanPart { operation, first } = finished.operation;
        if let Some(unsettled) = operation.merge(first, finished.failures) {
            self.settle(&operation, unsettled);
        }
    }

    fn count_plan(&self, finished: &Finished<PlanPart>) {
        let path = self.metrics.path(finished.path);
        let failed = finished.failures.iter().flatten();
        failed.for_each(|failure| path.failures(failure.kind).add(1));
        let arrived = finished.failures.iter().filter(|slot| slot.is_none()).count();
        let Finished { queued, elapsed, bytes, .. } = finished;
        tracing::trace!(path = %finished.path, arrived, bytes, ?queued, ?elapsed, "plan finished");
        path.leave();
        if arrived > 0 {
            path.arrived(arrived as u64, finished.bytes, finished.elapsed);
        }
    }

    /// A hit counts once, where the block was found nearest, after it was verified.
    pub(crate) fn count_hits(&self, prefix: &Prefix, arrived: usize) {
        for block in prefix.blocks().iter().take(arrived) {
            self.metrics.tier(block.tier).hits.add(1);
        }
    }

    /// All plans of an operation are over: arrivals become visible, failures are told, sources are let go, in this order.
    fn settle(self: &Arc<Self>, operation: &Arc<Operation>, unsettled: Unsettled) {
        let Unsettled { parts, mut failures } = unsettled;
        if let Some(check) = &parts.source_check {
            for (index, slot) in failures.iter_mut().enumerate() {
                if slot.is_none() {
                    *slot = check(index);
                }
            }
        }
        self.condemn_sources(&parts.moves, &failures);
        let arrived = match parts.destination {
            Destination::Reserved { arrivals, places } => {
                let chained = operation.purpose == Purpose::Onboard;
                Some(complete(arrivals, &places, &parts.moves, &mut failures, chained))
            }
            Destination::Unregistered => None,
        };
        self.joins.remove(operation);
        let failed = parts.moves.iter().zip(failures).filter_map(|(step, slot)| {
            let failure = step.failed(operation.to, slot?);
            tracing::debug!(%failure, "block did not arrive");
            Some(failure)
        });
        let failures: Vec<_> = failed.collect();
        if let Some(arrived) = &arrived {
            self.registered(operation.to, || arrived.clone());
        }
        operation.settle(Outcome { arrived, failures });
        drop(parts.keep);
        self.pump();
    }

    /// A source whose bytes were bad never serves again.
    fn condemn_sources(&self, moves: &[Move], failures: &[Option<Failure>]) {
        for (step, slot) in moves.iter().zip(failures) {
            if slot.as_ref().is_some_and(|failure| condemns_source(failure.kind)) {
                self.registry.quarantine(step.from, step.src);
                self.metrics.tier(step.from).corrupt.add(1);
                tracing::warn!(tier = %step.from, block = %step.src, hash = %step.identity.hash, "slot quarantined");
            }
        }
    }

    /// Gives up on an operation: unstarted plans are cancelled, started ones detach.
    pub(crate) fn abandon(&self, operation: &Arc<Operation>, reason: &Failure) {
        if operation.abandon(reason) {
            for plan_id in self.plans_of(operation) {
                // A worker that cannot be reached has nothing that could be cancelled.
                let _unreached = self.broadcast(&Command::Cancel { plan_id });
            }
        }
    }

    fn plans_of(&self, operation: &Arc<Operation>) -> Vec<PlanId> {
        self.inflight.select(|part| Arc::ptr_eq(&part.operation, operation))
    }

    /// Operations under way that `select` picks, each once.
    pub(crate) fn operations(&self, select: impl Fn(&Operation) -> bool) -> Vec<Arc<Operation>> {
        let mut found: Vec<Arc<Operation>> = Vec::new();
        self.inflight.select(|part| {
            let known = found.iter().any(|operation| Arc::ptr_eq(operation, &part.operation));
            if !known && select(&part.operation) {
                found.push(Arc::clone(&part.operation));
            }
            false
        });
        found
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(&self, now: Instant) {
        let late = self.operations(|operation| operation.deadline <= now);
        let failure = operation::expired("transfer", self.settings.transfer_deadline);
        for operation in late {
            self.abandon(&operation, &failure);
        }
    }
}

/// Makes arrivals visible, first block first. In a chain, what comes after a failure is failed too: a prefix has no
/// holes. Elsewhere only blocks behind a failed parent are.
fn complete(
    mut arrivals: AnyArrivals,
    places: &[usize],
    moves: &[Move],
    failures: &mut [Option<Failure>],
    chained: bool,
) -> Pinned {
    let mut broken: Vec<SequenceHash> = Vec::new();
    for (step, slot) in moves.iter().zip(failures.iter_mut()) {
        let after_hole = chained && !broken.is_empty();
        let parent_failed = step.identity.parent.is_some_and(|parent| broken.contains(&parent));
        if slot.is_none() && (after_hole || parent_failed) {
            *slot = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
        }
        if slot.is_some() {
            broken.push(step.identity.hash);
        }
    }
    let whole =
        places.iter().zip(failures.iter()).filter(|(_, slot)| slot.is_none()).map(|(&place, _)| place);
    let completions = arrivals.complete_each(whole);
    let removed = failures.iter_mut().filter(|slot| slot.is_none()).zip(completions);
    for (slot, _) in removed.filter(|(_, completion)| *completion == Completion::Removed) {
        *slot = Some(Failure::new(FailureKind::Cancelled, "the block was removed while it was on its way"));
    }
    // What is still reserved failed: its slot goes back to Reset.
    arrivals.into_pinned()
}
