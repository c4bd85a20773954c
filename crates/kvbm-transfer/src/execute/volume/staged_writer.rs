//! G1 to G4: from the device to a staging ring, then to volumes. Blocks overlap: while some are
//! written, others come from the device.

use super::writer::VolumePuts;
use crate::completion_queue::{Done, Stage};
use crate::config::{VolumeTier, WorkerConfig};
use crate::damaged_objects::DamagedObjects;
use crate::error::StartError;
use crate::execute::ring_copies::{RingCopies, StagedBlock, StagedBlocks};
use crate::execute::{Carrier, Site};
use crate::schedule::Portion;
use kvbm_plan::TransferPlan;
use std::sync::Arc;

/// Moves blocks from G1 to volumes.
pub(crate) struct StagedVolumeWriter {
    copies: RingCopies,
    puts: VolumePuts<StagedBlock>,
}

impl StagedVolumeWriter {
    pub(crate) fn start(
        site: Site,
        copies: RingCopies,
        tier: &VolumeTier,
        damaged: &Arc<DamagedObjects>,
        config: &WorkerConfig,
    ) -> Result<Self, StartError> {
        let puts = VolumePuts::new(site, copies.memory(), tier, damaged, config, copies.slots())?;
        Ok(Self { copies, puts })
    }

    /// Hands what has come from the device to the threads of its volume.
    fn write_staged(&mut self) {
        for StagedBlocks { plan, deadline, blocks, failed } in self.copies.finished() {
            self.puts.give_back(&plan, failed);
            self.puts.submit(&plan, blocks, deadline);
        }
    }
}

impl Carrier for StagedVolumeWriter {
    fn room(&self) -> usize {
        self.copies.room()
    }

    fn room_for(&self, plan: &TransferPlan) -> usize {
        self.puts.room_for(plan, self.copies.num_free())
    }

    fn in_flight(&self) -> usize {
        self.copies.in_flight() + self.puts.in_flight()
    }

    fn issue(&mut self, portion: Portion) {
        let (plan, blocks) = (Arc::clone(&portion.plan), portion.indices.len());
        // Reserved before the copy: a volume that hangs must not get all slots of the ring while
        // copies are under way.
        self.puts.reserve(&plan, blocks);
        let failed = self.copies.start(portion);
        self.puts.give_back(&plan, failed);
        self.write_staged();
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Volume(results) => self.puts.over(message.ticket, results),
            Stage::Copy(result) => self.copies.complete(message.ticket, result),
            Stage::Moved(_) | Stage::Disk(_) => {}
        }
        self.write_staged();
    }

    fn is_parked(&self) -> bool {
        self.copies.is_parked()
    }

    fn retry(&mut self) {
        self.copies.retry();
        self.write_staged();
    }
}
