//! A counting allocator: what is alive and how often memory was asked for, on all threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

static LIVE: AtomicI64 = AtomicI64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
static ON: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Counts while it is switched on; off it costs one load, so timings are those of the system's
/// allocator.
pub struct Counting;

/// Starts or ends counting. Bytes count in balance only where they are taken and given back while
/// it is on.
pub fn count(on: bool) {
    ON.store(on, Relaxed);
}

fn note(bytes: i64, calls: u64) {
    if ON.load(Relaxed) {
        LIVE.fetch_add(bytes, Relaxed);
        CALLS.fetch_add(calls, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator as it is; counting touches no memory of
// the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as i64, 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as i64, 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-(layout.size() as i64), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size as i64 - layout.size() as i64, 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Bytes alive, of those counted.
pub fn live_bytes() -> i64 {
    LIVE.load(Relaxed)
}

/// Calls for memory so far.
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}
