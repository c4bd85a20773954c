//! Memory of a rank: its G1, which may be the engine's, and its G2.

use super::volumes::for_deployment;
use super::{WorkerError, volume_registry};
use crate::config::{
    self, BandwidthModel, Config, DeviceKind, DeviceOrder, HostOrder, LayerContent, LayoutKind,
};
use kvbm_device::{CudaDevice, CudaDriver, Device, DeviceId, EmulatedConfig, EmulatedDevice, TransferModel};
use kvbm_layout::{
    AxisOrder, BlockLayout, ConfigError, DType, FullyContiguous, LayerSeparate, LayoutConfig, OpaqueLayout,
    OpaquePlane, OuterPlacement, slice_for_rank,
};
use kvbm_plan::{GroupId, Rank, Tier};
use kvbm_storage::{
    BoundLayout, DeviceAllocator, HostRegion, HugePages, NumaPlacement, PageSize, PinFallback,
    PinnedAllocator, Population, PopulationEnd, RegionBinding, RegionBytes, SharedStorage, Storage,
    StorageAllocator, StorageKind, SystemAllocator,
};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{GroupMemory, HostContent, MoverRing, MoverTier, Movers};
use kvbm_volume::VolumeRegistry;
use std::fmt;
use std::sync::Arc;

/// A rank's memory on its device, or in host memory where there is none: its tensors of each cache
/// group, bound to the layout that they have.
pub type GroupTensors = (Option<Arc<dyn Device>>, Vec<BoundLayout>);

/// Most slots of a staging ring that movers map: as many as a path from below has on its way.
const MAX_RING_BLOCKS: u32 = 1024;

/// How blocks of each cache group lie in the same slots.
type GroupLayouts = Vec<Arc<dyn BlockLayout>>;

/// Whose memory a rank's G1 is.
#[derive(Clone)]
pub enum G1Memory {
    /// A pool of ours, on the device that `[device]` of the configuration names.
    Owned,
    /// The engine's: KV tensors on its device, bound to the layout that they have.
    EngineDevice(Arc<dyn Device>, BoundLayout),
    /// The engine's: KV tensors in host memory ([`HostStorage`](kvbm_storage::HostStorage)), bound
    /// to the layout that they have.
    EngineHost(BoundLayout),
    /// The engine's, of a model with several cache groups: for each group its tensors, on the
    /// device, or in host memory where there is none. A block id means one group's block at a time.
    EngineGroups(Option<Arc<dyn Device>>, Vec<BoundLayout>),
    /// Of other processes, all of which together have so many blocks, each of one group at a time.
    /// They map G2 and copy ([`Worker::shared`](super::Worker::shared)). G2 is the memory of an
    /// earlier worker, with what is in it, where one is given.
    Movers(u32, Arc<dyn Movers>, Option<Arc<KeptHost>>),
}

impl fmt::Debug for G1Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owned => f.write_str("Owned"),
            Self::Movers(blocks, ..) => write!(f, "{blocks} blocks of other processes"),
            engine => write!(f, "the engine's {:?}", engine.engine_layouts()),
        }
    }
}

/// G1 of a rank.
#[derive(Clone)]
pub(super) enum RankG1 {
    /// Memory of this process by cache group, and the device that it lies on. The groups' slots are
    /// the same memory.
    Here(Option<Arc<dyn Device>>, Vec<BoundLayout>),
    /// Blocks of other processes, and the memory that they map.
    Elsewhere(MoverTier, SharedHost),
}

/// Host memory that other processes map: the slots of G2, and behind them those of staging rings.
#[derive(Clone, Debug)]
pub struct SharedHost {
    /// The memory.
    pub memory: Arc<SharedStorage>,
    /// How blocks of each cache group lie in its slots: those of G2 come first.
    pub slots: Vec<BoundLayout>,
}

/// Host memory of an earlier worker of a rank, and what is in it.
#[derive(Clone, Debug)]
pub struct KeptHost {
    /// The memory.
    pub memory: Arc<SharedStorage>,
    /// The blocks in it, with their checksums.
    pub contents: Vec<HostContent>,
}

