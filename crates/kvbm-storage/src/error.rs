//! What can go wrong with memory and files, and what to do about it.

use std::path::PathBuf;

use kvbm_device::DeviceError;
use kvbm_layout::{LayoutError, WireError};

use crate::StorageKind;

/// An error of a storage or of a layout bound to storages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// A parameter breaks a rule.
    #[error("{what} is {value}, but {rule}")]
    Invalid {
        /// The parameter.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The rule it must obey.
        rule: &'static str,
    },
    /// The system has no memory of this size for us.
    #[error("no {asked} bytes of host memory: {reason}; make the host tier smaller or free memory")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// What the system said.
        reason: String,
    },
    /// Huge pages were required and there are none.
    #[error(
        "no huge pages for {asked} bytes: {reason}; reserve some (sysctl vm.nr_hugepages) or do not require them"
    )]
    NoHugePages {
        /// Bytes asked for.
        asked: u64,
        /// What the system said.
        reason: String,
    },
    /// Memory that another process passed on cannot be mapped.
    #[error(
        "no {asked} bytes of another process's memory: {reason}; start both processes from the same version"
    )]
    Shared {
        /// Bytes asked for.
        asked: u64,
        /// Why.
        reason: String,
    },
    /// The device refused: memory, streams, page-locking.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A range outside of the storage.
    #[error(
        "bytes {offset}..+{len} are outside of {storage}, which has {size} bytes; check the layout against the storage \
         it is bound to"
    )]
    OutOfRange {
        /// The storage, in words.
        storage: String,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        size: u64,
    },
    /// The host cannot access this kind of storage directly.
    #[error("{kind} storage is not accessible by the host: {operation} needs a stream of its device")]
    NotHostAccessible {
        /// Kind of the storage.
        kind: StorageKind,
        /// What was asked of it.
        operation: &'static str,
    },
    /// The directory of a slot file is not usable.
    #[error("directory {path}: {reason}; create it, or name another one")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A slot file that others may read or change.
    #[error("{path} is not used: {reason}; remove it, or choose another file")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A slot file exists and must not be overwritten.
    #[error("{path} exists already; open it, or name another file")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A slot file has another length than expected.
    #[error(
        "{path} has {found} bytes, expected {expected}; it was made with another capacity or was cut off: remove it, or set the capacity it was made with"
    )]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length it should have.
        expected: u64,
    },
    /// The file system is full.
    #[error(
        "no space for {asked} bytes in {path}: {available} bytes are available; free space, or make the disk tier smaller"
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes to store.
        asked: u64,
        /// Bytes available to this user.
        available: u64,
    },
    /// An operation on a file failed.
    #[error("{operation} {path} at byte {offset}: {reason}; check the path, its permissions and the disk")]
    Io {
        /// What was done.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// What the system said.
        reason: String,
    },
    /// The layout refused.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The description of a bound layout is not usable.
    #[error(transparent)]
    Description(#[from] WireError),
    /// The storage found for a described region is not the one described.
    #[error(
        "region {region} is described as {described}, but the storage given has {found}; open the storage that the \
         description names"
    )]
    DescribedOtherwise {
        /// Index of the region.
        region: u32,
        /// What was given.
        found: String,
        /// What the description says.
        described: String,
    },
    /// A layout has another number of regions than storages were given.
    #[error(
        "the layout has {regions} regions, but {storages} storages were given; give one place for each region"
    )]
    RegionCount {
        /// Regions of the layout.
        regions: usize,
        /// Storages given.
        storages: usize,
    },
    /// A region does not fit where it was to be bound.
    #[error(
        "region {region}: {what} is {found}, but the layout needs {needed}; bind it to a larger or better aligned place"
    )]
    RegionFit {
        /// Index of the region.
        region: u32,
        /// `bytes` or `alignment of the address`.
        what: &'static str,
        /// What the storage offers.
        found: u64,
        /// What the layout needs.
        needed: u64,
    },
    /// Regions of one layout lie on different kinds of storage or on different devices.
    #[error(
        "region {region} is {found} but region 0 is {first}; bind all regions of a layout to one kind of storage on one device"
    )]
    MixedRegions {
        /// Index of the region that differs.
        region: u32,
        /// Where it lies.
        found: String,
        /// Where region 0 lies.
        first: String,
    },
    /// Two regions share bytes.
    #[error("regions {first} and {second} share bytes of one storage; bind each to a range of its own")]
    OverlappingRegions {
        /// One region.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A block falls apart into too many runs to list.
    #[error(
        "a block has {found} contiguous runs, at most {limit} can be listed; use a layout with contiguous heads"
    )]
    TooManyFragments {
        /// Runs in a block.
        found: u64,
        /// The most that are listed.
        limit: u64,
    },
}
