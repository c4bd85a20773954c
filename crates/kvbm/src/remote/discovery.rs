//! Where nodes announce themselves: a folder that they share, or a bucket of a NATS server.

use crate::config::RemoteConfig;
#[cfg(feature = "nats")]
use kvbm_events::nats::NatsBucket;
use kvbm_events::url::{BucketUrl, OpenError, UrlError};
use kvbm_events::{Payload, TransportError};
#[cfg(feature = "nats")]
use kvbm_nixl::NodeAnnouncement;
use kvbm_nixl::{DirectoryError, ExportError, FileDirectory, LiveFiles};
use kvbm_plan::{NodeId, clock};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the announcement of a node that is gone stays on a server, or counts in a folder.
const LEASE: Duration = Duration::from_secs(15);
/// Time for a request to the server.
#[cfg(feature = "nats")]
const PATIENCE: Duration = Duration::from_secs(5);

/// Announcements cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// In the folder.
    #[error("remote.directory: {0}")]
    Directory(#[from] DirectoryError),
    /// The URL of the server.
    #[error("remote.url: {0}")]
    Url(#[from] UrlError),
    /// On the server.
    #[error("remote.url: {0}")]
    Server(#[from] TransportError),
    /// Another node has the same number.
    #[error("another node has the number {node} too: give each node its own remote.node")]
    Taken {
        /// The number.
        node: NodeId,
    },
    /// What this node would announce.
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl From<OpenError> for DiscoveryError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Url(error) => Self::Url(error),
            OpenError::Transport(error) => Self::Server(error),
        }
    }
}

/// Where nodes announce themselves.
pub(super) enum Discovery {
    Folder(Folder),
    #[cfg(feature = "nats")]
    Bucket(NatsBucket),
}

/// A folder, and who lives there.
pub(super) struct Folder {
    directory: FileDirectory,
    others: LiveFiles,
    /// How long our own announcement holds without a renewal.
    lease: Duration,
    renewals: u64,
    renew_at: Option<Instant>,
}

impl Folder {
    fn publish(&mut self, node: NodeId, announcement: &[u8]) -> Result<(), DirectoryError> {
        self.renewals += 1;
        self.directory.publish_for(node, announcement, self.renewals, self.lease)?;
        self.renew_at = clock::now().checked_add(self.lease / 3);
        Ok(())
    }
}

impl Discovery {
    /// What `remote.url` names, or else `remote.directory`.
    pub(super) fn open(settings: &RemoteConfig) -> Result<Self, DiscoveryError> {
        let Some(url) = &settings.url else {
            let folder = settings.directory.as_deref().unwrap_or(Path::new(""));
            let directory = FileDirectory::open(folder)?;
            // A node that looks seldom renews as seldom.
            let lease = LEASE.max(settings.refresh.saturating_mul(4));
            let others = LiveFiles::default();
            return Ok(Self::Folder(Folder { directory, others, lease, renewals: 0, renew_at: None }));
        };
        let url: BucketUrl = url.text().parse()?;
        #[cfg(feature = "nats")]
        return Ok(Self::Bucket(url.open(LEASE, PATIENCE)?));
        #[cfg(not(feature = "nats"))]
        return Err(UrlError::NotBuilt { scheme: url.to_string(), feature: "nats" }.into());
    }

    /// Publishes an announcement in place of the node's last one.
    pub(super) fn publish(&mut self, node: NodeId, announcement: &[u8]) -> Result<(), DiscoveryError> {
        match self {
            Self::Folder(folder) => Ok(folder.publish(node, announcement)?),
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => Ok(bucket.keep(&NodeAnnouncement::name_of(node), announcement)?),
        }
    }

    /// Says that the node lives, if that is due. A bucket does so by itself.
    pub(super) fn renew(&mut self, node: NodeId, announcement: &[u8]) -> Result<(), DiscoveryError> {
        match self {
            Self::Folder(folder) if folder.renew_at.is_none_or(|at| clock::now() >= at) => {
                Ok(folder.publish(node, announcement)?)
            }
            _ => Ok(()),
        }
    }

    /// Takes the announcement of a node away.
    pub(super) fn withdraw(&self, node: NodeId) -> Result<(), DiscoveryError> {
        match self {
            Self::Folder(folder) => Ok(folder.directory.withdraw(node)?),
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => Ok(bucket.remove(&NodeAnnouncement::name_of(node))?),
        }
    }

    /// Why this node's announcement may vanish, while that is so.
    pub(super) fn trouble(&self) -> Option<String> {
        match self {
            Self::Folder(_) => None,
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => bucket.trouble().map(|why| format!("it is not announced: {why}")),
        }
    }

    /// The announcements of nodes that live, and the node's own, unchecked: name and bytes.
    pub(super) fn announcements(&mut self, own: NodeId) -> Result<Vec<(String, Payload)>, DiscoveryError> {
        match self {
            Self::Folder(folder) => {
                let files = folder.others.announcements(&folder.directory, own, clock::now())?.into_iter();
                Ok(files.map(|(name, bytes)| (name, Payload::from(bytes))).collect())
            }
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => Ok(bucket.values()),
        }
    }
}
