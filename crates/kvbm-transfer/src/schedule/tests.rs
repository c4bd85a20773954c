//! The scheduler without threads: time is a number, executors are calls.

use super::*;
use crate::error::SubmitError;
use kvbm_plan::{
    BlockId, BlockIdentity, BlockOutcome, BlockTransfer, ChecksumMode, Endpoint, Epoch, FailureKind, Gate,
    GroupId, LayerRange, NamespaceId, Path, PlanId, Priority, Rank, SequenceHash, Tier, TransferPlan,
    TransferReport, VolumeId,
};
use proptest::prelude::*;
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
        let limits = Limits {
            rank: Rank(3),
            epoch: Epoch(7),
            group: GroupId(0),
            slots: [SLOTS, SLOTS, SLOTS, 0],
            layers: 4,
            paths: std::array::from_fn(|_| Ok(limits)),
            outgoing: 1 << 20,
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
    }
}

fn on(id: u64) -> TransferPlan {
    plan(id, Path::G1_G2, 2)
}

#[test]
fn priority_first_then_first_come() {
    let mut bench = Bench::new();
    let priorities =
        [Priority::Background, Priority::Urgent, Priority::Normal, Priority::Urgent, Priority::Background];
    for (id, priority) in (1..).zip(priorities) {
        bench.submit(TransferPlan { priority, ..on(id) });
    }
    assert_eq!(bench.run(Path::G1_G2), [2, 4, 3, 1, 5]);
    assert_eq!(bench.run(Path::G2_G1), []);
}

#[test]
fn a_plan_goes_out_in_portions_and_is_reported_once() {
    let mut bench = Bench::new();
    bench.submit(plan(1, Path::G1_G2, 5));
    assert_eq!(bench.take(Path::G1_G2, 2), Some((1, vec![0, 1])));
    assert_eq!(bench.take(Path::G1_G2, 2), Some((1, vec![2, 3])));
    bench.done(1, &[2, 3]);
    bench.submit(TransferPlan { priority: Priority::Urgent, ..on(2) });
    assert_eq!(bench.take(Path::G1_G2, 2), Some((2, vec![0, 1])), "urgent blocks go between portions");
    assert_eq!(bench.take(Path::G1_G2, 2), Some((1, vec![4])));
    bench.done(1, &[4]);
    assert!(bench.reports.is_empty());
    bench.now += Duration::from_millis(9);
    bench.done(1, &[1, 0]);
    let report = bench.report(1);
    assert_eq!((report.bytes, report.busy_us, report.rank), (5, 9000, Rank(3)));
    assert_eq!(bench.kinds(1), [None; 5]);
}

#[test]
fn gates_hold_back_one_plan_and_no_other() {
    let mut bench = Bench::new();
    bench.submit(TransferPlan { gate: Gate::Iteration(5), ..on(1) });
    bench.submit(TransferPlan { gate: Gate::Layer { iteration: 5, layer: 1 }, ..on(2) });
    bench.submit(on(3));
    assert_eq!(bench.run(Path::G1_G2), [3]);
    bench.state.advance(5, Some(0));
    assert_eq!(bench.run(Path::G1_G2), []);
    bench.state.advance(5, Some(1));
    assert_eq!(bench.run(Path::G1_G2), [2]);
    bench.state.advance(5, None);
    assert_eq!(bench.run(Path::G1_G2), [1]);
    bench.submit(TransferPlan { gate: Gate::Iteration(5), ..on(4) });
    assert_eq!(bench.run(Path::G1_G2), [4], "an open gate stays open");
}

#[test]
fn device_events_gate_plans_whichever_comes_first() {
    let mut bench = Bench::new();
    bench.submit(TransferPlan { gate: Gate::DeviceEvent(1), ..on(1) });
    let first = bench.state.register_event(1, bench.now);
    let second = bench.state.register_event(2, bench.now);
    bench.submit(TransferPlan { gate: Gate::DeviceEvent(2), ..on(2) });
    assert_eq!(bench.run(Path::G1_G2), []);
    bench.state.event_over(1, first, Ok(()), bench.now);
    assert_eq!(bench.run(Path::G1_G2), [1]);
    bench.state.event_over(2, second, Err("kernel fault".into()), bench.now);
    bench.collect();
    assert_eq!(bench.failed_with(2), FailureKind::Device);
    bench.submit(TransferPlan { gate: Gate::DeviceEvent(2), ..on(3) });
    assert_eq!(bench.failed_with(3), FailureKind::Device);
}

