//! What every manager has: bookkeeping, leader, threads.

use super::BuildError;
use crate::admin::{Admin, AdminCalls};
use crate::admission::{AdmissionPolicy, AdmitAll, CostAdmission};
use crate::config::{
    Admission, Capacity, Config, ConfigError, EdgeConfig, EvictionPolicy, NamespaceConfig, Secret,
    VolumeOffload,
};
use crate::events::{BlockFacts, EventPump, VolumeChanges};
use crate::leader::{Leader, Parts, PrefetchBudget, worker_leaves};
use crate::manager::KvBlockManager;
use crate::metrics::{Metrics, MetricsServer, RecoveryOutcome};
use crate::offload::{Edge, Offload, WearBudget};
use crate::ranks::Ranks;
#[cfg(feature = "worker")]
use crate::remote::{self, Ours, RemoteStartError};
use crate::slots::{Directories, Slots};
use crate::socket_link::{LineStatus, ProcessState, SocketLink, WorkerNotice, leader_terms};
use crate::tenants::{self, Tenants};
use crate::transfers::disk_reads::longest_probe;
use crate::transfers::plans::{MAX_PLAN_BLOCKS, max_read_blocks};
use crate::transfers::{BlockCosts, TransferSettings, Transfers};
use crate::volume::{Change, Volumes};
use crate::worker::{MessageSink, MetadataWorker, WorkerLink};
#[cfg(feature = "worker")]
use crate::workers::{G1Memory, Workers};
use kvbm_plan::{Epoch, NodeId, Path, Rank, RecoveredBlock, Striping, Tier, shown_uri};
use kvbm_pool::{GroupConfig, PolicyKind, Registry, RegistryConfig, TenantConfig};
use kvbm_tokens::{BlockHasher, Namespace};
#[cfg(feature = "worker")]
use kvbm_volume::VolumeRegistry;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the ranks may take to say what they found on their disks.
pub(super) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often a worker that is not ready yet is looked at.
const WORKER_TICK: Duration = Duration::from_millis(2);

/// Makes an eviction policy for tiers of so many blocks.
type MakeEviction = Box<dyn FnOnce([u32; 3]) -> Box<dyn kvbm_pool::EvictionPolicy> + Send>;

/// What moves bytes between nodes, where the configuration does not say it.
#[cfg(feature = "worker")]
pub(super) type RemoteAgentGiven = Option<Arc<dyn kvbm_nixl::RemoteAgent>>;

/// Policies that the configuration does not name.
#[derive(Default)]
pub(super) struct Policies {
    pub(super) admission: Option<Arc<dyn AdmissionPolicy>>,
    pub(super) eviction: Option<MakeEviction>,
}

impl std::fmt::Debug for Policies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let eviction = self.eviction.as_ref().map(|_| "EvictionPolicy");
        f.debug_struct("Policies").field("admission", &self.admission).field("eviction", &eviction).finish()
    }
}

/// What every manager has, before its workers.
pub(super) struct Core {
    config: Config,
    namespace: Namespace,
    hasher: BlockHasher,
    blocks: [u32; 3],
    /// Blocks of G1 on each rank, kvbm's or the engine's.
    g1_blocks: u32,
    leader: Arc<Leader>,
    /// Blocks that are on G2 from the start.
    pub(super) kept: Vec<RecoveredBlock>,
}

