//! Memory that takes part in I/O. The only module, beside the system calls, that handles raw
//! pointers.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A contiguous run of host memory.
#[derive(Clone, Copy, Debug)]
struct Fragment {
    start: NonNull<u8>,
    len: usize,
}

/// The memory of one block in order: any number of host memory runs. Not tied to a lifetime: the
/// engine, and the kernel behind it, use the memory until the batch completes.
#[derive(Clone, Debug)]
pub struct IoFragments {
    /// Most blocks have one run: no allocation for it.
    first: Option<Fragment>,
    others: Box<[Fragment]>,
    bytes: u64,
}

// SAFETY: `from_raw` obliges its caller to allow access from any thread; this type itself shares no
// state.
unsafe impl Send for IoFragments {}
// SAFETY: as above; a shared reference gives no access beyond what the contract of `from_raw`
// allows.
unsafe impl Sync for IoFragments {}

impl IoFragments {
    /// Fragments over `(start, length in bytes)` runs, in the order of the block's bytes. Empty
    /// runs are skipped. `None` if a non-empty run starts at null, is longer than `isize::MAX`, or
    /// the sum overflows.
    ///
    /// # Safety
    /// From the moment when a batch with these fragments is submitted until its completion is
    /// called (or the batch is handed back or dropped unsubmitted), each run must
    /// - be allocated, initialised host memory of that length; give the batch a guard that keeps it
    ///   so ([`IoBatch::guard`](crate::IoBatch::guard)), because the completion may come after the
    ///   caller is gone;
    /// - for a write: not be written by anyone;
    /// - for a read: neither be read nor written by anyone else, nor overlap another run of a
    ///   running operation;
    /// - be accessible from any thread.
    pub unsafe fn from_raw(runs: impl IntoIterator<Item = (*mut u8, usize)>) -> Option<Self> {
        let mut bytes = 0_u64;
        let mut runs = runs.into_iter().filter(|(_, len)| *len > 0).map(|(start, len)| {
            isize::try_from(len).ok()?;
            bytes = bytes.checked_add(len as u64)?;
            Some(Fragment { start: NonNull::new(start)?, len })
        });
        let first = match runs.next() {
            Some(first) => Some(first?),
            None => None,
        };
        let others = runs.collect::<Option<_>>()?;
        Some(Self { first, others, bytes })
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of runs.
    pub fn count(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    fn list(&self) -> impl Iterator<Item = &Fragment> {
        self.first.iter().chain(&self.others)
    }

    /// The runs, in order: start and length.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.list().map(|run| (run.start.as_ptr(), run.len))
    }

    /// Whether every run starts and ends at a multiple of `alignment`.
    pub(crate) fn is_aligned(&self, alignment: usize) -> bool {
        self.list().all(|run| {
            run.start.as_ptr().addr().is_multiple_of(alignment) && run.len.is_multiple_of(alignment)
        })
    }

    /// Copies the memory into `staged`, which is at least as long; the rest of that becomes zero.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] must hold, for a write.
    pub(crate) unsafe fn gather(&self, staged: &mut [u8]) {
        let mut at = 0;
        // SAFETY: by the caller's contract.
        for run in unsafe { self.pieces() } {
            staged[at..at + run.len()].copy_from_slice(run);
            at += run.len();
        }
        staged[at..].fill(0);
    }

    /// Copies the first bytes of `staged`, which is at least as long, into the memory.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] must hold, for a read.
    pub(crate) unsafe fn scatter(&self, staged: &[u8]) {
        let mut rest = staged;
        // SAFETY: by the caller's contract.
        for run in &mut unsafe { self.as_destination() } {
            let (now, later) = rest.split_at(run.len());
            run.copy_from_slice(now);
            rest = later;
        }
    }

    /// The memory, run by run.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] must hold, for a write, while the slices live.
    pub(crate) unsafe fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.list().map(|run| {
            // SAFETY: `run` is valid, initialised and not written meanwhile, by the contract of
            // `from_raw`.
            unsafe { std::slice::from_raw_parts(run.start.as_ptr(), run.len) }
        })
    }

