//! G2 and G3: straight between the fragments of host memory and the disk, without a staging copy.

use super::{Carrier, Done, Site, Stage};
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use crossbeam_channel::Sender;
use kvbm_device::Owner;
use kvbm_disk::{DiskEngine, Fragments, IoBatch, OpError, OpOutcome, SubmitError};
use kvbm_plan::{BlockId, BlockOutcome, BlockTransfer, ChecksumMode, Failure, TransferPlan};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Hands single operations to the engine and keeps those that found its queue full.
pub(crate) struct DiskPort {
    engine: Arc<DiskEngine>,
    done: Sender<Done>,
    next_ticket: u64,
    parked: VecDeque<(u64, BlockId, IoBatch)>,
}

impl DiskPort {
    /// Tickets are odd.
    pub(super) fn new(engine: Arc<DiskEngine>, done: Sender<Done>) -> Self {
        Self { engine, done, next_ticket: 1, parked: VecDeque::new() }
    }

    /// Submits one operation on `slot`, which `add` puts into the batch. Its ticket, under which it completes.
    pub(super) fn submit(
        &mut self,
        slot: BlockId,
        (fragments, owners): (Fragments, Vec<Owner>),
        deadline: Option<Instant>,
        add: impl FnOnce(&mut IoBatch, Fragments),
    ) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 2;
        let done = self.done.clone();
        let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| {
            for outcome in outcomes {
                // The executor is gone only after all its tickets came back, and the channel has room for each.
                drop(done.try_send(Done { ticket, result: Stage::Disk(outcome) }));
            }
        });
        for owner in owners {
            batch.guard(owner);
        }
        if let Some(deadline) = deadline {
            batch.deadline(deadline);
        }
        add(&mut batch, fragments);
        self.hand_over(ticket, slot, batch);
        ticket
    }

    fn hand_over(&mut self, ticket: u64, slot: BlockId, batch: IoBatch) {
        let Err(rejected) = self.engine.submit(batch) else { return };
        match rejected.error {
            SubmitError::QueueFull { .. } => self.parked.push_back((ticket, slot, rejected.batch)),
            // The batch has one operation and was not taken: its completion will not come, so this says it instead.
            SubmitError::Empty | SubmitError::ShuttingDown => {
                drop(
                    self.done
                        .try_send(Done { ticket, result: Stage::Disk(Err(OpError::ShuttingDown { slot })) }),
                );
            }
        }
    }

    pub(super) fn is_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    pub(super) fn retry(&mut self) {
        for _ in 0..self.parked.len() {
            if let Some((ticket, slot, batch)) = self.parked.pop_front() {
                self.hand_over(ticket, slot, batch);
            }
        }
    }
}

/// A block on its way to or from the disk.
struct Flight<C> {
    plan: Arc<TransferPlan>,
    index: u32,
    claim: C,
}

/// Outcome of a block whose operation ended well.
pub(super) fn done(plan: &TransferPlan, checksum: u64) -> BlockOutcome {
    BlockOutcome::Done { checksum: if plan.checksums == ChecksumMode::Required { checksum } else { 0 } }
}

/// Which way blocks go between host memory and the disk.
pub(crate) trait Direction: Send + 'static {
    /// What keeps others off the host slot meanwhile.
    type Claim: Send;

    /// Claims the host slot of `block` and submits its operation. Its ticket.
    fn start(
        host: &Arc<HostTier>,
        port: &mut DiskPort,
        block: BlockTransfer,
        deadline: Option<Instant>,
    ) -> Result<(u64, Self::Claim), Failure>;

    /// The operation is over: what that means for the host slot.
    fn end(claim: Self::Claim, result: &OpOutcome);
}

/// Host blocks to the disk.
pub(crate) enum Writes {}

/// Blocks of the disk to host memory, verified by the engine.
pub(crate) enum Reads {}

impl Direction for Writes {
    type Claim = ReadClaim;

