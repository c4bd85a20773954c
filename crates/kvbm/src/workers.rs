//! The workers of this process: one per rank, with the memory they move bytes in.

mod disk;
mod predecessor;
mod volumes;

pub use predecessor::TookOver;
pub(crate) use volumes::open_volumes;
use volumes::volume_tier;

use crate::config::{
    self, BandwidthModel, Config, CopyWay, DeviceKind, DeviceOrder, HostOrder, LayoutKind, VerifyHost,
};
use crate::metrics::Metrics;
use crate::transfers::plans::{MAX_PLAN_BLOCKS, max_read_blocks};
use crate::worker::{LinkError, MessageSink, WorkerLink};
use disk::open_disk;
use kvbm_device::{
    CudaDevice, CudaDriver, CudaUnavailable, Device, DeviceError, DeviceId, EmulatedConfig, EmulatedDevice,
    Event, TransferModel,
};
use kvbm_disk::{DiskEngine, EngineInfo, OpenError};
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
use kvbm_transfer::{Backend, PathConfig, PathConfigs, TransferManager, WorkerConfig};
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
    took_over: Vec<TookOver>,
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

/// A rank's disk engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskStatus {
    /// The rank.
    pub rank: Rank,
    /// What it holds, who moves its bytes and why, and what each of its directories has failed.
    pub engine: EngineInfo,
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

    /// What became, at the start, of blocks that deployments with another number of ranks had left on disk; empty where there were none,
    /// or where our own folders were not new.
    pub fn took_over(&self) -> &[TookOver] {
        &self.took_over
    }

    /// The volumes of G4, where one is configured.
    pub fn volumes(&self) -> Option<&VolumeRegistry> {
        self.volumes.as_deref()
    }

    /// The worker of `rank`, if it runs in this process.
    pub fn get(&self, rank: Rank) -> Option<&LocalWorker> {
        self.local.get(rank.index())
    }

    /// The disk engine of every rank that has one.
    pub(crate) fn disks(&self) -> impl Iterator<Item = DiskStatus> {
        let disk = |worker: &LocalWorker| Some(DiskStatus { rank: worker.rank, engine: worker.g3()?.info() });
        self.local.iter().filter_map(disk)
    }

    /// What brings the disks' metrics up to date. It keeps no engine open.
    pub(crate) fn disk_refresh(&self, metrics: &Metrics) -> impl Fn() + Send + Sync + use<> {
        let engine = |worker: &LocalWorker| Some((worker.rank, Arc::downgrade(worker.g3.as_ref()?)));
        let engines: Vec<_> = self.local.iter().filter_map(engine).collect();
        let counters = metrics.counters();
        move || {
            for (rank, engine) in &engines {
                let Some(engine) = engine.upgrade() else { continue };
                let (info, stats, disk) = (engine.info(), engine.stats(), counters.disks.rank(*rank));
                for dir in info.dirs {
                    counters.disks.errors(*rank, &dir.location).raise_to(dir.io_errors);
                }
                disk.failed_snapshots.raise_to(stats.failed_snapshots);
                disk.renewed.raise_to(stats.renewed);
                disk.given_up.raise_to(stats.given_up);
                disk.unsynced.set(info.unsynced_blocks);
            }
        }
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
        let (mut past, mut took_over) = predecessor::find(config, blocks[Tier::G3.index()], tag);
        let start = |rank| {
            let (volumes, past) = (volumes.as_ref(), past.as_mut());
            LocalWorker::start(config, memory, blocks, volumes, tag, epoch, rank, past, sink(rank))
        };
        let local = ranks.map(start).collect::<Result<_, _>>()?;
        took_over.extend(past.map(predecessor::Past::end));
        Ok(Self { local, volumes, took_over })
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
        past: Option<&mut predecessor::Past>,
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
        worker_config.staging_bytes = config.transfer.staging.get();
        worker_config.flush_deadline = config.disk.flush_deadline;
        worker_config.scrub_bytes_per_s = config.disk.scrub.get();
        worker_config.verify_host = match config.transfer.verify_host {
            VerifyHost::Never => kvbm_transfer::VerifyHost::Never,
            VerifyHost::Sampled => kvbm_transfer::VerifyHost::Sampled(config.transfer.verify_every),
            VerifyHost::Always => kvbm_transfer::VerifyHost::Always,
        };
        let (mut g2, mut g3) = (None, None);
        if g2_blocks > 0 {
            g2 = Some(host_memory(config, &device, rank, g2_blocks)?);
            worker_config.g2.clone_from(&g2);
        }
        if let (Some(host), Some(_), true) = (&g2, &config.disk.dir, g3_blocks > 0) {
            let tier = open_disk(config, host, g3_blocks, tag, rank, past)?;
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

fn paths(config: &Config) -> PathConfigs {
    let Config { transfer, disk, volumes, .. } = config;
    let memory = PathConfig {
        queue_plans: transfer.queue_depth as usize,
        threads: transfer.threads as usize,
        ..PathConfig::MEMORY
    };
    // The engine has threads of its own: one executor keeps them busy, with as much waiting as is at the device.
    let depth_blocks = (2 * disk.depth.max(disk.threads) as usize).max(PathConfig::DISK.depth_blocks);
    let disk = PathConfig { queue_plans: memory.queue_plans, depth_blocks, ..PathConfig::DISK };
    // As many calls as there are threads, each of so many blocks that they fit into a few megabytes.
    let batch_blocks = (CALL_BYTES / config.rank_block_bytes().max(1)).clamp(1, 16) as usize;
    let depth_blocks = 2 * batch_blocks * volumes.threads as usize;
    let volume = PathConfig { threads: 1, depth_blocks, batch_blocks, ..memory };
    // Plans of reads are small where blocks are large: as many blocks wait as of others.
    let smaller = MAX_PLAN_BLOCKS / max_read_blocks(config.rank_block_bytes());
    let read = |path: PathConfig| PathConfig { queue_plans: path.queue_plans * smaller, ..path };
    PathConfigs {
        g1_g2: memory,
        g2_g1: memory,
        g2_g3: disk,
        g3_g2: read(disk),
        g3_g1: read(disk),
        g2_g4: volume,
        g4_g1: read(volume),
    }
}
