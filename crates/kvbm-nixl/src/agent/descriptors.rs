//! Lists of byte ranges.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

use kvbm_layout::MemoryKind;
use kvbm_storage::{Backing, Storage, StorageError, StorageExt};

use super::{AgentError, MAX_DESCRIPTORS, TransferDirection};

/// Kinds of memory that an agent tells apart. Page-locked and pageable host memory are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SegmentKind {
    /// Host memory.
    Dram,
    /// Device memory.
    Vram,
    /// A file: addresses are offsets in it.
    File,
    /// An object of a store: addresses are offsets in it.
    Object,
}

impl fmt::Display for SegmentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Dram => "host memory",
            Self::Vram => "device memory",
            Self::File => "a file",
            Self::Object => "an object",
        })
    }
}

impl From<MemoryKind> for SegmentKind {
    fn from(kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::System | MemoryKind::Pinned => Self::Dram,
            MemoryKind::Device => Self::Vram,
            MemoryKind::File => Self::File,
        }
    }
}

impl SegmentKind {
    /// The kind of a storage.
    pub fn of(storage: &dyn Storage) -> Result<Self, AgentError> {
        match storage.backing() {
            Backing::Host(_) => Ok(Self::Dram),
            Backing::Device(_) => Ok(Self::Vram),
            Backing::File(_) => Ok(Self::File),
            other => Err(AgentError::Unsupported {
                what: format!("{other:?}"),
                way_out: "register host memory, device memory or a file",
            }),
        }
    }
}

/// A range of bytes in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Address of the first byte in its owner's space; an offset for files.
    pub address: u64,
    /// Bytes; at least 1.
    pub bytes: u64,
    /// Device ordinal; 0 for host memory; for a file, its descriptor number in the owner's process;
    /// for an object, a number of its registration.
    pub device_id: u64,
}

impl Descriptor {
    /// `bytes` bytes at `offset` of a storage of this process.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`].
    pub fn within(storage: &dyn Storage, offset: u64, bytes: u64) -> Result<Self, StorageError> {
        storage.check_range(offset, bytes)?;
        Ok(Self { address: storage.address() + offset, bytes, device_id: device_of(storage) })
    }

    /// One byte behind the range. Saturates.
    pub fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }
}

/// The number that descriptors of a storage carry as their device.
pub(crate) fn device_of(storage: &dyn Storage) -> u64 {
    match storage.backing() {
        Backing::File(file) => file.as_fd().as_raw_fd() as u64,
        _ => storage.device().map_or(0, |device| u64::from(device.0)),
    }
}

/// Ranges of one kind of memory. Entry `i` of one side of a request is as long as entry `i` of the
/// other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorList {
    /// Kind of memory of all entries.
    pub kind: SegmentKind,
    /// The ranges.
    pub entries: Vec<Descriptor>,
}

impl DescriptorList {
    /// An empty list.
    pub fn new(kind: SegmentKind) -> Self {
        Self { kind, entries: Vec::new() }
    }

    /// Bytes of all entries. Saturates.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().fold(0, |sum, entry| sum.saturating_add(entry.bytes))
    }
}

/// The rules of a request's two lists, the same for every agent.
pub(crate) fn check_lists(
    direction: TransferDirection,
    local: &DescriptorList,
    remote: &DescriptorList,
) -> Result<(), AgentError> {
    let refuse = |reason: String| Err(AgentError::Lists { direction, reason });
    let (ours, theirs) = (local.entries.len(), remote.entries.len());
    if ours != theirs {
        return refuse(format!("{ours} local ranges, {theirs} remote ranges: give as many of both"));
    }
    if !(1..=MAX_DESCRIPTORS).contains(&ours) {
        return refuse(format!("{ours} ranges: give 1 to {MAX_DESCRIPTORS}"));
    }
    let unequal = |(ours, theirs): (&Descriptor, &Descriptor)| ours.bytes != theirs.bytes || ours.bytes == 0;
    match local.entries.iter().zip(&remote.entries).position(unequal) {
        None => Ok(()),
        Some(at) => refuse(format!(
            "range {at} has {} local bytes and {} remote bytes: give equal lengths of at least 1",
            local.entries[at].bytes, remote.entries[at].bytes
        )),
    }
}
