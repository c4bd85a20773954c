//! A real directory.

use super::{BlockFile, Medium, OpenFile, access, durable};
use crate::OpenError;
use kvbm_plan::{FileAccess, deadline_after};
use std::ffi::CStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LOCK_FILE: &str = "LOCK";

/// What a lock is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To read and write the files with this access.
    Own(FileAccess),
    /// To read the files and keep owners away, also where this process may not write.
    Look,
}

/// How long [`DirMedium`] tries again to take a lock that is held.
const LOCK_DEADLINE: Duration = Duration::from_millis(250);
/// Time between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Directories held under exclusive locks, which end with this value or with the process.
///
/// A file name with a number and a slash before it is a file of that directory, counted from 0. A
/// name without is a file of the first directory.
#[derive(Debug)]
pub struct DirMedium {
    dirs: Vec<PathBuf>,
    access: FileAccess,
    /// Files are opened to be read, and nothing is created.
    read_only: bool,
    /// Hold the locks while open.
    _locks: Vec<File>,
}

impl DirMedium {
    /// Creates the directory if absent and locks it. Its owner alone has access.
    ///
    /// # Errors
    /// [`OpenError::Busy`] with the owner's name where another process holds the lock;
    /// [`OpenError::Io`] where the directory cannot be created or read, or another user owns it.
    pub fn lock(dir: &Path) -> Result<Self, OpenError> {
        Self::lock_all(&[dir.to_owned()], FileAccess::Owner)
    }

    /// Creates the directories that are absent and locks each of them. Files and directories get
    /// the mode of `access`.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), of the first directory that fails; then none stays locked.
    pub fn lock_all(dirs: &[PathBuf], access: FileAccess) -> Result<Self, OpenError> {
        Self::lock_each(dirs, Purpose::Own(access), access)
    }

    /// Locks the directories for a caller that changes nothing in them: also on a read-only file
    /// system.
    pub(crate) fn lock_to_look(dirs: &[PathBuf]) -> Result<Self, OpenError> {
        Self::lock_each(dirs, Purpose::Look, FileAccess::Owner)
    }

    fn lock_each(dirs: &[PathBuf], purpose: Purpose, access: FileAccess) -> Result<Self, OpenError> {
        let mut locks = Vec::with_capacity(dirs.len());
        for dir in dirs {
            locks.push(match Self::lock_one(dir, purpose, LOCK_DEADLINE) {
                Err(OpenError::Busy { .. }) if has_lock_of(&locks, dir) => {
                    return Err(named_twice(dirs, locks.len()));
                }
                lock => lock?,
            });
        }
        Ok(Self { dirs: dirs.to_vec(), access, read_only: false, _locks: locks })
    }

    /// Directories that another engine has locked, to read what it writes there. A file of another
    /// user is refused.
    pub(crate) fn follow(dirs: &[PathBuf], access: FileAccess) -> Self {
        Self { dirs: dirs.to_vec(), access, read_only: true, _locks: Vec::new() }
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        let (member, name) = name.split_once('/').unwrap_or(("0", name));
        let dir = member.parse().ok().and_then(|member: usize| self.dirs.get(member));
        let none = || io::Error::new(io::ErrorKind::NotFound, format!("no directory {member}"));
        dir.map(|dir| dir.join(name)).ok_or_else(none)
    }

    /// Tries again until `deadline` has passed: a process that only reads the directory holds the
    /// lock for a moment.
    fn lock_one(dir: &Path, purpose: Purpose, deadline: Duration) -> Result<File, OpenError> {
        let until = deadline_after(Instant::now(), deadline);
        loop {
            let last = Instant::now() >= until;
            match Self::open_lock(dir, purpose)?.map(|lock| Self::take(dir, purpose, lock)).transpose() {
                Ok(Some(Some(lock))) => return Ok(lock),
                Ok(_) if last => {
                    let owner = "a process that removes it".to_owned();
                    return Err(OpenError::Busy { dir: dir.to_owned(), owner });
                }
                Err(error) if last || !matches!(error, OpenError::Busy { .. }) => return Err(error),
                Ok(_) | Err(_) => std::thread::sleep(LOCK_PAUSE),
            }
        }
    }

