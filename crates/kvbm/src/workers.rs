//! The workers of this process: one per rank, with the memory they move bytes in.

use crate::config::{
    self, BandwidthModel, Config, CopyWay, DeviceKind, DeviceOrder, HostOrder, LayoutKind, VerifyHost,
};
use crate::volume::local::volume_tier;
use crate::worker::{LinkError, MessageSink, WorkerLink};
use kvbm_device::{
    CudaDevice, CudaDriver, CudaUnavailable, Device, DeviceError, DeviceId, EmulatedConfig, EmulatedDevice,
    Event, TransferModel,
};
use kvbm_disk::{DiskEngine, EngineMode, GroupCommit, OpenError};
use kvbm_layout::{
    AxisOrder, BlockLayout, FullyContiguous, LayerSeparate, LayoutConfig, LayoutError, OuterPlacement,
    SliceError, slice_for_rank,
};
use kvbm_plan::{Epoch, Rank, Tier};
use kvbm_storage::{
    BoundLayout, DeviceAllocator, HugePages, PinFallback, PinnedAllocator, StorageError, StorageKind,
    SystemAllocator,
};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{Backend, DiskTier, PathConfig, PathConfigs, TransferManager, WorkerConfig, disk_layout};
use kvbm_volume::VolumeRegistry;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Bytes that one call of a volume moves, roughly.
const CALL_BYTES: u64 = 8 << 20;

/// The workers of this process, by rank; none where workers run elsewhere or only metadata is moved.
#[derive(Default)]
pub struct Workers {
    local: Vec<LocalWorker>,
    volumes: Option<Arc<VolumeRegistry>>,
}

/// A rank of this process.
pub struct LocalWorker {
    rank: Rank,
    device: Arc<dyn Device>,
    g1: BoundLayout,
    g2: Option<BoundLayout>,
    g3: Option<Arc<DiskEngine>>,
    manager: Option<Arc<TransferManager>>,
}

