//! Free memory of the process's allocator.

/// Free bytes at the end of each heap of glibc that may stay: its own first value.
#[cfg(target_env = "gnu")]
const KEPT_AT_END: libc::c_int = 128 << 10;

/// Has the allocator return free memory at the end of its heaps at once, but for 128 KiB of each.
/// A program calls it once, when it starts.
///
/// glibc raises this bound by itself. A process that frees a table of 4 MiB keeps up to 8 MiB at
/// the end of each of its heaps from then on. It has eight heaps a processor, and
/// [`release_free_heap`] reaches the end of the first one alone. With the bound fixed, an
/// allocation of 128 KiB or more is a mapping of its own, for good. Nothing happens with other C
/// libraries.
pub fn limit_free_heap() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: `mallopt` has no precondition. It takes the lock of the first heap, and changes
        // numbers that the allocator reads.
        let _is_set = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_AT_END) };
    }
}

/// Returns the free pages of the heap to the system; whether there were any.
///
/// glibc keeps what was freed below the end of each of its heaps, and it has eight heaps a
/// processor. A process that lives for weeks holds many times the memory that it uses. What is free
/// at the end of a heap is [`limit_free_heap`]'s. The call locks one heap after the other for as
/// long as its free lists are walked. `false` with other C libraries: musl returns free memory by
/// itself.
pub fn release_free_heap() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: `malloc_trim` has no precondition. Any thread may call it: it takes the lock of
        // each heap, and returns pages of free chunks alone.
        unsafe { libc::malloc_trim(0) == 1 }
    }
    #[cfg(not(target_env = "gnu"))]
    {
        false
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};

    /// Each test looks at the memory of the whole process.
    static ALONE: Mutex<()> = Mutex::new(());

    fn anonymous_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    #[test]
    fn freed_memory_at_the_end_of_a_heap_goes_back_after_a_large_table_was_freed() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        limit_free_heap();
        // A thread other than the first one has another heap.
        let kept = std::thread::spawn(|| {
            // Without the limit, this raises the bound to 32 MiB.
            drop(vec![1_u8; 16 << 20]);
            let before = anonymous_kib();
            // Nothing is allocated behind these: they end the heap.
            let chunks: Vec<_> = (0..1536).map(|at| vec![at as u8; 16 << 10]).collect();
            assert!(chunks.iter().all(|chunk| chunk.len() == 16 << 10));
            drop(chunks);
            (before, anonymous_kib())
        });
        let (before, after) = kept.join().unwrap();
        assert!(after < before + (8 << 10), "{before} KiB before 24 MiB, {after} KiB behind");
    }

    #[test]
    fn freed_memory_below_a_living_chunk_goes_back_to_the_system() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut chunks: Vec<_> = (0..4096).map(|at| vec![at as u8; 16 << 10]).collect();
        let last = chunks.pop();
        let full = anonymous_kib();
        drop(chunks);
        assert!(release_free_heap(), "64 MiB are free");
        let trimmed = anonymous_kib();
        assert!(trimmed + (56 << 10) < full, "{full} KiB before, {trimmed} KiB behind");
        drop(last);
    }
}
