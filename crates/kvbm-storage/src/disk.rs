//! Files of fixed length.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::system::check_request;
use crate::{Backing, Storage, StorageAllocator, StorageError, StorageKind};

/// Permission bits of a file: the owner alone reads and writes the KV of its users.
const MODE: u32 = 0o600;

/// How the blocks of a slot file were reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// The file system has reserved them: later writes do not run out of space.
    Reserved,
    /// The file has its length, but blocks are found at the first write, which may fail.
    Sparse {
        /// Why.
        reason: String,
    },
    /// The file existed already.
    Existing,
}

/// A file of fixed length. Clones share it; it is closed with the last, and not removed.
#[derive(Clone, Debug)]
pub struct DiskStorage {
    inner: Arc<SlotFile>,
}

#[derive(Debug)]
struct SlotFile {
    file: File,
    path: PathBuf,
    len: u64,
    preallocation: Preallocation,
}

impl DiskStorage {
    /// Creates a file of `len` bytes and reserves its space.
    ///
    /// # Errors
    /// [`StorageError::Directory`], [`StorageError::Exists`], [`StorageError::NoSpace`],
    /// [`StorageError::Io`]. After an error there is no file.
    pub fn create(path: &Path, len: u64) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let available = available_bytes(parent).map_err(|error| StorageError::Directory {
            path: parent.to_owned(),
            reason: error.to_string(),
        })?;
        if len > available {
            return Err(StorageError::NoSpace { path: path.to_owned(), asked: len, available });
        }
        let file = private_file().create_new(true).open(path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => StorageError::Exists { path: path.to_owned() },
            _ => StorageError::Directory { path: parent.to_owned(), reason: error.to_string() },
        })?;
        match preallocate(&file, path, len) {
            Ok(preallocation) => Ok(Self::new(file, path, len, preallocation)),
            Err(error) => {
                // The first error is the one to tell; a file that cannot be removed either is found
                // as `Exists` later.
                let _first_error_counts = std::fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Opens a file that must have `len` bytes.
    ///
    /// # Errors
    /// [`StorageError::Refused`] for a symbolic link, for what is no regular file and for a file of
    /// another user, [`StorageError::WrongLength`], [`StorageError::Io`].
    pub fn open(path: &Path, len: u64) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let io = |error: &io::Error| io_error("open", path, 0, error);
        let refused = |reason: String| StorageError::Refused { path: path.to_owned(), reason };
        let file = private_file().open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => refused("it is a symbolic link".to_owned()),
            _ => io(&error),
        })?;
        let found = file.metadata().map_err(|error| io(&error))?;
        if !found.is_file() {
            return Err(refused("it is not a regular file".to_owned()));
        }
        check_owner(path, found.uid(), effective_user())?;
        if found.len() != len {
            let found = found.len();
            return Err(StorageError::WrongLength { path: path.to_owned(), found, expected: len });
        }
        if found.mode() & 0o777 != MODE {
            let private = file.set_permissions(std::fs::Permissions::from_mode(MODE));
            private.map_err(|error| io_error("chmod", path, 0, &error))?;
        }
        Ok(Self::new(file, path, len, Preallocation::Existing))
    }

    /// Opens the file if there is one, else creates it.
    ///
    /// # Errors
    /// As [`DiskStorage::create`] and [`DiskStorage::open`].
    pub fn open_or_create(path: &Path, len: u64) -> Result<Self, StorageError> {
        if path.exists() { Self::open(path, len) } else { Self::create(path, len) }
    }

    /// A file of `len` bytes that is open already, by the rules of who opened it. `path` is for
    /// messages.
    ///
    /// # Errors
    /// [`StorageError::WrongLength`] for a shorter file, [`StorageError::Io`].
    pub fn from_file(file: File, path: &Path, len: u64) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let found = file.metadata().map_err(|error| io_error("stat", path, 0, &error))?.len();
        if found < len {
            return Err(StorageError::WrongLength { path: path.to_owned(), found, expected: len });
        }
        Ok(Self::new(file, path, len, Preallocation::Existing))
    }

    fn new(file: File, path: &Path, len: u64, preallocation: Preallocation) -> Self {
        Self { inner: Arc::new(SlotFile { file, path: path.to_owned(), len, preallocation }) }
    }

    /// The file, for rings and vectored I/O.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Length in bytes.
    pub fn file_len(&self) -> u64 {
        self.inner.len
    }

    /// How its space was reserved.
    pub fn preallocation(&self) -> &Preallocation {
        &self.inner.preallocation
    }

    /// Makes all data written so far durable.
    ///
    /// # Errors
    /// [`StorageError::Io`].
    pub fn sync_data(&self) -> Result<(), StorageError> {
        self.inner.file.sync_data().map_err(|error| io_error("fdatasync", self.path(), 0, &error))
    }

    /// Device and inode: the same for every path to the file.
    pub(crate) fn identity(&self) -> Result<(u64, u64), StorageError> {
        let metadata =
            self.inner.file.metadata().map_err(|error| io_error("stat", self.path(), 0, &error))?;
        Ok((metadata.dev(), metadata.ino()))
    }

    pub(crate) fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StorageError> {
        let read = self.inner.file.read_exact_at(into, offset);
        read.map_err(|error| io_error("read", self.path(), offset, &error))
    }

    pub(crate) fn write_all_at(&self, offset: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let written = self.inner.file.write_all_at(bytes, offset);
        written.map_err(|error| write_error(self.path(), offset, bytes.len() as u64, &error))
    }
}