/// A worker that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The heads cannot be divided among the ranks.
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// The model's shape gives no layout.
    #[error("layout of {tier}: {source}")]
    Layout {
        /// The tier.
        tier: Tier,
        /// What is wrong.
        #[source]
        source: LayoutError,
    },
    /// No memory.
    #[error("memory of {tier}: {source}")]
    Storage {
        /// The tier.
        tier: Tier,
        /// What the system said.
        #[source]
        source: StorageError,
    },
    /// No device.
    #[error("device of rank {rank}: {source}")]
    Device {
        /// The rank.
        rank: Rank,
        /// What the device said.
        #[source]
        source: DeviceError,
    },
    /// No CUDA device.
    #[error("device.kind = \"cuda\", rank {rank}: {source}")]
    Cuda {
        /// The rank.
        rank: Rank,
        /// What is missing.
        #[source]
        source: CudaUnavailable,
    },
    /// The directory of G3 cannot be opened.
    #[error("G3 in {}: {source}", dir.display())]
    Disk {
        /// The directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// The volume cannot be opened.
    #[error(transparent)]
    Volume(#[from] kvbm_volume::RegistryError),
    /// The transfer engine does not start.
    #[error(transparent)]
    Start(#[from] kvbm_transfer::StartError),
}

impl Workers {
    /// All workers, rank by rank.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &LocalWorker> {
        self.local.iter()
    }

    /// The volumes of G4, where one is configured.
    pub fn volumes(&self) -> Option<&VolumeRegistry> {
        self.volumes.as_deref()
    }

    /// The worker of `rank`, if it runs in this process.
    pub fn get(&self, rank: Rank) -> Option<&LocalWorker> {
        self.local.get(rank.index())
    }

    /// Makes an event of every rank's device known under `number`.
    pub(crate) fn register_events(&self, number: u64, events: &[Event]) {
        for (worker, event) in self.local.iter().zip(events) {
            if let Some(manager) = &worker.manager {
                manager.register_event(number, event);
            }
        }
    }

    /// One link per rank. Links do not keep a worker alive: the manager does.
    pub(crate) fn links(&self) -> Vec<Box<dyn WorkerLink>> {
        let link = |worker: &LocalWorker| -> Box<dyn WorkerLink> {
            Box::new(LocalLink(worker.manager.as_ref().map_or_else(Weak::new, Arc::downgrade)))
        };
        self.local.iter().map(link).collect()
    }

    /// Starts every rank.
    pub(crate) fn start(
        config: &Config,
        memory: &DeviceMemoryOf<'_>,
        blocks: [u32; 3],
        volumes: Option<Arc<VolumeRegistry>>,
        tag: NamespaceTag,
        epoch: Epoch,
        sink: &dyn Fn(Rank) -> MessageSink,
    ) -> Result<Self, WorkerError> {
        let ranks = (0..config.parallelism.tensor_parallel as u16).map(Rank);
        let start =
            |rank| LocalWorker::start(config, memory, blocks, volumes.as_ref(), tag, epoch, rank, sink(rank));
        let local = ranks.map(start).collect::<Result<_, _>>()?;
        Ok(Self { local, volumes })
    }
}

/// Where G1 lies.
pub(crate) enum DeviceMemoryOf<'a> {
    /// A pool of ours, on a device that the configuration names.
    Owned,
    /// The engine's, rank by rank.
    Engine(&'a [(Arc<dyn Device>, BoundLayout)]),
}

impl LocalWorker {
    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Its device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// G1, bound to its memory: where block ids are addresses.
    pub fn g1(&self) -> &BoundLayout {
        &self.g1
    }

    /// G2, bound to its memory.
    pub fn g2(&self) -> Option<&BoundLayout> {
        self.g2.as_ref()
    }

    /// The engine of G3.
    pub fn g3(&self) -> Option<&Arc<DiskEngine>> {
        self.g3.as_ref()
    }

    #[expect(clippy::too_many_arguments, reason = "all of it is needed to start one rank")]
    fn start(
        config: &Config,
        memory: &DeviceMemoryOf<'_>,
        blocks: [u32; 3],
        volumes: Option<&Arc<VolumeRegistry>>,
        tag: NamespaceTag,
        epoch: Epoch,
        rank: Rank,
        sink: MessageSink,
    ) -> Result<Self, WorkerError> {
        let [g1_blocks, g2_blocks, g3_blocks] = blocks;
        let (device, g1) = match memory {
            DeviceMemoryOf::Owned => {
                let g1 = device_layout(config, rank, g1_blocks)?;
                let bytes = g1.regions().iter().map(|region| region.bytes).sum();
                let device = device(&config.device, rank, bytes)?;
                let bound = BoundLayout::allocate(g1, &DeviceAllocator::new(Arc::clone(&device)));
                (device, bound.map_err(|source| WorkerError::Storage { tier: Tier::G1, source })?)
            }
            DeviceMemoryOf::Engine(ranks) => {
                let (device, bound) = &ranks[rank.index()];
                (Arc::clone(device), bound.clone())
            }
        };
        let mut worker_config = WorkerConfig::new(rank, epoch, *tag.as_bytes());
        worker_config.device = Some(Arc::clone(&device));
        worker_config.g1 = Some(g1.clone());
        worker_config.paths = paths(config);
        worker_config.copies = match config.transfer.copies {
            CopyWay::Auto => Backend::Auto,
            CopyWay::Kernel => Backend::Kernel,
            CopyWay::Batch => Backend::Batch,
            CopyWay::Async => Backend::Async,
        };
        worker_config.staging_blocks = config.transfer.staging_blocks;
        worker_config.flush_deadline = config.disk.flush_deadline;
        worker_config.scrub_bytes_per_s = config.disk.scrub.get();
        worker_config.verify_host = match config.transfer.verify_host {
            VerifyHost::Never => kvbm_transfer::VerifyHost::Never,
            VerifyHost::Sampled => kvbm_transfer::VerifyHost::default(),
            VerifyHost::Always => kvbm_transfer::VerifyHost::Always,
        };
        let (mut g2, mut g3) = (None, None);
        if g2_blocks > 0 {
            g2 = Some(host_memory(config, &device, rank, g2_blocks)?);
            worker_config.g2.clone_from(&g2);
        }
        if let (Some(host), Some(dir), true) = (&g2, &config.disk.dir, g3_blocks > 0) {
            let tier = open_disk(config, dir, host, g3_blocks, tag, rank)?;
            g3 = Some(Arc::clone(&tier.engine));
            worker_config.g3 = Some(tier);
        }
        worker_config.volumes = volumes.map(|registry| volume_tier(config, registry, rank)).transpose()?;
        let manager = TransferManager::start(worker_config, sink)?;
        Ok(Self { rank, device, g1, g2, g3, manager: Some(Arc::new(manager)) })
    }
}

impl Drop for LocalWorker {
    fn drop(&mut self) {
        // Whoever holds the last reference stops the threads; a link holds one only while it sends.
        let Some(mut manager) = self.manager.take() else { return };
        let patience = Instant::now() + Duration::from_secs(5);
        loop {
            match Arc::try_unwrap(manager) {
                Ok(manager) => {
                    if let Err(error) = manager.shutdown(patience) {
                        tracing::warn!(rank = %self.rank, %error, "worker stopped with transfers under way");
                    }
                    return;
                }
                Err(shared) if Instant::now() < patience => {
                    manager = shared;
                    std::thread::yield_now();
                }
                Err(_) => return,
            }
        }
    }
}

struct LocalLink(Weak<TransferManager>);

impl WorkerLink for LocalLink {
    fn send(&self, command: &[u8]) -> Result<(), LinkError> {
        let manager = self.0.upgrade().ok_or(LinkError::Closed)?;
        manager.submit(command).map_err(|error| LinkError::Refused(error.to_string()))
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
    // Room for the pool, rounding of its regions, and as much again for whoever computes beside it.
    let memory_bytes = bytes.saturating_mul(2).max(defaults.memory_bytes);
    let emulated = EmulatedConfig { id: DeviceId(u32::from(rank.0)), model, memory_bytes, ..defaults };
    let device = EmulatedDevice::new(emulated).map_err(|source| WorkerError::Device { rank, source })?;
    Ok(Arc::new(device))
}

/// The shape of `rank`'s slice of a block.
pub(crate) fn rank_layout_config(
    config: &Config,
    rank: Rank,
    num_blocks: u32,
    alignment: u64,
    tier: Tier,
) -> Result<LayoutConfig, WorkerError> {
    let model = &config.model;
    let slice = slice_for_rank(model.num_kv_heads, config.parallelism.tensor_parallel, u32::from(rank.0))?;
    let heads = slice.heads.len() as u32;
    LayoutConfig::builder()
        .num_blocks(num_blocks)
        .num_layers(model.num_layers)
        .outer_dim(model.outer_dim)
        .page_size(model.page_size)
        .inner_dim(heads.saturating_mul(model.head_dim))
        .num_heads(heads)
        .dtype(model.dtype)
        .alignment(alignment)
        .build()
        .map_err(|error| WorkerError::Layout { tier, source: error.into() })
}

fn device_layout(config: &Config, rank: Rank, blocks: u32) -> Result<Arc<dyn BlockLayout>, WorkerError> {
    let shape = rank_layout_config(config, rank, blocks, 1, Tier::G1)?;
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
        LayoutKind::FullyContiguous => Arc::new(FullyContiguous::new(shape, order).map_err(layout)?),
    })
}

