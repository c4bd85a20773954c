//! G3 to G1: disk to a bounded ring of staging slots outside G2, verified there, then to the device. Blocks overlap: while
//! one is on its way to the device, others are read.

use super::copy::{Copier, Item, Lane, Route};
use super::disk::{DiskPort, done};
use super::{Carrier, Done, Site, Stage};
use crate::error::StartError;
use crate::host::{host_regions, io_memory};
use crate::schedule::Portion;
use kvbm_device::HostRegion;
use kvbm_disk::{DiskEngine, OpOutcome};
use kvbm_layout::{FragmentList, Selection};
use kvbm_plan::{FailureKind, TransferPlan};
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

/// Ends the blocks whose copies out of a ring are over, and gives their slots back to `free`.
pub(super) fn settle_copies(site: &Site, copier: &mut Copier<Staged>, free: &mut Vec<u32>) {
    for (item, result) in copier.finished() {
        let Item { plan, index, hold, .. } = item;
        free.push(hold.slot);
        let outcome = match result {
            Ok(_) => done(&plan, hold.checksum),
            Err(error) => site.failure(&plan.blocks[index as usize], FailureKind::Device, &error.to_string()),
        };
        site.settle_one(&plan, index, outcome, hold.bytes);
    }
}

/// A block that is being read into a staging slot.
struct Reading {
    plan: Arc<TransferPlan>,
    index: u32,
    slot: u32,
}

/// Moves blocks from G3 to G1. Each slot of its ring belongs to one block from the read until the copy is over.
pub(crate) struct StagedCarrier {
    site: Site,
    regions: Vec<HostRegion>,
    fragments: FragmentList,
    free: Vec<u32>,
    port: DiskPort,
    reading: HashMap<u64, Reading>,
    copier: Copier<Staged>,
}

impl StagedCarrier {
    /// `ring` is host memory whose blocks are laid out like slots of the disk; all its slots are this carrier's.
    pub(crate) fn new(
        site: Site,
        ring: &BoundLayout,
        engine: Arc<DiskEngine>,
        route: Route,
        lane: Lane,
    ) -> Result<Self, StartError> {
        let failed = |reason: String| StartError::Staging { blocks: ring.num_blocks(), reason };
        let regions = host_regions(ring).ok_or_else(|| failed("the ring is not host memory".into()))?;
        let layout = ring.layout().as_ref();
        let fragments = FragmentList::between(layout, layout, &Selection::all())
            .map_err(|error| failed(error.to_string()))?;
        let port = DiskPort::new(engine, site.done.clone());
        let copier = Copier::new(route, lane, site.done.clone());
        let free = (0..ring.num_blocks()).rev().collect();
        Ok(Self { site, regions, fragments, free, port, reading: HashMap::new(), copier })
    }

    fn start(&mut self, portion: &Portion, index: u32) {
        let block = portion.plan.blocks[index as usize];
        let Some(slot) = self.free.pop() else {
            let outcome = self.site.failure(&block, FailureKind::QueueFull, "the staging ring is full");
            return self.site.settle_one(&portion.plan, index, outcome, 0);
        };
        match io_memory(&self.regions, &self.fragments, slot) {
            Ok(memory) => {
                let ticket = self.port.submit(block.src, memory, portion.deadline, |batch, fragments| {
                    batch.read(block.src, block.identity, fragments);
                });
                self.reading.insert(ticket, Reading { plan: Arc::clone(&portion.plan), index, slot });
            }
            Err(why) => {
                self.free.push(slot);
                let outcome = self.site.failure(&block, FailureKind::Unsupported, &why);
                self.site.settle_one(&portion.plan, index, outcome, 0);
            }
        }
    }

    fn read_over(&mut self, ticket: u64, result: OpOutcome) {
        let Some(Reading { plan, index, slot }) = self.reading.remove(&ticket) else { return };
        let block = plan.blocks[index as usize];
        match result {
            Ok(op) => {
                let hold = Staged { slot, checksum: op.checksum, bytes: op.bytes };
                self.copier.start(vec![Item { plan, index, from: slot, to: block.dst.0, hold }]);
            }
            Err(error) => {
                self.free.push(slot);
                let outcome = self.site.failure(&block, error.kind(), &error.to_string());
                self.site.settle_one(&plan, index, outcome, 0);
            }
        }
    }
}

impl Carrier for StagedCarrier {
    fn room(&self) -> usize {
        self.free.len()
    }

    fn in_flight(&self) -> usize {
        self.reading.len() + self.copier.in_flight()
    }

    fn issue(&mut self, portion: Portion) {
        for &index in &portion.indices {
            self.start(&portion, index);
        }
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Disk(result) => self.read_over(message.ticket, result),
            Stage::Copy(result) => self.copier.complete(message.ticket, result),
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
