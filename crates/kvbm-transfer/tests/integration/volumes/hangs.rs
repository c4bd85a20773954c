//! Volumes whose calls do not return.

use super::faulty::{Fault, Faulty};
use super::{VOLUME, ask_of, down, failed, fill, opened, rig, tier, up};
use crate::support::{Rig, Shape, identity, kinds, soon};
use kvbm_plan::{Command, Endpoint, FailureKind, Path, TransferPlan, VolumeAnswer, VolumeId, VolumeRequest};
use kvbm_transfer::{PathConfig, VolumeTier};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const OTHER: VolumeId = VolumeId(9);

/// Waits until this many plans run, over all paths.
pub(super) fn wait_for_running(rig: &Rig, plans: usize) {
    let running = || rig.manager().stats().paths.iter().map(|path| path.running_plans).sum::<usize>();
    let until = soon();
    while running() < plans {
        assert!(Instant::now() < until, "{} of {plans} plans run", running());
        std::thread::yield_now();
    }
}

/// The same plan, of another volume.
pub(super) fn on(volume: VolumeId, mut plan: TransferPlan) -> TransferPlan {
    for end in [&mut plan.src, &mut plan.dst] {
        if let Endpoint::Volume(known) = end {
            *known = volume;
        }
    }
    plan
}

