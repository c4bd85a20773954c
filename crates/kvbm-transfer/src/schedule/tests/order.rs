//! Which plan goes next, and how much of it.

use super::*;

#[test]
fn priority_first_then_first_come() {
    let mut bench = Bench::new();
    let priorities =
        [Priority::Background, Priority::Urgent, Priority::Normal, Priority::Urgent, Priority::Background];
    for (id, priority) in (1..).zip(priorities) {
        bench.submit(TransferPlan { priority, ..on(id) });
    }
    assert_eq!(bench.run(Path::G1_G2), [2, 4, 3, 1, 5]);
    assert_eq!(bench.run(Path::G2_G1), [0_u64; 0]);
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

/// Mutation that makes it fail: `State::take` calls no path hungry, or `State::enqueue` wakes every
/// path.
#[test]
fn a_plan_wakes_its_path_only_if_that_looked_and_found_nothing() {
    let mut bench = Bench::new();
    let path = Path::ALL.iter().position(|path| *path == Path::G1_G2).unwrap();
    let wakes = |bench: &mut Bench, id| {
        bench.submit(on(id));
        bench.state.take_wakes()[path]
    };
    assert!(wakes(&mut bench, 1), "nobody has looked yet");
    assert!(!wakes(&mut bench, 2), "it will look");
    assert_eq!(bench.take(Path::G1_G2, 1), Some((1, vec![0])));
    assert!(!wakes(&mut bench, 3), "it left something, so it has no room");
    assert_eq!(bench.take(Path::G1_G2, 0), None);
    assert!(wakes(&mut bench, 4), "for this one there may be room");
    while bench.take(Path::G1_G2, 8).is_some() {}
    assert!(wakes(&mut bench, 5));
    assert_eq!(bench.take(Path::G1_G2, 8), Some((5, vec![0, 1])));
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
