//! What every manager has: bookkeeping, leader, threads.

use super::BuildError;
use crate::admission::{AdmissionPolicy, AdmitAll, CostAdmission};
use crate::config::{
    Admission, Capacity, Config, ConfigError, EdgeConfig, EvictionPolicy, NamespaceConfig, VolumeLookup,
    VolumeOffload,
};
use crate::events::{BlockFacts, EventPump, VolumeChanges};
use crate::leader::edge::Edge;
use crate::leader::offload::Offloads;
use crate::leader::wear::WearBudget;
use crate::leader::{BlockCosts, Leader, Settings};
use crate::manager::KvBlockManager;
use crate::metrics::Metrics;
use crate::volume::{Change, VolumeSettings, VolumeTier};
use crate::worker::{MessageSink, MetadataWorker, WorkerLink};
#[cfg(feature = "worker")]
use crate::workers::{DeviceMemoryOf, Workers};
use kvbm_plan::{Epoch, NodeId, Path, Rank, Tier, VolumeId};
use kvbm_pool::{GroupConfig, PolicyKind, Registry, RegistryConfig};
use kvbm_tokens::{BlockHasher, Namespace};
#[cfg(feature = "worker")]
use kvbm_volume::VolumeRegistry;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the ranks may take to say what they found on their disks.
pub(super) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Blocks of one plan: enough to hide the cost of a plan, few enough that several are under way for a large prefix.
const MAX_PLAN_BLOCKS: usize = 128;
/// Blocks on a volume without a limit that are known, at about 200 bytes each.
const MAX_KNOWN: usize = 1 << 22;
/// How often transfers past their deadline are looked for.
const EXPIRY_TICK: Duration = Duration::from_millis(50);

/// What every manager has, before its workers.
pub(super) struct Core {
    config: Config,
    namespace: Namespace,
    hasher: BlockHasher,
    blocks: [u32; 3],
    leader: Arc<Leader>,
}

impl Core {
    /// `engine_blocks`: set where the engine owns G1, which then is none of the registry's tiers.
    pub(super) fn new(
        mut config: Config,
        namespace: Option<Namespace>,
        admission: Option<Arc<dyn AdmissionPolicy>>,
        engine_blocks: Option<u32>,
    ) -> Result<Self, BuildError> {
        if engine_blocks.is_some() {
            config.device.capacity = Capacity::NONE;
        }
        config.validate()?;
        if engine_blocks.is_some() && config.host.capacity.is_none() {
            let rule = "must be above 0 where the engine owns G1: kvbm keeps blocks in host memory then";
            let value = config.host.capacity.to_string();
            return Err(ConfigError::Rule { key: "host.capacity", value, rule: rule.to_owned() }.into());
        }
        let namespace = match namespace {
            Some(given) => complete(given, &config)?,
            None => config.namespace(),
        };
        let hasher = namespace.hasher()?;
        if !config.disk.capacity.is_none() || config.volume.uri.is_some() {
            namespace.check_persistable()?;
        }
        // Validated above: they fit.
        let blocks = config.capacity_blocks().map(|blocks| blocks.min(u64::from(u32::MAX - 1)) as u32);
        let registry = registry(&config, blocks)?;
        let settings = Settings {
            epoch: registry.epoch(),
            ranks: config.parallelism.tensor_parallel as usize,
            max_plan_blocks: MAX_PLAN_BLOCKS,
            transfer_deadline: config.transfer.deadline,
            read_deadline: config.disk.read_deadline,
            block_costs: block_costs(&config),
        };
        let offloads = Offloads::new(edges(&config, blocks));
        let admission = admission.unwrap_or_else(|| match config.policy.admission {
            Admission::Cost => Arc::new(CostAdmission) as Arc<dyn AdmissionPolicy>,
            Admission::All => Arc::new(AdmitAll),
        });
        let volume = volume(&config);
        let leader = Leader::new(registry, settings, Metrics::new(), offloads, admission, volume);
        Ok(Self { config, namespace, hasher, blocks, leader })
    }

    /// Where the worker of `rank` puts its messages. It does not keep the leader alive.
    fn sink(&self, rank: Rank) -> MessageSink {
        let leader: Weak<Leader> = Arc::downgrade(&self.leader);
        Arc::new(move |message| {
            if let Some(leader) = leader.upgrade() {
                leader.deliver(rank, message);
            }
        })
    }

