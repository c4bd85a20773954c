//! Export and import: a block set as it is sent to a peer.

use std::fmt;

use kvbm_plan::NamespaceTag;

use crate::{BlockSet, ExportError, ImportError, codec};

impl BlockSet {
    /// The form to send to peers.
    ///
    /// # Errors
    /// What a peer would refuse: a slice that the layout does not have, an agent's name or metadata
    /// of a length that is not allowed, a layout that cannot be written.
    pub fn export(&self) -> Result<SerializedBlockSet, ExportError> {
        codec::encode(self).map(|bytes| SerializedBlockSet { bytes })
    }
}

/// A block set as it travels: versioned and checksummed, untrusted until imported.
///
/// The checksum finds damage, not forgery: exchange block sets over a channel that both sides
/// trust.
#[derive(Clone, PartialEq, Eq)]
pub struct SerializedBlockSet {
    bytes: Vec<u8>,
}

impl SerializedBlockSet {
    /// Bytes that came from a peer; nothing is checked yet.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Checks and decodes the set: it must be sound, and of our namespace.
    ///
    /// # Errors
    /// [`ImportError`]: damaged, cut, of another version or namespace, or contradictory. Nothing
    /// was kept of it.
    pub fn import(&self, namespace: &NamespaceTag) -> Result<BlockSet, ImportError> {
        let set = codec::decode(&self.bytes)?;
        if set.namespace != *namespace {
            return Err(ImportError::Namespace { expected: *namespace, found: set.namespace });
        }
        Ok(set)
    }
}

impl fmt::Debug for SerializedBlockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SerializedBlockSet({} bytes)", self.bytes.len())
    }
}
