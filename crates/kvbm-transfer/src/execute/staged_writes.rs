//! G1 to G3: from the device to a bounded ring of staging slots outside G2, summed there, then to
//! the disk. Blocks overlap: while some are written, others come from the device.

use super::copy::{Copied, Copier, Item, Lane, Route, Sum};
use super::disk::{Batch, Direction, DiskCarrier, Writes};
use super::{Carrier, Site};
use crate::completion_queue::{Done, Stage};
use crate::error::StartError;
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use kvbm_disk::{BlockChecksum, DiskEngine, OpOutcome};
use kvbm_plan::{BlockTransfer, ChecksumMode, Failure, FailureKind, TransferPlan};
use kvbm_storage::BoundLayout;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// Portions that a ring holds: one is copied while others are written.
const PORTIONS: usize = 4;

/// Slots of a ring that nobody uses.
type FreeSlots = Arc<Mutex<Vec<u32>>>;

/// A slot of the ring, which goes back when nobody uses it any more.
struct RingSlot {
    slot: u32,
    free: FreeSlots,
}

impl Drop for RingSlot {
    fn drop(&mut self) {
        self.free.lock().push(self.slot);
    }
}

/// A block on its way from the device into a slot. Claims are let go of before the slot.
struct Landing {
    claim: WriteClaim,
    slot: RingSlot,
    deadline: Option<Instant>,
}

/// A whole block in a slot.
pub(crate) struct Landed {
    claim: ReadClaim,
    _slot: RingSlot,
}

/// Blocks of the ring to the disk.
enum RingWrites {}

impl Direction for RingWrites {
    type Claim = Landed;

    fn add(landed: &Landed, batch: &mut Batch, block: BlockTransfer) -> Result<(), Failure> {
        Writes::add(&landed.claim, batch, block)
    }

    fn end(landed: Landed, result: &OpOutcome) {
        Writes::end(landed.claim, result);
    }
}

/// Blocks of one plan that go to the disk together.
struct Group {
    plan: Arc<TransferPlan>,
    deadline: Option<Instant>,
    blocks: Vec<(u32, Landed)>,
}

/// Moves blocks from G1 to G3. Each slot of its ring belongs to one block from the copy until the
/// write is over.
pub(crate) struct StagedWriter {
    site: Site,
    ring: Arc<HostTier>,
    free: FreeSlots,
    /// Blocks that are copied, and then written, together.
    portion: usize,
    copier: Copier<Landing>,
    disk: DiskCarrier<RingWrites>,
}

impl StagedWriter {
    /// `rings` is host memory whose blocks, of each cache group, are laid out like slots of the
    /// disk; all its slots are this carrier's. `routes` lead from G1 there.
    pub(crate) fn new(
        site: Site,
        rings: Vec<BoundLayout>,
        engine: Arc<DiskEngine>,
        sums: BlockChecksum,
        (routes, lane): (Vec<Route>, Lane),
    ) -> Result<Self, StartError> {
        let slots = rings.iter().map(BoundLayout::num_blocks).min().unwrap_or(0);
        let ring = Arc::new(HostTier::of_ring(rings, sums)?);
        let in_order =
            |(group, route): (usize, Route)| route.summed_if(|plan| ring.sums_in_order_of(group, plan));
        let routes = routes.into_iter().enumerate().map(in_order).collect();
        let copier = Copier::new(routes, lane, Arc::clone(&site.completions));
        let free = Arc::new(Mutex::new((0..slots).rev().collect()));
        let disk = DiskCarrier::new(site.clone(), Arc::clone(&ring), engine, slots as usize);
        let portion = (slots as usize).div_ceil(PORTIONS);
        Ok(Self { site, ring, free, portion, copier, disk })
    }

    /// A slot for `block`, claimed for what comes from the device.
    fn land(&self, block: &BlockTransfer, deadline: Option<Instant>) -> Result<Landing, Failure> {
        let full = || Failure::new(FailureKind::QueueFull, "the staging ring is full");
        let slot = self.free.lock().pop().ok_or_else(full)?;
        let slot = RingSlot { slot, free: Arc::clone(&self.free) };
        let claim = self.ring.write(slot.slot, &block.identity, None)?;
        Ok(Landing { claim, slot, deadline })
    }

    /// A block has come from the device: its sum is known now.
    fn landed(&self, item: Item<Landing>, copied: Copied) -> Result<Landed, Failure> {
        // In this order, so that the claim goes first where something fails.
        let Landing { slot, claim, .. } = item.hold;
        let sum = copied.map_err(|error| Failure::new(error.kind(), error.to_string()))?;
        let required = item.plan.checksums == ChecksumMode::Required;
        let content = match sum {
            Some(Sum::Content(content)) => Some(content),
            // Only movers know a block's checksum, and they copy to G2 alone.
            Some(Sum::Block(_)) | None => None,
        };
        claim.finish(required, content)?;
        let identity = &item.plan.blocks[item.index as usize].identity;
        Ok(Landed { claim: self.ring.read(slot.slot, identity, None)?, _slot: slot })
    }

    /// Hands what has come from the device to the disk, plan by plan.
    fn write_landed(&mut self) {
        let mut groups: Vec<Group> = Vec::new();
        for (item, copied) in self.copier.finished() {
            let (plan, index, deadline) = (Arc::clone(&item.plan), item.index, item.hold.deadline);
            match self.landed(item, copied) {
                Ok(landed) => match groups.last_mut().filter(|group| group.plan.plan_id == plan.plan_id) {
                    Some(group) => group.blocks.push((index, landed)),
                    None => groups.push(Group { plan, deadline, blocks: vec![(index, landed)] }),
                },
                Err(Failure { kind, detail }) => {
                    let outcome = self.site.failure(&plan.blocks[index as usize], kind, &detail);
                    self.site.settle_one(&plan, index, outcome, 0);
                }
            }
        }
        for Group { plan, deadline, blocks } in groups {
            self.disk.submit(plan, blocks, deadline);
        }
    }
}

impl Carrier for StagedWriter {
    fn room(&self) -> usize {
        self.free.lock().len().min(self.portion)
    }

    fn in_flight(&self) -> usize {
        self.copier.in_flight() + self.disk.blocks()
    }

    fn issue(&mut self, Portion { plan, indices, deadline }: Portion) {
        let (mut items, mut refused) = (Vec::with_capacity(indices.len()), Vec::new());
        for index in indices {
            let block = plan.blocks[index as usize];
            match self.land(&block, deadline) {
                Ok(hold) => {
                    let (from, to) = (block.src.0, hold.slot.slot);
                    items.push(Item { plan: Arc::clone(&plan), index, from, to, hold });
                }
                Err(failure) => {
                    refused.push((index, self.site.failure(&block, failure.kind, &failure.detail)));
                }
            }
        }
        self.site.settle(&plan, refused, 0);
        self.copier.start(items);
        self.write_landed();
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Disk(results) => self.disk.over(message.ticket, results),
            Stage::Copy(result) => self.copier.complete(message.ticket, result),
            Stage::Moved(_) | Stage::Volume(_) => {}
        }
        self.write_landed();
    }

    fn is_parked(&self) -> bool {
        self.copier.is_parked() || self.disk.has_parked()
    }

    fn is_waiting(&self) -> bool {
        self.copier.is_parked() || self.disk.has_waiting()
    }

    fn retry(&mut self) {
        self.copier.retry();
        self.disk.try_again();
        self.write_landed();
    }
}
