//! A worker on an emulated device, with a host tier and a directory, and an oracle that knows
//! nothing of runs or strides.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "test code, of which each test file uses a part"
)]

pub mod medium;

use kvbm_device::{CopyBatch, Device, Direction, EmulatedConfig, EmulatedDevice, HostBuffer, HostRegion};
use kvbm_disk::{DiskConfig, DiskEngine};
use kvbm_layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
};
use kvbm_plan::{
    BlockId, BlockIdentity, BlockOutcome, BlockTransfer, ChecksumMode, Command, Endpoint, Epoch, FailureKind,
    Gate, GroupId, Message, NamespaceId, Path, PlanId, Priority, Rank, SequenceHash, TransferPlan,
    TransferReport, wire,
};
use kvbm_storage::{BoundLayout, DeviceAllocator, PinnedAllocator, RegionBytes, SystemAllocator};
use kvbm_transfer::{DiskTier, TransferManager, WorkerConfig, disk_layout};
use medium::FaultMedium;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const NAMESPACE: [u8; 16] = [9; 16];
pub const LAYERS: u32 = 3;

/// Generous: only a hang reaches it.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub fn model(blocks: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(LAYERS)
        .page_size(4)
        .inner_dim(2 * 24)
        .num_heads(2)
        .dtype(DType::BF16)
        .build()
        .unwrap()
}

pub fn layer_separate(blocks: u32) -> Arc<dyn BlockLayout> {
    Arc::new(LayerSeparate::new(model(blocks), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap())
}

pub fn contiguous(blocks: u32) -> Arc<dyn BlockLayout> {
    Arc::new(FullyContiguous::new(model(blocks), AxisOrder::Nhd).unwrap())
}

/// Messages of a worker, decoded.
#[derive(Clone)]
pub struct Inbox {
    receiver: crossbeam_channel::Receiver<Vec<u8>>,
    sender: crossbeam_channel::Sender<Vec<u8>>,
}

impl Inbox {
    pub fn new() -> Self {
        let (sender, receiver) = crossbeam_channel::unbounded();
        Self { receiver, sender }
    }

    pub fn sink(&self) -> kvbm_transfer::Sink {
        let sender = self.sender.clone();
        Arc::new(move |bytes| sender.send(bytes).unwrap())
    }

    pub fn next(&self) -> Message {
        let bytes = self.receiver.recv_deadline(soon()).expect("a message");
        wire::decode_message(&bytes).unwrap()
    }

    /// The next report; other messages before it are dropped.
    pub fn report(&self) -> TransferReport {
        loop {
            if let Message::Transfer(report) = self.next() {
                return report;
            }
        }
    }

    pub fn try_next(&self) -> Option<Message> {
        self.receiver.try_recv().ok().map(|bytes| wire::decode_message(&bytes).unwrap())
    }
}

/// What a rig is made of.
pub struct Shape {
    pub g1: Arc<dyn BlockLayout>,
    pub g2: Arc<dyn BlockLayout>,
    /// G1 in host memory, without a device.
    pub host_only: bool,
    pub disk_slots: u32,
    /// Operations that the disk engine queues.
    pub disk_queue: usize,
    pub device: EmulatedConfig,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            g1: layer_separate(16),
            g2: contiguous(16),
            host_only: false,
            disk_slots: 16,
            disk_queue: 1024,
            device: EmulatedConfig { memory_bytes: 16 << 20, ..EmulatedConfig::default() },
        }
    }
}

