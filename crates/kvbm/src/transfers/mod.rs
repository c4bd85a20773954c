//! Transfers: everything from "these blocks go from here to there" to "every rank has reported how
//! it ended".
//!
//! [`Transfers::start`] is the entry point, for onboards, offloads, parked sequences and volumes
//! alike; onboards that later requests may join enter by `Arriving::start`. A [`Request`] says
//! which blocks move ([`Move`]), where they arrive ([`Destination`]), what stays held until no
//! worker can touch it (`holds`), and what is called when blocks become visible (`on_arrival`). The
//! caller gets a [`Handle`]: to wait, to look at the outcome, or to give the transfer up.
//!
//! ```text
//! Request ─ plans::ranges ─> plans ─ send ─> Ranks (workers)
//!                              │ Inflight: plans that not all ranks have answered
//! worker's report ─ report ────┘
//!      │ last rank of a plan: Transfer::merge
//!      │ last plan of a transfer: settle
//!      ├─ circuit breakers of the disk and of the volume learn what their reads came to
//!      ├─ bad sources are quarantined, missing ones removed from the registry
//!      ├─ destinations become visible, first block first; the others are given back
//!      ├─ on_arrival(blocks), then the holds are dropped
//!      └─ the outcome is published to the handles
//! ```
//!
//! A transfer past its deadline is given up (`late`). Its waiters get what has arrived from the
//! front on, and plans that have not started are cancelled. Everything it holds stays held until
//! the last rank has answered. Nothing here calls back up to whoever started a transfer, except
//! through `on_arrival`, `check` and [`VolumeEnd`]; none of the three runs under a lock that a
//! report takes.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `disk_reads` | results of reads from the disk tier | `transfer` |
//! | `joins` | blocks on their way to G1, for later requests | `handle`, `transfer` |
//! | `late` | transfers past their deadline | `transfer` |
//! | `send` | starting a transfer | `handle`, `transfer`, `plans`, `inflight` |
//! | `settle` | what follows when all plans are over | `transfer` |
//! | `handle` | a caller's share in a transfer | `transfer` |
//! | `transfer` | one transfer and its state | `plans`, `layers` |
//! | `plans` | splitting a transfer into plans | `layers` |
//! | `layers` | transfers that go layer by layer | - |
//! | `inflight` | plans that not all workers have answered | - |
//! | `history` | the last copies of blocks | - |
//! | `prefill` | measured speed of the engine | - |
//! | `speeds` | measured speeds of the paths | - |

pub(crate) mod disk_reads;
mod handle;
mod history;
mod inflight;
mod joins;
mod late;
mod layers;
pub(crate) mod plans;
mod prefill;
mod send;
mod settle;
mod speeds;
mod transfer;

use crate::circuit_breaker::RequestResults;
use crate::error::BlockFailure;
use crate::metrics::Metrics;
use crate::ranks::Ranks;
use crate::slots::Slots;
pub(crate) use handle::Handle;
use history::CopyHistory;
use inflight::{Answer, Finished, Inflight, SentAmong};
pub(crate) use joins::Arriving;
use joins::Joins;
use kvbm_plan::{
    BlockId, BlockIdentity, Command, Comparison, Epoch, Failure, FailureKind, LogLimit, Path, PlanId, Rank,
    Tier, TransferReport, VolumeId,
};
use kvbm_pool::{AnyArrivals, Losses, Lost, Pinned, Registry};
use late::Alarms;
pub(crate) use layers::LayerSteps;
use prefill::PrefillSpeed;
use speeds::Speeds;
pub(crate) use speeds::{BlockCosts, Pace, times};
use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
pub(crate) use transfer::{Outcome, expired};
use transfer::{PlanPart, Transfer};

/// A request waits for its blocks at least so long: they may wait for the engine's own step, which
/// computing them would wait for as well.
const LEAST_PATIENCE: Duration = Duration::from_millis(250);

/// What a plan costs the leader and a worker beside its bytes: a step of layers should take longer.
const COST_OF_A_PLAN: Duration = Duration::from_micros(100);

/// A device event behind everything that the engine had submitted to its streams when it was handed
/// over: what a plan that touches G1 waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub(crate) u64);

impl Fence {
    /// The number by which workers know the event.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// One block of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) identity: BlockIdentity,
    pub(crate) from: Tier,
    pub(crate) src: BlockId,
    pub(crate) dst: BlockId,
}

impl Move {
    pub(crate) fn failed(&self, to: Tier, failure: Failure) -> BlockFailure {
        BlockFailure { identity: self.identity, path: Path::new(self.from, to), failure }
    }
}

