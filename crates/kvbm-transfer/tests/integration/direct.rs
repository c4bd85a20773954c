//! G1 to G3 without a stay in G2: bytes, bounds of the staging ring, failures.

use crate::support::medium::DiskFault;
use crate::support::{
    LAYERS, NAMESPACE, Rig, Shape, checksums, contiguous, detail, identity, kinds, layer_separate, model,
    soon,
};
use kvbm_device::{EmulatedConfig, Fault, FaultRule, RandomDelays};
use kvbm_disk::{BlockChecksum, ContentCrc};
use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm_plan::{BlockOutcome, ChecksumMode, FailureKind, LayerRange, Path};
use kvbm_transfer::{PathConfig, VerifyHost, WorkerConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EIGHT: [(u8, u32, u32); 8] =
    [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6), (7, 7, 7)];

/// Takes G2 out of a worker.
fn without_host(worker: &mut WorkerConfig) {
    let host = worker.g2.take().expect("the rig has one");
    worker.disk_shapes = vec![Arc::clone(host.layout())];
    worker.direct_offload = true;
}

/// A worker without G2, with eight blocks in G1.
fn filled(shape: Shape, tune: impl FnOnce(&mut WorkerConfig)) -> Rig {
    let rig = Rig::with(shape, |worker| {
        without_host(worker);
        tune(worker);
    });
    for (name, slot, _) in EIGHT {
        rig.fill_g1(slot, name);
    }
    rig
}

/// What the bytes of a block in its slot of `rig` sum to, in the byte order of the disk.
fn sum_of(rig: &Rig, name: u8) -> u64 {
    rig.write(&rig.g2, 0, &crate::support::pattern(name, rig.g2.bytes_per_block()));
    let mut bytes = vec![0; rig.g2.bytes_per_block() as usize];
    // SAFETY: the worker does not know of this memory.
    unsafe { rig.g2.read_block(0, &mut bytes) }.unwrap();
    let mut content = ContentCrc::new();
    content.update(&bytes);
    BlockChecksum::new(NAMESPACE).bind(&identity(name), content.finish())
}

fn down_and_up(rig: &Rig) {
    let down = rig.must(Path::G1_G3, &EIGHT.map(|(name, slot, _)| (name, slot, 15 - slot)));
    assert_eq!(down.bytes, 8 * rig.g1.bytes_per_block());
    let up = rig.must(Path::G3_G1, &EIGHT.map(|(name, slot, _)| (name, 15 - slot, slot + 8)));
    for (name, slot, _) in EIGHT {
        rig.assert_g1(slot, name);
        rig.assert_g1(slot + 8, name);
    }
    assert_eq!(checksums(&down), checksums(&up));
    assert_eq!(checksums(&down), EIGHT.map(|(name, ..)| sum_of(rig, name)));
}

/// Mutation that makes it fail: `StagedWriter::issue` copies every block into slot 0.
#[test]
fn blocks_go_down_and_up_without_host_memory_whatever_their_layouts() {
    let universal = |blocks| Arc::new(FullyContiguous::new(model(blocks), AxisOrder::Universal).unwrap());
    let packed = |blocks| {
        Arc::new(LayerSeparate::new(model(blocks), AxisOrder::Hnd, OuterPlacement::PackedInHead).unwrap())
    };
    let device = EmulatedConfig {
        memory_bytes: 16 << 20,
        random_delays: Some(RandomDelays { seed: 11, max: Duration::from_millis(2) }),
        ..EmulatedConfig::default()
    };
    let shapes = [
        Shape::default(),
        Shape { g1: packed(16), g2: contiguous(16), ..Shape::default() },
        Shape { g1: layer_separate(16), g2: universal(16), ..Shape::default() },
        Shape { host_only: true, ..Shape::default() },
        Shape { device, ..Shape::default() },
    ];
    for shape in shapes {
        down_and_up(&filled(shape, |_| {}));
    }
}

