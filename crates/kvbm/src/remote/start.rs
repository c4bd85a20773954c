//! Agent, node and threads of a manager.

use super::Peers;
use super::directory::Directory;
use super::discovery::{Discovery, DiscoveryError};
use super::node::{Node, NodeState, Times};
use super::push::Reserving;
use super::queue::Queue;
use super::table::PeerTable;
use crate::config::{Config, LayerContent, RemoteAgentKind};
use crate::metrics::Metrics;
use crate::workers::Workers;
use kvbm_layout::{Holders, SliceError, slice_for_rank};
use kvbm_nixl::{
    AgentError, InProcessNetwork, NixlOptions, NodeOptions, RemoteAgent, RemoteError, RemoteNode,
};
use kvbm_plan::{
    BlockId, BlockIdentity, Epoch, GroupId, GroupKind, HeadRange, NamespaceTag, NodeId, Rank, RankSlice,
    Replication,
};
use kvbm_plan::{SequenceHash, Tier};
use kvbm_pool::{G2, Registry};
use kvbm_transfer::{PinnedBlocks, Pins, RemoteHost, ReservedBlocks};
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, LazyLock};

/// A lease that is renewed ends at the latest after so many of its terms.
const LONGEST_LEASE: u32 = 60;
/// Leases of one peer: it reads several prefixes at a time.
const LEASES_PER_PEER: usize = 256;

/// Of so many slots of G2, one is set aside for peers that write, at most.
const GRANTED_SHARE: u32 = 4;

/// Managers of this process that reach each other by copies.
static IN_PROCESS: LazyLock<InProcessNetwork> = LazyLock::new(InProcessNetwork::new);

/// Why a manager cannot take part in remote memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteStartError {
    /// What moves the bytes does not work.
    #[error("remote.agent: {0}")]
    Agent(#[from] AgentError),
    /// The place in which nodes find each other.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The node does not start, or its memory cannot be offered.
    #[error("remote: {0}")]
    Node(#[from] RemoteError),
    /// The heads cannot be divided among the ranks.
    #[error("remote: {0}")]
    Slice(#[from] SliceError),
    /// The system refused a thread.
    #[error("cannot start thread {name}: {source}; raise the limit of threads")]
    Thread {
        /// Its name.
        name: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

/// What a manager is, to its peers.
pub(crate) struct Ours<'a> {
    pub(crate) config: &'a Config,
    pub(crate) namespace: NamespaceTag,
    pub(crate) epoch: Epoch,
    pub(crate) registry: &'a Registry,
    pub(crate) metrics: &'a Metrics,
    pub(crate) workers: &'a Workers,
}

/// Starts a node over `agent`, or over the one that the configuration names.
pub(crate) fn start(
    ours: &Ours<'_>,
    agent: Option<Arc<dyn RemoteAgent>>,
) -> Result<Arc<dyn Peers>, RemoteStartError> {
    let (config, settings) = (ours.config, &ours.config.remote);
    let agent = match agent {
        Some(agent) => agent,
        None => named(config, ours.epoch)?,
    };
    let mut options = NodeOptions::new(NodeId(settings.node), ours.epoch);
    options.lease = settings.lease;
    options.longest_lease = settings.lease.saturating_mul(LONGEST_LEASE);
    options.leases_per_peer = LEASES_PER_PEER;
    options.granted_blocks = (ours.registry.pool::<G2>().status().capacity / GRANTED_SHARE).max(1) as usize;
    options.key = config.deployment_key();
    let discovery = Discovery::open(settings)?;
    let node = RemoteNode::start(agent, options)?;
    let mut parts = Vec::new();
    for worker in ours.workers.iter() {
        let Some(manager) = worker.manager() else { continue };
        let slices = config.group_ids().map(|group| slice(config, group, worker.rank()));
        parts.push((manager, slices.collect::<Result<Vec<_>, _>>()?));
    }
    let pins: Arc<dyn PinnedBlocks> = Arc::new(Pinning(ours.registry.clone()));
    let host = RemoteHost::offer(node, ours.namespace, &parts, &pins)?;
    let reserved: Arc<dyn ReservedBlocks> = Arc::new(Reserving(ours.registry.clone()));
    host.accept_writes(&reserved);
    let times =
        Times { refresh: settings.refresh, lookup: settings.lookup_deadline, read: settings.read_deadline };
    let (ranks, groups) = (u64::from(config.parallelism.tensor_parallel), config.model.cache_groups());
    let mut directory = Directory::new(discovery);
    directory.announce(host.node())?;
    let shared = Arc::new(NodeState {
        host,
        registry: ours.registry.clone(),
        table: PeerTable::new(ours.metrics.clone(), settings.longest_pause, settings.read_deadline),
        queue: Queue::new(settings.per_peer as usize),
        times,
        directory: Mutex::new(directory),
        metrics: ours.metrics.clone(),
        block_bytes: config.group_block_bytes().iter().map(|bytes| bytes.saturating_mul(ranks)).collect(),
        needs_all: groups.iter().map(|group| group.kind == GroupKind::Full).collect(),
        stop: Mutex::new(false),
        stopped: Condvar::new(),
    });
    let weak = Arc::downgrade(&shared);
    ours.metrics.refresh_by(move || {
        if let Some(shared) = weak.upgrade() {
            shared.note_counts();
        }
    });
    Ok(Arc::new(with_threads(shared, settings.threads)?))
}

/// Starts the threads: one looks for peers, the others read from them.
fn with_threads(shared: Arc<NodeState>, readers: u32) -> Result<Node, RemoteStartError> {
    // Ends the threads that have started, if one does not.
    let mut node = Node { shared, threads: Vec::new() };
    let mut spawn = |name: &'static str, run: fn(&NodeState)| {
        let shared = Arc::clone(&node.shared);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared));
        thread
            .map(|thread| node.threads.push(thread))
            .map_err(|source| RemoteStartError::Thread { name, source })
    };
    spawn("kvbm-peers", NodeState::watch)?;
    (0..readers).try_for_each(|_| spawn("kvbm-fetch", NodeState::serve))?;
    Ok(node)
}