/// Why blocks move, hence their priority and what follows when they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A request waits for a prefix in G1.
    Onboard,
    /// A request waits for a prefix in blocks that the engine names; nothing becomes visible.
    EngineOnboard,
    /// Stored blocks are compared with what the engine computed; nothing is written.
    Audit,
    /// A scheduler waits for a prefix in G2, to promise it.
    Stage,
    /// A prefix is brought to G2 before a request asks for it.
    Prefetch,
    /// Copies are made one tier down.
    Offload,
    /// A sequence's private blocks move; nothing becomes visible.
    Private,
}

/// Why block `index` does not count, although it was copied: its source or destination changed
/// meanwhile.
pub(crate) type Check = Box<dyn Fn(usize) -> Option<Failure> + Send>;

/// Called with blocks that have become visible at the destination: once at the end, and before that
/// where a late transfer is given up and its front has arrived.
pub(crate) type OnArrival = Box<dyn Fn(&Pinned) + Send + Sync>;

/// Where the blocks arrive.
pub(crate) enum Destination {
    /// Slots of one of our tiers: move `i` fills reservation `places[i]`.
    Reserved { arrivals: AnyArrivals, places: Vec<usize> },
    /// The volume of the request.
    Volume,
    /// Memory that the caller keeps (the engine's, or a private batch): nothing becomes visible.
    Unregistered,
}

/// The volume at one end of a transfer. It learns how its part of the transfer ended.
pub(crate) trait VolumeEnd: Send + Sync {
    fn id(&self) -> VolumeId;
    /// Longest time of one request to the store.
    fn deadline(&self) -> Duration;
    /// Plans are about to be sent.
    fn requested(&self);
    /// Blocks came from the store or arrived there.
    fn served(&self);
    /// All plans are over; the transfer began at `began`.
    fn transfer_ended(&self, results: &RequestResults, began: Instant);
    /// Reads are over, with these failures.
    fn reads_ended(&self, moves: &[Move], failures: &[Option<Failure>]);
    /// Writes are over. Blocks that cannot count get a failure.
    fn writes_ended(&self, moves: &[Move], failures: &mut [Option<Failure>]);
}

/// What is to be transferred.
pub(crate) struct Request {
    pub(crate) purpose: Purpose,
    pub(crate) to: Tier,
    pub(crate) moves: Vec<Move>,
    pub(crate) destination: Destination,
    /// Read before the sources were known to be there. A tier that lost its blocks since then gave
    /// nothing, and got nothing that lasts.
    pub(crate) losses: Losses,
    /// Pins, private batches, engine blocks: dropped when no worker touches the blocks any more.
    pub(crate) holds: Vec<Box<dyn Any + Send>>,
    pub(crate) check: Option<Check>,
    /// The volume that blocks come from or go to, where one does.
    pub(crate) volume: Option<Arc<dyn VolumeEnd>>,
    pub(crate) on_arrival: Option<OnArrival>,
    /// Plans that touch G1 wait for this device event; for the last one that was set where there is
    /// none.
    pub(crate) fence: Option<Fence>,
    /// The longest that the transfer may take, where its caller has less patience than the settings
    /// say.
    pub(crate) limit: Option<Duration>,
    /// Between G1 and G2: layer by layer, not all of a block at a time.
    pub(crate) layers: Option<LayerSteps>,
    /// What G1 holds is final when this iteration is over.
    pub(crate) iteration: Option<u64>,
    /// How blocks are compared, where they are not copied.
    pub(crate) compare: Option<Comparison>,
}

impl Request {
    pub(crate) fn new(
        purpose: Purpose,
        to: Tier,
        moves: Vec<Move>,
        destination: Destination,
        losses: Losses,
    ) -> Self {
        Self {
            purpose,
            to,
            moves,
            destination,
            losses,
            holds: Vec::new(),
            check: None,
            volume: None,
            on_arrival: None,
            fence: None,
            limit: None,
            layers: None,
            iteration: None,
            compare: None,
        }
    }

    /// Also holds this until no worker touches the blocks any more.
    pub(crate) fn hold(mut self, hold: impl Any + Send) -> Self {
        self.holds.push(Box::new(hold));
        self
    }
}

