//! A counting allocator: the most memory that was alive at a time. Bodies run on one thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// The system's allocator, counted.
pub(crate) struct Counting;

/// Bytes that `work` had at a time beyond what there was before.
pub(crate) fn peak_of(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    work();
    usize::try_from(PEAK.load(Relaxed) - before).unwrap_or(0)
}

/// A request that was granted, or was not, for `bytes` more.
fn noted(pointer: *mut u8, bytes: isize) -> *mut u8 {
    if !pointer.is_null() {
        note(bytes);
    }
    pointer
}

fn note(bytes: isize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator as it is; counting touches no memory of
// the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        noted(unsafe { System.alloc(layout) }, layout.size() as isize)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        noted(unsafe { System.alloc_zeroed(layout) }, layout.size() as isize)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        noted(unsafe { System.realloc(pointer, layout, size) }, size as isize - layout.size() as isize)
    }
}
