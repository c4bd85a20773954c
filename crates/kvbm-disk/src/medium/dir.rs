//! A real directory.

use super::{BlockFile, Medium, OpenFile, lasting};
use crate::OpenError;
use std::ffi::CStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LOCK_FILE: &str = "LOCK";

/// What a lock is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Own,
    /// To keep owners away.
    Look,
}

/// How long a lock that is held is tried again, and how often.
const PATIENCE: Duration = Duration::from_millis(250);
const PAUSE: Duration = Duration::from_millis(10);

/// Directories held under exclusive locks, which end with this value or with the process. A name with a number and a slash before it
/// is a file of that directory, counted from 0; one without is a file of the first.
#[derive(Debug)]
pub struct DirMedium {
    dirs: Vec<PathBuf>,
    /// Hold the locks while open.
    _locks: Vec<File>,
}

impl DirMedium {
    /// Creates the directory if absent and locks it.
    ///
    /// # Errors
    /// [`OpenError::Busy`] with the owner's name where somebody else has it and keeps it; that it cannot be created or read.
    pub fn lock(dir: &Path) -> Result<Self, OpenError> {
        Self::lock_all(&[dir.to_owned()])
    }

    /// The same with several directories, of which each is locked.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), of the first one that is at fault; then none stays locked.
    pub fn lock_all(dirs: &[PathBuf]) -> Result<Self, OpenError> {
        Self::lock_each(dirs, Purpose::Own)
    }

    /// The same for who changes nothing in them: also where a file system lets nobody do so.
    pub(crate) fn lock_to_look(dirs: &[PathBuf]) -> Result<Self, OpenError> {
        Self::lock_each(dirs, Purpose::Look)
    }

    fn lock_each(dirs: &[PathBuf], purpose: Purpose) -> Result<Self, OpenError> {
        let mut locks = Vec::with_capacity(dirs.len());
        for dir in dirs {
            locks.push(match Self::lock_one(dir, purpose, PATIENCE) {
                Err(OpenError::Busy { .. }) if has_lock_of(&locks, dir) => {
                    return Err(named_twice(dirs, locks.len()));
                }
                lock => lock?,
            });
        }
        Ok(Self { dirs: dirs.to_vec(), _locks: locks })
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        let (member, name) = name.split_once('/').unwrap_or(("0", name));
        let dir = member.parse().ok().and_then(|member: usize| self.dirs.get(member));
        let none = || io::Error::new(io::ErrorKind::NotFound, format!("no directory {member}"));
        dir.map(|dir| dir.join(name)).ok_or_else(none)
    }

    /// Tries again for a moment: whoever only looks at a directory holds its lock for as long as that takes.
    fn lock_one(dir: &Path, purpose: Purpose, patience: Duration) -> Result<File, OpenError> {
        let until = Instant::now() + patience;
        loop {
            let last = Instant::now() >= until;
            match Self::open_lock(dir, purpose)?.map(|lock| Self::take(dir, purpose, lock)).transpose() {
                Ok(Some(Some(lock))) => return Ok(lock),
                Ok(_) if last => {
                    let owner = "a process that removes it".to_owned();
                    return Err(OpenError::Busy { dir: dir.to_owned(), owner });
                }
                Err(error) if last || !matches!(error, OpenError::Busy { .. }) => return Err(error),
                Ok(_) | Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// The lock file; `None` where the directory was removed meanwhile.
    fn open_lock(dir: &Path, purpose: Purpose) -> Result<Option<File>, OpenError> {
        let created = lasting::create_dir(dir, &mut lasting::sync_dir);
        created.map_err(|error| failed("create directory", dir, error))?;
        let lock =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join(LOCK_FILE));
        match lock {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem && purpose == Purpose::Look => {
                let lock = File::open(dir.join(LOCK_FILE));
                lock.map(Some).map_err(|error| failed("open the lock file in", dir, error))
            }
            Err(error) => Err(failed("open the lock file in", dir, error)),
        }
    }

    /// Takes the lock; `None` where the file is not that of the directory any more, because its last owner removed it: another process may
    /// have the one that took its place.
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
        match lock.set_len(0).and_then(|()| writeln!(lock, "{}", ourselves())) {
            Err(error) if purpose == Purpose::Own => Err(failed("write the lock file in", dir, error)),
            _ => Ok(Some(lock)),
        }
    }

    /// Who holds the lock of `dir`, if somebody does.
    pub(crate) fn owner(dir: &Path) -> Option<String> {
        let mut lock = File::open(dir.join(LOCK_FILE)).ok()?;
        // SAFETY: a system call on a descriptor that is open; no memory involved. The lock ends with the descriptor.
        let free = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) } == 0;
        (!free).then(|| owner_of(&mut lock))
    }
}

