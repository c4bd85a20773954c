//! Keeps a path of a worker busy and counts what arrives.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kvbm::plan::{
    BlockOutcome, BlockTransfer, ChecksumMode, Endpoint, Epoch, Gate, GroupId, Path, PlanId, Priority, Tier,
    TransferPlan,
};
use kvbm_transfer::TransferHandle;

use super::fixture::{self, Fixture, PATIENCE};
use super::machine;

/// Plans under way at a time, so that the next blocks wait while the last are moved, and the bytes
/// of each.
const PLANS: usize = 8;
const PLAN_BYTES: u64 = 16 << 20;
/// Blocks of a plan, where blocks are small or large.
const PLAN_BLOCKS: std::ops::RangeInclusive<u64> = 8..=256;

/// What one measurement moved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) bytes: u64,
    pub(super) time: Duration,
    /// Processor time of the whole process.
    pub(super) cpu: Duration,
}

impl Sample {
    pub(super) fn gb_per_s(self) -> f64 {
        self.bytes as f64 / self.time.as_secs_f64() / 1e9
    }

    pub(super) fn cpu_ms_per_gb(self) -> f64 {
        self.cpu.as_secs_f64() * 1e3 / (self.bytes as f64 / 1e9)
    }
}

/// Notes time and processor time from here on.
pub(super) struct Watch {
    started: Instant,
    cpu: Duration,
}

impl Watch {
    pub(super) fn start() -> Self {
        Self { started: Instant::now(), cpu: machine::cpu_time() }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn stop(&self, bytes: u64) -> Sample {
        Sample { bytes, time: self.elapsed(), cpu: machine::cpu_time().saturating_sub(self.cpu) }
    }
}

/// Moves every block once.
pub(super) fn once(fixture: &Fixture, path: Path) -> Result<()> {
    run(fixture, path, Duration::ZERO).map(drop)
}

/// Moves blocks along `path`, in turn, for `time` and until each was moved. Blocks that go to disk
/// count when they are durable.
pub(super) fn run(fixture: &Fixture, path: Path, time: Duration) -> Result<Sample> {
    run_over(fixture, &[path], time)
}

/// The same of blocks that go from the device to host memory, and from there to disk as soon as
/// their plan is over.
pub(super) fn run_staged(fixture: &Fixture, time: Duration) -> Result<Sample> {
    run_over(fixture, &[Path::G1_G2, Path::G2_G3], time)
}

/// The same over one path after another.
fn run_over(fixture: &Fixture, paths: &[Path], time: Duration) -> Result<Sample> {
    let mut under_way = VecDeque::with_capacity(PLANS);
    let (mut next, mut bytes) = (0_u64, 0);
    let plan_blocks =
        (PLAN_BYTES / fixture.shape.block_bytes).clamp(*PLAN_BLOCKS.start(), *PLAN_BLOCKS.end());
    // A block is never on its way twice.
    let plan_blocks = plan_blocks.min(u64::from(fixture.shape.slots) / (2 * PLANS as u64)).max(1);
    let watch = Watch::start();
    while next < u64::from(fixture.shape.slots) || watch.elapsed() < time {
        if under_way.len() == PLANS {
            bytes += arrived(under_way.pop_front())?;
        }
        let blocks = (next..next + plan_blocks).map(|count| (count % u64::from(fixture.shape.slots)) as u32);
        let mut steps = Vec::with_capacity(paths.len());
        for path in paths {
            let after = steps.last().map(TransferHandle::plan_id).into_iter().collect();
            let plan = TransferPlan { after, ..plan(fixture, *path, blocks.clone()) };
            steps.push(fixture.worker.execute(plan)?);
        }
        under_way.push_back(steps);
        next += plan_blocks;
    }
    while !under_way.is_empty() {
        bytes += arrived(under_way.pop_front())?;
    }
    if paths.last().is_some_and(|path| path.dst == Tier::G3) {
        fixture.disk.flush(PATIENCE)?;
    }
    Ok(watch.stop(bytes))
}

fn plan(fixture: &Fixture, path: Path, blocks: impl Iterator<Item = u32>) -> TransferPlan {
    let transfer = |block: u32| {
        let slots = fixture.slots_of(block);
        let [src, dst] = [path.src, path.dst].map(|tier| slots[tier.index()]);
        BlockTransfer { identity: fixture::identity(block), src, dst }
    };
    TransferPlan {
        plan_id: PlanId(fixture.next_plan()),
        epoch: Epoch(0),
        group: GroupId(0),
        src: Endpoint::Local(path.src),
        dst: Endpoint::Local(path.dst),
        blocks: blocks.map(transfer).collect(),
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

/// Bytes of the blocks that plans one after another have moved, all of which have to arrive.
fn arrived(steps: Option<Vec<TransferHandle>>) -> Result<u64> {
    steps.into_iter().flatten().try_fold(0, |_, step| arrived_by(&step))
}

fn arrived_by(handle: &TransferHandle) -> Result<u64> {
    let report = handle.wait(Instant::now() + PATIENCE)?;
    for outcome in &report.blocks {
        if let BlockOutcome::Failed(failure) = outcome {
            anyhow::bail!("a block did not arrive: {failure}");
        }
    }
    ensure!(report.bytes > 0, "a report without bytes");
    Ok(report.bytes)
}
