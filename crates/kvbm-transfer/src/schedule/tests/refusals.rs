//! What is not executed, or not again.

use super::*;
use kvbm_plan::{BlockSetId, LeaseId};

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
    assert_eq!(bench.run(Path::G1_G2), [0_u64; 0]);
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
    assert_eq!(bench.run(Path::G1_G2), [0_u64; 0]);
    assert!(bench.reports.is_empty());
}

/// Makes a plan one that no worker can execute.
type Break = fn(&mut TransferPlan);

/// Mutation that makes it fail: layer ranges are let through to disk paths.
#[test]
fn invariant_7_what_a_worker_cannot_do_is_reported_at_once() {
    let mut bench = Bench::new();
    let broken: [(&str, Break); 9] = [
        ("kvbm-volume", |plan| {
            plan.dst = Endpoint::Volume(VolumeId(4));
            plan.layers = Some(LayerRange { first: 0, count: 1 });
        }),
        ("name a volume", |plan| plan.dst = Endpoint::Local(Tier::G4)),
        ("RemoteHost", |plan| plan.src = Endpoint::Remote { block_set: BlockSetId(1), lease: LeaseId(1) }),
        ("kvbm-volume", |plan| {
            (plan.src, plan.dst) = (Endpoint::Volume(VolumeId(4)), Endpoint::Local(Tier::G1));
            plan.layers = Some(LayerRange { first: 0, count: 1 });
        }),
        ("no executor of kvbm-transfer moves blocks along g4_g3", |plan| {
            (plan.src, plan.dst) = (Endpoint::Volume(VolumeId(4)), Endpoint::Local(Tier::G3));
        }),
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

/// Mutation that makes it fail: `State::submit` does not look at what waits for the sink.
#[test]
fn invariant_6_submissions_stop_while_the_sink_is_behind() {
    let mut bench = Bench::with(PathLimits { plans: 8, blocks: 8192 }, 3);
    for id in 0..3 {
        let (src, dst) = (Endpoint::Volume(VolumeId(1)), Endpoint::Local(Tier::G3));
        bench.state.submit(TransferPlan { src, dst, ..on(id) }, Reply::Sink, bench.now).unwrap();
    }
    assert!(matches!(bench.refused(on(3)), SubmitError::Backlogged { pending: 3, .. }));
    bench.collect();
    bench.submit(on(3));
    assert_eq!(bench.run(Path::G1_G2), [3]);
}