#[test]
fn predecessors_are_waited_for_and_their_failure_is_inherited() {
    let mut bench = Bench::new();
    bench.submit(TransferPlan { gate: Gate::Iteration(1), ..on(1) });
    bench.submit(TransferPlan { after: vec![PlanId(1), PlanId(1)], ..plan(2, Path::G2_G1, 1) });
    bench.submit(TransferPlan { after: vec![PlanId(1), PlanId(2)], ..plan(3, Path::G2_G3, 1) });
    assert_eq!(bench.run(Path::G2_G1), []);
    bench.state.advance(1, None);
    assert_eq!(bench.run(Path::G1_G2), [1]);
    assert_eq!(bench.run(Path::G2_G3), []);
    assert_eq!(bench.run(Path::G2_G1), [2]);
    assert_eq!(bench.run(Path::G2_G3), [3]);
    bench.submit(TransferPlan { gate: Gate::Iteration(9), ..on(4) });
    bench.submit(TransferPlan { after: vec![PlanId(4)], ..on(5) });
    bench.submit(TransferPlan { after: vec![PlanId(5), PlanId(3)], ..on(6) });
    bench.state.cancel(PlanId(4), bench.now);
    bench.collect();
    assert_eq!(bench.failed_with(4), FailureKind::Cancelled);
    assert_eq!(bench.failed_with(6), FailureKind::Predecessor);
    for (id, before) in [(7, 4), (8, 999), (9, 9)] {
        bench.submit(TransferPlan { after: vec![PlanId(before)], ..on(id) });
        assert_eq!(bench.failed_with(id), FailureKind::Predecessor, "plan {id}");
    }
    assert_eq!(bench.state.live_plans(), 0);
}

#[test]
fn a_chain_of_any_length_falls_without_recursion() {
    let mut bench = Bench::with_queue(PathLimits { plans: 200_000, blocks: 1 << 20 });
    bench.submit(TransferPlan { gate: Gate::Iteration(1), ..plan(1, Path::G1_G2, 1) });
    for id in 2..50_000 {
        bench.submit(TransferPlan { after: vec![PlanId(id - 1)], ..plan(id, Path::G1_G2, 1) });
    }
    bench.state.cancel(PlanId(1), bench.now);
    bench.collect();
    assert_eq!(bench.failed_with(49_999), FailureKind::Predecessor);
    assert_eq!(bench.state.live_plans(), 0);
}

#[test]
fn a_budget_ends_waiting_for_anything() {
    let mut bench = Bench::new();
    bench.submit(TransferPlan { budget_ms: 10, gate: Gate::Iteration(1), ..on(1) });
    bench.submit(TransferPlan { budget_ms: 10, ..on(2) });
    bench.submit(TransferPlan { budget_ms: 20, ..plan(3, Path::G1_G2, 3) });
    bench.submit(TransferPlan { gate: Gate::Iteration(1), ..on(4) });
    bench.later(9);
    assert!(bench.reports.is_empty());
    bench.later(1);
    assert_eq!((bench.failed_with(1), bench.failed_with(2)), (FailureKind::Deadline, FailureKind::Deadline));
    assert_eq!(bench.take(Path::G1_G2, 1), Some((3, vec![0])));
    bench.now += Duration::from_millis(10);
    assert_eq!(bench.take(Path::G1_G2, 1), None, "no copy starts after the deadline");
    bench.done(3, &[0]);
    assert_eq!(bench.kinds(3), [None, Some(FailureKind::Deadline), Some(FailureKind::Deadline)]);
    bench.later(1 << 40);
    assert_eq!(bench.state.live_plans(), 1, "no budget, no deadline");
}

