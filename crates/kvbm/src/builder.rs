//! Building a manager: what is required cannot be forgotten.

mod core;

use self::core::{Core, Policies, RECOVERY_TIMEOUT};
use crate::admin::{Admin, AdminError};
use crate::admission::AdmissionPolicy;
use crate::config::{Capacity, Config, ConfigError, ModelConfig, NamespaceConfig, VolumeConfig};
use crate::engine::Engine;
use crate::events::EventsError;
use crate::http::HttpError;
use crate::manager::{KvBlockManager, Owned};
use crate::worker::{MessageSink, WorkerLink};
#[cfg(feature = "worker")]
use crate::workers::{G1Memory, GroupTensors, KeptHost, WorkerError};
#[cfg(feature = "worker")]
use kvbm_device::Device;
#[cfg(feature = "worker")]
use kvbm_plan::{BlockId, BlockIdentity, RecoveredBlock};
use kvbm_plan::{Epoch, Rank};
use kvbm_pool::EvictionPolicy;
#[cfg(feature = "worker")]
use kvbm_storage::BoundLayout;
use kvbm_tokens::{Namespace, NamespaceError};
#[cfg(feature = "worker")]
use kvbm_transfer::Movers;
#[cfg(feature = "worker")]
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

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

/// Everything required is set; G1 is so many blocks of the engine's, which workers elsewhere know.
#[derive(Debug)]
pub struct WithEngineBlocks(u32);

/// Everything required is set; G1 is the engine's.
#[cfg(feature = "worker")]
#[derive(Debug)]
pub struct WithEngine(Vec<G1Memory>);

/// Builds a [`KvBlockManager`]. Each step gives the next one its type: a builder without model,
/// namespace or device has no `build`.
#[derive(Debug)]
pub struct Builder<State> {
    config: Config,
    namespace: Option<Namespace>,
    given: SuppliedParts,
    state: State,
}

/// What no configuration can say.
#[derive(Debug, Default)]
struct SuppliedParts {
    policies: Policies,
    #[cfg(feature = "worker")]
    volumes: Option<kvbm_volume::VolumeRegistry>,
    #[cfg(feature = "worker")]
    agent: Option<Arc<dyn kvbm_nixl::RemoteAgent>>,
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
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Nobody could administer the manager as it is configured.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// Metrics cannot be served as they are configured.
    #[error("metrics.{0}")]
    Metrics(HttpError),
    /// The manager cannot take part in remote memory.
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Remote(#[from] crate::remote::RemoteStartError),
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
    /// A rank did not report what its disk holds: the first one of those.
    #[error("rank {rank} has not reported within {} s what its disk holds: start its worker, and see its log", RECOVERY_TIMEOUT.as_secs())]
    Recovery {
        /// The rank.
        rank: Rank,
    },
    /// A worker in another process did not come, or refuses this leader.
    #[error("worker of rank {rank} at {}: {reason}", socket.display())]
    RemoteWorker {
        /// The rank.
        rank: Rank,
        /// Its socket, or address.
        socket: PathBuf,
        /// What the last try came to.
        reason: String,
    },
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
        Builder {
            config: Config::default(),
            namespace: None,
            given: SuppliedParts::default(),
            state: NeedsModel(()),
        }
    }
}

/// Whether the files and commands that `config` names can be used: tokens, certificates, keys.
/// Nothing is started: for whoever ends another process first.
///
/// # Errors
/// [`BuildError`] names the setting and the file.
pub fn check_files(config: &Config) -> Result<(), BuildError> {
    Admin::check(&config.admin)?;
    if let Some(addr) = config.metrics.http {
        config.metrics.security().check(addr).map_err(BuildError::Metrics)?;
    }
    #[cfg(feature = "worker")]
    crate::encryption::operator_keys(config).map_err(WorkerError::from)?;
    Ok(())
}

impl Builder<NeedsModel> {
    /// The shape of the model's KV cache.
    pub fn model(mut self, model: ModelConfig) -> Builder<NeedsNamespace> {
        self.config.model = model;
        Builder { config: self.config, namespace: None, given: self.given, state: NeedsNamespace(()) }
    }

    /// Everything from a configuration, `[device]` included, in place of the settings that were
    /// made before. What no configuration can say (policies, a registry of volumes) stays.
    pub fn config(self, config: Config) -> Builder<WithOwned> {
        Builder { config, namespace: None, given: self.given, state: WithOwned(()) }
    }
}

impl Builder<NeedsNamespace> {
    /// What must be equal, beside the tokens, for two blocks to be the same. Page size and dtype
    /// are taken from the model.
    pub fn namespace(self, namespace: Namespace) -> Builder<NeedsDevice> {
        let mut config = self.config;
        config.namespace = NamespaceConfig { model: namespace.model_id().to_owned(), ..config.namespace };
        Builder { config, namespace: Some(namespace), given: self.given, state: NeedsDevice(()) }
    }
}

