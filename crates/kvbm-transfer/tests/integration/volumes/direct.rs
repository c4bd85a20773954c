//! G1 to G4 without a stay in G2: bytes, bounds of the staging ring, failures, volumes that hang.

use super::faulty::{Fault, Faulty};
use super::hangs::{OTHER, on, wait_for_running};
use super::{VOLUME, down, failed, opened, rig, tier};
use crate::support::{Rig, Shape, checksums, contiguous, detail, kinds, layer_separate, model, soon};
use kvbm_device::FaultRule;
use kvbm_layout::{AxisOrder, FullyContiguous};
use kvbm_plan::{Endpoint, FailureKind, Path, TransferPlan};
use kvbm_transfer::{PathConfig, VolumeTier, WorkerConfig};
use kvbm_volume::VolumeRegistry;
use std::sync::Arc;

/// A worker without G2, with block `n` in slot `n` of G1.
fn without_host(registry: &Arc<VolumeRegistry>, shape: Shape, tune: impl FnOnce(&mut WorkerConfig)) -> Rig {
    let rig = Rig::with(shape, |worker| {
        let host = worker.g2.take().expect("the rig has one");
        worker.disk_shapes = vec![Arc::clone(host.layout())];
        worker.direct_offload = true;
        worker.volumes = Some(tier(registry));
        tune(worker);
    });
    for name in 0..16 {
        rig.fill_g1(u32::from(name), name);
    }
    rig
}

fn direct(rig: &Rig, moves: &[(u8, u32)]) -> TransferPlan {
    let moves: Vec<_> = moves.iter().map(|&(name, slot)| (name, slot, 0)).collect();
    TransferPlan { dst: Endpoint::Volume(VOLUME), ..rig.plan(Path::G1_G4, &moves) }
}

fn each(names: std::ops::Range<u8>) -> Vec<(u8, u32)> {
    names.map(|name| (name, u32::from(name))).collect()
}

/// Mutation that makes it fail: `StagedVolumeWriter::start` takes the layouts of G1.
#[test]
fn objects_are_those_that_go_by_way_of_host_memory() {
    let universal = |blocks| Arc::new(FullyContiguous::new(model(blocks), AxisOrder::Universal).unwrap());
    let shapes = [
        Shape::default(),
        Shape { g1: layer_separate(16), g2: universal(16), ..Shape::default() },
        Shape { g1: contiguous(16), ..Shape::default() },
        Shape { host_only: true, ..Shape::default() },
    ];
    for shape in shapes {
        let (volume, g2) = (Faulty::new(None), Arc::clone(&shape.g2));
        let rig = without_host(&opened(&volume), shape, |worker| worker.staging_bytes = 3 * 4096);
        let stored = rig.run(direct(&rig, &each(0..12)));
        assert_eq!(kinds(&stored), [None; 12]);
        assert_eq!(stored.bytes, 12 * rig.g1.bytes_per_block());
        let read = rig.run(down(&rig, &[(5, 12), (6, 13), (7, 14), (8, 15)]));
        assert_eq!(kinds(&read), [None; 4]);
        for (name, slot) in [(5, 12), (6, 13), (7, 14), (8, 15)] {
            rig.assert_g1(slot, name);
        }
        assert_eq!(checksums(&read), checksums(&stored)[5..9]);
        // A worker with host memory reads them.
        let other = super::rig(&volume, Shape { g2, ..Shape::default() }, true);
        assert_eq!(kinds(&other.run(down(&other, &[(3, 9)]))), [None]);
        other.assert_g1(9, 3);
        let staged = other.must(Path::G1_G2, &[(3, 9, 1)]);
        assert_eq!(checksums(&staged), checksums(&stored)[3..4]);
    }
}

