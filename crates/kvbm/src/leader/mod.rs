//! The leader: decides, handles ids, never touches bytes.
//!
//! Callers' threads start operations; workers' threads bring the answers. Answers go through one inbox that whoever
//! comes first empties, so a worker that answers from inside `send` cannot recurse.

mod ancestors;
pub(crate) mod edge;
pub(crate) mod flush;
pub(crate) mod inflight;
pub(crate) mod offload;
pub(crate) mod operation;
pub(crate) mod plans;
pub(crate) mod recovery;
pub(crate) mod wear;

use crate::error::{BlockFailure, condemns_source};
use crate::metrics::{DropReason, Metrics};
use crate::onboard::Joins;
use crate::worker::WorkerLink;
use flush::Flushes;
use inflight::{Answer, Finished, Inflight};
use kvbm_plan::{
    ChecksumMode, Command, Endpoint, Epoch, Failure, FailureKind, Gate, Message, Path, PlanId, Priority,
    Rank, SequenceHash, Tier, TransferPlan, wire,
};
use kvbm_pool::{AnyArrivals, Completion, Prefix, Quarantine, Registry};
use offload::Offloads;
use operation::{Destination, Move, Operation, Outcome, Parts, PlanPart, Purpose, Unsettled};
use parking_lot::{Mutex, ReentrantMutex};
use recovery::{Part, Recoveries};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// Held while slots of G3 change hands and the workers are told, so that a slot is never released after its next block was
    /// sent to it. A link may answer from inside `send`, hence reentrant.
    pub(crate) disk_order: ReentrantMutex<()>,
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
    items: VecDeque<Item>,
    busy: bool,
}

/// What the leader has to react to, one after the other.
enum Item {
    /// A message in wire form.
    Message(Vec<u8>),
    /// A plan did not reach a rank.
    Unreached { plan_id: PlanId, rank: Rank, path: Path, failure: Failure },
}