impl Core {
    /// `engine_blocks`: set where the engine owns G1, which then is none of the registry's tiers.
    /// `more_volumes`: whether volumes that are not configured may be registered.
    pub(super) fn new(
        mut config: Config,
        namespace: Option<Namespace>,
        policies: Policies,
        engine_blocks: Option<u32>,
        more_volumes: bool,
    ) -> Result<Self, BuildError> {
        if let Some(capacity) = engine_blocks {
            config.device.capacity = Capacity::NONE;
            if capacity > RegistryConfig::MAX_CAPACITY {
                return Err(kvbm_pool::ConfigError::Capacity { tier: Tier::G1, capacity }.into());
            }
        }
        config.validate()?;
        check_tiers(&config, engine_blocks.is_some())?;
        let namespace = match namespace {
            Some(given) => {
                let given = complete(given, &config)?;
                // Workers know the configuration alone.
                config.namespace.deployment_secret = given.secret().map(Secret::new);
                given
            }
            None => config.namespace(),
        };
        warn_of_short(namespace.secret());
        let hasher = namespace.hasher()?;
        if !config.disk.capacity.is_none() || !config.volume.is_empty() {
            namespace.check_persistable()?;
        }
        let blocks = config.tier_blocks();
        let (tenants, names) = tenants::of_shares(config.tenants.shares.as_slice(), &namespace);
        let Policies { admission, eviction } = policies;
        let registry = registry(&config, blocks, tenants, eviction)?;
        let admission = admission.unwrap_or_else(|| match config.policy.admission {
            Admission::Cost => Arc::new(CostAdmission) as Arc<dyn AdmissionPolicy>,
            Admission::All => Arc::new(AdmitAll),
        });
        let has_memory = blocks[0] > 0 || blocks[1] > 0;
        let to_volumes = has_memory && (more_volumes || !config.volume.is_empty());
        let leader = leader(&config, blocks, registry, names, admission, to_volumes);
        let g1_blocks = engine_blocks.unwrap_or(blocks[0]);
        Ok(Self { config, namespace, hasher, blocks, g1_blocks, leader, kept: Vec::new() })
    }

    /// Where the worker of `rank` puts its messages. It does not keep the leader alive.
    fn sink(&self, rank: Rank) -> MessageSink {
        let leader: Weak<Leader> = Arc::downgrade(&self.leader);
        Arc::new(move |message| {
            if let Some(leader) = leader.upgrade() {
                leader.deliver(rank, &message);
            }
        })
    }

    /// `engine`: the engine's memory, one entry for each rank; none where G1 is ours.
    #[cfg(feature = "worker")]
    pub(super) fn local_workers(
        &self,
        engine: Option<Vec<G1Memory>>,
        volumes: Option<VolumeRegistry>,
    ) -> Result<Workers, BuildError> {
        let patience = self.config.transfer.rank_lost_after;
        if !patience.is_zero() {
            let rule =
                "must be 0 with workers of this process: they write to its memory as long as they live"
                    .to_owned();
            let (key, value) = ("transfer.rank_lost_after", format!("{patience:?}"));
            return Err(ConfigError::Rule { key, value, rule }.into());
        }
        let (tag, epoch) = (self.namespace.tag(), self.leader.transfers.settings.epoch);
        let sink = |rank| self.sink(rank);
        let volumes = crate::workers::open_volumes(&self.config, volumes, tag)?;
        let ranks = self.config.parallelism.tensor_parallel as usize;
        let memory = engine.unwrap_or_else(|| vec![G1Memory::Owned; ranks]);
        let workers = Workers::start(&self.config, &memory, self.blocks, volumes, tag, epoch, &sink)?;
        for took_over in workers.took_over() {
            self.leader.metrics.recovered(RecoveryOutcome::TakenOver).add(took_over.blocks);
            self.leader.metrics.recovered(RecoveryOutcome::LeftBehind).add(took_over.left_behind);
        }
        let metrics = &self.leader.metrics;
        metrics.refresh_by(workers.disk_refresh(metrics));
        metrics.refresh_by(workers.volume_refresh(metrics));
        self.leader.ranks.connect(workers.links());
        Ok(workers)
    }

    /// Workers that are somewhere else.
    pub(super) fn connect(&self, mut connect: impl FnMut(Rank, Epoch, MessageSink) -> Box<dyn WorkerLink>) {
        let epoch = self.leader.transfers.settings.epoch;
        let ranks = self.leader.ranks.all();
        self.leader.ranks.connect(ranks.clone().map(|rank| connect(rank, epoch, self.sink(rank))).collect());
        // A worker that starts later says so, and is sent the volumes then.
        ranks.for_each(|rank| self.leader.volumes.rank_started(rank));
    }

