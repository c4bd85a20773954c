//! G2 and G3: straight between the fragments of host memory and the disk, without a staging copy.

use super::{Carrier, RETRY, Site};
use crate::completion_queue::{CompletionQueue, Done, Stage};
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use kvbm_device::Owner;
use kvbm_disk::{DiskEngine, IoBatch, OpError, OpOutcome, SubmitError};
use kvbm_plan::{
    BlockId, BlockOutcome, BlockTransfer, ChecksumMode, Failure, FailureKind, TransferPlan, deadline_after,
};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operations that are handed to the engine, and complete, together.
pub(crate) struct Batch {
    ops: IoBatch,
    ticket: u64,
    slots: Vec<BlockId>,
}

/// Hands batches of operations to the engine and keeps those that found its queue full.
pub(crate) struct DiskPort {
    engine: Arc<DiskEngine>,
    completions: Arc<CompletionQueue>,
    next_ticket: u64,
    parked: VecDeque<Batch>,
}

impl Batch {
    /// Adds an operation on `slot`.
    pub(super) fn add(&mut self, slot: BlockId, op: impl FnOnce(&mut IoBatch)) {
        op(&mut self.ops);
        self.slots.push(slot);
    }

    pub(super) fn ticket(&self) -> u64 {
        self.ticket
    }
}

impl DiskPort {
    /// Tickets are odd.
    pub(super) fn new(engine: Arc<DiskEngine>, completions: Arc<CompletionQueue>) -> Self {
        Self { engine, completions, next_ticket: 1, parked: VecDeque::new() }
    }

    /// An empty batch on memory that `owner` keeps allocated. Its ticket, under which it completes,
    /// is told once, with an outcome for each operation in order.
    pub(super) fn batch(&mut self, owner: Owner, deadline: Option<Instant>) -> Batch {
        let ticket = self.next_ticket;
        self.next_ticket += 2;
        let completions = Arc::clone(&self.completions);
        let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| {
            completions.put(Done { ticket, result: Stage::Disk(outcomes) });
        });
        batch.guard(owner);
        if let Some(deadline) = deadline {
            batch.deadline(deadline);
        }
        Batch { ops: batch, ticket, slots: Vec::new() }
    }

    /// Hands over a batch that is not empty.
    pub(super) fn submit(&mut self, Batch { ops, ticket, slots }: Batch) {
        let Err(rejected) = self.engine.submit(ops) else { return };
        match rejected.error {
            SubmitError::QueueFull { .. } => {
                self.parked.push_back(Batch { ops: rejected.batch, ticket, slots });
            }
            // The batch was not taken: its completion will not come, so this says it instead.
            SubmitError::Empty | SubmitError::ShuttingDown => {
                let outcomes = slots.into_iter().map(|slot| Err(OpError::ShuttingDown { slot })).collect();
                self.completions.put(Done { ticket, result: Stage::Disk(outcomes) });
            }
        }
    }

    pub(super) fn is_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    pub(super) fn retry(&mut self) {
        for _ in 0..self.parked.len() {
            if let Some(batch) = self.parked.pop_front() {
                self.submit(batch);
            }
        }
    }
}

/// Outcome of a block whose operation ended well.
pub(super) fn done(plan: &TransferPlan, checksum: u64) -> BlockOutcome {
    BlockOutcome::Done { checksum: if plan.checksums == ChecksumMode::Required { checksum } else { 0 } }
}

/// How long a block waits for its slot where its plan has no budget.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which way blocks go between host memory and the disk.
pub(crate) trait Direction: Send + 'static {
    /// What keeps others off the host slot meanwhile.
    type Claim: Send;

    /// Adds the operation of a block whose host slot is claimed to `batch`.
    fn add(claim: &Self::Claim, batch: &mut Batch, block: BlockTransfer) -> Result<(), Failure>;

    /// The operation is over: what that means for the host slot.
    fn end(claim: Self::Claim, result: &OpOutcome);

    /// What a block fails with whose operation failed.
    fn kind_of(error: &OpError) -> FailureKind {
        error.kind()
    }
}

/// Blocks whose host slots plans name.
pub(crate) trait OfSlots: Direction {
    /// Claims the host slot of `block`.
    fn claim(host: &Arc<HostTier>, block: BlockTransfer) -> Result<Self::Claim, Failure>;
}

