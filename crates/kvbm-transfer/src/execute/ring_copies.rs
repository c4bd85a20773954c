//! Copies from G1 into a bounded ring of staging slots outside G2, with checksums: the first half
//! of the paths that lead from there to a disk or a volume. The second half holds a [`StagedBlock`]
//! until its write is over.

use super::Site;
use super::copy::{Copied, Copier, Item, Lane, Route, Sum};
use super::staged::PORTIONS;
use crate::error::StartError;
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use kvbm_device::DeviceError;
use kvbm_disk::BlockChecksum;
use kvbm_plan::{BlockTransfer, ChecksumMode, Failure, FailureKind, TransferPlan};
use kvbm_storage::BoundLayout;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

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

/// A whole block in a slot of the ring.
pub(crate) struct StagedBlock {
    pub(crate) claim: ReadClaim,
    _slot: RingSlot,
}

impl AsRef<ReadClaim> for StagedBlock {
    fn as_ref(&self) -> &ReadClaim {
        &self.claim
    }
}

/// Blocks of one plan that have come from the device, or failed to.
pub(crate) struct StagedBlocks {
    pub(crate) plan: Arc<TransferPlan>,
    pub(crate) deadline: Option<Instant>,
    /// Index in the plan, and the block.
    pub(crate) blocks: Vec<(u32, StagedBlock)>,
    /// How many were issued and are not among `blocks`: their failures are settled.
    pub(crate) failed: usize,
}

/// The ring and the copies into it. Each slot belongs to one block from the copy until the write is
/// over.
pub(crate) struct RingCopies {
    site: Site,
    ring: Arc<HostTier>,
    free: FreeSlots,
    slots: usize,
    copier: Copier<Landing>,
}

impl RingCopies {
    /// `rings` is host memory whose blocks, of each cache group, are laid out like slots of the
    /// disk; all its slots are the carrier's. `routes` lead from G1 there.
    pub(crate) fn new(
        site: Site,
        rings: Vec<BoundLayout>,
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
        Ok(Self { site, ring, free, slots: slots as usize, copier })
    }

    /// The ring's memory.
    pub(crate) fn memory(&self) -> &Arc<HostTier> {
        &self.ring
    }

    /// Slots of the ring.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Slots that nobody uses.
    pub(crate) fn num_free(&self) -> usize {
        self.free.lock().len()
    }

    /// Blocks that may be issued now: a part of the ring at most, so that copies and writes
    /// overlap.
    pub(crate) fn room(&self) -> usize {
        self.num_free().min(self.slots.div_ceil(PORTIONS))
    }

    /// Blocks that are being copied.
    pub(crate) fn in_flight(&self) -> usize {
        self.copier.in_flight()
    }

    /// Starts copies. How many blocks could not be: their failures are settled.
    pub(crate) fn start(&mut self, Portion { plan, indices, deadline }: Portion) -> usize {
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
        let failed = refused.len();
        self.site.settle(&plan, refused, 0);
        self.copier.start(items);
        failed
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
    fn landed(&self, item: Item<Landing>, copied: Copied) -> Result<StagedBlock, Failure> {
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
        Ok(StagedBlock { claim: self.ring.read(slot.slot, identity, None)?, _slot: slot })
    }

    /// What has come from the device since the last call, plan by plan.
    pub(crate) fn finished(&mut self) -> Vec<StagedBlocks> {
        let mut groups: Vec<StagedBlocks> = Vec::new();
        for (item, copied) in self.copier.finished() {
            let (plan, index, deadline) = (Arc::clone(&item.plan), item.index, item.hold.deadline);
            if groups.last().is_none_or(|group| group.plan.plan_id != plan.plan_id) {
                groups.push(StagedBlocks { plan: Arc::clone(&plan), deadline, blocks: vec![], failed: 0 });
            }
            let group = groups.len() - 1;
            match self.landed(item, copied) {
                Ok(landed) => groups[group].blocks.push((index, landed)),
                Err(Failure { kind, detail }) => {
                    groups[group].failed += 1;
                    let outcome = self.site.failure(&plan.blocks[index as usize], kind, &detail);
                    self.site.settle_one(&plan, index, outcome, 0);
                }
            }
        }
        groups
    }

    /// A copy is over.
    pub(crate) fn complete(&mut self, ticket: u64, result: Result<(), DeviceError>) {
        self.copier.complete(ticket, result);
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.copier.is_parked()
    }

    pub(crate) fn retry(&mut self) {
        self.copier.retry();
    }
}