    /// The memory as the source of a write.
    ///
    /// # Safety
    /// As for [`IoFragments::pieces`].
    pub(crate) unsafe fn as_source(&self) -> Vec<IoSlice<'_>> {
        // SAFETY: by the caller's contract.
        unsafe { self.pieces() }.map(IoSlice::new).collect()
    }

    /// The memory as the destination of a read.
    ///
    /// # Safety
    /// The contract of [`IoFragments::from_raw`] must hold, for a read, while the slices live, and
    /// no other slices of these fragments may live.
    pub(crate) unsafe fn as_destination(&self) -> Vec<IoSliceMut<'_>> {
        let slice = |run: &Fragment| {
            // SAFETY: `run` is valid, initialised and used by nobody else, by the contract of
            // `from_raw`.
            let bytes = unsafe { std::slice::from_raw_parts_mut(run.start.as_ptr(), run.len) };
            IoSliceMut::new(bytes)
        };
        self.list().map(slice).collect()
    }
}

/// Host memory that many operations will use, such as a page-locked pool: the kernel can be told
/// once instead of every time
/// ([`DiskEngine::register_memory`](crate::DiskEngine::register_memory)).
pub struct IoMemory {
    start: NonNull<u8>,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `new` obliges its caller to allow use from any thread; the pointer is only ever given to
// the kernel.
unsafe impl Send for IoMemory {}

impl IoMemory {
    /// `len` bytes from `start` on.
    ///
    /// # Safety
    /// The range is host memory that stays allocated, at this address, until `owner` is dropped.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner }
    }

    pub(crate) fn range(&self) -> (*mut u8, usize) {
        (self.start.as_ptr(), self.len)
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.len as u64
    }

    /// What keeps the memory allocated.
    pub fn into_owner(self) -> Arc<dyn Any + Send + Sync> {
        self.owner
    }
}

impl std::fmt::Debug for IoMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoMemory").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

/// Memory of a ring in equal parts, in pieces as large as the system has them: blocks whose memory
/// the device cannot take as it is pass through it. Where there are fewer parts than ring slots,
/// who needs one waits.
pub(crate) struct Arena {
    memory: Arc<OwnedBuffer>,
    part: usize,
    /// Parts that no ring slot has.
    free: Vec<usize>,
}

/// A part that a ring slot has.
pub(crate) struct Staging<'a> {
    start: NonNull<u8>,
    len: usize,
    _arena: PhantomData<&'a mut Arena>,
}

impl Arena {
    /// Up to `ring slots` parts of at least `bytes` bytes, together of `most` bytes at most; but
    /// always one.
    pub(crate) fn new(seats: usize, bytes: u64, most: u64) -> Self {
        let part = (bytes as usize).next_multiple_of(OwnedBuffer::ALIGNMENT);
        let parts = (most as usize / part).clamp(1, seats.max(1));
        let memory = Arc::new(OwnedBuffer::new(parts * part));
        Self { memory, part, free: (0..parts).rev().collect() }
    }

    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.len as u64
    }

    /// A part that nobody has, until it is given back.
    pub(crate) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    pub(crate) fn give_back(&mut self, part: usize) {
        self.free.push(part);
    }

    /// All of it, for the kernel to know.
    pub(crate) fn io_memory(&self) -> IoMemory {
        // SAFETY: the memory stays allocated as long as its owner.
        unsafe { IoMemory::new(self.memory.start, self.memory.len, Arc::clone(&self.memory) as _) }
    }

    /// A part that a ring slot has. Others may be in use by the kernel meanwhile.
    pub(crate) fn part(&mut self, part: usize) -> Staging<'_> {
        assert!((part + 1) * self.part <= self.memory.len, "one of its parts");
        // SAFETY: within the allocation, as was checked.
        let start = unsafe { self.memory.start.add(part * self.part) };
        Staging { start, len: self.part, _arena: PhantomData }
    }
}

impl Staging<'_> {
    /// `len` bytes from `at` on.
    pub(crate) fn part(&mut self, at: u64, len: u64) -> &mut [u8] {
        let (at, len) = (at as usize, len as usize);
        assert!(at + len <= self.len, "{len} bytes from {at} on are not in a part of {}", self.len);
        // SAFETY: within the ring slot's part, as was checked.
        let start = unsafe { self.start.add(at) };
        // SAFETY: initialised when it was allocated; the ring slot's part is ours alone, and the
        // kernel is not at it while its ring slot is being loaded or unloaded.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }
}

/// From here on memory is asked for in huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed, page-aligned memory of its own, in huge pages if it is large and the system has some. It
/// is fit for direct I/O without a copy when its length is a multiple of 4096.
pub struct OwnedBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its allocation, like a boxed slice.
unsafe impl Send for OwnedBuffer {}
// SAFETY: shared access is read-only.
unsafe impl Sync for OwnedBuffer {}

