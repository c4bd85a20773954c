//! What operations do to the bytes.

use std::ptr;
use std::sync::Arc;

use super::EmulatedState;
use super::arena::Allocation;
use super::delays::Disorder;
use super::streaming::{self, Fence, Next};
use crate::rows::{self, Stores};
use crate::{
    CopyBatch, CopyObserver, CopyPiece, CopyRows, DeviceError, DeviceMemory, Direction, Link, ModelPath,
    RowGrid,
};

/// A link is reserved in parts of this size, so that concurrent copies share it.
const LINK_PART_BYTES: u64 = 256 << 10;
/// Bytes copied and then shown to an observer at a time: the first cache still holds them.
const OBSERVED_PART_BYTES: u64 = 16 << 10;
/// Batches of fewer bytes go through the caches: the next reader may find them there.
const STREAMING_BYTES: u64 = 128 << 10;
/// Longer rows are copied one by one.
const MAX_ROW_BYTES: u64 = 1 << 10;

/// Device addresses -> offsets of the mapping. It remembers the allocations that it found: a block
/// has pieces in many of them, and asking the arena takes a lock, which waits for all stores on
/// their way.
struct Lookup<'a> {
    device: &'a EmulatedState,
    /// By address.
    known: Vec<Arc<Allocation>>,
    last: usize,
}

impl<'a> Lookup<'a> {
    fn new(device: &'a EmulatedState) -> Self {
        Self { device, known: Vec::new(), last: 0 }
    }

    /// The allocation stays alive as long as the lookup, so the bytes at the returned offset stay
    /// ours meanwhile.
    fn offset(&mut self, address: u64, len: u64) -> Result<u64, DeviceError> {
        let known = |at: usize| self.known.get(at).and_then(|known| known.offset_of(address, len));
        if let Some(offset) = known(self.last) {
            return Ok(offset);
        }
        let after = self.known.partition_point(|known| known.address() <= address);
        let before = after.saturating_sub(1);
        if let Some(offset) = known(before) {
            self.last = before;
            return Ok(offset);
        }
        let found = self.device.arena.find(address, len)?;
        let offset = found.offset_of(address, len);
        self.known.insert(after, found);
        self.last = after;
        offset.ok_or_else(|| DeviceError::UnknownMemory {
            device: self.device.id,
            address,
            len,
            nearest: "its allocation ends earlier".to_owned(),
        })
    }
}

/// Copies the pieces of `batch` until `limit` bytes are through.
pub(super) fn copy(
    device: &EmulatedState,
    batch: &CopyBatch,
    observer: Option<Box<dyn CopyObserver>>,
    limit: u64,
    disorder: Option<&mut Disorder>,
) -> Result<(), DeviceError> {
    // Pieces in another order than the batch's are not for observers.
    let mut observer = observer.filter(|_| disorder.is_none());
    let mut copier = Copier {
        from: Lookup::new(device),
        to: Lookup::new(device),
        direction: batch.direction(),
        streaming: batch.bytes() >= STREAMING_BYTES,
        fence: Fence,
    };
    let part_bytes = if observer.is_some() { OBSERVED_PART_BYTES } else { LINK_PART_BYTES };
    let mut throttle = Throttle::new(device, batch.direction());
    let mut one = |push: usize, part: CopyRows, next: Option<CopyRows>| -> Result<(), DeviceError> {
        copier.copy(part, next)?;
        if let Some(observer) = &mut observer {
            copier.show(part, push, &mut **observer)?;
        }
        throttle.passed(part.grid.bytes().unwrap_or(u64::MAX));
        Ok(())
    };
    let single = |CopyPiece { src, dst, len }| CopyRows { src, dst, grid: RowGrid::one(len) };
    match disorder {
        None if limit < batch.bytes() => {
            let pieces: Vec<CopyRows> = batch.pieces().map(single).collect();
            parts(&pieces, part_bytes, limit).try_for_each(|(push, part)| one(push, part, None))?;
        }
        None => {
            let mut parts = parts(batch.pushed(), part_bytes, limit).peekable();
            while let Some((push, part)) = parts.next() {
                one(push, part, parts.peek().map(|(_, next)| *next))?;
            }
        }
        Some(disorder) => {
            let mut pieces: Vec<CopyRows> = batch.pieces().map(single).collect();
            disorder.shuffle(&mut pieces);
            for (index, part) in parts(&pieces, part_bytes, limit) {
                if index == pieces.len() / 2 {
                    disorder.pause();
                }
                one(index, part, None)?;
            }
        }
    }
    throttle.finish();
    Ok(())
}

