//! Bytes arrive, along every path and between layouts, and whoever asks can wait for them in any
//! style.

use crate::support::{LAYERS, Rig, Shape, checksums, contiguous, layer_separate, model, soon};
use kvbm_device::{EmulatedConfig, RandomDelays};
use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm_plan::{BlockOutcome, ChecksumMode, LayerRange, Path};
use kvbm_transfer::VerifyHost;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

fn round_trip(rig: &Rig) {
    let names = [(1, 0), (2, 5), (3, 15), (4, 7)];
    for (name, slot) in names {
        rig.fill_g1(slot, name);
    }
    let offload = rig.must(Path::G1_G2, &[(1, 0, 9), (2, 5, 2), (3, 15, 0), (4, 7, 15)]);
    for (name, slot) in [(1, 9), (2, 2), (3, 0), (4, 15)] {
        rig.assert_g2(slot, name);
    }
    assert_eq!(offload.bytes, 4 * rig.g1.bytes_per_block());
    let save = rig.must(Path::G2_G3, &[(1, 9, 3), (2, 2, 4), (3, 0, 8), (4, 15, 1)]);
    let direct = rig.must(Path::G3_G1, &[(1, 3, 1), (2, 4, 2), (3, 8, 3), (4, 1, 4)]);
    for (name, slot) in [(1, 1), (2, 2), (3, 3), (4, 4)] {
        rig.assert_g1(slot, name);
    }
    let load = rig.must(Path::G3_G2, &[(1, 3, 4), (4, 1, 5)]);
    let onboard = rig.must(Path::G2_G1, &[(1, 4, 14), (4, 5, 13)]);
    rig.assert_g2(4, 1);
    rig.assert_g1(14, 1);
    rig.assert_g1(13, 4);
    let sums = checksums(&offload);
    assert_eq!(sums, checksums(&save));
    assert_eq!(sums, checksums(&direct));
    assert_eq!(vec![sums[0], sums[3]], checksums(&load));
    assert_eq!(vec![sums[0], sums[3]], checksums(&onboard));
    assert!(sums.iter().all(|sum| *sum != 0));
}

#[test]
fn blocks_survive_the_way_through_all_tiers() {
    round_trip(&Rig::tuned(|worker| worker.verify_host = VerifyHost::Always));
}

#[test]
fn every_pair_of_layouts_carries_the_same_elements() {
    let hnd = |blocks| Arc::new(FullyContiguous::new(model(blocks), AxisOrder::Hnd).unwrap());
    let universal = |blocks| Arc::new(FullyContiguous::new(model(blocks), AxisOrder::Universal).unwrap());
    let packed = |blocks| {
        Arc::new(LayerSeparate::new(model(blocks), AxisOrder::Hnd, OuterPlacement::PackedInHead).unwrap())
    };
    let pairs: [(Arc<dyn kvbm_layout::BlockLayout>, Arc<dyn kvbm_layout::BlockLayout>); 4] = [
        (packed(16), contiguous(16)),
        (layer_separate(16), universal(16)),
        (contiguous(16), layer_separate(16)),
        (hnd(16), packed(16)),
    ];
    for (g1, g2) in pairs {
        round_trip(&Rig::with(Shape { g1, g2, ..Shape::default() }, |_| {}));
    }
}