/// What the transfers of a leader go by.
#[derive(Clone, Debug)]
pub(crate) struct TransferSettings {
    pub(crate) epoch: Epoch,
    /// For each rank the one that writes its bytes to G3 and G4.
    pub(crate) writers: Vec<Rank>,
    /// Most blocks of one plan.
    pub(crate) max_plan_blocks: usize,
    /// Most blocks of one plan that reads from a disk or a volume.
    pub(crate) max_read_blocks: usize,
    /// A transfer that takes longer fails.
    pub(crate) transfer_deadline: Duration,
    /// A read from disk that takes longer than this and the time of its bytes fails: computing the
    /// blocks is faster.
    pub(crate) read_deadline: Duration,
    /// Whether what an engine loads from below G2 is copied to G2 too.
    pub(crate) keep_loaded: bool,
    /// So many times what it takes to compute the blocks is what a request waits for them, where
    /// that is known; 0 for any time.
    pub(crate) onboard_patience: f64,
    /// Layers of a block that a transfer can move one by one, on each rank.
    pub(crate) num_layers: u32,
    /// Most steps of a transfer that goes layer by layer.
    pub(crate) layer_steps: u32,
    /// As configured; [`Transfers::block_costs`] has what was measured.
    pub(crate) block_costs: BlockCosts,
}

/// See the module.
pub(crate) struct Transfers {
    registry: Registry,
    ranks: Arc<Ranks>,
    slots: Arc<Slots>,
    metrics: Metrics,
    pub(crate) settings: TransferSettings,
    inflight: Inflight<PlanPart>,
    joins: Joins,
    speeds: Speeds,
    prefill: PrefillSpeed,
    /// Of failures in the log.
    log_limit: LogLimit<(Path, Option<VolumeId>, FailureKind)>,
    alarms: Alarms,
    history: CopyHistory,
    /// Number of the last device event that the engine handed over; 0 for none.
    fence: AtomicU64,
    /// Last number given to a device event.
    fences: AtomicU64,
    /// Last tag given to a transfer.
    tags: AtomicU64,
    /// Callers start nothing any more.
    refuses_callers: AtomicBool,
    /// Nothing starts any more.
    closed: AtomicBool,
}

impl Transfers {
    pub(crate) fn new(
        registry: Registry,
        ranks: Arc<Ranks>,
        slots: Arc<Slots>,
        metrics: Metrics,
        settings: TransferSettings,
    ) -> Arc<Self> {
        Arc::new(Self {
            inflight: Inflight::new(settings.epoch, ranks.len()).shared_by(settings.writers.clone()),
            joins: Joins::default(),
            speeds: Speeds::default(),
            prefill: PrefillSpeed::default(),
            log_limit: LogLimit::default(),
            alarms: Alarms::default(),
            history: CopyHistory::default(),
            fence: AtomicU64::new(0),
            fences: AtomicU64::new(0),
            tags: AtomicU64::new(0),
            refuses_callers: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            registry,
            ranks,
            slots,
            metrics,
            settings,
        })
    }

    /// No caller starts a transfer from now on.
    pub(crate) fn refuse_callers(&self) {
        self.refuses_callers.store(true, Ordering::Release);
    }

    /// Whether the manager is shutting down.
    pub(crate) fn refuses_callers(&self) -> bool {
        self.refuses_callers.load(Ordering::Acquire)
    }

    /// No transfer starts from now on.
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
    pub(crate) fn set_fence(&self, fence: Fence) {
        self.fence.fetch_max(fence.0, Ordering::AcqRel);
    }

    /// Plans of `path` that not all ranks have answered.
    pub(crate) fn plans_on(&self, path: Path) -> usize {
        self.inflight.on_path(path)
    }

    /// Plans that `rank` has not answered.
    pub(crate) fn owed_by(&self, rank: Rank) -> Vec<(PlanId, Path)> {
        self.inflight.owed_by(rank, |_, _| true)
    }

    /// Of those, plans that were sent to all ranks.
    pub(crate) fn sent_to(&self, rank: Rank) -> Vec<(PlanId, Path)> {
        self.inflight.owed_by(rank, |_, sent| sent.is_some())
    }

    /// Of those, plans that went to an earlier worker of the rank, before start number `announced`,
    /// and whose time is over since `started`. A plan that was being sent when the worker announced
    /// its start may be the new worker's: it has twice the time.
    pub(crate) fn owed_by_earlier(
        &self,
        rank: Rank,
        announced: u64,
        started: Instant,
        now: Instant,
    ) -> Vec<(PlanId, Path)> {
        // The earlier worker has had the time of a transfer, should the plan have reached it after
        // all.
        let elapsed = now.saturating_duration_since(started);
        self.inflight.owed_by(rank, |part, sent| match sent {
            Some(SentAmong { after, .. }) if after < announced => elapsed >= part.transfer.limit,
            Some(SentAmong { before, .. }) if before < announced => elapsed / 2 >= part.transfer.limit,
            _ => false,
        })
    }

