//! Host memory.

use std::fmt;
use std::sync::Arc;

use kvbm_device::HostRegion;

use crate::mapping::{self, BASE_PAGE, HUGE_PAGE};
use crate::{Backing, Storage, StorageAllocator, StorageError, StorageKind};

/// Whether to use huge pages, which save TLB misses on pools of gigabytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Ordinary pages.
    #[default]
    No,
    /// Explicit huge pages if some are reserved, else transparent ones, else ordinary ones. The
    /// storage says which.
    Try,
    /// Explicit huge pages or an error.
    Require,
}

/// The pages behind host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageSize {
    /// Ordinary pages, as asked.
    Base,
    /// Ordinary pages that the system was asked to merge into huge ones.
    Transparent {
        /// Why there are no explicit ones.
        reason: String,
    },
    /// Explicit huge pages.
    Huge,
    /// Ordinary pages, although huge ones were asked for.
    Fallback {
        /// Why.
        reason: String,
    },
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => f.write_str("ordinary pages"),
            Self::Transparent { .. } => f.write_str("transparent huge pages"),
            Self::Huge => f.write_str("reserved huge pages"),
            Self::Fallback { reason } => write!(f, "ordinary pages (no huge ones: {reason})"),
        }
    }
}

/// Zeroed host memory.
#[derive(Debug)]
pub struct SystemStorage {
    region: HostRegion,
    /// The region and what was mapped behind it to fill its last huge page.
    whole: HostRegion,
    alignment: u64,
    pages: PageSize,
}

impl SystemStorage {
    /// `len` zeroed bytes aligned to `alignment` (a power of two; raised to a page).
    ///
    /// Where huge pages are wanted the last one is whole too. A kernel that knows this memory as
    /// one buffer of a ring handles it in pieces of a small page if its pages are of two sizes.
    ///
    /// # Errors
    /// [`StorageError::Invalid`], [`StorageError::OutOfMemory`], [`StorageError::NoHugePages`].
    pub fn new(len: u64, alignment: u64, huge_pages: HugePages) -> Result<Self, StorageError> {
        check_request(len, alignment)?;
        let alignment = alignment.max(BASE_PAGE);
        if huge_pages == HugePages::No {
            return Self::first(len, base_pages(len, alignment)?, alignment, PageSize::Base);
        }
        let reason = match explicit_huge_pages(len, alignment) {
            Ok(whole) => return Self::first(len, whole, HUGE_PAGE, PageSize::Huge),
            Err(reason) if huge_pages == HugePages::Require => {
                return Err(StorageError::NoHugePages { asked: len, reason });
            }
            Err(reason) => reason,
        };
        let (mapped, alignment) = if len < HUGE_PAGE {
            (len, alignment)
        } else {
            (len.next_multiple_of(HUGE_PAGE), alignment.max(HUGE_PAGE))
        };
        let whole = base_pages(mapped, alignment)?;
        let pages = match mapping::advise_huge(&whole) {
            Ok(()) => PageSize::Transparent { reason },
            Err(error) => PageSize::Fallback { reason: format!("{reason}; transparent: {error}") },
        };
        Self::first(len, whole, alignment, pages)
    }

    /// The first `len` bytes of `whole`.
    fn first(len: u64, whole: HostRegion, alignment: u64, pages: PageSize) -> Result<Self, StorageError> {
        let region = whole
            .slice(0, len)
            .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })?;
        Ok(Self { region, whole, alignment, pages })
    }

    /// The memory to its last whole page: what is asked of the system for only a part of a huge
    /// page makes small ones of it.
    pub(crate) fn whole(&self) -> &HostRegion {
        &self.whole
    }

    /// The pages it got.
    pub fn pages(&self) -> &PageSize {
        &self.pages
    }

    /// The memory.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Storage for SystemStorage {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn backing(&self) -> Backing<'_> {
        Backing::Host(&self.region)
    }

    fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// Rules of every allocation.
pub(crate) fn check_request(len: u64, alignment: u64) -> Result<(), StorageError> {
    if len == 0 || i64::try_from(len).is_err() {
        let rule = "a storage has at least one byte and at most 2^63 - 1";
        return Err(StorageError::Invalid { what: "length", value: len, rule });
    }
    if !alignment.is_power_of_two() || alignment > 1 << 30 {
        let rule = "an alignment is a power of two of at most 1 GiB";
        return Err(StorageError::Invalid { what: "alignment", value: alignment, rule });
    }
    Ok(())
}

fn base_pages(len: u64, alignment: u64) -> Result<HostRegion, StorageError> {
    mapping::map(len, alignment)
        .map_err(|error| StorageError::OutOfMemory { asked: len, reason: error.to_string() })
}

fn explicit_huge_pages(len: u64, alignment: u64) -> Result<HostRegion, String> {
    if alignment > HUGE_PAGE {
        return Err(format!("an alignment of {alignment} bytes is more than a huge page has"));
    }
    mapping::map_huge(len.next_multiple_of(HUGE_PAGE)).map_err(|error| error.to_string())
}

/// Makes [`SystemStorage`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemAllocator {
    /// Whether to use huge pages.
    pub huge_pages: HugePages,
}

impl StorageAllocator for SystemAllocator {
    fn allocate(&self, len: u64, alignment: u64) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(Arc::new(SystemStorage::new(len, alignment, self.huge_pages)?))
    }
}
