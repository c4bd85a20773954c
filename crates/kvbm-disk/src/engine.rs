//! The engine's face.

use crate::{
    BatchHandle, BlockChecksum, DiskConfig, EngineInfo, EngineStats, FlushError, FlushReport, IoBatch,
    OpenError, Recovered, Rejected, SubmitError,
};
use kvbm_plan::BlockId;
use std::time::Duration;

/// The G3 engine over one directory. All methods may be called from any thread.
#[derive(Debug)]
pub struct DiskEngine {
    info: EngineInfo,
    namespace: [u8; 16],
}

impl DiskEngine {
    /// Opens or creates the directory and reads what it holds.
    pub fn open(config: DiskConfig) -> Result<(Self, Recovered), OpenError> {
        config.validate()?;
        Err(OpenError::NoDirect { reason: "under construction".into() })
    }

    /// Hands a batch to the I/O threads. Never blocks.
    pub fn submit(&self, batch: IoBatch) -> Result<BatchHandle, Rejected> {
        Err(Rejected { batch, error: SubmitError::ShuttingDown })
    }

    /// These slots no longer hold anything that may be read or found after a restart. Unknown, free and
    /// quarantined slots are left alone. Durable with the next commit.
    pub fn release(&self, slots: &[BlockId]) {
        let _ = slots;
    }

    /// The slot is never read, written or recovered again. Reads that find damaged bytes do this by themselves.
    pub fn quarantine(&self, slot: BlockId) {
        let _ = slot;
    }

    /// Makes every block durable whose write completed before the call; waits at most `deadline`.
    pub fn flush(&self, deadline: Duration) -> Result<FlushReport, FlushError> {
        Err(FlushError::Deadline { deadline, durable_blocks: 0 })
    }

    /// What the engine is and holds.
    pub fn info(&self) -> EngineInfo {
        self.info.clone()
    }

    /// Counters.
    pub fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    /// How this engine computes checksums, so that a mover of bytes can compute the same.
    pub fn checksums(&self) -> BlockChecksum {
        BlockChecksum::new(self.namespace)
    }

    /// Stops admission, fails what has not started, waits for what runs, commits. Returns whether all of it was
    /// done by `deadline`.
    pub fn shutdown(&self, deadline: Duration) -> bool {
        let _ = deadline;
        true
    }
}
