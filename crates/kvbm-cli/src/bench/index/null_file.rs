//! A directory in which only the index is real: slot files take no bytes, so that what is measured
//! is the index.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use kvbm_disk::medium::{BlockFile, DirMedium, Medium, OpenFile};

/// Whether a file of the directory is one of those that keep nothing.
pub(super) fn is_null_file(name: &str) -> bool {
    name.starts_with("slots")
}

/// A medium whose slot files keep nothing.
#[derive(Debug)]
pub(super) struct IndexOnly(pub(super) DirMedium);

impl Medium for IndexOnly {
    fn location(&self) -> String {
        self.0.location()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        let file = self.0.open(name, how)?;
        Ok(if is_null_file(name) { Arc::new(NullFile(file)) } else { file })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.0.sync_dir()
    }
}

/// A file that takes every byte and keeps none, but its length: an opening drops blocks beyond
/// that.
#[derive(Debug)]
struct NullFile(Arc<dyn BlockFile>);

impl BlockFile for NullFile {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read_at(&self, _offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(buffers.iter().map(|buffer| buffer.len()).sum())
    }

    fn write_at(&self, _offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(buffers.iter().map(|buffer| buffer.len()).sum())
    }

    /// One hole.
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        self.set_len(bytes)?;
        Ok(true)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
}