#[test]
fn a_fault_of_the_device_or_the_volume_fails_its_block_and_gives_the_slot_back() {
    let volume = Faulty::new(None);
    let rig = without_host(&opened(&volume), Shape::default(), |worker| worker.staging_bytes = 1);
    for round in 0..4 {
        rig.device.faults().inject(FaultRule::next(kvbm_device::Fault::FailHalfway).on_stream("g1_g4"));
        assert_eq!(failed(&rig, direct(&rig, &[(round, u32::from(round))])), [Some(FailureKind::Device)]);
        volume.set(Fault::Refuses);
        let report = rig.run(direct(&rig, &[(round, u32::from(round))]));
        assert_eq!(kinds(&report), [Some(FailureKind::Io)]);
        assert!(detail(&report, 0).contains("path g1_g4"), "{}", detail(&report, 0));
        volume.set(Fault::Nothing);
        assert_eq!(failed(&rig, down(&rig, &[(round, 15)])), [Some(FailureKind::Missing)]);
    }
    assert_eq!(failed(&rig, direct(&rig, &each(0..8))), [None; 8]);
}

/// Mutation that makes it fail: `StagedVolumeWriter::room_for` is `room`.
#[test]
fn a_volume_that_hangs_leaves_slots_of_the_ring_to_others() {
    let (hanging, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&hanging);
    registry.register(Arc::clone(&other) as _).unwrap();
    let rig = without_host(&registry, Shape::default(), |worker| {
        worker.paths.g1_g4 = PathConfig { depth_blocks: 8, batch_blocks: 2, ..PathConfig::default() };
        worker.staging_bytes = 8 * 4096;
    });
    assert_eq!(failed(&rig, direct(&rig, &each(0..2))), [None; 2]);
    hanging.set(Fault::Hangs);
    let plans = (2..12).map(|name| direct(&rig, &[(name, u32::from(name))]));
    let stuck: Vec<_> = plans.map(|plan| rig.manager().execute(plan).unwrap()).collect();
    wait_for_running(&rig, 2);
    for _ in 0..4 {
        assert_eq!(failed(&rig, on(OTHER, direct(&rig, &each(12..16)))), [None; 4]);
    }
    assert_eq!(failed(&rig, on(OTHER, down(&rig, &[(13, 1)]))), [None]);
    rig.assert_g1(1, 13);
    hanging.set(Fault::Nothing);
    for handle in stuck {
        assert_eq!(kinds(&handle.wait(soon()).unwrap()), [None]);
    }
}

/// Mutation that makes it fail: `write_staged` gives nothing back.
#[test]
fn copies_that_fail_give_back_the_share_of_their_volume() {
    let (volume, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&volume);
    registry.register(Arc::clone(&other) as _).unwrap();
    let rig = without_host(&registry, Shape::default(), |worker| worker.staging_bytes = 8 * 4096);
    for name in 0..12 {
        rig.device.faults().inject(FaultRule::next(kvbm_device::Fault::FailHalfway).on_stream("g1_g4"));
        assert_eq!(failed(&rig, direct(&rig, &[(name, u32::from(name))])), [Some(FailureKind::Device)]);
    }
    assert_eq!(failed(&rig, direct(&rig, &each(0..8))), [None; 8]);
}

#[test]
fn a_rank_that_does_not_write_says_what_its_blocks_sum_to() {
    let volume = Faulty::new(None);
    let registry = opened(&volume);
    let replica = without_host(&registry, Shape::default(), |worker| {
        worker.volumes = Some(VolumeTier { writes: false, ..tier(&registry) });
    });
    let compared = replica.run(direct(&replica, &each(0..4)));
    assert_eq!((kinds(&compared), compared.bytes), (vec![None; 4], 0));
    assert_eq!(failed(&replica, down(&replica, &[(0, 9)])), [Some(FailureKind::Missing)]);
    let writer = without_host(&registry, Shape::default(), |_| {});
    assert_eq!(checksums(&writer.run(direct(&writer, &each(0..4)))), checksums(&compared));
}

#[test]
fn a_worker_says_why_it_has_no_such_path() {
    let volume = Faulty::new(None);
    let with_host = rig(&volume, Shape::default(), true);
    let report = with_host.run(direct(&with_host, &[(1, 1)]));
    assert!(detail(&report, 0).contains("offload to G2 first"), "{}", detail(&report, 0));
    let no_ring = without_host(&opened(&volume), Shape::default(), |worker| worker.staging_bytes = 0);
    let report = no_ring.run(direct(&no_ring, &[(1, 1)]));
    assert!(detail(&report, 0).contains("staging_bytes"), "{}", detail(&report, 0));
}