impl Builder<NeedsDevice> {
    /// G1 is a pool of ours, of this size on each rank.
    pub fn device(mut self, capacity: impl Into<Capacity>) -> Builder<WithOwned> {
        self.config.device.capacity = capacity.into();
        Builder { config: self.config, namespace: self.namespace, given: self.given, state: WithOwned(()) }
    }

    /// G1 is the engine's, of this many blocks on each rank; the workers, elsewhere, know its
    /// memory.
    pub fn engine_blocks(self, blocks: u32) -> Builder<WithEngineBlocks> {
        Builder {
            config: self.config,
            namespace: self.namespace,
            given: self.given,
            state: WithEngineBlocks(blocks),
        }
    }

    /// G1 is the engine's: for each rank its device and its KV tensors, bound to the layout they
    /// have.
    #[cfg(feature = "worker")]
    pub fn engine_device(self, ranks: Vec<(Arc<dyn Device>, BoundLayout)>) -> Builder<WithEngine> {
        self.engine(ranks.into_iter().map(|(device, bound)| G1Memory::EngineDevice(device, bound)).collect())
    }

    /// G1 is the engine's, in host memory: for each rank its KV tensors
    /// ([`HostStorage::from_external`](kvbm_storage::HostStorage::from_external)), bound to the
    /// layout they have. No device is involved: processors copy, fences are events that the engine
    /// completes ([`Event::completable`](kvbm_device::Event::completable)), and nothing locks the
    /// pages of G2, whatever `host.pinned` says.
    #[cfg(feature = "worker")]
    pub fn engine_host(self, ranks: Vec<BoundLayout>) -> Builder<WithEngine> {
        self.engine(ranks.into_iter().map(G1Memory::EngineHost).collect())
    }

    /// G1 is the engine's, of a model with several cache groups. Each rank has its device (none
    /// where its tensors lie in host memory) and, for each group, the tensors, bound to the layout
    /// that they have. Block ids are those of one pool for all groups: an id means a block of one
    /// group at a time.
    #[cfg(feature = "worker")]
    pub fn engine_groups(self, ranks: Vec<GroupTensors>) -> Builder<WithEngine> {
        let memory = |(device, groups)| G1Memory::EngineGroups(device, groups);
        self.engine(ranks.into_iter().map(memory).collect())
    }

    /// G1 is memory of other processes, which together have so many blocks on each rank. They map
    /// G2 and copy: `ranks` reaches them, for each rank in order. Every block that leaves G2 is
    /// verified, whatever `transfer.verify_host` says: other processes can write there. Movers say
    /// what they have read, and the worker compares that.
    #[cfg(feature = "worker")]
    pub fn engine_movers(
        self,
        blocks: u32,
        ranks: impl IntoIterator<Item = Arc<dyn Movers>>,
    ) -> Builder<WithEngine> {
        self.engine(ranks.into_iter().map(|movers| G1Memory::Movers(blocks, movers, None)).collect())
    }

    #[cfg(feature = "worker")]
    fn engine(self, ranks: Vec<G1Memory>) -> Builder<WithEngine> {
        Builder {
            config: self.config,
            namespace: self.namespace,
            given: self.given,
            state: WithEngine(ranks),
        }
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

    /// Further directories for G3, best on devices of their own: blocks are spread over all of
    /// them, in this order.
    #[must_use]
    pub fn more_disk_dirs(mut self, dirs: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.config.disk.more_dirs = dirs.into_iter().collect();
        self
    }

    /// G4: a volume in a blob store, such as `dir:///mnt/kv` or `s3://BUCKET/PREFIX`. Each call
    /// adds one; their ids are 0, 1 and so on.
    #[must_use]
    pub fn volume(mut self, uri: impl Into<String>) -> Self {
        let id = self.config.volume.len() as u32;
        self.config.volume.push(VolumeConfig { uri: uri.into(), id, ..VolumeConfig::default() });
        self
    }

    /// Who opens volumes: `VolumeRegistry::new()`, or one that knows other schemes too
    /// ([`with_scheme`](kvbm_volume::VolumeRegistry::with_scheme)). With it, or with a volume in
    /// the configuration, workers have paths to volumes, so that
    /// [`register_volume`](KvBlockManager::register_volume) can add some while the manager runs. It
    /// must not know the volumes that are configured yet.
    #[cfg(feature = "worker")]
    #[must_use]
    pub fn volumes(mut self, registry: kvbm_volume::VolumeRegistry) -> Self {
        self.given.volumes = Some(registry);
        self
    }

    /// What moves bytes between nodes, in place of what `remote.agent` names. No other manager uses
    /// it.
    #[cfg(feature = "worker")]
    #[must_use]
    pub fn remote_agent(mut self, agent: Arc<dyn kvbm_nixl::RemoteAgent>) -> Self {
        self.given.agent = Some(agent);
        self
    }

    /// Ranks that the KV heads are divided among.
    #[must_use]
    pub fn tensor_parallel(mut self, ranks: u32) -> Self {
        self.config.parallelism.tensor_parallel = ranks;
        self
    }

    /// Sockets of the workers, or their addresses (`tcp://HOST:PORT`), one for each rank in order:
    /// each is a process of its own (`kvbm worker`, `WorkerServer`). They may be started before or
    /// after `build`, which waits for them for a minute at most.
    #[must_use]
    pub fn remote_workers(mut self, sockets: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.config.parallelism.workers = sockets.into_iter().collect();
        self
    }

    /// Who decides which blocks get a copy on a lower tier, in place of what `policy.admission`
    /// names.
    #[must_use]
    pub fn admission(mut self, policy: impl AdmissionPolicy + 'static) -> Self {
        self.given.policies.admission = Some(Arc::new(policy));
        self
    }

    /// Who chooses what is evicted, in place of what `policy.eviction` names: `make` is given the
    /// blocks of G1 (0 where the engine owns it), G2 and G3.
    #[must_use]
    pub fn eviction<P: EvictionPolicy + 'static>(
        mut self,
        make: impl FnOnce([u32; 3]) -> P + Send + 'static,
    ) -> Self {
        self.given.policies.eviction = Some(Box::new(|blocks| Box::new(make(blocks))));
        self
    }

