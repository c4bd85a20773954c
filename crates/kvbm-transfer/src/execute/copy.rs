//! Copies between two memories: batched and scattered on a device stream, by the CPU where both are
//! host memory, or by the process that one of them belongs to.

use super::compare::{self, Difference, Fetched};
use super::fused::Way;
use super::sums::{PassingSums, Summed};
use crate::completion_queue::{CompletionQueue, Done, Stage};
use crate::movers::Movers;
use kvbm_device::{CopyBatch, CudaStream, Device, DeviceError, Direction, Event, RowAxis, RowGrid, Stream};
use kvbm_layout::{CopyPlan, Dim, PlanError, RunGrid, Selection};
use kvbm_plan::{
    BlockId, BlockOutcome, BlockTransfer, ChecksumMode, Comparison, Endpoint, Failure, FailureKind, Gate,
    LayerRange, PlanId, Tier, TransferPlan,
};
use kvbm_storage::{BoundLayout, RegionBytes};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Times that blocks are issued again because a block before them stopped their stream.
const MAX_ATTEMPTS: u8 = 8;
/// Shorter runs are summed faster when the whole block has arrived: each piece costs as much as
/// some hundred bytes.
const MIN_SUMMED_RUN: u64 = 1 << 10;
/// Copy plans of layer ranges that are kept.
const MAX_RANGES: usize = 1024;

/// Two memories and the runs between their blocks.
pub(crate) struct Route {
    src: BoundLayout,
    dst: BoundLayout,
    whole: Arc<CopyPlan>,
    ranges: HashMap<(u32, u32), Arc<CopyPlan>>,
    /// Whether whole blocks are copied in the order in which their content is summed.
    summed: bool,
}

impl Route {
    pub(crate) fn new(src: BoundLayout, dst: BoundLayout) -> Result<Self, PlanError> {
        let whole = CopyPlan::between(src.layout().as_ref(), dst.layout().as_ref(), &Selection::all())?;
        Ok(Self { src, dst, whole: Arc::new(whole), ranges: HashMap::new(), summed: false })
    }

    /// Lets whole blocks be summed while they are copied, if `in_order` says of their plan that it
    /// has the right order.
    pub(crate) fn summed_if(mut self, in_order: impl FnOnce(&CopyPlan) -> bool) -> Self {
        let run = self.whole.bytes_per_block() / self.whole.num_runs().max(1);
        self.summed = run >= MIN_SUMMED_RUN && in_order(&self.whole);
        self
    }

    pub(crate) fn src(&self) -> &BoundLayout {
        &self.src
    }

    pub(crate) fn dst(&self) -> &BoundLayout {
        &self.dst
    }

    /// Fragments of a block, and its bytes.
    pub(crate) fn fragments(&self) -> (u64, u64) {
        (self.whole.num_runs(), self.whole.bytes_per_block())
    }

    pub(crate) fn plan(&mut self, layers: Option<LayerRange>) -> Result<Arc<CopyPlan>, PlanError> {
        let Some(LayerRange { first, count }) = layers else { return Ok(Arc::clone(&self.whole)) };
        if let Some(plan) = self.ranges.get(&(first, count)) {
            return Ok(Arc::clone(plan));
        }
        let selection = self.src.layout().config().select_layers(first, count);
        let plan =
            Arc::new(CopyPlan::between(self.src.layout().as_ref(), self.dst.layout().as_ref(), &selection)?);
        if self.ranges.len() >= MAX_RANGES {
            self.ranges.clear();
        }
        self.ranges.insert((first, count), Arc::clone(&plan));
        Ok(plan)
    }

    /// Bytes that a block of this plan moves.
    pub(crate) fn bytes(&mut self, layers: Option<LayerRange>) -> u64 {
        self.plan(layers).map_or(0, |plan| plan.bytes_per_block())
    }
}