impl SharedHost {
    /// How blocks of each cache group lie in the memory of a rank that a worker of this
    /// configuration would share. Bytes of it are kept by a worker whose memory lies alike.
    ///
    /// # Errors
    /// [`WorkerError`] names the setting.
    pub fn layouts_of(config: &Config, rank: Rank) -> Result<GroupLayouts, WorkerError> {
        let [_, g2_blocks, _] = config.tier_blocks();
        let ring = ring_slots(config, rank)?;
        host_layouts(config, rank, RankRow::of(config, rank).all_slots(g2_blocks, ring))
    }

    /// Ranks whose host memory is that of `rank`, itself among them.
    pub fn ranks_of_one_memory(config: &Config, rank: Rank) -> u32 {
        RankRow::of(config, rank).ranks
    }
}

impl G1Memory {
    /// The blocks of G2 that are there from the start.
    pub(crate) fn kept(&self) -> &[HostContent] {
        match self {
            Self::Movers(.., Some(kept)) => &kept.contents,
            _ => &[],
        }
    }

    /// The layouts of the engine's memory in this process, by cache group.
    pub fn engine_layouts(&self) -> &[BoundLayout] {
        match self {
            Self::Owned | Self::Movers(..) => &[],
            Self::EngineDevice(_, bound) | Self::EngineHost(bound) => std::slice::from_ref(bound),
            Self::EngineGroups(_, groups) => groups,
        }
    }

    /// Blocks of the engine's memory that every cache group has; none where G1 is ours.
    pub fn engine_blocks(&self) -> Option<u32> {
        match self {
            Self::Movers(blocks, ..) => Some(*blocks),
            _ => self.engine_layouts().iter().map(BoundLayout::num_blocks).min(),
        }
    }

    /// The memory, which is allocated here where G1 is ours, and G2 with it, where no `writer` has
    /// it.
    fn resolve(
        &self,
        config: &Config,
        rank: Rank,
        [g1_blocks, g2_blocks]: [u32; 2],
        writer: Option<&RankMemory>,
    ) -> Result<(RankG1, Vec<BoundLayout>), WorkerError> {
        if let Self::Movers(blocks, movers, kept) = self {
            let there = match writer.map(|writer| &writer.g1) {
                Some(RankG1::Elsewhere(_, shared)) => Some(&shared.memory),
                _ => kept.as_ref().map(|kept| &kept.memory),
            };
            return shared_memory(config, rank, [*blocks, g2_blocks], movers, there);
        }
        let (device, g1) = self.resolve_g1(config, rank, g1_blocks)?;
        let g2 = match (writer, g2_blocks) {
            (Some(writer), _) => writer.g2.clone(),
            (None, 0) => Vec::new(),
            (None, blocks) => host_memory(config, device.as_ref(), rank, blocks)?,
        };
        Ok((RankG1::Here(device, g1), g2))
    }

    /// The device, if there is one, and the memory in this process.
    fn resolve_g1(&self, config: &Config, rank: Rank, blocks: u32) -> Result<GroupTensors, WorkerError> {
        let (found, needed) = (self.engine_layouts(), config.group_ids().count());
        let device = match self {
            Self::Owned => {
                let layout = |group| device_layout(config, group, rank, blocks);
                let layouts = config.group_ids().map(layout).collect::<Result<Vec<_>, _>>()?;
                let bytes = layouts[0].regions().iter().map(|region| region.bytes).sum();
                let device = device(&config.device, rank, bytes)?;
                let allocator = DeviceAllocator::new(Arc::clone(&device));
                return Ok((Some(device), in_one_memory(layouts, Tier::G1, &allocator)?));
            }
            Self::EngineDevice(device, _) => Some(device),
            Self::EngineHost(_) | Self::Movers(..) => None,
            Self::EngineGroups(device, _) => device.as_ref(),
        };
        if found.len() != needed {
            return Err(WorkerError::Groups { rank, found: found.len(), needed });
        }
        let is_host =
            |bound: &&BoundLayout| matches!(bound.kind(), StorageKind::System | StorageKind::Pinned);
        match found.iter().find(|bound| device.is_none() && !is_host(bound)) {
            Some(bound) => Err(WorkerError::NotHostMemory { rank, kind: bound.kind() }),
            None => Ok((device.cloned(), found.to_vec())),
        }
    }
}