/// The first `limit` bytes of what was pushed, in parts, each with the number of its push: grids of
/// short rows whole, other rows in parts of up to `bytes`. A grid is all below the limit.
fn parts(pushed: &[CopyRows], bytes: u64, limit: u64) -> impl Iterator<Item = (usize, CopyRows)> {
    let mut left = limit;
    let rows = pushed.iter().enumerate().flat_map(|(push, copy)| {
        let is_whole = copy.grid.len <= MAX_ROW_BYTES;
        let rows = copy.pieces().filter(move |_| !is_whole);
        let rows = rows.map(|CopyPiece { src, dst, len }| CopyRows { src, dst, grid: RowGrid::one(len) });
        is_whole.then_some(*copy).into_iter().chain(rows).map(move |rows| (push, rows))
    });
    rows.flat_map(move |(push, CopyRows { src, dst, grid })| {
        let len = grid.bytes().unwrap_or(u64::MAX).min(left);
        left -= len;
        let is_whole = grid.axes != RowGrid::one(len).axes;
        (0..if is_whole { 1 } else { len.div_ceil(bytes) }).map(move |part| {
            if is_whole {
                return (push, CopyRows { src, dst, grid });
            }
            let start = part * bytes;
            let grid = RowGrid::one(bytes.min(len - start));
            (push, CopyRows { src: src + start, dst: dst + start, grid })
        })
    })
}

struct Copier<'a> {
    from: Lookup<'a>,
    to: Lookup<'a>,
    direction: Direction,
    streaming: bool,
    /// Dropped with this, before the operation is reported.
    fence: Fence,
}

impl Copier<'_> {
    /// Shows the source of a part, which the copy has left in the cache.
    fn show(
        &mut self,
        part: CopyRows,
        push: usize,
        observer: &mut dyn CopyObserver,
    ) -> Result<(), DeviceError> {
        for CopyPiece { src, len, .. } in part.pieces() {
            let bytes = match self.direction {
                Direction::HostToDevice => {
                    let start: *const u8 = ptr::with_exposed_provenance(src as usize);
                    // SAFETY: as in `copy`; nobody writes the source of a copy before it is
                    // complete (`Stream`'s contract).
                    unsafe { std::slice::from_raw_parts(start, len as usize) }
                }
                Direction::DeviceToHost | Direction::DeviceToDevice => {
                    let from = self.from.offset(src, len)?;
                    // SAFETY: nobody writes the source of a copy before it is complete (`Stream`'s
                    // contract).
                    unsafe { self.from.device.arena.mapping().bytes(from, len) }?
                }
            };
            observer.passed(push, bytes);
        }
        Ok(())
    }

    /// Where the source of what follows is, to be fetched.
    fn next(&self, next: Option<CopyRows>) -> Next {
        let Some(CopyRows { src, grid, .. }) = next else { return Next::NONE };
        let from = match self.direction {
            Direction::HostToDevice => ptr::with_exposed_provenance(src as usize),
            Direction::DeviceToHost | Direction::DeviceToDevice => self.from.device.arena.mapping().hint(src),
        };
        Next { from, len: grid.len as usize }
    }

    fn copy(&mut self, part: CopyRows, next: Option<CopyRows>) -> Result<(), DeviceError> {
        let CopyRows { src, dst, grid } = part;
        let (read, written) = (grid.src_extent().unwrap_or(u64::MAX), grid.dst_extent().unwrap_or(u64::MAX));
        let mapping = self.from.device.arena.mapping();
        let (from, to): (*const u8, *mut u8) = match self.direction {
            Direction::HostToDevice => {
                let to = self.to.offset(dst, written)?;
                (ptr::with_exposed_provenance(src as usize), mapping.range(to, written)?)
            }
            Direction::DeviceToHost => {
                let from = self.from.offset(src, read)?;
                (mapping.range(from, read)?, ptr::with_exposed_provenance_mut(dst as usize))
            }
            Direction::DeviceToDevice => {
                // There are no grids in this direction.
                let from = self.from.offset(src, read)?;
                let to = self.to.offset(dst, written)?;
                return mapping.copy(from, to, grid.len);
            }
        };
        // In all three cases below the device's end was found in an allocation, which the lookup
        // holds. The other end was checked by `CopyBatch::push_*`, the only maker of copies,
        // against a region (exposing its provenance), whose owner the batch holds until the
        // operation is complete. Host memory is never inside the device's mapping.
        if grid.axes != RowGrid::one(grid.len).axes {
            let stores = if self.streaming { Stores::Streaming } else { Stores::Cached };
            // SAFETY: as above; `fence` is dropped before the operation is reported.
            unsafe { rows::copy(from, to, grid, stores) };
        } else if self.streaming {
            let next = self.next(next);
            // SAFETY: as above; `fence` is dropped before the operation is reported.
            unsafe { streaming::copy(from, to, grid.len as usize, next, &self.fence) };
        } else {
            // SAFETY: as above.
            unsafe { to.copy_from_nonoverlapping(from, grid.len as usize) };
        }
        Ok(())
    }
}