/// What executes copies.
pub(crate) enum Lane {
    /// The CPU, at once.
    Host,
    /// A stream of its own, and the way of each cache group. A stream that failed is replaced.
    Device { device: Arc<dyn Device>, stream: Arc<dyn Stream>, direction: Direction, ways: Vec<Way> },
    /// The process that G1 belongs to.
    Mover(MoverLane),
}

/// Copies by the process that G1 belongs to.
pub(crate) struct MoverLane {
    pub(crate) movers: Arc<dyn Movers>,
    /// Ids of all copies of the worker.
    pub(crate) next_id: Arc<AtomicU64>,
    /// Whether G1 is the destination.
    pub(crate) into_g1: bool,
    /// What movers call the first slot of this side's host memory.
    pub(crate) first: u32,
    /// Whether that is a staging ring: its blocks were verified as they came.
    pub(crate) is_ring: bool,
}

impl MoverLane {
    /// The copy of blocks of one plan, in the words of a mover.
    fn plan<T>(&self, items: &[Item<T>]) -> Option<TransferPlan> {
        let plan = &items.first()?.plan;
        let [g1, host] = [Tier::G1, Tier::G2].map(Endpoint::Local);
        let (src, dst) = if self.into_g1 { (host, g1) } else { (g1, host) };
        let block = |item: &Item<T>| {
            let identity = item.plan.blocks[item.index as usize].identity;
            let host = |slot: u32| self.first.saturating_add(slot);
            let (src, dst) =
                if self.into_g1 { (host(item.from), item.to) } else { (item.from, host(item.to)) };
            BlockTransfer { identity, src: BlockId(src), dst: BlockId(dst) }
        };
        Some(TransferPlan {
            plan_id: PlanId(self.next_id.fetch_add(1, Ordering::Relaxed)),
            epoch: plan.epoch,
            group: plan.group,
            src,
            dst,
            blocks: items.iter().map(block).collect(),
            layers: plan.layers,
            gate: Gate::None,
            after: Vec::new(),
            priority: plan.priority,
            budget_ms: 0,
            checksums: if self.is_ring { ChecksumMode::None } else { plan.checksums },
            tag: plan.tag,
            compare: plan.compare,
        })
    }
}

impl Lane {
    /// A stream called `name` for copies in `direction`, which go these ways, by cache group.
    pub(crate) fn on_device(
        device: Arc<dyn Device>,
        name: &str,
        direction: Direction,
        ways: Vec<Way>,
    ) -> Result<Self, DeviceError> {
        let stream = device.create_stream(name)?;
        Ok(Self::Device { device, stream, direction, ways })
    }
}

/// One block on its way. `hold` is what must not be let go of before the copy is over.
pub(crate) struct Item<T> {
    pub(crate) plan: Arc<TransferPlan>,
    pub(crate) index: u32,
    /// Slot in the source memory.
    pub(crate) from: u32,
    /// Slot in the destination memory.
    pub(crate) to: u32,
    pub(crate) hold: T,
}

/// Blocks of one plan.
struct Batch<T> {
    items: Vec<Item<T>>,
    attempts: u8,
}

impl<T> Batch<T> {
    /// The cache group of its blocks: only plans of groups that there are get here.
    fn group(&self) -> usize {
        self.items.first().map_or(0, |item| usize::from(item.plan.group.0))
    }

    /// How its blocks are compared, where they are not copied.
    fn comparison(&self) -> Option<Comparison> {
        self.items.first().and_then(|item| item.plan.compare)
    }
}

/// A batch that a stream has.
struct Flying<T> {
    batch: Batch<T>,
    sums: Option<Summed>,
    /// What the blocks are compared with.
    fetched: Option<Fetched>,
}

/// A checksum that was computed on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    /// Of the content alone.
    Content(u64),
    /// Of the block, bound to its identity.
    Block(u64),
}

/// The result of a block: its checksum, where that was computed on the way.
pub(crate) type Copied = Result<Option<Sum>, NotCopied>;

