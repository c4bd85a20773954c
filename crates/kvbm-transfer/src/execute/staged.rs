//! G3 to G1: disk to a bounded ring of staging slots outside G2, verified there, then to the
//! device. Blocks overlap: while one is on its way to the device, others are read.

use super::copy::{Copier, Item, Lane, Route};
use super::disk::{Batch, DiskPort, done};
use super::{Carrier, Settled, Site};
use crate::completion_queue::{Done, Stage};
use crate::error::StartError;
use crate::host::{host_regions, io_memory};
use crate::schedule::Portion;
use kvbm_device::{HostRegion, Owner};
use kvbm_disk::{DiskEngine, OpOutcome};
use kvbm_layout::{FragmentList, Selection};
use kvbm_plan::{BlockTransfer, Failure, FailureKind, TransferPlan};
use kvbm_storage::BoundLayout;
use std::collections::HashMap;
use std::sync::Arc;

/// A slot of a staging ring with a verified block in it.
pub(super) struct Staged {
    pub(super) slot: u32,
    pub(super) checksum: u64,
    /// Bytes to count for the block.
    pub(super) bytes: u64,
}

/// Copies blocks of one plan out of a ring, but for those that have failed meanwhile: their slots
/// go back to `free`, and their destinations are not touched.
pub(super) fn start_copies(
    site: &Site,
    copier: &mut Copier<Staged>,
    free: &mut Vec<u32>,
    mut items: Vec<Item<Staged>>,
) {
    let Some(first) = items.first() else { return };
    let indices: Vec<u32> = items.iter().map(|item| item.index).collect();
    let allowed = site.hub.begin_copies(first.plan.plan_id, &indices);
    let mut allowed = allowed.into_iter();
    items.retain(|item| {
        let is_allowed = allowed.next() == Some(true);
        if !is_allowed {
            free.push(item.hold.slot);
        }
        is_allowed
    });
    if !items.is_empty() {
        copier.start(items);
    }
}

/// Ends the blocks whose copies out of a ring are over, and gives their slots back to `free`.
pub(super) fn settle_copies(site: &Site, copier: &mut Copier<Staged>, free: &mut Vec<u32>) {
    let settle = |Settled { plan_id, outcomes, bytes }| site.hub.settle(plan_id, outcomes, bytes);
    let mut over: Option<Settled> = None;
    for (Item { plan, index, hold, .. }, result) in copier.finished() {
        free.push(hold.slot);
        let (outcome, bytes) = match result {
            Ok(_) => (done(&plan, hold.checksum), hold.bytes),
            Err(error) => {
                let block = &plan.blocks[index as usize];
                (site.failure(block, error.kind(), &error.to_string()), 0)
            }
        };
        if let Some(over) = over.as_mut().filter(|over| over.plan_id == plan.plan_id) {
            over.outcomes.push((index, outcome));
            over.bytes += bytes;
        } else {
            let next = Settled { plan_id: plan.plan_id, outcomes: vec![(index, outcome)], bytes };
            over.replace(next).into_iter().for_each(settle);
        }
    }
    over.into_iter().for_each(settle);
}

/// Blocks of one plan that are being read into staging slots.
struct Reading {
    plan: Arc<TransferPlan>,
    /// Index in the plan, and the slot.
    blocks: Vec<(u32, u32)>,
}

/// Moves blocks from G3 to G1. Each slot of its ring belongs to one block from the read until the
/// copy is over.
pub(crate) struct StagedCarrier {
    site: Site,
    regions: Arc<Vec<HostRegion>>,
    /// By cache group.
    fragments: Vec<FragmentList>,
    free: Vec<u32>,
    /// Blocks that are read, and then copied, together: a part of the ring, so that both go on at a
    /// time.
    portion: usize,
    port: DiskPort,
    reading: HashMap<u64, Reading>,
    copier: Copier<Staged>,
}

/// Portions that a ring holds: one passes one half of the path while others pass the other.
pub(super) const PORTIONS: usize = 4;