#[test]
fn checksums_computed_while_blocks_come_down_are_those_of_the_disk() {
    let wide = |blocks| {
        let shape = LayoutConfig::builder().num_blocks(blocks).num_layers(LAYERS).page_size(4);
        shape.inner_dim(2 * 1536).num_heads(2).dtype(DType::BF16).build().unwrap()
    };
    let g1 = Arc::new(LayerSeparate::new(wide(16), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap());
    for order in [AxisOrder::Nhd, AxisOrder::Universal] {
        let g2 = Arc::new(FullyContiguous::new(wide(16), order).unwrap());
        let shape = Shape { g1: Arc::clone(&g1) as _, g2, ..Shape::default() };
        down_and_up(&filled(shape, |worker| worker.staging_bytes = 1 << 20));
    }
}

/// Mutation that makes it fail: `RingSlot::drop` gives nothing back.
#[test]
fn more_blocks_than_the_ring_has_slots_go_down() {
    for (staging_bytes, threads) in [(1, 1), (3 * 4096, 1), (3 * 4096, 2)] {
        let rig = filled(Shape::default(), |worker| {
            worker.staging_bytes = staging_bytes;
            worker.paths.g1_g3.threads = threads;
        });
        for _ in 0..3 {
            down_and_up(&rig);
        }
    }
}

#[test]
fn a_worker_with_host_memory_goes_past_it_only_where_it_is_told_to() {
    let rig = Rig::new();
    rig.fill_g1(1, 1);
    let report = rig.go(Path::G1_G3, &[(1, 1, 1)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Unsupported)]);
    assert!(detail(&report, 0).contains("direct_offload"), "{}", detail(&report, 0));
    let ring = rig.manager().staging_bytes();

    let rig = Rig::tuned(|worker| {
        worker.direct_offload = true;
        worker.verify_host = VerifyHost::Always;
    });
    assert_eq!(rig.manager().staging_bytes(), 2 * ring, "a ring of its own");
    rig.fill_g1(1, 1);
    let direct = rig.must(Path::G1_G3, &[(1, 1, 1)]);
    let staged = rig.must(Path::G1_G2, &[(1, 1, 5)]);
    assert_eq!(checksums(&direct), checksums(&staged));
    rig.must(Path::G3_G2, &[(1, 1, 6)]);
    rig.assert_g2(6, 1);

    let rig = filled(Shape::default(), |worker| worker.staging_bytes = 0);
    let report = rig.go(Path::G1_G3, &[(1, 1, 1)]);
    assert!(detail(&report, 0).contains("staging_bytes"), "{}", detail(&report, 0));
}

#[test]
fn layers_do_not_go_to_the_disk_and_checksums_are_left_out_on_request() {
    let rig = filled(Shape::default(), |_| {});
    let mut plan = rig.plan(Path::G1_G3, &[(1, 1, 1)]);
    plan.layers = Some(LayerRange { first: 0, count: 1 });
    let report = rig.run(plan);
    assert!(detail(&report, 0).contains("whole blocks only"), "{}", detail(&report, 0));
    let mut plan = rig.plan(Path::G1_G3, &[(1, 1, 1)]);
    plan.checksums = ChecksumMode::None;
    assert_eq!(rig.run(plan).blocks, [BlockOutcome::Done { checksum: 0 }]);
    rig.must(Path::G3_G1, &[(1, 1, 9)]);
    rig.assert_g1(9, 1);
}

#[test]
fn an_error_of_the_disk_fails_the_block_that_came_down_and_names_it() {
    let rig = filled(Shape::default(), |_| {});
    rig.medium.inject(DiskFault::FailWrite(crate::faults::slot_offset(12)));
    let report = rig.go(Path::G1_G3, &[(0, 0, 11), (1, 1, 12), (5, 5, 13)]);
    assert_eq!(kinds(&report), [None, Some(FailureKind::Io), None]);
    let why = detail(&report, 1);
    assert!(why.contains("path g1_g3") && why.contains("slot 1 of G1 to slot 12 of G3"), "{why}");
    rig.medium.clear();
    assert!(!rig.go(Path::G3_G1, &[(1, 12, 11)]).blocks[0].is_done(), "the failed write left no block");
    down_and_up(&rig);
}