    fn start(
        host: &Arc<HostTier>,
        port: &mut DiskPort,
        block: BlockTransfer,
        deadline: Option<Instant>,
    ) -> Result<(u64, ReadClaim), Failure> {
        let claim = host.read(block.src.0, &block.identity, None)?;
        let memory = claim.io_memory()?;
        let (known, compare) = (claim.checksum(), claim.is_due());
        let ticket = port.submit(block.dst, memory, deadline, |batch, fragments| {
            // The checksum from when the slot was filled goes to the disk: memory that changed since is refused by every
            // read, and found out here as often as the policy for host memory says.
            match known {
                Some(checksum) if compare => {
                    batch.write_checked(block.dst, block.identity, fragments, checksum)
                }
                Some(checksum) => batch.write_trusted(block.dst, block.identity, fragments, checksum),
                None => batch.write(block.dst, block.identity, fragments),
            };
        });
        Ok((ticket, claim))
    }

    fn end(claim: ReadClaim, result: &OpOutcome) {
        if matches!(result, Err(OpError::Source { .. })) {
            claim.condemn();
        }
    }
}

impl Direction for Reads {
    type Claim = WriteClaim;

    fn start(
        host: &Arc<HostTier>,
        port: &mut DiskPort,
        block: BlockTransfer,
        deadline: Option<Instant>,
    ) -> Result<(u64, WriteClaim), Failure> {
        let claim = host.write(block.dst.0, &block.identity, None)?;
        let memory = claim.io_memory()?;
        let ticket = port.submit(block.src, memory, deadline, |batch, fragments| {
            batch.read(block.src, block.identity, fragments);
        });
        Ok((ticket, claim))
    }

    fn end(claim: WriteClaim, result: &OpOutcome) {
        if let Ok(op) = result {
            claim.finish_verified(op.checksum);
        }
    }
}

/// Moves blocks between host memory and the disk, one way.
pub(crate) struct DiskCarrier<D: Direction> {
    site: Site,
    host: Arc<HostTier>,
    port: DiskPort,
    depth: usize,
    flying: HashMap<u64, Flight<D::Claim>>,
}

impl<D: Direction> DiskCarrier<D> {
    pub(crate) fn new(site: Site, host: Arc<HostTier>, engine: Arc<DiskEngine>, depth: usize) -> Self {
        let port = DiskPort::new(engine, site.done.clone());
        Self { site, host, port, depth, flying: HashMap::new() }
    }

    fn start(&mut self, portion: &Portion, index: u32) -> Result<(), Failure> {
        let block = portion.plan.blocks[index as usize];
        let (ticket, claim) = D::start(&self.host, &mut self.port, block, portion.deadline)?;
        self.flying.insert(ticket, Flight { plan: Arc::clone(&portion.plan), index, claim });
        Ok(())
    }
}

impl<D: Direction> Carrier for DiskCarrier<D> {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.flying.len())
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn issue(&mut self, portion: Portion) {
        for &index in &portion.indices {
            if let Err(failure) = self.start(&portion, index) {
                let outcome =
                    self.site.failure(&portion.plan.blocks[index as usize], failure.kind, &failure.detail);
                self.site.settle_one(&portion.plan, index, outcome, 0);
            }
        }
    }

    fn complete(&mut self, message: Done) {
        let Stage::Disk(result) = message.result else { return };
        let Some(Flight { plan, index, claim }) = self.flying.remove(&message.ticket) else { return };
        D::end(claim, &result);
        let (outcome, bytes) = match result {
            Ok(op) => (done(&plan, op.checksum), op.bytes),
            Err(error) => {
                (self.site.failure(&plan.blocks[index as usize], error.kind(), &error.to_string()), 0)
            }
        };
        self.site.settle_one(&plan, index, outcome, bytes);
    }

    fn is_parked(&self) -> bool {
        self.port.is_parked()
    }

    fn retry(&mut self) {
        self.port.retry();
    }
}