impl StagedCarrier {
    /// `rings` is host memory whose blocks, of each cache group, are laid out like slots of the
    /// disk; all its slots are this carrier's.
    pub(crate) fn new(
        site: Site,
        rings: &[BoundLayout],
        engine: Arc<DiskEngine>,
        routes: Vec<Route>,
        lane: Lane,
    ) -> Result<Self, StartError> {
        let ring = &rings[0];
        let failed = |reason: String| StartError::Staging { blocks: ring.num_blocks(), reason };
        let regions = host_regions(ring).ok_or_else(|| failed("the ring is not host memory".into()))?;
        let list = |ring: &BoundLayout| {
            let layout = ring.layout().as_ref();
            FragmentList::between(layout, layout, &Selection::all())
                .map_err(|error| failed(error.to_string()))
        };
        let fragments = rings.iter().map(list).collect::<Result<_, _>>()?;
        let port = DiskPort::new(engine, Arc::clone(&site.completions));
        let copier = Copier::new(routes, lane, Arc::clone(&site.completions));
        let free: Vec<u32> = (0..ring.num_blocks()).rev().collect();
        let portion = free.len().div_ceil(PORTIONS);
        let (regions, reading) = (Arc::new(regions), HashMap::new());
        Ok(Self { site, regions, fragments, free, portion, port, reading, copier })
    }

    /// Adds the read of a block to `batch`. Its staging slot.
    fn start(&mut self, batch: &mut Batch, block: BlockTransfer) -> Result<u32, Failure> {
        let full = || Failure::new(FailureKind::QueueFull, "the staging ring is full");
        let slot = *self.free.last().ok_or_else(full)?;
        let fragments = &self.fragments[usize::from(block.identity.group.0)];
        let fragments = io_memory(&self.regions, fragments, slot)
            .map_err(|why| Failure::new(FailureKind::Unsupported, why))?;
        batch.add(block.src, |batch| {
            batch.read(block.src, block.identity, fragments);
        });
        self.free.pop();
        Ok(slot)
    }

    fn read_over(&mut self, ticket: u64, results: Vec<OpOutcome>) {
        let Some(Reading { plan, blocks }) = self.reading.remove(&ticket) else { return };
        let (mut items, mut failed) = (Vec::with_capacity(blocks.len()), Vec::new());
        for ((index, slot), result) in blocks.into_iter().zip(results) {
            let block = plan.blocks[index as usize];
            match result {
                Ok(op) => {
                    let hold = Staged { slot, checksum: op.checksum, bytes: op.bytes };
                    items.push(Item { plan: Arc::clone(&plan), index, from: slot, to: block.dst.0, hold });
                }
                Err(error) => {
                    self.free.push(slot);
                    failed.push((index, self.site.failure(&block, error.kind(), &error.to_string())));
                }
            }
        }
        self.site.settle(&plan, failed, 0);
        start_copies(&self.site, &mut self.copier, &mut self.free, items);
    }
}

impl Carrier for StagedCarrier {
    fn room(&self) -> usize {
        self.free.len().min(self.portion)
    }

    fn in_flight(&self) -> usize {
        self.reading.values().map(|reading| reading.blocks.len()).sum::<usize>() + self.copier.in_flight()
    }

    fn issue(&mut self, Portion { plan, indices, deadline }: Portion) {
        let mut batch = self.port.batch(Arc::clone(&self.regions) as Owner, deadline);
        let (mut blocks, mut refused) = (Vec::with_capacity(indices.len()), Vec::new());
        for index in indices {
            let block = plan.blocks[index as usize];
            match self.start(&mut batch, block) {
                Ok(slot) => blocks.push((index, slot)),
                Err(failure) => {
                    refused.push((index, self.site.failure(&block, failure.kind, &failure.detail)));
                }
            }
        }
        self.site.settle(&plan, refused, 0);
        if !blocks.is_empty() {
            self.reading.insert(batch.ticket(), Reading { plan, blocks });
            self.port.submit(batch);
        }
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Disk(results) => self.read_over(message.ticket, results),
            Stage::Copy(result) => self.copier.complete(message.ticket, result),
            Stage::Moved(outcomes) => self.copier.moved(message.ticket, outcomes),
            Stage::Volume(_) => {}
        }
        settle_copies(&self.site, &mut self.copier, &mut self.free);
    }

    fn is_parked(&self) -> bool {
        self.port.is_parked() || self.copier.is_parked()
    }

    fn retry(&mut self) {
        self.port.retry();
        self.copier.retry();
        settle_copies(&self.site, &mut self.copier, &mut self.free);
    }
}
