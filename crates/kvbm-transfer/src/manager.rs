//! The worker: commands in, reports out.

use crate::config::HostContent;
use crate::error::{BlocksBusy, ShutdownError, SubmitError};
use crate::finished::FinishedPlan;
use crate::flush::Flusher;
use crate::handle::TransferHandle;
use crate::host::HostTier;
use crate::hub::Hub;
use crate::report_slot::ReportSlot;
use crate::schedule::Reply;
use crate::scrub::Scrub;
use crate::stats::WorkerStats;
use crate::volume_requests::VolumeRequests;
use kvbm_device::Event;
use kvbm_disk::DiskEngine;
use kvbm_plan::{BlockId, Command, PlanId, Tier, TransferPlan, deadline_after, wire};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A worker: executes the plans of one leader on one rank.
///
/// Every accepted submission of a plan is answered by exactly one report. A plan id that is already
/// known is answered with the same report and never executed twice, so a leader may repeat itself.
/// A plan that was refused with [`QueueFull`](kvbm_plan::FailureKind::QueueFull) is retried under a
/// new id. Ids need not be dense, but an id far below the 7,000 last ones is refused. Dropping the
/// manager shuts it down within
/// [`WorkerConfig::drop_deadline`](crate::WorkerConfig::drop_deadline).
///
/// ```
/// use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement};
/// use kvbm_plan::{
///     BlockId, BlockIdentity, BlockTransfer, ChecksumMode, Endpoint, Epoch, Gate, GroupId, NamespaceId, PlanId, Priority,
///     Rank, SequenceHash, Tier, TransferPlan,
/// };
/// use kvbm_storage::{BoundLayout, SystemAllocator};
/// use kvbm_transfer::{TransferManager, WorkerConfig};
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
///
/// let shape = LayoutConfig::builder()
///     .num_blocks(8).num_layers(2).page_size(16).inner_dim(64).num_heads(4).dtype(DType::BF16).build()?;
/// let engine = LayerSeparate::new(shape.clone(), AxisOrder::Nhd, OuterPlacement::KvOuter)?;
/// let host = FullyContiguous::new(shape, AxisOrder::Nhd)?;
/// let mut config = WorkerConfig::new(Rank(0), Epoch(1), [7; 16]);
/// config.g1 = Some(BoundLayout::allocate(Arc::new(engine), &SystemAllocator::default())?);
/// config.g2 = Some(BoundLayout::allocate(Arc::new(host), &SystemAllocator::default())?);
/// let worker = TransferManager::start(config, Arc::new(|_message| {}))?;
///
/// let identity = BlockIdentity {
///     namespace: NamespaceId(7), group: GroupId(0), hash: SequenceHash::from_bytes([1; 16]), parent: None, position: 0,
/// };
/// let handle = worker.execute(TransferPlan {
///     plan_id: PlanId(1), epoch: Epoch(1), group: GroupId(0),
///     src: Endpoint::Local(Tier::G1), dst: Endpoint::Local(Tier::G2),
///     blocks: vec![BlockTransfer { identity, src: BlockId(3), dst: BlockId(5) }],
///     layers: None, gate: Gate::None, after: Vec::new(),
///     priority: Priority::Normal, budget_ms: 1000, checksums: ChecksumMode::Required, tag: 0, compare: None,
/// })?;
/// let report = handle.wait(Instant::now() + Duration::from_secs(10))?;
/// assert!(report.blocks[0].is_done());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TransferManager {
    pub(crate) hub: Arc<Hub>,
    pub(crate) disk: Option<Arc<DiskEngine>>,
    pub(crate) host: Option<Arc<HostTier>>,
    pub(crate) flusher: Option<Arc<Flusher>>,
    pub(crate) scrub: Option<Arc<Scrub>>,
    /// Taken away when the worker shuts down.
    pub(crate) volumes: Mutex<Option<VolumeRequests>>,
    /// The first shutdown takes it.
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(crate) drop_deadline: Duration,
    pub(crate) staging_bytes: u64,
}

impl TransferManager {
    /// Takes a command in its wire form. Returns at once; a plan's fate is in its report.
    ///
    /// # Errors
    /// See [`SubmitError`]: nothing was done, and no report comes.
    pub fn submit(&self, command: &[u8]) -> Result<(), SubmitError> {
        match wire::decode_command(command)? {
            Command::Transfer(plan) => self.hub.submit(plan, Reply::Sink).map(drop),
            Command::Cancel { plan_id } => {
                self.cancel(plan_id);
                Ok(())
            }
            Command::Advance { iteration, layer } => {
                self.hub.advance(iteration, layer);
                Ok(())
            }
            Command::Release { tier, blocks } => {
                let disk = self.disk_for("release", tier)?;
                disk.release(&blocks);
                Ok(())
            }
            Command::Forget { tier, namespace } => {
                let disk = self.disk_for("forget", tier)?;
                let blocks = disk.release_namespace(namespace);
                tracing::debug!(%namespace, blocks, "forgotten on G3");
                Ok(())
            }
            Command::Flush { token } => match &self.flusher {
                Some(flusher) => flusher.request(token),
                None => Err(SubmitError::NoSuchTier { command: "flush", tier: Tier::G3 }),
            },
            Command::Volume { token, volume, request } => match &*self.volumes.lock() {
                Some(asks) => asks.request(token, volume, request),
                None if self.hub.is_closing() => Err(SubmitError::ShuttingDown),
                None => Err(SubmitError::NoSuchTier { command: "volume request", tier: Tier::G4 }),
            },
        }
    }

