//! Rows: many short ranges in a regular pattern, copied together. What a conversion moves are rows
//! of some hundred bytes, whose neighbours in the source are far from each other in the
//! destination. A call for each would cost as much as its bytes, and which order they are copied in
//! decides how fast memory is:
//!
//! - Rows that are neighbours in the destination are written together, a kilobyte at a time.
//! - From there the copy goes on along the source, so that the processor sees a few streams that it
//!   can follow. What it will read next is fetched meanwhile.

/// Rows along one axis, at equal distances on both sides of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowAxis {
    /// How many rows.
    pub count: u64,
    /// Bytes from one row to the next in the source.
    pub src_stride: u64,
    /// Bytes from one row to the next in the destination.
    pub dst_stride: u64,
}

impl RowAxis {
    /// No axis: one row.
    pub const NONE: Self = Self { count: 1, src_stride: 0, dst_stride: 0 };
}

/// Rows of equal length along two axes. They do not overlap in the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowGrid {
    /// Bytes of a row.
    pub len: u64,
    /// The axes. It is fastest if rows are close in the source along the first one, and in the
    /// destination along the second one.
    pub axes: [RowAxis; 2],
}

impl RowGrid {
    /// One row.
    pub const fn one(len: u64) -> Self {
        Self { len, axes: [RowAxis::NONE; 2] }
    }

    /// How many rows; `None` if no memory has as many.
    pub fn count(&self) -> Option<u64> {
        self.axes[0].count.checked_mul(self.axes[1].count)
    }

    /// Bytes of all rows; `None` if no memory has as many.
    pub fn bytes(&self) -> Option<u64> {
        self.len.checked_mul(self.count()?)
    }

    /// Bytes from the first of the source to the last; `None` if no memory has as many.
    pub fn src_extent(&self) -> Option<u64> {
        self.extent(|axis| axis.src_stride)
    }

    /// Bytes from the first of the destination to the last; `None` if no memory has as many.
    pub fn dst_extent(&self) -> Option<u64> {
        self.extent(|axis| axis.dst_stride)
    }

    fn extent(&self, stride: impl Fn(&RowAxis) -> u64) -> Option<u64> {
        let mut extent = self.len;
        for axis in &self.axes {
            let Some(steps) = axis.count.checked_sub(1) else { return Some(0) };
            extent = stride(axis).checked_mul(steps)?.checked_add(extent)?;
        }
        Some(extent)
    }

    /// Whether no byte of the destination is in two rows.
    pub(crate) fn is_apart(&self) -> bool {
        let mut axes = self.axes.map(|axis| (axis.dst_stride, axis.count));
        axes.sort_unstable();
        let mut end = Some(self.len);
        axes.into_iter().filter(|(_, count)| *count > 1).all(|(stride, count)| {
            let fits = end.is_some_and(|end| stride >= end);
            end = end.and_then(|end| (count - 1).checked_mul(stride)?.checked_add(end));
            fits
        })
    }

    /// Where each row begins on both sides, beside the first one: along the second axis first.
    pub(crate) fn offsets(self) -> impl Iterator<Item = (u64, u64)> {
        let [outer, inner] = self.axes;
        (0..outer.count).flat_map(move |o| {
            (0..inner.count).map(move |i| {
                (o * outer.src_stride + i * inner.src_stride, o * outer.dst_stride + i * inner.dst_stride)
            })
        })
    }
}

/// Whether rows are written past the caches, where that can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    Cached,
    /// A fence has to follow before another thread learns of the copy.
    Streaming,
}

/// Copies rows.
///
/// # Safety
/// `from` must be valid for reads of `grid.src_extent()` bytes and `to` for writes of
/// `grid.dst_extent()` bytes, both of which there are, and the two must not overlap.
#[cfg_attr(any(not(target_arch = "x86_64"), miri), allow(unused_variables, reason = "only x86-64 uses it"))]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, grid: RowGrid, stores: Stores) {
    // Miri knows no such stores.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the ranges are the caller's promise.
        return unsafe { x86::copy(from, to, grid, stores) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_each(from, to, grid) };
}

