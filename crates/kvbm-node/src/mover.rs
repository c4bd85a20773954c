//! A mover: copies between the engine's blocks and the daemon's host memory, in the engine's
//! process.

use crate::protocol::{Bytes, Memory, Moved, Welcome, encode};
use crate::slots;
use kvbm::device::Device;
use kvbm::plan::{BlockOutcome, Command, Epoch, Failure, FailureKind, Message, TransferReport, wire};
use kvbm::storage::{
    BoundLayout, HostRegion, Population, PopulationEnd, RegionBinding, SharedStorage, Storage,
};
use kvbm::{BlockId, Rank};
use kvbm_link::{AttachedSender, Lane};
use kvbm_transfer::{GroupMemory, PathConfig, PathConfigs, TransferManager, VerifyHost, WorkerConfig};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a mover that ends waits before it says again what it waits for.
const END_TIME: Duration = Duration::from_secs(5);
/// Copies that may wait: the daemon's bounds, not these, hold them back.
const QUEUE_PLANS: usize = 1 << 16;
const QUEUE_BLOCKS: usize = 1 << 18;

/// Blocks of the engine on one rank.
#[derive(Clone)]
pub struct MoverMemory {
    /// The rank.
    pub rank: Rank,
    /// The device that they lie on; none where they are host memory.
    pub device: Option<Arc<dyn Device>>,
    /// How blocks of each cache group lie there, by the groups' ids. A block id means one group's
    /// block at a time, so their memory may be the same.
    pub g1: Vec<BoundLayout>,
}

/// Copies for one line to the daemon.
pub(crate) struct Mover {
    rank: Rank,
    epoch: Epoch,
    out: AttachedSender,
    /// None before the daemon's memory is mapped, and after the end.
    manager: Mutex<Option<Arc<TransferManager>>>,
    /// Touches the daemon's memory while this is there.
    population: Mutex<Option<Population>>,
}

impl Mover {
    pub(crate) fn new(rank: Rank, welcome: &Welcome, out: AttachedSender) -> Self {
        Self {
            rank,
            epoch: Epoch(welcome.epoch),
            out,
            manager: Mutex::new(None),
            population: Mutex::new(None),
        }
    }

    /// Maps the daemon's memory, locks its pages where there is a device, and tells the daemon that
    /// it can copy. That may take seconds.
    pub(crate) fn start(
        &self,
        memory: &MoverMemory,
        welcome: &Welcome,
        files: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let (host, region) = map(memory, welcome.memory.as_ref(), files)?;
        if host.len() != memory.g1.len() {
            let (theirs, ours) = (host.len(), memory.g1.len());
            return Err(format!(
                "the daemon described slots of {theirs} cache groups, the engine has {ours}"
            ));
        }
        if welcome.memory.as_ref().is_some_and(|memory| memory.populated) {
            *self.population.lock() = populate(region, self.rank);
        }
        let mut config = WorkerConfig::new(self.rank, self.epoch, welcome.namespace);
        config.device.clone_from(&memory.device);
        let mut groups = memory.g1.iter().cloned().zip(host);
        (config.g1, config.g2) = groups.next().unzip();
        let memory_of = |(g1, g2)| GroupMemory { g1: Some(g1), g2: Some(g2) };
        config.other_groups = groups.map(memory_of).collect();
        config.claimed_elsewhere = true;
        config.verify_host = VerifyHost::Never;
        config.staging_bytes = 0;
        let path = PathConfig { queue_plans: QUEUE_PLANS, queue_blocks: QUEUE_BLOCKS, ..PathConfig::MEMORY };
        config.paths = PathConfigs { g1_g2: path, g2_g1: path, ..PathConfigs::default() };
        let out = self.out.clone();
        let sink = Arc::new(move |bytes: Vec<u8>| say(&out, bytes));
        let mut manager = self.manager.lock();
        *manager = Some(Arc::new(TransferManager::start(config, sink).map_err(|error| error.to_string())?));
        Ok(())
    }

    fn manager(&self) -> Option<Arc<TransferManager>> {
        self.manager.lock().clone()
    }

