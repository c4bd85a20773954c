//! Asks for memory before it is needed: safe code cannot say that.

#![allow(unsafe_code, reason = "there is no safe prefetch")]

/// Brings `place` near while the program goes on. Nothing but time can tell whether it did.
#[inline]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86_64 has SSE, and a prefetch has no effect that a program can see, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(place).cast(),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = place;
}