#[test]
fn cancelling_drops_queued_plans_and_leaves_started_ones() {
    let mut bench = Bench::new();
    bench.submit(on(1));
    bench.submit(on(2));
    assert_eq!(bench.take(Path::G1_G2, 1), Some((1, vec![0])));
    for id in [1, 2, 77] {
        bench.state.cancel(PlanId(id), bench.now);
    }
    bench.collect();
    assert_eq!(bench.failed_with(2), FailureKind::Cancelled);
    assert_eq!(bench.take(Path::G1_G2, 1), Some((1, vec![1])));
    bench.done(1, &[0, 1]);
    assert_eq!(bench.kinds(1), [None, None]);
    bench.state.cancel(PlanId(1), bench.now);
    bench.collect();
    assert_eq!(bench.kinds(1), [None, None]);
}

/// Mutation that makes it fail: `PathQueue::check_room` always finds room.
#[test]
fn invariant_6_a_full_queue_answers_at_once() {
    let mut bench = Bench::with_queue(PathLimits { plans: 2, blocks: 4096 });
    bench.submit(on(1));
    bench.submit(on(2));
    bench.submit(on(3));
    assert_eq!(bench.failed_with(3), FailureKind::QueueFull);
    bench.submit(plan(4, Path::G2_G1, 2));
    assert_eq!(bench.run(Path::G2_G1), [4], "another path has a queue of its own");
    assert_eq!(bench.take(Path::G1_G2, 1), Some((1, vec![0])), "started plans leave the queue");
    bench.submit(on(5));
    assert!(!bench.reports.contains_key(&PlanId(5)));
    let stats = bench.state.path_stats()[0];
    assert_eq!((stats.queued_plans, stats.running_plans, stats.failed(FailureKind::QueueFull)), (2, 1, 2));
}

