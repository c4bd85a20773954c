//! Writes the blocks that are taken over.

use kvbm_disk::{DiskEngine, IoBatch, OpOutcome, OwnedBuffer, RecoveredSlot, SubmitError};
use kvbm_plan::{BlockId, BlockIdentity};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Bytes that are written together.
const BATCH_BYTES: u64 = 4 << 20;
/// Batches on their way to the disk while the next is read.
const BATCHES: usize = 4;
/// How long a disk may take for a batch that it has.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes blocks in batches, a few at a time.
pub(super) struct Writer<'a> {
    engine: &'a DiskEngine,
    batch_blocks: usize,
    pending: Vec<(BlockId, BlockIdentity, Arc<OwnedBuffer>)>,
    flying: usize,
    pub(super) given: Vec<BlockId>,
    /// The disk takes nothing any more, or does not answer.
    pub(super) stopped: bool,
    written: Vec<RecoveredSlot>,
    done: Sender<Vec<Option<RecoveredSlot>>>,
    results: Receiver<Vec<Option<RecoveredSlot>>>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(engine: &'a DiskEngine, block_bytes: u64) -> Self {
        let batch_blocks = (BATCH_BYTES / block_bytes.max(1)).clamp(1, 64) as usize;
        let (done, results) = channel();
        let (pending, given, written) = (Vec::new(), Vec::new(), Vec::new());
        Self { engine, batch_blocks, pending, flying: 0, given, stopped: false, written, done, results }
    }

    pub(super) fn write(&mut self, slot: BlockId, identity: BlockIdentity, block: OwnedBuffer) {
        self.given.push(slot);
        self.pending.push((slot, identity, Arc::new(block)));
        if self.pending.len() >= self.batch_blocks {
            self.submit();
        }
    }

    fn submit(&mut self) {
        let blocks = std::mem::take(&mut self.pending);
        if blocks.is_empty() || self.stopped {
            return;
        }
        let done = self.done.clone();
        let names: Vec<_> = blocks.iter().map(|(slot, identity, _)| (*slot, *identity)).collect();
        let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| {
            let reported = names.into_iter().zip(outcomes).map(|((slot, identity), outcome)| {
                let op = outcome.ok()?;
                Some(RecoveredSlot { slot, identity, checksum: op.checksum, bytes: op.bytes })
            });
            drop(done.send(reported.collect()));
        });
        for (slot, identity, block) in &blocks {
            batch.write_buffer(*slot, *identity, block);
        }
        loop {
            match self.engine.submit(batch) {
                Ok(_) => break self.flying += 1,
                Err(rejected)
                    if matches!(rejected.error, SubmitError::QueueFull { .. }) && self.flying > 0 =>
                {
                    batch = rejected.batch;
                    if !self.wait() {
                        return;
                    }
                }
                Err(rejected) => {
                    tracing::warn!(error = %rejected.error, "the disk takes no more blocks of another deployment");
                    self.stopped = true;
                    return;
                }
            }
        }
        if self.flying >= BATCHES {
            self.wait();
        }
    }

    /// Waits for a batch. `false` if the disk does not answer.
    fn wait(&mut self) -> bool {
        let Ok(results) = self.results.recv_timeout(PATIENCE) else {
            tracing::warn!(
                batches = self.flying,
                "the disk does not answer: no more blocks of another deployment"
            );
            // What it still has is not counted as ours.
            (self.flying, self.stopped) = (0, true);
            return false;
        };
        self.flying -= 1;
        self.written.extend(results.into_iter().flatten());
        true
    }

    /// What was written. Nothing else that was given stays on the disk.
    pub(super) fn finish(mut self) -> Vec<RecoveredSlot> {
        self.submit();
        while self.flying > 0 {
            self.wait();
        }
        let written: HashSet<BlockId> = self.written.iter().map(|found| found.slot).collect();
        self.given.retain(|slot| !written.contains(slot));
        self.engine.release(&self.given);
        // Batches may complete in any order; the order of slots is that of age.
        self.written.sort_unstable_by_key(|found| found.slot);
        self.written
    }
}
