//! Finding peers in a folder that all nodes share.

use super::table::PeerTable;
use kvbm_nixl::{DirectoryError, FileDirectory, Imported, RemoteError, RemoteNode};
use kvbm_plan::NodeId;
use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The folder, as it was read last.
pub(super) struct Directory {
    folder: FileDirectory,
    /// By file, what was in it.
    seen: HashMap<String, Seen>,
    /// What went wrong last: said once.
    trouble: Option<String>,
}

/// A file, as it was read last.
struct Seen {
    /// Of its bytes.
    digest: u64,
    /// Whose it is, or why it cannot be used: such a file is tried again.
    of: Result<NodeId, String>,
}

impl Directory {
    pub(super) fn new(folder: FileDirectory) -> Self {
        Self { folder, seen: HashMap::new(), trouble: None }
    }

    /// Announces `node`, and looks for the others. Peers whose files are gone are forgotten.
    pub(super) fn refresh(&mut self, node: &RemoteNode, table: &PeerTable) {
        let trouble = self.look(node, table).err().map(|error| error.to_string());
        if let Some(trouble) = trouble.as_ref().filter(|trouble| Some(*trouble) != self.trouble.as_ref()) {
            tracing::warn!(target: "kvbm", trouble, "the folder of remote.directory cannot be used");
        }
        self.trouble = trouble;
    }

    fn look(&mut self, node: &RemoteNode, table: &PeerTable) -> Result<(), DirectoryError> {
        let files = self.folder.announcements()?;
        let ours = format!("node-{}.kvbm", node.node());
        if !files.iter().any(|(file, _)| *file == ours) {
            self.announce(node)?;
        }
        let known = peers(&self.seen);
        let mut seen = HashMap::new();
        for (file, bytes) in files.into_iter().filter(|(file, _)| *file != ours) {
            let mut digest = DefaultHasher::new();
            bytes.hash(&mut digest);
            let digest = digest.finish();
            let of = match self.seen.remove(&file).filter(|seen| seen.digest == digest).map(|seen| seen.of) {
                Some(Ok(peer)) => Ok(peer),
                // An agent may fail for a moment.
                before => import(node, table, &file, &bytes, before.and_then(Result::err).as_deref()),
            };
            seen.insert(file, Seen { digest, of });
        }
        let now = peers(&seen);
        self.seen = seen;
        for gone in known.difference(&now) {
            tracing::info!(target: "kvbm", peer = %gone, "a peer is gone");
            table.forget(*gone);
            // An agent that cannot forget a peer keeps what it knows of it.
            let _kept = node.forget(*gone);
        }
        Ok(())
    }

    /// Writes this node's own announcement.
    pub(super) fn announce(&self, node: &RemoteNode) -> Result<(), DirectoryError> {
        match node.announcement() {
            Ok(announcement) => self.folder.publish(&announcement, node.key()),
            Err(error) => {
                tracing::warn!(target: "kvbm", %error, "this node cannot be announced");
                Ok(())
            }
        }
    }

    /// Takes this node's announcement away.
    pub(super) fn withdraw(&self, node: NodeId) {
        if let Err(error) = self.folder.withdraw(node) {
            tracing::warn!(target: "kvbm", %error, "the announcement of this node stays behind");
        }
    }
}

/// Peers whose files can be used.
fn peers(seen: &HashMap<String, Seen>) -> BTreeSet<NodeId> {
    seen.values().filter_map(|seen| seen.of.as_ref().ok()).copied().collect()
}

/// Takes a peer's announcement. Whose it is, or why it cannot be used; `said` is what was logged of
/// the same file.
fn import(
    node: &RemoteNode,
    table: &PeerTable,
    file: &str,
    bytes: &[u8],
    said: Option<&str>,
) -> Result<NodeId, String> {
    match node.import_remote_blockset(bytes) {
        Ok((peer, imported)) => {
            match imported {
                Imported::Restarted => table.restarted(peer),
                Imported::New | Imported::Newer | Imported::Known => table.meet(peer),
            }
            tracing::info!(target: "kvbm", %peer, ?imported, "a peer is announced");
            Ok(peer)
        }
        Err(error) => {
            let why = error.to_string();
            match error {
                _ if said == Some(why.as_str()) => {}
                RemoteError::Ourselves { .. } => {
                    tracing::error!(target: "kvbm", file, why, "two nodes have one number");
                }
                _ => {
                    tracing::warn!(target: "kvbm", file, why, "the announcement of a peer cannot be used yet");
                }
            }
            Err(why)
        }
    }
}
