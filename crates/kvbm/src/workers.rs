//! The workers of this process: one per rank, with the memory they move bytes in.

mod disk;
mod disk_agents;
mod memory;
mod object_agents;
mod paths;
mod predecessor;
mod server;
mod volumes;
mod worker;

pub use disk_agents::{NoNixl, nixl_slot_io};
use memory::RankMemory;
pub use memory::{G1Memory, GroupTensors, KeptHost, SharedHost};
pub use object_agents::volume_registry;
pub use predecessor::TookOver;
pub use server::WorkerServer;
pub(crate) use volumes::open_volumes;
pub use worker::Worker;
use worker::WorkerStart;

use crate::config::{Config, ConfigError};
use crate::metrics::Metrics;
use crate::worker::{MessageSink, WorkerLink};
use kvbm_device::{CudaUnavailable, DeviceError, Event};
use kvbm_disk::{EngineInfo, OpenError};
use kvbm_layout::{LayoutError, SliceError};
use kvbm_plan::{Epoch, Rank, Tier};
use kvbm_storage::{StorageError, StorageKind};
use kvbm_tokens::NamespaceTag;
use kvbm_volume::VolumeRegistry;
use std::path::PathBuf;
use std::sync::Arc;

/// The workers of this process, by rank; none where workers run elsewhere or only metadata is
/// moved.
#[derive(Default)]
pub struct Workers {
    local: Vec<Worker>,
    volumes: Option<Arc<VolumeRegistry>>,
    took_over: Vec<TookOver>,
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
#[non_exhaustive]
pub enum WorkerError {
    /// A setting breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no such rank.
    #[error("there is no rank {rank}: the {ranks} ranks of parallelism.tensor_parallel count from 0")]
    NoSuchRank {
        /// Asked for.
        rank: Rank,
        /// Ranks configured.
        ranks: u32,
    },
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
    /// Not one memory for each cache group.
    #[error(
        "engine memory of rank {rank} for {found} cache groups: the model has {needed}, give one for each, in order"
    )]
    Groups {
        /// The rank.
        rank: Rank,
        /// Groups given.
        found: usize,
        /// Groups of the model.
        needed: usize,
    },
    /// Memory of other processes where the worker's own is needed.
    #[error("G1 of rank {rank} is memory of other processes: only a worker in the leader's process takes it")]
    MemoryElsewhere {
        /// The rank.
        rank: Rank,
    },
    /// Kept memory of another size.
    #[error(
        "host memory of rank {rank} that is kept has {found} bytes, the configuration needs {needed}: leave host.capacity, \
         host.one_copy and transfer.staging as they were"
    )]
    KeptHost {
        /// The rank.
        rank: Rank,
        /// Bytes of the memory.
        found: u64,
        /// Bytes needed.
        needed: u64,
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
    /// The operator's key is not to be had.
    #[error(transparent)]
    OperatorKey(#[from] crate::encryption::OperatorKeyError),
    /// The directory of G3 cannot be opened.
    #[error("G3 in {}: {source}", dir.display())]
    Disk {
        /// The directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// NIXL cannot move the bytes of G3.
    #[error(transparent)]
    NoNixl(#[from] NoNixl),
    /// The rank that writes this rank's blocks has not opened its disk.
    #[error(
        "G3 of rank {rank}: rank {writer}, which holds the same bytes and writes them for both, has opened no disk in {}: \
         start its worker, and see its log",
        dir.display()
    )]
    NoWriter {
        /// The rank.
        rank: Rank,
        /// The rank that writes.
        writer: Rank,
        /// Its directory.
        dir: PathBuf,
    },
    /// The volume cannot be opened.
    #[error(transparent)]
    Volume(#[from] kvbm_volume::RegistryError),
    /// The socket of a worker in a process of its own.
    #[error(transparent)]
    Bind(#[from] kvbm_link::BindError),
    /// The transfer engine does not start.
    #[error(transparent)]
    Start(#[from] kvbm_transfer::StartError),
}

impl Workers {
    /// All workers, rank by rank.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Worker> {
        self.local.iter()
    }

    /// What became, at the start, of blocks that deployments with another number of ranks had left
    /// on disk. Empty where there were none, or where our own folders were not new.
    pub fn took_over(&self) -> &[TookOver] {
        &self.took_over
    }

    /// The volumes of G4, where one is configured.
    pub fn volumes(&self) -> Option<&VolumeRegistry> {
        self.volumes.as_deref()
    }

    /// The worker of `rank`, if it runs in this process.
    pub fn get(&self, rank: Rank) -> Option<&Worker> {
        self.local.get(rank.index())
    }

    /// The disk engine of every rank that has one.
    pub(crate) fn disks(&self) -> impl Iterator<Item = DiskStatus> {
        let disk = |worker: &Worker| Some(DiskStatus { rank: worker.rank(), engine: worker.g3()?.info() });
        self.local.iter().filter_map(disk)
    }

    /// What brings the disks' metrics up to date. It keeps no engine open.
    pub(crate) fn disk_refresh(&self, metrics: &Metrics) -> impl Fn() + Send + Sync + use<> {
        let engine = |worker: &Worker| Some((worker.rank(), Arc::downgrade(worker.g3()?)));
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
                disk.other_key.raise_to(stats.other_key_records);
                disk.unsynced.set(info.unsynced_blocks);
            }
        }
    }

    /// What brings the metrics of compression up to date.
    pub(crate) fn volume_refresh(&self, metrics: &Metrics) -> impl Fn() + Send + Sync + use<> {
        let (volumes, counters) = (self.volumes.clone(), metrics.counters());
        move || {
            let Some(volumes) = &volumes else { return };
            for id in volumes.descriptors().into_iter().map(|descriptor| descriptor.id) {
                let Some(stats) = volumes.get(id).ok().and_then(|volume| volume.compression()) else {
                    continue;
                };
                let volume = counters.volume(id);
                volume.compresses.set(u64::from(stats.compresses));
                volume.written_bytes.raise_to(stats.written);
                volume.written_stored_bytes.raise_to(stats.written_stored);
                volume.read_bytes.raise_to(stats.read);
                volume.read_stored_bytes.raise_to(stats.read_stored);
            }
        }
    }

    /// Makes an event of every rank's device known under `number`.
    pub(crate) fn register_events(&self, number: u64, events: &[Event]) {
        for (worker, event) in self.local.iter().zip(events) {
            worker.register_event(number, event);
        }
    }

    /// One link per rank. Links do not keep a worker alive: the manager does.
    pub(crate) fn links(&self) -> Vec<Box<dyn WorkerLink>> {
        self.local.iter().map(Worker::link).collect()
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
        let [g1_blocks, g2_blocks, g3_blocks] = blocks;
        let keys = disk::disk_keys(config)?;
        let took_over = predecessor::take_over(config, &keys, g3_blocks, tag);
        log_copies(config, g2_blocks);
        let mut local: Vec<Worker> = Vec::with_capacity(memory.len());
        for (rank, memory) in ranks {
            // It is a rank before this one, unless it is this one.
            let writer = local.get(config.host_writer_of(rank).index()).map(Worker::as_writer);
            let (shared, writer) = writer.map_or((None, None), |(memory, worker)| (Some(memory), worker));
            let memory = RankMemory::new(config, rank, memory, [g1_blocks, g2_blocks], shared)?;
            let (volumes, sink, keys) = (volumes.clone(), sink(rank), keys.clone());
            // Without G2 there is nothing to share.
            let writer = writer.filter(|_| !memory.g2.is_empty());
            let start = WorkerStart { rank, epoch, tag, g3_blocks, volumes, sink, keys, writer };
            local.push(Worker::start_on(config, memory, start)?);
        }
        Ok(Self { local, volumes, took_over })
    }
}

/// Says in the log how many copies of a block host memory has, where the operator asked for one.
fn log_copies(config: &Config, g2_blocks: u32) {
    if !config.host.one_copy || g2_blocks == 0 {
        return;
    }
    let ranks = config.ranks().count();
    let copies = config.ranks().filter(|rank| config.host_writer_of(*rank) == *rank).count();
    if copies == ranks && ranks > 1 {
        tracing::warn!(
            target: "kvbm", ranks,
            "host.one_copy does nothing: every rank has a copy, because its bytes are its own by the model \
             (model.num_kv_heads, model.replicas), or because of remote.enabled"
        );
    } else {
        tracing::info!(target: "kvbm", ranks, copies, "ranks share host memory");
    }
}
