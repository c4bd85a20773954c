//! Reading a cache line into the cache before it is needed. Safe code has no instruction for that.

#![allow(unsafe_code, reason = "there is no safe prefetch")]

/// Starts to read the cache line of `target` and does not wait for it. It changes speed, never a
/// result.
#[inline]
pub(crate) fn prefetch<T>(target: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86_64 has SSE, and a prefetch has no effect that a program can see, whatever
    // the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(target).cast(),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = target;
}
