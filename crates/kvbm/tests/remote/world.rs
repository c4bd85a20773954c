//! Managers of one process that are peers of each other.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use crate::support::{model, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config, EvictionPolicy};
use kvbm::remote_memory::{
    AgentError, InProcessAgent, InProcessNetwork, Notification, Registration, RemoteAgent, RemoteRequest,
    RemoteTransfer,
};
use kvbm::storage::Storage;
use kvbm::{BuildError, KvBlockManager, Owned};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// An agent that says and hears nothing when it is told to, as a stopped process does: its memory
/// can still be read.
pub(crate) struct Agent {
    pub(crate) inner: InProcessAgent,
    pub(crate) is_mute: AtomicBool,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl RemoteAgent for Agent {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError> {
        self.inner.register(storages)
    }

    fn metadata(&self) -> Result<Vec<u8>, AgentError> {
        self.inner.metadata()
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        self.inner.add_peer(metadata)
    }

    fn forget_peer(&self, peer: &str) -> Result<(), AgentError> {
        self.inner.forget_peer(peer)
    }

    unsafe fn start(&self, request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.start(request) }
    }

    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError> {
        if self.is_mute.load(Ordering::Acquire) { Ok(()) } else { self.inner.notify(peer, message) }
    }

    fn notifications(&self) -> Result<Vec<Notification>, AgentError> {
        let messages = self.inner.notifications()?;
        Ok(if self.is_mute.load(Ordering::Acquire) { Vec::new() } else { messages })
    }
}

/// A manager and its agent.
pub(crate) struct Node {
    pub(crate) manager: KvBlockManager<Owned>,
    pub(crate) agent: Arc<Agent>,
}

/// Nodes that find each other in one folder.
pub(crate) struct World {
    pub(crate) network: InProcessNetwork,
    pub(crate) folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("kvbm-peers").tempdir().unwrap();
        Self { network: InProcessNetwork::new(), folder }
    }

    pub(crate) fn agent(&self, name: &str) -> Arc<Agent> {
        let inner = self.network.agent(name).unwrap();
        Arc::new(Agent { inner, is_mute: AtomicBool::new(false) })
    }

    /// A node with so many blocks of G1 and G2.
    pub(crate) fn node(&self, id: u32, blocks: [u32; 2], configure: impl FnOnce(&mut Config)) -> Node {
        self.node_as(id, &format!("node-{id}"), blocks, configure)
    }

    /// The same with another name of its agent.
    pub(crate) fn node_as(
        &self,
        id: u32,
        agent: &str,
        blocks: [u32; 2],
        configure: impl FnOnce(&mut Config),
    ) -> Node {
        let agent = self.agent(agent);
        let manager = self.build(id, &agent, blocks, configure).unwrap();
        Node { manager, agent }
    }

    /// What becomes of a small node.
    #[cfg(feature = "nats")]
    pub(crate) fn try_node(
        &self,
        id: u32,
        configure: impl FnOnce(&mut Config),
    ) -> Result<KvBlockManager<Owned>, BuildError> {
        self.build(id, &self.agent("a node"), [4, 4], configure)
    }

    fn build(
        &self,
        id: u32,
        agent: &Arc<Agent>,
        [g1, g2]: [u32; 2],
        configure: impl FnOnce(&mut Config),
    ) -> Result<KvBlockManager<Owned>, BuildError> {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let given = Arc::clone(agent) as Arc<dyn RemoteAgent>;
        let builder = builder.device(Blocks(g1)).host(Blocks(g2)).remote_agent(given);
        let folder = self.folder.path().join("peers");
        let configured = builder.configure(|config| {
            unlimited(config);
            config.policy.eviction = EvictionPolicy::LruLeaf;
            enable(config, id, &folder);
            configure(config);
        });
        configured.build()
    }
}

/// Takes part in remote memory as node `id`. A slow machine still answers a look-up in time.
pub(crate) fn enable(config: &mut Config, id: u32, folder: &Path) {
    config.remote.enabled = true;
    config.remote.node = id;
    config.remote.directory = Some(folder.to_owned());
    config.remote.refresh = std::time::Duration::from_millis(20);
    config.remote.lookup_deadline = std::time::Duration::from_secs(5);
}

/// Waits until each manager knows so many peers, and they know it.
pub(crate) fn meet<G>(managers: &[&KvBlockManager<G>]) {
    let others = managers.len() - 1;
    eventually("the nodes find each other", || {
        managers.iter().all(|manager| manager.peers().len() == others)
    });
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = soon();
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}
