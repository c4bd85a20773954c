//! The seam: what every storage tells about itself.

use std::fmt;
use std::sync::Arc;

use kvbm_device::{DeviceId, DeviceMemory, HostRegion};

use crate::{DiskStorage, StorageError};

/// Kinds of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageKind {
    /// Host memory.
    System,
    /// Host memory that is page-locked and registered with a device.
    Pinned,
    /// Device memory.
    Device,
    /// A file.
    Disk,
}

impl fmt::Display for StorageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "system",
            Self::Pinned => "pinned",
            Self::Device => "device",
            Self::Disk => "disk",
        })
    }
}

/// How the bytes of a storage can be reached.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Backing<'a> {
    /// By the CPU, by devices (fast if page-locked), by disk rings.
    Host(&'a HostRegion),
    /// By streams of its device.
    Device(&'a DeviceMemory),
    /// By file I/O.
    File(&'a DiskStorage),
}

/// A contiguous range of bytes in memory or on disk, freed when dropped unless somebody else owns
/// it.
///
/// Three methods are enough to implement it. Convenience lives in [`StorageExt`].
pub trait Storage: Send + Sync + fmt::Debug {
    /// What it is. Page-locked memory that could not be locked says [`StorageKind::System`].
    fn kind(&self) -> StorageKind;

    /// Access to the bytes.
    fn backing(&self) -> Backing<'_>;

    /// Alignment in bytes that its first byte is known to have, a power of two.
    fn alignment(&self) -> u64;

    /// Length in bytes.
    fn len(&self) -> u64 {
        match self.backing() {
            Backing::Host(region) => region.len(),
            Backing::Device(memory) => memory.len(),
            Backing::File(file) => file.file_len(),
        }
    }

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte in its own space: host address, device address, or offset in its
    /// file (0).
    fn address(&self) -> u64 {
        match self.backing() {
            Backing::Host(region) => region.address(),
            Backing::Device(memory) => memory.address(),
            Backing::File(_) => 0,
        }
    }

    /// The device whose memory it is.
    fn device(&self) -> Option<DeviceId> {
        match self.backing() {
            Backing::Device(memory) => Some(memory.device()),
            Backing::Host(_) | Backing::File(_) => None,
        }
    }
}

/// Checked access by the host, for every [`Storage`] that the host can reach.
///
/// Storages are shared between threads that work on different blocks at the same time, so these
/// take `&self`. Who may touch which bytes when is decided by the states of blocks: what reads or
/// writes host memory is `unsafe` (see [`HostRegion`]).
pub trait StorageExt: Storage {
    /// Copies bytes out of host memory or a file.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`], [`StorageError::NotHostAccessible`] for device memory,
    /// [`StorageError::Io`].
    ///
    /// # Safety
    /// Nobody (thread, device or disk) may write these bytes meanwhile, if they are host memory.
    unsafe fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StorageError> {
        self.check_range(offset, into.len() as u64)?;
        match self.backing() {
            // SAFETY: the caller excludes writers.
            Backing::Host(region) => Ok(unsafe { region.read_at(offset, into) }?),
            Backing::Device(_) => {
                Err(StorageError::NotHostAccessible { kind: self.kind(), operation: "read_at" })
            }
            Backing::File(file) => file.read_exact_at(offset, into),
        }
    }

    /// Copies bytes into host memory or a file.
    ///
    /// # Errors
    /// As [`StorageExt::read_at`], and [`StorageError::NoSpace`].
    ///
    /// # Safety
    /// Nobody else (thread, device or disk) may read or write these bytes meanwhile, if they are
    /// host memory.
    unsafe fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), StorageError> {
        self.check_range(offset, bytes.len() as u64)?;
        match self.backing() {
            // SAFETY: the caller excludes everybody else.
            Backing::Host(region) => Ok(unsafe { region.write_at(offset, bytes) }?),
            Backing::Device(_) => {
                Err(StorageError::NotHostAccessible { kind: self.kind(), operation: "write_at" })
            }
            Backing::File(file) => file.write_all_at(offset, bytes),
        }
    }

    /// Whether `len` bytes at `offset` lie inside.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`].
    fn check_range(&self, offset: u64, len: u64) -> Result<(), StorageError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(StorageError::OutOfRange {
                storage: format!("{} storage at {:#x}", self.kind(), self.address()),
                offset,
                len,
                size: self.len(),
            }),
        }
    }
}

impl<S: Storage + ?Sized> StorageExt for S {}

/// Makes storages of one kind.
pub trait StorageAllocator: Send + Sync + fmt::Debug {
    /// `len` bytes (more than zero) whose first byte is aligned to `alignment` (a power of two).
    /// Files are aligned to everything.
    ///
    /// # Errors
    /// Says what was asked, what there is, and the way out.
    fn allocate(&self, len: u64, alignment: u64) -> Result<Arc<dyn Storage>, StorageError>;
}

/// A part of a slot file, which stays open as long as this lives.
#[derive(Clone, Debug)]
pub struct FileRange {
    file: DiskStorage,
    offset: u64,
    len: u64,
}

impl FileRange {
    /// `len` bytes at `offset` of a file.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`].
    pub fn new(file: &DiskStorage, offset: u64, len: u64) -> Result<Self, StorageError> {
        file.check_range(offset, len)?;
        Ok(Self { file: file.clone(), offset, len })
    }

    /// The file.
    pub fn file(&self) -> &DiskStorage {
        &self.file
    }

    /// First byte of the range, as an offset in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Offset in the file of `len` bytes at `offset` of the range.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`].
    pub fn position(&self, offset: u64, len: u64) -> Result<u64, StorageError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.offset + offset),
            _ => Err(StorageError::OutOfRange {
                storage: format!("a range of {}", self.file.path().display()),
                offset,
                len,
                size: self.len,
            }),
        }
    }
}
