//! Host memory that a device reads and writes while Rust code goes on.
//!
//! The contract of its bytes stands at [`HostRegion`].

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::rows::{self, Stores};
use crate::{DeviceError, Owner, RowAxis, RowGrid};

/// A range of host memory and what keeps it allocated. Clones are cheap and share it.
///
/// # Shared bytes
/// The bytes in it, and those of device memory, are *shared bytes*: a device, a disk ring or
/// another thread may be working on them. So no safe function of this crate makes a reference to
/// them or gives them a type other than `u8`. They are copied in and out by address, here and in
/// the streams.
///
/// Who may touch which bytes when is a protocol above: a block has one writer, or readers only,
/// until its transfer is complete; events order what follows. Nothing here enforces it, as nothing
/// enforces it for a file mapped by several processes or for memory that real hardware writes. In
/// the terms of the language, an access that breaks it is a data race. So every function that
/// reads or writes shared bytes on the calling thread is `unsafe`, and its caller has to prove
/// that the protocol was kept.
#[derive(Clone)]
pub struct HostRegion {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

// SAFETY: the region is an address range that stays valid on every thread (`HostRegion::new`'s
// contract); nothing in it is tied to the thread that made it.
unsafe impl Send for HostRegion {}
// SAFETY: as above; functions that read or write the bytes are `unsafe`, and their callers keep the
// protocol in the type's documentation.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    /// `len` bytes at `start`, valid while `owner` lives.
    ///
    /// # Safety
    /// - The range must be initialised, in one allocation, and valid for reads and writes until the
    ///   last clone of `owner` is dropped.
    /// - No Rust reference to these bytes may exist while others can reach them through this
    ///   region. They are *shared bytes* (see the type): threads that use clones keep the protocol.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Owner) -> Self {
        Self { start, len, owner }
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this region, which keeps the whole alive.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self, DeviceError> {
        let start = self.at(offset, len)?;
        Ok(Self { start, len: len as usize, owner: Arc::clone(&self.owner) })
    }

    /// Pointer to `len` bytes at `offset`, checked to lie inside. To be used only while this region
    /// (or its owner) lives.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn ptr_at(&self, offset: u64, len: u64) -> Result<*mut u8, DeviceError> {
        self.at(offset, len).map(NonNull::as_ptr)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// Nobody (thread or device) may write these bytes meanwhile.
    pub unsafe fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: `at` checked that the source lies inside the region, valid while `self.owner`
        // lives; `into` is an exclusive reference, and `new`'s contract allows none to shared
        // bytes, so they do not overlap.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// Nobody else (thread or device) may read or write these bytes meanwhile.
    pub unsafe fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.at(offset, bytes.len() as u64)?;
        // SAFETY: as in `read_at`, with the roles exchanged.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies `len` bytes of `source` into this region. The ranges may overlap.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// Meanwhile nobody else (thread or device) may write the source, nor read or write the
    /// destination.
    pub unsafe fn copy_from(
        &self,
        offset: u64,
        source: &Self,
        source_offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let to = self.at(offset, len)?;
        let from = source.at(source_offset, len)?;
        // SAFETY: both ranges were checked to lie inside their regions, which stay valid through
        // their owners; `copy` allows overlap.
        unsafe { to.as_ptr().copy_from(from.as_ptr(), len as usize) };
        Ok(())
    }