    #[cfg(feature = "worker")]
    pub(super) fn local_workers(
        &self,
        memory: &DeviceMemoryOf<'_>,
        volumes: Option<VolumeRegistry>,
    ) -> Result<Workers, BuildError> {
        let (tag, epoch) = (self.namespace.tag(), self.leader.settings.epoch);
        let sink = |rank| self.sink(rank);
        let volumes = crate::volume::local::open_volume(&self.config, volumes.unwrap_or_default())?;
        let workers = Workers::start(&self.config, memory, self.blocks, volumes, tag, epoch, &sink)?;
        self.leader.connect(workers.links());
        Ok(workers)
    }

    /// Workers that are somewhere else.
    pub(super) fn connect(&self, mut connect: impl FnMut(Rank, Epoch, MessageSink) -> Box<dyn WorkerLink>) {
        let epoch = self.leader.settings.epoch;
        let ranks = (0..self.leader.settings.ranks as u16).map(Rank);
        self.leader.connect(ranks.map(|rank| connect(rank, epoch, self.sink(rank))).collect());
    }

    /// Workers that move no bytes.
    pub(super) fn connect_metadata(&self) {
        self.connect(|rank, epoch, sink| Box::new(MetadataWorker::start(rank, epoch, sink)));
    }

    /// Opens for business with workers of this process.
    #[cfg(feature = "worker")]
    pub(super) fn finish<G>(self, workers: Workers, g1: G) -> Result<KvBlockManager<G>, BuildError> {
        let events = self.start()?;
        let Self { config, namespace, hasher, leader, .. } = self;
        Ok(KvBlockManager { leader, namespace, hasher, config, events, g1, workers })
    }

    /// Opens for business with workers elsewhere.
    pub(super) fn finish_remote<G>(self, g1: G) -> Result<KvBlockManager<G>, BuildError> {
        let events = self.start()?;
        let Self { config, namespace, hasher, leader, .. } = self;
        Ok(KvBlockManager {
            leader,
            namespace,
            hasher,
            config,
            events,
            g1,
            #[cfg(feature = "worker")]
            workers: Workers::default(),
        })
    }

    /// Brings back what the disks hold, then starts the threads.
    fn start(&self) -> Result<Arc<EventPump>, BuildError> {
        if self.blocks[Tier::G3.index()] > 0 {
            self.recover()?;
        }
        watch_deadlines(&self.leader)?;
        let BlockCosts { bytes, tokens, .. } = self.leader.settings.block_costs;
        let facts =
            BlockFacts { block_bytes: bytes, block_tokens: tokens, node: NodeId(self.config.events.node) };
        let events = Arc::new(EventPump::start(
            self.leader.registry.clone(),
            &self.config.events,
            facts,
            self.volume_changes(),
        )?);
        let set = self.leader.events.set(Arc::downgrade(&events));
        debug_assert!(set.is_ok(), "events are started once");
        Ok(events)
    }

    /// What the volume's events are made of. They do not keep the leader alive.
    fn volume_changes(&self) -> Option<VolumeChanges> {
        let id = self.leader.volume.as_ref()?.settings.id;
        let leader = Arc::downgrade(&self.leader);
        let mut next = 0;
        let drain = move |max: usize, take: &mut dyn FnMut(u64, Change)| {
            if let Some(leader) = leader.upgrade()
                && let Some(volume) = &leader.volume
            {
                next = volume.drain(max, take);
            }
            next
        };
        let weak = Arc::downgrade(&self.leader);
        let held = move || {
            let leader = weak.upgrade();
            leader.and_then(|leader| leader.volume.as_ref().map(VolumeTier::snapshot)).unwrap_or_default()
        };
        Some(VolumeChanges { id, drain: Box::new(drain), held: Box::new(held) })
    }

    fn recover(&self) -> Result<(), BuildError> {
        let span = tracing::info_span!(target: "kvbm", "recovery", blocks = tracing::field::Empty);
        let _inside = span.enter();
        let deadline = Instant::now() + RECOVERY_TIMEOUT;
        let common = self.leader.recoveries.wait(deadline).ok_or(BuildError::Recovery)?;
        let retired = self.leader.registry.retire(Tier::G3, &common.unusable);
        let restored =
            self.leader.registry.restore(Tier::G3, &common.blocks, kvbm_pool::BlockMetadata::default())?;
        span.record("blocks", restored.restored);
        let incomplete = common.incomplete.len();
        tracing::info!(target: "kvbm", blocks = restored.restored, incomplete, retired, "G3 recovered");
        self.leader.release(&common.incomplete);
        for slots in [&restored.rejected, &restored.duplicates, &restored.orphans] {
            self.leader.release(slots);
        }
        Ok(())
    }
}

