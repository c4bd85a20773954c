//! Memory of the system: all `unsafe` around `mmap` of this crate.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvbm_device::HostRegion;

/// Smallest page of the systems we run on; every mapping is aligned to at least this.
pub(crate) const BASE_PAGE: u64 = 4096;

/// Size of a (default) huge page.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;

/// Mapped memory, unmapped on drop.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference offers nothing but dropping; the bytes are reached through a
// `HostRegion`.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and is unmapped only here, when no region that
        // holds this owner is left.
        let _always_ours = unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// `len` zeroed bytes at an address aligned to `alignment` (a power of two).
pub(crate) fn map(len: u64, alignment: u64) -> io::Result<HostRegion> {
    let slack = if alignment > BASE_PAGE { alignment } else { 0 };
    let bytes = len.next_multiple_of(BASE_PAGE).checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
    let mapping = anonymous(bytes, 0)?;
    // Alignment is a number here: under Miri `align_offset` may refuse to answer.
    let gap = mapping.start.addr().get() as u64;
    let gap = gap.next_multiple_of(alignment) - gap;
    Ok(region(mapping, gap, len))
}

/// `len` zeroed bytes (a multiple of the huge page) of explicit huge pages.
pub(crate) fn map_huge(len: u64) -> io::Result<HostRegion> {
    Ok(region(anonymous(len, libc::MAP_HUGETLB)?, 0, len))
}

/// The first `len` bytes of a file whose size is sealed, shared with whoever maps it too, at a
/// multiple of the huge page. Elsewhere the system maps no huge page.
pub(crate) fn map_shared(file: impl AsFd, len: u64) -> io::Result<HostRegion> {
    let mapping = reserve(len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?)?;
    let start = mapping.start.addr().get() as u64;
    let gap = start.next_multiple_of(HUGE_PAGE) - start;
    // SAFETY: `gap` is less than the huge page that was reserved beyond `len`.
    let place = unsafe { mapping.start.add(gap as usize) }.as_ptr().cast::<c_void>();
    let (protection, file) = (libc::PROT_READ | libc::PROT_WRITE, file.as_fd().as_raw_fd());
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the range lies in the reservation, which is ours and which nobody uses; the
    // descriptor is open during the call.
    let start = unsafe { libc::mmap(place, mappable(len)?, protection, flags, file, 0) };
    if start == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        // Linux may have unmapped the range before it failed (where no huge page is left, for
        // example), and another thread may have mapped its stack there. So the reservation is
        // given up: at worst these addresses stay unused.
        std::mem::forget(mapping);
        return Err(error);
    }
    Ok(region(mapping, gap, len))
}

/// `len` bytes of addresses that nobody can read or write.
fn reserve(len: u64) -> io::Result<Mapping> {
    let bytes = mappable(len)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
    mapped(start, bytes)
}

/// Asks for transparent huge pages. `Ok` tells that the system will try, not that it did.
pub(crate) fn advise_huge(region: &HostRegion) -> io::Result<()> {
    let start = region.as_ptr().cast::<c_void>();
    // SAFETY: the region is mapped by us and page-aligned; the advice changes no byte.
    match unsafe { libc::madvise(start, region.len() as usize, libc::MADV_HUGEPAGE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the system make huge pages of the whole ones in `len` bytes at `offset`, whatever it does by
/// itself. Contents stay.
pub(crate) fn collapse(region: &HostRegion, offset: u64, len: u64) -> io::Result<()> {
    let address = region.slice(offset, len).map_err(io::Error::other)?.as_ptr().addr() as u64;
    let first = offset + (address.next_multiple_of(HUGE_PAGE) - address);
    let bytes = (offset + len).saturating_sub(first) / HUGE_PAGE * HUGE_PAGE;
    if bytes == 0 {
        return Ok(());
    }
    // The system merges nothing where there is no page.
    (first..first + bytes).step_by(HUGE_PAGE as usize).try_for_each(|page| populate(region, page, 1))?;
    let part = region.slice(first, bytes).map_err(io::Error::other)?;
    let start = part.as_ptr().cast::<c_void>();
    // SAFETY: the pages belong to a mapping of this process, and the advice changes no byte.
    match unsafe { libc::madvise(start, bytes as usize, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the system provide the pages of `len` bytes at `offset`, as if each were written to. Their
/// contents stay.
pub(crate) fn populate(region: &HostRegion, offset: u64, len: u64) -> io::Result<()> {
    let part = region.slice(offset, len).map_err(io::Error::other)?;
    let start = part.as_ptr().addr();
    // Whole pages: the first one begins at or before the part.
    let page = start & !(BASE_PAGE as usize - 1);
    let bytes = part.len() as usize + (start - page);
    let first = part.as_ptr().with_addr(page).cast::<c_void>();
    // SAFETY: the pages belong to mappings of this process, and the advice changes no byte.
    match unsafe { libc::madvise(first, bytes, libc::MADV_POPULATE_WRITE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn anonymous(len: u64, extra_flags: i32) -> io::Result<Mapping> {
    let len = mappable(len)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags;
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches nothing
    // that exists.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    mapped(start, len)
}

fn mappable(len: u64) -> io::Result<usize> {
    let len = usize::try_from(len).ok().filter(|len| isize::try_from(*len).is_ok());
    Ok(len.ok_or(io::ErrorKind::OutOfMemory)?)
}

/// What `mmap` returned.
fn mapped(start: *mut c_void, len: usize) -> io::Result<Mapping> {
    match NonNull::new(start.cast::<u8>()) {
        Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Mapping { start, len }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The part of a mapping that is handed out; `gap + len` is within it.
fn region(mapping: Mapping, gap: u64, len: u64) -> HostRegion {
    debug_assert!(gap + len <= mapping.len as u64);
    // SAFETY: `gap` is less than the slack that was mapped beyond `len`.
    let start = unsafe { mapping.start.add(gap as usize) };
    // SAFETY: the range is mapped readable and writable until the owner drops it, and nobody else
    // knows its address.
    unsafe { HostRegion::new(start, len as usize, Arc::new(mapping)) }
}