/// Memory for the first layout, to which the others are bound too: slots of one size, which hold
/// blocks of any cache group.
fn in_one_memory(
    layouts: GroupLayouts,
    tier: Tier,
    allocator: &dyn StorageAllocator,
) -> Result<Vec<BoundLayout>, WorkerError> {
    let mut bound: Vec<BoundLayout> = Vec::with_capacity(layouts.len());
    for layout in layouts {
        let next = match bound.first() {
            None => BoundLayout::allocate(layout, allocator),
            Some(first) => BoundLayout::bind(layout, first.bindings().to_vec()),
        };
        bound.push(next.map_err(|source| WorkerError::Storage { tier, source })?);
    }
    Ok(bound)
}

/// G1 of other processes, and G2 and staging rings in memory that they map: in `there`, if that is
/// given.
fn shared_memory(
    config: &Config,
    rank: Rank,
    [g1_blocks, g2_blocks]: [u32; 2],
    movers: &Arc<dyn Movers>,
    there: Option<&Arc<SharedStorage>>,
) -> Result<(RankG1, Vec<BoundLayout>), WorkerError> {
    let wrong = |source| WorkerError::Storage { tier: Tier::G2, source };
    let slot = shared_slot_bytes(config, rank)?;
    let ring = ring_slots(config, rank)?;
    let row = RankRow::of(config, rank);
    let all = host_layouts(config, rank, row.all_slots(g2_blocks, ring))?;
    let bytes = all.iter().map(|layout| layout.total_bytes()).max().unwrap_or(0);
    let huge_pages = if config.host.huge_pages { HugePages::Try } else { HugePages::No };
    let memory = match there {
        Some(memory) if memory.region().len() == bytes => Arc::clone(memory),
        Some(memory) => {
            let (found, needed) = (memory.region().len(), bytes);
            return Err(WorkerError::KeptHost { rank, found, needed });
        }
        None => {
            let node = config.node.numa_nodes.of(usize::from(rank.0));
            let memory = SharedStorage::create(bytes, huge_pages, node).map_err(wrong)?;
            log_placement(rank, node, memory.placement());
            Arc::new(memory)
        }
    };
    let bind = |layouts: GroupLayouts, first: u32| -> Result<Vec<BoundLayout>, WorkerError> {
        let bound = layouts.into_iter().map(|layout| {
            let storage = Arc::clone(&memory) as Arc<dyn Storage>;
            let binding = RegionBinding { storage, offset: u64::from(first) * slot };
            BoundLayout::bind(layout, vec![binding]).map_err(wrong)
        });
        bound.collect()
    };
    let g2 = bind(host_layouts(config, rank, g2_blocks.max(1))?, 0)?;
    let ring_at = |first: u32| {
        let slots = bind(host_layouts(config, rank, ring)?, first)?;
        Ok::<_, WorkerError>(MoverRing { slots, first })
    };
    let first = row.first_ring(g2_blocks, ring);
    let rings = [ring_at(first)?, ring_at(first + ring)?];
    let tier = MoverTier { blocks: g1_blocks, movers: Arc::clone(movers), rings };
    let shared = SharedHost { slots: bind(all, 0)?, memory };
    Ok((RankG1::Elsewhere(tier, shared), g2))
}

/// Whether the memory is on the wanted NUMA node.
fn log_placement(rank: Rank, wanted: Option<u32>, placement: &NumaPlacement) {
    let Some(wanted) = wanted else { return };
    match placement {
        NumaPlacement::Preferred(node) => {
            tracing::info!(target: "kvbm", %rank, node, "host memory lies on this NUMA node");
        }
        NumaPlacement::Anywhere => tracing::warn!(
            target: "kvbm", %rank, wanted,
            "node.numa_nodes does nothing: the machine has one NUMA node, or none of that number with memory"
        ),
        NumaPlacement::Refused { reason, .. } => tracing::warn!(
            target: "kvbm", %rank, wanted, reason, "host memory is not on its NUMA node: the system refuses"
        ),
    }
}

/// Bytes of a slot of the memory that a rank shares: of G2, and of its rings. Both begin at a page,
/// and blocks of the disk have the order of G2.
fn shared_slot_bytes(config: &Config, rank: Rank) -> Result<u64, WorkerError> {
    let one = host_layouts(config, rank, 1)?;
    Ok(one.iter().map(|layout| layout.total_bytes()).max().unwrap_or(1))
}

/// Slots of each of its two staging rings.
fn ring_slots(config: &Config, rank: Rank) -> Result<u32, WorkerError> {
    let slot = shared_slot_bytes(config, rank)?.max(1);
    let slots = u32::try_from(config.transfer.staging.get() / slot).unwrap_or(u32::MAX);
    Ok(slots.clamp(2, MAX_RING_BLOCKS))
}

