//! What a node tells its peers about itself: how to reach it, and every block set it offers, in one
//! message, so that an import is never half done.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmnode"
//!      8    2  format version: 1, or 2 with a deployment's key
//!     10    2  number of block sets
//!     12    4  node
//!     16    8  epoch: one life of the node, larger after every start
//!     24    8  sequence: larger for every announcement of an epoch
//!     32  2+n  agent name: length, UTF-8
//!         4+n  agent metadata: length, bytes
//!         4+n  each block set: length, its serialized form
//!          16  version 2: the name of the key
//!           8  sum of all bytes before: CRC-64/NVME, in version 2 BLAKE3 with the key
//! ```
//! Integers are little-endian, nothing is padded.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_keys::{DeploymentKey, KeyId, MacKey};
use kvbm_plan::{Epoch, NodeId};

use crate::codec::{MAX_AGENT_BYTES, MAX_METADATA_BYTES, Reader};
use crate::{BlockSet, ExportError, ImportError, codec};

pub(crate) const MAGIC: [u8; 8] = *b"kvbmnode";
const VERSION: u16 = 1;
const KEYED_VERSION: u16 = 2;
/// Of the name of a key, and the sum behind it.
const SIGNATURE_BYTES: usize = 16 + kvbm_keys::MAC_BYTES;

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
    /// The name under which a node's announcement is published, in folders and buckets.
    pub fn name_of(node: NodeId) -> String {
        format!("node-{node}.kvbm")
    }

    /// The bytes to publish. With the deployment's `key` they are signed: peers that have it take
    /// no others.
    ///
    /// # Errors
    /// What a peer would refuse: names, metadata, counts out of bounds, an unfit block set.
    pub fn encode(&self, key: Option<&DeploymentKey>) -> Result<Vec<u8>, ExportError> {
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
        let version = if key.is_some() { KEYED_VERSION } else { VERSION };
        bytes.extend(version.to_le_bytes());
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
        let bytes = match key {
            None => {
                bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
                bytes
            }
            Some(key) => signed(bytes, key),
        };
        let total = bytes.len();
        check(total <= MAX_ANNOUNCEMENT_BYTES, "announcement length", total, "at most 16 MiB are allowed")?;
        Ok(bytes)
    }

    /// Reads an announcement; every bound is checked before memory is taken for it. With the
    /// deployment's `key`, only one that is signed with it.
    ///
    /// # Errors
    /// [`ImportError`]. Nothing was kept of it.
    pub fn decode(bytes: &[u8], key: Option<&DeploymentKey>) -> Result<Self, ImportError> {
        let mut reader = open(bytes, key)?;
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
        announcement.encode(key)?;
        Ok(announcement)
    }
}

/// With the name of the key and the signature behind it.
pub(crate) fn signed(mut bytes: Vec<u8>, key: &DeploymentKey) -> Vec<u8> {
    bytes.extend(key.id().as_bytes());
    bytes.extend(mac_key(key).of(&[&bytes]).to_le_bytes());
    bytes
}

fn mac_key(key: &DeploymentKey) -> MacKey {
    key.derive("kvbm 2026-11-25 remote: announcements")
}

/// A reader of all before the sum, after it has been compared.
fn open<'a>(bytes: &'a [u8], key: Option<&DeploymentKey>) -> Result<Reader<'a>, ImportError> {
    if !bytes.starts_with(&signed_beginning()) {
        // Also what is no announcement: it is named before the key is missed.
        let reader = Reader::open(bytes, MAGIC, VERSION, MAX_ANNOUNCEMENT_BYTES)?;
        let Some(key) = key else { return Ok(reader) };
        return Err(ImportError::Key { found: None, ours: Some(key.id()) });
    }
    let length = bytes.len();
    if length > MAX_ANNOUNCEMENT_BYTES {
        return Err(ImportError::TooLong { length, limit: MAX_ANNOUNCEMENT_BYTES });
    }
    let truncated = || ImportError::Truncated { field: "signature", length };
    let (body, signature) = bytes.split_last_chunk::<SIGNATURE_BYTES>().ok_or_else(truncated)?;
    let (id, sum) = signature.split_first_chunk::<16>().ok_or_else(truncated)?;
    let found = Some(KeyId::from_bytes(*id));
    let Some(key) = key.filter(|key| Some(key.id()) == found) else {
        return Err(ImportError::Key { found, ours: key.map(DeploymentKey::id) });
    };
    if mac_key(key).of(&[body, id]).to_le_bytes() != sum {
        return Err(ImportError::Checksum);
    }
    Ok(Reader::verified(body, length))
}

/// What a signed announcement begins with.
fn signed_beginning() -> [u8; 10] {
    let mut beginning = [0; 10];
    beginning[..8].copy_from_slice(&MAGIC);
    beginning[8..].copy_from_slice(&KEYED_VERSION.to_le_bytes());
    beginning
}