    /// Workers that listen somewhere, one for each rank; waits for all of them.
    ///
    /// # Errors
    /// The first rank whose worker refuses this leader, or does not come.
    pub(super) fn connect_sockets(&self) -> Result<(), BuildError> {
        let sockets = self.config.parallelism.workers.as_slice();
        let (tag, epoch) = (self.namespace.tag(), self.leader.transfers.settings.epoch);
        let connect = |(rank, socket): (Rank, &PathBuf)| {
            let terms = leader_terms(&self.config, self.g1_blocks, tag, rank, epoch);
            let leader = Arc::downgrade(&self.leader);
            let notice = move |notice| {
                let Some(leader) = leader.upgrade() else { return };
                match notice {
                    WorkerNotice::Leaves(patience) => worker_leaves(&leader, rank, patience),
                    WorkerNotice::Ended(ProcessState::Ended) => leader.worker_ended(rank),
                    WorkerNotice::Ended(ProcessState::MayRun) => {}
                }
            };
            let address = self.config.parallelism.worker_address(socket)?;
            SocketLink::connect(address, terms, self.sink(rank), notice).map_err(|error| {
                BuildError::RemoteWorker { rank, socket: socket.clone(), reason: error.to_string() }
            })
        };
        let links = self.leader.ranks.all().zip(sockets).map(connect).collect::<Result<Vec<_>, _>>()?;
        let boxed = |link: &SocketLink| -> Box<dyn WorkerLink> { Box::new(link.clone()) };
        self.leader.ranks.connect(links.iter().map(boxed).collect());
        self.leader.ranks.all().for_each(|rank| self.leader.volumes.rank_started(rank));
        let until = kvbm_plan::clock::now() + RECOVERY_TIMEOUT;
        for ((rank, link), socket) in self.leader.ranks.all().zip(links).zip(sockets) {
            self.wait_for_worker(rank, &link, until).map_err(|reason| BuildError::RemoteWorker {
                rank,
                socket: socket.clone(),
                reason,
            })?;
        }
        Ok(())
    }

    /// Waits until the worker of `rank` has said that it is ready; else why it has not.
    fn wait_for_worker(&self, rank: Rank, link: &SocketLink, until: Instant) -> Result<(), String> {
        while self.leader.ranks.contact(rank).is_some_and(|contact| contact.starts == 0) {
            let late = kvbm_plan::clock::now() >= until;
            match link.status() {
                LineStatus::Refused { reason } => return Err(reason),
                LineStatus::Connecting { reason } if late => return Err(reason),
                LineStatus::Connected { peer, .. } if late => {
                    let seconds = RECOVERY_TIMEOUT.as_secs();
                    return Err(format!("{peer} is not ready after {seconds} s: see its log"));
                }
                _ => std::thread::sleep(WORKER_TICK),
            }
        }
        Ok(())
    }

    /// Workers that move no bytes.
    pub(super) fn connect_metadata(&self) {
        self.leader.offload.decide_inline();
        self.connect(|rank, epoch, sink| Box::new(MetadataWorker::start(rank, epoch, sink)));
    }

    /// Opens for business with workers of this process.
    #[cfg(feature = "worker")]
    pub(super) fn finish<G>(
        self,
        workers: Workers,
        agent: RemoteAgentGiven,
        g1: G,
    ) -> Result<KvBlockManager<G>, BuildError> {
        let events = self.start()?;
        if self.config.remote.enabled {
            self.start_remote_memory(&workers, agent)?;
        }
        let (admin, metrics_server) = (self.administer()?, self.serve_metrics()?);
        let Self { config, namespace, hasher, leader, .. } = self;
        Ok(KvBlockManager { admin, metrics_server, leader, namespace, hasher, config, events, g1, workers })
    }

    /// Takes part in remote memory.
    #[cfg(feature = "worker")]
    fn start_remote_memory(
        &self,
        workers: &Workers,
        agent: RemoteAgentGiven,
    ) -> Result<(), RemoteStartError> {
        let peers = remote::start(
            &Ours {
                config: &self.config,
                namespace: self.namespace.tag(),
                epoch: self.leader.transfers.settings.epoch,
                registry: &self.leader.registry,
                metrics: &self.leader.metrics,
                workers,
            },
            agent,
        )?;
        let set = self.leader.peers.set(peers);
        debug_assert!(set.is_ok(), "a manager meets its peers once");
        Ok(())
    }