/// Host blocks to the disk.
pub(crate) enum Writes {}

/// Blocks of the disk to host memory, verified by the engine.
pub(crate) enum Reads {}

impl Direction for Writes {
    type Claim = ReadClaim;

    fn add(claim: &ReadClaim, batch: &mut Batch, block: BlockTransfer) -> Result<(), Failure> {
        let fragments = claim.io_memory()?;
        let (known, compare) = (claim.checksum(), claim.is_due());
        batch.add(block.dst, |batch| {
            // The checksum from when the slot was filled goes to the disk: memory that changed
            // since is refused by every read, and found out here as often as the policy for host
            // memory says.
            match known {
                Some(checksum) if compare => {
                    batch.write_checked(block.dst, block.identity, fragments, checksum)
                }
                Some(checksum) => batch.write_trusted(block.dst, block.identity, fragments, checksum),
                None => batch.write(block.dst, block.identity, fragments),
            };
        });
        Ok(())
    }

    fn end(claim: ReadClaim, result: &OpOutcome) {
        if matches!(result, Err(OpError::Source { .. })) {
            claim.condemn();
        }
    }
}

impl Direction for Reads {
    type Claim = WriteClaim;

    fn add(claim: &WriteClaim, batch: &mut Batch, block: BlockTransfer) -> Result<(), Failure> {
        let fragments = claim.io_memory()?;
        batch.add(block.src, |batch| {
            batch.read(block.src, block.identity, fragments);
        });
        Ok(())
    }

    fn end(claim: WriteClaim, result: &OpOutcome) {
        if let Ok(op) = result {
            claim.finish_verified(op.checksum);
        }
    }
}

impl OfSlots for Writes {
    fn claim(host: &Arc<HostTier>, block: BlockTransfer) -> Result<ReadClaim, Failure> {
        host.read(block.src.0, &block.identity, None)
    }
}

impl OfSlots for Reads {
    fn claim(host: &Arc<HostTier>, block: BlockTransfer) -> Result<WriteClaim, Failure> {
        host.write(block.dst.0, &block.identity, None)
    }
}

/// Blocks of one plan on their way to or from the disk.
struct Flight<C> {
    plan: Arc<TransferPlan>,
    /// Index in the plan, and the claim.
    blocks: Vec<(u32, C)>,
    deadline: Option<Instant>,
}

/// Blocks of one plan whose slots the engine is writing again by itself, since a sync failed: they
/// go when that is over.
struct Waiting<C> {
    flight: Flight<C>,
    /// When they are tried again, and not before: being refused is a completion too, and the next
    /// try must not follow from it at once.
    next: Instant,
    until: Instant,
}

/// Moves blocks between host memory and the disk, one way.
pub(crate) struct DiskCarrier<D: Direction> {
    site: Site,
    host: Arc<HostTier>,
    port: DiskPort,
    depth: usize,
    blocks: usize,
    flying: HashMap<u64, Flight<D::Claim>>,
    waiting: Vec<Waiting<D::Claim>>,
}

impl<D: Direction> DiskCarrier<D> {
    pub(crate) fn new(site: Site, host: Arc<HostTier>, engine: Arc<DiskEngine>, depth: usize) -> Self {
        let port = DiskPort::new(engine, Arc::clone(&site.completions));
        Self { site, host, port, depth, blocks: 0, flying: HashMap::new(), waiting: Vec::new() }
    }

    /// Hands blocks over whose host slots are claimed.
    pub(super) fn submit(
        &mut self,
        plan: Arc<TransferPlan>,
        claimed: Vec<(u32, D::Claim)>,
        deadline: Option<Instant>,
    ) {
        let mut batch = self.port.batch(Arc::clone(&self.host) as Owner, deadline);
        let mut blocks = Vec::with_capacity(claimed.len());
        let mut refused = Vec::new();
        for (index, claim) in claimed {
            let block = plan.blocks[index as usize];
            match D::add(&claim, &mut batch, block) {
                Ok(()) => blocks.push((index, claim)),
                Err(failure) => {
                    refused.push((index, self.site.failure(&block, failure.kind, &failure.detail)));
                }
            }
        }
        self.site.settle(&plan, refused, 0);
        if !blocks.is_empty() {
            self.blocks += blocks.len();
            self.flying.insert(batch.ticket(), Flight { plan, blocks, deadline });
            self.port.submit(batch);
        }
    }