    /// The lock file; `None` where the directory was removed meanwhile.
    fn open_lock(dir: &Path, purpose: Purpose) -> Result<Option<File>, OpenError> {
        let path = dir.join(LOCK_FILE);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = match purpose {
            Purpose::Own(access) => {
                let created = durable::create_dir(dir, access, &mut durable::sync_dir);
                created.map_err(|error| failed("create directory", dir, error))?;
                access::check_dir(dir, access).map_err(|error| failed("use directory", dir, error))?;
                access::open(&path, &mut options, 0, Some(access))
            }
            Purpose::Look => match access::open(&path, &mut options, 0, None) {
                Err(error) if is_read_only(&error) => access::open_read_only(&path, 0, None),
                lock => lock,
            },
        };
        match lock {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("open the lock file in", dir, error)),
        }
    }

    /// Takes the lock; `None` where the file is not that of the directory any more, because its
    /// last owner removed it. Another process may have the one that took its place.
    fn take(dir: &Path, purpose: Purpose, mut lock: File) -> Result<Option<File>, OpenError> {
        // SAFETY: a system call on a descriptor that is open; no memory involved.
        let taken = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
        if !taken {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(failed("lock", dir, error));
            }
            return Err(OpenError::Busy { dir: dir.to_owned(), owner: owner_of(&mut lock) });
        }
        let there = match std::fs::metadata(dir.join(LOCK_FILE)) {
            Ok(there) => file(&there),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("look at the lock file in", dir, error)),
        };
        let ours = lock.metadata().map_err(|error| failed("look at the lock file in", dir, error))?;
        if file(&ours) != there {
            return Ok(None);
        }
        // Fails where the lock file is open to be read only, which is enough to look.
        match lock.set_len(0).and_then(|()| writeln!(lock, "{}", ourselves())) {
            Err(error) if purpose != Purpose::Look => Err(failed("write the lock file in", dir, error)),
            _ => Ok(Some(lock)),
        }
    }

    /// The holder of the lock of `dir`, if it is held.
    pub(crate) fn owner(dir: &Path) -> Option<String> {
        let mut lock = access::open_read_only(&dir.join(LOCK_FILE), 0, None).ok()?;
        // SAFETY: a system call on a descriptor that is open; no memory involved. The lock ends
        // with the descriptor.
        let free = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) } == 0;
        (!free).then(|| owner_of(&mut lock))
    }
}

/// Whether this process may only read there, by the file system or because the file is of another
/// user.
fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied)
}

/// Device and inode: identifies a file under any name.
fn file(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Whether one of these locks is that of `dir`: links and mounts give a directory several names.
fn has_lock_of(locks: &[File], dir: &Path) -> bool {
    let theirs = std::fs::metadata(dir.join(LOCK_FILE)).map(|found| file(&found));
    theirs
        .is_ok_and(|theirs| locks.iter().any(|lock| lock.metadata().is_ok_and(|ours| file(&ours) == theirs)))
}

fn named_twice(dirs: &[PathBuf], member: usize) -> OpenError {
    OpenError::Stripe {
        dir: dirs[member].display().to_string(),
        member: member + 1,
        members: dirs.len(),
        reason: "it is one of those before it by another name: name each directory once".to_owned(),
    }
}

fn failed(doing: &str, dir: &Path, source: io::Error) -> OpenError {
    OpenError::Io { doing: format!("{doing} {}", dir.display()), source }
}

/// Names process and host: containers and machines that share a directory have equal process ids.
fn ourselves() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the memory lives through the call, which is told one byte less of it: the name ends
    // with a zero.
    let named = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } == 0;
    let host = CStr::from_bytes_until_nul(&name).ok().and_then(|name| name.to_str().ok()).unwrap_or_default();
    let process = format!("process {}", std::process::id());
    if named && !host.is_empty() { format!("{process} on {host}") } else { process }
}

fn owner_of(lock: &mut File) -> String {
    let mut owner = String::new();
    let _ = Read::by_ref(lock).take(128).read_to_string(&mut owner);
    match owner.trim() {
        "" => "another process".to_owned(),
        known => known.to_owned(),
    }
}

/// Opens a file to read it. With `access`, the file of another user is refused.
pub(crate) fn open_read_only(path: &Path, access: Option<FileAccess>) -> io::Result<Arc<dyn BlockFile>> {
    Ok(Arc::new(RealFile(access::open_read_only(path, 0, access)?)))
}

