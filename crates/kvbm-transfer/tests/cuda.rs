//! Blocks between a CUDA device, its driver being the test driver, and host memory: every way of
//! copying, every order of axes, compared with the CPU's conversion.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{CudaDevice, CudaDriver, Device, DeviceId};
use kvbm_layout::{
    AxisOrder, BlockLayout, CopyPlan, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    Selection,
};
use kvbm_plan::{
    BlockId, BlockIdentity, BlockTransfer, ChecksumMode, Endpoint, Epoch, Gate, GroupId, LayerRange,
    NamespaceId, PlanId, Priority, Rank, SequenceHash, Tier, TransferPlan,
};
use kvbm_storage::{BoundLayout, DeviceAllocator, PinnedAllocator, RegionBytes, SystemAllocator};
use kvbm_test_driver::TestDriver;
use kvbm_transfer::{Backend, TransferManager, WorkerConfig};

const BLOCKS: u32 = 40;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn device_of(library: &TestDriver) -> Arc<dyn Device> {
    // SAFETY: the library does what a driver does.
    let driver = unsafe { CudaDriver::open_library(library.path()) }.unwrap();
    Arc::new(CudaDevice::open(&driver, DeviceId(0)).unwrap())
}

fn shape(alignment: u64, head_dim: u32) -> LayoutConfig {
    let shape = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(3).page_size(8).num_heads(4);
    shape.inner_dim(4 * head_dim).dtype(DType::BF16).alignment(alignment).build().unwrap()
}

/// A worker whose G1 and host memory have these orders, and a plain copy of G1's content in host
/// memory.
struct Rig {
    device: Arc<dyn Device>,
    g1: BoundLayout,
    g2: BoundLayout,
    worker: TransferManager,
    next: u64,
}

impl Rig {
    fn new(device: Arc<dyn Device>, orders: (AxisOrder, AxisOrder), head_dim: u32, copies: Backend) -> Self {
        let layout = LayerSeparate::new(shape(1, head_dim), orders.0, OuterPlacement::KvOuter).unwrap();
        let g1 = BoundLayout::allocate(Arc::new(layout), &DeviceAllocator::new(Arc::clone(&device))).unwrap();
        let layout = FullyContiguous::new(shape(4096, head_dim), orders.1).unwrap();
        let pinned = PinnedAllocator::new(Arc::clone(&device));
        let g2 = BoundLayout::allocate(Arc::new(layout), &pinned).unwrap();
        let mut config = WorkerConfig::new(Rank(0), Epoch(1), [7; 16]);
        config.device = Some(Arc::clone(&device));
        config.copies = copies;
        (config.g1, config.g2) = (Some(g1.clone()), Some(g2.clone()));
        let worker = TransferManager::start(config, Arc::new(|_message| {})).unwrap();
        Self { device, g1, g2, worker, next: 0 }
    }

    /// Host memory that is laid out as G1.
    fn shadow(&self) -> BoundLayout {
        BoundLayout::allocate(Arc::clone(self.g1.layout()), &SystemAllocator::default()).unwrap()
    }

    /// Copies between G1 and its shadow, region by region.
    fn exchange(&self, shadow: &BoundLayout, into_device: bool) {
        use kvbm_device::{CopyBatch, Direction};
        let stream = self.device.create_stream("test").unwrap();
        let direction = if into_device { Direction::HostToDevice } else { Direction::DeviceToHost };
        let mut batch = CopyBatch::new(direction);
        for (on_device, on_host) in self.g1.memory().iter().zip(shadow.memory()) {
            let (RegionBytes::Device(device), RegionBytes::Host(host)) = (on_device, on_host) else {
                panic!("regions of other kinds")
            };
            if into_device {
                batch.push_host_to_device(host, 0, device, 0, host.len()).unwrap();
            } else {
                batch.push_device_to_host(device, 0, host, 0, host.len()).unwrap();
            }
        }
        stream.copy(batch).unwrap().wait(soon()).unwrap();
    }

    fn run(&mut self, ends: (Tier, Tier), blocks: &[(u32, u32, u8)], layers: Option<LayerRange>) {
        self.next += 1;
        let transfer = |&(src, dst, name): &(u32, u32, u8)| {
            let hash = SequenceHash::from_bytes([name; 16]);
            let (namespace, group) = (NamespaceId(7), GroupId(0));
            let identity = BlockIdentity { namespace, group, hash, parent: None, position: 0 };
            BlockTransfer { identity, src: BlockId(src), dst: BlockId(dst) }
        };
        let handle = self.worker.execute(TransferPlan {
            plan_id: PlanId(self.next),
            epoch: Epoch(1),
            group: GroupId(0),
            src: Endpoint::Local(ends.0),
            dst: Endpoint::Local(ends.1),
            blocks: blocks.iter().map(transfer).collect(),
            layers,
            gate: Gate::None,
            after: Vec::new(),
            priority: Priority::Normal,
            budget_ms: 30_000,
            checksums: ChecksumMode::Required,
            tag: 0,
            compare: None,
        });
        let report = handle.unwrap().wait(soon()).unwrap();
        assert!(report.blocks.iter().all(kvbm_plan::BlockOutcome::is_done), "{report:?}");
    }
}

fn fill(bound: &BoundLayout, mut seed: u64) {
    for region in bound.memory() {
        let RegionBytes::Host(host) = region else { panic!("not host memory") };
        let bytes: Vec<u8> = (0..host.len())
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 56) as u8
            })
            .collect();
        // SAFETY: the test alone touches these bytes now.
        unsafe { host.write_at(0, &bytes) }.unwrap();
    }
}

