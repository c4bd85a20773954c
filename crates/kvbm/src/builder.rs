//! Building a manager: what is required cannot be forgotten.

use crate::config::{Capacity, Config, ConfigError, ModelConfig, NamespaceConfig};
use crate::engine::Engine;
use crate::events::{BlockFacts, EventPump, EventsError};
use crate::leader::offload::{Edge, Offloads};
use crate::leader::wear::WearBudget;
use crate::leader::{Leader, Settings};
use crate::manager::{KvBlockManager, Owned};
use crate::metrics::Metrics;
use crate::worker::{MessageSink, MetadataWorker, WorkerLink};
use crate::workers::{DeviceMemoryOf, WorkerError, Workers};
use kvbm_device::Device;
use kvbm_plan::{Epoch, Path, Rank, Tier};
use kvbm_pool::{GroupConfig, PolicyKind, Registry, RegistryConfig};
use kvbm_storage::BoundLayout;
use kvbm_tokens::{BlockHasher, Namespace, NamespaceError};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the ranks may take to say what they found on their disks.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Blocks of one plan: enough to hide the cost of a plan, few enough that several are under way for a large prefix.
const MAX_PLAN_BLOCKS: usize = 128;
/// How often transfers past their deadline are looked for.
const EXPIRY_TICK: Duration = Duration::from_millis(50);

/// Nothing is set yet.
#[derive(Debug)]
pub struct NeedsModel(());

/// The model is set.
#[derive(Debug)]
pub struct NeedsNamespace(());

/// Whose G1 is must still be said.
#[derive(Debug)]
pub struct NeedsDevice(());

/// Everything required is set; G1 is ours.
#[derive(Debug)]
pub struct WithOwned(());

/// Everything required is set; G1 is the engine's.
pub struct WithEngine(Vec<(Arc<dyn Device>, BoundLayout)>);

/// Builds a [`KvBlockManager`]. Each step gives the next one its type: a builder without model, namespace or device has no
/// `build`.
#[derive(Debug)]
pub struct Builder<State> {
    config: Config,
    namespace: Option<Namespace>,
    state: State,
}