    /// The losses of tiers so far.
    pub(crate) fn losses(&self) -> Losses {
        self.registry.losses()
    }

    /// Whether what was handed out there on a tier is gone since then. Counts it: callers ask where
    /// they want to use it.
    pub(crate) fn check_lost(&self, tier: Tier, since: Losses) -> Result<(), Lost> {
        if !self.registry.is_lost(tier, since) {
            return Ok(());
        }
        let lost = Lost { tier };
        self.count_lost(lost);
        Err(lost)
    }

    /// A caller came with blocks that are gone, and was refused.
    pub(crate) fn count_lost(&self, lost: Lost) {
        self.metrics.tier(lost.tier).lost_refusals.add(1);
    }

    /// Measured time of a block along `path`, if enough blocks took it lately.
    pub(crate) fn time_per_block(&self, path: Path) -> Option<Duration> {
        self.speeds.per_block(path, kvbm_plan::clock::now())
    }

    /// The engine computed so many tokens of prompts in `elapsed`. Whether that counts.
    pub(crate) fn saw_prefill(&self, tokens: u64, elapsed: Duration) -> bool {
        self.prefill.saw(tokens, elapsed)
    }

    /// What a block costs: to compute it takes what the configuration says, else what the engine's
    /// steps took.
    pub(crate) fn block_costs(&self) -> BlockCosts {
        let costs = self.settings.block_costs;
        let measured = || {
            let per_token = self.prefill.per_token()?;
            Duration::try_from_secs_f64(per_token * f64::from(costs.tokens)).ok()
        };
        BlockCosts { recompute: costs.recompute.or_else(measured), ..costs }
    }

    /// What is known of `path` where so many blocks are waited for or computed, and the blocks that
    /// wait there for earlier transfers.
    pub(crate) fn pace(&self, path: Path, recompute: Duration, blocks: usize) -> (Pace, usize) {
        let now = kvbm_plan::clock::now();
        let patience = self.onboard_patience(recompute, blocks).unwrap_or(self.settings.transfer_deadline);
        let before = self.blocks_before(path, now);
        (self.speeds.pace(path, recompute, blocks, patience, now), before)
    }

    /// Blocks that transfers wait for on `path`; those that hang are not counted.
    fn blocks_before(&self, path: Path, now: Instant) -> usize {
        let share = |part: &PlanPart| if part.transfer.is_waited_for(now) { part.share() } else { 0.0 };
        self.inflight.blocks_on(path, share)
    }

    /// The steps of a transfer of so many blocks between G1 and G2 that goes layer by layer. `None`
    /// where that has nothing to hide: all of it is over as soon as the plans for its layers are
    /// made. With `iteration`, the steps wait until that has computed their layers.
    pub(crate) fn layer_steps(
        &self,
        path: Path,
        blocks: usize,
        iteration: Option<u64>,
    ) -> Option<LayerSteps> {
        let time = self.time_per_block(path).map(|each| times(each, blocks));
        let worth = time.map_or(u32::MAX, |time| {
            u32::try_from(time.as_micros() / COST_OF_A_PLAN.as_micros()).unwrap_or(u32::MAX)
        });
        LayerSteps::new(self.settings.num_layers, self.settings.layer_steps.min(worth), iteration)
    }

    /// Whether a load from G2 by layer takes no longer than computing so many tokens.
    pub(crate) fn hides_load(&self, blocks: usize, tokens: u64) -> bool {
        let (path, costs) = (Path::G2_G1, self.block_costs());
        let (Some(each), Some(recompute)) = (self.time_per_block(path), costs.recompute) else {
            return false;
        };
        let before = self.blocks_before(path, kvbm_plan::clock::now());
        let load = each.as_secs_f64() * blocks.saturating_add(before) as f64;
        let computing = recompute.as_secs_f64() * tokens as f64 / f64::from(costs.tokens.max(1));
        load <= computing && self.layer_steps(path, blocks, None).is_some()
    }

    /// How long a request waits for blocks that take so long to compute.
    fn onboard_patience(&self, recompute: Duration, blocks: usize) -> Option<Duration> {
        let patience = self.settings.onboard_patience;
        let time = times(recompute, blocks).as_secs_f64() * patience;
        (patience > 0.0)
            .then(|| Duration::try_from_secs_f64(time).unwrap_or(Duration::MAX).max(LEAST_PATIENCE))
    }

    /// Gives up on a transfer: unstarted plans are cancelled, started ones detach. `false` where it
    /// was given up before, or is over.
    fn abandon(&self, transfer: &Arc<Transfer>, reason: &Failure) -> bool {
        let abandoned = transfer.abandon(reason);
        if abandoned {
            self.cancel(transfer);
        }
        abandoned
    }