    /// Any other setting.
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }
}

#[cfg(feature = "worker")]
impl Builder<WithOwned> {
    /// As `engine_movers` of a builder that needs a device, of a whole configuration, whose
    /// `[device]` then says nothing.
    pub fn engine_movers(
        self,
        blocks: u32,
        ranks: impl IntoIterator<Item = Arc<dyn Movers>>,
    ) -> Builder<WithEngine> {
        let ranks = ranks.into_iter().map(|movers| G1Memory::Movers(blocks, movers, None)).collect();
        Builder {
            config: self.config,
            namespace: self.namespace,
            given: self.given,
            state: WithEngine(ranks),
        }
    }
}

impl Builder<WithOwned> {
    /// Starts the workers of all ranks in this process, or connects to those that listen at the
    /// sockets of `parallelism.workers`.
    ///
    /// # Errors
    /// [`BuildError`] names the setting, the file, the device or the socket.
    pub fn build(self) -> Result<KvBlockManager<Owned>, BuildError> {
        if !self.config.parallelism.workers.as_slice().is_empty() {
            // Without host memory, workers have paths to volumes where one is configured.
            let more = !self.config.host.capacity.is_none();
            let core = Core::new(self.config, self.namespace, self.given.policies, None, more)?;
            core.connect_sockets()?;
            return core.finish_remote(Owned(()));
        }
        self.build_local()
    }

    #[cfg(not(feature = "worker"))]
    fn build_local(self) -> Result<KvBlockManager<Owned>, BuildError> {
        Err(sockets_needed("this build has no workers of its own (feature `worker`)"))
    }

    #[cfg(feature = "worker")]
    fn build_local(self) -> Result<KvBlockManager<Owned>, BuildError> {
        let more = self.given.volumes.is_some();
        let core = Core::new(self.config, self.namespace, self.given.policies, None, more)?;
        let workers = core.local_workers(None, self.given.volumes)?;
        core.finish(workers, self.given.agent, Owned(()))
    }

    /// A manager that keeps the books and moves no bytes: for replays and capacity planning.
    ///
    /// # Errors
    /// [`BuildError`] names the setting.
    pub fn build_metadata_only(self) -> Result<KvBlockManager<Owned>, BuildError> {
        let core = Core::new(self.config, self.namespace, self.given.policies, None, false)?;
        core.connect_metadata();
        core.finish_remote(Owned(()))
    }

    /// A manager whose workers are somewhere else: `connect` is given each rank and the sink for
    /// its messages, and returns the line to it.
    ///
    /// # Errors
    /// [`BuildError`]; [`BuildError::Recovery`] where a rank with a disk does not say what that
    /// holds.
    pub fn build_with_workers(
        self,
        connect: impl FnMut(Rank, Epoch, MessageSink) -> Box<dyn WorkerLink>,
    ) -> Result<KvBlockManager<Owned>, BuildError> {
        no_sockets(&self.config, "must be empty: the workers are connected otherwise")?;
        let core = Core::new(self.config, self.namespace, self.given.policies, None, true)?;
        core.connect(connect);
        core.finish_remote(Owned(()))
    }
}