/// The ranks whose memory is one piece, because they hold the same bytes: G2, then two staging
/// rings for each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RankRow {
    /// The rank's place among them.
    place: u32,
    ranks: u32,
}

impl RankRow {
    fn of(config: &Config, rank: Rank) -> Self {
        let writer = config.host_writer_of(rank);
        // Ranks with the same bytes follow each other.
        let ranks = config.ranks().filter(|other| config.host_writer_of(*other) == writer).count();
        Self { place: u32::from(rank.0.saturating_sub(writer.0)), ranks: (ranks as u32).max(1) }
    }

    /// Slots of G2 and of all rings.
    fn all_slots(self, g2_blocks: u32, ring: u32) -> u32 {
        g2_blocks.saturating_add(2 * ring * self.ranks)
    }

    /// The first slot of the rank's first ring.
    fn first_ring(self, g2_blocks: u32, ring: u32) -> u32 {
        g2_blocks + 2 * ring * self.place
    }
}

/// Memory of a rank. It outlives the leaders that the rank's worker serves.
#[derive(Clone)]
pub(super) struct RankMemory {
    pub(super) g1: RankG1,
    /// By cache group, all in the same memory; empty where there is no G2.
    pub(super) g2: Vec<BoundLayout>,
    /// What is in G2 at the start.
    pub(super) kept: Vec<HostContent>,
    /// Touches G2 while this is there.
    _population: Option<Arc<Population>>,
}

impl RankMemory {
    /// Memory of so many blocks on G1, where that is ours, and on G2. G2 of a rank whose blocks
    /// another rank of this process writes is memory of that `writer`.
    pub(super) fn new(
        config: &Config,
        rank: Rank,
        memory: &G1Memory,
        blocks: [u32; 2],
        writer: Option<&Self>,
    ) -> Result<Self, WorkerError> {
        let (g1, g2) = memory.resolve(config, rank, blocks, writer)?;
        let population = match (&g1, g2.first()) {
            _ if !config.host.populate || writer.is_some() => None,
            (RankG1::Elsewhere(_, shared), _) => populate_shared(shared, rank),
            (RankG1::Here(..), Some(g2)) => populate(host_memory_of(g2), rank, false, || ()),
            (RankG1::Here(..), None) => None,
        };
        // The writer knows what is in the memory of both.
        let kept = if writer.is_none() { memory.kept().to_vec() } else { Vec::new() };
        Ok(Self { g1, g2, kept, _population: population })
    }

    /// For volumes that the leader registers. Without G2, only where some are configured: each path
    /// to them takes a staging ring.
    pub(super) fn volumes(
        &self,
        config: &Config,
        tag: NamespaceTag,
    ) -> Result<Option<Arc<VolumeRegistry>>, WorkerError> {
        let has_paths = !self.g2.is_empty() || !config.volume.is_empty();
        let registry = has_paths.then(|| volume_registry(config));
        let ours = registry.map(|registry| for_deployment(config, registry, tag)).transpose()?;
        Ok(ours.map(Arc::new))
    }

    /// How blocks of each cache group lie in G2, or would if there were one: so they lie on G3.
    pub(super) fn host_shapes(&self, config: &Config, rank: Rank) -> Result<GroupLayouts, WorkerError> {
        if self.g2.is_empty() {
            return host_layouts(config, rank, 1);
        }
        Ok(self.g2.iter().map(|bound| Arc::clone(bound.layout())).collect())
    }

    /// G1 in this process, by cache group; empty where it is memory of other processes.
    pub(super) fn g1_here(&self) -> &[BoundLayout] {
        match &self.g1 {
            RankG1::Here(_, groups) => groups,
            RankG1::Elsewhere(..) => &[],
        }
    }

    /// Memory of the cache groups beside the first one.
    pub(super) fn other_groups(&self) -> Vec<GroupMemory> {
        let (g1, g2) = (self.g1_here(), &self.g2);
        let group = |at: usize| GroupMemory { g1: g1.get(at).cloned(), g2: g2.get(at).cloned() };
        (1..g1.len().max(g2.len())).map(group).collect()
    }
}

