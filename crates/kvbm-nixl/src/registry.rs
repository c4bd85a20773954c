//! What peers have announced: the newest announcement of each node, whole.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvbm_keys::DeploymentKey;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, NodeId};
use parking_lot::RwLock;

use crate::{BlockSet, ImportError, NodeAnnouncement};

/// Most peers that are kept.
pub const MAX_PEERS: usize = 4096;

/// Peers and their block sets. An import replaces all of a node's sets at once; a reader holds the
/// version that it has found, however long.
#[derive(Debug, Default)]
pub struct BlockSetRegistry {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    nodes: BTreeMap<NodeId, Arc<NodeAnnouncement>>,
    /// Whose an agent is.
    agents: HashMap<String, NodeId>,
}

/// What an import changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imported {
    /// A node that was not known.
    New,
    /// A newer announcement of the same life.
    Newer,
    /// The node has been started again: what was read under its earlier epoch is void.
    Restarted,
    /// It is what is known already.
    Known,
}

/// Why an announcement was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// It is damaged, or not an announcement.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// An older life or version of the node than the one that is known.
    #[error(
        "announcement {sequence} of epoch {epoch} of node {node} is older than what is known ({known_epoch}, \
         {known_sequence}); two nodes may share the id {node}: give each its own"
    )]
    Stale {
        /// The node.
        node: NodeId,
        /// Its epoch.
        epoch: Epoch,
        /// Its number.
        sequence: u64,
        /// The epoch that is known.
        known_epoch: Epoch,
        /// The number that is known.
        known_sequence: u64,
    },
    /// Another node has the agent that is announced.
    #[error(
        "node {node} announces agent {agent}, which is the agent of node {of}; give each agent a name of its own"
    )]
    AgentTaken {
        /// The announced node.
        node: NodeId,
        /// The agent.
        agent: String,
        /// Whose it is.
        of: NodeId,
    },
    /// There are too many peers.
    #[error("{MAX_PEERS} peers are known, and node {node} would be one more; partition the deployment")]
    Full {
        /// The node.
        node: NodeId,
    },
}

impl BlockSetRegistry {
    /// Takes a node's announcement as it came, signed with the deployment's `key` where it has one.
    /// Sets of other namespaces are kept: a reader names
    /// the namespace that it wants.
    ///
    /// # Errors
    /// [`RegistryError`]. The registry is unchanged then.
    pub fn import_remote_blockset(
        &self,
        bytes: &[u8],
        key: Option<&DeploymentKey>,
    ) -> Result<(NodeId, Imported), RegistryError> {
        let new = NodeAnnouncement::decode(bytes, key)?;
        let node = new.node;
        let mut known = self.known.write();
        let change = known.change(&new)?;
        let old = if change == Imported::Known { None } else { known.put(new) };
        drop(known);
        drop(old);
        Ok((node, change))
    }

    /// What an announcement would change, or why it would not be taken.
    pub(crate) fn change(&self, new: &NodeAnnouncement) -> Result<Imported, RegistryError> {
        self.known.read().change(new)
    }

    /// Takes an announcement for which [`change`](Self::change) has found a place.
    pub(crate) fn put(&self, new: NodeAnnouncement) {
        let old = self.known.write().put(new);
        // Outside the lock.
        drop(old);
    }

    /// Forgets a node, if this epoch of it or an older one is known. Whether it was.
    pub fn remove(&self, node: NodeId, epoch: Epoch) -> bool {
        let mut known = self.known.write();
        if known.nodes.get(&node).is_some_and(|known| known.epoch <= epoch) {
            return known.take(node).is_some();
        }
        false
    }

    /// A node's announcement.
    pub fn get(&self, node: NodeId) -> Option<Arc<NodeAnnouncement>> {
        self.known.read().nodes.get(&node).cloned()
    }

    /// The node whose messages come from this agent.
    pub fn node_of(&self, agent: &str) -> Option<Arc<NodeAnnouncement>> {
        let known = self.known.read();
        known.nodes.get(known.agents.get(agent)?).cloned()
    }

    /// Whether no node is known.
    pub fn is_empty(&self) -> bool {
        self.known.read().nodes.is_empty()
    }

    /// All nodes, by id.
    pub fn all(&self) -> Vec<Arc<NodeAnnouncement>> {
        self.known.read().nodes.values().cloned().collect()
    }
}

impl Known {
    /// What an announcement would change, or why it would not be taken.
    fn change(&self, new: &NodeAnnouncement) -> Result<Imported, RegistryError> {
        let node = new.node;
        let change = match self.nodes.get(&node).map(|known| (known.epoch, known.sequence)) {
            None if self.nodes.len() >= MAX_PEERS => return Err(RegistryError::Full { node }),
            None => Imported::New,
            Some(known) if known == (new.epoch, new.sequence) => return Ok(Imported::Known),
            Some((epoch, sequence))
                if (new.epoch, new.sequence) < (epoch, sequence) && !planted(Planted::ImportStale) =>
            {
                return Err(RegistryError::Stale {
                    node,
                    epoch: new.epoch,
                    sequence: new.sequence,
                    known_epoch: epoch,
                    known_sequence: sequence,
                });
            }
            Some((epoch, _)) if new.epoch > epoch => Imported::Restarted,
            Some(_) => Imported::Newer,
        };
        // Messages would be taken for the other node's, and one could replace the other's memory.
        match self.agents.get(&new.agent).filter(|of| **of != node) {
            Some(of) => Err(RegistryError::AgentTaken { node, agent: new.agent.clone(), of: *of }),
            None => Ok(change),
        }
    }

    /// What the announcement replaces.
    fn put(&mut self, new: NodeAnnouncement) -> Option<Arc<NodeAnnouncement>> {
        let old = self.take(new.node);
        self.agents.insert(new.agent.clone(), new.node);
        self.nodes.insert(new.node, Arc::new(new));
        old
    }

    fn take(&mut self, node: NodeId) -> Option<Arc<NodeAnnouncement>> {
        let old = self.nodes.remove(&node)?;
        self.agents.remove(&old.agent);
        Some(old)
    }
}

impl NodeAnnouncement {
    /// The block sets of a namespace and group.
    pub fn sets_of(&self, namespace: &NamespaceTag, group: GroupId) -> Vec<BlockSet> {
        let wanted = |set: &&BlockSet| set.namespace == *namespace && set.group == group;
        self.sets.iter().filter(wanted).cloned().collect()
    }
}
