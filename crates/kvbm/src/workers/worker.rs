//! The worker of one rank: starting it, the link to it, and its end.

use super::disk::{disk_keys, open_disk};
use super::memory::{KeptHost, RankG1, RankMemory, SharedHost};
use super::paths::paths;
use super::volumes::volume_tier;
use super::{G1Memory, WorkerError, predecessor};
use crate::config::{Config, CopyWay, VerifyHost};
use crate::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm_device::{Device, Event};
use kvbm_disk::{DiskEngine, DiskKeys};
use kvbm_layout::BlockLayout;
use kvbm_plan::{BlockId, Epoch, GroupId, Rank};
use kvbm_storage::BoundLayout;
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{Backend, BlocksBusy, FinishedPlan, ShutdownError, TransferManager, WorkerConfig};
use kvbm_volume::VolumeRegistry;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time that a worker which is dropped gives to transfers under way.
const DROP_TIME: Duration = Duration::from_secs(5);

/// The worker of one rank, in this process. It serves one leader: that of its epoch.
pub struct Worker {
    rank: Rank,
    memory: RankMemory,
    g3: Option<Arc<DiskEngine>>,
    manager: Option<Arc<TransferManager>>,
}

/// What the worker of one rank starts with, beside its configuration and its memory.
pub(super) struct WorkerStart {
    pub(super) rank: Rank,
    pub(super) epoch: Epoch,
    pub(super) tag: NamespaceTag,
    /// Slots of G3.
    pub(super) g3_blocks: u32,
    pub(super) volumes: Option<Arc<VolumeRegistry>>,
    pub(super) sink: MessageSink,
    pub(super) keys: DiskKeys,
    /// The worker of the rank that writes G2 for this one, too.
    pub(super) writer: Option<Arc<TransferManager>>,
}

impl Worker {
    /// Starts the worker of `rank` from the configuration of the whole deployment: its memory, its
    /// disk with what [`TookOver`](super::TookOver) says, its paths. `epoch` and `tag` are those of
    /// the leader, which also tells it of volumes. Messages go to `sink`; the first ones say what
    /// the disk holds, then that the worker is ready. A worker that listens at a socket for its
    /// leader is a [`WorkerServer`](crate::WorkerServer).
    ///
    /// # Errors
    /// [`WorkerError`] names the setting, the file or the device.
    pub fn start(
        config: &Config,
        rank: Rank,
        memory: &G1Memory,
        epoch: Epoch,
        tag: NamespaceTag,
        sink: MessageSink,
    ) -> Result<Self, WorkerError> {
        let [g1_blocks, g2_blocks, g3_blocks] = checked_blocks(config, rank)?;
        let memory = RankMemory::new(config, rank, memory, [g1_blocks, g2_blocks], None)?;
        let keys = disk_keys(config)?;
        predecessor::take_over(config, &keys, g3_blocks, tag);
        let volumes = memory.volumes(config, tag)?;
        let start = WorkerStart { rank, epoch, tag, g3_blocks, volumes, sink, keys, writer: None };
        Self::start_on(config, memory, start)
    }