fn device(config: &config::DeviceConfig, rank: Rank, bytes: u64) -> Result<Arc<dyn Device>, WorkerError> {
    match config.kind {
        DeviceKind::Emulated => emulated_device(config, rank, bytes),
        DeviceKind::Cuda => {
            let ordinal = DeviceId(config.ordinal.saturating_add(u32::from(rank.0)));
            let opened = CudaDriver::open().and_then(|driver| CudaDevice::open(&driver, ordinal));
            Ok(Arc::new(opened.map_err(|source| WorkerError::Cuda { rank, source })?))
        }
    }
}

fn emulated_device(
    config: &config::DeviceConfig,
    rank: Rank,
    bytes: u64,
) -> Result<Arc<dyn Device>, WorkerError> {
    let model = match config.bandwidth_model {
        BandwidthModel::Unlimited => TransferModel::unlimited(),
        BandwidthModel::Reference => TransferModel::reference(),
    };
    let defaults = EmulatedConfig::default();
    // Room for the pool, rounding of its regions, and as much again for other work on the device.
    let memory_bytes = bytes.saturating_mul(2).max(defaults.memory_bytes);
    let emulated = EmulatedConfig { id: DeviceId(u32::from(rank.0)), model, memory_bytes, ..defaults };
    let device = EmulatedDevice::new(emulated).map_err(|source| WorkerError::Device { rank, source })?;
    Ok(Arc::new(device))
}

/// The shape of `rank`'s slice of a block of `group`.
fn rank_layout_config(
    config: &Config,
    group: GroupId,
    rank: Rank,
    num_blocks: u32,
    alignment: u64,
    tier: Tier,
) -> Result<LayoutConfig, WorkerError> {
    let model = &config.model;
    let invalid = |error: ConfigError| WorkerError::Layout { tier, source: error.into() };
    if model.is_opaque() {
        let tensors = model.opaque_tensors.as_slice();
        return OpaqueLayout::config_of(num_blocks, tensors, alignment).map_err(invalid);
    }
    let ranks = config.parallelism.tensor_parallel;
    let group = model.cache_group(group);
    let shape = LayoutConfig::builder()
        .num_blocks(num_blocks)
        .num_layers(group.layers)
        .page_size(model.page_size)
        .alignment(alignment);
    let shape = match group.content {
        LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } => {
            let heads = slice_for_rank(num_kv_heads, ranks, u32::from(rank.0))?.heads.len() as u32;
            let shape = shape
                .outer_dim(outer_dim)
                .inner_dim(heads.saturating_mul(head_dim))
                .num_heads(heads)
                .dtype(dtype.unwrap_or(model.dtype));
            match group.scales {
                None => shape,
                Some(scales) => {
                    let bytes = scales.layer_bytes(model.page_size, heads, outer_dim);
                    shape.plane(OpaquePlane::new("scales", bytes))
                }
            }
        }
        LayerContent::State { .. } => {
            let state = OpaquePlane::new("state", group.rank_state_bytes(ranks));
            shape.outer_dim(0).inner_dim(1).dtype(DType::U8).plane(state)
        }
        LayerContent::Opaque { rank_bytes } => {
            let tensors = vec![rank_bytes; group.layers as usize];
            return OpaqueLayout::config_of(num_blocks, &tensors, alignment).map_err(invalid);
        }
    };
    shape.build().map_err(invalid)
}

/// A layout of whole blocks in slots that hold blocks of every group.
fn contiguous(
    config: &Config,
    shape: LayoutConfig,
    order: AxisOrder,
    tier: Tier,
) -> Result<FullyContiguous, WorkerError> {
    let layout = FullyContiguous::in_slots(shape, order, config.slot_bytes(tier));
    layout.map_err(|source| WorkerError::Layout { tier, source })
}

fn device_layout(
    config: &Config,
    group: GroupId,
    rank: Rank,
    blocks: u32,
) -> Result<Arc<dyn BlockLayout>, WorkerError> {
    let shape = rank_layout_config(config, group, rank, blocks, 1, Tier::G1)?;
    let order = match config.device.order {
        DeviceOrder::Nhd => AxisOrder::Nhd,
        DeviceOrder::Hnd => AxisOrder::Hnd,
    };
    let layout = |source| WorkerError::Layout { tier: Tier::G1, source };
    Ok(match config.device.layout {
        LayoutKind::LayerSeparate => {
            let placement = OuterPlacement::KvOuter;
            Arc::new(LayerSeparate::new(shape, order, placement).map_err(layout)?)
        }
        LayoutKind::FullyContiguous => Arc::new(contiguous(config, shape, order, Tier::G1)?),
    })
}