fn host_memory(
    config: &Config,
    device: &Arc<dyn Device>,
    rank: Rank,
    blocks: u32,
) -> Result<BoundLayout, WorkerError> {
    let shape = rank_layout_config(config, rank, blocks, config::PAGE, Tier::G2)?;
    let order = match config.host.order {
        HostOrder::Nhd => AxisOrder::Nhd,
        HostOrder::Universal => AxisOrder::Universal,
    };
    let layout = FullyContiguous::new(shape, order)
        .map_err(|source| WorkerError::Layout { tier: Tier::G2, source })?;
    let huge_pages = if config.host.huge_pages { HugePages::Try } else { HugePages::No };
    let bound = if config.host.pinned {
        let device = Arc::clone(device);
        let fallback = PinFallback::Unpinned;
        let allocator = PinnedAllocator { device, huge_pages, fallback, progress: tell_pinned };
        BoundLayout::allocate(Arc::new(layout), &allocator)
    } else {
        BoundLayout::allocate(Arc::new(layout), &SystemAllocator { huge_pages })
    };
    let bound = bound.map_err(|source| WorkerError::Storage { tier: Tier::G2, source })?;
    if config.host.pinned && bound.kind() != StorageKind::Pinned {
        tracing::warn!(
            target: "kvbm", %rank,
            "host memory could not be locked: copies to the device are slower; raise the memlock limit"
        );
    }
    Ok(bound)
}

/// Page-locking gigabytes takes seconds: whoever waits is told about every tenth.
fn tell_pinned(done: u64, total: u64) {
    const STEP: u64 = 256 << 20;
    if done == total || done % (total / 10).max(STEP) < STEP {
        tracing::info!(target: "kvbm", done, total, "host memory is being page-locked");
    }
}