impl Builder<WithEngineBlocks> {
    /// Connects to the workers that listen at the sockets of `parallelism.workers`: each knows the
    /// engine's memory on its rank.
    ///
    /// # Errors
    /// [`BuildError`] names the setting or the socket.
    pub fn build(self) -> Result<KvBlockManager<Engine>, BuildError> {
        if self.config.parallelism.workers.as_slice().is_empty() {
            return Err(sockets_needed("the engine's memory is known to workers in other processes"));
        }
        let blocks = self.state.0;
        let core = Core::new(self.config, self.namespace, self.given.policies, Some(blocks), true)?;
        core.connect_sockets()?;
        core.finish_remote(Engine::new(blocks))
    }

    /// As [`Builder::build_with_workers`], where the engine owns G1.
    ///
    /// # Errors
    /// [`BuildError`]; [`BuildError::Recovery`] where a rank with a disk does not say what that
    /// holds.
    pub fn build_with_workers(
        self,
        connect: impl FnMut(Rank, Epoch, MessageSink) -> Box<dyn WorkerLink>,
    ) -> Result<KvBlockManager<Engine>, BuildError> {
        no_sockets(&self.config, "must be empty: the workers are connected otherwise")?;
        let blocks = self.state.0;
        let core = Core::new(self.config, self.namespace, self.given.policies, Some(blocks), true)?;
        core.connect(connect);
        core.finish_remote(Engine::new(blocks))
    }

    /// As [`Builder::build_metadata_only`], where the engine owns G1.
    ///
    /// # Errors
    /// [`BuildError`] names the setting.
    pub fn build_metadata_only(self) -> Result<KvBlockManager<Engine>, BuildError> {
        let blocks = self.state.0;
        let core = Core::new(self.config, self.namespace, self.given.policies, Some(blocks), false)?;
        core.connect_metadata();
        core.finish_remote(Engine::new(blocks))
    }
}

#[cfg(feature = "worker")]
impl Builder<WithEngine> {
    /// Takes host memory that an earlier manager shared with other processes, one entry for each
    /// rank, with the blocks in it: they are found from the start. The other manager has ended
    /// ([`KvBlockManager::kept_host`]).
    #[must_use]
    pub fn keep_host(mut self, ranks: Vec<KeptHost>) -> Self {
        for (memory, host) in self.state.0.iter_mut().zip(ranks) {
            if let G1Memory::Movers(.., kept) = memory {
                *kept = Some(Arc::new(host));
            }
        }
        self
    }

    /// Starts the workers of all ranks in this process.
    ///
    /// # Errors
    /// [`BuildError`] names the setting, the file or the device.
    pub fn build(self) -> Result<KvBlockManager<Engine>, BuildError> {
        no_sockets(&self.config, "must be empty: the engine's memory was given to workers of this process")?;
        let WithEngine(memory) = self.state;
        let ranks = self.config.parallelism.tensor_parallel as usize;
        if memory.len() != ranks {
            return Err(BuildError::Ranks { given: memory.len(), ranks });
        }
        let blocks = memory.iter().filter_map(G1Memory::engine_blocks).min().unwrap_or(0);
        let more = self.given.volumes.is_some();
        let mut core = Core::new(self.config, self.namespace, self.given.policies, Some(blocks), more)?;
        core.kept = kept_by_all(&memory);
        let workers = core.local_workers(Some(memory), self.given.volumes)?;
        core.finish(workers, self.given.agent, Engine::new(blocks))
    }
}

/// Blocks that every rank has kept, in the same slot.
#[cfg(feature = "worker")]
fn kept_by_all(memory: &[G1Memory]) -> Vec<RecoveredBlock> {
    let kept = |memory: &G1Memory| -> HashSet<(BlockId, BlockIdentity)> {
        memory.kept().iter().map(|content| (content.block, content.identity)).collect()
    };
    let Some((first, others)) = memory.split_first() else { return Vec::new() };
    let others: Vec<_> = others.iter().map(kept).collect();
    let blocks = first.kept().iter().map(|content| (content.block, content.identity));
    let everywhere = blocks.filter(|block| others.iter().all(|rank| rank.contains(block)));
    everywhere.map(|(block, identity)| RecoveredBlock { block, identity }).collect()
}

/// Refuses sockets of workers where no worker listens at one.
fn no_sockets(config: &Config, rule: &str) -> Result<(), ConfigError> {
    let sockets = config.parallelism.workers.as_slice();
    if sockets.is_empty() {
        return Ok(());
    }
    let (key, value) = ("parallelism.workers", format!("{} sockets", sockets.len()));
    Err(ConfigError::Rule { key, value, rule: rule.to_owned() })
}

fn sockets_needed(why: &str) -> BuildError {
    let (key, value) = ("parallelism.workers", "none".to_owned());
    let rule = format!("must name a socket for each rank: {why}");
    ConfigError::Rule { key, value, rule }.into()
}