/// Which file it is, whatever its names.
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

/// A number of a process says little where containers, or machines, share a directory.
fn ourselves() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the memory lives through the call, which is told one byte less of it: the name ends with a zero.
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

/// A file that is only looked at.
pub(crate) fn open_read_only(path: &Path) -> io::Result<Arc<dyn BlockFile>> {
    Ok(Arc::new(RealFile(File::open(path)?)))
}

impl Medium for DirMedium {
    fn location(&self) -> String {
        let names: Vec<_> = self.dirs.iter().map(|dir| dir.display().to_string()).collect();
        names.join(", ")
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(how.create)
            .truncate(how.truncate)
            .custom_flags(if how.direct { libc::O_DIRECT } else { 0 })
            .open(self.path(name)?)?;
        Ok(Arc::new(RealFile(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path(from)?, self.path(to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path(name)?)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.dirs.iter().try_for_each(|dir| lasting::sync_dir(dir))
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
/// There are `count` runs from `runs` on. Their memory is valid: to be read for a write, to be written by nobody else for a read.
pub(crate) unsafe fn move_at(
    fd: RawFd,
    write: bool,
    offset: u64,
    runs: *const libc::iovec,
    count: usize,
) -> io::Result<usize> {
    let offset = RealFile::offset(offset)?;
    // Callers pass at most 1024, so this never cuts; a longer list would be a short transfer.
    let count = libc::c_int::try_from(count.min(super::full::IOV_MAX)).unwrap_or(0);
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
        // SAFETY: `IoSliceMut` is an `iovec` by its documentation; each names memory borrowed exclusively here.
        unsafe { move_at(self.0.as_raw_fd(), false, offset, runs, count) }
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let (runs, count) = (buffers.as_ptr().cast(), buffers.len());
        // SAFETY: `IoSlice` is an `iovec` by its documentation; each names memory borrowed here, only read.
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
                    // What it got before the disk was full would keep it full. The first error is the one to tell.
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

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an engine that opened the file just before `kvbm disk clear`, which had it, removed it.
    #[test]
    fn the_lock_of_a_file_that_was_removed_is_nobodys() -> Result<(), OpenError> {
        let dir = tempfile::tempdir().expect("a directory");
        let late = DirMedium::open_lock(dir.path(), Purpose::Own)?.expect("it is there");
        let removed = || std::fs::remove_file(dir.path().join(LOCK_FILE)).expect("it was there");
        removed();
        assert!(DirMedium::take(dir.path(), Purpose::Own, late)?.is_none());
        let late = DirMedium::open_lock(dir.path(), Purpose::Own)?.expect("it is there");
        removed();
        let owner = DirMedium::lock(dir.path())?;
        assert!(DirMedium::take(dir.path(), Purpose::Own, late)?.is_none(), "another has the directory");
        assert!(matches!(DirMedium::lock(dir.path()), Err(OpenError::Busy { .. })));
        drop(owner);
        DirMedium::lock(dir.path()).map(drop)
    }

    #[test]
    fn who_only_looks_does_not_keep_an_engine_out() -> Result<(), OpenError> {
        let dir = tempfile::tempdir().expect("a directory");
        let looking = DirMedium::open_lock(dir.path(), Purpose::Own)?.expect("it is there");
        // SAFETY: a system call on a descriptor that is open; no memory involved.
        assert_eq!(unsafe { libc::flock(looking.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) }, 0);
        let looked = std::thread::spawn(move || {
            std::thread::sleep(5 * PAUSE);
            drop(looking);
        });
        // Long beside what a busy machine may do to the other thread.
        let locked = DirMedium::lock_one(dir.path(), Purpose::Own, Duration::from_secs(30));
        looked.join().expect("no panic");
        locked.map(drop)
    }
}