impl Medium for DirMedium {
    fn location(&self) -> String {
        let names: Vec<_> = self.dirs.iter().map(|dir| dir.display().to_string()).collect();
        names.join(", ")
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        let path = self.path(name)?;
        let flags = if how.direct { libc::O_DIRECT } else { 0 };
        if self.read_only {
            return Ok(Arc::new(RealFile(access::open_read_only(&path, flags, Some(self.access))?)));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(how.create).truncate(how.truncate);
        Ok(Arc::new(RealFile(access::open(&path, &mut options, flags, Some(self.access))?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path(from)?, self.path(to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path(name)?)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.dirs.iter().try_for_each(|dir| durable::sync_dir(dir))
    }
}

#[derive(Debug)]
struct RealFile(File);

impl RealFile {
    fn offset(offset: u64) -> io::Result<libc::off_t> {
        libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
    }
}

/// One call of `pwritev` or `preadv` on `fd`, of the first 1024 of `count` memory runs.
///
/// # Safety
/// There are `count` runs from `runs` on. Their memory is valid: to be read for a write, to be
/// written by nobody else for a read.
pub(crate) unsafe fn move_at(
    fd: RawFd,
    write: bool,
    offset: u64,
    runs: *const libc::iovec,
    count: usize,
) -> io::Result<usize> {
    let offset = RealFile::offset(offset)?;
    // Callers pass at most 1024, so this never cuts; a longer list would be a short transfer.
    let count = libc::c_int::try_from(count.min(super::complete::IOV_MAX)).unwrap_or(0);
    let moved = if write {
        // SAFETY: by the caller's contract.
        unsafe { libc::pwritev(fd, runs, count, offset) }
    } else {
        // SAFETY: by the caller's contract.
        unsafe { libc::preadv(fd, runs, count, offset) }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

impl BlockFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let (runs, count) = (buffers.as_mut_ptr().cast(), buffers.len());
        // SAFETY: `IoSliceMut` is an `iovec` by its documentation; each names memory borrowed
        // exclusively here.
        unsafe { move_at(self.0.as_raw_fd(), false, offset, runs, count) }
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let (runs, count) = (buffers.as_ptr().cast(), buffers.len());
        // SAFETY: `IoSlice` is an `iovec` by its documentation; each names memory borrowed here,
        // only read.
        unsafe { move_at(self.0.as_raw_fd(), true, offset, runs, count) }
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        let len = Self::offset(bytes)?;
        let before = self.len()?;
        loop {
            // SAFETY: a system call on a descriptor that is open; no memory involved.
            if unsafe { libc::fallocate(self.0.as_raw_fd(), 0, 0, len) } == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => {
                    self.0.set_len(bytes)?;
                    return Ok(false);
                }
                _ => {
                    // The space that was reserved before the disk was full would keep it full. The
                    // caller reports the first error.
                    let _ = self.0.set_len(before);
                    return Err(error);
                }
            }
        }
        // A file of an earlier, larger capacity gives its space back.
        self.0.set_len(bytes)?;
        Ok(true)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn drop_cache(&self) {
        // SAFETY: a system call on a descriptor that is open; no memory involved.
        let _is_hint = unsafe { libc::posix_fadvise(self.0.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Purpose = Purpose::Own(FileAccess::Owner);

    /// As an engine that opened the file just before `kvbm disk clear`, which had it, removed it.
    #[test]
    fn the_lock_of_a_file_that_was_removed_is_nobodys() -> Result<(), OpenError> {
        let dir = tempfile::tempdir().expect("a directory");
        let late = DirMedium::open_lock(dir.path(), OWN)?.expect("it is there");
        let removed = || std::fs::remove_file(dir.path().join(LOCK_FILE)).expect("it was there");
        removed();
        assert!(DirMedium::take(dir.path(), OWN, late)?.is_none());
        let late = DirMedium::open_lock(dir.path(), OWN)?.expect("it is there");
        removed();
        let owner = DirMedium::lock(dir.path())?;
        assert!(DirMedium::take(dir.path(), OWN, late)?.is_none(), "another has the directory");
        assert!(matches!(DirMedium::lock(dir.path()), Err(OpenError::Busy { .. })));
        drop(owner);
        DirMedium::lock(dir.path()).map(drop)
    }

    #[test]
    fn who_only_looks_does_not_keep_an_engine_out() -> Result<(), OpenError> {
        let dir = tempfile::tempdir().expect("a directory");
        let looking = DirMedium::open_lock(dir.path(), OWN)?.expect("it is there");
        // SAFETY: a system call on a descriptor that is open; no memory involved.
        assert_eq!(unsafe { libc::flock(looking.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) }, 0);
        let looked = std::thread::spawn(move || {
            std::thread::sleep(5 * LOCK_PAUSE);
            drop(looking);
        });
        // Long beside what a busy machine may do to the other thread.
        let locked = DirMedium::lock_one(dir.path(), OWN, Duration::from_secs(30));
        looked.join().expect("no panic");
        locked.map(drop)
    }
}
