//! What a node tells its peers about itself: how to reach it, and every block set it offers, in one
//! message, so that an import is never half done.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmnode"
//!      8    2  format version: 1
//!     10    2  number of block sets
//!     12    4  node
//!     16    8  epoch: one life of the node, larger after every start
//!     24    8  sequence: larger for every announcement of an epoch
//!     32  2+n  agent name: length, UTF-8
//!         4+n  agent metadata: length, bytes
//!         4+n  each block set: length, its serialized form
//!           8  CRC-64/NVME of all bytes before
//! ```
//! Integers are little-endian, nothing is padded.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_plan::{Epoch, NodeId};

use crate::codec::{MAX_AGENT_BYTES, MAX_METADATA_BYTES, Reader};
use crate::{BlockSet, ExportError, ImportError, codec};

pub(crate) const MAGIC: [u8; 8] = *b"kvbmnode";
const VERSION: u16 = 1;

/// Most block sets of a node: one for each rank and group.
pub const MAX_BLOCK_SETS: usize = 256;

/// Longest announcement that is written or read, in bytes.
pub const MAX_ANNOUNCEMENT_BYTES: usize = 16 << 20;

/// A node as it presents itself to its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAnnouncement {
    /// The node, unique in the deployment.
    pub node: NodeId,
    /// The node's life: larger after every start. Peers ignore older ones.
    pub epoch: Epoch,
    /// Counts the announcements of an epoch. Peers ignore older ones.
    pub sequence: u64,
    /// Name of the agent that takes the node's messages. 1 to 255 bytes.
    pub agent: String,
    /// That agent's metadata. Up to 1 MiB.
    pub agent_metadata: Vec<u8>,
    /// All block sets that the node offers now. Up to [`MAX_BLOCK_SETS`].
    pub sets: Vec<BlockSet>,
}

impl NodeAnnouncement {
    /// The bytes to publish.
    ///
    /// # Errors
    /// What a peer would refuse: names, metadata, counts out of bounds, an unfit block set.
    pub fn encode(&self) -> Result<Vec<u8>, ExportError> {
        let check = |ok: bool, field, value: usize, rule| {
            if ok { Ok(()) } else { Err(ExportError::Field { field, value: value.to_string(), rule }) }
        };
        let (agent, metadata) = (self.agent.len(), self.agent_metadata.len());
        check(self.sets.len() <= MAX_BLOCK_SETS, "number of block sets", self.sets.len(), "at most 256")?;
        check(
            (1..=MAX_AGENT_BYTES).contains(&agent),
            "agent name length",
            agent,
            "1 to 255 bytes are allowed",
        )?;
        check(metadata <= MAX_METADATA_BYTES, "agent metadata length", metadata, "at most 1 MiB is allowed")?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.sets.len() as u16).to_le_bytes());
        bytes.extend(self.node.0.to_le_bytes());
        bytes.extend(self.epoch.0.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend((agent as u16).to_le_bytes());
        bytes.extend(self.agent.as_bytes());
        bytes.extend((metadata as u32).to_le_bytes());
        bytes.extend(&self.agent_metadata);
        for set in &self.sets {
            let set = codec::encode(set)?;
            bytes.extend((set.len() as u32).to_le_bytes());
            bytes.extend(set);
        }
        bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
        let total = bytes.len();
        check(total <= MAX_ANNOUNCEMENT_BYTES, "announcement length", total, "at most 16 MiB are allowed")?;
        Ok(bytes)
    }

    /// Reads an announcement; every bound is checked before memory is taken for it.
    ///
    /// # Errors
    /// [`ImportError`]. Nothing was kept of it.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImportError> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION, MAX_ANNOUNCEMENT_BYTES)?;
        let _magic_and_version: [u8; 10] = reader.take("magic")?;
        let count = usize::from(u16::from_le_bytes(reader.take("number of block sets")?));
        if count > MAX_BLOCK_SETS {
            return codec::refuse("number of block sets", &count, "at most 256 are allowed");
        }
        let node = NodeId(u32::from_le_bytes(reader.take("node")?));
        let epoch = Epoch(u64::from_le_bytes(reader.take("epoch")?));
        let sequence = u64::from_le_bytes(reader.take("sequence")?);
        let agent = reader.name()?;
        let agent_metadata = reader.prefixed("agent metadata")?.to_vec();
        let mut sets = Vec::with_capacity(count);
        for _ in 0..count {
            let set = codec::decode(reader.prefixed("block set")?)?;
            if set.node != node {
                return codec::refuse("node of a block set", &set.node, "the announcing node's is needed");
            }
            sets.push(set);
        }
        reader.finish()?;
        let announcement = Self { node, epoch, sequence, agent, agent_metadata, sets };
        // The same rules on both sides.
        announcement.encode()?;
        Ok(announcement)
    }
}