#[test]
fn checksums_computed_while_blocks_pass_are_those_that_the_disk_computes() {
    // Runs of 24 KiB: long enough to be summed by the stream that copies them.
    let wide = |blocks| {
        let shape = LayoutConfig::builder().num_blocks(blocks).num_layers(LAYERS).page_size(4);
        shape.inner_dim(2 * 1536).num_heads(2).dtype(DType::BF16).build().unwrap()
    };
    let g1 = Arc::new(LayerSeparate::new(wide(16), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap());
    let orders = [AxisOrder::Nhd, AxisOrder::Universal];
    for g2 in orders.map(|order| Arc::new(FullyContiguous::new(wide(16), order).unwrap())) {
        let g1 = Arc::clone(&g1) as _;
        round_trip(&Rig::with(Shape { g1, g2, ..Shape::default() }, |worker| {
            worker.verify_host = VerifyHost::Always;
        }));
    }
}

#[test]
fn host_memory_as_g1_needs_no_device() {
    round_trip(&Rig::with(Shape { host_only: true, ..Shape::default() }, |_| {}));
}

#[test]
fn random_delays_and_orders_of_the_device_change_nothing() {
    let device = EmulatedConfig {
        memory_bytes: 16 << 20,
        random_delays: Some(RandomDelays { seed: 11, max: std::time::Duration::from_millis(2) }),
        ..EmulatedConfig::default()
    };
    round_trip(&Rig::with(Shape { device, ..Shape::default() }, |_| {}));
}

#[test]
fn layers_travel_one_by_one_and_make_a_whole() {
    let rig = Rig::tuned(|worker| worker.verify_host = VerifyHost::Always);
    rig.fill_g1(3, 7);
    for first in 0..LAYERS {
        let mut early = rig.plan(Path::G2_G3, &[(7, 6, 2)]);
        early.budget_ms = 0;
        assert!(!rig.run(early).blocks[0].is_done(), "not whole before layer {first}");
        let mut plan = rig.plan(Path::G1_G2, &[(7, 3, 6)]);
        plan.layers = Some(LayerRange { first, count: 1 });
        let report = rig.run(plan);
        assert!(report.blocks[0].is_done(), "{report:?}");
        assert_eq!(report.bytes, rig.g1.bytes_per_block() / u64::from(LAYERS));
    }
    rig.assert_g2(6, 7);
    rig.must(Path::G2_G3, &[(7, 6, 2)]);
    for first in (0..LAYERS).rev() {
        let mut plan = rig.plan(Path::G2_G1, &[(7, 6, 12)]);
        plan.layers = Some(LayerRange { first, count: 1 });
        assert!(rig.run(plan).blocks[0].is_done());
    }
    rig.assert_g1(12, 7);
}

#[test]
fn more_blocks_than_the_staging_ring_has_slots() {
    let rig = Rig::tuned(|worker| worker.staging_bytes = 3 * 4096 - 1);
    let moves: Vec<(u8, u32, u32)> = (0..16).map(|slot| (slot as u8, slot, slot)).collect();
    for (name, slot, _) in &moves {
        rig.fill_g1(*slot, *name);
    }
    rig.must(Path::G1_G2, &moves);
    rig.must(Path::G2_G3, &moves);
    let back: Vec<(u8, u32, u32)> = (0..16).map(|slot| (slot as u8, slot, 15 - slot)).collect();
    rig.must(Path::G3_G1, &back);
    for (name, _, slot) in back {
        rig.assert_g1(slot, name);
    }
    assert_eq!(rig.manager().staging_bytes(), 2 * 4096);
}

#[test]
fn a_staging_ring_has_two_slots_at_least() {
    let rig = Rig::tuned(|worker| worker.staging_bytes = 1);
    assert_eq!(rig.manager().staging_bytes(), 2 * 4096);
}

#[test]
fn without_checksums_the_report_carries_none_and_identities_still_count() {
    let rig = Rig::new();
    rig.fill_g1(0, 1);
    let mut plan = rig.plan(Path::G1_G2, &[(1, 0, 0)]);
    plan.checksums = ChecksumMode::None;
    assert_eq!(rig.run(plan).blocks, [BlockOutcome::Done { checksum: 0 }]);
    let mut plan = rig.plan(Path::G2_G1, &[(2, 0, 0)]);
    plan.checksums = ChecksumMode::None;
    assert!(!rig.run(plan).blocks[0].is_done());
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_handle_is_a_future_without_a_runtime() {
    let rig = Rig::new();
    rig.fill_g1(0, 1);
    let mut handle = pin!(rig.manager().execute(rig.plan(Path::G1_G2, &[(1, 0, 0)])).unwrap());
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let report = loop {
        match handle.as_mut().poll(&mut context) {
            Poll::Ready(report) => break report,
            Poll::Pending => {
                assert!(std::time::Instant::now() < soon());
                std::thread::park_timeout(std::time::Duration::from_secs(30));
            }
        }
    };
    assert!(report.blocks[0].is_done());
    assert_eq!(handle.poll_report(), Some(report));
}
