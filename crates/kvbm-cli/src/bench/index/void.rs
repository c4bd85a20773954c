//! A directory in which only the index is real: slot files take no bytes, so that what is measured is the index.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvbm_disk::medium::{BlockFile, DirMedium, Medium, OpenFile};

/// A medium whose slot files are void.
#[derive(Debug)]
pub(super) struct IndexOnly(pub(super) DirMedium);

impl Medium for IndexOnly {
    fn location(&self) -> String {
        self.0.location()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        if name.starts_with("slots") { Ok(Arc::new(VoidFile::default())) } else { self.0.open(name, how) }
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

/// A file that takes every byte and keeps none.
#[derive(Debug, Default)]
struct VoidFile {
    len: AtomicU64,
}

impl BlockFile for VoidFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.len.load(Relaxed))
    }

    fn read_at(&self, _offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(buffers.iter().map(|buffer| buffer.len()).sum())
    }

    fn write_at(&self, _offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(buffers.iter().map(|buffer| buffer.len()).sum())
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.len.store(bytes, Relaxed);
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        self.set_len(bytes)?;
        Ok(true)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
}