/// Why a block was not copied, or is not what it was compared with.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NotCopied {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Differs(Difference),
    /// What the engine's process found, which copied or compared.
    #[error("copy by the engine's process: {reason}")]
    Elsewhere { kind: FailureKind, reason: String },
}

impl NotCopied {
    pub(crate) fn kind(&self) -> FailureKind {
        match self {
            Self::Device(_) => FailureKind::Device,
            Self::Differs(_) => FailureKind::Differs,
            Self::Elsewhere { kind, .. } => *kind,
        }
    }
}

/// Copies batches of blocks over one route, or one for each cache group. Results gather until
/// [`Copier::finished`] takes them.
pub(crate) struct Copier<T> {
    /// By cache group.
    routes: Vec<Route>,
    lane: Lane,
    completions: Arc<CompletionQueue>,
    next_ticket: u64,
    flying: HashMap<u64, Flying<T>>,
    parked: VecDeque<Batch<T>>,
    blocks: usize,
    finished: Vec<(Item<T>, Copied)>,
}

impl<T> Copier<T> {
    /// Tickets are even from 0, so that a carrier may use odd ones.
    pub(crate) fn new(routes: Vec<Route>, lane: Lane, completions: Arc<CompletionQueue>) -> Self {
        Self {
            routes,
            lane,
            completions,
            next_ticket: 0,
            flying: HashMap::new(),
            parked: VecDeque::new(),
            blocks: 0,
            finished: Vec::new(),
        }
    }

    /// Bytes that a block of this plan moves.
    pub(crate) fn bytes(&mut self, plan: &TransferPlan) -> u64 {
        self.routes[usize::from(plan.group.0)].bytes(plan.layers)
    }

    /// Whether a mover that copies blocks of this plan into G1 says which bytes it has read.
    pub(crate) fn is_summed_elsewhere(&self, plan: &TransferPlan) -> bool {
        matches!(&self.lane, Lane::Mover(lane) if lane.into_g1 && !lane.is_ring) && plan.layers.is_none()
    }

    /// Blocks started and not finished.
    pub(crate) fn in_flight(&self) -> usize {
        self.blocks
    }

    pub(crate) fn is_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Starts copying blocks of one plan.
    pub(crate) fn start(&mut self, items: Vec<Item<T>>) {
        if !items.is_empty() {
            self.blocks += items.len();
            self.launch(Batch { items, attempts: 0 });
        }
    }

    pub(crate) fn retry(&mut self) {
        for _ in 0..self.parked.len() {
            if let Some(batch) = self.parked.pop_front() {
                self.launch(batch);
            }
        }
    }

    /// Blocks that are over since the last call.
    pub(crate) fn finished(&mut self) -> Vec<(Item<T>, Copied)> {
        let finished = std::mem::take(&mut self.finished);
        self.blocks -= finished.len();
        finished
    }

    /// An event of this copier completed.
    pub(crate) fn complete(&mut self, ticket: u64, result: Result<(), DeviceError>) {
        let Some(Flying { batch, sums, fetched }) = self.flying.remove(&ticket) else { return };
        match (result, fetched) {
            (Ok(()), Some(fetched)) => self.compare_fetched(batch, &fetched),
            (Ok(()), None) => {
                let sums = sums.and_then(|sums| sums.of(batch.items.len()));
                let sum =
                    |index: usize| sums.as_ref().and_then(|sums| sums.get(index).copied().map(Sum::Content));
                let items = batch.items.into_iter().enumerate();
                self.finished.extend(items.map(|(index, item)| (item, Ok(sum(index)))));
            }
            (Err(error), _) => self.recover(batch, &error),
        }
    }

