//! A layout bound to storage: blocks with addresses.

use std::fmt;
use std::sync::Arc;

use kvbm_device::{DeviceId, DeviceMemory, HostRegion};
use kvbm_layout::BlockLayout;

use crate::fragments::FragmentTable;
use crate::{
    Backing, BoundFragment, FileRange, Storage, StorageAllocator, StorageError, StorageExt, StorageKind,
};

/// Where one region of a layout lies.
#[derive(Clone, Debug)]
pub struct RegionBinding {
    /// The storage.
    pub storage: Arc<dyn Storage>,
    /// First byte of the region in it.
    pub offset: u64,
}

impl RegionBinding {
    /// A region at the start of `storage`.
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, offset: 0 }
    }
}

/// The bytes of one region: offsets of the layout index it directly.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RegionBytes {
    /// Host memory.
    Host(HostRegion),
    /// Device memory.
    Device(DeviceMemory),
    /// Part of a file.
    File(FileRange),
}

/// A layout with a place for each of its regions. Cheap to clone.
///
/// It addresses bytes. The states of blocks decide who may touch them when, so executors on several
/// threads work on different blocks through one `BoundLayout`.
#[derive(Clone)]
pub struct BoundLayout {
    inner: Arc<Inner>,
}

struct Inner {
    layout: Arc<dyn BlockLayout>,
    bindings: Vec<RegionBinding>,
    memory: Vec<RegionBytes>,
    kind: StorageKind,
    device: Option<DeviceId>,
    fragments: FragmentTable,
}

impl BoundLayout {
    /// Binds each region of `layout`, in order.
    ///
    /// # Errors
    /// [`StorageError::RegionCount`], [`StorageError::RegionFit`] (length, alignment of the
    /// address), [`StorageError::MixedRegions`], [`StorageError::OverlappingRegions`],
    /// [`StorageError::TooManyFragments`].
    pub fn bind(layout: Arc<dyn BlockLayout>, bindings: Vec<RegionBinding>) -> Result<Self, StorageError> {
        let regions = layout.regions();
        if regions.len() != bindings.len() || regions.is_empty() {
            return Err(StorageError::RegionCount { regions: regions.len(), storages: bindings.len() });
        }
        let mut memory = Vec::with_capacity(bindings.len());
        for (index, (spec, binding)) in (0_u32..).zip(regions.iter().zip(&bindings)) {
            let address = binding.storage.address().checked_add(binding.offset);
            let room = binding.storage.len().saturating_sub(binding.offset);
            let misfit = |what, found, needed| StorageError::RegionFit { region: index, what, found, needed };
            if room < spec.bytes {
                return Err(misfit("bytes", room, spec.bytes));
            }
            if !address.is_some_and(|address| address.is_multiple_of(spec.alignment)) {
                let found = address.map_or(1, |address| 1 << address.trailing_zeros().min(62));
                return Err(misfit("alignment of the address", found, spec.alignment));
            }
            memory.push(region_memory(binding, spec.bytes)?);
        }
        check_same_place(&bindings)?;
        check_disjoint(&bindings, &*layout)?;
        let (kind, device) = (bindings[0].storage.kind(), bindings[0].storage.device());
        let fragments = FragmentTable::new(&*layout)?;
        Ok(Self { inner: Arc::new(Inner { layout, bindings, memory, kind, device, fragments }) })
    }