    /// Opens for business with workers elsewhere.
    pub(super) fn finish_remote<G>(self, g1: G) -> Result<KvBlockManager<G>, BuildError> {
        if self.config.remote.enabled {
            let rule =
                "must be false here: peers read and fill G2 of workers in the leader's process".to_owned();
            let (key, value) = ("remote.enabled", "true".to_owned());
            return Err(ConfigError::Rule { key, value, rule }.into());
        }
        let (events, admin, metrics_server) = (self.start()?, self.administer()?, self.serve_metrics()?);
        let Self { config, namespace, hasher, leader, .. } = self;
        Ok(KvBlockManager {
            admin,
            metrics_server,
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
        if !self.kept.is_empty() {
            // Behind G3: a parent may be there alone.
            let metadata = kvbm_pool::BlockMetadata::default();
            let kept = self.leader.registry.restore(Tier::G2, &self.kept, metadata)?;
            let left_out = self.kept.len() as u64 - kept.restored.min(self.kept.len() as u64);
            tracing::info!(target: "kvbm", blocks = kept.restored, left_out, "G2 taken over");
        }
        self.leader.start_threads().map_err(|(name, source)| BuildError::Thread { name, source })?;
        let BlockCosts { tokens, .. } = self.leader.transfers.settings.block_costs;
        let ranks = u64::from(self.config.parallelism.tensor_parallel);
        let bytes = self.config.group_block_bytes().into_iter().map(|bytes| bytes.saturating_mul(ranks));
        let node = NodeId(self.config.events.node);
        let facts = BlockFacts { block_bytes: bytes.collect(), block_tokens: tokens, node };
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

    /// Listens where the manager is administered.
    fn administer(&self) -> Result<Admin, BuildError> {
        let Self { config, namespace, leader, .. } = self;
        let calls = AdminCalls::new(Arc::downgrade(leader), namespace.clone(), &config.namespace.model);
        Ok(Admin::start(&config.admin, calls)?)
    }

    /// Listens where metrics are asked for.
    fn serve_metrics(&self) -> Result<Option<MetricsServer>, BuildError> {
        let config = &self.config.metrics;
        let serve = |addr| self.leader.metrics.serve_with(addr, &config.security());
        config.http.map(serve).transpose().map_err(BuildError::Metrics)
    }

    /// What the events of volumes are made of. They do not keep the leader alive.
    fn volume_changes(&self) -> Option<VolumeChanges> {
        if !self.leader.volumes.reachable {
            return None;
        }
        let leader = Arc::downgrade(&self.leader);
        let mut next = 0;
        let drain = move |max: usize, take: &mut dyn FnMut(u64, Change)| {
            if let Some(leader) = leader.upgrade() {
                next = leader.volumes.drain(max, take);
            }
            next
        };
        let weak = Arc::downgrade(&self.leader);
        let held = move || weak.upgrade().map(|leader| leader.volumes.snapshot()).unwrap_or_default();
        Some(VolumeChanges { drain: Box::new(drain), held: Box::new(held) })
    }

    fn recover(&self) -> Result<(), BuildError> {
        let span = tracing::info_span!(target: "kvbm", "recovery", blocks = tracing::field::Empty);
        let _inside = span.enter();
        let deadline = kvbm_plan::clock::now() + RECOVERY_TIMEOUT;
        let common = self.leader.recoveries.wait(deadline).map_err(|rank| BuildError::Recovery { rank })?;
        let in_use = self.leader.registry.retire(Tier::G3, &common.unusable);
        let retired = common.unusable.len() - in_use.len();
        let restored =
            self.leader.registry.restore(Tier::G3, &common.blocks, kvbm_pool::BlockMetadata::default())?;
        span.record("blocks", restored.restored);
        for (outcome, blocks) in [
            (RecoveryOutcome::Restored, restored.restored),
            (RecoveryOutcome::Orphan, restored.orphans.len() as u64),
            (RecoveryOutcome::Incomplete, common.incomplete.len() as u64),
            (RecoveryOutcome::Duplicate, restored.duplicates.len() as u64),
            (RecoveryOutcome::Invalid, restored.invalid),
        ] {
            self.leader.metrics.recovered(outcome).add(blocks);
        }
        let (orphans, incomplete) = (restored.orphans.len(), common.incomplete.len());
        let blocks = restored.restored;
        tracing::info!(target: "kvbm", blocks, orphans, incomplete, retired, "G3 recovered");
        if orphans > 0 {
            tracing::warn!(
                target: "kvbm", orphans,
                "blocks on disk whose parent is gone were dropped, their slots are free; `kvbm disk verify` looks for damage"
            );
        }
        self.leader.slots.release(&common.incomplete);
        for slots in [&restored.rejected, &restored.duplicates, &restored.orphans] {
            self.leader.slots.release(slots);
        }
        Ok(())
    }
}

const NO_SOURCE: &str = "needs device.capacity or host.capacity: blocks come from there";

/// Tiers that blocks cannot reach, or have nowhere to go from.
fn check_tiers(config: &Config, is_engine: bool) -> Result<(), ConfigError> {
    let Config { device, host, disk, .. } = config;
    if !host.capacity.is_none() {
        return Ok(());
    }
    let (key, value, rule) = if is_engine {
        let rule = "must be above 0 where the engine owns G1: kvbm keeps blocks in host memory then";
        ("host.capacity", host.capacity.to_string(), rule)
    } else if !device.capacity.is_none() {
        return Ok(());
    } else if let Some(volume) = config.volume.first() {
        ("volume.uri", shown_uri(&volume.uri), NO_SOURCE)
    } else if !disk.capacity.is_none() {
        ("disk.capacity", disk.capacity.to_string(), NO_SOURCE)
    } else {
        return Ok(());
    };
    Err(ConfigError::Rule { key, value, rule: rule.to_owned() })
}

/// A namespace that the builder was given, of the model as it is at last. What the configuration
/// says beside it would have no effect, so it is refused.
fn complete(given: Namespace, config: &Config) -> Result<Namespace, ConfigError> {
    let model = given.model_id().to_owned();
    if config.namespace != (NamespaceConfig { model: model.clone(), ..NamespaceConfig::default() }) {
        let rule = "was given to the builder: set all of it there, or leave it out and set [namespace] alone";
        return Err(ConfigError::Rule { key: "namespace", value: model, rule: rule.to_owned() });
    }
    Ok(config.model.namespace(given).dtype(config.content()))
}

/// Signatures let anybody who can read them try out secrets.
fn warn_of_short(secret: Option<&[u8]>) {
    const ENOUGH_BYTES: usize = 16;
    if let Some(bytes) = secret.map(<[u8]>::len).filter(|bytes| *bytes < ENOUGH_BYTES) {
        tracing::warn!(
            target: "kvbm", bytes,
            "namespace.deployment_secret is short: who can read the disk or a volume can find it by trial; \
             use what `openssl rand -hex 32` prints"
        );
    }
}

fn registry(
    config: &Config,
    blocks: [u32; 3],
    tenants: Vec<TenantConfig>,
    eviction: Option<MakeEviction>,
) -> Result<Registry, kvbm_pool::ConfigError> {
    let policy = match config.policy.eviction {
        EvictionPolicy::LruLeaf => PolicyKind::LruLeaf,
        EvictionPolicy::Hazard => PolicyKind::Hazard,
    };
    let config = RegistryConfig {
        groups: pool_groups(config),
        event_capacity: config.events.ring_capacity,
        policy,
        policy_seed: config.policy.seed,
        epoch: epoch(),
        tenants,
        ..RegistryConfig::new(blocks)
    };
    match eviction {
        Some(make) => Registry::with_policy(&config, make(blocks)),
        None => Registry::new(&config),
    }
}

/// The cache groups as the registry knows them.
fn pool_groups(config: &Config) -> Vec<GroupConfig> {
    let tokens_per_block = config.model.page_size;
    let groups = config.model.cache_groups();
    groups.iter().map(|group| GroupConfig { kind: group.kind, tokens_per_block }).collect()
}

/// Builds the parts of a leader, lowest first.
fn leader(
    config: &Config,
    blocks: [u32; 3],
    registry: Registry,
    tenant_names: Vec<String>,
    admission: Arc<dyn AdmissionPolicy>,
    to_volumes: bool,
) -> Arc<Leader> {
    let settings = TransferSettings {
        epoch: registry.epoch(),
        writers: config.ranks().map(|rank| config.writer_of(rank)).collect(),
        max_plan_blocks: MAX_PLAN_BLOCKS,
        max_read_blocks: max_read_blocks(config.rank_block_bytes()),
        transfer_deadline: config.transfer.deadline,
        read_deadline: config.disk.read_deadline,
        keep_loaded: config.host.keep_loaded,
        onboard_patience: config.policy.onboard_patience,
        num_layers: config.model.separable_layers(),
        layer_steps: config.transfer.layer_steps,
        block_costs: block_costs(config),
    };
    let (metrics, ranks) = (Metrics::new(), config.parallelism.tensor_parallel as usize);
    metrics.set_ranks(ranks);
    let ranks = Arc::new(Ranks::new(ranks, metrics.clone(), config.transfer.rank_lost_after));
    let tenants = Tenants::new(registry.clone(), metrics.clone(), tenant_names);
    let deadline = config.transfer.deadline;
    let directories = Directories::new(
        Striping::new(1 + config.disk.more_dirs.as_slice().len(), config.rank_block_bytes()),
        longest_probe(config.disk.read_deadline),
        deadline,
    );
    let encrypted = config.disk.encrypt;
    let slots =
        Slots::new(registry.clone(), Arc::clone(&ranks), metrics.clone(), deadline, directories, encrypted);
    let slots = Arc::new(slots);
    let transfers =
        Transfers::new(registry.clone(), Arc::clone(&ranks), Arc::clone(&slots), metrics.clone(), settings);
    let volumes = Arc::new(Volumes::new(
        config,
        to_volumes,
        metrics.clone(),
        Arc::clone(&ranks),
        Arc::clone(&transfers),
    ));
    let offload = Offload::new(
        registry.clone(),
        Arc::clone(&transfers),
        Arc::clone(&slots),
        Arc::clone(&volumes),
        metrics.clone(),
        admission,
        edges(config, blocks, to_volumes),
    );
    let groups = pool_groups(config);
    let most = f64::from(blocks[1]) * config.policy.prefetch_share;
    let prefetch_budget = PrefetchBudget::new(most.ceil() as usize);
    Leader::new(Parts {
        registry,
        groups,
        tenants,
        metrics,
        ranks,
        slots,
        transfers,
        volumes,
        offload,
        prefetch_budget,
    })
}

fn block_costs(config: &Config) -> BlockCosts {
    let tokens = config.model.page_size;
    let speed = config.policy.prefill_tokens_per_s;
    BlockCosts {
        bytes: config.rank_block_bytes().saturating_mul(u64::from(config.parallelism.tensor_parallel)),
        tokens,
        recompute: (speed > 0.0)
            .then(|| Duration::try_from_secs_f64(f64::from(tokens) / speed).unwrap_or(Duration::MAX)),
    }
}

/// Larger in every life of this machine: microseconds of the wall clock. Where a clock was behind
/// it is not; followers believe the lower one once the higher has been silent
/// ([`kvbm_events::Tracker`]).
fn epoch() -> Epoch {
    #[cfg(kvbm_sim)]
    if let Some(epoch) = kvbm_plan::simulation::next_epoch() {
        return epoch;
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// Ways down. Without host memory blocks leave the device for the disk and for volumes.
fn edges(config: &Config, [g1, g2, g3]: [u32; 3], to_volumes: bool) -> Vec<Edge> {
    let limit = |blocks: u32, share: f64| (f64::from(blocks) * share) as usize;
    let wear = || {
        let slot_bytes = config.slot_bytes(Tier::G3).max(1);
        let blocks_per_s = config.disk.write_budget.get() as f64 / slot_bytes as f64;
        WearBudget::new(g3, config.disk.drive_writes_per_day, blocks_per_s)
    };
    let mut edges = Vec::new();
    let triggers = config.offload.g1_g2.clone();
    if g1 > 0 && g2 > 0 {
        let limit = limit(g1, triggers.queue_share);
        edges.push(Edge::new(Path::G1_G2, triggers, limit, None));
    } else if g1 > 0 && g2 == 0 && g3 > 0 {
        let limit = limit(g1, triggers.queue_share);
        edges.push(Edge::new(Path::G1_G3, triggers, limit, wear()));
    }
    if g2 > 0 && g3 > 0 {
        let triggers = config.offload.g2_g3.clone();
        let limit = limit(g2, triggers.queue_share);
        edges.push(Edge::new(Path::G2_G3, triggers, limit, wear()));
    }
    if to_volumes {
        let volumes = &config.volumes;
        let keeps_victims = volumes.offload == VolumeOffload::Victims;
        let (path, blocks) = if g2 == 0 { (Path::G1_G4, g1) } else { (Path::G2_G4, g2) };
        // With a disk, what goes to volumes is what goes to the disk.
        let ahead_share = if keeps_victims && g3 == 0 { config.offload.g2_g3.ahead_share } else { 0.0 };
        let triggers = EdgeConfig {
            write_through: volumes.offload == VolumeOffload::WriteThrough,
            watermark: 1.0,
            idle_iterations: 0,
            queue_share: volumes.queue_share,
            ahead_share,
        };
        edges.push(Edge::new(path, triggers, limit(blocks, volumes.queue_share), None));
    }
    edges
}