impl Storage for DiskStorage {
    fn kind(&self) -> StorageKind {
        StorageKind::Disk
    }

    fn backing(&self) -> Backing<'_> {
        Backing::File(self)
    }

    /// A file starts at offset 0, which is aligned to everything.
    fn alignment(&self) -> u64 {
        1 << 30
    }
}

impl AsFd for DiskStorage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }
}

impl AsRawFd for DiskStorage {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.file.as_raw_fd()
    }
}

/// Opens files of KV to read and write: a new one for the owner alone, and none behind a link.
fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    // Without `O_NONBLOCK`, the open of a pipe waits for its other end.
    options.read(true).write(true).mode(MODE).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// Refuses the file of another user, who could read and change the KV in it.
fn check_owner(path: &Path, owner: u32, ours: u32) -> Result<(), StorageError> {
    if owner == ours {
        return Ok(());
    }
    let reason = format!("it belongs to user {owner}, and this process runs as user {ours}");
    Err(StorageError::Refused { path: path.to_owned(), reason })
}

fn effective_user() -> u32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

fn io_error(operation: &'static str, path: &Path, offset: u64, error: &io::Error) -> StorageError {
    StorageError::Io { operation, path: path.to_owned(), offset, reason: error.to_string() }
}

fn write_error(path: &Path, offset: u64, asked: u64, error: &io::Error) -> StorageError {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => no_space(path, asked),
        _ => io_error("write", path, offset, error),
    }
}

fn no_space(path: &Path, asked: u64) -> StorageError {
    let available = available_bytes(path).unwrap_or(0);
    StorageError::NoSpace { path: path.to_owned(), asked, available }
}

/// Reserves the blocks of a new file, or at least sets its length where the file system cannot
/// reserve.
fn preallocate(file: &File, path: &Path, len: u64) -> Result<Preallocation, StorageError> {
    let Ok(length) = libc::off_t::try_from(len) else {
        return Err(StorageError::Invalid { what: "length", value: len, rule: "it must fit a file offset" });
    };
    // SAFETY: a plain call on an open descriptor.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } {
        0 => Ok(Preallocation::Reserved),
        _ => not_reserved(&io::Error::last_os_error(), file, path, len),
    }
}