    /// Allocates one storage for each region.
    ///
    /// # Errors
    /// Those of the allocator and of [`BoundLayout::bind`].
    pub fn allocate(
        layout: Arc<dyn BlockLayout>,
        allocator: &dyn StorageAllocator,
    ) -> Result<Self, StorageError> {
        let bindings = layout
            .regions()
            .iter()
            .map(|region| Ok(RegionBinding::new(allocator.allocate(region.bytes, region.alignment)?)));
        let bindings = bindings.collect::<Result<_, StorageError>>()?;
        Self::bind(layout, bindings)
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<dyn BlockLayout> {
        &self.inner.layout
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> u32 {
        self.inner.layout.config().num_blocks
    }

    /// Payload bytes of a block, without padding.
    pub fn bytes_per_block(&self) -> u64 {
        self.inner.layout.bytes_per_block()
    }

    /// Kind of the storage, the same for all regions.
    pub fn kind(&self) -> StorageKind {
        self.inner.kind
    }

    /// Device whose memory it is.
    pub fn device(&self) -> Option<DeviceId> {
        self.inner.device
    }

    /// Where each region lies.
    pub fn bindings(&self) -> &[RegionBinding] {
        &self.inner.bindings
    }

    /// The bytes of each region.
    pub fn memory(&self) -> &[RegionBytes] {
        &self.inner.memory
    }

    /// The bytes of one region.
    ///
    /// # Errors
    /// [`StorageError::Layout`] if there is no such region.
    pub fn region(&self, region: u32) -> Result<&RegionBytes, StorageError> {
        let count = self.inner.memory.len() as u32;
        let missing = kvbm_layout::LayoutError::OutOfRange { axis: "region", index: region, count };
        self.inner.memory.get(region as usize).ok_or_else(|| missing.into())
    }

    /// Address of `len` bytes at `offset` of `region`, in the space of the storage: host, device,
    /// or offset in the file.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`], or no such region.
    pub fn address(&self, region: u32, offset: u64, len: u64) -> Result<u64, StorageError> {
        match self.region(region)? {
            RegionBytes::Host(memory) => Ok(memory.ptr_at(offset, len)?.expose_provenance() as u64),
            RegionBytes::Device(memory) => Ok(memory.address_of(offset, len)?),
            RegionBytes::File(file) => file.position(offset, len),
        }
    }

    /// The fewest contiguous runs that hold the payload of `block`, ordered by region and offset.
    ///
    /// # Errors
    /// [`StorageError::Layout`] if there is no such block.
    pub fn block_fragments(&self, block: u32) -> Result<Vec<BoundFragment>, StorageError> {
        self.inner.fragments.of(block)
    }

    /// Runs that each block consists of.
    pub fn fragments_per_block(&self) -> usize {
        self.inner.fragments.per_block()
    }

    /// Copies the payload of `block` out, in the order of [`BoundLayout::block_fragments`].
    ///
    /// # Errors
    /// No such block, wrong length of `into`, device memory, I/O.
    ///
    /// # Safety
    /// Nobody (thread, device or disk) may write the block meanwhile, if it is in host memory.
    pub unsafe fn read_block(&self, block: u32, into: &mut [u8]) -> Result<(), StorageError> {
        self.check_payload(into.len() as u64)?;
        let mut rest = into;
        for fragment in self.block_fragments(block)? {
            let (part, later) = rest.split_at_mut(fragment.len as usize);
            let binding = &self.inner.bindings[fragment.region as usize];
            // SAFETY: the bytes are the block's, whose writers the caller excludes.
            unsafe { binding.storage.read_at(binding.offset + fragment.offset, part) }?;
            rest = later;
        }
        Ok(())
    }

    /// Copies the payload of `block` in, in the order of [`BoundLayout::block_fragments`].
    ///
    /// # Errors
    /// As [`BoundLayout::read_block`].
    ///
    /// # Safety
    /// Nobody else (thread, device or disk) may read or write the block meanwhile, if it is in host
    /// memory. Bytes of a registered block never change.
    pub unsafe fn write_block(&self, block: u32, bytes: &[u8]) -> Result<(), StorageError> {
        self.check_payload(bytes.len() as u64)?;
        let mut rest = bytes;
        for fragment in self.block_fragments(block)? {
            let (part, later) = rest.split_at(fragment.len as usize);
            let binding = &self.inner.bindings[fragment.region as usize];
            // SAFETY: the bytes are the block's, from which the caller excludes everybody else.
            unsafe { binding.storage.write_at(binding.offset + fragment.offset, part) }?;
            rest = later;
        }
        Ok(())
    }

    fn check_payload(&self, len: u64) -> Result<(), StorageError> {
        if len == self.bytes_per_block() {
            return Ok(());
        }
        let rule = "it must be the payload of one block (BoundLayout::bytes_per_block)";
        Err(StorageError::Invalid { what: "buffer length", value: len, rule })
    }
}

impl fmt::Debug for BoundLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundLayout")
            .field("kind", &self.inner.kind)
            .field("device", &self.inner.device)
            .field("layout", &self.inner.layout.layout_type())
            .field("num_blocks", &self.num_blocks())
            .field("regions", &self.inner.memory.len())
            .finish()
    }
}

fn region_memory(binding: &RegionBinding, bytes: u64) -> Result<RegionBytes, StorageError> {
    Ok(match binding.storage.backing() {
        Backing::Host(region) => RegionBytes::Host(region.slice(binding.offset, bytes)?),
        Backing::Device(memory) => RegionBytes::Device(memory.slice(binding.offset, bytes)?),
        Backing::File(file) => RegionBytes::File(FileRange::new(file, binding.offset, bytes)?),
    })
}

fn check_same_place(bindings: &[RegionBinding]) -> Result<(), StorageError> {
    let place = |binding: &RegionBinding| (binding.storage.kind(), binding.storage.device());
    let words = |(kind, device): (StorageKind, Option<DeviceId>)| match device {
        Some(device) => format!("{kind} storage of device {device}"),
        None => format!("{kind} storage"),
    };
    let first = place(&bindings[0]);
    match (0_u32..).zip(bindings).find(|(_, binding)| place(binding) != first) {
        None => Ok(()),
        Some((region, binding)) => {
            Err(StorageError::MixedRegions { region, found: words(place(binding)), first: words(first) })
        }
    }
}

/// Regions must not share bytes, whether of one storage or of two storages over the same memory or
/// file.
fn check_disjoint(bindings: &[RegionBinding], layout: &dyn BlockLayout) -> Result<(), StorageError> {
    let mut ranges = Vec::with_capacity(bindings.len());
    for (index, (spec, binding)) in (0_u32..).zip(layout.regions().iter().zip(bindings)) {
        let space = match binding.storage.backing() {
            Backing::File(file) => Some(file.identity()?),
            Backing::Host(_) | Backing::Device(_) => None,
        };
        let start = binding.storage.address().saturating_add(binding.offset);
        ranges.push((space, start, start.saturating_add(spec.bytes), index));
    }
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) {
        None => Ok(()),
        Some(pair) => Err(StorageError::OverlappingRegions {
            first: pair[0].3.min(pair[1].3),
            second: pair[0].3.max(pair[1].3),
        }),
    }
}