    /// A copy by a mover is over.
    pub(crate) fn moved(&mut self, ticket: u64, outcomes: Vec<BlockOutcome>) {
        let Some(Flying { batch, .. }) = self.flying.remove(&ticket) else { return };
        let mut outcomes = outcomes.into_iter();
        for item in batch.items {
            let copied = match outcomes.next() {
                Some(BlockOutcome::Done { checksum }) => {
                    let is_summed =
                        item.plan.layers.is_none() && item.plan.checksums == ChecksumMode::Required;
                    Ok(is_summed.then_some(Sum::Block(checksum)))
                }
                Some(BlockOutcome::Failed(failure)) => Err(not_moved(&item.plan, failure)),
                None => {
                    let reason = "it reported no result for this block";
                    Err(not_moved(&item.plan, Failure::new(FailureKind::Device, reason)))
                }
            };
            self.finished.push((item, copied));
        }
    }

    /// One bad block must not fail the others: those that were not run are issued again, and those
    /// that shared a batch with a failure are issued one by one.
    fn recover(&mut self, batch: Batch<T>, error: &DeviceError) {
        let not_run = matches!(error, DeviceError::Poisoned { .. } | DeviceError::Closed { .. });
        let attempts = batch.attempts + 1;
        if attempts > MAX_ATTEMPTS || (!not_run && batch.items.len() == 1) {
            self.fail(batch, error);
        } else if not_run {
            self.launch(Batch { attempts, ..batch });
        } else {
            for item in batch.items {
                self.launch(Batch { items: vec![item], attempts });
            }
        }
    }

    fn fail(&mut self, batch: Batch<T>, error: &DeviceError) {
        self.finished.extend(batch.items.into_iter().map(|item| (item, Err(error.clone().into()))));
    }

    fn launch(&mut self, batch: Batch<T>) {
        let layers = batch.items.first().and_then(|item| item.plan.layers);
        let plan = match self.routes[batch.group()].plan(layers) {
            Ok(plan) => plan,
            Err(error) => return self.fail(batch, &refused(&error)),
        };
        let comparison = batch.comparison();
        match &mut self.lane {
            Lane::Host => match comparison {
                Some(comparison) => self.compare_now(batch, &plan, comparison),
                None => self.copy_now(batch, &plan),
            },
            Lane::Mover(_) => self.launch_by_mover(batch),
            Lane::Device { device, stream, .. } => {
                if stream.status().is_err() {
                    match device.create_stream(stream.name()) {
                        Ok(fresh) => *stream = fresh,
                        Err(error) => return self.fail(batch, &error),
                    }
                }
                match comparison {
                    Some(comparison) => self.fetch(batch, &plan, comparison),
                    None => self.launch_on_device(batch, &plan),
                }
            }
        }
    }

    fn compare_now(&mut self, batch: Batch<T>, plan: &CopyPlan, comparison: Comparison) {
        let route = &self.routes[batch.group()];
        for item in batch.items {
            let result = compare::on_host(route, plan, item.from, item.to, comparison);
            self.finished.push((item, compared(result)));
        }
    }

    /// Brings the other ends to the host, a few at a time: an audit may wait.
    fn fetch(&mut self, mut batch: Batch<T>, plan: &CopyPlan, comparison: Comparison) {
        let Lane::Device { stream, .. } = &self.lane else { return };
        if self.flying.values().any(|flying| flying.fetched.is_some()) {
            return self.parked.push_back(batch);
        }
        let most = Fetched::most(plan);
        if batch.items.len() > most {
            let (items, attempts) = (batch.items.split_off(most), batch.attempts);
            self.parked.push_back(Batch { items, attempts });
        }
        let slots: Vec<_> = batch.items.iter().map(|item| (item.from, item.to)).collect();
        match Fetched::start(&**stream, &self.routes[batch.group()], plan, &slots, comparison) {
            Ok((fetched, event)) => self.fly(batch, None, Some(fetched), &event),
            Err(DeviceError::QueueFull { .. }) => self.parked.push_back(batch),
            Err(error) => self.recover(batch, &error),
        }
    }