    /// Takes a command of the daemon. What is refused is answered.
    pub(crate) fn take(&self, bytes: &[u8]) {
        let refused = match self.manager() {
            Some(manager) => match manager.submit(bytes) {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
            None => "the mover has not mapped the daemon's memory yet".to_owned(),
        };
        let Ok(Command::Transfer(plan)) = wire::decode_command(bytes) else {
            return tracing::warn!(target: "kvbm", rank = %self.rank, "the daemon sent what a mover does not take: {refused}");
        };
        let failure = Failure::new(FailureKind::Io, refused);
        let message = Message::Transfer(TransferReport {
            plan_id: plan.plan_id,
            epoch: plan.epoch,
            rank: self.rank,
            path: plan.path(),
            blocks: vec![BlockOutcome::Failed(failure); plan.blocks.len()],
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
        });
        if let Ok(bytes) = wire::encode_message(&message) {
            say(&self.out, bytes);
        }
    }

    /// The engine has passed this point of its work on this rank.
    pub(crate) fn passed(&self, number: u64) {
        // A line that has ended needs no point; one that is full hears of a later one.
        let _ = self.out.send(Lane::Bulk, &encode(&Moved::Passed(number)));
    }

    /// Waits until no copy that the mover has accepted touches these blocks. What still does at
    /// `deadline`.
    pub(crate) fn wait_idle(&self, blocks: &[BlockId], deadline: Instant) -> Result<(), Vec<BlockId>> {
        let Some(manager) = self.manager() else { return Ok(()) };
        manager.wait_idle(blocks, deadline).map_err(|busy| busy.blocks)
    }

    /// Returns when nothing is copied any more. The line has ended: nothing comes.
    pub(crate) fn end(&self) {
        let population = self.population.lock().take();
        drop(population);
        let Some(manager) = self.manager.lock().take() else { return };
        while let Err(error) = manager.shutdown(Instant::now() + END_TIME) {
            tracing::warn!(target: "kvbm", rank = %self.rank, %error, "a mover that is detached waits for its copies");
        }
    }
}

/// Sends a message of `kvbm-plan`.
fn say(out: &AttachedSender, message: Vec<u8>) {
    out.answer(&encode(&Moved::Message(Bytes(message))));
}

/// Has the system map pages that are there, in the background: the first copy from or to each would
/// wait for that otherwise.
fn populate(region: HostRegion, rank: Rank) -> Option<Population> {
    let ended = move |end| match end {
        PopulationEnd::Complete { .. } | PopulationEnd::Stopped => {}
        other => tracing::info!(target: "kvbm", %rank, ?other, "the daemon's memory is mapped as it is used"),
    };
    Population::start(vec![region], false, ended).ok()
}

/// The daemon's memory in this process: slots of G2 and of staging rings, as blocks of each cache
/// group lie in them.
fn map(
    memory: &MoverMemory,
    shared: Option<&Memory>,
    files: Vec<OwnedFd>,
) -> Result<(Vec<BoundLayout>, HostRegion), String> {
    let shared = shared.ok_or("the daemon described no memory")?;
    let file = files.into_iter().next().ok_or("the daemon passed no memory")?;
    let layouts = slots::layouts(shared)?;
    let mut storage = SharedStorage::map(file, shared.bytes).map_err(|error| error.to_string())?;
    if let Some(device) = &memory.device {
        // It serves without: copies are slower then.
        if let Err(error) = storage.lock(&**device, log_locked) {
            tracing::warn!(
                target: "kvbm", rank = %memory.rank, %error,
                "the daemon's memory could not be page-locked: copies are slower; raise the memlock limit"
            );
        }
    }
    let region = storage.region().clone();
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let bind = |layout| {
        let bound = BoundLayout::bind(layout, vec![RegionBinding::new(Arc::clone(&storage))]);
        bound.map_err(|error| error.to_string())
    };
    Ok((layouts.into_iter().map(bind).collect::<Result<_, _>>()?, region))
}

/// Page-locking gigabytes takes seconds: the log shows each tenth that is done.
fn log_locked(done: u64, total: u64) {
    const STEP: u64 = 256 << 20;
    if done == total || done % (total / 10).max(STEP) < STEP {
        tracing::info!(target: "kvbm", done, total, "the daemon's memory is being page-locked");
    }
}