impl Leader {
    pub(crate) fn new(
        registry: Registry,
        settings: Settings,
        metrics: Metrics,
        offloads: Offloads,
    ) -> Arc<Self> {
        let (epoch, ranks) = (settings.epoch, settings.ranks);
        let capacity = registry.capacity(Tier::G3);
        Arc::new(Self {
            registry,
            settings,
            metrics,
            offloads,
            joins: Joins::default(),
            flushes: Flushes::default(),
            recoveries: Recoveries::new(ranks, capacity),
            links: OnceLock::new(),
            inflight: Inflight::new(epoch, ranks),
            inbox: Mutex::new(Inbox::default()),
            disk_order: ReentrantMutex::new(()),
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
    #[cfg(feature = "worker")]
    pub(crate) fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::AcqRel).saturating_add(1)
    }

    /// Takes a number that somebody else gave to a device event. `false` where numbers do not grow.
    pub(crate) fn take_fence(&self, number: u64) -> bool {
        let grows = |last: u64| (number > last && number < u64::MAX).then_some(number);
        self.fences.fetch_update(Ordering::AcqRel, Ordering::Acquire, grows).is_ok()
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
        let limit = self.limit(&moves);
        let operation = Operation::new(purpose, to, limit, parts, ranges.len());
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
        let _inside = operation.span.enter();
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
            budget_ms: u32::try_from(operation.limit.as_millis()).unwrap_or(u32::MAX),
            checksums: ChecksumMode::Required,
        };
        for (rank, failure) in self.broadcast(&Command::Transfer(plan)) {
            self.react(Item::Unreached { plan_id, rank, path, failure });
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
        self.react(Item::Message(message));
    }

    fn react(self: &Arc<Self>, item: Item) {
        {
            let mut inbox = self.inbox.lock();
            inbox.items.push_back(item);
            if inbox.busy {
                return;
            }
            inbox.busy = true;
        }
        while let Some(item) = self.next_item() {
            // Whatever goes wrong with one item, the others are waited for.
            if catch_unwind(AssertUnwindSafe(|| self.handle(item))).is_err() {
                tracing::error!("the leader failed on a message; its plan runs into its deadline");
            }
        }
    }

    fn next_item(&self) -> Option<Item> {
        let mut inbox = self.inbox.lock();
        let next = inbox.items.pop_front();
        inbox.busy = next.is_some();
        next
    }

    fn handle(self: &Arc<Self>, item: Item) {
        match item {
            Item::Message(message) => self.handle_message(&message),
            Item::Unreached { plan_id, rank, path, failure } => {
                let answer = self.inflight.answer_failed(plan_id, rank, path, &failure);
                self.take(answer);
            }
        }
    }

    fn handle_message(self: &Arc<Self>, message: &[u8]) {
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
            Ok(Message::Recovered { rank, tier, blocks, unusable, last }) => {
                self.recoveries.answer(rank, tier, Part { blocks, unusable, last });
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

    /// All plans of an operation are over: arrivals become visible, sources are let go, waiters are told, in this order.
    fn settle(self: &Arc<Self>, operation: &Arc<Operation>, unsettled: Unsettled) {
        let _inside = operation.span.enter();
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
                let order = (operation.to == Tier::G3).then(|| self.disk_order.lock());
                let chained = operation.purpose == Purpose::Onboard;
                let arrivals = complete(arrivals, &places, &parts.moves, &mut failures, chained);
                if order.is_some() {
                    self.release_lost(&parts.moves, &failures);
                }
                // What is still reserved failed: its slot goes back to Reset.
                Some(arrivals.into_pinned())
            }
            Destination::Unregistered => None,
        };
        self.joins.remove(operation, &parts.moves);
        let failures = self.tell(operation, &parts.moves, failures);
        if let Some(arrived) = &arrived {
            self.registered(operation.to, || arrived.clone());
        }
        // Before anybody is told: who waited may want back what was kept for the transfer.
        drop(parts.keep);
        operation.settle(Outcome { arrived, failures });
        self.pump();
    }

    /// The failures with their blocks. Nobody waits for an offload, so the log tells of its failures.
    fn tell(
        &self,
        operation: &Operation,
        moves: &[Move],
        failures: Vec<Option<Failure>>,
    ) -> Vec<BlockFailure> {
        let failed = moves.iter().zip(failures);
        let failed = failed.filter_map(|(step, slot)| Some(step.failed(operation.to, slot?)));
        let failures: Vec<BlockFailure> = failed.collect();
        for failure in &failures {
            let expected = matches!(failure.failure.kind, FailureKind::Cancelled | FailureKind::ShuttingDown);
            if operation.purpose == Purpose::Offload && !expected {
                self.metrics.path(failure.path).dropped(DropReason::Failed).add(1);
                tracing::warn!(target: "kvbm", %failure, "block not offloaded");
            } else {
                tracing::debug!(target: "kvbm", %failure, "block did not arrive");
            }
        }
        failures
    }

    /// A source whose bytes were bad never serves again, nor after a restart.
    fn condemn_sources(&self, moves: &[Move], failures: &[Option<Failure>]) {
        for (step, slot) in moves.iter().zip(failures) {
            let condemned = slot.as_ref().is_some_and(|failure| condemns_source(failure.kind));
            if !condemned || step.src.0 >= self.registry.capacity(step.from) {
                continue;
            }
            self.metrics.tier(step.from).corrupt.add(1);
            let quarantine = self.registry.quarantine(step.from, step.src);
            tracing::warn!(
                target: "kvbm", tier = %step.from, block = %step.src, hash = %step.identity.hash, ?quarantine,
                "bad bytes: slot quarantined"
            );
            if step.from == Tier::G3 && quarantine != Quarantine::NotRegistered {
                self.release(&[step.src]);
            }
        }
    }

    /// Slots of G3 whose block did not become visible may hold a complete record, which a restart would find.
    fn release_lost(&self, moves: &[Move], failures: &[Option<Failure>]) {
        let lost = moves.iter().zip(failures).filter(|(_, slot)| slot.is_some());
        let lost: Vec<_> = lost.map(|(step, _)| step.dst).collect();
        self.release(&lost);
    }

    /// Gives up on an operation: unstarted plans are cancelled, started ones detach.
    pub(crate) fn abandon(&self, operation: &Arc<Operation>, reason: &Failure) {
        if operation.abandon(reason) {
            self.cancel(operation);
        }
    }

    /// Takes the plans of an abandoned operation back, as far as they have not started.
    pub(crate) fn cancel(&self, operation: &Arc<Operation>) {
        for plan_id in self.plans_of(operation) {
            // A worker that cannot be reached has nothing that could be cancelled.
            let _unreached = self.broadcast(&Command::Cancel { plan_id });
        }
    }

    fn plans_of(&self, operation: &Arc<Operation>) -> Vec<PlanId> {
        self.inflight.select(|part| Arc::ptr_eq(&part.operation, operation))
    }

    /// Operations under way that `select` picks, each once.
    pub(crate) fn operations(&self, select: impl Fn(&Operation) -> bool) -> Vec<Arc<Operation>> {
        let mut found: HashMap<*const Operation, Arc<Operation>> = HashMap::new();
        self.inflight.select(|part| {
            if select(&part.operation) {
                found.entry(Arc::as_ptr(&part.operation)).or_insert_with(|| Arc::clone(&part.operation));
            }
            false
        });
        found.into_values().collect()
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(&self, now: Instant) {
        for operation in self.operations(|operation| operation.deadline <= now) {
            self.abandon(&operation, &operation::expired("transfer", operation.limit));
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
) -> AnyArrivals {
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
        *slot = Some(Failure::new(FailureKind::Missing, "the block was removed while it was on its way"));
    }
    arrivals
}
