//! What a node makes of the announcements that it finds: who is there, who has changed, who is
//! gone.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kvbm_plan::NodeId;

use crate::{Imported, NodeAnnouncement, RemoteError, RemoteNode};

/// The announcements, as a node has read them last.
#[derive(Debug, Default)]
pub struct PeerWatch {
    /// By name.
    seen: HashMap<String, Seen>,
    /// Our own as it was published last, and whether it was read since.
    ours: Option<(Arc<[u8]>, bool)>,
}

#[derive(Debug)]
struct Seen {
    bytes: Arc<[u8]>,
    /// Whose it is, or why it cannot be used.
    of: Result<NodeId, Unusable>,
}

/// Why an announcement cannot be used.
#[derive(Clone, Debug)]
struct Unusable {
    why: String,
    /// It will not be usable later: trying it again would disturb the peer whose agent it names.
    is_final: bool,
}

/// What stands under a node's own name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnAnnouncement {
    /// What it has published, or bytes that were there before that.
    Stands,
    /// Nothing, or that of an earlier life of the node: publish it again.
    Missing,
    /// That of another process, which was started later with the same number.
    Taken,
}

/// A change among a node's peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerChange {
    /// An announcement was imported.
    Imported {
        /// Whose.
        peer: NodeId,
        /// What was new.
        imported: Imported,
    },
    /// An announcement cannot be used; said once for each reason.
    Unusable {
        /// The name that it stands under.
        name: String,
        /// Why.
        error: RemoteError,
    },
    /// A peer's announcement is gone, and the node has forgotten it.
    Gone {
        /// Whose.
        peer: NodeId,
    },
}

impl PeerWatch {
    /// The node publishes this from now on.
    pub fn publish(&mut self, bytes: impl Into<Arc<[u8]>>) {
        self.ours = Some((bytes.into(), false));
    }

    /// Looks for the node's own announcement among those that were `found`, by name.
    pub fn own(&mut self, node: &RemoteNode, found: &[(String, Arc<[u8]>)]) -> OwnAnnouncement {
        let name = NodeAnnouncement::name_of(node.node());
        let Some((_, found)) = found.iter().find(|(found, _)| *found == name) else {
            return OwnAnnouncement::Missing;
        };
        let was_read = match &mut self.ours {
            Some((ours, was_read)) if ours == found => {
                *was_read = true;
                return OwnAnnouncement::Stands;
            }
            ours => ours.as_ref().is_some_and(|(_, was_read)| *was_read),
        };
        // A process that was stopped for long may publish its own once more: the newest life has
        // the name, whoever wrote last.
        match NodeAnnouncement::decode(found, node.key()).map(|theirs| theirs.epoch.cmp(&node.epoch())) {
            Ok(Ordering::Less) => OwnAnnouncement::Missing,
            Ok(Ordering::Greater) => OwnAnnouncement::Taken,
            _ if was_read => OwnAnnouncement::Taken,
            _ => OwnAnnouncement::Stands,
        }
    }

    /// Imports what is new, and forgets peers whose announcements are gone.
    pub fn look(&mut self, node: &RemoteNode, found: &[(String, Arc<[u8]>)]) -> Vec<PeerChange> {
        let ours = NodeAnnouncement::name_of(node.node());
        let known = self.peers();
        let (mut changes, mut seen) = (Vec::new(), HashMap::with_capacity(found.len()));
        for (name, bytes) in found.iter().filter(|(name, _)| *name != ours) {
            let before = self.seen.remove(name).filter(|seen| seen.bytes == *bytes).map(|seen| seen.of);
            let of = match before {
                Some(Ok(peer)) if node.knows(peer) => Ok(peer),
                Some(Err(unusable)) if unusable.is_final => Err(unusable),
                // An agent may fail for a moment.
                before => {
                    let logged = before.and_then(Result::err).map(|unusable| unusable.why);
                    import(node, name, bytes, logged.as_deref(), &mut changes)
                }
            };
            seen.insert(name.clone(), Seen { bytes: Arc::clone(bytes), of });
        }
        self.seen = seen;
        // Also one whose newer announcement cannot be used: what it had before may be gone with
        // its process, and nothing says where it is now. It is known again when one can be used.
        for peer in known.difference(&self.peers()) {
            // An agent that cannot forget a peer keeps what it knows of it.
            let _kept = node.forget(*peer);
            changes.push(PeerChange::Gone { peer: *peer });
        }
        changes
    }

    /// Peers whose announcements can be used.
    fn peers(&self) -> BTreeSet<NodeId> {
        self.seen.values().filter_map(|seen| seen.of.as_ref().ok()).copied().collect()
    }
}

/// Takes a peer's announcement. Whose it is, or why it cannot be used; `logged` is why that
/// was so before.
fn import(
    node: &RemoteNode,
    name: &str,
    bytes: &[u8],
    logged: Option<&str>,
    changes: &mut Vec<PeerChange>,
) -> Result<NodeId, Unusable> {
    match node.import_remote_blockset(bytes) {
        Ok((peer, imported)) => {
            changes.push(PeerChange::Imported { peer, imported });
            Ok(peer)
        }
        Err(error) => {
            let why = error.to_string();
            let is_final = matches!(error, RemoteError::OtherAgent { .. });
            if logged != Some(why.as_str()) {
                changes.push(PeerChange::Unusable { name: name.to_owned(), error });
            }
            Err(Unusable { why, is_final })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{InProcessNetwork, NodeOptions};
    use kvbm_plan::Epoch;

    fn life(network: &InProcessNetwork, epoch: u64) -> (RemoteNode, Arc<[u8]>) {
        let agent = Arc::new(network.agent(&format!("life-{epoch}")).unwrap());
        let node = RemoteNode::start(agent, NodeOptions::new(NodeId(1), Epoch(epoch))).unwrap();
        let bytes = node.announcement().unwrap().encode(None).unwrap();
        (node, bytes.into())
    }

    #[test]
    fn the_newest_life_has_the_name_whoever_wrote_last() {
        let network = InProcessNetwork::new();
        let ((old, its), (new, of_new)) = (life(&network, 4), life(&network, 5));
        let name = NodeAnnouncement::name_of(NodeId(1));
        let found = |bytes: &Arc<[u8]>| vec![(name.clone(), Arc::clone(bytes))];
        let [mut of_old, mut watch] = [PeerWatch::default(), PeerWatch::default()];
        of_old.publish(Arc::clone(&its));
        watch.publish(Arc::clone(&of_new));
        assert_eq!(watch.own(&new, &[]), OwnAnnouncement::Missing);
        // Before ours has come, and after.
        assert_eq!(watch.own(&new, &found(&its)), OwnAnnouncement::Missing);
        assert_eq!(watch.own(&new, &found(&of_new)), OwnAnnouncement::Stands);
        assert_eq!(watch.own(&new, &found(&its)), OwnAnnouncement::Missing);
        assert_eq!(of_old.own(&old, &found(&of_new)), OwnAnnouncement::Taken);
        let garbage: Arc<[u8]> = Arc::from(&b"garbage"[..]);
        assert_eq!(watch.own(&new, &found(&garbage)), OwnAnnouncement::Taken);
        assert_eq!(of_old.own(&old, &found(&garbage)), OwnAnnouncement::Stands, "ours has not come yet");
    }
}
