//! One memfd mapped twice: a reservation without access rights that is shown, and an alias that
//! only this module knows.
//!
//! All `unsafe` of the emulated device's memory is here. Offsets are checked by every function.
//! That work which overlaps is ordered, is the callers' protocol: these are *shared bytes*
//! ([`HostRegion`](crate::HostRegion)), to which no reference is ever made.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use crate::DeviceError;

/// The shown address is aligned to this (a huge page), and so are allocations that ask for as much.
pub(super) const SHOWN_ALIGNMENT: u64 = 2 << 20;

pub(super) struct DoubleMapping {
    shown: Reservation,
    alias: Reservation,
    len: usize,
    _file: File,
}

impl DoubleMapping {
    /// `len` bytes, a multiple of the page size.
    pub(super) fn new(len: u64) -> Result<Self, DeviceError> {
        let invalid =
            DeviceError::Invalid { what: "memory_bytes", value: len, rule: "it must fit the address space" };
        let slack = SHOWN_ALIGNMENT as usize;
        let len = usize::try_from(len).map_err(|_| invalid.clone())?;
        let reserved = len.checked_add(slack).filter(|sum| isize::try_from(*sum).is_ok()).ok_or(invalid)?;
        let file = memfd(len as u64)?;
        let shown = Reservation::new(reserved, "mmap (address range of the emulated device)")?;
        let alias = Reservation::new(reserved, "mmap (memory of the emulated device)")?;
        let shown = shown.map(&file, len, libc::PROT_NONE)?;
        let alias = alias.map(&file, len, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(Self { shown, alias, len, _file: file })
    }

    /// Address shown to users.
    pub(super) fn shown_address(&self) -> u64 {
        self.shown.aligned.addr().get() as u64
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Copies device bytes at `offset` to host memory.
    ///
    /// # Safety
    /// `to` must be valid for writes of `len` bytes.
    pub(super) unsafe fn read(&self, offset: u64, to: *mut u8, len: u64) -> Result<(), DeviceError> {
        let from = self.at(offset, len)?;
        // SAFETY: `at` checked the source range; the caller vouches for the destination. Host
        // memory is never inside this mapping, whose address no one else has.
        unsafe { to.copy_from_nonoverlapping(from, len as usize) };
        Ok(())
    }

    /// Copies host memory to device bytes at `offset`.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len` bytes.
    pub(super) unsafe fn write(&self, offset: u64, from: *const u8, len: u64) -> Result<(), DeviceError> {
        let to = self.at(offset, len)?;
        // SAFETY: as in `read`, with the roles exchanged.
        unsafe { to.copy_from_nonoverlapping(from, len as usize) };
        Ok(())
    }

    /// Where the device bytes at `offset` are, checked to be there: to be used while `self` lives.
    pub(super) fn range(&self, offset: u64, len: u64) -> Result<*mut u8, DeviceError> {
        self.at(offset, len)
    }

    /// Where the bytes of a device address are, if it is one: only to be fetched.
    pub(super) fn hint(&self, address: u64) -> *const u8 {
        self.alias.aligned.as_ptr().wrapping_add(address.wrapping_sub(self.shown_address()) as usize)
    }

    /// The device bytes at `offset`, in place.
    ///
    /// # Safety
    /// No thread may write them while the slice lives.
    pub(super) unsafe fn bytes(&self, offset: u64, len: u64) -> Result<&[u8], DeviceError> {
        let start = self.at(offset, len)?;
        // SAFETY: `at` checked the range, which is mapped while `self` lives; the caller excludes
        // writers.
        Ok(unsafe { std::slice::from_raw_parts(start, len as usize) })
    }

    /// Copies inside the device; the ranges may overlap.
    pub(super) fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), DeviceError> {
        let source = self.at(from, len)?;
        let target = self.at(to, len)?;
        // SAFETY: both ranges were checked by `at`; `copy_from` allows overlap.
        unsafe { target.copy_from(source, len as usize) };
        Ok(())
    }

    pub(super) fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        let target = self.at(offset, len)?;
        // SAFETY: the range was checked by `at`.
        unsafe { target.write_bytes(byte, len as usize) };
        Ok(())
    }

    /// Gives the pages of a freed range back to the system. Best effort: the range reads as zeros
    /// if it worked.
    pub(super) fn discard(&self, offset: u64, len: u64) {
        if let Ok(start) = self.at(offset, len) {
            // SAFETY: the range lies in our own mapping; MADV_REMOVE only drops its content.
            let _best_effort =
                unsafe { libc::madvise(start.cast::<c_void>(), len as usize, libc::MADV_REMOVE) };
        }
    }

    fn at(&self, offset: u64, len: u64) -> Result<*mut u8, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => {
                // SAFETY: `offset` is inside the mapping of `self.len` bytes, or one past its end.
                Ok(unsafe { self.alias.aligned.as_ptr().add(offset as usize) })
            }
            _ => Err(DeviceError::OutOfRange {
                memory: "the emulated device's memory".to_owned(),
                offset,
                len,
                size: self.len(),
            }),
        }
    }
}

fn memfd(len: u64) -> Result<File, DeviceError> {
    // SAFETY: the name is a NUL-terminated constant.
    let fd = unsafe { libc::memfd_create(c"kvbm-emulated-device".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(DeviceError::last_os("memfd_create"));
    }
    // SAFETY: `fd` was just opened and has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let file = File::from(file);
    file.set_len(len)
        .map_err(|error| DeviceError::from_io("setting the size of the emulated device's memory", &error))?;
    Ok(file)
}

/// A range of address space that is ours until dropped.
struct Reservation {
    start: NonNull<u8>,
    len: usize,
    /// First address inside that is aligned to `SHOWN_ALIGNMENT`.
    aligned: NonNull<u8>,
}

// SAFETY: an address range belongs to the process, not to a thread.
unsafe impl Send for Reservation {}
// SAFETY: shared access only reads addresses; access to the bytes goes through `DoubleMapping`'s
// checked functions.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// `len` bytes, of which at least `len - SHOWN_ALIGNMENT` follow the aligned address.
    fn new(len: usize, operation: &'static str) -> Result<Self, DeviceError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches
        // nothing that exists.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        let start = match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => start,
            _ => return Err(DeviceError::last_os(operation)),
        };
        let gap = start.as_ptr().align_offset(SHOWN_ALIGNMENT as usize);
        // SAFETY: `gap` is less than `SHOWN_ALIGNMENT`, and the reservation is longer than that.
        let aligned = unsafe { start.add(gap) };
        Ok(Self { start, len, aligned })
    }

    /// Maps the first `len` bytes of `file` at the aligned address.
    fn map(self, file: &File, len: usize, protection: i32) -> Result<Self, DeviceError> {
        let at = self.aligned.as_ptr().cast::<c_void>();
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: `at .. at + len` lies inside this reservation, which is ours alone, so replacing
        // it does no harm.
        let mapped = unsafe { libc::mmap(at, len, protection, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            let error = DeviceError::last_os("mmap (memory of the emulated device)");
            // Linux may have unmapped the range before it failed, and another thread may have
            // mapped its stack there. So the reservation is given up.
            std::mem::forget(self);
            return Err(error);
        }
        Ok(self)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: this range was mapped in `new` and is unmapped only here; nothing keeps addresses
        // into the alias.
        let _always_ours = unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}
