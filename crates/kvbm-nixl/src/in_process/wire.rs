//! Metadata of an in-process agent: its name and its registered ranges.
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmagnt"
//!      8    1  length of the name, then the name (UTF-8)
//!           4  number of ranges, then 25 bytes each: kind (1), device (8), address (8), length (8)
//! ```
//! Integers are little-endian.

use std::collections::BTreeSet;

use kvbm_storage::Storage;

use crate::agent::{AgentError, Descriptor, SegmentKind, device_of};

const MAGIC: &[u8; 8] = b"kvbmagnt";
const MAX_RANGES: usize = 1 << 16;
const RANGE_BYTES: usize = 25;

/// A registered range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    kind: SegmentKind,
    device: u64,
    address: u64,
    bytes: u64,
}

impl Range {
    pub(super) fn of(storage: &dyn Storage) -> Option<Self> {
        let kind = SegmentKind::of(storage).ok()?;
        Some(Self { kind, device: device_of(storage), address: storage.address(), bytes: storage.len() })
    }

    pub(super) fn holds(&self, kind: SegmentKind, range: &Descriptor) -> bool {
        self.kind == kind
            && self.device == range.device_id
            && range.address >= self.address
            && range.end() <= self.address.saturating_add(self.bytes)
    }
}

pub(crate) fn encode(name: &str, ranges: &BTreeSet<Range>) -> Vec<u8> {
    // `NixlOptions::validate` has bounded the name.
    let mut bytes = [&MAGIC[..], &[name.len() as u8], name.as_bytes()].concat();
    bytes.extend((ranges.len() as u32).to_le_bytes());
    for range in ranges {
        bytes.push(match range.kind {
            SegmentKind::Dram => 0,
            SegmentKind::Vram => 1,
            SegmentKind::File => 2,
            SegmentKind::Object => 3,
        });
        for number in [range.device, range.address, range.bytes] {
            bytes.extend(number.to_le_bytes());
        }
    }
    bytes
}

pub(crate) fn decode(bytes: &[u8]) -> Result<(String, BTreeSet<Range>), AgentError> {
    let bad = |reason: &str| AgentError::Metadata { bytes: bytes.len(), reason: reason.to_owned() };
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| bad("it does not start with kvbmagnt"))?;
    let (length, rest) = rest.split_first().ok_or_else(|| bad("it has no name"))?;
    let (name, rest) = rest.split_at_checked(usize::from(*length)).ok_or_else(|| bad("the name is cut"))?;
    let name = std::str::from_utf8(name).map_err(|_| bad("the name is not UTF-8"))?;
    if name.is_empty() {
        return Err(bad("the name is empty"));
    }
    let (count, rest) = rest.split_first_chunk().ok_or_else(|| bad("the count of ranges is cut"))?;
    let count = u32::from_le_bytes(*count) as usize;
    if count > MAX_RANGES || rest.len() != count * RANGE_BYTES {
        return Err(bad("its length does not fit its count of ranges"));
    }
    let ranges = rest
        .chunks_exact(RANGE_BYTES)
        .map(|record| range(record).ok_or_else(|| bad("a range has an unknown kind")));
    Ok((name.to_owned(), ranges.collect::<Result<_, _>>()?))
}

fn range(record: &[u8]) -> Option<Range> {
    let kind = match record.first()? {
        0 => SegmentKind::Dram,
        1 => SegmentKind::Vram,
        2 => SegmentKind::File,
        3 => SegmentKind::Object,
        _ => return None,
    };
    let number = |at: usize| record.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    Some(Range { kind, device: number(1)?, address: number(9)?, bytes: number(17)? })
}
