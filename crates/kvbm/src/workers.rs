//! The workers of this process: one per rank, with the memory they move bytes in.

mod disk;
mod memory;
mod predecessor;
mod volumes;

pub use memory::G1Memory;
use memory::host_memory;
pub use predecessor::TookOver;
pub(crate) use volumes::open_volumes;
use volumes::volume_tier;

use crate::config::{Config, CopyWay, VerifyHost};
use crate::metrics::Metrics;
use crate::transfers::plans::{MAX_PLAN_BLOCKS, max_read_blocks};
use crate::worker::{LinkError, MessageSink, WorkerLink};
use disk::open_disk;
use kvbm_device::{CudaUnavailable, Device, DeviceError, Event};
use kvbm_disk::{DiskEngine, EngineInfo, OpenError};
use kvbm_layout::{LayoutError, SliceError};
use kvbm_plan::{Epoch, Rank, Tier};
use kvbm_storage::{BoundLayout, StorageError, StorageKind};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{Backend, PathConfig, PathConfigs, TransferManager, WorkerConfig};
use kvbm_volume::VolumeRegistry;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Bytes that one call of a volume moves, roughly.
const CALL_BYTES: u64 = 8 << 20;

/// The workers of this process, by rank; none where workers run elsewhere or only metadata is
/// moved.
#[derive(Default)]
pub struct Workers {
    local: Vec<LocalWorker>,
    volumes: Option<Arc<VolumeRegistry>>,
    took_over: Vec<TookOver>,
}

/// A rank of this process.
pub struct LocalWorker {
    rank: Rank,
    device: Option<Arc<dyn Device>>,
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
    /// Memory of a device where host memory was promised.
    #[error(
        "engine_host, rank {rank}: its tensors lie in {kind} memory; give those of a device, with the device, to engine_device"
    )]
    NotHostMemory {
        /// The rank.
        rank: Rank,
        /// Where its tensors lie.
        kind: StorageKind,
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

    /// What became, at the start, of blocks that deployments with another number of ranks had left
    /// on disk; empty where there were none, or where our own folders were not new.
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

    /// Starts every rank. `memory` has one entry for each.
    pub(crate) fn start(
        config: &Config,
        memory: &[G1Memory],
        blocks: [u32; 3],
        volumes: Option<Arc<VolumeRegistry>>,
        tag: NamespaceTag,
        epoch: Epoch,
        sink: &dyn Fn(Rank) -> MessageSink,
    ) -> Result<Self, WorkerError> {
        let ranks = (0..config.parallelism.tensor_parallel as u16).map(Rank).zip(memory);
        let (mut past, mut took_over) = predecessor::find(config, blocks[Tier::G3.index()], tag);
        let start = |(rank, memory)| {
            let (volumes, past) = (volumes.as_ref(), past.as_mut());
            LocalWorker::start(config, memory, blocks, volumes, tag, epoch, rank, past, sink(rank))
        };
        let local = ranks.map(start).collect::<Result<_, _>>()?;
        took_over.extend(past.map(predecessor::Past::end));
        Ok(Self { local, volumes, took_over })
    }
}

impl LocalWorker {
    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The device that G1 lies on; none where the engine's G1 is host memory
    /// ([`Builder::engine_host`](crate::Builder::engine_host)).
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// G1, bound to its memory: where block ids are addresses.
    pub fn g1(&self) -> &BoundLayout {
        &self.g1
    }

    /// G2, bound to its memory. Transfers use it, and bytes of registered blocks never change: who
    /// reads or writes a block here has to prove that no transfer does.
    ///
    /// ```compile_fail,E0133
    /// # fn overwrite(worker: &kvbm::LocalWorker) {
    /// worker.g2().unwrap().write_block(0, &[]).unwrap();
    /// # }
    /// ```
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
        memory: &G1Memory,
        blocks: [u32; 3],
        volumes: Option<&Arc<VolumeRegistry>>,
        tag: NamespaceTag,
        epoch: Epoch,
        rank: Rank,
        past: Option<&mut predecessor::Past>,
        sink: MessageSink,
    ) -> Result<Self, WorkerError> {
        let [g1_blocks, g2_blocks, g3_blocks] = blocks;
        let (device, g1) = memory.resolve(config, rank, g1_blocks)?;
        let mut worker_config = WorkerConfig::new(rank, epoch, *tag.as_bytes());
        worker_config.device.clone_from(&device);
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
            g2 = Some(host_memory(config, device.as_ref(), rank, g2_blocks)?);
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

fn paths(config: &Config) -> PathConfigs {
    let Config { transfer, disk, volumes, .. } = config;
    let memory = PathConfig {
        queue_plans: transfer.queue_depth as usize,
        threads: transfer.threads as usize,
        ..PathConfig::MEMORY
    };
    // The engine has threads of its own: one executor keeps them busy, with as much waiting as is
    // at the device.
    let depth_blocks = (2 * disk.depth.max(disk.threads) as usize).max(PathConfig::DISK.depth_blocks);
    let disk = PathConfig { queue_plans: memory.queue_plans, depth_blocks, ..PathConfig::DISK };
    // As many calls as there are threads, each of so many blocks that they fit into a few
    // megabytes.
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
