//! The scheduler without threads: time is a number, executors are calls.

mod order;
mod random;
mod refusals;
mod waits;

use super::*;
use crate::error::SubmitError;
use kvbm_plan::{
    BlockId, BlockIdentity, BlockOutcome, BlockTransfer, ChecksumMode, Endpoint, Epoch, FailureKind, Gate,
    GroupId, LayerRange, NamespaceId, Path, PlanId, Priority, Rank, SequenceHash, Tier, TransferPlan,
    TransferReport, VolumeId,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLOTS: u32 = 64;

struct Bench {
    state: State,
    now: Instant,
    reports: HashMap<PlanId, Vec<Arc<TransferReport>>>,
}

impl Bench {
    fn new() -> Self {
        Self::with_queue(PathLimits { plans: 8, blocks: 8192 })
    }

    fn with_queue(limits: PathLimits) -> Self {
        Self::with(limits, 1 << 20)
    }

    /// `outgoing`: reports that may wait for the sink.
    fn with(limits: PathLimits, outgoing: usize) -> Self {
        let limits = Limits {
            rank: Rank(3),
            epoch: Epoch(7),
            groups: vec![GroupLimits { slots: [SLOTS, SLOTS, SLOTS, 0], layers: 4 }],
            paths: std::array::from_fn(|_| Ok(limits)),
            outgoing,
        };
        Self { state: State::new(limits), now: Instant::now(), reports: HashMap::new() }
    }

    fn submit(&mut self, plan: TransferPlan) {
        self.state.submit(plan, Reply::Sink, self.now).unwrap();
        self.collect();
    }

    fn refused(&mut self, plan: TransferPlan) -> SubmitError {
        self.state.submit(plan, Reply::Sink, self.now).unwrap_err()
    }

    fn later(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        self.state.expire(self.now);
        self.collect();
    }

    fn take(&mut self, path: Path, limit: usize) -> Option<(u64, Vec<u32>)> {
        let portion = self.state.take(path, false, |_| limit, self.now);
        self.collect();
        portion.map(|portion| (portion.plan.plan_id.0, portion.indices))
    }

    fn done(&mut self, plan: u64, indices: &[u32]) {
        let outcomes: Vec<_> =
            indices.iter().map(|index| (*index, BlockOutcome::Done { checksum: 1 })).collect();
        self.state.settle(PlanId(plan), outcomes, indices.len() as u64, self.now);
        self.collect();
    }

    /// Takes and finishes everything that is ready on `path`, plan by plan.
    fn run(&mut self, path: Path) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some((plan, indices)) = self.take(path, 4096) {
            self.done(plan, &indices);
            order.push(plan);
        }
        order
    }

    fn collect(&mut self) {
        self.state.ripple(self.now);
        while let Some(delivery) = self.state.next_delivery() {
            let Delivery::Report(report, times) = delivery else { panic!("not a report") };
            for _ in 0..times {
                self.reports.entry(report.plan_id).or_default().push(Arc::clone(&report));
            }
        }
    }

    fn report(&self, plan: u64) -> &TransferReport {
        let reports = self.reports.get(&PlanId(plan)).expect("a report");
        assert_eq!(reports.len(), 1, "exactly one report");
        &reports[0]
    }

    fn kinds(&self, plan: u64) -> Vec<Option<FailureKind>> {
        let kind = |outcome: &BlockOutcome| match outcome {
            BlockOutcome::Done { .. } => None,
            BlockOutcome::Failed(failure) => Some(failure.kind),
        };
        self.report(plan).blocks.iter().map(kind).collect()
    }

    fn failed_with(&self, plan: u64) -> FailureKind {
        let kinds = self.kinds(plan);
        assert!(kinds.iter().all(|kind| *kind == kinds[0]), "all blocks share the story");
        kinds[0].expect("a failure")
    }
}

fn plan(id: u64, path: Path, blocks: u32) -> TransferPlan {
    let block = |index: u32| BlockTransfer {
        identity: BlockIdentity {
            namespace: NamespaceId(1),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([index as u8; 16]),
            parent: None,
            position: 0,
        },
        src: BlockId(index),
        dst: BlockId(index),
    };
    TransferPlan {
        plan_id: PlanId(id),
        epoch: Epoch(7),
        group: GroupId(0),
        src: Endpoint::Local(path.src),
        dst: Endpoint::Local(path.dst),
        blocks: (0..blocks).map(block).collect(),
        layers: None,
        gate: Gate::None,
        after: Vec::new(),
        priority: Priority::Background,
        budget_ms: 0,
        checksums: ChecksumMode::Required,
        tag: 0,
        compare: None,
    }
}

fn on(id: u64) -> TransferPlan {
    plan(id, Path::G1_G2, 2)
}
