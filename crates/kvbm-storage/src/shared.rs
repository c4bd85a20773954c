//! Host memory that several processes map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvbm_device::{Device, DeviceError, HostRegion, PinnedHost};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use crate::mapping::{self, BASE_PAGE, HUGE_PAGE};
use crate::system::check_request;
use crate::{Backing, HugePages, PinProgress, Storage, StorageError, StorageKind};

/// What is asked of a file before it is mapped: nobody can make it shorter, which would kill
/// whoever reads behind its end.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Memory without a name, of a size that is sealed. Another process maps it through its file
/// descriptor ([`SharedStorage::file`], [`SharedStorage::map`]); all of them read and write the
/// same bytes. It is freed when the last process has let go of it.
#[derive(Debug)]
pub struct SharedStorage {
    file: OwnedFd,
    region: HostRegion,
    /// The region to the end of its last page.
    whole: HostRegion,
    alignment: u64,
    /// Holds the memory too, so the order of drops does not matter.
    pinned: Option<PinnedHost>,
}

impl SharedStorage {
    /// `len` zeroed bytes, in huge pages as `huge_pages` says.
    ///
    /// # Errors
    /// [`StorageError::Invalid`], [`StorageError::OutOfMemory`], [`StorageError::NoHugePages`].
    pub fn create(len: u64, huge_pages: HugePages) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        if huge_pages != HugePages::No {
            match sealed(len.next_multiple_of(HUGE_PAGE), MemfdFlags::HUGETLB) {
                Ok((file, whole)) => return Self::first(file, whole, len, HUGE_PAGE),
                Err(error) if huge_pages == HugePages::Require => {
                    return Err(StorageError::NoHugePages { asked: len, reason: error.to_string() });
                }
                Err(_) => {}
            }
        }
        let (file, whole) = sealed(len.next_multiple_of(BASE_PAGE), MemfdFlags::empty())
            .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })?;
        if huge_pages != HugePages::No {
            // Where the system has none for shared memory, ordinary pages do.
            let _ = mapping::advise_huge(&whole);
        }
        Self::first(file, whole, len, BASE_PAGE)
    }

    /// Maps memory that another process has created and passed on.
    ///
    /// # Errors
    /// [`StorageError::Shared`]: the file is no sealed memory, or has another size.
    pub fn map(file: OwnedFd, len: u64) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let shared = |reason: String| StorageError::Shared { asked: len, reason };
        let seals = fcntl_get_seals(&file).map_err(|error| shared(format!("it has no seals ({error})")))?;
        if !seals.contains(SEALS) {
            return Err(shared("its size is not sealed".into()));
        }
        let found = fstat(&file).map_err(|error| shared(error.to_string()))?.st_size;
        let found = u64::try_from(found).unwrap_or(0);
        if found < len || found > len.next_multiple_of(HUGE_PAGE) {
            return Err(shared(format!("it has {found} bytes")));
        }
        let whole = mapping::map_shared(&file, found).map_err(|error| shared(error.to_string()))?;
        Self::first(file, whole, len, BASE_PAGE)
    }

    fn first(file: OwnedFd, whole: HostRegion, len: u64, alignment: u64) -> Result<Self, StorageError> {
        let region = whole
            .slice(0, len)
            .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })?;
        Ok(Self { file, region, whole, alignment, pinned: None })
    }

    /// Page-locks the memory through `device`, for this process. It touches every page.
    ///
    /// # Errors
    /// Those of [`Device::register_host_with`].
    pub fn lock(&mut self, device: &dyn Device, progress: PinProgress) -> Result<(), DeviceError> {
        if self.pinned.is_none() {
            self.pinned = Some(device.register_host_with(self.whole.clone(), &progress)?);
        }
        Ok(())
    }

    /// What another process maps it by.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The memory.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Storage for SharedStorage {
    fn kind(&self) -> StorageKind {
        if self.pinned.is_some() { StorageKind::Pinned } else { StorageKind::System }
    }

    fn backing(&self) -> Backing<'_> {
        Backing::Host(&self.region)
    }

    fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// A mapped file of `len` bytes whose size cannot change any more.
fn sealed(len: u64, flags: MemfdFlags) -> io::Result<(OwnedFd, HostRegion)> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("kvbm-host", flags)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    let region = mapping::map_shared(&file, len)?;
    Ok((file, region))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::StorageExt;
    use rustix::io::dup;

    #[test]
    fn two_mappings_share_their_bytes_and_no_size_changes() {
        let ours = SharedStorage::create(70_000, HugePages::Try).expect("memory");
        let theirs = SharedStorage::map(dup(ours.file()).expect("a descriptor"), 70_000).expect("memory");
        assert_ne!(ours.address(), theirs.address());
        // SAFETY: the memory is this test's alone.
        unsafe { ours.write_at(69_990, b"0123456789") }.expect("in range");
        let mut found = [0; 10];
        // SAFETY: the memory is this test's alone.
        unsafe { theirs.read_at(69_990, &mut found) }.expect("in range");
        assert_eq!(&found, b"0123456789");
        assert!(ftruncate(ours.file(), 10).is_err() && ftruncate(ours.file(), 1 << 30).is_err());
        drop(ours);
        // SAFETY: the memory is this test's alone.
        unsafe { theirs.read_at(0, &mut found) }.expect("it lives as long as a mapping of it");
    }

    #[test]
    fn what_is_no_sealed_memory_is_refused() {
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).expect("a file");
        ftruncate(&open, 4096).expect("a length");
        let error = SharedStorage::map(open, 4096).expect_err("its owner could cut it off");
        assert!(error.to_string().contains("not sealed"), "{error}");
        let file = tempfile::tempfile().expect("a file");
        let error = SharedStorage::map(file.into(), 4096).expect_err("it is a file");
        assert!(error.to_string().contains("seals"), "{error}");
        let short = SharedStorage::create(4096, HugePages::No).expect("memory");
        let error =
            SharedStorage::map(dup(short.file()).expect("a descriptor"), 9000).expect_err("too short");
        assert!(error.to_string().contains("4096 bytes"), "{error}");
        assert!(SharedStorage::create(0, HugePages::No).is_err());
    }
}