/// Mutations that make it fail: crews are found by no volume, or `Hands::room_for` says that all is
/// free.
#[test]
fn a_volume_that_hangs_takes_nobody_elses_threads_or_room_and_is_named_at_the_end() {
    let (hanging, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&hanging);
    registry.register(Arc::clone(&other) as _).unwrap();
    let rig = Rig::with(Shape::default(), |config| {
        let few = PathConfig { depth_blocks: 4, batch_blocks: 2, ..PathConfig::default() };
        (config.paths.g2_g4, config.paths.g4_g1) = (few, few);
        config.volumes = Some(tier(&registry));
    });
    fill(&rig, 8);
    for volume in [VOLUME, OTHER] {
        assert_eq!(failed(&rig, on(volume, up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    }
    hanging.set(Fault::Hangs);
    let puts = (3..=8).map(|name| up(&rig, &[(name, u32::from(name))]));
    let gets = (11..=15).map(|slot| down(&rig, &[(1, slot)]));
    let stuck: Vec<_> = puts.chain(gets).map(|plan| rig.manager().execute(plan).unwrap()).collect();
    for token in 100..103 {
        let blocks = || vec![identity(2)];
        for request in [VolumeRequest::Probe(blocks()), VolumeRequest::Discard(blocks())] {
            rig.send(&Command::Volume { token, volume: VOLUME, request });
        }
    }
    for round in 0..4 {
        assert_eq!(failed(&rig, on(OTHER, up(&rig, &[(3, 3), (4, 4)]))), [None; 2]);
        assert_eq!(failed(&rig, on(OTHER, down(&rig, &[(1, 9), (2, 10)]))), [None; 2]);
        rig.assert_g1(9, 1);
        let (probe, discard) = (vec![identity(1), identity(7)], vec![identity(4)]);
        let there = ask_of(OTHER, &rig, 2 * round, VolumeRequest::Probe(probe));
        assert_eq!(there, VolumeAnswer::Present(vec![true, false]));
        let removed = ask_of(OTHER, &rig, 2 * round + 1, VolumeRequest::Discard(discard));
        assert_eq!(removed, VolumeAnswer::Removed(1));
    }
    let error = rig.manager().shutdown(Instant::now() + Duration::from_millis(100)).unwrap_err();
    for what in ["g2_g4", "g4_g1", "probes", "removals"] {
        assert!(error.to_string().contains(&format!("volume {VOLUME} ({what})")), "{error}");
    }
    assert!(!error.to_string().contains(&format!("volume {OTHER}")), "{error}");
    hanging.set(Fault::Nothing);
    rig.manager().shutdown(soon()).unwrap();
    let started = stuck.into_iter().filter(|handle| {
        let outcome = kinds(&handle.wait(soon()).unwrap())[0];
        assert!([None, Some(FailureKind::ShuttingDown)].contains(&outcome), "{outcome:?}");
        outcome.is_none()
    });
    assert!(started.count() >= 2, "what had started went on");
}

/// Mutation that makes it fail: `Shares::room` gives a volume that is alone all there is.
#[test]
fn a_volume_that_hangs_alone_leaves_room_for_the_one_in_its_place() {
    let (hanging, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&hanging);
    let rig = Rig::with(Shape::default(), |config| {
        let few = PathConfig { depth_blocks: 4, batch_blocks: 4, ..PathConfig::default() };
        (config.paths.g2_g4, config.paths.g4_g1) = (few, few);
        config.staging_bytes = 16 * 4096;
        config.volumes = Some(tier(&registry));
    });
    fill(&rig, 4);
    let blocks: Vec<_> = (1..=4).map(|name| (name, u32::from(name))).collect();
    assert_eq!(failed(&rig, up(&rig, &blocks)), [None; 4]);
    hanging.set(Fault::Hangs);
    let stuck = [up(&rig, &blocks), down(&rig, &blocks)].map(|plan| rig.manager().execute(plan).unwrap());
    wait_for_running(&rig, 2);
    registry.register(Arc::clone(&other) as _).unwrap();
    for takes_its_place in [false, true] {
        if takes_its_place {
            registry.unregister_volume(VOLUME).unwrap();
        }
        assert_eq!(failed(&rig, on(OTHER, up(&rig, &[(3, 3), (4, 4)]))), [None; 2]);
        assert_eq!(failed(&rig, on(OTHER, down(&rig, &[(3, 9), (4, 10)]))), [None; 2]);
        rig.assert_g1(9, 3);
    }
    hanging.set(Fault::Nothing);
    for handle in stuck {
        assert_eq!(handle.wait(soon()).unwrap().blocks.len(), 4);
    }
}

/// Mutation that makes it fail: `transfer` calls the volume whatever the time is.
#[test]
fn a_volume_is_not_asked_what_it_cannot_answer_in_time() {
    let volume = Faulty::new(None);
    let rig = Rig::with(Shape::default(), |config| {
        config.volumes = Some(VolumeTier { threads: 1, ..tier(&opened(&volume)) });
    });
    fill(&rig, 4);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [None; 2]);
    volume.set(Fault::Hangs);
    let first = [up(&rig, &[(3, 3)]), down(&rig, &[(1, 9)])].map(|plan| rig.manager().execute(plan).unwrap());
    wait_for_running(&rig, 2);
    // Their turn comes when the calls before them are over.
    let behind = [up(&rig, &[(4, 4)]), down(&rig, &[(2, 10)])];
    // Enough to be issued on a busy machine.
    let budget = Duration::from_secs(2);
    let behind = behind.map(|plan| TransferPlan { budget_ms: budget.as_millis() as u32, ..plan });
    let behind = behind.map(|plan| rig.manager().execute(plan).unwrap());
    wait_for_running(&rig, 4);
    std::thread::sleep(budget);
    volume.set(Fault::Late);
    let of = |handle: kvbm_transfer::TransferHandle| kinds(&handle.wait(soon()).unwrap());
    assert_eq!(first.map(of), [[None], [None]]);
    assert_eq!(behind.map(of), [[Some(FailureKind::PathBusy)], [Some(FailureKind::PathBusy)]]);
}

/// A load ends at its deadline, or when it is cancelled, although its read hangs. What is read
/// afterwards never reaches G1: the engine computes there by then. Mutation that makes it fail:
/// `Job::begin_copy` allows every copy.
#[test]
fn a_read_that_comes_late_does_not_touch_the_block_that_it_was_for() {
    for (budget_ms, kind) in [(1000, FailureKind::PathBusy), (0, FailureKind::Cancelled)] {
        let hanging = Faulty::new(None);
        let rig = rig(&hanging, Shape::default(), true);
        fill(&rig, 2);
        assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [None; 2]);
        hanging.set(Fault::Hangs);
        let plan = TransferPlan { budget_ms, ..down(&rig, &[(1, 9), (2, 10)]) };
        let (plan_id, started) = (plan.plan_id, Instant::now());
        let handle = rig.manager().execute(plan).unwrap();
        while rig.manager().stats().path(Path::G4_G1).is_none_or(|path| path.running_plans == 0) {
            assert!(started.elapsed() < Duration::from_secs(20), "its read starts");
            std::thread::yield_now();
        }
        if kind == FailureKind::Cancelled {
            rig.manager().cancel(plan_id);
        }
        let report = handle.wait(soon()).unwrap();
        assert_eq!(kinds(&report), [Some(kind); 2], "{report:?}");
        // The engine has its blocks back, and computes.
        rig.fill_g1(9, 77);
        rig.fill_g1(10, 78);
        // Three seconds later the store answers.
        std::thread::sleep(Duration::from_secs(3));
        hanging.set(Fault::Nothing);
        assert_eq!(failed(&rig, down(&rig, &[(1, 12), (2, 13)])), [None; 2], "the ring has its slots back");
        rig.assert_g1(12, 1);
        for (slot, name) in [(9, 77), (10, 78)] {
            rig.assert_g1(slot, name);
        }
    }
}