    /// Executes a plan for a caller without a leader: the report goes to the handle, not to the
    /// sink. A plan id that is already known is not executed again; the handle gets its report.
    ///
    /// # Errors
    /// As [`TransferManager::submit`].
    pub fn execute(&self, plan: TransferPlan) -> Result<TransferHandle, SubmitError> {
        plan.validate()?;
        let plan_id = plan.plan_id;
        let slot = Arc::new(ReportSlot::default());
        let first = self.hub.submit(plan, Reply::Handle(Arc::clone(&slot)))?;
        Ok(TransferHandle::new(slot, Arc::downgrade(&self.hub), plan_id, first))
    }

    /// Cancels a plan that has not started; its report says so. Started and unknown plans are not
    /// changed.
    pub fn cancel(&self, plan_id: PlanId) {
        self.hub.cancel(plan_id);
    }

    /// Makes `event` known as `id` to [`Gate::DeviceEvent`](kvbm_plan::Gate::DeviceEvent). Plans
    /// may name it before or after; one that names an event which is never registered waits until
    /// its budget ends or it is cancelled. A later event of the same number takes its place. The
    /// last 14,000 events are remembered; an older one counts as never registered.
    pub fn register_event(&self, id: u64, event: &Event) {
        self.hub.register_event(id, event);
    }

    /// Waits until no plan that this worker has accepted touches these blocks of G1, whatever the
    /// leader knows of it.
    ///
    /// # Errors
    /// [`BlocksBusy`] names the blocks that are not free at `deadline`.
    pub fn wait_idle(&self, blocks: &[BlockId], deadline: Instant) -> Result<(), BlocksBusy> {
        self.hub.wait_blocks_idle(blocks, deadline)
    }

    /// Plans with a tag that have finished since the last call, oldest first: one entry for each
    /// plan. The last 4,096 are kept; [`WorkerStats::finished_dropped`] counts the others.
    pub fn drain_finished(&self) -> Vec<FinishedPlan> {
        self.hub.drain_finished()
    }

    /// Whole blocks in G2, with their checksums: of slots that the leader has given up, too.
    pub fn host_contents(&self) -> Vec<HostContent> {
        self.host.as_ref().map_or_else(Vec::new, |host| host.contents())
    }

    /// Counters so far.
    pub fn stats(&self) -> WorkerStats {
        self.hub.stats()
    }

    /// Bytes of its staging rings in all: between G3 and G1, and between G4 and G1.
    pub fn staging_bytes(&self) -> u64 {
        self.staging_bytes
    }

    /// Takes no more plans, reports those that have not started as
    /// [`ShuttingDown`](kvbm_plan::FailureKind::ShuttingDown), waits for started ones and for the
    /// sink to take every report.
    ///
    /// # Errors
    /// [`ShutdownError`] at the deadline. What still runs owns its memory until the hardware is
    /// done, and is reported then. Calling it again waits again.
    pub fn shutdown(&self, deadline: Instant) -> Result<(), ShutdownError> {
        self.hub.close();
        if let Some(flusher) = &self.flusher {
            flusher.close();
        }
        if let Some(scrub) = &self.scrub {
            scrub.close();
        }
        drop(self.volumes.lock().take());
        let threads = std::mem::take(&mut *self.threads.lock());
        self.hub.wait_idle(deadline)?;
        let own = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
            // Idle means that every thread is past its work, so this does not wait; a panic was
            // logged where it happened.
            drop(thread.join());
        }
        Ok(())
    }

    fn disk_for(&self, command: &'static str, tier: Tier) -> Result<&DiskEngine, SubmitError> {
        match &self.disk {
            Some(disk) if tier == Tier::G3 => Ok(disk),
            _ => Err(SubmitError::NoSuchTier { command, tier }),
        }
    }
}

impl Drop for TransferManager {
    fn drop(&mut self) {
        if !self.threads.get_mut().is_empty()
            && let Err(error) = self.shutdown(deadline_after(Instant::now(), self.drop_deadline))
        {
            tracing::warn!(%error, "a worker was dropped with work in flight");
        }
    }
}

impl fmt::Debug for TransferManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferManager").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
