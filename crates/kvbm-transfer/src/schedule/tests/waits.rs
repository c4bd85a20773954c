//! What plans wait for, and what ends their waiting.

use super::*;

#[test]
fn gates_hold_back_one_plan_and_no_other() {
    let mut bench = Bench::new();
    bench.submit(TransferPlan { gate: Gate::Iteration(5), ..on(1) });
    bench.submit(TransferPlan { gate: Gate::Layer { iteration: 5, layer: 1 }, ..on(2) });
    bench.submit(on(3));
    assert_eq!(bench.run(Path::G1_G2), [3]);
    bench.state.advance(5, Some(0));
    assert_eq!(bench.run(Path::G1_G2), [0_u64; 0]);
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
    assert_eq!(bench.run(Path::G1_G2), [0_u64; 0]);
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
    assert_eq!(bench.run(Path::G2_G1), [0_u64; 0]);
    bench.state.advance(1, None);
    assert_eq!(bench.run(Path::G1_G2), [1]);
    assert_eq!(bench.run(Path::G2_G3), [0_u64; 0]);
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
    bench.submit(TransferPlan { budget_ms: 10, after: vec![PlanId(4)], ..on(5) });
    bench.later(9);
    assert!(bench.reports.is_empty());
    bench.later(1);
    assert_eq!((bench.failed_with(1), bench.failed_with(2)), (FailureKind::GateShut, FailureKind::PathBusy));
    assert_eq!(bench.failed_with(5), FailureKind::GateShut);
    assert_eq!(bench.take(Path::G1_G2, 1), Some((3, vec![0])));
    bench.now += Duration::from_millis(10);
    assert_eq!(bench.take(Path::G1_G2, 1), None, "no copy starts after the deadline");
    bench.done(3, &[0]);
    assert_eq!(bench.kinds(3), [None, Some(FailureKind::PathBusy), Some(FailureKind::PathBusy)]);
    bench.later(1 << 40);
    assert_eq!(bench.state.live_plans(), 1, "no budget, no deadline");
}

/// Mutation that makes it fail: `cancel` says `Cancelled` of every plan.
#[test]
fn a_plan_cancelled_at_the_end_of_its_budget_says_what_it_waited_for() {
    use FailureKind::{Cancelled, GateShut, PathBusy};
    for (ms, kinds) in [(500, [Cancelled, Cancelled]), (996, [GateShut, PathBusy])] {
        let mut bench = Bench::new();
        bench.submit(TransferPlan { budget_ms: 1000, gate: Gate::Iteration(1), ..on(1) });
        bench.submit(TransferPlan { budget_ms: 1000, ..on(2) });
        bench.submit(on(3));
        bench.later(ms);
        for id in 1..=3 {
            bench.state.cancel(PlanId(id), bench.now);
        }
        bench.collect();
        assert_eq!([1, 2].map(|id| bench.failed_with(id)), kinds, "after {ms} ms");
        assert_eq!(bench.failed_with(3), Cancelled, "it has no budget");
    }
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

/// Mutation that makes it fail: `fail_untouched` fails blocks whose copy has begun.
#[test]
fn a_staged_plan_ends_without_the_blocks_whose_last_copy_has_not_begun() {
    let staged = |id| TransferPlan { budget_ms: 1000, ..plan(id, Path::G3_G1, 3) };
    let mut bench = Bench::new();
    bench.submit(staged(1));
    assert_eq!(bench.take(Path::G3_G1, 2), Some((1, vec![0, 1])));
    assert_eq!(bench.state.begin_copies(PlanId(1), &[0]), [true]);
    bench.state.cancel(PlanId(1), bench.now);
    assert_eq!(bench.state.begin_copies(PlanId(1), &[1]), [false], "its destination is not ours any more");
    bench.done(1, &[0]);
    assert_eq!(bench.kinds(1), [None, Some(FailureKind::Cancelled), Some(FailureKind::Cancelled)]);
    assert_eq!(bench.state.begin_copies(PlanId(1), &[1, 2]), [false, false], "it is over");

    // At its deadline the source has failed where it had half of the time at least.
    for (start, kind) in [(100, FailureKind::Deadline), (900, FailureKind::PathBusy)] {
        let mut bench = Bench::new();
        bench.submit(staged(1));
        bench.later(start);
        assert_eq!(bench.take(Path::G3_G1, 3), Some((1, vec![0, 1, 2])));
        bench.later(1001 - start);
        bench.state.expire(bench.now);
        bench.collect();
        assert_eq!(bench.failed_with(1), kind, "started after {start} ms");
    }
}
