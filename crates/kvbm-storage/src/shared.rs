//! Host memory that several processes map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use kvbm_device::{Device, DeviceError, HostRegion, PinnedHost};
use rustix::fs::{
    MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};

use crate::mapping::{self, BASE_PAGE, HUGE_PAGE};
use crate::system::check_request;
use crate::{
    Backing, HugePages, NumaPlacement, PageSize, PinProgress, Storage, StorageError, StorageKind, numa,
};

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
    pages: PageSize,
    placement: NumaPlacement,
    /// Holds the memory too, so the order of drops does not matter.
    pinned: Option<PinnedHost>,
    populated: AtomicBool,
}

impl SharedStorage {
    /// `len` zeroed bytes, in huge pages as `huge_pages` says, on the NUMA node `node` where there
    /// is a choice.
    ///
    /// # Errors
    /// [`StorageError::Invalid`], [`StorageError::OutOfMemory`], [`StorageError::NoHugePages`].
    pub fn create(len: u64, huge_pages: HugePages, node: Option<u32>) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let mut reason = None;
        if huge_pages != HugePages::No {
            match sealed(len.next_multiple_of(HUGE_PAGE), MemfdFlags::HUGETLB) {
                Ok((file, whole)) => {
                    let mut memory = Self::first(file, whole, len, PageSize::Huge)?;
                    memory.placement = numa::place(&memory.whole, &memory.pages, node);
                    return Ok(memory);
                }
                Err(error) if huge_pages == HugePages::Require => {
                    return Err(StorageError::NoHugePages { asked: len, reason: error.to_string() });
                }
                Err(error) => reason = Some(error.to_string()),
            }
        }
        let (file, whole) = sealed(len.next_multiple_of(BASE_PAGE), MemfdFlags::empty())
            .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })?;
        let mut memory = Self::first(file, whole, len, PageSize::Base)?;
        // Before a page is touched.
        memory.placement = numa::place(&memory.whole, &memory.pages, node);
        if let Some(reason) = reason {
            memory.ask_transparent(reason);
        }
        Ok(memory)
    }

    /// Asks for transparent huge pages where there are ordinary ones: for memory that another
    /// process has created.
    pub fn ask_huge(&mut self) {
        if self.pages == PageSize::Base {
            self.ask_transparent("another process created it".into());
        }
    }

    /// Tries with the first pages: most systems make huge pages of shared memory only on demand
    /// ([`Population`](crate::Population) does), and some do not at all. `reason`: why there are no
    /// explicit ones.
    fn ask_transparent(&mut self, reason: String) {
        // Of pages that are provided later, where the system does so by itself.
        let _ = mapping::advise_huge(&self.whole);
        let first = self.whole.len().min(HUGE_PAGE);
        self.pages = match mapping::collapse(&self.whole, 0, first) {
            Ok(()) if first < HUGE_PAGE => {
                PageSize::Fallback { reason: "it is less than a huge page".into() }
            }
            Ok(()) => PageSize::Transparent { reason },
            Err(error) => PageSize::Fallback { reason: format!("{reason}; transparent: {error}") },
        };
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
        let is_huge =
            fstat(&file).is_ok_and(|found| u64::try_from(found.st_blksize).unwrap_or(0) >= HUGE_PAGE);
        Self::first(file, whole, len, if is_huge { PageSize::Huge } else { PageSize::Base })
    }

    fn first(file: OwnedFd, whole: HostRegion, len: u64, pages: PageSize) -> Result<Self, StorageError> {
        let region = whole
            .slice(0, len)
            .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })?;
        let (placement, populated) = (NumaPlacement::Anywhere, AtomicBool::new(false));
        Ok(Self { file, region, whole, pages, placement, pinned: None, populated })
    }

    /// The pages it has, as far as this process asked for them.
    pub fn pages(&self) -> &PageSize {
        &self.pages
    }

    /// Where it was asked to lie, by the process that created it.
    pub fn placement(&self) -> &NumaPlacement {
        &self.placement
    }

    /// Says that all pages are there: a process that maps the memory may touch all of it, and none
    /// is charged to that process.
    pub fn set_populated(&self) {
        self.populated.store(true, Ordering::Release);
    }

    /// Whether that was said.
    pub fn is_populated(&self) -> bool {
        self.populated.load(Ordering::Acquire)
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
        if self.pages == PageSize::Huge { HUGE_PAGE } else { BASE_PAGE }
    }
}

