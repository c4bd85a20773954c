//! Page-locked host memory.

use std::sync::Arc;

use kvbm_device::{Device, DeviceError, HostRegion, PinnedHost};

use crate::numa::{self, NumaPlacement};
use crate::{Backing, HugePages, Storage, StorageAllocator, StorageError, StorageKind, SystemStorage};

/// What to do if memory cannot be page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PinFallback {
    /// Fail.
    #[default]
    Error,
    /// Go on with ordinary memory; [`PinnedStorage::state`] says so.
    Unpinned,
}

/// Told how far page-locking has come: bytes that are done, and bytes in all. Called from several
/// threads.
pub type PinProgress = fn(u64, u64);

/// Whether memory is page-locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinState {
    /// It is.
    Pinned,
    /// It is not, as [`PinFallback::Unpinned`] allowed.
    Unpinned {
        /// Why.
        reason: DeviceError,
    },
}

/// Host memory that is page-locked and registered with a device, so that the device copies at full
/// speed. It lies on the device's NUMA node where there are several.
#[derive(Debug)]
pub struct PinnedStorage {
    memory: SystemStorage,
    /// Holds the memory too, so the order of drops does not matter.
    pinned: Result<PinnedHost, DeviceError>,
    placement: NumaPlacement,
}

impl PinnedStorage {
    /// `len` zeroed bytes, page-locked through `device`.
    ///
    /// # Errors
    /// As [`SystemStorage::new`]; [`DeviceError::PinLimit`] and others of [`Device::register_host`]
    /// unless `fallback` allows ordinary memory.
    pub fn new(
        device: &dyn Device,
        len: u64,
        alignment: u64,
        huge_pages: HugePages,
        fallback: PinFallback,
    ) -> Result<Self, StorageError> {
        Self::with_progress(device, len, alignment, huge_pages, fallback, |_, _| {})
    }

    /// As [`PinnedStorage::new`], telling how far page-locking has come.
    ///
    /// # Errors
    /// As [`PinnedStorage::new`].
    pub fn with_progress(
        device: &dyn Device,
        len: u64,
        alignment: u64,
        huge_pages: HugePages,
        fallback: PinFallback,
        progress: PinProgress,
    ) -> Result<Self, StorageError> {
        let memory = SystemStorage::new(len, alignment, huge_pages)?;
        // Registering touches every page.
        let placement = numa::place(memory.whole(), memory.pages(), device.numa_node());
        let pinned = device.register_host_with(memory.whole().clone(), &progress);
        match pinned {
            Err(error) if fallback == PinFallback::Error => Err(error.into()),
            pinned => Ok(Self { memory, pinned, placement }),
        }
    }

    /// Whether it is page-locked, and if not, why.
    pub fn state(&self) -> PinState {
        match &self.pinned {
            Ok(_) => PinState::Pinned,
            Err(reason) => PinState::Unpinned { reason: reason.clone() },
        }
    }

    /// Where it was asked to lie.
    pub fn placement(&self) -> &NumaPlacement {
        &self.placement
    }

    /// The memory underneath: its pages and its region.
    pub fn memory(&self) -> &SystemStorage {
        &self.memory
    }

    /// The memory.
    pub fn region(&self) -> &HostRegion {
        self.memory.region()
    }
}

impl Storage for PinnedStorage {
    fn kind(&self) -> StorageKind {
        if self.pinned.is_ok() { StorageKind::Pinned } else { StorageKind::System }
    }

    fn backing(&self) -> Backing<'_> {
        Backing::Host(self.region())
    }

    fn alignment(&self) -> u64 {
        self.memory.alignment()
    }
}

/// Makes [`PinnedStorage`].
#[derive(Clone, Debug)]
pub struct PinnedAllocator {
    /// The device to register with.
    pub device: Arc<dyn Device>,
    /// Whether to use huge pages.
    pub huge_pages: HugePages,
    /// What to do if memory cannot be page-locked.
    pub fallback: PinFallback,
    /// Told how far it has come.
    pub progress: PinProgress,
}

impl PinnedAllocator {
    /// Ordinary pages; not being able to lock them is an error.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, huge_pages: HugePages::No, fallback: PinFallback::Error, progress: |_, _| {} }
    }
}

impl StorageAllocator for PinnedAllocator {
    fn allocate(&self, len: u64, alignment: u64) -> Result<Arc<dyn Storage>, StorageError> {
        let Self { device, huge_pages, fallback, progress } = self;
        let storage =
            PinnedStorage::with_progress(&**device, len, alignment, *huge_pages, *fallback, *progress)?;
        Ok(Arc::new(storage))
    }
}
