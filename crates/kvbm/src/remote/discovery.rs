//! Where nodes announce themselves: a folder that they share, or a bucket of a NATS server.

use crate::config::RemoteConfig;
#[cfg(feature = "nats")]
use kvbm_events::nats::NatsBucket;
use kvbm_events::url::{BucketUrl, OpenError, UrlError};
use kvbm_events::{Payload, TransportError};
use kvbm_keys::DeploymentKey;
use kvbm_nixl::{DirectoryError, ExportError, FileDirectory, NodeAnnouncement};
use kvbm_plan::NodeId;
use std::path::Path;
#[cfg(feature = "nats")]
use std::time::Duration;

/// How long the announcement of a node that is gone stays on a server.
#[cfg(feature = "nats")]
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
    Folder(FileDirectory),
    #[cfg(feature = "nats")]
    Bucket(NatsBucket),
}

impl Discovery {
    /// What `remote.url` names, or else `remote.directory`.
    pub(super) fn open(settings: &RemoteConfig) -> Result<Self, DiscoveryError> {
        let Some(url) = &settings.url else {
            let folder = settings.directory.as_deref().unwrap_or(Path::new(""));
            return Ok(Self::Folder(FileDirectory::open(folder)?));
        };
        let url: BucketUrl = url.text().parse()?;
        #[cfg(feature = "nats")]
        return Ok(Self::Bucket(url.open(LEASE, PATIENCE)?));
        #[cfg(not(feature = "nats"))]
        return Err(UrlError::NotBuilt { scheme: url.to_string(), feature: "nats" }.into());
    }

    /// Publishes an announcement in place of the node's last one.
    pub(super) fn publish(
        &self,
        announcement: &NodeAnnouncement,
        key: Option<&DeploymentKey>,
    ) -> Result<(), DiscoveryError> {
        match self {
            Self::Folder(folder) => Ok(folder.publish(announcement, key)?),
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => {
                Ok(bucket.keep(&NodeAnnouncement::name_of(announcement.node), &announcement.encode(key)?)?)
            }
        }
    }

    /// Takes the announcement of a node away.
    pub(super) fn withdraw(&self, node: NodeId) -> Result<(), DiscoveryError> {
        match self {
            Self::Folder(folder) => Ok(folder.withdraw(node)?),
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

    /// All announcements, unchecked: name and bytes.
    pub(super) fn announcements(&self) -> Result<Vec<(String, Payload)>, DiscoveryError> {
        match self {
            Self::Folder(folder) => {
                let files = folder.announcements()?.into_iter();
                Ok(files.map(|(name, bytes)| (name, Payload::from(bytes))).collect())
            }
            #[cfg(feature = "nats")]
            Self::Bucket(bucket) => Ok(bucket.values()),
        }
    }
}