/// How blocks of `group` lie in G2 of a rank.
pub(super) fn host_layout(
    config: &Config,
    group: GroupId,
    rank: Rank,
    blocks: u32,
) -> Result<FullyContiguous, WorkerError> {
    let shape = rank_layout_config(config, group, rank, blocks, config::PAGE, Tier::G2)?;
    let order = match config.host.order {
        HostOrder::Nhd => AxisOrder::Nhd,
        HostOrder::Universal => AxisOrder::Universal,
    };
    contiguous(config, shape, order, Tier::G2)
}

/// The same of every cache group.
fn host_layouts(config: &Config, rank: Rank, blocks: u32) -> Result<GroupLayouts, WorkerError> {
    let layout = |group| -> Result<Arc<dyn BlockLayout>, WorkerError> {
        Ok(Arc::new(host_layout(config, group, rank, blocks)?))
    };
    config.group_ids().map(layout).collect()
}

/// G2 of a rank, by cache group. Pages are locked through the device of G1.
fn host_memory(
    config: &Config,
    device: Option<&Arc<dyn Device>>,
    rank: Rank,
    blocks: u32,
) -> Result<Vec<BoundLayout>, WorkerError> {
    let layouts = host_layouts(config, rank, blocks)?;
    let huge_pages = if config.host.huge_pages { HugePages::Try } else { HugePages::No };
    let device = device.filter(|_| config.host.pinned);
    let bound = if let Some(device) = device.map(Arc::clone) {
        let fallback = PinFallback::Unpinned;
        let allocator = PinnedAllocator { device, huge_pages, fallback, progress: log_pinned };
        in_one_memory(layouts, Tier::G2, &allocator)?
    } else {
        in_one_memory(layouts, Tier::G2, &SystemAllocator { huge_pages })?
    };
    if device.is_some() && bound[0].kind() != StorageKind::Pinned {
        tracing::warn!(
            target: "kvbm", %rank,
            "host memory could not be locked: copies to the device are slower; raise the memlock limit"
        );
    }
    Ok(bound)
}

fn host_memory_of(g2: &BoundLayout) -> Vec<HostRegion> {
    let host = |memory: &RegionBytes| match memory {
        RegionBytes::Host(region) => Some(region.clone()),
        _ => None,
    };
    g2.memory().iter().filter_map(host).collect()
}

/// Touches memory that other processes map, in the background. They may, too, when it is done.
fn populate_shared(shared: &SharedHost, rank: Rank) -> Option<Arc<Population>> {
    let memory = Arc::clone(&shared.memory);
    let merges = matches!(memory.pages(), PageSize::Transparent { .. });
    populate(vec![memory.region().clone()], rank, merges, move || memory.set_populated())
}

/// Touches host memory in the background. `complete` is called when all of it is there.
fn populate(
    regions: Vec<HostRegion>,
    rank: Rank,
    merges: bool,
    complete: impl FnOnce() + Send + 'static,
) -> Option<Arc<Population>> {
    let ended = move |end| match end {
        PopulationEnd::Complete { merged } => {
            tracing::debug!(target: "kvbm", %rank, huge_pages = merged, "host memory is populated");
            complete();
        }
        PopulationEnd::Stopped => {}
        PopulationEnd::Low { done, available } => tracing::warn!(
            target: "kvbm", %rank, populated = done, available,
            "this machine has little memory left: the rest of host memory is provided when it is used; \
             set a smaller host.capacity"
        ),
        PopulationEnd::Refused { done, error } => tracing::info!(
            target: "kvbm", %rank, populated = done, %error,
            "the system does not populate host memory: pages are provided when they are used"
        ),
    };
    let started = Population::start(regions, merges, ended);
    started
        .inspect_err(|error| {
            tracing::warn!(target: "kvbm", %rank, %error, "host memory is not populated ahead of its use");
        })
        .ok()
        .map(Arc::new)
}

/// Page-locking gigabytes takes seconds: the log shows each tenth that is done.
fn log_pinned(done: u64, total: u64) {
    const STEP: u64 = 256 << 20;
    if done == total || done % (total / 10).max(STEP) < STEP {
        tracing::info!(target: "kvbm", done, total, "host memory is being page-locked");
    }
}
