//! The seam to what moves bytes between nodes: register memory, know peers, read and write their
//! memory, notify them.

mod descriptors;
mod error;
mod registration;
mod transfer;

use std::fmt;
use std::sync::Arc;

use kvbm_storage::Storage;

pub use descriptors::{Descriptor, DescriptorList, SegmentKind};
pub(crate) use descriptors::{check_lists, device_of};
pub use error::AgentError;
pub use registration::{NixlEnabledStorage, Registration};
pub use transfer::{RemoteRequest, RemoteTransfer, TransferDirection, TransferState};

/// Longest notification, in bytes.
pub const MAX_NOTIFICATION_BYTES: usize = 256 << 10;

/// Most descriptors of one request.
pub const MAX_DESCRIPTORS: usize = 1 << 16;

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Name of the peer's agent, as the transport reports it.
    pub from: String,
    /// What it sent; any bytes.
    pub message: Vec<u8>,
}

/// Moves bytes between registered memory of this process and of peers.
///
/// Two agents exist: the NIXL agent (feature `nixl`), and
/// [`InProcessAgent`](crate::InProcessAgent) for tests and for several managers in one process.
/// [`conformance`](crate::conformance) holds what every agent must do.
pub trait RemoteAgent: Send + Sync + fmt::Debug {
    /// The agent's name, unique among the agents that meet.
    fn name(&self) -> &str;

    /// Registers storages in one batch: all of them, or none. A peer that added this agent before
    /// has to add it again to see them.
    ///
    /// # Errors
    /// [`AgentError::Unsupported`] for memory that the agent cannot reach, [`AgentError::Nixl`].
    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError>;

    /// What a peer needs to reach the memory that is registered now.
    ///
    /// # Errors
    /// [`AgentError::Nixl`].
    fn metadata(&self) -> Result<Vec<u8>, AgentError>;

    /// Makes a peer known from its [`metadata`](Self::metadata), which replaces what was known of
    /// it. Gives the peer's name.
    ///
    /// # Errors
    /// [`AgentError::Metadata`] for bytes that are no metadata.
    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError>;

    /// Forgets a peer and its memory. A peer that is not known is no error.
    ///
    /// # Errors
    /// [`AgentError::Nixl`].
    fn forget_peer(&self, peer: &str) -> Result<(), AgentError>;

    /// Starts a read or a write. The transfer owns [`RemoteRequest::keep`] until the hardware is
    /// done, whatever becomes of the handle.
    ///
    /// # Errors
    /// [`AgentError::Lists`], [`AgentError::NotRegistered`], [`AgentError::UnknownPeer`],
    /// [`AgentError::Nixl`]. Nothing has started then.
    ///
    /// # Safety
    /// Until the transfer has ended, nobody else may write the local memory of a write, nor read
    /// or write the local memory of a read. The peer has promised the same of its memory, by a
    /// lease.
    unsafe fn start(&self, request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError>;

    /// Sends a peer a message of up to [`MAX_NOTIFICATION_BYTES`]. It may be lost if the peer ends.
    ///
    /// # Errors
    /// [`AgentError::UnknownPeer`], [`AgentError::Notification`], [`AgentError::Nixl`].
    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError>;

    /// Takes the messages that have arrived. Those of one peer are in its order.
    ///
    /// # Errors
    /// [`AgentError::Nixl`].
    fn notifications(&self) -> Result<Vec<Notification>, AgentError>;

    /// Has `wake` called when a message arrives, in place of what was given before. False: this
    /// agent has to be asked for its messages again and again.
    fn wake_on_message(&self, wake: Arc<dyn Fn() + Send + Sync>) -> bool {
        drop(wake);
        false
    }
}
