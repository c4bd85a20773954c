//! The bytes of a block set.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmbset"
//!      8    2  format version: 1
//!     10    2  group
//!     12    2  rank
//!     14    2  writer (0 unless replicated)
//!     16    1  replicated: 0 no, 1 yes
//!     17    3  zero
//!     20    4  node
//!     24    8  block set id
//!     32   16  namespace tag
//!     48    4  first layer
//!     52    4  number of layers
//!     56    4  first head
//!     60    4  number of heads
//!     64    8  lease id
//!     72    8  lease expiry (Unix time, ms)
//!     80  2+n  agent name: length, UTF-8
//!         4+n  agent metadata: length, bytes
//!         4+n  layout: length, the serialized form of `kvbm-layout`
//!           8  CRC-64/NVME of all bytes before
//! ```
//! Integers are little-endian, nothing is padded.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_layout::{BlockLayout, LayoutDescriptor, MAX_MESSAGE_BYTES};
use kvbm_plan::{
    BlockSetId, GroupId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication,
};

use crate::{BlockSet, ExportError, ImportError, Lease, UnixMillis};

pub(crate) const MAGIC: [u8; 8] = *b"kvbmbset";
const VERSION: u16 = 1;
const MAX_AGENT_BYTES: usize = 255;
const MAX_METADATA_BYTES: usize = 1 << 20;
/// The largest set: its fixed part, the longest agent name, metadata and layout.
const MAX_BYTES: usize = 100 + MAX_AGENT_BYTES + MAX_METADATA_BYTES + MAX_MESSAGE_BYTES;
const CHECKSUM_BYTES: usize = 8;

/// The rules that both sides keep.
fn validate(set: &BlockSet) -> Result<(), ExportError> {
    let check = |ok: bool, field, value: &dyn std::fmt::Debug, rule| {
        if ok { Ok(()) } else { Err(ExportError::Field { field, value: format!("{value:?}"), rule }) }
    };
    let config = set.layout.layout().config();
    let (first, layers) = (set.slice.first_layer, set.slice.num_layers);
    let fits = layers == config.num_layers && first.checked_add(layers).is_some();
    check(
        fits,
        "layers",
        &(first, layers),
        "the layout's number of layers is needed, in 32-bit layer numbers",
    )?;
    let HeadRange { start, count } = set.slice.heads;
    let fits = count == config.num_heads && start.checked_add(count).is_some();
    check(fits, "heads", &(start, count), "the layout's number of heads is needed, in 32-bit head numbers")?;
    let agent = set.agent.len();
    check((1..=MAX_AGENT_BYTES).contains(&agent), "agent name length", &agent, "1 to 255 bytes are allowed")?;
    let metadata = set.agent_metadata.len();
    check(metadata <= MAX_METADATA_BYTES, "agent metadata length", &metadata, "at most 1 MiB is allowed")
}

/// The bytes of a set.
pub(crate) fn encode(set: &BlockSet) -> Result<Vec<u8>, ExportError> {
    validate(set)?;
    let layout = set.layout.encode()?;
    let (replicated, writer) = match set.slice.replication {
        Replication::None => (0, Rank(0)),
        Replication::Replicated { writer } => (1, writer),
    };
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    for number in [VERSION, set.group.0, set.slice.rank.0, writer.0] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend([replicated, 0, 0, 0]);
    bytes.extend(set.node.0.to_le_bytes());
    bytes.extend(set.id.0.to_le_bytes());
    bytes.extend(set.namespace.as_bytes());
    let RankSlice { first_layer, num_layers, heads, .. } = set.slice;
    for number in [first_layer, num_layers, heads.start, heads.count] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(set.lease.id.0.to_le_bytes());
    bytes.extend(set.lease.expires.0.to_le_bytes());
    // `validate` has bounded the first two lengths, `LayoutDescriptor::encode` the third.
    bytes.extend((set.agent.len() as u16).to_le_bytes());
    bytes.extend(set.agent.as_bytes());
    bytes.extend((set.agent_metadata.len() as u32).to_le_bytes());
    bytes.extend(&set.agent_metadata);
    bytes.extend((layout.len() as u32).to_le_bytes());
    bytes.extend(layout);
    bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
    Ok(bytes)
}

