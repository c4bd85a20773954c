//! Executors: one loop per thread, which issues blocks of its path and takes completions, and never
//! blocks on either.
//!
//! What moves the bytes is a [`Carrier`]. The hardware owns source and destination of what a
//! carrier has in flight; an executor ends only when nothing is.

mod compare;
mod copy;
mod disk;
mod fused;
mod memory;
mod ring_copies;
mod staged;
mod staged_writes;
mod sums;
mod volume;
mod written_elsewhere;

pub(crate) use copy::{Lane, MoverLane, Route};
pub(crate) use disk::{DiskCarrier, Reads, Writes};
pub(crate) use fused::{Kernels, Way};
pub(crate) use memory::MemoryCarrier;
pub(crate) use ring_copies::RingCopies;
pub(crate) use staged::StagedCarrier;
pub(crate) use staged_writes::StagedWriter;
#[cfg(any(test, kvbm_sim))]
pub(crate) use volume::{Names, ObjectForm, ObjectReader, ObjectWriter, ReadGroup};
pub(crate) use volume::{StagedVolumeWriter, VolumeReader, VolumeWriter, failure_of, readable_cuts};
pub(crate) use written_elsewhere::WrittenElsewhere;

use crate::completion_queue::{CompletionQueue, Done};
use crate::hub::{Hub, Producer};
use crate::schedule::Portion;
use kvbm_plan::{BlockOutcome, BlockTransfer, Failure, FailureKind, Path, PlanId, TransferPlan};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How soon work that found a full queue is tried again if no completion comes first.
const RETRY: Duration = Duration::from_millis(2);

/// Where a carrier works, and where its results go.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) hub: Arc<Hub>,
    pub(crate) path: Path,
    /// Completions come back here.
    pub(crate) completions: Arc<CompletionQueue>,
}

impl Site {
    /// A failure that says where: path, block, slots.
    pub(crate) fn failure(&self, block: &BlockTransfer, kind: FailureKind, why: &str) -> BlockOutcome {
        let Path { src, dst } = self.path;
        let detail = format!(
            "path {}, block {} from slot {} of {src} to slot {} of {dst}: {why}",
            self.path, block.identity.hash, block.src, block.dst
        );
        // The leader gets a report of each, and logs a warning at intervals.
        tracing::debug!(%kind, detail, "block not transferred");
        BlockOutcome::Failed(Failure::new(kind, detail))
    }

    pub(crate) fn settle(&self, plan: &TransferPlan, outcomes: Vec<(u32, BlockOutcome)>, bytes: u64) {
        if !outcomes.is_empty() {
            self.hub.settle(plan.plan_id, outcomes, bytes);
        }
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
    /// Blocks of this plan that may be issued now, where that is less; as many as of any other of
    /// its volume.
    fn room_for(&self, _plan: &TransferPlan) -> usize {
        usize::MAX
    }
    /// Blocks issued and not settled.
    fn in_flight(&self) -> usize;
    /// Starts moving these blocks, at most [`Carrier::room`].
    fn issue(&mut self, portion: Portion);
    /// A stage is over: goes on with the next, or settles.
    fn complete(&mut self, done: Done);
    /// Whether something waits for room in a queue of the hardware.
    fn is_parked(&self) -> bool;
    /// Whether anything is to be tried again soon, although others may be issued.
    fn is_waiting(&self) -> bool {
        self.is_parked()
    }
    /// Tries again what is parked or waits.
    fn retry(&mut self);
}

/// One executor thread.
pub(crate) struct Executor {
    pub(crate) site: Site,
    pub(crate) carrier: Box<dyn Carrier>,
    pub(crate) batch_blocks: usize,
}

impl Executor {
    /// Runs until the worker closes. A panic, which only a defect can cause, retires the path
    /// instead of leaving it silent. What the carrier had in flight stays claimed for good, because
    /// the hardware may still be at it.
    pub(crate) fn run(mut self, _alive: &Producer) {
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            tracing::error!(path = %self.site.path, "an executor panicked");
            self.site.hub.retire(self.site.path);
            std::mem::forget(self.carrier);
        }
    }