    /// Lets blocks wait for their slots, with those of their plan that do so already.
    fn wait(&mut self, flight: Flight<D::Claim>) {
        if flight.blocks.is_empty() {
            return;
        }
        self.blocks += flight.blocks.len();
        let plan_id = flight.plan.plan_id;
        if let Some(known) = self.waiting.iter_mut().find(|known| known.flight.plan.plan_id == plan_id) {
            known.flight.blocks.extend(flight.blocks);
            return;
        }
        let now = Instant::now();
        let until = flight.deadline.unwrap_or_else(|| deadline_after(now, PATIENCE));
        self.waiting.push(Waiting { flight, next: deadline_after(now, RETRY), until });
    }

    /// Tries the blocks again that wait for their slots and are due.
    fn retry_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let (now, closing) = (Instant::now(), self.site.hub.is_closing());
        let is_due = |waiting: &mut Waiting<_>| closing || waiting.next.min(waiting.until) <= now;
        let due: Vec<_> = self.waiting.extract_if(.., is_due).collect();
        for Waiting { flight: Flight { plan, blocks, .. }, until, .. } in due {
            self.blocks -= blocks.len();
            let (kind, why) = if closing {
                (FailureKind::ShuttingDown, "the worker shut down while its slot was written again")
            } else if until <= now {
                let why = "its slot is still being written again since a sync of the disk failed";
                (FailureKind::Deadline, why)
            } else {
                self.submit(plan, blocks, Some(until));
                continue;
            };
            let failed = |(index, _): (u32, D::Claim)| {
                (index, self.site.failure(&plan.blocks[index as usize], kind, why))
            };
            let outcomes = blocks.into_iter().map(failed).collect();
            self.site.settle(&plan, outcomes, 0);
        }
    }

    /// Blocks handed over and not settled.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn has_parked(&self) -> bool {
        self.port.is_parked()
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.port.is_parked() || !self.waiting.is_empty()
    }

    /// Operations are over: settles their blocks, or lets them wait for their slots.
    pub(super) fn over(&mut self, ticket: u64, results: Vec<OpOutcome>) {
        let Some(Flight { plan, blocks, deadline }) = self.flying.remove(&ticket) else { return };
        self.blocks -= blocks.len();
        let mut bytes = 0;
        let mut waiting = Vec::new();
        let end = |((index, claim), result): ((u32, D::Claim), OpOutcome)| {
            if matches!(result, Err(OpError::Busy { .. })) {
                waiting.push((index, claim));
                return None;
            }
            D::end(claim, &result);
            let outcome = match result {
                Ok(op) => {
                    bytes += op.bytes;
                    done(&plan, op.checksum)
                }
                Err(error) => {
                    self.site.failure(&plan.blocks[index as usize], D::kind_of(&error), &error.to_string())
                }
            };
            Some((index, outcome))
        };
        let outcomes = blocks.into_iter().zip(results).filter_map(end).collect();
        self.site.settle(&plan, outcomes, bytes);
        self.wait(Flight { plan, blocks: waiting, deadline });
    }

    /// Tries again what found the engine's queue full, or waits for its slot.
    pub(super) fn try_again(&mut self) {
        self.port.retry();
        self.retry_waiting();
    }
}

impl<D: OfSlots> Carrier for DiskCarrier<D> {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.blocks)
    }

    fn in_flight(&self) -> usize {
        self.blocks()
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, deadline } = portion;
        let mut claimed = Vec::with_capacity(indices.len());
        let mut refused = Vec::new();
        for index in indices {
            let block = plan.blocks[index as usize];
            match D::claim(&self.host, block) {
                Ok(claim) => claimed.push((index, claim)),
                Err(failure) => {
                    refused.push((index, self.site.failure(&block, failure.kind, &failure.detail)));
                }
            }
        }
        self.site.settle(&plan, refused, 0);
        self.submit(plan, claimed, deadline);
    }

    fn complete(&mut self, message: Done) {
        if let Stage::Disk(results) = message.result {
            self.over(message.ticket, results);
        }
    }

    fn is_parked(&self) -> bool {
        self.has_parked()
    }

    fn is_waiting(&self) -> bool {
        self.has_waiting()
    }

    fn retry(&mut self) {
        self.try_again();
    }
}
