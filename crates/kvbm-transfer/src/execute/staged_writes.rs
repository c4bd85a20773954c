//! G1 to G3: from the device to a staging ring, then to the disk. Blocks overlap: while some are
//! written, others come from the device.

use super::disk::{Batch, Direction, DiskCarrier, Writes};
use super::ring_copies::{RingCopies, StagedBlock, StagedBlocks};
use super::{Carrier, Site};
use crate::completion_queue::{Done, Stage};
use crate::schedule::Portion;
use kvbm_disk::{DiskEngine, OpError, OpOutcome};
use kvbm_plan::{BlockTransfer, Failure, FailureKind};
use std::sync::Arc;

/// Blocks of the ring to the disk.
enum RingWrites {}

impl Direction for RingWrites {
    type Claim = StagedBlock;

    fn add(staged: &StagedBlock, batch: &mut Batch, block: BlockTransfer) -> Result<(), Failure> {
        Writes::add(&staged.claim, batch, block)
    }

    fn end(staged: StagedBlock, _result: &OpOutcome) {
        drop(staged);
    }

    /// Bytes that changed in the ring say nothing of the block on G1.
    fn kind_of(error: &OpError) -> FailureKind {
        if matches!(error, OpError::Source { .. }) { FailureKind::Device } else { error.kind() }
    }
}

/// Moves blocks from G1 to G3.
pub(crate) struct StagedWriter {
    copies: RingCopies,
    disk: DiskCarrier<RingWrites>,
}

impl StagedWriter {
    pub(crate) fn new(site: Site, copies: RingCopies, engine: Arc<DiskEngine>) -> Self {
        let disk = DiskCarrier::new(site, Arc::clone(copies.memory()), engine, copies.slots());
        Self { copies, disk }
    }

    /// Hands what has come from the device to the disk.
    fn write_staged(&mut self) {
        for StagedBlocks { plan, deadline, blocks, .. } in self.copies.finished() {
            self.disk.submit(plan, blocks, deadline);
        }
    }
}

impl Carrier for StagedWriter {
    fn room(&self) -> usize {
        self.copies.room()
    }

    fn in_flight(&self) -> usize {
        self.copies.in_flight() + self.disk.blocks()
    }

    fn issue(&mut self, portion: Portion) {
        self.copies.start(portion);
        self.write_staged();
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Disk(results) => self.disk.over(message.ticket, results),
            Stage::Copy(result) => self.copies.complete(message.ticket, result),
            Stage::Moved(_) | Stage::Volume(_) => {}
        }
        self.write_staged();
    }

    fn is_parked(&self) -> bool {
        self.copies.is_parked() || self.disk.has_parked()
    }

    fn is_waiting(&self) -> bool {
        self.copies.is_parked() || self.disk.has_waiting()
    }

    fn retry(&mut self) {
        self.copies.retry();
        self.disk.try_again();
        self.write_staged();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::BlockId;

    /// Encrypted and signed disks compare what they are given.
    #[test]
    fn bytes_that_changed_in_the_ring_say_nothing_of_the_blocks_source() {
        let changed = OpError::Source { slot: BlockId(1), expected: 2, found: 3 };
        assert_eq!(changed.kind(), FailureKind::Corrupt);
        assert_eq!(RingWrites::kind_of(&changed), FailureKind::Device);
        let cancelled = OpError::Cancelled { slot: BlockId(1) };
        assert_eq!(RingWrites::kind_of(&cancelled), cancelled.kind());
    }
}
