//! Peers come, start again and go: agent and registry know the same of them, whatever fails.

use std::sync::atomic::Ordering;

use kvbm_plan::NodeId;
use kvbm_plan::simulation::{Planted, planted};

use super::{RemoteError, RemoteNode, RemoteNodeState};
use crate::{Imported, NodeAnnouncement, RegistryError};

impl RemoteNode {
    /// Takes a peer's announcement. Its block sets and its agent change at once, or not at all.
    ///
    /// # Errors
    /// [`RemoteError::Registry`], [`RemoteError::Ourselves`], [`RemoteError::OtherAgent`],
    /// [`RemoteError::Agent`]. What is known of the peer, and of every other one, is unchanged
    /// then. NIXL alone drops what it knows of an agent whose metadata it cannot load; transfers
    /// with it fail until it is announced anew.
    pub fn import_remote_blockset(&self, bytes: &[u8]) -> Result<(NodeId, Imported), RemoteError> {
        let shared = &self.shared;
        let announcement = NodeAnnouncement::decode(bytes, shared.options.key.as_ref()).map_err(|error| {
            shared.counters.refused_announcements.fetch_add(1, Ordering::Relaxed);
            RegistryError::from(error)
        })?;
        let node = announcement.node;
        if node == shared.options.node {
            return Err(RemoteError::Ourselves { node });
        }
        let _alone = shared.importing.lock();
        let change = shared.registry.change(&announcement)?;
        let known = shared.registry.get(node);
        let is_news = known
            .as_ref()
            .is_none_or(|known| (known.epoch, known.sequence) < (announcement.epoch, announcement.sequence));
        if is_news {
            shared.meet(&announcement, known.as_deref())?;
        }
        if change != Imported::Known {
            shared.registry.put(announcement);
        }
        Ok((node, change))
    }

    /// Forgets a peer: nothing more is read from it, and its leases are not renewed. It may be well
    /// and read on, where its announcement alone was lost: so they end at their time, not before.
    ///
    /// # Errors
    /// [`RemoteError::Agent`].
    pub fn forget(&self, node: NodeId) -> Result<(), RemoteError> {
        let shared = &self.shared;
        let _alone = shared.importing.lock();
        if let Some(known) = shared.registry.get(node) {
            shared.registry.remove(node, known.epoch);
            shared.end_leases_early(&known.agent);
            shared.forget_agent(&known.agent)?;
        }
        Ok(())
    }

    /// Whether a peer's announcement is known.
    pub(crate) fn knows(&self, node: NodeId) -> bool {
        self.shared.registry.get(node).is_some()
    }
}

impl RemoteNodeState {
    /// Makes an announced agent known, in place of the one that is `known` of its node.
    fn meet(&self, new: &NodeAnnouncement, known: Option<&NodeAnnouncement>) -> Result<(), RemoteError> {
        let node = new.node;
        if new.agent == self.agent.name() {
            let (agent, of) = (new.agent.clone(), self.options.node);
            return Err(RegistryError::AgentTaken { node, agent, of }.into());
        }
        // Its memory is gone. Its earlier life may still read under leases of ours: they end by
        // themselves, since nobody answers it.
        let ended = known.filter(|known| known.epoch < new.epoch || known.agent != new.agent);
        match ended {
            // An agent that is started again under its name is another one, which NIXL refuses
            // while it knows the first.
            Some(old) if old.agent == new.agent => {
                self.agent.forget_peer(&old.agent)?;
                self.add_agent(new).inspect_err(|_| self.restore(old))?;
            }
            Some(old) => {
                self.add_agent(new)?;
                self.forget_agent(&old.agent).inspect_err(|_| self.drop_agent(&new.agent))?;
            }
            None => self.add_agent(new)?,
        }
        if let Some(old) = ended {
            self.end_leases_early(&old.agent);
        }
        Ok(())
    }

    /// Adds the agent that an announcement names, and no other.
    fn add_agent(&self, new: &NodeAnnouncement) -> Result<(), RemoteError> {
        let found = self.agent.add_peer(&new.agent_metadata)?;
        if found == new.agent {
            return Ok(());
        }
        // What the metadata has replaced is of a peer that is known, or of nobody.
        match self.registry.node_of(&found) {
            Some(peer) => {
                let _gone_already = self.agent.forget_peer(&found);
                self.restore(&peer);
            }
            None => self.drop_agent(&found),
        }
        Err(RemoteError::OtherAgent { node: new.node, announced: new.agent.clone(), found })
    }

    /// Makes a peer's agent known again. One that cannot be is forgotten whole.
    fn restore(&self, peer: &NodeAnnouncement) {
        if self.agent.add_peer(&peer.agent_metadata).is_err() {
            self.registry.remove(peer.node, peer.epoch);
        }
    }

    fn drop_agent(&self, agent: &str) {
        // An agent that cannot forget a peer keeps what it knows of it: nothing is asked of it.
        let _kept = self.forget_agent(agent);
    }

    /// Only as a planted bug: see [`RemoteNode::forget`].
    fn end_leases_early(&self, agent: &str) {
        if planted(Planted::EndLeasesAtForget) {
            self.leases.revoke(agent);
        }
    }
}
