//! Agents of one process: the second implementation of the seam, for tests and for several block
//! managers in one process.
//!
//! It moves bytes by copying, and it keeps NIXL's rules: memory has to be registered, a peer has
//! to be known, metadata goes stale. [`AgentFault`] makes it fail as networks do.

mod fault;
mod mailbox;
mod memory;
pub(crate) mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Weak};

use kvbm_device::Owner;
use kvbm_storage::Storage;
use parking_lot::Mutex;

use crate::DeviceAccess;
use crate::agent::{
    AgentError, MAX_NOTIFICATION_BYTES, Notification, Registration, RemoteAgent, RemoteRequest,
    RemoteTransfer, check_lists,
};

pub use fault::AgentFault;
use fault::{Detached, Finished};
use mailbox::Mailbox;
use memory::{Memory, move_bytes};

/// Agents that can reach each other.
#[derive(Clone, Default)]
pub struct InProcessNetwork {
    agents: Arc<Mutex<BTreeMap<String, Weak<Inner>>>>,
}

impl InProcessNetwork {
    /// A network without agents.
    pub fn new() -> Self {
        Self::default()
    }

    /// A new agent.
    ///
    /// # Errors
    /// [`AgentError::NameTaken`], [`AgentError::Options`] for a name that is empty or too long.
    pub fn agent(&self, name: &str) -> Result<InProcessAgent, AgentError> {
        crate::NixlOptions::new(name).validate()?;
        let mut agents = self.agents.lock();
        if agents.get(name).is_some_and(|agent| agent.strong_count() > 0) {
            return Err(AgentError::NameTaken { name: name.to_owned() });
        }
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            memory: Memory::default(),
            peers: Mutex::default(),
            mailbox: Mailbox::default(),
            fault: Mutex::new(None),
            detached: Arc::default(),
            network: self.clone(),
        });
        agents.insert(name.to_owned(), Arc::downgrade(&inner));
        Ok(InProcessAgent { inner })
    }

    fn find(&self, name: &str) -> Option<Arc<Inner>> {
        self.agents.lock().get(name).and_then(Weak::upgrade)
    }
}

impl fmt::Debug for InProcessNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessNetwork({} agents)", self.agents.lock().len())
    }
}

/// An agent of an [`InProcessNetwork`]. Dropping it makes it vanish for its peers, as the end of a
/// process does.
pub struct InProcessAgent {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    memory: Memory,
    /// Peers, and the ranges that they had registered when their metadata was made.
    peers: Mutex<BTreeMap<String, BTreeSet<wire::Range>>>,
    mailbox: Mailbox,
    fault: Mutex<Option<AgentFault>>,
    detached: Arc<Detached>,
    network: InProcessNetwork,
}

impl InProcessAgent {
    /// Has the agent move memory of a device, too. Memory of other devices is refused.
    pub fn reach_device(&self, access: &Arc<DeviceAccess>) {
        self.inner.memory.reach(access);
    }

    /// Makes every transfer that starts from now on, and that touches this agent's memory from
    /// outside, fail in this way. `None`: no more.
    pub fn set_fault(&self, fault: Option<AgentFault>) {
        *self.inner.fault.lock() = fault;
    }

    fn peer(&self, name: &str) -> Result<Arc<Inner>, AgentError> {
        let unknown = || AgentError::UnknownPeer { agent: self.inner.name.clone(), peer: name.to_owned() };
        if name == self.inner.name {
            return Ok(Arc::clone(&self.inner));
        }
        if !self.inner.peers.lock().contains_key(name) {
            return Err(unknown());
        }
        self.inner.network.find(name).ok_or_else(unknown)
    }

    /// Whether the peer had registered each remote range when it gave its metadata.
    fn check_known(&self, request: &RemoteRequest) -> Result<(), AgentError> {
        if request.peer == self.inner.name {
            return Ok(());
        }
        let peers = self.inner.peers.lock();
        let known = peers.get(&request.peer);
        for range in &request.remote.entries {
            let holds = |held: &wire::Range| held.holds(request.remote.kind, range);
            if !known.is_some_and(|ranges| ranges.iter().any(holds)) {
                return Err(AgentError::NotRegistered {
                    agent: request.peer.clone(),
                    kind: request.remote.kind,
                    address: range.address,
                    bytes: range.bytes,
                });
            }
        }
        Ok(())
    }
}

impl RemoteAgent for InProcessAgent {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError> {
        let key = self.inner.memory.add(storages)?;
        let agent_side = Registered { agent: Arc::downgrade(&self.inner), key };
        Ok(Registration::new(Box::new(agent_side), storages))
    }

    fn metadata(&self) -> Result<Vec<u8>, AgentError> {
        Ok(wire::encode(&self.inner.name, &self.inner.memory.ranges()))
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        let (name, ranges) = wire::decode(metadata)?;
        self.inner.peers.lock().insert(name.clone(), ranges);
        Ok(name)
    }

    fn forget_peer(&self, peer: &str) -> Result<(), AgentError> {
        self.inner.peers.lock().remove(peer);
        Ok(())
    }

    unsafe fn start(&self, mut request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        check_lists(request.direction, &request.local, &request.remote)?;
        let peer = self.peer(&request.peer)?;
        self.check_known(&request)?;
        let fault = peer.fault.lock().clone();
        self.inner.detached.purge();
        if let Some(fault) = fault {
            return fault.begin(request, &self.inner.detached);
        }
        let bytes = request.local.bytes();
        let keep: Owner = Arc::new(Mutex::new(std::mem::replace(&mut request.keep, Box::new(()))));
        // SAFETY: the caller of `start` excludes everybody else from both sides until what it gave
        // to keep is dropped.
        unsafe { move_bytes(&self.inner.name, &self.inner.memory, &peer.memory, &request, &keep) }?;
        if let Some(message) = request.notification {
            peer.mailbox.put(&self.inner.name, &message)?;
        }
        Ok(Box::new(Finished::new(request.direction, bytes, request.peer)))
    }

    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError> {
        if message.len() > MAX_NOTIFICATION_BYTES {
            let (peer, bytes) = (peer.to_owned(), message.len());
            return Err(AgentError::Notification { peer, bytes, reason: "it is too long" });
        }
        self.peer(peer)?.mailbox.put(&self.inner.name, message)
    }

    fn notifications(&self) -> Result<Vec<Notification>, AgentError> {
        self.inner.detached.purge();
        Ok(self.inner.mailbox.take())
    }

    fn wake_on_message(&self, wake: Arc<dyn Fn() + Send + Sync>) -> bool {
        self.inner.mailbox.set_wake(wake);
        true
    }
}

impl fmt::Debug for InProcessAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessAgent").field("name", &self.inner.name).finish_non_exhaustive()
    }
}

/// Deregisters when it is dropped.
struct Registered {
    agent: Weak<Inner>,
    key: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(agent) = self.agent.upgrade() {
            agent.memory.remove(self.key);
        }
    }
}