    fn compare_fetched(&mut self, batch: Batch<T>, fetched: &Fetched) {
        let layers = batch.items.first().and_then(|item| item.plan.layers);
        let group = batch.group();
        let plan = match self.routes[group].plan(layers) {
            Ok(plan) => plan,
            Err(error) => return self.fail(batch, &refused(&error)),
        };
        for (index, item) in batch.items.into_iter().enumerate() {
            let result = fetched.compare(&self.routes[group], &plan, index, (item.from, item.to));
            self.finished.push((item, compared(result)));
        }
    }

    fn copy_now(&mut self, batch: Batch<T>, plan: &CopyPlan) {
        let route = &self.routes[batch.group()];
        for item in batch.items {
            let result = copy_on_host(route, plan, item.from, item.to);
            self.finished.push((item, result.map(|()| None).map_err(NotCopied::from)));
        }
    }

    fn launch_by_mover(&mut self, batch: Batch<T>) {
        let Lane::Mover(lane) = &self.lane else { return };
        let Some(plan) = lane.plan(&batch.items) else { return };
        let (movers, ticket) = (Arc::clone(&lane.movers), self.next_ticket);
        self.next_ticket += 2;
        self.flying.insert(ticket, Flying { batch, sums: None, fetched: None });
        let completions = Arc::clone(&self.completions);
        let done = move |outcomes| completions.put(Done { ticket, result: Stage::Moved(outcomes) });
        movers.copy(plan, Box::new(done));
    }

    /// Whether whole blocks are summed up on their way, because somebody will want that.
    fn is_summed(&self, batch: &Batch<T>) -> bool {
        let wanted =
            |item: &Item<T>| item.plan.layers.is_none() && item.plan.checksums == ChecksumMode::Required;
        self.routes[batch.group()].summed && batch.items.iter().all(wanted)
    }

    fn launch_on_device(&mut self, mut batch: Batch<T>, plan: &CopyPlan) {
        let summed = self.is_summed(&batch);
        let group = batch.group();
        let Lane::Device { stream, direction, ways, .. } = &mut self.lane else { return };
        let way = &mut ways[group];
        if let Way::Fused(fused) = way {
            if batch.items.len() > fused.slots() {
                let (second, attempts) = (batch.items.split_off(fused.slots()), batch.attempts);
                self.launch_on_device(batch, plan);
                return self.launch_on_device(Batch { items: second, attempts }, plan);
            }
            let layers = batch.items.first().and_then(|item| item.plan.layers);
            let queued = match CudaStream::of(&**stream) {
                Some(stream) => fused.issue(stream, &batch.items, layers),
                None => Err(no_copy("a kernel on a stream that is none of CUDA's")),
            };
            return self.launched(batch, None, queued);
        }
        let mut copies = CopyBatch::with_capacity(*direction, plan.num_grids() as usize * batch.items.len());
        let pushed = batch
            .items
            .iter()
            .try_for_each(|item| push_block(&mut copies, &self.routes[group], plan, item.from, item.to));
        match pushed {
            Ok(()) => {}
            Err(DeviceError::BatchFull { .. }) if batch.items.len() > 1 => {
                let second = batch.items.split_off(batch.items.len() / 2);
                let attempts = batch.attempts;
                self.launch_on_device(batch, plan);
                self.launch_on_device(Batch { items: second, attempts }, plan);
                return;
            }
            Err(error) => return self.fail(batch, &error),
        }
        let sums = summed.then(|| {
            let (sums, summed) = PassingSums::new(plan.num_grids() as usize, plan.bytes_per_block());
            copies.observe(Box::new(sums));
            summed
        });
        let queued = match (way, CudaStream::of(&**stream)) {
            (Way::Copies(engine), Some(stream)) => stream.copy_by(copies, *engine),
            _ => stream.copy(copies),
        };
        self.launched(batch, sums, queued.map_err(|rejected| rejected.error));
    }