/// A mapped file of `len` bytes whose size cannot change any more.
fn sealed(len: u64, flags: MemfdFlags) -> io::Result<(OwnedFd, HostRegion)> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("kvbm-host", flags)?;
    // A memfd has mode 0777 at first, and a process that sees `/proc/PID/fd` can open it there.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
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
        let ours = SharedStorage::create(70_000, HugePages::Try, None).expect("memory");
        let theirs = SharedStorage::map(dup(ours.file()).expect("a descriptor"), 70_000).expect("memory");
        assert_ne!(ours.address(), theirs.address());
        assert_eq!(fstat(ours.file()).expect("a file").st_mode & 0o777, 0o600);
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
    fn a_mapping_that_fails_takes_no_memory_from_other_threads() {
        // No machine has that many huge pages, so each attempt fails.
        let len = 1 << 44;
        let Ok(file) = memfd_create("kvbm-test", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
            return; // A system without huge pages cannot fail this way.
        };
        ftruncate(&file, len).expect("a size");
        let is_done = AtomicBool::new(false);
        let others = || {
            while !is_done.load(Ordering::Relaxed) {
                let memory = mapping::map(HUGE_PAGE, BASE_PAGE).expect("memory");
                // SAFETY: the memory is this thread's alone.
                unsafe { memory.fill(0, BASE_PAGE, 0x5a) }.expect("in range");
                std::thread::yield_now();
                // SAFETY: as above.
                assert_eq!(unsafe { memory.bytes(100, 1) }.expect("in range"), [0x5a]);
            }
        };
        std::thread::scope(|scope| {
            let threads = [scope.spawn(others), scope.spawn(others)];
            for _ in 0..1_000 {
                assert!(mapping::map_shared(&file, len).is_err());
            }
            is_done.store(true, Ordering::Relaxed);
            for thread in threads {
                thread.join().expect("its memory stayed");
            }
        });
    }

    #[test]
    fn both_mappings_can_have_huge_pages_and_the_bytes_stay() {
        let len = 3 * HUGE_PAGE + 12_345;
        let mut ours = SharedStorage::create(len, HugePages::No, None).expect("memory");
        assert_eq!(ours.pages(), &PageSize::Base);
        let theirs = SharedStorage::map(dup(ours.file()).expect("a descriptor"), len).expect("memory");
        assert!(ours.address().is_multiple_of(HUGE_PAGE) && theirs.address().is_multiple_of(HUGE_PAGE));
        // SAFETY: the memory is this test's alone.
        unsafe { theirs.write_at(HUGE_PAGE + 7, b"0123456789") }.expect("in range");
        ours.ask_huge();
        assert_ne!(ours.pages(), &PageSize::Base, "it says what came of it");
        crate::Population::start(vec![ours.region().clone()], true, |_| ()).expect("a thread").wait();
        let mut found = [0; 10];
        // SAFETY: the memory is this test's alone.
        unsafe { ours.read_at(HUGE_PAGE + 7, &mut found) }.expect("in range");
        assert_eq!(&found, b"0123456789");
        assert!(!ours.is_populated());
        ours.set_populated();
        assert!(ours.is_populated());
    }

    #[test]
    fn a_node_is_asked_for_where_there_is_a_choice() {
        for node in [None, Some(0), Some(1000)] {
            let memory = SharedStorage::create(8192, HugePages::No, node).expect("memory");
            let nobody_chose = memory.placement() == &NumaPlacement::Anywhere;
            assert!(nobody_chose || node == Some(0), "{node:?}: {:?}", memory.placement());
        }
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
        let short = SharedStorage::create(4096, HugePages::No, None).expect("memory");
        let error =
            SharedStorage::map(dup(short.file()).expect("a descriptor"), 9000).expect_err("too short");
        assert!(error.to_string().contains("4096 bytes"), "{error}");
        assert!(SharedStorage::create(0, HugePages::No, None).is_err());
    }
}