impl OwnedBuffer {
    /// Alignment of the start, in bytes.
    pub const ALIGNMENT: usize = 4096;

    /// A zeroed buffer.
    ///
    /// # Panics
    /// If `len` exceeds the address space. Running out of memory aborts, as for every allocation.
    pub fn new(len: usize) -> Self {
        let layout = Self::layout(len);
        if len < HUGE_PAGE {
            // SAFETY: the layout is never of size 0.
            let start = unsafe { alloc_zeroed(layout) };
            return Self { start: NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout)), len };
        }
        // SAFETY: the layout is never of size 0.
        let start = unsafe { alloc(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        if cfg!(not(miri)) {
            // Advice, before the memory is first touched; without it there are more pieces, and
            // that is all. SAFETY: the range is allocated, starts at a page, and the advice changes
            // no byte.
            let _ = unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        // SAFETY: allocated with this length.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Self { start, len }
    }

    /// A copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        buffer
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialised bytes that nobody writes while `self` is
        // borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `start` is valid for `len` initialised bytes and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The whole buffer as one fragment; using it is subject to the contract of
    /// [`IoFragments::from_raw`].
    pub(crate) fn fragments(&self) -> IoFragments {
        let first = (self.len > 0).then_some(Fragment { start: self.start, len: self.len });
        IoFragments { first, others: Box::default(), bytes: self.len as u64 }
    }

    /// Whole huge pages where there may be some: the kernel handles a registered buffer page by
    /// page where its last page is a small one.
    fn layout(len: usize) -> Layout {
        let (size, alignment) = if len < HUGE_PAGE {
            (len.max(1), Self::ALIGNMENT)
        } else {
            (len.checked_next_multiple_of(HUGE_PAGE).unwrap_or(len), HUGE_PAGE)
        };
        Layout::from_size_align(size, alignment).unwrap_or_else(|_| panic!("buffer of {len} bytes"))
    }
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

impl std::fmt::Debug for OwnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// A buffer that one read fills. Its bytes are out of reach until the read is over:
/// [`ReadTarget::into_buffer`].
#[derive(Debug)]
pub struct ReadTarget {
    buffer: OwnedBuffer,
    claimed: AtomicBool,
}

impl ReadTarget {
    /// A target of `len` bytes.
    pub fn new(len: usize) -> Arc<Self> {
        Arc::new(Self { buffer: OwnedBuffer::new(len), claimed: AtomicBool::new(false) })
    }

    /// The buffer, once no batch holds it (when the completion is called, its batch no longer
    /// does).
    ///
    /// # Errors
    /// The target itself, while a batch holds it or another clone is there.
    pub fn into_buffer(self: Arc<Self>) -> Result<OwnedBuffer, Arc<Self>> {
        Arc::try_unwrap(self).map(|target| target.buffer)
    }

    /// The memory, given out once only: two reads never write it side by side.
    pub(crate) fn claim(&self) -> Option<IoFragments> {
        let claimed = self.claimed.swap(true, Ordering::AcqRel);
        (!claimed).then(|| self.buffer.fragments())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_skip_empty_runs_and_refuse_impossible_ones() {
        let mut bytes = [1_u8, 2, 3, 4];
        let start = bytes.as_mut_ptr();
        // SAFETY: the fragments are never used beyond `bytes`' life.
        let fragments = unsafe { IoFragments::from_raw([(start, 2), (std::ptr::null_mut(), 0), (start, 2)]) };
        let fragments = fragments.unwrap();
        assert_eq!((fragments.bytes(), fragments.count()), (4, 2));
        // SAFETY: `bytes` lives and nobody writes it.
        let source = unsafe { fragments.as_source() };
        assert_eq!(source.iter().flat_map(|run| run.iter().copied()).collect::<Vec<_>>(), [1, 2, 1, 2]);
        // SAFETY: refused, hence never used.
        assert!(unsafe { IoFragments::from_raw([(std::ptr::null_mut(), 1)]) }.is_none());
        // SAFETY: refused, hence never used.
        assert!(unsafe { IoFragments::from_raw([(start, usize::MAX)]) }.is_none());
    }

    #[test]
    fn a_target_is_claimed_once_and_comes_back_when_released() {
        let target = ReadTarget::new(8192);
        assert!(target.claim().unwrap().is_aligned(4096));
        assert!(target.claim().is_none());
        let shared = Arc::clone(&target);
        let target = target.into_buffer().unwrap_err();
        drop(shared);
        assert_eq!(target.into_buffer().unwrap().as_slice().len(), 8192);
    }
}
