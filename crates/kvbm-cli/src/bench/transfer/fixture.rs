//! A worker with all its tiers, filled: what the paths are measured on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kvbm::device::{CopyBatch, Device, Direction, EmulatedConfig, EmulatedDevice, HostBuffer};
use kvbm::layout::{
    AxisOrder, BlockLayout, BlockView, Cell, ContiguousBlock, DType, FullyContiguous, LayerSeparate,
    LayoutConfig, OuterPlacement,
};
use kvbm::plan::{BlockId, BlockIdentity, Epoch, GroupId, NamespaceId, Rank, SequenceHash};
use kvbm::storage::{BoundLayout, DeviceAllocator, HugePages, PinFallback, PinnedAllocator, RegionBytes};
use kvbm_disk::{DiskConfig, DiskEngine, DiskKeys, EngineMode, Recovered, SlotIo};
use kvbm_transfer::{DiskTier, TransferManager, VerifyHost, WorkerConfig};

use super::load_generator;
use crate::pattern::CellPattern;
use crate::rng::Rng;

const NAMESPACE: [u8; 16] = [0xB; 16];
const PAGE_SIZE: u32 = 16;
/// Elements of a head, where the elements of a token are a multiple.
const HEAD_DIM: u32 = 128;
/// Keys and values.
const OUTER: u32 = 2;
const PAGE: u64 = 4096;
/// Bytes put into device memory at a time.
const UPLOAD: u64 = 1 << 20;
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// What blocks look like, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) block_bytes: u64,
    /// Of an element.
    pub(super) dtype: DType,
    /// Fragments of a block in device memory.
    pub(super) device_fragments: u32,
    /// Fragments of a block in host memory: 1, or as many as on the device.
    pub(super) host_fragments: u32,
    /// Order of the axes of a block in host memory, where it is one fragment. On the device it is
    /// NHD.
    pub(super) host_order: AxisOrder,
    pub(super) slots: u32,
}

impl Shape {
    /// Bytes of all blocks.
    pub(super) fn set_bytes(self) -> u64 {
        u64::from(self.slots) * self.block_bytes
    }

    /// A model whose blocks have these bytes, in `device_fragments` pieces of equal length.
    fn config(self, alignment: u64) -> Result<LayoutConfig> {
        let per_fragment = self.block_bytes / u64::from(self.device_fragments);
        let inner = per_fragment / u64::from(PAGE_SIZE * self.dtype.width());
        let inner = u32::try_from(inner).context("a block is too large")?;
        let heads = if inner.is_multiple_of(HEAD_DIM) { inner / HEAD_DIM } else { 1 };
        let config = LayoutConfig::builder()
            .num_blocks(self.slots)
            .num_layers(self.device_fragments / OUTER)
            .outer_dim(OUTER)
            .page_size(PAGE_SIZE)
            .inner_dim(inner)
            .num_heads(heads)
            .dtype(self.dtype)
            .alignment(alignment)
            .build()?;
        ensure!(
            config.bytes_per_block() == self.block_bytes,
            "{} bytes do not make {} fragments",
            self.block_bytes,
            self.device_fragments
        );
        Ok(config)
    }

    fn layer_separate(self) -> Result<Arc<dyn BlockLayout>> {
        Ok(Arc::new(LayerSeparate::new(self.config(512)?, AxisOrder::Nhd, OuterPlacement::KvOuter)?))
    }

    pub(super) fn device_layout(self) -> Result<Arc<dyn BlockLayout>> {
        self.layer_separate()
    }

    fn host_layout(self) -> Result<Arc<dyn BlockLayout>> {
        if self.host_fragments > 1 {
            return self.layer_separate();
        }
        Ok(Arc::new(FullyContiguous::new(self.config(PAGE)?, self.host_order)?))
    }
}

/// What an engine has that the product's has not by default.
#[derive(Clone, Default)]
pub(super) struct DiskWith {
    /// Blocks are signed or encrypted with these.
    pub(super) keys: DiskKeys,
    /// Who moves the bytes.
    pub(super) engine: EngineMode,
    pub(super) slot_io: Option<Arc<dyn SlotIo>>,
}

/// The disk tier, which several fixtures share: each has slots of its own.
pub(super) struct Disk {
    pub(super) engine: Arc<DiskEngine>,
    pub(super) dir: PathBuf,
    pub(super) shape: Shape,
    pub(super) commit_interval: Duration,
}