    /// Waits for a batch that was queued, or tries again with one that was not.
    fn launched(&mut self, batch: Batch<T>, sums: Option<Summed>, queued: Result<Event, DeviceError>) {
        match queued {
            Ok(event) => self.fly(batch, sums, None, &event),
            Err(DeviceError::QueueFull { .. }) => self.parked.push_back(batch),
            Err(error) => self.recover(batch, &error),
        }
    }

    fn fly(&mut self, batch: Batch<T>, sums: Option<Summed>, fetched: Option<Fetched>, event: &Event) {
        let ticket = self.next_ticket;
        self.next_ticket += 2;
        self.flying.insert(ticket, Flying { batch, sums, fetched });
        let completions = Arc::clone(&self.completions);
        event.on_complete(move |result| {
            completions.put(Done { ticket, result: Stage::Copy(result) });
        });
    }
}

fn compared(result: Result<Result<(), Difference>, DeviceError>) -> Copied {
    result?.map(|()| None).map_err(NotCopied::Differs)
}

pub(super) fn refused(error: &PlanError) -> DeviceError {
    DeviceError::OperationFailed {
        stream: "none".into(),
        operation: "copy plan".into(),
        reason: error.to_string(),
    }
}

/// The memory of a region of each side.
pub(super) fn regions(route: &Route, src: u32, dst: u32) -> Option<(&RegionBytes, &RegionBytes)> {
    Some((route.src.memory().get(src as usize)?, route.dst.memory().get(dst as usize)?))
}

/// A mover did not copy a block.
/// Only a comparison can find that a block differs, whatever another process says.
fn not_moved(plan: &TransferPlan, failure: Failure) -> NotCopied {
    let differs = plan.compare.is_some() && failure.kind == FailureKind::Differs;
    let kind = if differs { FailureKind::Differs } else { FailureKind::Device };
    NotCopied::Elsewhere { kind, reason: failure.detail }
}

fn no_copy(what: &'static str) -> DeviceError {
    DeviceError::Unsupported { device: "kvbm-transfer".into(), operation: what }
}

pub(super) fn push_block(
    copies: &mut CopyBatch,
    route: &Route,
    plan: &CopyPlan,
    from: u32,
    to: u32,
) -> Result<(), DeviceError> {
    for runs in plan.grids(from, to).map_err(|error| refused(&error))? {
        let (memory, rows) = (regions(route, runs.src_region, runs.dst_region), rows_of(&runs));
        match memory {
            Some((RegionBytes::Host(src), RegionBytes::Device(dst))) => {
                copies.push_rows_to_device(src, runs.src_offset, dst, runs.dst_offset, rows)?;
            }
            Some((RegionBytes::Device(src), RegionBytes::Host(dst))) => {
                copies.push_rows_to_host(src, runs.src_offset, dst, runs.dst_offset, rows)?;
            }
            _ => return Err(no_copy("a stream copy that does not join host and device memory")),
        }
    }
    Ok(())
}

fn rows_of(runs: &RunGrid) -> RowGrid {
    let axis = |Dim { count, src_stride, dst_stride }| RowAxis { count, src_stride, dst_stride };
    RowGrid { len: runs.run_bytes, axes: runs.axes.map(axis) }
}

fn copy_on_host(route: &Route, plan: &CopyPlan, from: u32, to: u32) -> Result<(), DeviceError> {
    for runs in plan.grids(from, to).map_err(|error| refused(&error))? {
        let memory = regions(route, runs.src_region, runs.dst_region);
        let Some((RegionBytes::Host(src), RegionBytes::Host(dst))) = memory else {
            return Err(no_copy("a CPU copy of memory that is not host memory"));
        };
        // SAFETY: the claims of the plan on a slot of host memory, the leader's states of the
        // blocks of G1 and the lease of a slot of the staging ring keep everybody else away from
        // both.
        unsafe { dst.copy_rows_from(runs.dst_offset, src, runs.src_offset, rows_of(&runs)) }?;
    }
    Ok(())
}
