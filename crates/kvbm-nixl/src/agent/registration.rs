//! Registered memory and its order of undoing.

use std::fmt;
use std::sync::Arc;

use kvbm_storage::{BoundLayout, Storage};

use super::{AgentError, RemoteAgent};

/// What can be registered with an agent: anything that consists of storages.
///
/// A storage back end takes part by implementing `kvbm_storage::Storage`; what wraps several
/// storages implements [`storages`](Self::storages).
pub trait NixlEnabledStorage {
    /// The storages to register, in one batch.
    fn storages(&self) -> Vec<Arc<dyn Storage>>;

    /// Registers them all, or none.
    ///
    /// # Errors
    /// Those of [`RemoteAgent::register`].
    fn nixl_register(&self, agent: &dyn RemoteAgent) -> Result<Registration, AgentError> {
        agent.register(&self.storages())
    }
}

impl NixlEnabledStorage for Arc<dyn Storage> {
    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![Arc::clone(self)]
    }
}

impl NixlEnabledStorage for BoundLayout {
    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        let mut storages: Vec<Arc<dyn Storage>> = Vec::new();
        for binding in self.bindings() {
            // Regions may share a storage, and memory is registered once.
            if !storages.iter().any(|known| Arc::ptr_eq(known, &binding.storage)) {
                storages.push(Arc::clone(&binding.storage));
            }
        }
        storages
    }
}

/// Memory that an agent has registered. Dropping it deregisters the memory first and frees it
/// after.
pub struct Registration {
    // Fields drop in this order.
    agent_side: Box<dyn Send + Sync>,
    storages: Vec<Arc<dyn Storage>>,
}

impl Registration {
    /// For implementers of [`RemoteAgent`]: `agent_side` deregisters when it is dropped.
    pub fn new(agent_side: Box<dyn Send + Sync>, storages: &[Arc<dyn Storage>]) -> Self {
        Self { agent_side, storages: storages.to_vec() }
    }

    /// The memory.
    pub fn storages(&self) -> &[Arc<dyn Storage>] {
        &self.storages
    }

    /// Bytes that are registered.
    pub fn bytes(&self) -> u64 {
        self.storages.iter().map(|storage| storage.len()).sum()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _: &(dyn Send + Sync) = &*self.agent_side;
        write!(f, "Registration({} storages, {} bytes)", self.storages.len(), self.bytes())
    }
}
