//! A worker's blocks as a peer sees them.

use std::fmt;

use kvbm_layout::LayoutDescriptor;
use kvbm_plan::{BlockSetId, GroupId, LeaseId, NamespaceTag, NodeId, RankSlice};

use crate::{ExportError, ImportError, codec};

/// Milliseconds since 1970 by the wall clock: the only clock that two machines share. Skew between them shortens or lengthens a
/// lease by as much, so leases are long against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMillis(pub u64);

impl fmt::Display for UnixMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The exporter's promise to leave the blocks in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// What reads under this lease name.
    pub id: LeaseId,
    /// When the promise ends.
    pub expires: UnixMillis,
}

impl Lease {
    /// Whether the promise has ended.
    pub fn is_expired(&self, now: UnixMillis) -> bool {
        now >= self.expires
    }
}

/// Everything a peer needs to read a worker's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSet {
    /// The set's id, chosen by the exporter.
    pub id: BlockSetId,
    /// The namespace of all its blocks.
    pub namespace: NamespaceTag,
    /// The cache group of all its blocks.
    pub group: GroupId,
    /// The exporter's node.
    pub node: NodeId,
    /// The part of every block that the exporter holds: as many layers and heads as the layout has.
    pub slice: RankSlice,
    /// How many blocks there are, how they lie, and in which memory: kind, device, addresses in the exporter's space, strides.
    pub layout: LayoutDescriptor,
    /// Name of the exporter's NIXL agent. 1 to 255 bytes.
    pub agent: String,
    /// What the agent gives to connect to it; empty while there is no NIXL. Up to 1 MiB.
    pub agent_metadata: Vec<u8>,
    /// The promise under which the blocks may be read.
    pub lease: Lease,
}

impl BlockSet {
    /// The form to send to peers.
    ///
    /// # Errors
    /// What a peer would refuse: a slice that the layout does not have, an agent's name or metadata of a length that is not allowed, a
    /// layout that cannot be written.
    pub fn export(&self) -> Result<SerializedBlockSet, ExportError> {
        codec::encode(self).map(|bytes| SerializedBlockSet { bytes })
    }
}

/// A block set as it travels: versioned and checksummed, untrusted until imported.
///
/// The checksum finds damage, not forgery: exchange block sets over a channel that both sides trust.
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

    /// Checks and decodes the set: it must be sound, of our namespace, and its lease must not be over.
    ///
    /// # Errors
    /// [`ImportError`]: damaged, cut, of another version or namespace, contradictory, or with a lease that is over. Nothing was kept of it.
    pub fn import(&self, namespace: &NamespaceTag, now: UnixMillis) -> Result<BlockSet, ImportError> {
        let set = codec::decode(&self.bytes)?;
        if set.namespace != *namespace {
            return Err(ImportError::Namespace { expected: *namespace, found: set.namespace });
        }
        if set.lease.is_expired(now) {
            let Lease { id: lease, expires: expired } = set.lease;
            return Err(ImportError::Expired { lease, expired, now });
        }
        Ok(set)
    }
}

impl fmt::Debug for SerializedBlockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SerializedBlockSet({} bytes)", self.bytes.len())
    }
}