    /// Copies rows of `source` into this region. The ranges may overlap, the rows of the
    /// destination not.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// Meanwhile nobody else (thread or device) may write the source, nor read or write the
    /// destination.
    pub unsafe fn copy_rows_from(
        &self,
        offset: u64,
        source: &Self,
        source_offset: u64,
        grid: RowGrid,
    ) -> Result<(), DeviceError> {
        let (read, written) = (grid.src_extent().unwrap_or(u64::MAX), grid.dst_extent().unwrap_or(u64::MAX));
        let to = self.at(offset, written)?.as_ptr();
        let from = source.at(source_offset, read)?.as_ptr();
        let apart = from.addr() + read as usize <= to.addr() || to.addr() + written as usize <= from.addr();
        if grid.axes != [RowAxis::NONE; 2] && apart {
            // SAFETY: both ranges were checked to lie inside their regions, which stay valid
            // through their owners, and to be apart.
            unsafe { rows::copy(from, to, grid, Stores::Cached) };
            return Ok(());
        }
        for (read, written) in grid.offsets() {
            let (from, to) = (from.wrapping_add(read as usize), to.wrapping_add(written as usize));
            // SAFETY: as above, row by row; `copy` allows overlap.
            unsafe { to.copy_from(from, grid.len as usize) };
        }
        Ok(())
    }

    /// Sets `len` bytes to `byte`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// Nobody else (thread or device) may read or write these bytes meanwhile.
    pub unsafe fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        let to = self.at(offset, len)?;
        // SAFETY: the range was checked to lie inside the region, valid for writes while
        // `self.owner` lives.
        unsafe { to.as_ptr().write_bytes(byte, len as usize) };
        Ok(())
    }

    /// The bytes of a range as a slice, for code that reads in place (checksums, vectored writes).
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    ///
    /// # Safety
    /// No thread or device may write these bytes while the slice lives.
    pub unsafe fn bytes(&self, offset: u64, len: u64) -> Result<&[u8], DeviceError> {
        let start = self.at(offset, len)?;
        // SAFETY: valid and initialised (`new`'s contract) for `len` bytes while `self` lives; the
        // caller excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len as usize) })
    }

    /// What keeps the memory allocated.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    fn at(&self, offset: u64, len: u64) -> Result<NonNull<u8>, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => {
                // SAFETY: `offset <= self.len`, so the result is inside the region or one past its
                // end, in the same allocation.
                Ok(unsafe { self.start.add(offset as usize) })
            }
            _ => Err(DeviceError::OutOfRange { memory: self.to_string(), offset, len, size: self.len() }),
        }
    }
}

impl fmt::Display for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host memory {:p}", self.start)
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRegion({self}, {} bytes)", self.len)
    }
}

/// A small owned buffer of zeroed host memory (staging, tests). Derefs to its [`HostRegion`]; large
/// pools live in kvbm-storage.
///
/// Its owner reads and writes it through [`exclusive_bytes`](Self::exclusive_bytes) while nobody
/// else has a part of it. Everything else is under the contract of [`HostRegion`], which safe code
/// cannot give:
///
/// ```compile_fail,E0133
/// # use kvbm_device::HostBuffer;
/// HostBuffer::zeroed(64).region().clone().write_at(0, &[1]).unwrap();
/// ```
/// ```compile_fail,E0133
/// # use kvbm_device::HostBuffer;
/// HostBuffer::zeroed(64).read_at(0, &mut [0]).unwrap();
/// ```
/// ```compile_fail,E0133
/// # use kvbm_device::HostBuffer;
/// HostBuffer::zeroed(64).fill(0, 1, 0).unwrap();
/// ```
/// ```compile_fail,E0133
/// # use kvbm_device::HostBuffer;
/// HostBuffer::zeroed(64).copy_from(0, &HostBuffer::zeroed(64), 0, 1).unwrap();
/// ```
#[derive(Debug)]
pub struct HostBuffer {
    region: HostRegion,
}

impl HostBuffer {
    /// Alignment of every buffer in bytes: a page, so that it can be registered and used for direct
    /// I/O.
    pub const ALIGNMENT: usize = 4096;

    /// `len` zeroed bytes.
    ///
    /// # Panics
    /// If `len` exceeds `isize::MAX`, as allocation in the standard library does.
    pub fn zeroed(len: usize) -> Self {
        let layout =
            Layout::from_size_align(len.max(1), Self::ALIGNMENT).expect("buffer longer than isize::MAX");
        // SAFETY: the layout is not of size zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        let owner = Arc::new(HeapBytes { start, layout });
        // SAFETY: zeroed above; `HeapBytes` frees the range when it is dropped, not before; nobody
        // else knows the address.
        Self { region: unsafe { HostRegion::new(start, len, owner) } }
    }