/// A manager that cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A setting breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The namespace is incomplete.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// What is on disk could not be found again by its hash.
    #[error(transparent)]
    NotPersistable(#[from] kvbm_tokens::NotPersistable),
    /// The bookkeeping refuses the sizes.
    #[error(transparent)]
    Registry(#[from] kvbm_pool::ConfigError),
    /// A worker does not start.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Events cannot be published.
    #[error(transparent)]
    Events(#[from] EventsError),
    /// The system refused a thread.
    #[error("cannot start thread {name}: {source}; raise the limit of threads")]
    Thread {
        /// Its name.
        name: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A rank did not say what its disk holds.
    #[error("not every rank answered within {} s what its disk holds: check the workers", RECOVERY_TIMEOUT.as_secs())]
    Recovery,
    /// What the disk holds does not fit.
    #[error(transparent)]
    Restore(#[from] kvbm_pool::RestoreError),
    /// Not one engine memory for each rank.
    #[error("{given} engine memories for {ranks} ranks: give one for each rank, in order")]
    Ranks {
        /// Memories given.
        given: usize,
        /// Ranks configured.
        ranks: usize,
    },
}

impl<G> KvBlockManager<G> {
    /// Starts a builder.
    pub fn builder() -> Builder<NeedsModel> {
        Builder { config: Config::default(), namespace: None, state: NeedsModel(()) }
    }
}

impl Builder<NeedsModel> {
    /// The shape of the model's KV cache.
    pub fn model(mut self, model: ModelConfig) -> Builder<NeedsNamespace> {
        self.config.model = model;
        Builder { config: self.config, namespace: None, state: NeedsNamespace(()) }
    }

    /// Everything from a configuration, `[device]` included.
    pub fn config(self, config: Config) -> Builder<WithOwned> {
        Builder { config, namespace: None, state: WithOwned(()) }
    }
}

impl Builder<NeedsNamespace> {
    /// What must be equal, beside the tokens, for two blocks to be the same. Page size and dtype are taken from the model.
    pub fn namespace(self, namespace: Namespace) -> Builder<NeedsDevice> {
        let mut config = self.config;
        config.namespace = NamespaceConfig { model: namespace.model_id().to_owned(), ..config.namespace };
        let model = &config.model;
        let namespace = namespace.page_size(model.page_size).dtype(model.dtype.name());
        Builder { config, namespace: Some(namespace), state: NeedsDevice(()) }
    }
}

impl Builder<NeedsDevice> {
    /// G1 is a pool of ours, of this size on each rank.
    pub fn device(mut self, capacity: impl Into<Capacity>) -> Builder<WithOwned> {
        self.config.device.capacity = capacity.into();
        Builder { config: self.config, namespace: self.namespace, state: WithOwned(()) }
    }

    /// G1 is the engine's: for each rank its device and its KV tensors, bound to the layout they have.
    pub fn engine_device(self, ranks: Vec<(Arc<dyn Device>, BoundLayout)>) -> Builder<WithEngine> {
        Builder { config: self.config, namespace: self.namespace, state: WithEngine(ranks) }
    }
}

impl<State> Builder<State> {
    /// G2: host memory on each rank.
    #[must_use]
    pub fn host(mut self, capacity: impl Into<Capacity>) -> Self {
        self.config.host.capacity = capacity.into();
        self
    }

    /// G3: a directory on SSD, and how much of it each rank may use.
    #[must_use]
    pub fn disk(mut self, dir: impl Into<PathBuf>, capacity: impl Into<Capacity>) -> Self {
        self.config.disk.dir = Some(dir.into());
        self.config.disk.capacity = capacity.into();
        self
    }

    /// Ranks that the KV heads are divided among.
    #[must_use]
    pub fn tensor_parallel(mut self, ranks: u32) -> Self {
        self.config.parallelism.tensor_parallel = ranks;
        self
    }

    /// Any other setting.
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }
}

impl Builder<WithOwned> {
    /// Starts the workers of all ranks in this process.
    ///
    /// # Errors
    /// [`BuildError`] names the setting, the file or the device.
    pub fn build(self) -> Result<KvBlockManager<Owned>, BuildError> {
        let core = Core::new(self.config, self.namespace, None)?;
        let workers = core.local_workers(&DeviceMemoryOf::Owned)?;
        core.finish(workers, Owned(()))
    }

    /// A manager that keeps the books and moves no bytes: for replays and capacity planning.
    ///
    /// # Errors
    /// [`BuildError`] names the setting.
    pub fn build_metadata_only(self) -> Result<KvBlockManager<Owned>, BuildError> {
        let core = Core::new(self.config, self.namespace, None)?;
        let (epoch, sink) = (core.leader.settings.epoch, core.sink());
        let start = |rank| -> Box<dyn WorkerLink> {
            Box::new(MetadataWorker::start(Rank(rank), epoch, Arc::clone(&sink)))
        };
        core.leader.connect((0..core.leader.settings.ranks as u16).map(start).collect());
        core.finish(Workers::default(), Owned(()))
    }

    /// A manager whose workers are somewhere else: `connect` is given each rank and the sink for its messages, and returns the
    /// line to it.
    ///
    /// # Errors
    /// [`BuildError`]; [`BuildError::Recovery`] where a rank with a disk does not say what that holds.
    pub fn build_with_workers(
        self,
        mut connect: impl FnMut(Rank, Epoch, MessageSink) -> Box<dyn WorkerLink>,
    ) -> Result<KvBlockManager<Owned>, BuildError> {
        let core = Core::new(self.config, self.namespace, None)?;
        let (epoch, sink) = (core.leader.settings.epoch, core.sink());
        let ranks = 0..core.leader.settings.ranks as u16;
        core.leader.connect(ranks.map(|rank| connect(Rank(rank), epoch, Arc::clone(&sink))).collect());
        core.finish(Workers::default(), Owned(()))
    }
}

impl Builder<WithEngine> {
    /// Starts the workers of all ranks in this process.
    ///
    /// # Errors
    /// [`BuildError`] names the setting, the file or the device.
    pub fn build(self) -> Result<KvBlockManager<Engine>, BuildError> {
        let WithEngine(memory) = self.state;
        let ranks = self.config.parallelism.tensor_parallel as usize;
        if memory.len() != ranks {
            return Err(BuildError::Ranks { given: memory.len(), ranks });
        }
        let blocks = memory.iter().map(|(_, bound)| bound.num_blocks()).min().unwrap_or(0);
        let core = Core::new(self.config, self.namespace, Some(blocks))?;
        let workers = core.local_workers(&DeviceMemoryOf::Engine(&memory))?;
        core.finish(workers, Engine::new(blocks))
    }
}

/// What every manager has, before its workers.
struct Core {
    config: Config,
    namespace: Namespace,
    hasher: BlockHasher,
    blocks: [u32; 3],
    leader: Arc<Leader>,
}

impl Core {
    /// `engine_blocks`: set where the engine owns G1, which then is none of the registry's tiers.
    fn new(
        mut config: Config,
        namespace: Option<Namespace>,
        engine_blocks: Option<u32>,
    ) -> Result<Self, BuildError> {
        if engine_blocks.is_some() {
            config.device.capacity = Capacity::NONE;
        }
        config.validate()?;
        let namespace = namespace.unwrap_or_else(|| config.namespace());
        let hasher = namespace.hasher()?;
        if !config.disk.capacity.is_none() {
            namespace.check_persistable()?;
        }
        let block_bytes = config.rank_block_bytes();
        let blocks = [config.device.capacity, config.host.capacity, config.disk.capacity]
            .map(|capacity| capacity.blocks(block_bytes).min(u64::from(u32::MAX - 1)) as u32);
        let registry = registry(&config, blocks)?;
        let settings = Settings {
            epoch: registry.epoch(),
            ranks: config.parallelism.tensor_parallel as usize,
            max_plan_blocks: MAX_PLAN_BLOCKS,
            transfer_deadline: config.transfer.deadline,
            read_deadline: config.disk.read_deadline,
        };
        let offloads = Offloads::new(edges(&config, blocks));
        let leader = Leader::new(registry, settings, Metrics::new(), offloads);
        Ok(Self { config, namespace, hasher, blocks, leader })
    }

    /// Where workers put their messages. It does not keep the leader alive.
    fn sink(&self) -> MessageSink {
        let leader: Weak<Leader> = Arc::downgrade(&self.leader);
        Arc::new(move |message| {
            if let Some(leader) = leader.upgrade() {
                leader.deliver(message);
            }
        })
    }

    fn local_workers(&self, memory: &DeviceMemoryOf<'_>) -> Result<Workers, BuildError> {
        let (tag, epoch) = (self.namespace.tag(), self.leader.settings.epoch);
        let workers = Workers::start(&self.config, memory, self.blocks, tag, epoch, &self.sink())?;
        self.leader.connect(workers.links());
        Ok(workers)
    }

    /// Brings back what the disks hold, then opens for business.
    fn finish<G>(self, workers: Workers, g1: G) -> Result<KvBlockManager<G>, BuildError> {
        if self.blocks[Tier::G3.index()] > 0 {
            self.recover()?;
        }
        watch_deadlines(&self.leader)?;
        let facts = BlockFacts {
            block_bytes: self.config.rank_block_bytes() * u64::from(self.config.parallelism.tensor_parallel),
            block_tokens: self.config.model.page_size,
        };
        let events = EventPump::start(self.leader.registry.clone(), &self.config.events, facts)?;
        let Self { config, namespace, hasher, leader, .. } = self;
        Ok(KvBlockManager { leader, namespace, hasher, config, events, g1, workers })
    }

    fn recover(&self) -> Result<(), BuildError> {
        let deadline = Instant::now() + RECOVERY_TIMEOUT;
        let common = self.leader.recoveries.wait(deadline).ok_or(BuildError::Recovery)?;
        let restored =
            self.leader.registry.restore(Tier::G3, &common.blocks, kvbm_pool::BlockMetadata::default())?;
        tracing::info!(blocks = restored.restored, incomplete = common.incomplete.len(), "G3 recovered");
        self.leader.release(&common.incomplete);
        for slots in [&restored.rejected, &restored.duplicates, &restored.orphans] {
            self.leader.release(slots);
        }
        Ok(())
    }
}

fn registry(config: &Config, blocks: [u32; 3]) -> Result<Registry, kvbm_pool::ConfigError> {
    let crate::config::EvictionPolicy::LruLeaf = config.policy.eviction;
    Registry::new(&RegistryConfig {
        groups: vec![GroupConfig::full(config.model.page_size)],
        event_capacity: config.events.ring_capacity,
        policy: PolicyKind::LruLeaf,
        epoch: epoch(),
        ..RegistryConfig::new(blocks)
    })
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
        let wear = WearBudget::new(g3, config.disk.drive_writes_per_day);
        edges.push(Edge::new(Path::G2_G3, triggers, limit, wear));
    }
    edges
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