pub struct Rig {
    pub device: EmulatedDevice,
    pub g1: BoundLayout,
    pub g2: BoundLayout,
    pub medium: Arc<FaultMedium>,
    pub disk: Arc<DiskEngine>,
    pub inbox: Inbox,
    pub manager: Option<TransferManager>,
    next_plan: AtomicU64,
    pub dir: tempfile::TempDir,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Shape::default(), |_| {})
    }

    pub fn tuned(tune: impl FnOnce(&mut WorkerConfig)) -> Self {
        Self::with(Shape::default(), tune)
    }

    pub fn with(shape: Shape, tune: impl FnOnce(&mut WorkerConfig)) -> Self {
        Self::at(tempfile::tempdir().unwrap(), shape, tune)
    }

    pub fn at(dir: tempfile::TempDir, shape: Shape, tune: impl FnOnce(&mut WorkerConfig)) -> Self {
        let device = EmulatedDevice::new(shape.device).unwrap();
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        let (g1, g2) = if shape.host_only {
            let system = SystemAllocator::default();
            (
                BoundLayout::allocate(shape.g1, &system).unwrap(),
                BoundLayout::allocate(shape.g2, &system).unwrap(),
            )
        } else {
            let g1 = BoundLayout::allocate(shape.g1, &DeviceAllocator::new(Arc::clone(&shared))).unwrap();
            let pinned = PinnedAllocator::new(Arc::clone(&shared));
            let pinned = PinnedAllocator { fallback: kvbm_storage::PinFallback::Unpinned, ..pinned };
            (g1, BoundLayout::allocate(shape.g2, &pinned).unwrap())
        };
        let on_disk = disk_layout(g2.layout().as_ref(), shape.disk_slots).unwrap();
        let mut config = DiskConfig::new(dir.path(), shape.disk_slots, on_disk.bytes_per_block(), NAMESPACE);
        config.threads = 2;
        config.queue_depth = shape.disk_queue;
        let medium = Arc::new(FaultMedium::at(dir.path()));
        let (disk, recovered) = DiskEngine::open_on(config, Arc::clone(&medium) as _).unwrap();
        let disk = Arc::new(disk);
        let mut worker = WorkerConfig::new(Rank(1), Epoch(5), NAMESPACE);
        worker.device = (!shape.host_only).then_some(shared);
        worker.g1 = Some(g1.clone());
        worker.g2 = Some(g2.clone());
        worker.g3 = Some(DiskTier { engine: Arc::clone(&disk), recovered });
        worker.staging_bytes = 3 * 4096;
        tune(&mut worker);
        let inbox = Inbox::new();
        let manager = TransferManager::start(worker, inbox.sink()).unwrap();
        Self {
            device,
            g1,
            g2,
            medium,
            disk,
            inbox,
            manager: Some(manager),
            next_plan: AtomicU64::new(1),
            dir,
        }
    }

    pub fn manager(&self) -> &TransferManager {
        self.manager.as_ref().expect("not shut down")
    }

    /// A plan for `moves`, each (block name, source slot, destination slot).
    pub fn plan(&self, path: Path, moves: &[(u8, u32, u32)]) -> TransferPlan {
        let block = |&(name, src, dst): &(u8, u32, u32)| BlockTransfer {
            identity: identity(name),
            src: BlockId(src),
            dst: BlockId(dst),
        };
        TransferPlan {
            plan_id: PlanId(self.next_plan.fetch_add(1, Ordering::Relaxed)),
            epoch: Epoch(5),
            group: GroupId(0),
            src: Endpoint::Local(path.src),
            dst: Endpoint::Local(path.dst),
            blocks: moves.iter().map(block).collect(),
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

    /// Executes a plan and waits for its report.
    pub fn run(&self, plan: TransferPlan) -> Arc<TransferReport> {
        self.manager().execute(plan).unwrap().wait(soon()).unwrap()
    }

    pub fn go(&self, path: Path, moves: &[(u8, u32, u32)]) -> Arc<TransferReport> {
        self.run(self.plan(path, moves))
    }

    /// Like [`Rig::go`], and all blocks must arrive.
    pub fn must(&self, path: Path, moves: &[(u8, u32, u32)]) -> Arc<TransferReport> {
        let report = self.go(path, moves);
        assert!(report.blocks.iter().all(BlockOutcome::is_done), "{report:?}");
        report
    }

    pub fn send(&self, command: &Command) {
        self.manager().submit(&wire::encode_command(command).unwrap()).unwrap();
    }

    /// Puts the pattern of block `name` into G1 slot `slot`.
    pub fn fill_g1(&self, slot: u32, name: u8) {
        self.write(&self.g1, slot, &pattern(name, self.g1.bytes_per_block()));
    }

    pub fn assert_g1(&self, slot: u32, name: u8) {
        assert_eq!(self.read(&self.g1, slot), pattern(name, self.g1.bytes_per_block()), "slot {slot} of G1");
    }

    pub fn assert_g2(&self, slot: u32, name: u8) {
        assert_eq!(self.read(&self.g2, slot), pattern(name, self.g2.bytes_per_block()), "slot {slot} of G2");
    }

    /// Elements of a block in the order (layer, outer, token, head, element).
    pub fn read(&self, bound: &BoundLayout, slot: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let regions: Vec<Vec<u8>> = bound.memory().iter().map(|memory| self.download(memory)).collect();
        for_each_element(bound, slot, |region, offset, len| {
            bytes.extend_from_slice(&regions[region][offset..offset + len]);
        });
        bytes
    }

    /// Inverse of [`Rig::read`].
    pub fn write(&self, bound: &BoundLayout, slot: u32, bytes: &[u8]) {
        let mut rest = bytes;
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        let source = HostBuffer::from_bytes(bytes);
        for_each_element(bound, slot, |region, offset, len| {
            let from = (bytes.len() - rest.len()) as u64;
            match &bound.memory()[region] {
                // SAFETY: the test alone touches these bytes now.
                RegionBytes::Host(memory) => unsafe { memory.write_at(offset as u64, &rest[..len]) }.unwrap(),
                RegionBytes::Device(memory) => {
                    batch.push_host_to_device(&source, from, memory, offset as u64, len as u64).unwrap();
                }
                other => panic!("{other:?}"),
            }
            rest = &rest[len..];
        });
        assert!(rest.is_empty());
        if !batch.is_empty() {
            self.device.create_stream("test").unwrap().copy(batch).unwrap().wait(soon()).unwrap();
        }
    }

    fn download(&self, memory: &RegionBytes) -> Vec<u8> {
        match memory {
            RegionBytes::Host(region) => all(region),
            RegionBytes::Device(memory) => {
                let mut buffer = HostBuffer::zeroed(memory.len() as usize);
                let mut batch = CopyBatch::new(Direction::DeviceToHost);
                batch.push_device_to_host(memory, 0, &buffer, 0, memory.len()).unwrap();
                self.device.create_stream("test").unwrap().copy(batch).unwrap().wait(soon()).unwrap();
                buffer.exclusive_bytes().unwrap().to_vec()
            }
            other => panic!("{other:?}"),
        }
    }

    /// Flips a bit of a block in G2 behind the worker's back.
    pub fn damage_g2(&self, slot: u32) {
        let mut bytes = self.read(&self.g2, slot);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        self.write(&self.g2, slot, &bytes);
    }
}

fn all(region: &HostRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    // SAFETY: the test alone touches these bytes now.
    unsafe { region.read_at(0, &mut bytes) }.unwrap();
    bytes
}

/// Calls `visit(region, offset, bytes)` for every element of a block, one by one, from the strides
/// alone.
fn for_each_element(bound: &BoundLayout, slot: u32, mut visit: impl FnMut(usize, usize, usize)) {
    let layout = bound.layout();
    for layer in 0..layout.config().num_layers {
        for cell in layout.config().cells() {
            let view = layout.block_view(slot, layer, cell).unwrap();
            let cell = view.cell;
            for token in 0..u64::from(cell.tokens) {
                for head in 0..u64::from(cell.heads) {
                    for elem in 0..cell.elems {
                        let offset = view.offset
                            + token * cell.token_stride
                            + head * cell.head_stride
                            + elem * cell.elem_stride;
                        visit(view.region as usize, offset as usize, cell.elem_bytes as usize);
                    }
                }
            }
        }
    }
}

/// Bytes that depend on the block's name and on where they are.
pub fn pattern(name: u8, bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ name.wrapping_mul(101).wrapping_add(1))
        .collect()
}

pub fn identity(name: u8) -> BlockIdentity {
    BlockIdentity {
        namespace: NamespaceId(1),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([name; 16]),
        parent: None,
        position: 0,
    }
}

/// The failure kind of each block, `None` where it arrived.
pub fn kinds(report: &TransferReport) -> Vec<Option<FailureKind>> {
    let kind = |outcome: &BlockOutcome| match outcome {
        BlockOutcome::Done { .. } => None,
        BlockOutcome::Failed(failure) => Some(failure.kind),
    };
    report.blocks.iter().map(kind).collect()
}

pub fn checksums(report: &TransferReport) -> Vec<u64> {
    let checksum = |outcome: &BlockOutcome| match outcome {
        BlockOutcome::Done { checksum } => *checksum,
        BlockOutcome::Failed(failure) => panic!("{failure}"),
    };
    report.blocks.iter().map(checksum).collect()
}

pub fn detail(report: &TransferReport, index: usize) -> &str {
    match &report.blocks[index] {
        BlockOutcome::Failed(failure) => &failure.detail,
        BlockOutcome::Done { .. } => panic!("block {index} arrived"),
    }
}
