//! Finding peers by what they announce.

use super::discovery::{Discovery, DiscoveryError};
use super::table::PeerTable;
use kvbm_nixl::{Imported, OwnAnnouncement, PeerChange, PeerWatch, RemoteError, RemoteNode};
use kvbm_plan::NodeId;

/// The announcements, as they were read last.
pub(super) struct Directory {
    discovery: Discovery,
    watch: PeerWatch,
    /// Our own announcement, as it was published last.
    ours: Vec<u8>,
    /// It was there at the last look.
    stands: bool,
    /// What went wrong last: said once.
    trouble: Option<String>,
}

impl Directory {
    pub(super) fn new(discovery: Discovery) -> Self {
        Self { discovery, watch: PeerWatch::default(), ours: Vec::new(), stands: false, trouble: None }
    }

    /// Announces `node`, and looks for the others. Peers whose announcements are
    /// gone are forgotten.
    pub(super) fn refresh(&mut self, node: &RemoteNode, table: &PeerTable) {
        let trouble = self.look(node, table).err().map(|error| error.to_string());
        let trouble = trouble.or_else(|| self.discovery.trouble());
        if let Some(trouble) = trouble.as_ref().filter(|trouble| Some(*trouble) != self.trouble.as_ref()) {
            tracing::warn!(target: "kvbm", trouble, "finding peers is disturbed");
        }
        self.trouble = trouble;
    }

    fn look(&mut self, node: &RemoteNode, table: &PeerTable) -> Result<(), DiscoveryError> {
        // Before the others are read, which may take long.
        let renewed = if self.stands { self.discovery.renew(node.node(), &self.ours) } else { Ok(()) };
        let found = self.discovery.announcements(node.node())?;
        let own = self.watch.own(node, &found);
        self.stands = own == OwnAnnouncement::Stands;
        let announced = match own {
            OwnAnnouncement::Stands => renewed,
            OwnAnnouncement::Missing => self.announce(node),
            OwnAnnouncement::Taken => return Err(DiscoveryError::Taken { node: node.node() }),
        };
        // A folder that cannot be written may still be read.
        for change in self.watch.look(node, &found) {
            note(table, change);
        }
        announced
    }

    /// Publishes this node's own announcement.
    pub(super) fn announce(&mut self, node: &RemoteNode) -> Result<(), DiscoveryError> {
        match node.announcement() {
            Ok(announcement) => {
                self.ours = announcement.encode(node.key())?;
                self.watch.publish(self.ours.clone());
                self.discovery.publish(node.node(), &self.ours)
            }
            Err(error) => {
                tracing::warn!(target: "kvbm", %error, "this node cannot be announced");
                Ok(())
            }
        }
    }

    /// Takes this node's announcement away; whether that was possible.
    pub(super) fn withdraw(&self, node: NodeId) -> bool {
        let withdrawn = self.discovery.withdraw(node);
        if let Err(error) = &withdrawn {
            tracing::warn!(target: "kvbm", %error, "the announcement of this node stays behind");
        }
        withdrawn.is_ok()
    }
}

/// Tells the table, and the log, of a change among the peers.
fn note(table: &PeerTable, change: PeerChange) {
    match change {
        PeerChange::Imported { peer, imported } => {
            match imported {
                Imported::Restarted => table.restarted(peer),
                Imported::New | Imported::Newer | Imported::Known => table.add(peer),
            }
            tracing::info!(target: "kvbm", %peer, ?imported, "a peer is announced");
        }
        PeerChange::Gone { peer } => {
            table.forget(peer);
            tracing::info!(target: "kvbm", %peer, "a peer is gone");
        }
        PeerChange::Unusable { name, error: error @ RemoteError::Ourselves { .. } } => {
            tracing::error!(target: "kvbm", file = name, %error, "two nodes have one number");
        }
        PeerChange::Unusable { name, error } => {
            tracing::warn!(target: "kvbm", file = name, %error, "the announcement of a peer cannot be used yet");
        }
    }
}