/// Reads a set; every bound is checked before memory is taken for it.
pub(crate) fn decode(bytes: &[u8]) -> Result<BlockSet, ImportError> {
    let mut reader = Reader::open(bytes)?;
    let group = GroupId(reader.u16("group")?);
    let rank = Rank(reader.u16("rank")?);
    let writer = Rank(reader.u16("writer")?);
    let replicated: [u8; 4] = reader.take("replication")?;
    let replication = match (replicated, writer) {
        ([0, 0, 0, 0], Rank(0)) => Replication::None,
        ([1, 0, 0, 0], writer) => Replication::Replicated { writer },
        _ => return refuse("replication", &(replicated, writer), "0 (and no writer) or 1, then zeros"),
    };
    let node = NodeId(reader.u32("node")?);
    let id = BlockSetId(reader.u64("block set id")?);
    let namespace = NamespaceTag::from_bytes(reader.take("namespace tag")?);
    let slice = RankSlice {
        rank,
        first_layer: reader.u32("first layer")?,
        num_layers: reader.u32("number of layers")?,
        heads: HeadRange { start: reader.u32("first head")?, count: reader.u32("number of heads")? },
        replication,
    };
    let lease =
        Lease { id: LeaseId(reader.u64("lease id")?), expires: UnixMillis(reader.u64("lease expiry")?) };
    let agent_length = usize::from(reader.u16("agent name length")?);
    let agent = reader.bytes(agent_length, "agent name")?;
    let Ok(agent) = std::str::from_utf8(agent) else {
        return refuse("agent name", &"not UTF-8", "UTF-8 is needed");
    };
    let agent_metadata = reader.prefixed("agent metadata")?.to_vec();
    let layout = reader.prefixed("layout")?;
    reader.finish()?;
    let layout = LayoutDescriptor::decode(layout)?;
    let agent = agent.to_owned();
    let set = BlockSet { id, namespace, group, node, slice, layout, agent, agent_metadata, lease };
    validate(&set)?;
    Ok(set)
}

fn refuse<T>(field: &'static str, value: &dyn std::fmt::Debug, rule: &'static str) -> Result<T, ImportError> {
    Err(ImportError::Field { field, value: format!("{value:?}"), rule })
}

/// What is left to read, checksum excluded.
struct Reader<'a> {
    rest: &'a [u8],
    total: usize,
}

impl<'a> Reader<'a> {
    /// Checks length, magic, version and checksum.
    fn open(bytes: &'a [u8]) -> Result<Self, ImportError> {
        let total = bytes.len();
        if total > MAX_BYTES {
            return Err(ImportError::TooLong { length: total, limit: MAX_BYTES });
        }
        let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
            return Err(ImportError::Truncated { field: "checksum", length: total });
        };
        let mut reader = Self { rest: body, total };
        let found = reader.take("magic")?;
        if found != MAGIC {
            return Err(ImportError::Magic { found });
        }
        let found = reader.u16("version")?;
        if found != VERSION {
            return Err(ImportError::Version { found, known: VERSION });
        }
        if checksum(CrcAlgorithm::Crc64Nvme, body) != u64::from_le_bytes(*sum) {
            return Err(ImportError::Checksum);
        }
        Ok(reader)
    }

    fn bytes(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], ImportError> {
        let truncated = ImportError::Truncated { field, length: self.total };
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], ImportError> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.bytes(N, field)?);
        Ok(taken)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, ImportError> {
        self.take(field).map(u16::from_le_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, ImportError> {
        self.take(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, ImportError> {
        self.take(field).map(u64::from_le_bytes)
    }

    /// A 32-bit length and as many bytes.
    fn prefixed(&mut self, field: &'static str) -> Result<&'a [u8], ImportError> {
        let length = self.u32(field)?;
        self.bytes(length as usize, field)
    }

    fn finish(self) -> Result<(), ImportError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(ImportError::Trailing { extra }),
        }
    }
}