/// Makes a copy take as long as its link needs.
struct Throttle<'a> {
    device: &'a EmulatedState,
    path: ModelPath,
    link: Link,
    pending: u64,
    through: std::time::Duration,
}

impl<'a> Throttle<'a> {
    fn new(device: &'a EmulatedState, direction: Direction) -> Self {
        let path = match direction {
            Direction::HostToDevice => ModelPath::HostToDevice,
            Direction::DeviceToHost => ModelPath::DeviceToHost,
            Direction::DeviceToDevice => ModelPath::DeviceMemory,
        };
        let link = device.links.model().link(path);
        Self { device, path, link, pending: 0, through: device.links.clock().now() }
    }

    fn passed(&mut self, bytes: u64) {
        self.pending += bytes;
        if self.pending >= LINK_PART_BYTES {
            self.reserve();
        }
    }

    fn reserve(&mut self) {
        if self.link != Link::UNLIMITED {
            self.through = self.device.links.reserve(self.path, std::mem::take(&mut self.pending));
        }
    }

    fn finish(mut self) {
        if self.link != Link::UNLIMITED {
            self.reserve();
            self.device.links.clock().sleep_until(self.through + self.link.latency);
        }
    }
}

/// Turns one bit of what a batch has just written.
pub(super) fn flip_bit(device: &EmulatedState, batch: &CopyBatch) -> Result<(), DeviceError> {
    let Some(piece) = batch.pieces().next() else { return Ok(()) };
    let mut byte = [0_u8];
    if batch.direction() == Direction::DeviceToHost {
        let address: *mut u8 = ptr::with_exposed_provenance_mut(piece.dst as usize);
        // SAFETY: the first byte of a destination that `copy` has just written, still held by the
        // batch.
        byte[0] = unsafe { address.read() } ^ 1;
        // SAFETY: as above.
        unsafe { address.write(byte[0]) };
        return Ok(());
    }
    let mut memory = KernelMemory::new(device);
    memory.read(piece.dst, &mut byte)?;
    byte[0] ^= 1;
    memory.write(piece.dst, &byte)
}

pub(super) fn fill(
    device: &EmulatedState,
    memory: &DeviceMemory,
    offset: u64,
    len: u64,
    byte: u8,
) -> Result<(), DeviceError> {
    let address = memory.address_of(offset, len)?;
    let mut lookup = Lookup::new(device);
    let at = lookup.offset(address, len)?;
    device.arena.mapping().fill(at, len, byte)
}

/// Device memory as a kernel on an emulated stream sees it, by device address. Every access is
/// checked against the live allocations.
pub struct KernelMemory<'a> {
    device: &'a EmulatedState,
    from: Lookup<'a>,
    to: Lookup<'a>,
}

impl<'a> KernelMemory<'a> {
    pub(super) fn new(device: &'a EmulatedState) -> Self {
        Self { device, from: Lookup::new(device), to: Lookup::new(device) }
    }

    /// Reads `into.len()` bytes at a device address.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`].
    pub fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let len = into.len() as u64;
        let from = self.from.offset(address, len)?;
        // SAFETY: `into` is an exclusive reference to `len` bytes.
        unsafe { self.device.arena.mapping().read(from, into.as_mut_ptr(), len) }
    }

    /// Writes bytes at a device address.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`].
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let len = bytes.len() as u64;
        let to = self.to.offset(address, len)?;
        // SAFETY: `bytes` is a reference to `len` bytes.
        unsafe { self.device.arena.mapping().write(to, bytes.as_ptr(), len) }
    }

    /// Copies `len` bytes between device addresses; the ranges may overlap.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`].
    pub fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        let from = self.from.offset(src, len)?;
        let to = self.to.offset(dst, len)?;
        self.device.arena.mapping().copy(from, to, len)
    }
}