    /// A buffer with the content of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let buffer = Self::zeroed(bytes.len());
        // SAFETY: nobody else knows the buffer yet.
        let copied = unsafe { buffer.region.write_at(0, bytes) };
        debug_assert_eq!(copied, Ok(()));
        buffer
    }

    /// The whole content, for its owner alone: neither another region of this buffer nor work of a
    /// device that touches it may exist. Work has let go of it when its event is complete.
    ///
    /// # Errors
    /// [`DeviceError::Shared`]: somebody else has a part of it.
    pub fn exclusive_bytes(&mut self) -> Result<&mut [u8], DeviceError> {
        if Arc::get_mut(&mut self.region.owner).is_none() {
            return Err(DeviceError::Shared { memory: self.region.to_string() });
        }
        let HostRegion { start, len, .. } = &self.region;
        // SAFETY: the range is initialised and stays valid while `self` lives. Every other region
        // of the buffer, and every work on it, would hold the owner, which nobody else does. `self`
        // is borrowed exclusively while the slice lives, so no further region can be made.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), *len) })
    }

    /// The memory of this buffer.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Deref for HostBuffer {
    type Target = HostRegion;

    fn deref(&self) -> &HostRegion {
        &self.region
    }
}

struct HeapBytes {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the allocation is not tied to a thread, and this type only frees it.
unsafe impl Send for HeapBytes {}
// SAFETY: a shared reference to it does nothing.
unsafe impl Sync for HeapBytes {}

impl Drop for HeapBytes {
    fn drop(&mut self) {
        // SAFETY: allocated in `HostBuffer::zeroed` with this layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Host memory that is page-locked and registered with a device until this guard is dropped.
pub struct PinnedHost {
    region: HostRegion,
    registration: Option<Box<dyn Send + Sync>>,
}

impl PinnedHost {
    /// For implementers of [`Device`](crate::Device): dropping `registration` undoes it; `region`
    /// is held longer.
    pub fn new(region: HostRegion, registration: Box<dyn Send + Sync>) -> Self {
        Self { region, registration: Some(registration) }
    }

    /// The memory.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Drop for PinnedHost {
    fn drop(&mut self) {
        // The memory must outlive its registration, whatever the order of fields.
        drop(self.registration.take());
    }
}

impl fmt::Debug for PinnedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedHost({:?})", self.region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_in_and_out_within_bounds() {
        let mut buffer = HostBuffer::from_bytes(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(buffer.address().is_multiple_of(HostBuffer::ALIGNMENT as u64));
        let part = buffer.slice(2, 4).expect("inside");
        // SAFETY: this thread alone has the buffer.
        unsafe { part.write_at(1, &[9, 9]) }.expect("inside");
        let mut out = [0; 4];
        // SAFETY: as above.
        unsafe { part.read_at(0, &mut out) }.expect("inside");
        assert_eq!(out, [3, 9, 9, 6]);
        // SAFETY: as above.
        unsafe { buffer.copy_from(0, &buffer, 1, 7) }.expect("overlap is allowed");
        drop(part);
        assert_eq!(buffer.exclusive_bytes().expect("alone"), [2, 3, 9, 9, 6, 7, 8, 8]);
        // SAFETY: as above.
        unsafe { buffer.fill(6, 2, 0) }.expect("inside");
        assert_eq!(buffer.exclusive_bytes().expect("alone"), [2, 3, 9, 9, 6, 7, 0, 0]);
    }

    #[test]
    fn every_access_is_checked() {
        let mut buffer = HostBuffer::zeroed(8);
        let out_of_range = |result: Result<(), DeviceError>| {
            assert!(matches!(result, Err(DeviceError::OutOfRange { size: 8, .. })), "{result:?}");
        };
        for (offset, len) in [(0, 9), (8, 1), (9, 0), (u64::MAX, 1), (1, u64::MAX)] {
            out_of_range(buffer.slice(offset, len).map(|_| ()));
            out_of_range(buffer.ptr_at(offset, len).map(|_| ()));
            // SAFETY: this thread alone has the buffer.
            out_of_range(unsafe { buffer.fill(offset, len, 1) });
            // SAFETY: as above.
            out_of_range(unsafe { buffer.copy_from(offset, &buffer, 0, len) });
            // SAFETY: as above.
            out_of_range(unsafe { buffer.copy_from(0, &buffer, offset, len) });
        }
        // SAFETY: as above.
        out_of_range(unsafe { buffer.read_at(1, &mut [0; 8]) });
        // SAFETY: as above.
        out_of_range(unsafe { buffer.write_at(8, &[0]) });
        assert_eq!(buffer.exclusive_bytes().expect("alone"), [0; 8]);
        assert!(buffer.slice(8, 0).expect("the end is inside").is_empty());
    }

    #[test]
    fn slices_of_disjoint_ranges_work_on_several_threads() {
        let buffer = HostBuffer::zeroed(4 * 64);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let region = buffer.region().clone();
                scope.spawn(move || {
                    let offset = u64::from(thread) * 64;
                    // SAFETY: each thread has a range of its own.
                    unsafe { region.write_at(offset, &[thread + 1; 64]) }.expect("inside");
                    // SAFETY: as above.
                    unsafe { region.write_at(offset, &[0xff]) }.expect("inside");
                });
            }
        });
        // SAFETY: the writers are done.
        let bytes = unsafe { buffer.bytes(0, 256) }.expect("inside");
        for (thread, part) in (1_u8..).zip(bytes.chunks(64)) {
            assert_eq!(part[0], 0xff);
            assert!(part[1..].iter().all(|byte| *byte == thread));
        }
    }

    #[test]
    fn memory_outlives_its_buffer_and_its_registration() {
        let buffer = HostBuffer::from_bytes(&[7; 32]);
        let part = buffer.slice(16, 16).expect("inside");
        let weak = Arc::downgrade(buffer.owner());
        let registration: Arc<()> = Arc::new(());
        let pinned = PinnedHost::new(buffer.region().clone(), Box::new(Arc::clone(&registration)));
        drop(buffer);
        let mut out = [0; 16];
        // SAFETY: this thread alone has the memory.
        unsafe { part.read_at(0, &mut out) }.expect("inside");
        assert_eq!(out, [7; 16]);
        drop(part);
        assert_eq!(pinned.region().len(), 32);
        drop(pinned);
        assert_eq!(Arc::strong_count(&registration), 1, "unregistered");
        assert_eq!(weak.strong_count(), 0, "freed");
    }

    #[test]
    fn empty_buffer() {
        let mut buffer = HostBuffer::zeroed(0);
        assert!(buffer.is_empty() && buffer.exclusive_bytes().expect("alone").is_empty());
        // SAFETY: this thread alone has the buffer.
        assert!(unsafe { buffer.write_at(0, &[1]) }.is_err());
    }

    #[test]
    fn the_bytes_of_a_buffer_are_its_owner_s_while_nobody_else_has_a_part() {
        let mut buffer = HostBuffer::from_bytes(&[7; 8]);
        let part = buffer.slice(4, 4).expect("inside");
        let refused = buffer.exclusive_bytes().expect_err("another thread may have the part");
        assert!(matches!(refused, DeviceError::Shared { .. }), "{refused}");
        let weak = Arc::downgrade(part.owner());
        drop(part);
        assert!(buffer.exclusive_bytes().is_err(), "a weak owner may become a strong one");
        drop(weak);
        buffer.exclusive_bytes().expect("alone")[0] = 1;
        assert_eq!(buffer.exclusive_bytes().expect("alone"), [1, 7, 7, 7, 7, 7, 7, 7]);
    }
}
