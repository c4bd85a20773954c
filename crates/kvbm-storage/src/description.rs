//! A bound layout told to another process, and bound again there.

use std::sync::Arc;

use kvbm_layout::{AnyLayout, BlockLayout, LayoutDescriptor, MemoryKind, RegionMemory};

use crate::{BoundLayout, RegionBinding, Storage, StorageError, StorageKind};

impl BoundLayout {
    /// The layout and the place of each region, to be serialized ([`LayoutDescriptor::encode`]) for
    /// another process.
    ///
    /// # Errors
    /// [`StorageError::Layout`] for a layout that has no portable description,
    /// [`StorageError::Description`].
    pub fn describe(&self) -> Result<LayoutDescriptor, StorageError> {
        let layout = AnyLayout::describe(&**self.layout())?;
        let memory = self.bindings().iter().map(region_memory).collect();
        Ok(LayoutDescriptor::new(layout, memory)?)
    }

    /// Binds a described layout to storages of this process. For each region `open` gives the
    /// storage that holds it here: the same file, the same device memory under its address here, or
    /// memory of the same size. Kind and size have to agree with the description; addresses differ
    /// between processes.
    ///
    /// # Errors
    /// What `open` says; [`StorageError::DescribedOtherwise`]; those of [`BoundLayout::bind`].
    pub fn from_description(
        description: &LayoutDescriptor,
        mut open: impl FnMut(u32, &RegionMemory) -> Result<Arc<dyn Storage>, StorageError>,
    ) -> Result<Self, StorageError> {
        let mut bindings = Vec::with_capacity(description.memory().len());
        for (region, described) in (0_u32..).zip(description.memory()) {
            let storage = open(region, described)?;
            let (kind, len) = (memory_kind(storage.kind()), storage.len());
            if kind != described.kind || len != described.bytes {
                return Err(StorageError::DescribedOtherwise {
                    region,
                    found: format!("{len} bytes of {kind:?} memory"),
                    described: format!("{} bytes of {:?} memory", described.bytes, described.kind),
                });
            }
            bindings.push(RegionBinding { storage, offset: described.base_offset });
        }
        let layout: Arc<dyn BlockLayout> = Arc::new(description.layout().clone());
        Self::bind(layout, bindings)
    }
}

fn region_memory(binding: &RegionBinding) -> RegionMemory {
    RegionMemory {
        kind: memory_kind(binding.storage.kind()),
        device_id: binding.storage.device().map_or(0, |device| device.0),
        address: binding.storage.address(),
        bytes: binding.storage.len(),
        base_offset: binding.offset,
    }
}

fn memory_kind(kind: StorageKind) -> MemoryKind {
    match kind {
        StorageKind::System => MemoryKind::System,
        StorageKind::Pinned => MemoryKind::Pinned,
        StorageKind::Device => MemoryKind::Device,
        StorageKind::Disk => MemoryKind::File,
    }
}