/// A file system that cannot reserve is used all the same, and says so; one that is full is not.
fn not_reserved(
    error: &io::Error,
    file: &File,
    path: &Path,
    len: u64,
) -> Result<Preallocation, StorageError> {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Err(no_space(path, len)),
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => {
            file.set_len(len).map_err(|error| write_error(path, 0, len, &error))?;
            Ok(Preallocation::Sparse { reason: format!("fallocate: {error}") })
        }
        _ => Err(io_error("fallocate", path, 0, error)),
    }
}

/// Bytes that this user may still write on the file system of `path`.
fn available_bytes(path: &Path) -> io::Result<u64> {
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` is NUL-terminated and `stat` is a place for the result.
    if unsafe { libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `statvfs` has filled it in.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Makes [`DiskStorage`] in one directory: `NAME-0.slots`, `NAME-1.slots`, and so on.
#[derive(Debug)]
pub struct DiskAllocator {
    directory: PathBuf,
    name: String,
    next: AtomicU64,
}

impl DiskAllocator {
    /// Creates files in `directory`, which must exist, and refuses to overwrite any.
    pub fn new(directory: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self { directory: directory.into(), name: name.into(), next: AtomicU64::new(0) }
    }
}

impl StorageAllocator for DiskAllocator {
    fn allocate(&self, len: u64, alignment: u64) -> Result<Arc<dyn Storage>, StorageError> {
        check_request(len, alignment)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{}-{number}.slots", self.name));
        Ok(Arc::new(DiskStorage::create(&path, len)?))
    }
}

#[cfg(test)]
#[cfg(not(miri))] // statvfs does not exist there.
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_user_is_refused() {
        let path = Path::new("/kv/slots");
        assert_eq!(check_owner(path, 7, 7), Ok(()));
        let refusal = check_owner(path, 8, 7).unwrap_err().to_string();
        for part in ["/kv/slots", "user 8", "user 7", "choose another"] {
            assert!(refusal.contains(part), "{refusal}");
        }
    }

    #[test]
    fn a_file_system_that_cannot_reserve_gets_a_sparse_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("slots");
        let file = File::create_new(&path).expect("a file");
        let refused = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let preallocation = not_reserved(&refused, &file, &path, 8192).expect("usable");
        assert!(matches!(&preallocation, Preallocation::Sparse { reason } if reason.contains("fallocate")));
        assert_eq!(file.metadata().expect("open").len(), 8192);
    }

    #[test]
    fn an_open_file_has_at_least_its_length() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8192).expect("room");
        let of = |len: u64| {
            DiskStorage::from_file(file.try_clone().expect("a descriptor"), Path::new("slots"), len)
        };
        let shorter = of(4096).expect("a part of it");
        assert_eq!((shorter.file_len(), shorter.preallocation()), (4096, &Preallocation::Existing));
        let error = of(8193).expect_err("more than it has");
        assert!(matches!(error, StorageError::WrongLength { found: 8192, expected: 8193, .. }), "{error}");
        assert!(matches!(of(0), Err(StorageError::Invalid { .. })));
    }

    #[test]
    fn a_full_file_system_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("slots");
        let file = File::create_new(&path).expect("a file");
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let error = not_reserved(&full, &file, &path, 8192).expect_err("full");
        assert!(matches!(error, StorageError::NoSpace { asked: 8192, available, .. } if available > 0));
        let broken = io::Error::from_raw_os_error(libc::EIO);
        let error = not_reserved(&broken, &file, &path, 8192).expect_err("broken");
        assert!(matches!(error, StorageError::Io { operation: "fallocate", .. }), "{error}");
    }

    #[test]
    fn a_write_that_finds_no_space_is_named() {
        let path = Path::new("/dev/full");
        let file =
            OpenOptions::new().read(true).write(true).open(path).expect("the device that is always full");
        let storage = DiskStorage::new(file, path, 8192, Preallocation::Existing);
        let error = storage.write_all_at(4096, &[0; 4096]).expect_err("full");
        assert!(matches!(&error, StorageError::NoSpace { asked: 4096, .. }), "{error}");
    }
}
