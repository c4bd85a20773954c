//! Copies past the caches. A pool of blocks is larger than any cache, and what is copied is not
//! read again soon. So stores that do not fetch the line first save a third of the memory traffic.
//! Fragments lie far from each other, where the processor cannot guess the next one. So what is
//! copied next is fetched meanwhile. Of 4 KiB fragments that copies half as much again.

#[cfg(target_arch = "x86_64")]
/// Pieces below this go through the caches: their ends cost more than is saved.
const MIN_BYTES: usize = 512;

/// When dropped, makes the stores of [`copy`] visible to threads that learn later of their end.
pub(super) struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        // Miri has no such stores and knows no such instruction.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: the instruction is part of every x86-64 processor and touches nothing.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// What will be copied next: a hint, which may be any address at all.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 uses it"))]
#[derive(Clone, Copy)]
pub(super) struct Next {
    pub(super) from: *const u8,
    pub(super) len: usize,
}

impl Next {
    /// Nothing, or nothing known.
    pub(super) const NONE: Self = Self { from: std::ptr::null(), len: 0 };
}

/// One range of [`copy_streaming`].
#[derive(Clone, Copy, Debug)]
pub struct StreamingCopy {
    /// Where the bytes are.
    pub from: *const u8,
    /// Where they go.
    pub to: *mut u8,
    /// How many.
    pub len: usize,
}

/// Copies every range with the kernel of the emulated device: what a benchmark compares a path
/// with.
///
/// # Safety
/// Each `from` must be valid for reads and each `to` for writes of `len` bytes. No range that is
/// written may overlap another range.
pub unsafe fn copy_streaming(copies: &[StreamingCopy]) {
    let fence = Fence;
    for (index, StreamingCopy { from, to, len }) in copies.iter().enumerate() {
        let next = copies.get(index + 1).map_or(Next::NONE, |next| Next { from: next.from, len: next.len });
        // SAFETY: the caller's promise; the fence is dropped before the caller learns of the
        // copies.
        unsafe { copy(*from, *to, *len, next, &fence) };
    }
}

/// Copies `len` bytes with non-temporal stores where the processor has them and `len` is worth it,
/// and fetches as much of `next`.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `len` bytes, and they must not overlap.
/// `_fence` must be dropped before another thread learns of the copy.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, reason = "only x86-64 uses it"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, next: Next, _fence: &Fence) {
    #[cfg(target_arch = "x86_64")]
    if len >= MIN_BYTES && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the ranges are the caller's promise.
        return unsafe { x86::copy(from, to, len, next) };
    }
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(from, len) };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Next;
    use std::arch::x86_64::{__m256i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256};

    const VECTOR: usize = size_of::<__m256i>();
    const VECTORS: usize = 4;
    const LINE: usize = 64;

    /// # Safety
    /// As for [`super::copy`]; the processor must have AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, next: Next) {
        // Streaming stores need aligned addresses.
        let head = to.align_offset(VECTOR).min(len);
        let end = head + (len - head) / (VECTOR * VECTORS) * (VECTOR * VECTORS);
        // SAFETY: `head <= len`.
        unsafe { to.copy_from_nonoverlapping(from, head) };
        for at in (head..end).step_by(VECTOR * VECTORS) {
            if at < next.len {
                fetch(next.from.wrapping_add(at));
                fetch(next.from.wrapping_add(at + LINE));
            }
            // SAFETY: four vectors from `at` on are inside both ranges; after `head`, `to` is
            // aligned.
            unsafe { stream_four(from.wrapping_add(at).cast(), to.wrapping_add(at).cast()) };
        }
        // SAFETY: `end <= len`.
        unsafe { to.wrapping_add(end).copy_from_nonoverlapping(from.wrapping_add(end), len - end) };
    }

    #[inline]
    fn fetch(line: *const u8) {
        // SAFETY: every x86-64 processor has the instruction, which changes nothing and faults at
        // no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }

    /// # Safety
    /// Four vectors at `from` can be read, and at `to`, which is aligned, written.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn stream_four(from: *const __m256i, to: *mut __m256i) {
        // SAFETY: the caller's promise.
        let load = |index| unsafe { _mm256_loadu_si256(from.wrapping_add(index)) };
        let vectors: [__m256i; VECTORS] = std::array::from_fn(load);
        for (index, vector) in vectors.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm256_stream_si256(to.wrapping_add(index), vector) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..5000_u32).map(|index| (index * 7 + index / 256) as u8).collect();
        for len in [0, 1, 31, 511, 512, 513, 640, 1000, 4096, 4900] {
            for (skip, start) in [(0, 0), (1, 0), (0, 1), (3, 17), (33, 31), (64, 32)] {
                let mut target = vec![0xEE_u8; 5100];
                let fence = Fence;
                let next = Next { from: std::ptr::without_provenance(start), len: len / 2 + start };
                // SAFETY: both ranges lie inside their vectors.
                unsafe { copy(source[skip..].as_ptr(), target[start..].as_mut_ptr(), len, next, &fence) };
                drop(fence);
                assert!(target[start..start + len] == source[skip..skip + len], "{len} {skip} {start}");
                assert!(target[..start].iter().chain(&target[start + len..]).all(|byte| *byte == 0xEE));
            }
        }
    }
}