/// The agent that the configuration names. Its own name tells lives of a node apart.
fn named(config: &Config, epoch: Epoch) -> Result<Arc<dyn RemoteAgent>, RemoteStartError> {
    let name = format!("kvbm-{}-{epoch}", config.remote.node);
    match config.remote.agent {
        RemoteAgentKind::InProcess => Ok(Arc::new(IN_PROCESS.agent(&name)?)),
        RemoteAgentKind::Nixl => nixl(&config.remote.nixl_options(name)),
    }
}

#[cfg(feature = "nixl")]
fn nixl(options: &NixlOptions) -> Result<Arc<dyn RemoteAgent>, RemoteStartError> {
    Ok(Arc::new(kvbm_nixl::NixlAgent::new(options)?))
}

#[cfg(not(feature = "nixl"))]
fn nixl(options: &NixlOptions) -> Result<Arc<dyn RemoteAgent>, RemoteStartError> {
    Err(AgentError::Unavailable(options.probe().to_string()).into())
}

/// What of every block of a cache group a rank holds. What has no heads is divided among the ranks:
/// each holds one part, as if it were one of as many heads as there are ranks.
fn slice(config: &Config, group: GroupId, rank: Rank) -> Result<RankSlice, SliceError> {
    let (model, ranks) = (&config.model, config.parallelism.tensor_parallel);
    let of_group = model.cache_group(group);
    let (heads, num_layers) = match of_group.content {
        LayerContent::Kv { num_kv_heads, .. } if !model.is_opaque() => (num_kv_heads, of_group.layers),
        LayerContent::State { .. } => (ranks, of_group.layers),
        // Its tensors are the planes of one layer.
        LayerContent::Kv { .. } | LayerContent::Opaque { .. } => (ranks, 1),
    };
    let of = slice_for_rank(heads, ranks, u32::from(rank.0))?;
    let replication = match of.holders {
        Holders::One => Replication::None,
        Holders::Several { writer, .. } => Replication::Replicated { writer: Rank(writer as u16) },
    };
    let heads = HeadRange { start: of.heads.start, count: of.heads.len() as u32 };
    Ok(RankSlice { rank, first_layer: 0, num_layers, heads, replication })
}

/// G2 of the registry.
struct Pinning(Registry);

impl PinnedBlocks for Pinning {
    fn count(&self, group: GroupId, hashes: &[SequenceHash]) -> usize {
        let tiers = self.0.peek_prefix(group, hashes);
        tiers.iter().take_while(|tiers| tiers.contains(Tier::G2)).count()
    }

    fn has_each(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<bool> {
        self.0.peek_each(group, hashes).into_iter().map(|tiers| tiers.contains(Tier::G2)).collect()
    }

    fn pin(&self, group: GroupId, hashes: &[SequenceHash]) -> Pins {
        let pinned = self.0.pool::<G2>().match_run(group, hashes);
        // That a peer reads it is no use of the copy here: the peer has a younger one from now on.
        // Of copies on several nodes, the one that was used last is the youngest.
        let pinned = pinned.erase().into_transfer();
        let slots = pinned.block_ids().iter().copied();
        let blocks: Vec<(BlockId, BlockIdentity)> = slots.zip(pinned.identities()).collect();
        Pins { blocks, guard: Arc::new(pinned) }
    }
}