impl Disk {
    /// An engine as the product opens it, but for what `with` says, with room for `fixtures`
    /// fixtures.
    pub(super) fn open(dir: &Path, shape: Shape, fixtures: u32, with: DiskWith) -> Result<Self> {
        let slots = shape.slots.checked_mul(fixtures).context("too many blocks")?;
        let mut config = DiskConfig::new(dir, slots, shape.block_bytes, NAMESPACE);
        (config.key, config.encryption) = (with.keys.signing, with.keys.encryption);
        (config.engine, config.slot_io) = (with.engine, with.slot_io);
        let commit_interval = config.commit.interval;
        let (engine, _) = DiskEngine::open(config)?;
        Ok(Self { engine: Arc::new(engine), dir: dir.to_owned(), shape, commit_interval })
    }
}

/// In which slots of the disk blocks lie that go there together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Side by side, as a pool hands slots out that were never used, or that one prefix had before.
    Filled,
    /// Anywhere: a disk on which everything was replaced block by block.
    Scattered,
}

impl Order {
    /// The slots of fixture `number`, of `slots` blocks.
    pub(super) fn slots(self, number: u32, slots: u32) -> Vec<u32> {
        let first = number * slots;
        match self {
            Self::Filled => (first..first + slots).collect(),
            Self::Scattered => {
                let places = shuffled(slots, &mut Rng::new(u64::from(number)));
                places.into_iter().map(|slot| first + slot).collect()
            }
        }
    }
}

/// A worker and its memory. Block `n` lies in slot `n` of G2, in a scattered order in one of G1,
/// and in one of G3.
pub(super) struct Fixture {
    pub(super) shape: Shape,
    pub(super) worker: TransferManager,
    pub(super) g1: BoundLayout,
    pub(super) g2: BoundLayout,
    pub(super) disk: Arc<DiskEngine>,
    g1_slots: Vec<u32>,
    g3_slots: Vec<u32>,
    plans: AtomicU64,
}

impl Fixture {
    /// Fixture `number` on `disk`, with every block on every tier.
    pub(super) fn new(
        shape: Shape,
        disk: &Disk,
        number: u32,
        order: Order,
        verify_host: VerifyHost,
    ) -> Result<Self> {
        let memory_bytes = (shape.set_bytes() + (64 << 20)).max(256 << 20);
        let device: Arc<dyn Device> =
            Arc::new(EmulatedDevice::new(EmulatedConfig { memory_bytes, ..EmulatedConfig::default() })?);
        let g1 = BoundLayout::allocate(shape.device_layout()?, &DeviceAllocator::new(Arc::clone(&device)))?;
        let pinned = PinnedAllocator::new(Arc::clone(&device));
        let huge_pages = HugePages::Try;
        let pinned = PinnedAllocator { huge_pages, fallback: PinFallback::Unpinned, ..pinned };
        let g2 = BoundLayout::allocate(shape.host_layout()?, &pinned)?;
        upload(&device, &g1)?;
        let mut config = WorkerConfig::new(Rank(0), Epoch(0), NAMESPACE);
        config.verify_host = verify_host;
        config.device = Some(device);
        config.g1 = Some(g1.clone());
        config.g2 = Some(g2.clone());
        config.direct_offload = true;
        config.g3 = Some(DiskTier { engine: Arc::clone(&disk.engine), recovered: Recovered::default() });
        let worker = TransferManager::start(config, Arc::new(|_message| {}))?;
        let fixture = Self {
            shape,
            worker,
            g1,
            g2,
            disk: Arc::clone(&disk.engine),
            g1_slots: shuffled(shape.slots, &mut Rng::new(!u64::from(number))),
            g3_slots: order.slots(number, shape.slots),
            plans: AtomicU64::new(0),
        };
        load_generator::once(&fixture, kvbm::plan::Path::G1_G2)?;
        load_generator::once(&fixture, kvbm::plan::Path::G2_G3)?;
        Ok(fixture)
    }

    /// From here on blocks lie on the disk in this order.
    pub(super) fn reorder(&mut self, number: u32, order: Order) -> Result<()> {
        self.g3_slots = order.slots(number, self.shape.slots);
        load_generator::once(self, kvbm::plan::Path::G2_G3)
    }

    /// Slots of a block in G1, G2 and G3.
    pub(super) fn slots_of(&self, block: u32) -> [BlockId; 3] {
        [self.g1_slots[block as usize], block, self.g3_slots[block as usize]].map(BlockId)
    }

    /// A number that no plan has had.
    pub(super) fn next_plan(&self) -> u64 {
        self.plans.fetch_add(1, Relaxed)
    }