/// The bytes of a block as the CPU copies them into the order of `to`.
fn block(from: &BoundLayout, index: u32, to: &BoundLayout) -> Vec<u8> {
    let mut config = to.layout().config().clone();
    config.num_blocks = 1;
    let single = FullyContiguous::new(config, to.layout().axis_order()).unwrap();
    let mut bytes = vec![0; single.total_bytes() as usize];
    let plan = CopyPlan::between(from.layout().as_ref(), &single, &Selection::all()).unwrap();
    for run in plan.runs(index, 0).unwrap() {
        let RegionBytes::Host(host) = from.region(run.src_region).unwrap() else { panic!("not host memory") };
        let range = run.dst_offset as usize..(run.dst_offset + run.len) as usize;
        // SAFETY: the test alone touches these bytes now.
        unsafe { host.read_at(run.src_offset, &mut bytes[range]) }.unwrap();
    }
    bytes
}

fn check(mut rig: Rig, what: &str) {
    let shadow = rig.shadow();
    fill(&shadow, 5);
    rig.exchange(&shadow, true);
    // More blocks than a batch has, at scattered places.
    let out: Vec<_> = (0..35_u32).map(|at| (at * 7 % BLOCKS, at * 3 % BLOCKS, at as u8)).collect();
    rig.run((Tier::G1, Tier::G2), &out, None);
    for (from, to, _) in &out {
        assert!(block(&rig.g2, *to, &rig.g2) == block(&shadow, *from, &rig.g2), "{what}: block {from} in G2");
    }
    let back: Vec<_> = out.iter().map(|(from, to, name)| (*to, (from + 5) % BLOCKS, *name)).collect();
    rig.run((Tier::G2, Tier::G1), &back, None);
    let after = rig.shadow();
    rig.exchange(&after, false);
    for ((from, ..), (_, to, _)) in out.iter().zip(&back) {
        assert!(block(&after, *to, &rig.g2) == block(&shadow, *from, &rig.g2), "{what}: block {to} in G1");
    }
    // Single layers of a block, one plan each.
    let apart: Vec<_> = [2, 0, 1].map(|first| LayerRange { first, count: 1 }).into();
    for layers in &apart {
        rig.run((Tier::G1, Tier::G2), &[(3, 39, 77)], Some(*layers));
    }
    assert!(block(&rig.g2, 39, &rig.g2) == block(&after, 3, &rig.g2), "{what}: layer by layer");
}

#[test]
fn blocks_are_converted_on_their_way_whatever_way_that_is() {
    let Some(library) = TestDriver::new() else { return };
    library.delay(Duration::from_micros(50));
    for device_order in [AxisOrder::Nhd, AxisOrder::Hnd] {
        for host_order in [AxisOrder::Nhd, AxisOrder::Universal] {
            for copies in [Backend::Kernel, Backend::Batch, Backend::Async, Backend::Auto] {
                // A fresh device measures first: once is enough.
                let widths: &[u32] = if copies == Backend::Auto { &[16] } else { &[16, 9] };
                for &head_dim in widths {
                    let what = format!("{device_order} to {host_order} by {copies}, heads of {head_dim}");
                    let launches = library.calls(c"cuLaunchKernel");
                    let orders = (device_order, host_order);
                    check(Rig::new(device_of(&library), orders, head_dim, copies), &what);
                    let launched = library.calls(c"cuLaunchKernel") > launches;
                    assert!(launched || copies != Backend::Kernel, "{what}: no kernel was launched");
                }
            }
        }
    }
    library.assert_nothing_is_left();
}

#[test]
fn ways_that_a_device_does_not_offer_are_refused_by_name() {
    let Some(library) = TestDriver::new() else { return };
    library.machine(1, 12_040);
    let start = |device: Arc<dyn Device>, copies| {
        let layout = LayerSeparate::new(shape(1, 16), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
        let g1 = BoundLayout::allocate(Arc::new(layout), &DeviceAllocator::new(Arc::clone(&device))).unwrap();
        let layout = FullyContiguous::new(shape(4096, 16), AxisOrder::Nhd).unwrap();
        let g2 = BoundLayout::allocate(Arc::new(layout), &SystemAllocator::default()).unwrap();
        let mut config = WorkerConfig::new(Rank(0), Epoch(1), [7; 16]);
        (config.device, config.g1, config.g2) = (Some(device), Some(g1), Some(g2));
        config.copies = copies;
        TransferManager::start(config, Arc::new(|_message| {})).map(drop)
    };
    let error = start(device_of(&library), Backend::Batch).unwrap_err().to_string();
    assert!(error.contains("copies = batch") && error.contains("CUDA 12.8"), "{error}");
    let emulated = kvbm_device::EmulatedDevice::new(kvbm_device::EmulatedConfig::default()).unwrap();
    let error = start(Arc::new(emulated), Backend::Kernel).unwrap_err().to_string();
    assert!(error.contains("copies = kernel") && error.contains("CUDA devices"), "{error}");
    // Kernels that cannot be loaded: by name an error, else the copy engines do it.
    library.fail(c"cuModuleLoadData", 209, 0);
    let error = start(device_of(&library), Backend::Kernel).unwrap_err().to_string();
    assert!(error.contains("copies = kernel") && error.contains("image"), "{error}");
    library.fail(c"cuModuleLoadData", 209, 0);
    assert!(start(device_of(&library), Backend::Auto).is_ok());
    library.assert_nothing_is_left();
}