    /// Takes back the plans of an abandoned transfer that have not started.
    fn cancel(&self, transfer: &Arc<Transfer>) {
        for plan_id in self.inflight.select(|part| Arc::ptr_eq(&part.transfer, transfer)) {
            // A worker that is not reached has nothing that could be cancelled.
            let _not_sent = self.ranks.broadcast(&Command::Cancel { plan_id });
        }
    }

    /// Transfers under way that `select` picks, each once.
    fn select(&self, select: impl Fn(&Transfer) -> bool) -> Vec<Arc<Transfer>> {
        let (mut seen, mut all) = (HashSet::new(), Vec::new());
        self.inflight.select(|part| {
            if seen.insert(Arc::as_ptr(&part.transfer)) {
                all.push(Arc::clone(&part.transfer));
            }
            false
        });
        // Looked at without the table's lock, and once, however many plans they have.
        all.retain(|transfer| select(transfer));
        all
    }

    /// Gives up transfers that read nothing but these blocks of `tier`.
    pub(crate) fn cancel_reads(&self, tier: Tier, ids: &HashSet<BlockId>, reason: &Failure) {
        for transfer in self.select(|transfer| transfer.reads_only(tier, ids)) {
            self.abandon(&transfer, reason);
        }
    }

    /// Waits for transfers from and to a volume, at most so long; what is late is given up.
    pub(crate) fn end_with_volume(&self, id: VolumeId, most: Duration) {
        let deadline = kvbm_plan::deadline_after(kvbm_plan::clock::now(), most);
        for transfer in self.select(|transfer| transfer.volume_id() == Some(id)) {
            if !transfer.settled.wait_until(deadline) {
                self.abandon(&transfer, &expired("a transfer of a volume that is unregistered", most));
            }
        }
    }

    /// A rank's report on a plan.
    pub(crate) fn report(&self, report: TransferReport) {
        let answer = self.inflight.answer(report);
        self.take(answer);
    }

    /// A rank will not answer these plans, or could not be sent them.
    pub(crate) fn fail_plans(&self, rank: Rank, owed: &[(PlanId, Path)], failure: &Failure) {
        for &(plan_id, path) in owed {
            let answer = self.inflight.answer_failed(plan_id, rank, path, failure);
            self.take(answer);
        }
    }

    fn take(&self, answer: Answer<PlanPart>) {
        match answer {
            Answer::Finished(finished) => {
                // Whatever goes wrong with one transfer, the others are waited for.
                if catch_unwind(AssertUnwindSafe(|| self.plan_finished(&finished))).is_err() {
                    tracing::error!(
                        "the leader failed on a report; its transfer is over, or runs into its deadline"
                    );
                }
            }
            Answer::Ignored => self.metrics.ignored_reports.add(1),
            Answer::Waiting => {}
        }
    }

    fn plan_finished(&self, finished: &Finished<PlanPart>) {
        let part = &finished.operation;
        self.note_served(&part.transfer, finished);
        let unsettled = part.transfer.merge(part, &finished.failures, finished.own.then_some(finished.busy));
        self.count_plan(finished);
        if let Some(unsettled) = unsettled {
            self.settle(&part.transfer, unsettled);
        }
    }

    /// Blocks that arrived prove that a store works, whatever the other blocks wait for.
    fn note_served(&self, transfer: &Transfer, finished: &Finished<PlanPart>) {
        let Finished { path, own, failures, .. } = finished;
        if !own || failures.iter().all(Option::is_some) {
            return;
        }
        if path.src == Tier::G3 {
            let blocks = transfer.moves.iter().skip(finished.operation.first).zip(failures);
            let served = blocks.filter(|(_, failure)| failure.is_none()).map(|(block, _)| block.src);
            self.slots.directories().note_service(served);
        }
        if (path.src == Tier::G4 || path.dst == Tier::G4)
            && let Some(volume) = &transfer.volume
        {
            volume.served();
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
        let part = &finished.operation;
        if arrived > 0 {
            // A block that comes in steps counts with the last of them.
            let blocks = if part.is_last_step() { arrived as u64 } else { 0 };
            path.arrived(blocks, finished.bytes, finished.elapsed);
        }
        let is_late =
            |failure: &Failure| matches!(failure.kind, FailureKind::Deadline | FailureKind::PathBusy);
        if arrived > 0 || finished.own && finished.failures.iter().flatten().any(is_late) {
            self.speeds.saw(finished.path, arrived as f64 * part.share(), finished.elapsed);
        }
    }
}