    /// Brings every block from the disk to the device, from there to host memory, and once more to
    /// and from the device. Compares what arrives.
    pub(super) fn check_bytes(&self) -> Result<()> {
        use kvbm::plan::Path;
        [Path::G3_G1, Path::G1_G2, Path::G2_G1, Path::G1_G2]
            .iter()
            .try_for_each(|path| load_generator::once(self, *path))?;
        let mut bytes = vec![0; usize::try_from(self.shape.block_bytes)?];
        let mut expected = bytes.clone();
        for block in 0..self.shape.slots {
            // SAFETY: the copies are over, and nobody else asks for others.
            unsafe { self.g2.read_block(block, &mut bytes) }?;
            match self.g2.layout().contiguous_block() {
                Some(host) => self.expect_rows(block, host, &mut expected)?,
                None => self.expect_fragments(block, &mut expected)?,
            }
            ensure!(bytes == expected, "block {block} came back with other bytes than were written");
        }
        Ok(())
    }
}

impl Fixture {
    /// The bytes of a block whose fragments in host memory are those on the device.
    fn expect_fragments(&self, block: u32, expected: &mut [u8]) -> Result<()> {
        let [device, ..] = self.slots_of(block);
        let mut parts = expected;
        for fragment in self.g1.block_fragments(device.0)? {
            let (part, rest) = parts.split_at_mut(usize::try_from(fragment.len)?);
            pattern(fragment.region).fill(fragment.offset, part);
            parts = rest;
        }
        Ok(())
    }

    /// The bytes of a block that is one piece in host memory, head by head, as both layouts say.
    fn expect_rows(&self, block: u32, host: ContiguousBlock, expected: &mut [u8]) -> Result<()> {
        let [device, ..] = self.slots_of(block);
        let start = host.offset + u64::from(block) * host.stride;
        let (layouts, config) = ([self.g1.layout(), self.g2.layout()], self.g1.layout().config());
        for (layer, outer) in
            (0..config.num_layers).flat_map(|layer| (0..OUTER).map(move |outer| (layer, outer)))
        {
            let from = layouts[0].block_view(device.0, layer, Cell::Kv(outer))?;
            let to = layouts[1].block_view(block, layer, Cell::Kv(outer))?;
            for (token, head) in
                (0..PAGE_SIZE).flat_map(|token| (0..config.num_heads).map(move |head| (token, head)))
            {
                let at = |view: BlockView| {
                    let in_cell =
                        u64::from(token) * view.cell.token_stride + u64::from(head) * view.cell.head_stride;
                    view.offset + in_cell
                };
                let first = usize::try_from(at(to) - start)?;
                let len = usize::try_from(to.cell.elems * u64::from(to.cell.elem_bytes))?;
                pattern(from.region).fill(at(from), &mut expected[first..first + len]);
            }
        }
        Ok(())
    }
}

pub(super) fn identity(block: u32) -> BlockIdentity {
    let hash = SequenceHash::from_bytes((u128::from(block) + 1).to_le_bytes());
    BlockIdentity { namespace: NamespaceId(1), group: GroupId(0), hash, parent: None, position: 0 }
}

/// What region `region` of device memory is filled with.
fn pattern(region: u32) -> CellPattern {
    CellPattern::new([7; 16], 0, region, 0)
}

/// Fills device memory with its pattern.
fn upload(device: &Arc<dyn Device>, g1: &BoundLayout) -> Result<()> {
    let stream = device.create_stream("upload")?;
    let mut buffer = HostBuffer::zeroed(usize::try_from(UPLOAD)?);
    for (region, memory) in (0..).zip(g1.memory()) {
        let RegionBytes::Device(memory) = memory else { continue };
        for offset in (0..memory.len()).step_by(usize::try_from(UPLOAD)?) {
            let len = UPLOAD.min(memory.len() - offset);
            pattern(region).fill(offset, buffer.exclusive_bytes()?);
            let mut batch = CopyBatch::new(Direction::HostToDevice);
            batch.push_host_to_device(&buffer, 0, memory, offset, len)?;
            let copied = stream.copy(batch).map_err(|rejected| rejected.error)?;
            copied.wait(Instant::now() + PATIENCE)?;
        }
    }
    Ok(())
}

/// The numbers below `n` in an order that `rng` decides.
pub(super) fn shuffled(n: u32, rng: &mut Rng) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..n).collect();
    for index in (1..numbers.len()).rev() {
        numbers.swap(index, rng.below(index as u64 + 1) as usize);
    }
    numbers
}