#[test]
fn repeated_plans_are_answered_and_never_executed_again() {
    let mut bench = Bench::new();
    bench.submit(on(1));
    bench.submit(on(1));
    assert_eq!(bench.run(Path::G1_G2), [1]);
    assert_eq!(bench.reports[&PlanId(1)].len(), 2, "one report per submission");
    bench.submit(on(1));
    assert_eq!(bench.reports[&PlanId(1)].len(), 3);
    assert!(bench.reports[&PlanId(1)].windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(bench.run(Path::G1_G2), []);
    let blocks = bench.state.path_stats()[0].blocks;
    assert_eq!(blocks, 2);
}

#[test]
fn another_life_of_the_leader_is_refused() {
    let mut bench = Bench::new();
    for epoch in [6, 8] {
        let error = bench.refused(TransferPlan { epoch: Epoch(epoch), ..on(1) });
        assert!(matches!(error, SubmitError::StaleEpoch { current: Epoch(7), .. }), "{error}");
    }
    assert_eq!(bench.run(Path::G1_G2), []);
    assert!(bench.reports.is_empty());
}

/// Makes a plan one that no worker can execute.
type Break = fn(&mut TransferPlan);

/// Mutation that makes it fail: layer ranges are let through to disk paths.
#[test]
fn invariant_7_what_a_worker_cannot_do_is_said_at_once() {
    let mut bench = Bench::new();
    let broken: [(&str, Break); 8] = [
        ("g1_g4", |plan| plan.dst = Endpoint::Volume(VolumeId(4))),
        ("name a volume", |plan| plan.dst = Endpoint::Local(Tier::G4)),
        ("kvbm-volume", |plan| {
            (plan.src, plan.dst) = (Endpoint::Volume(VolumeId(4)), Endpoint::Local(Tier::G1));
            plan.layers = Some(LayerRange { first: 0, count: 1 });
        }),
        ("g1_g3", |plan| plan.dst = Endpoint::Local(Tier::G3)),
        ("group 2", |plan| {
            plan.group = GroupId(2);
            plan.blocks.iter_mut().for_each(|block| block.identity.group = GroupId(2));
        }),
        ("this rank has 4 layers", |plan| plan.layers = Some(LayerRange { first: 3, count: 2 })),
        ("this rank has 4 layers", |plan| plan.layers = Some(LayerRange { first: u32::MAX, count: 2 })),
        ("kvbm-disk", |plan| {
            (plan.src, plan.dst) = (Endpoint::Local(Tier::G3), Endpoint::Local(Tier::G2));
            plan.layers = Some(LayerRange { first: 0, count: 1 });
        }),
    ];
    for (id, (names, change)) in (1..).zip(broken) {
        let mut plan = on(id);
        change(&mut plan);
        bench.submit(plan);
        assert_eq!(bench.failed_with(id), FailureKind::Unsupported);
        let BlockOutcome::Failed(failure) = &bench.report(id).blocks[0] else { unreachable!() };
        assert!(failure.detail.contains(names), "{failure}");
    }
    assert_eq!(bench.state.live_plans(), 0);
}

#[test]
fn bad_blocks_fail_alone() {
    let mut bench = Bench::new();
    let mut bad = plan(1, Path::G1_G2, 4);
    bad.blocks[0].src = BlockId(SLOTS);
    bad.blocks[2].dst = BlockId(1);
    bench.submit(bad);
    assert_eq!(bench.take(Path::G1_G2, 16), Some((1, vec![1, 3])));
    bench.done(1, &[1, 3]);
    let unsupported = Some(FailureKind::Unsupported);
    assert_eq!(bench.kinds(1), [unsupported, None, unsupported, None]);
    let mut hopeless = plan(2, Path::G1_G2, 1);
    hopeless.blocks[0].dst = BlockId(u32::MAX);
    bench.submit(hopeless);
    assert_eq!(bench.failed_with(2), FailureKind::Unsupported);
}

#[test]
fn disk_reads_go_before_disk_writes_but_do_not_starve_them() {
    let mut bench = Bench::new();
    bench.submit(plan(1, Path::G2_G3, 8));
    bench.submit(plan(2, Path::G3_G1, 2));
    let now = bench.now;
    assert!(
        bench.state.take(Path::G2_G3, true, |_| 1, now).is_none(),
        "yields while it has something in flight"
    );
    assert!(bench.state.take(Path::G2_G3, false, |_| 1, now).is_some(), "always has something in flight");
    bench.state.take_wakes();
    assert_eq!(bench.take(Path::G3_G1, 2), Some((2, vec![0, 1])));
    let writes = Path::LOCAL.iter().position(|path| *path == Path::G2_G3).unwrap();
    assert!(bench.state.take_wakes()[writes], "writers look again when the reads are issued");
    assert!(bench.state.take(Path::G2_G3, true, |_| 1, now).is_some());
    bench.submit(plan(3, Path::G3_G1, 2));
    assert_eq!(bench.take(Path::G3_G1, 2), Some((3, vec![0, 1])));
    assert!(!bench.state.take_wakes()[writes], "who did not yield is not woken");
}

/// A plan of a block to a volume.
fn to_volume(id: u64, volume: u32) -> TransferPlan {
    TransferPlan { dst: Endpoint::Volume(VolumeId(volume)), ..plan(id, Path::G2_G4, 1) }
}

/// Mutation that makes it fail: `PathQueue::check_room` looks at the whole queue only.
#[test]
fn a_volume_whose_plans_queue_up_leaves_places_for_another() {
    let mut bench = Bench::with_queue(PathLimits { plans: 16, blocks: 8192 });
    (1..=15).for_each(|id| bench.submit(to_volume(id, 1)));
    assert_eq!(bench.failed_with(15), FailureKind::QueueFull);
    bench.submit(to_volume(16, 2));
    assert_eq!(bench.take(Path::G2_G4, 1), Some((1, vec![0])));
    bench.submit(to_volume(17, 1));
    assert_eq!(bench.failed_with(17), FailureKind::QueueFull, "two places are left");
    bench.done(1, &[0]);
    assert_eq!(bench.run(Path::G2_G4), [(2..=14).collect(), vec![16]].concat());
    bench.submit(to_volume(18, 1));
    assert_eq!(bench.run(Path::G2_G4), [18], "there is room again");
    let mut single = Bench::with_queue(PathLimits { plans: 1, blocks: 8192 });
    single.submit(to_volume(1, 1));
    assert_eq!(single.run(Path::G2_G4), [1], "one plan always fits");
}

/// Mutation that makes it fail: all plans of a path share a lane.
#[test]
fn plans_of_a_volume_without_room_are_passed_over_together() {
    let mut bench = Bench::with_queue(PathLimits { plans: 4096, blocks: 8192 });
    (1..=1000).for_each(|id| bench.submit(to_volume(id, 1)));
    bench.submit(to_volume(1001, 2));
    bench.submit(to_volume(1002, 3));
    bench.submit(TransferPlan { priority: Priority::Urgent, ..to_volume(1003, 3) });
    let asked = std::cell::Cell::new(0);
    let room = |plan: &TransferPlan| {
        asked.set(asked.get() + 1);
        usize::from(plan.dst != Endpoint::Volume(VolumeId(1)))
    };
    let order: Vec<_> =
        std::iter::from_fn(|| bench.state.take(Path::G2_G4, false, room, bench.now)).collect();
    let order: Vec<_> = order.iter().map(|portion| portion.plan.plan_id.0).collect();
    assert_eq!(order, [1003, 1001, 1002], "by priority, then by arrival");
    assert!(asked.get() <= 4 * 3, "asked {} times", asked.get());
    assert_eq!(bench.take(Path::G2_G4, 1), Some((1, vec![0])));
}

#[test]
fn closing_fails_what_is_queued_and_lets_started_plans_end() {
    let mut bench = Bench::new();
    bench.submit(on(1));
    bench.submit(on(2));
    bench.submit(TransferPlan { gate: Gate::Iteration(3), ..on(3) });
    assert_eq!(bench.take(Path::G1_G2, 1), Some((1, vec![0])));
    bench.state.close(bench.now);
    bench.collect();
    assert_eq!(
        (bench.failed_with(2), bench.failed_with(3)),
        (FailureKind::ShuttingDown, FailureKind::ShuttingDown)
    );
    assert!(matches!(bench.refused(on(4)), SubmitError::ShuttingDown));
    assert_eq!(bench.take(Path::G1_G2, 9), Some((1, vec![1])));
    bench.done(1, &[0, 1]);
    assert_eq!(bench.kinds(1), [None, None]);
}

/// Mutation that makes it fail: `State::submit` does not look at what waits for the sink.
#[test]
fn invariant_6_submissions_stop_while_the_sink_is_behind() {
    let mut bench = Bench::new();
    let mut limits = bench_limits();
    limits.outgoing = 3;
    bench.state = State::new(limits);
    for id in 0..3 {
        bench
            .state
            .submit(TransferPlan { dst: Endpoint::Volume(VolumeId(1)), ..on(id) }, Reply::Sink, bench.now)
            .unwrap();
    }
    assert!(matches!(bench.refused(on(3)), SubmitError::Backlogged { pending: 3, .. }));
    bench.collect();
    bench.submit(on(3));
    assert_eq!(bench.run(Path::G1_G2), [3]);
}

fn bench_limits() -> Limits {
    Limits {
        rank: Rank(0),
        epoch: Epoch(7),
        group: GroupId(0),
        slots: [SLOTS, SLOTS, SLOTS, 0],
        layers: 4,
        paths: std::array::from_fn(|_| Ok(PathLimits { plans: 8, blocks: 8192 })),
        outgoing: 4096,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit { id: u64, path: usize, blocks: u32, gate: u8, after: Option<u64>, budget: u32, priority: u8 },
    Cancel(u64),
    Advance(u64),
    Event(u64, bool),
    Take(usize, usize),
    Settle { fail: bool },
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let submit =
        (0..24_u64, 0..5_usize, 1..6_u32, 0..6_u8, proptest::option::of(0..24_u64), 0..3_u32, 0..3_u8)
            .prop_map(|(id, path, blocks, gate, after, budget, priority)| Step::Submit {
                id,
                path,
                blocks,
                gate,
                after,
                budget,
                priority,
            });
    prop_oneof![
        4 => submit,
        1 => (0..24_u64).prop_map(Step::Cancel),
        1 => (0..4_u64).prop_map(Step::Advance),
        1 => (0..2_u64, any::<bool>()).prop_map(|(id, ok)| Step::Event(id, ok)),
        4 => (0..5_usize, 1..4_usize).prop_map(|(path, limit)| Step::Take(path, limit)),
        3 => any::<bool>().prop_map(|fail| Step::Settle { fail }),
        1 => (0..3_u64).prop_map(Step::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever happens in whatever order: one report per submission, one outcome per block, nothing left behind.
    #[test]
    fn every_submission_is_answered_exactly_once(steps in proptest::collection::vec(step(), 1..120)) {
        let mut bench = Bench::with_queue(PathLimits { plans: 4, blocks: 8192 });
        let mut submitted: HashMap<PlanId, usize> = HashMap::new();
        let mut sizes: HashMap<PlanId, usize> = HashMap::new();
        let mut flying: Vec<Portion> = Vec::new();
        let settle = |bench: &mut Bench, portion: Portion, fail: bool| {
            let outcome = if fail {
                BlockOutcome::Failed(kvbm_plan::Failure::new(FailureKind::Io, "planted"))
            } else {
                BlockOutcome::Done { checksum: 0 }
            };
            let outcomes = portion.indices.iter().map(|index| (*index, outcome.clone()));
            bench.state.settle(portion.plan.plan_id, outcomes.collect::<Vec<_>>(), 0, bench.now);
        };
        for step in steps {
            match step {
                Step::Submit { id, path, blocks, gate, after, budget, priority } => {
                    let gate = match gate {
                        0 => Gate::Iteration(2),
                        1 => Gate::Layer { iteration: 3, layer: 1 },
                        2 => Gate::DeviceEvent(id % 2),
                        _ => Gate::None,
                    };
                    let priority = [Priority::Background, Priority::Normal, Priority::Urgent][usize::from(priority)];
                    let after = after.map(PlanId).into_iter().collect();
                    let new = TransferPlan { gate, after, budget_ms: budget, priority, ..plan(id, Path::LOCAL[path], blocks) };
                    sizes.entry(PlanId(id)).or_insert(blocks as usize);
                    *submitted.entry(PlanId(id)).or_default() += 1;
                    bench.submit(new);
                }
                Step::Cancel(id) => bench.state.cancel(PlanId(id), bench.now),
                Step::Advance(iteration) => bench.state.advance(iteration, None),
                Step::Event(id, ok) => {
                    let generation = bench.state.register_event(id, bench.now);
                    let result = if ok { Ok(()) } else { Err("planted".to_owned()) };
                    bench.state.event_over(id, generation, result, bench.now);
                }
                Step::Take(path, limit) => flying.extend(bench.state.take(Path::LOCAL[path], false, |_| limit, bench.now)),
                Step::Settle { fail } => {
                    if let Some(portion) = flying.pop() {
                        settle(&mut bench, portion, fail);
                    }
                }
                Step::Later(ms) => bench.later(ms),
            }
            bench.collect();
        }
        bench.state.close(bench.now);
        bench.collect();
        for path in Path::LOCAL {
            while let Some(portion) = bench.state.take(path, false, |_| 9, bench.now) {
                flying.push(portion);
            }
        }
        for portion in std::mem::take(&mut flying) {
            settle(&mut bench, portion, false);
        }
        bench.collect();
        prop_assert_eq!(bench.state.live_plans(), 0);
        prop_assert_eq!(bench.state.next_deadline(), None);
        for (plan_id, times) in submitted {
            let reports = &bench.reports[&plan_id];
            prop_assert_eq!(reports.len(), times, "plan {}", plan_id);
            prop_assert!(reports.iter().all(|report| report.blocks.len() == sizes[&plan_id]));
        }
        for stats in bench.state.path_stats() {
            prop_assert_eq!((stats.queued_plans, stats.queued_blocks, stats.running_plans), (0, 0, 0));
        }
    }
}
