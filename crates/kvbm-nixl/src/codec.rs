//! The bytes of a block set.
//!
//! ```text
//! size  field                                   size  field
//!    8  magic "kvbmbset"                           4  first layer
//!    2  format version: 1                          4  number of layers
//!    1  memory: 0 DRAM, 1 VRAM, 2 file             4  first head
//!    1  replicated: 0 no, 1 yes                    4  number of heads
//!    4  device (0 unless VRAM)                     4  number of blocks
//!    8  block set id                               8  lease id
//!   16  namespace tag                              8  lease expiry (Unix time, ms)
//!    4  node                                    2+n  agent: length, UTF-8
//!    2  rank                                    4+n  agent metadata: length, bytes
//!    2  writer (0 unless replicated)            4+n  regions: count, then address and length (8 + 8) each
//!                                               4+n  layout: length, bytes
//!                                                 8  CRC-64/NVME of all bytes before
//! ```
//! The left column comes first, then the right one; integers are little-endian, nothing is padded.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_plan::{BlockSetId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication};

use crate::{BlockSet, ExportError, ImportError, Lease, MemoryKind, MemoryRegion, UnixMillis};

const MAGIC: [u8; 8] = *b"kvbmbset";
const VERSION: u16 = 1;
const MAX_AGENT_BYTES: usize = 255;
const MAX_PART_BYTES: usize = 1 << 20;
const MAX_REGIONS: usize = 4096;
/// More than the largest set takes.
const MAX_BYTES: usize = 4 << 20;
const CHECKSUM_BYTES: usize = 8;

/// The rules that both sides keep.
pub(crate) fn validate(set: &BlockSet) -> Result<(), ExportError> {
    let check = |ok: bool, field, value: &dyn std::fmt::Debug, rule| {
        if ok { Ok(()) } else { Err(ExportError { field, value: format!("{value:?}"), rule }) }
    };
    let slice = &set.slice;
    let range = |first: u32, count: u32| count > 0 && first.checked_add(count).is_some();
    check(
        range(slice.first_layer, slice.num_layers),
        "layers",
        &(slice.first_layer, slice.num_layers),
        "at least one layer is needed, and layer numbers have 32 bits",
    )?;
    check(
        range(slice.heads.start, slice.heads.count),
        "heads",
        &(slice.heads.start, slice.heads.count),
        "at least one head is needed, and head numbers have 32 bits",
    )?;
    check(set.num_blocks > 0, "number of blocks", &set.num_blocks, "at least one block is needed")?;
    let agent = set.agent.len();
    check((1..=MAX_AGENT_BYTES).contains(&agent), "agent name length", &agent, "1 to 255 bytes are allowed")?;
    let metadata = set.agent_metadata.len();
    check(metadata <= MAX_PART_BYTES, "agent metadata length", &metadata, "at most 1 MiB is allowed")?;
    let layout = set.layout.len();
    check((1..=MAX_PART_BYTES).contains(&layout), "layout length", &layout, "1 byte to 1 MiB is allowed")?;
    let regions = set.regions.len();
    check((1..=MAX_REGIONS).contains(&regions), "number of regions", &regions, "1 to 4096 are allowed")?;
    for region in &set.regions {
        let fits = region.length_bytes > 0 && region.address.checked_add(region.length_bytes).is_some();
        check(fits, "region", region, "it must not be empty or wrap around the address space")?;
    }
    Ok(())
}

