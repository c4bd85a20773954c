//! Memory of an engine that the tests and the workers of its ranks share.

use super::{G1, RANKS, shared};
use crate::support::host::contiguous;
use crate::support::model;
use kvbm::config::Config;
use kvbm::storage::{BoundLayout, HostStorage, RegionBinding};
use kvbm::{BlockId, G1Memory};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a rank's part of a block.
pub(super) fn block_bytes() -> usize {
    let config = Config { model: model(), ..Config::default() };
    config.rank_block_bytes() as usize / RANKS as usize
}

/// A file in memory.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is shared between processes anyway; tests touch a block only while no transfer
// does.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn of(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of a file that nobody truncates.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: NonNull::new(start.cast()).unwrap(), len }
    }

    pub(super) fn block(&self, block: BlockId) -> *mut [u8] {
        let bytes = block_bytes();
        assert!((block.index() + 1) * bytes <= self.len);
        // SAFETY: within the mapping.
        let start = unsafe { self.start.add(block.index() * bytes) };
        std::ptr::slice_from_raw_parts_mut(start.as_ptr(), bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it: its owner is gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// G1 of a rank over the memory that is shared with the test.
pub(super) fn engine_memory(folder: &Path, rank: u16) -> G1Memory {
    let mapping = Arc::new(Mapping::of(&shared(folder, rank)));
    let (model, start, len) = (model(), mapping.start, mapping.len as u64);
    let layout = contiguous(&model, model.num_kv_heads / RANKS, G1);
    // SAFETY: the mapping is its own owner.
    let storage = unsafe { HostStorage::from_external(start, len, mapping) }.unwrap();
    G1Memory::EngineHost(BoundLayout::bind(layout, vec![RegionBinding::new(Arc::new(storage))]).unwrap())
}