    /// The same in memory that is there.
    pub(super) fn start_on(
        config: &Config,
        memory: RankMemory,
        start: WorkerStart,
    ) -> Result<Self, WorkerError> {
        let WorkerStart { rank, epoch, tag, g3_blocks, volumes, sink, keys, writer } = start;
        let mut worker_config = WorkerConfig::new(rank, epoch, *tag.as_bytes());
        match &memory.g1 {
            RankG1::Here(device, groups) => {
                worker_config.device.clone_from(device);
                worker_config.g1 = groups.first().cloned();
            }
            RankG1::Elsewhere(tier, _) => worker_config.movers = Some(tier.clone()),
        }
        worker_config.g2 = memory.g2.first().cloned();
        worker_config.kept.clone_from(&memory.kept);
        worker_config.other_groups = memory.other_groups();
        worker_config.paths = paths(config);
        worker_config.copies = match config.transfer.copies {
            CopyWay::Auto => Backend::Auto,
            CopyWay::Kernel => Backend::Kernel,
            CopyWay::Batch => Backend::Batch,
            CopyWay::Async => Backend::Async,
        };
        worker_config.staging_bytes = config.transfer.staging.get();
        worker_config.flush_deadline = config.disk.flush_deadline;
        // Of ranks with the same disk, the one that writes looks after it.
        let writes = config.writer_of(rank) == rank;
        worker_config.scrub_bytes_per_s = if writes { config.disk.scrub.get() } else { 0 };
        worker_config.verify_host = match config.transfer.verify_host {
            // Other processes can write to G2.
            _ if worker_config.movers.is_some() => kvbm_transfer::VerifyHost::Always,
            VerifyHost::Never => kvbm_transfer::VerifyHost::Never,
            VerifyHost::Sampled => kvbm_transfer::VerifyHost::Sampled(config.transfer.verify_every),
            VerifyHost::Always => kvbm_transfer::VerifyHost::Always,
        };
        let mut g3 = None;
        if config.disk.dir.is_some() && g3_blocks > 0 {
            let shapes = memory.host_shapes(config, rank)?;
            let host: Vec<&dyn BlockLayout> = shapes.iter().map(|layout| &**layout).collect();
            let tier = open_disk(config, &keys, &host, g3_blocks, tag, rank)?;
            g3 = Some(Arc::clone(&tier.engine));
            worker_config.g3 = Some(tier);
        }
        if memory.g2.is_empty() && (g3.is_some() || volumes.is_some()) {
            worker_config.disk_shapes = memory.host_shapes(config, rank)?;
            worker_config.direct_offload = true;
        }
        worker_config.volumes = volumes.map(|registry| volume_tier(config, &registry, rank)).transpose()?;
        let manager = match writer {
            Some(writer) => TransferManager::start_beside(&writer, worker_config, sink)?,
            None => TransferManager::start(worker_config, sink)?,
        };
        Ok(Self { rank, memory, g3, manager: Some(Arc::new(manager)) })
    }

    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The device that G1 lies on; none where the engine's G1 is host memory
    /// ([`Builder::engine_host`](crate::Builder::engine_host)).
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        match &self.memory.g1 {
            RankG1::Here(device, _) => device.as_ref(),
            RankG1::Elsewhere(..) => None,
        }
    }

    /// G1, bound to its memory: where block ids are addresses. Of the first cache group, where
    /// there are several. None where it is memory of other processes.
    pub fn g1(&self) -> Option<&BoundLayout> {
        self.memory.g1_here().first()
    }

    /// G1 as blocks of a cache group lie there, if there is such a group in this process.
    pub fn g1_of(&self, group: GroupId) -> Option<&BoundLayout> {
        self.memory.g1_here().get(usize::from(group.0))
    }

    /// The memory that other processes map, where G1 is theirs.
    pub fn shared(&self) -> Option<&SharedHost> {
        match &self.memory.g1 {
            RankG1::Here(..) => None,
            RankG1::Elsewhere(_, shared) => Some(shared),
        }
    }

    /// G2, bound to its memory. Transfers use it, and bytes of registered blocks never change: who
    /// reads or writes a block here has to prove that no transfer does.
    ///
    /// ```compile_fail,E0133
    /// # fn overwrite(worker: &kvbm::Worker) {
    /// worker.g2().unwrap().write_block(0, &[]).unwrap();
    /// # }
    /// ```
    pub fn g2(&self) -> Option<&BoundLayout> {
        self.memory.g2.first()
    }

    /// Host memory that other processes map, and whole blocks in it, also those that the leader
    /// has given up.
    pub(crate) fn kept_host(&self) -> Option<KeptHost> {
        let memory = Arc::clone(&self.shared()?.memory);
        Some(KeptHost { memory, contents: self.manager.as_ref()?.host_contents() })
    }

    /// The memory and the worker of a rank that writes G2 for `rank`, too.
    pub(super) fn as_writer(&self) -> (&RankMemory, Option<Arc<TransferManager>>) {
        (&self.memory, self.manager.clone())
    }

    /// The worker's own part in what peers read and give.
    pub(crate) fn manager(&self) -> Option<&TransferManager> {
        self.manager.as_deref()
    }

    /// The engine of G3.
    pub fn g3(&self) -> Option<&Arc<DiskEngine>> {
        self.g3.as_ref()
    }

    /// A link to this worker, for a leader of the same process. It does not keep the worker alive:
    /// once the worker has ended, the link is [`LinkError::Closed`].
    pub fn link(&self) -> Box<dyn WorkerLink> {
        Box::new(LocalLink(self.manager.as_ref().map_or_else(Weak::new, Arc::downgrade)))
    }

    /// Makes an event of the rank's device known under `number`: the leader's plans wait for it
    /// ([`KvBlockManager::fence_at`](crate::KvBlockManager::fence_at)).
    pub fn register_event(&self, number: u64, event: &Event) {
        if let Some(manager) = &self.manager {
            manager.register_event(number, event);
        }
    }

    /// Waits until no plan that this worker has accepted touches these blocks of G1. The worker's
    /// own side asks that before it writes there; the leader may not know yet that a plan is over.
    ///
    /// # Errors
    /// [`BlocksBusy`] names the blocks that are not free at `deadline`.
    pub fn wait_idle(&self, blocks: &[BlockId], deadline: Instant) -> Result<(), BlocksBusy> {
        self.manager.as_ref().map_or(Ok(()), |manager| manager.wait_idle(blocks, deadline))
    }

    /// Plans with a tag ([`EngineOnboarding::tag`](crate::EngineOnboarding::tag)) that have
    /// finished on this rank since the last call, oldest first: one entry for each plan, 4,096 at
    /// most.
    pub fn drain_finished(&self) -> Vec<FinishedPlan> {
        self.manager.as_ref().map_or_else(Vec::new, |manager| manager.drain_finished())
    }

    /// Takes no more commands and waits until nothing writes to the worker's memory any more.
    ///
    /// # Errors
    /// What still runs at `deadline`. Calling it again waits again.
    pub fn shutdown(&self, deadline: Instant) -> Result<(), ShutdownError> {
        self.manager.as_ref().map_or(Ok(()), |manager| manager.shutdown(deadline))
    }
}

/// Blocks of G1, G2 and G3 of a configuration that is checked for `rank`.
pub(super) fn checked_blocks(config: &Config, rank: Rank) -> Result<[u32; 3], WorkerError> {
    config.validate()?;
    let ranks = config.parallelism.tensor_parallel;
    if u32::from(rank.0) >= ranks {
        return Err(WorkerError::NoSuchRank { rank, ranks });
    }
    Ok(config.tier_blocks())
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The threads stop when the last reference is dropped; a link holds one only while it
        // sends.
        let Some(mut manager) = self.manager.take() else { return };
        let patience = Instant::now() + DROP_TIME;
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
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let manager = self.0.upgrade().ok_or(LinkError::Closed)?;
        manager.submit(command).map_err(|error| LinkError::Refused(error.to_string()))
    }
}