/// The bytes of a valid set.
pub(crate) fn encode(set: &BlockSet) -> Vec<u8> {
    let (memory, device) = match set.memory {
        MemoryKind::Dram => (0, 0),
        MemoryKind::Vram { device } => (1, device),
        MemoryKind::File => (2, 0),
    };
    let (replicated, writer) = match set.slice.replication {
        Replication::None => (0, Rank(0)),
        Replication::Replicated { writer } => (1, writer),
    };
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([memory, replicated]);
    bytes.extend(device.to_le_bytes());
    bytes.extend(set.id.0.to_le_bytes());
    bytes.extend(set.namespace.as_bytes());
    bytes.extend(set.node.0.to_le_bytes());
    bytes.extend(set.slice.rank.0.to_le_bytes());
    bytes.extend(writer.0.to_le_bytes());
    let RankSlice { first_layer, num_layers, heads, .. } = set.slice;
    for number in [first_layer, num_layers, heads.start, heads.count, set.num_blocks] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(set.lease.id.0.to_le_bytes());
    bytes.extend(set.lease.expires.0.to_le_bytes());
    // `validate` has bounded these lengths.
    bytes.extend((set.agent.len() as u16).to_le_bytes());
    bytes.extend(set.agent.as_bytes());
    bytes.extend((set.agent_metadata.len() as u32).to_le_bytes());
    bytes.extend(&set.agent_metadata);
    bytes.extend((set.regions.len() as u32).to_le_bytes());
    for region in &set.regions {
        bytes.extend(region.address.to_le_bytes());
        bytes.extend(region.length_bytes.to_le_bytes());
    }
    bytes.extend((set.layout.len() as u32).to_le_bytes());
    bytes.extend(&set.layout);
    bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
    bytes
}

/// Reads a set; every bound is checked before memory is taken for it.
pub(crate) fn decode(bytes: &[u8]) -> Result<BlockSet, ImportError> {
    let mut reader = Reader::open(bytes)?;
    let memory = reader.take::<1>("memory kind")?[0];
    let replicated = reader.take::<1>("replication")?[0];
    let device = reader.u32("device")?;
    let memory = match (memory, device) {
        (0, 0) => MemoryKind::Dram,
        (1, device) => MemoryKind::Vram { device },
        (2, 0) => MemoryKind::File,
        _ => {
            return refuse(
                "memory kind",
                &(memory, device),
                "0 (DRAM), 1 (VRAM) or 2 (file); only VRAM has a device",
            );
        }
    };
    let id = BlockSetId(reader.u64("block set id")?);
    let namespace = NamespaceTag::from_bytes(reader.take("namespace tag")?);
    let node = NodeId(reader.u32("node")?);
    let rank = Rank(reader.u16("rank")?);
    let writer = Rank(reader.u16("writer")?);
    let replication = match (replicated, writer) {
        (0, Rank(0)) => Replication::None,
        (1, writer) => Replication::Replicated { writer },
        _ => return refuse("replication", &(replicated, writer), "0 (none, no writer) or 1"),
    };
    let slice = RankSlice {
        rank,
        first_layer: reader.u32("first layer")?,
        num_layers: reader.u32("number of layers")?,
        heads: HeadRange { start: reader.u32("first head")?, count: reader.u32("number of heads")? },
        replication,
    };
    let num_blocks = reader.u32("number of blocks")?;
    let lease =
        Lease { id: LeaseId(reader.u64("lease id")?), expires: UnixMillis(reader.u64("lease expiry")?) };
    let agent_length = usize::from(reader.u16("agent name length")?);
    let agent = reader.bytes(agent_length, "agent name")?;
    let Ok(agent) = std::str::from_utf8(agent) else {
        return refuse("agent name", &"not UTF-8", "UTF-8 is needed");
    };
    let agent_metadata = reader.prefixed("agent metadata")?.to_vec();
    let regions = reader.regions()?;
    let layout = reader.prefixed("layout")?.to_vec();
    reader.finish()?;
    let agent = agent.to_owned();
    let set = BlockSet {
        id,
        namespace,
        node,
        slice,
        num_blocks,
        memory,
        regions,
        layout,
        agent,
        agent_metadata,
        lease,
    };
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

    fn regions(&mut self) -> Result<Vec<MemoryRegion>, ImportError> {
        let count = self.u32("number of regions")? as usize;
        if count > MAX_REGIONS {
            return refuse("number of regions", &count, "1 to 4096 are allowed");
        }
        let mut regions = Vec::with_capacity(count);
        for _ in 0..count {
            regions.push(MemoryRegion { address: self.u64("region")?, length_bytes: self.u64("region")? });
        }
        Ok(regions)
    }

    fn finish(self) -> Result<(), ImportError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(ImportError::Trailing { extra }),
        }
    }
}
