//! The seam under the engine: a directory of files, real ([`DirMedium`]) or simulated
//! ([`crate::fault::SimMedium`]).
//!
//! What the engine assumes about a medium, and nothing more: a completed `sync_data` makes all
//! writes that completed before it survive power loss, unless a sync failed after they were made.
//! `rename` is atomic, and lasting after `sync_dir`. Everything else may be lost, torn at any byte
//! or, once written, read back changed.

mod access;
pub(crate) mod complete;
mod dir;
mod durable;

pub use dir::DirMedium;
pub(crate) use dir::{move_at, open_read_only};

use std::fmt::Debug;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::RawFd;
use std::sync::Arc;

/// How to open a file of a medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFile {
    /// Create it if absent.
    pub create: bool,
    /// Empty it.
    pub truncate: bool,
    /// Bypass the page cache (`O_DIRECT`); an error where that is not possible.
    pub direct: bool,
}

/// A directory, or several, that belong to one engine. Dropping it gives them free.
pub trait Medium: Debug + Send + Sync {
    /// For messages: the directory.
    fn location(&self) -> String;
    /// Opens a file for reading and writing.
    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>>;
    /// Renames a file over another, atomically.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals lasting.
    fn sync_dir(&self) -> io::Result<()>;
}

/// An open file: positioned I/O from any thread.
pub trait BlockFile: Debug + Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether the length is 0.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills `buffers` in order from `offset`; returns how many bytes, which may be less than
    /// asked; 0 at the end. At most 1024 buffers are passed.
    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
    /// Writes `buffers` in order at `offset`; returns how many bytes, which may be less than asked.
    /// At most 1024 buffers are passed.
    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Cuts or extends the file.
    fn set_len(&self, bytes: u64) -> io::Result<()>;
    /// Makes the file `bytes` long with its space reserved; `false` if the medium cannot reserve
    /// (the length is set all the same).
    fn reserve(&self, bytes: u64) -> io::Result<bool>;
    /// `fdatasync`.
    fn sync_data(&self) -> io::Result<()>;
    /// Drops what the page cache has of the file and no later sync writes, so that reads find the
    /// bytes of the device. After a failed sync of an earlier process the two may differ. A hint:
    /// the kernel may keep pages that are in use. A medium without a page cache does nothing.
    fn drop_cache(&self) {}
    /// The descriptor, for executors that talk to the kernel themselves. `None` for a simulated
    /// file.
    fn raw_fd(&self) -> Option<RawFd> {
        None
    }
    /// Without a descriptor: whether the ring's logic may run over [`BlockFile::read_at`] and
    /// [`BlockFile::write_at`].
    fn emulates_ring(&self) -> bool {
        false
    }
}