#[test]
fn a_fault_of_the_device_fails_its_block_and_gives_the_slot_of_the_ring_back() {
    let rig = filled(Shape::default(), |worker| worker.staging_bytes = 1);
    for round in 0..3 {
        rig.device.faults().inject(FaultRule::next(Fault::FailHalfway).on_stream("g1_g3"));
        let report = rig.go(Path::G1_G3, &[(round, u32::from(round), 9)]);
        assert_eq!(kinds(&report), [Some(FailureKind::Device)]);
        assert!(!rig.go(Path::G3_G1, &[(round, 9, 12)]).blocks[0].is_done());
    }
    down_and_up(&rig);
}

#[test]
fn a_shut_engine_or_a_tiny_queue_of_the_disk_hangs_nothing() {
    let rig = filled(Shape { disk_queue: 2, ..Shape::default() }, |worker| worker.staging_bytes = 1 << 20);
    down_and_up(&rig);
    assert!(rig.disk.shutdown(Duration::from_secs(30)));
    assert_eq!(kinds(&rig.go(Path::G1_G3, &[(1, 1, 9)])), [Some(FailureKind::ShuttingDown)]);
}

/// Mutation that makes it fail: `StagedWriter::is_waiting` is `is_parked`.
#[test]
fn a_block_that_came_down_waits_for_a_slot_that_is_written_again() {
    let rig = filled(Shape::default(), |_| {});
    rig.medium.inject(DiskFault::FailSync);
    rig.medium.inject(DiskFault::StallRead(crate::faults::slot_offset(9)));
    rig.must(Path::G1_G3, &[(5, 5, 9)]);
    rig.medium.wait_stalled();
    let waits = rig.manager().execute(rig.plan(Path::G1_G3, &[(6, 6, 9)])).unwrap();
    rig.must(Path::G1_G3, &[(7, 7, 10)]);
    assert_eq!(waits.poll_report(), None, "it is not told that the slot is busy");
    rig.medium.clear();
    assert_eq!(kinds(&waits.wait(soon()).unwrap()), [None]);
    rig.must(Path::G3_G1, &[(6, 9, 12)]);
    rig.assert_g1(12, 6);
}

/// Mutation that makes it fail: `Job::is_staged` is true of this path.
#[test]
fn cancelling_leaves_blocks_that_started_to_the_hardware_and_starts_no_others() {
    let rig = filled(Shape::default(), |worker| {
        worker.paths.g1_g3 = PathConfig { depth_blocks: 2, batch_blocks: 1, ..PathConfig::default() };
        worker.staging_bytes = 1;
    });
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g1_g3"));
    let started = rig.manager().execute(rig.plan(Path::G1_G3, &EIGHT)).unwrap();
    ticket.wait_struck(soon()).unwrap();
    started.cancel();
    assert_eq!(started.poll_report(), None, "the device still reads the first blocks");
    let idle = |until| rig.manager().wait_idle(&[kvbm_plan::BlockId(0)], until);
    assert!(idle(Instant::now()).is_err(), "they are not to be overwritten");
    ticket.release();
    let report = started.wait(soon()).unwrap();
    // A started plan is not cancelled, as on the way from host memory.
    assert_eq!(kinds(&report), [None; 8]);
    idle(soon()).unwrap();
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g1_g3"));
    let running = rig.manager().execute(rig.plan(Path::G1_G3, &[(0, 0, 8), (1, 1, 9)])).unwrap();
    ticket.wait_struck(soon()).unwrap();
    let queued = rig.manager().execute(rig.plan(Path::G1_G3, &[(2, 2, 10), (3, 3, 11)])).unwrap();
    queued.cancel();
    assert_eq!(kinds(&queued.wait(soon()).unwrap()), [Some(FailureKind::Cancelled); 2]);
    ticket.release();
    assert_eq!(kinds(&running.wait(soon()).unwrap()), [None; 2]);
    assert!(!rig.go(Path::G3_G1, &[(2, 10, 12)]).blocks[0].is_done(), "nothing was written there");
}
