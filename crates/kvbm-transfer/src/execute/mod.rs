//! Executors: one loop per thread, which issues blocks of its path and takes completions, and never blocks on either.
//!
//! What moves the bytes is a [`Carrier`]. The hardware owns source and destination of what a carrier has in flight; an
//! executor ends only when nothing is.

mod copy;
mod disk;
mod memory;
mod staged;

pub(crate) use copy::{Lane, Route};
pub(crate) use disk::{DiskReads, DiskWrites};
pub(crate) use memory::MemoryCarrier;
pub(crate) use staged::StagedCarrier;

use crate::hub::{Hub, Producer};
use crate::schedule::Portion;
use crossbeam_channel::{Receiver, Sender, select};
use kvbm_device::DeviceError;
use kvbm_disk::OpOutcome;
use kvbm_plan::{BlockOutcome, BlockTransfer, Failure, FailureKind, Path, PlanId, TransferPlan};
use std::sync::Arc;
use std::time::Duration;

/// How soon work that found a full queue is tried again if no completion comes first.
const RETRY: Duration = Duration::from_millis(2);

/// A stage of some blocks is over.
pub(crate) struct Done {
    pub(crate) ticket: u64,
    pub(crate) result: Stage,
}

pub(crate) enum Stage {
    Copy(Result<(), DeviceError>),
    Disk(OpOutcome),
}

/// Where a carrier works and whom it tells.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) hub: Arc<Hub>,
    pub(crate) path: Path,
    /// Completions come back here; one message per ticket, and there is room for all of them.
    pub(crate) done: Sender<Done>,
}

impl Site {
    /// A failure that says where: path, block, slots.
    pub(crate) fn failure(&self, block: &BlockTransfer, kind: FailureKind, why: &str) -> BlockOutcome {
        let Path { src, dst } = self.path;
        let detail = format!(
            "path {}, block {} from slot {} of {src} to slot {} of {dst}: {why}",
            self.path, block.identity.hash, block.src, block.dst
        );
        tracing::warn!(%kind, detail, "block not transferred");
        BlockOutcome::Failed(Failure::new(kind, detail))
    }

    pub(crate) fn settle_one(&self, plan: &TransferPlan, index: u32, outcome: BlockOutcome, bytes: u64) {
        let bytes = if outcome.is_done() { bytes } else { 0 };
        self.hub.settle(plan.plan_id, vec![(index, outcome)], bytes);
    }
}

/// Outcomes of blocks of one plan, told together.
pub(crate) struct Settled {
    pub(crate) plan_id: PlanId,
    pub(crate) outcomes: Vec<(u32, BlockOutcome)>,
    pub(crate) bytes: u64,
}

/// Moves blocks along one path, without blocking.
pub(crate) trait Carrier: Send {
    /// Blocks that may be issued now.
    fn room(&self) -> usize;
    /// Blocks issued and not settled.
    fn in_flight(&self) -> usize;
    /// Starts moving these blocks, at most [`Carrier::room`].
    fn issue(&mut self, portion: Portion);
    /// A stage is over: goes on with the next, or settles.
    fn complete(&mut self, done: Done);
    /// Whether something waits for room in a queue of the hardware.
    fn is_parked(&self) -> bool;
    /// Tries again what is parked.
    fn retry(&mut self);
}

/// One executor thread.
pub(crate) struct Executor {
    pub(crate) site: Site,
    pub(crate) carrier: Box<dyn Carrier>,
    pub(crate) batch_blocks: usize,
    pub(crate) completions: Receiver<Done>,
    pub(crate) bell: Receiver<()>,
}

impl Executor {
    pub(crate) fn run(mut self, _alive: &Producer) {
        loop {
            while let Ok(done) = self.completions.try_recv() {
                self.carrier.complete(done);
            }
            if self.issue_some() {
                continue;
            }
            if self.carrier.in_flight() == 0 && self.site.hub.is_closing() {
                // Plans of this path may have become ready between the look above and the closing.
                if self.issue_some() {
                    continue;
                }
                return;
            }
            let wait = if self.carrier.is_parked() { RETRY } else { Duration::from_secs(3600) };
            select! {
                recv(self.completions) -> done => if let Ok(done) = done { self.carrier.complete(done) },
                recv(self.bell) -> _ => {},
                default(wait) => {},
            }
            if self.carrier.is_parked() {
                self.carrier.retry();
            }
        }
    }

    /// Issues one batch if there is room and work.
    fn issue_some(&mut self) -> bool {
        let limit = self.carrier.room().min(self.batch_blocks);
        let busy = self.carrier.in_flight() > 0;
        if limit == 0 || self.carrier.is_parked() {
            return false;
        }
        match self.site.hub.take(self.site.path, busy, limit) {
            Some(portion) => {
                self.carrier.issue(portion);
                true
            }
            None => false,
        }
    }
}