/// As [`copy`], row by row: what the other has to agree with.
///
/// # Safety
/// As for [`copy`].
#[cfg_attr(all(target_arch = "x86_64", not(miri), not(test)), allow(dead_code, reason = "without AVX only"))]
unsafe fn copy_each(from: *const u8, to: *mut u8, grid: RowGrid) {
    for (read, written) in grid.offsets() {
        let (from, to) = (from.wrapping_add(read as usize), to.wrapping_add(written as usize));
        // SAFETY: every row ends within the extent on both sides.
        unsafe { to.copy_from_nonoverlapping(from, grid.len as usize) };
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use super::{RowAxis, RowGrid, Stores};
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
    };

    const VECTOR: usize = size_of::<__m256i>();
    const LINE: usize = 64;
    /// Bytes that are written together.
    const TILE_BYTES: u64 = 1024;
    /// Bytes that are fetched before they are copied: as many lines as a core asks for at a time.
    const AHEAD_BYTES: u64 = 2048;

    /// # Safety
    /// As for [`super::copy`]; the processor must have AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, grid: RowGrid, stores: Stores) {
        // One axis is walked, however it lies.
        let (walked, tiled) = match grid.axes {
            [RowAxis { count: 1, .. }, second] => (second, RowAxis::NONE),
            [first, second] => (first, second),
        };
        let strides = [walked.src_stride, walked.dst_stride, tiled.src_stride, tiled.dst_stride];
        let in_lines = (to.addr() as u64 | grid.len | strides[1] | strides[3]).is_multiple_of(LINE as u64);
        let copy_row = match stores {
            Stores::Streaming if in_lines => stream_row,
            _ => store_row,
        };
        let tile = (TILE_BYTES / grid.len.max(1)).clamp(1, tiled.count.max(1));
        let ahead = (AHEAD_BYTES / (grid.len * tile).max(1)).max(1);
        let len = grid.len as usize;
        for first in (0..tiled.count).step_by(tile as usize) {
            let rows = first..tiled.count.min(first + tile);
            for step in 0..walked.count {
                for row in rows.clone() {
                    let read = step * strides[0] + row * strides[2];
                    let written = step * strides[1] + row * strides[3];
                    if step + ahead < walked.count {
                        fetch(from.wrapping_add((read + ahead * strides[0]) as usize), len);
                    }
                    let (from, to) = (from.wrapping_add(read as usize), to.wrapping_add(written as usize));
                    // SAFETY: every row ends within the extent on both sides. Where rows are
                    // streamed, all of them begin and end at the bounds of lines.
                    unsafe { copy_row(from, to, len) };
                }
            }
        }
    }

    #[inline]
    fn fetch(from: *const u8, len: usize) {
        for line in (0..len).step_by(LINE) {
            // SAFETY: every x86-64 processor has the instruction, which changes nothing and faults
            // at no address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
    }

    /// # Safety
    /// `len` bytes at `from` can be read and at `to` written; the ranges do not overlap.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn store_row(from: *const u8, to: *mut u8, len: usize) {
        if len < VECTOR {
            // SAFETY: the caller's promise.
            return unsafe { to.copy_from_nonoverlapping(from, len) };
        }
        let last = len - VECTOR;
        for at in (0..last).step_by(VECTOR).chain([last]) {
            // SAFETY: the vector lies inside both ranges.
            let vector = unsafe { load(from.wrapping_add(at)) };
            // SAFETY: as above; it needs not be aligned.
            unsafe { _mm256_storeu_si256(to.wrapping_add(at).cast(), vector) };
        }
    }

    /// # Safety
    /// A vector can be read at `from`.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: the caller's promise; it needs not be aligned.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    /// # Safety
    /// As for [`store_row`]; `to` and `len` are multiples of a line.
    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn stream_row(from: *const u8, to: *mut u8, len: usize) {
        for at in (0..len).step_by(LINE) {
            let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
            // SAFETY: the line lies inside both ranges.
            let first = unsafe { load(from) };
            // SAFETY: as above.
            let second = unsafe { load(from.wrapping_add(VECTOR)) };
            // SAFETY: as above; `to` is aligned.
            unsafe { _mm256_stream_si256(to.cast(), first) };
            // SAFETY: as above.
            unsafe { _mm256_stream_si256(to.wrapping_add(VECTOR).cast(), second) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(count: u64, src_stride: u64, dst_stride: u64) -> RowAxis {
        RowAxis { count, src_stride, dst_stride }
    }

    /// What both ways to copy `grid` make of memory, from and to these offsets in it.
    fn both(grid: RowGrid, stores: Stores, skip: usize, start: usize) -> [Vec<u8>; 2] {
        let (read, written) = (grid.src_extent().unwrap() as usize, grid.dst_extent().unwrap() as usize);
        let source: Vec<u8> = (0..skip + read).map(|index| (index * 7 + index / 256) as u8 & 0x7F).collect();
        let mut targets = [(); 2].map(|()| vec![0xEE_u8; start + written + 128]);
        let [fast, plain] = &mut targets;
        let first = fast.as_ptr().align_offset(64) + start;
        // SAFETY: both ranges lie inside their vectors.
        unsafe { copy(source[skip..].as_ptr(), fast[first..].as_mut_ptr(), grid, stores) };
        // SAFETY: as above; the same place relative to the beginning.
        unsafe { copy_each(source[skip..].as_ptr(), plain[first..].as_mut_ptr(), grid) };
        targets
    }

    /// Miri takes a microsecond for what a processor does in a nanosecond, and has one way to copy.
    const LENGTHS: &[u64] =
        if cfg!(miri) { &[0, 33] } else { &[0, 1, 31, 32, 33, 64, 100, 128, 192, 256, 257, 1000] };
    const SHAPES: &[(u64, u64)] =
        if cfg!(miri) { &[(0, 3), (3, 2)] } else { &[(0, 3), (1, 1), (1, 16), (5, 1), (7, 9), (33, 4)] };

    #[test]
    fn rows_of_every_length_and_place_are_copied_and_nothing_beside_them() {
        for &len in LENGTHS {
            for &(heads, tokens) in SHAPES {
                for gap in [0, 64, 5] {
                    // Tokens before heads, then heads before tokens, with gaps on both sides.
                    let row = len + gap;
                    let head = axis(heads, row, row * tokens);
                    let token = axis(tokens, row * heads, row);
                    let grid = RowGrid { len, axes: [head, token] };
                    assert!(grid.is_apart(), "{grid:?}");
                    for (stores, skip, start) in [
                        (Stores::Cached, 0, 0),
                        (Stores::Streaming, 0, 0),
                        (Stores::Streaming, 1, 0),
                        (Stores::Streaming, 3, 17),
                    ] {
                        let [fast, plain] = both(grid, stores, skip, start);
                        assert!(fast == plain, "{grid:?} {stores:?} {skip} {start}");
                        let untouched = fast.iter().map(|byte| u64::from(*byte == 0xEE)).sum::<u64>();
                        assert_eq!(untouched, fast.len() as u64 - len * heads * tokens, "{grid:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_one_place_may_go_to_many() {
        let grid = RowGrid { len: 40, axes: [RowAxis::NONE, axis(3, 0, 50)] };
        let [fast, plain] = both(grid, Stores::Cached, 0, 0);
        let begin = fast.iter().position(|byte| *byte != 0xEE).unwrap();
        assert!(fast == plain && fast[begin..begin + 40] == fast[begin + 100..begin + 140]);
    }

    #[test]
    fn what_no_memory_holds_has_no_extent_and_what_overlaps_is_not_apart() {
        let most = RowGrid { len: 2, axes: [axis(2, 2, 3), axis(u64::MAX, 2, 3)] };
        assert_eq!((most.bytes(), most.src_extent(), most.dst_extent()), (None, None, None));
        assert!(!most.is_apart());
        let none = RowGrid { len: 2, axes: [axis(0, 2, 2), axis(9, 2, 2)] };
        assert_eq!((none.bytes(), none.src_extent(), none.dst_extent()), (Some(0), Some(0), Some(0)));
        let one = RowGrid::one(7);
        assert_eq!((one.src_extent(), one.count(), one.is_apart()), (Some(7), Some(1), true));
        let apart = |first, second| RowGrid { len: 4, axes: [first, second] }.is_apart();
        assert!(apart(axis(2, 0, 12), axis(3, 0, 4)) && apart(axis(3, 0, 4), axis(2, 0, 12)));
        assert!(!apart(axis(2, 0, 11), axis(3, 0, 4)) && !apart(RowAxis::NONE, axis(2, 9, 3)));
    }
}