/// A namespace that the builder was given, of the model as it is at last. What the configuration says beside it would have no
/// effect, so it is refused.
fn complete(given: Namespace, config: &Config) -> Result<Namespace, ConfigError> {
    let model = given.model_id().to_owned();
    if config.namespace != (NamespaceConfig { model: model.clone(), ..NamespaceConfig::default() }) {
        let rule = "was given to the builder: say all of it there, or leave it out and set [namespace] alone";
        return Err(ConfigError::Rule { key: "namespace", value: model, rule: rule.to_owned() });
    }
    Ok(given.page_size(config.model.page_size).dtype(config.model.dtype.name()))
}

fn registry(config: &Config, blocks: [u32; 3]) -> Result<Registry, kvbm_pool::ConfigError> {
    let policy = match config.policy.eviction {
        EvictionPolicy::LruLeaf => PolicyKind::LruLeaf,
        EvictionPolicy::S3Fifo => PolicyKind::S3Fifo,
        EvictionPolicy::Hazard => PolicyKind::Hazard,
    };
    Registry::new(&RegistryConfig {
        groups: vec![GroupConfig::full(config.model.page_size)],
        event_capacity: config.events.ring_capacity,
        policy,
        policy_seed: config.policy.seed,
        epoch: epoch(),
        ..RegistryConfig::new(blocks)
    })
}

fn block_costs(config: &Config) -> BlockCosts {
    let tokens = config.model.page_size;
    let speed = config.policy.prefill_tokens_per_s;
    BlockCosts {
        bytes: config.rank_block_bytes() * u64::from(config.parallelism.tensor_parallel),
        tokens,
        recompute: (speed > 0.0).then(|| Duration::from_secs_f64(f64::from(tokens) / speed)),
    }
}

/// Larger in every life of this machine: microseconds of the wall clock.
fn epoch() -> Epoch {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

fn edges(config: &Config, blocks: [u32; 3]) -> Vec<Edge> {
    let [_, g2, g3] = blocks;
    let limit = |blocks: u32, share: f64| (f64::from(blocks) * share) as usize;
    let mut edges = Vec::new();
    if blocks[0] > 0 && g2 > 0 {
        let triggers = config.offload.g1_g2.clone();
        let limit = limit(blocks[0], triggers.queue_share);
        edges.push(Edge::new(Path::G1_G2, triggers, limit, None));
    }
    if g2 > 0 && g3 > 0 {
        let triggers = config.offload.g2_g3.clone();
        let limit = limit(g2, triggers.queue_share);
        let slot_bytes = config.slot_bytes(Tier::G3).max(1);
        let blocks_per_s = config.disk.write_budget.get() as f64 / slot_bytes as f64;
        let wear = WearBudget::new(g3, config.disk.drive_writes_per_day, blocks_per_s);
        edges.push(Edge::new(Path::G2_G3, triggers, limit, wear));
    }
    if g2 > 0 && config.volume.uri.is_some() {
        let volume = &config.volume;
        let keeps_victims = volume.offload == VolumeOffload::Victims;
        // With a disk, what goes to the volume is what goes to the disk.
        let ahead_share = if keeps_victims && g3 == 0 { config.offload.g2_g3.ahead_share } else { 0.0 };
        let triggers = EdgeConfig {
            write_through: volume.offload == VolumeOffload::WriteThrough,
            watermark: 1.0,
            idle_iterations: 0,
            queue_share: volume.queue_share,
            ahead_share,
        };
        edges.push(Edge::new(Path::G2_G4, triggers, limit(g2, volume.queue_share), None));
    }
    edges
}

/// What the leader keeps of the volume.
fn volume(config: &Config) -> Option<VolumeTier> {
    let volume = &config.volume;
    volume.uri.as_ref()?;
    let blocks = volume.capacity.blocks(config.rank_block_bytes());
    let limited = !volume.capacity.is_none();
    Some(VolumeTier::new(VolumeSettings {
        id: VolumeId(volume.id),
        deadline: volume.deadline,
        probe: volume.lookup == VolumeLookup::Probe,
        recheck: volume.recheck,
        longest_pause: volume.longest_pause,
        capacity: if limited { usize::try_from(blocks).unwrap_or(usize::MAX) } else { MAX_KNOWN },
        limited,
        most_changes: config.events.ring_capacity as usize,
        keeps_victims: volume.offload == VolumeOffload::Victims,
    }))
}

/// A thread that gives up on late transfers for as long as the leader lives.
fn watch_deadlines(leader: &Arc<Leader>) -> Result<(), BuildError> {
    let weak = Arc::downgrade(leader);
    let name = "kvbm-deadlines";
    let watch = move || {
        while let Some(leader) = weak.upgrade() {
            leader.expire(Instant::now());
            drop(leader);
            std::thread::sleep(EXPIRY_TICK);
        }
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(watch);
    thread.map(drop).map_err(|source| BuildError::Thread { name, source })
}
