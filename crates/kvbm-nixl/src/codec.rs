//! The bytes of a block set.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmbset"
//!      8    2  format version: 2
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
//!     64  2+n  agent name: length, UTF-8
//!         4+n  agent metadata: length, bytes
//!         4+n  layout: length, the serialized form of `kvbm-layout`
//!           8  CRC-64/NVME of all bytes before
//! ```
//! Integers are little-endian, nothing is padded. Version 1 had 16 bytes more before the agent's
//! name, for a lease that nobody used.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_layout::{BlockLayout, LayoutDescriptor, MAX_MESSAGE_BYTES};
use kvbm_plan::{BlockSetId, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{BlockSet, ExportError, ImportError};

pub(crate) const MAGIC: [u8; 8] = *b"kvbmbset";
pub(crate) const VERSION: u16 = 2;
pub(crate) const MAX_AGENT_BYTES: usize = 255;
pub(crate) const MAX_METADATA_BYTES: usize = 1 << 20;
/// The largest set: its fixed part, three lengths, the longest agent name, metadata and layout, and
/// the checksum.
const MAX_BYTES: usize = 84 + MAX_AGENT_BYTES + MAX_METADATA_BYTES + MAX_MESSAGE_BYTES;
const CHECKSUM_BYTES: usize = 8;

/// The part of fixed length, as it is sent.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct FixedLayout {
    magic: [u8; 8],
    version: U16,
    group: U16,
    rank: U16,
    writer: U16,
    replicated: [u8; 4],
    node: U32,
    id: U64,
    namespace: [u8; 16],
    first_layer: U32,
    num_layers: U32,
    first_head: U32,
    num_heads: U32,
}

const _: () = assert!(size_of::<FixedLayout>() == 64);

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
    let mut fixed = FixedLayout::new_zeroed();
    fixed.magic = MAGIC;
    fixed.version.set(VERSION);
    fixed.group.set(set.group.0);
    fixed.rank.set(set.slice.rank.0);
    fixed.writer.set(writer.0);
    fixed.replicated[0] = replicated;
    fixed.node.set(set.node.0);
    fixed.id.set(set.id.0);
    fixed.namespace = *set.namespace.as_bytes();
    fixed.first_layer.set(set.slice.first_layer);
    fixed.num_layers.set(set.slice.num_layers);
    fixed.first_head.set(set.slice.heads.start);
    fixed.num_heads.set(set.slice.heads.count);
    let mut bytes = fixed.as_bytes().to_vec();
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
    let mut reader = Reader::open(bytes, MAGIC, VERSION, MAX_BYTES)?;
    let fixed: [u8; size_of::<FixedLayout>()] = reader.take("fixed part")?;
    let fixed: FixedLayout = zerocopy::transmute!(fixed);
    let writer = Rank(fixed.writer.get());
    let replication = match (fixed.replicated, writer) {
        ([0, 0, 0, 0], Rank(0)) => Replication::None,
        ([1, 0, 0, 0], writer) => Replication::Replicated { writer },
        replicated => return refuse("replication", &replicated, "0 (and no writer) or 1, then zeros"),
    };
    let slice = RankSlice {
        rank: Rank(fixed.rank.get()),
        first_layer: fixed.first_layer.get(),
        num_layers: fixed.num_layers.get(),
        heads: HeadRange { start: fixed.first_head.get(), count: fixed.num_heads.get() },
        replication,
    };
    let agent = reader.name()?;
    let agent_metadata = reader.prefixed("agent metadata")?.to_vec();
    let layout = reader.prefixed("layout")?;
    reader.finish()?;
    let layout = LayoutDescriptor::decode(layout)?;
    let set = BlockSet {
        id: BlockSetId(fixed.id.get()),
        namespace: NamespaceTag::from_bytes(fixed.namespace),
        group: GroupId(fixed.group.get()),
        node: NodeId(fixed.node.get()),
        slice,
        layout,
        agent,
        agent_metadata,
    };
    validate(&set)?;
    Ok(set)
}

pub(crate) fn refuse<T>(
    field: &'static str,
    value: &dyn std::fmt::Debug,
    rule: &'static str,
) -> Result<T, ImportError> {
    Err(ImportError::Field { field, value: format!("{value:?}"), rule })
}

/// What is left to read, checksum excluded.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    total: usize,
}

impl<'a> Reader<'a> {
    /// Checks length, magic, version and checksum. Gives a reader of all before the checksum.
    pub(crate) fn open(
        bytes: &'a [u8],
        magic: [u8; 8],
        known: u16,
        limit: usize,
    ) -> Result<Self, ImportError> {
        let total = bytes.len();
        if total > limit {
            return Err(ImportError::TooLong { length: total, limit });
        }
        let truncated = |field| ImportError::Truncated { field, length: total };
        let (body, sum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(truncated("checksum"))?;
        // Every version has magic and version in this place. So an error names another version
        // before the length is checked.
        let (&found, rest) = body.split_first_chunk().ok_or(truncated("magic"))?;
        if found != magic {
            return Err(ImportError::Magic { found });
        }
        let (version, _) = U16::read_from_prefix(rest).map_err(|_| truncated("version"))?;
        if version != known {
            return Err(ImportError::Version { found: version.get(), known });
        }
        if checksum(CrcAlgorithm::Crc64Nvme, body) != u64::from_le_bytes(*sum) {
            return Err(ImportError::Checksum);
        }
        Ok(Self { rest: body, total })
    }

    /// A reader of bytes that were verified otherwise, of a message of `total` bytes.
    pub(crate) fn verified(rest: &'a [u8], total: usize) -> Self {
        Self { rest, total }
    }

    /// An agent's name: a 16-bit length and as many bytes of UTF-8.
    pub(crate) fn name(&mut self) -> Result<String, ImportError> {
        let length = usize::from(u16::from_le_bytes(self.take("agent name length")?));
        match std::str::from_utf8(self.bytes(length, "agent name")?) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => refuse("agent name", &"not UTF-8", "UTF-8 is needed"),
        }
    }

    fn bytes(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], ImportError> {
        let truncated = ImportError::Truncated { field, length: self.total };
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn take<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], ImportError> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.bytes(N, field)?);
        Ok(taken)
    }

    /// A 32-bit length and as many bytes.
    pub(crate) fn prefixed(&mut self, field: &'static str) -> Result<&'a [u8], ImportError> {
        let length = u32::from_le_bytes(self.take(field)?);
        self.bytes(length as usize, field)
    }

    pub(crate) fn finish(self) -> Result<(), ImportError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(ImportError::Trailing { extra }),
        }
    }
}