    fn work(&mut self) {
        loop {
            self.complete_some();
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
            let wait = if self.carrier.is_waiting() { RETRY } else { Duration::from_secs(3600) };
            self.site.completions.wait(wait);
            self.complete_some();
            if self.carrier.is_waiting() {
                self.carrier.retry();
            }
        }
    }

    fn complete_some(&mut self) {
        for done in self.site.completions.take() {
            self.carrier.complete(done);
        }
    }

    /// Issues one batch if there is room and work.
    fn issue_some(&mut self) -> bool {
        let limit = self.carrier.room().min(self.batch_blocks);
        let busy = self.carrier.in_flight() > 0;
        if limit == 0 || self.carrier.is_parked() {
            return false;
        }
        let carrier = &self.carrier;
        match self.site.hub.take(self.site.path, busy, |plan| limit.min(carrier.room_for(plan))) {
            Some(portion) => {
                self.carrier.issue(portion);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report_slot::ReportSlot;
    use crate::schedule::{GroupLimits, Limits, PathLimits, Reply, State};
    use kvbm_plan::{
        BlockId, BlockIdentity, ChecksumMode, Endpoint, Epoch, Gate, GroupId, NamespaceId, Priority, Rank,
        SequenceHash,
    };

    /// A defect.
    struct Broken;

    impl Carrier for Broken {
        fn room(&self) -> usize {
            1
        }
        fn in_flight(&self) -> usize {
            0
        }
        fn issue(&mut self, _portion: Portion) {
            panic!("planted");
        }
        fn complete(&mut self, _done: Done) {}
        fn is_parked(&self) -> bool {
            false
        }
        fn retry(&mut self) {}
    }

    fn plan(id: u64) -> TransferPlan {
        let hash = SequenceHash::from_bytes([1; 16]);
        let identity =
            BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
        TransferPlan {
            plan_id: PlanId(id),
            epoch: Epoch(0),
            group: GroupId(0),
            src: Endpoint::Local(kvbm_plan::Tier::G1),
            dst: Endpoint::Local(kvbm_plan::Tier::G2),
            blocks: vec![BlockTransfer { identity, src: BlockId(0), dst: BlockId(0) }],
            layers: None,
            gate: Gate::None,
            after: Vec::new(),
            priority: Priority::Normal,
            budget_ms: 0,
            checksums: ChecksumMode::Required,
            tag: 0,
            compare: None,
        }
    }

    #[test]
    fn a_panicking_executor_retires_its_path_and_says_so() {
        let limits = Limits {
            rank: Rank(0),
            epoch: Epoch(0),
            groups: vec![GroupLimits { slots: [4, 4, 4, 0], layers: 1 }],
            paths: std::array::from_fn(|_| Ok(PathLimits { plans: 4, blocks: 4096 })),
            outgoing: 16,
        };
        let hub = Arc::new(Hub::new(State::new(limits), Default::default(), Arc::new(|_| {})));
        let slots = [
            Arc::new(ReportSlot::default()),
            Arc::new(ReportSlot::default()),
            Arc::new(ReportSlot::default()),
        ];
        for (id, slot) in (0..2).zip(&slots) {
            hub.submit(plan(id), Reply::Handle(Arc::clone(slot))).unwrap();
        }
        let site = Site { hub: Arc::clone(&hub), path: Path::G1_G2, completions: Arc::default() };
        let executor = Executor { site, carrier: Box::new(Broken), batch_blocks: 1 };
        executor.run(&hub.producer());
        hub.submit(plan(2), Reply::Handle(Arc::clone(&slots[2]))).unwrap();
        assert!(slots[0].get().is_none(), "the hardware may have it: no report");
        for slot in &slots[1..] {
            let report = slot.get().expect("a report");
            let BlockOutcome::Failed(failure) = &report.blocks[0] else { panic!("{report:?}") };
            assert!(failure.detail.contains("executor failed"), "{failure}");
        }
        assert_eq!(hub.wait_idle(std::time::Instant::now()), Ok(()), "nothing waits for it");
    }
}