fn open_disk(
    config: &Config,
    dir: &std::path::Path,
    host: &BoundLayout,
    blocks: u32,
    tag: NamespaceTag,
    rank: Rank,
) -> Result<DiskTier, WorkerError> {
    let layout = disk_layout(&**host.layout(), blocks)
        .map_err(|source| WorkerError::Layout { tier: Tier::G3, source })?;
    let dir = rank_dir(dir, tag, rank, config.parallelism.tensor_parallel);
    let mut disk =
        kvbm_disk::DiskConfig::new(&dir, blocks, layout.config().bytes_per_block(), *tag.as_bytes());
    disk.geometry = geometry(config, &layout, rank)?;
    let settings = &config.disk;
    disk.engine = match settings.engine {
        config::DiskEngine::Auto => EngineMode::Auto,
        config::DiskEngine::IoUring => EngineMode::IoUring,
        config::DiskEngine::Threads => EngineMode::Threads,
        config::DiskEngine::Buffered => EngineMode::Buffered,
    };
    disk.depth = settings.depth as usize;
    disk.threads = settings.threads as usize;
    disk.queue_depth = settings.queue_depth as usize;
    disk.commit = GroupCommit { interval: settings.commit_interval, ..GroupCommit::default() };
    let (engine, recovered) = DiskEngine::open(disk).map_err(|source| WorkerError::Disk { dir, source })?;
    Ok(DiskTier { engine: Arc::new(engine), recovered })
}

/// Where a rank keeps its blocks in `dir`. Namespaces, and deployments of another number of ranks, lie side by side: none is
/// served to another one, and none is damaged by it.
fn rank_dir(dir: &std::path::Path, tag: NamespaceTag, rank: Rank, ranks: u32) -> PathBuf {
    // The first eight of the tag's sixteen bytes: the high half of the number that they are in big-endian order.
    let namespace = u128::from_be_bytes(*tag.as_bytes()) >> 64;
    dir.join(format!("ns-{namespace:016x}")).join(format!("rank-{rank}-of-{ranks}"))
}

/// What tells one slot's content from that of another shape, in the words of `docs/formats.md`: everything but the number of
/// blocks, which may change. Which layers and heads of the model a rank holds belongs to it, so that ranks of another
/// deployment can tell which part of a block they read.
fn geometry(config: &Config, layout: &FullyContiguous, rank: Rank) -> Result<Vec<u8>, WorkerError> {
    let (total, ranks) = (config.model.num_kv_heads, config.parallelism.tensor_parallel);
    let heads = slice_for_rank(total, ranks, u32::from(rank.0))?.heads;
    let shape = layout.config();
    let text = format!(
        "model={}; rank={rank}/{ranks}; order={}; layers=0..{layers}/{layers}; outer={}; tokens={}; heads={}..{}/{total}; \
         head_dim={}; dtype={}; pieces=1",
        // The id is for people: the tag tells namespaces apart. What would end the field, or the header, is left out.
        config.namespace.model.chars().filter(|c| *c != ';' && !c.is_control()).take(128).collect::<String>(),
        layout.axis_order(),
        shape.outer_dim,
        shape.page_size,
        heads.start,
        heads.end,
        config.model.head_dim,
        shape.dtype,
        layers = shape.num_layers,
    );
    Ok(text.into_bytes())
}

fn paths(config: &Config) -> PathConfigs {
    let Config { transfer, disk, volume, .. } = config;
    let memory = PathConfig {
        queue_plans: transfer.queue_depth as usize,
        threads: transfer.threads as usize,
        ..PathConfig::MEMORY
    };
    // The engine has threads of its own: one executor keeps them busy, with as much waiting as is at the device.
    let depth_blocks = (2 * disk.depth.max(disk.threads) as usize).max(PathConfig::default().batch_blocks);
    let disk = PathConfig { threads: 1, depth_blocks, ..memory };
    // As many calls as there are threads, each of so many blocks that they fit into a few megabytes.
    let batch_blocks = (CALL_BYTES / config.rank_block_bytes().max(1)).clamp(1, 16) as usize;
    let depth_blocks = 2 * batch_blocks * volume.threads as usize;
    let volume = PathConfig { threads: 1, depth_blocks, batch_blocks, ..memory };
    PathConfigs {
        g1_g2: memory,
        g2_g1: memory,
        g2_g3: disk,
        g3_g2: disk,
        g3_g1: disk,
        g2_g4: volume,
        g4_g1: volume,
    }
}
