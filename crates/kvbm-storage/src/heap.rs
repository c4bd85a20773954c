//! Free memory of the process's allocator.

/// Returns the free pages of the heap to the system; whether there were any.
///
/// glibc keeps what was freed below the end of each of its heaps, and it has eight heaps a
/// processor: a process that lives for weeks holds many times the memory that it uses. The call
/// locks one heap after the other for as long as its free lists are walked. `false` with other
/// C libraries: musl returns free memory by itself.
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

    #[test]
    fn freed_memory_below_a_living_chunk_goes_back_to_the_system() {
        let anonymous_kib = || -> u64 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
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
