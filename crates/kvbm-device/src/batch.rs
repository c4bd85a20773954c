//! Many copies, submitted at once.

use std::fmt;
use std::sync::Arc;

use crate::{DeviceError, DeviceMemory, HostRegion, Owner, RowGrid};

/// Which way the bytes of a batch move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory.
    DeviceToHost,
    /// Inside the memory of one device.
    DeviceToDevice,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostToDevice => "host-to-device",
            Self::DeviceToHost => "device-to-host",
            Self::DeviceToDevice => "device-to-device",
        })
    }
}

/// One contiguous copy. Addresses were checked against their memory when the piece was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPiece {
    /// Address of the first source byte (host or device, as the direction says).
    pub src: u64,
    /// Address of the first destination byte.
    pub dst: u64,
    /// Bytes; never zero.
    pub len: u64,
}

/// What one push added to a batch: a contiguous copy, or a grid of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRows {
    /// Address of the first source byte.
    pub src: u64,
    /// Address of the first destination byte.
    pub dst: u64,
    /// The rows; neither their length nor their number is zero.
    pub grid: RowGrid,
}

impl CopyRows {
    /// Its contiguous copies.
    pub fn pieces(self) -> impl Iterator<Item = CopyPiece> {
        let Self { src, dst, grid } = self;
        grid.offsets().map(move |(read, written)| CopyPiece {
            src: src + read,
            dst: dst + written,
            len: grid.len,
        })
    }
}

/// Looks at the bytes of a batch while they pass, so that a checksum costs no second trip to
/// memory.
///
/// A device whose bytes pass through the processor shows an observer every byte of the source, in
/// the order of the pushes and in order inside a push. Any other device shows it nothing. It never
/// shows a part of a batch that succeeds.
pub trait CopyObserver: Send + Sync {
    /// Some bytes of push number `push`; the next ones follow with the next call. Called on the
    /// thread of the stream, with no lock held; must not block. It had better take no lock of its
    /// own either: that waits for the stores on their way. The observer is dropped with its batch,
    /// before the batch's event completes.
    fn passed(&mut self, push: usize, bytes: &[u8]);
}

/// A batch of copies in one direction. It holds every memory that it touches until the hardware is
/// done with it.
///
/// Pieces have no order among themselves, so their destinations must not overlap, nor one's source
/// another's destination.
pub struct CopyBatch {
    direction: Direction,
    pushed: Vec<CopyRows>,
    pieces: usize,
    bytes: u64,
    device: Option<crate::DeviceId>,
    owners: Vec<Owner>,
    observer: Option<Box<dyn CopyObserver>>,
}

impl CopyBatch {
    /// Most pieces in one batch.
    pub const MAX_PIECES: usize = 1 << 20;

    /// How far back a memory is looked for before it is held a second time.
    const OWNER_WINDOW: usize = 64;

    /// An empty batch.
    pub fn new(direction: Direction) -> Self {
        Self {
            direction,
            pushed: Vec::new(),
            pieces: 0,
            bytes: 0,
            device: None,
            owners: Vec::new(),
            observer: None,
        }
    }

    /// An empty batch with room for so many pushes.
    pub fn with_capacity(direction: Direction, pushes: usize) -> Self {
        Self { pushed: Vec::with_capacity(pushes.min(Self::MAX_PIECES)), ..Self::new(direction) }
    }

    /// Which way the bytes move.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The contiguous copies, one by one.
    pub fn pieces(&self) -> impl Iterator<Item = CopyPiece> + '_ {
        self.pushed.iter().flat_map(|copy| copy.pieces())
    }

    /// The copies as they were pushed.
    pub fn pushed(&self) -> &[CopyRows] {
        &self.pushed
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.pieces == 0
    }

    /// The device whose memory the pieces touch; `None` while the batch is empty.
    pub fn device(&self) -> Option<crate::DeviceId> {
        self.device
    }

    /// Adds a copy of `len` bytes from host to device. Zero bytes add nothing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] names the memory; [`DeviceError::WrongDirection`],
    /// [`DeviceError::WrongDevice`], [`DeviceError::BatchFull`].
    pub fn push_host_to_device(
        &mut self,
        src: &HostRegion,
        src_offset: u64,
        dst: &DeviceMemory,
        dst_offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.push_rows_to_device(src, src_offset, dst, dst_offset, RowGrid::one(len))
    }

    /// Adds copies of rows from host to device. Rows without bytes, and no rows, add nothing.
    ///
    /// # Errors
    /// As for [`CopyBatch::push_host_to_device`]; [`DeviceError::Invalid`] for rows that overlap in
    /// the destination.
    pub fn push_rows_to_device(
        &mut self,
        src: &HostRegion,
        src_offset: u64,
        dst: &DeviceMemory,
        dst_offset: u64,
        grid: RowGrid,
    ) -> Result<(), DeviceError> {
        let from = host_address(src, src_offset, grid.src_extent())?;
        let to = dst.address_of(dst_offset, grid.dst_extent().unwrap_or(u64::MAX))?;
        self.push(Direction::HostToDevice, dst, CopyRows { src: from, dst: to, grid })?;
        self.hold(src.owner());
        self.hold(dst.owner());
        Ok(())
    }

    /// Adds a copy of `len` bytes from device to host. Zero bytes add nothing.
    ///
    /// # Errors
    /// As for [`CopyBatch::push_host_to_device`].
    pub fn push_device_to_host(
        &mut self,
        src: &DeviceMemory,
        src_offset: u64,
        dst: &HostRegion,
        dst_offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.push_rows_to_host(src, src_offset, dst, dst_offset, RowGrid::one(len))
    }

    /// Adds copies of rows from device to host. Rows without bytes, and no rows, add nothing.
    ///
    /// # Errors
    /// As for [`CopyBatch::push_rows_to_device`].
    pub fn push_rows_to_host(
        &mut self,
        src: &DeviceMemory,
        src_offset: u64,
        dst: &HostRegion,
        dst_offset: u64,
        grid: RowGrid,
    ) -> Result<(), DeviceError> {
        let from = src.address_of(src_offset, grid.src_extent().unwrap_or(u64::MAX))?;
        let to = host_address(dst, dst_offset, grid.dst_extent())?;
        self.push(Direction::DeviceToHost, src, CopyRows { src: from, dst: to, grid })?;
        self.hold(src.owner());
        self.hold(dst.owner());
        Ok(())
    }

    /// Adds a copy of `len` bytes inside a device. Source and destination of one piece may overlap.
    /// Zero bytes add nothing.
    ///
    /// # Errors
    /// As for [`CopyBatch::push_host_to_device`].
    pub fn push_device_to_device(
        &mut self,
        src: &DeviceMemory,
        src_offset: u64,
        dst: &DeviceMemory,
        dst_offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let from = src.address_of(src_offset, len)?;
        let to = dst.address_of(dst_offset, len)?;
        if src.device() != dst.device() {
            return Err(DeviceError::WrongDevice { expected: src.device(), found: dst.device() });
        }
        let grid = RowGrid::one(len);
        self.push(Direction::DeviceToDevice, dst, CopyRows { src: from, dst: to, grid })?;
        self.hold(src.owner());
        self.hold(dst.owner());
        Ok(())
    }

    /// Keeps something alive until the hardware is done with this batch, besides the memory of its
    /// pieces.
    pub fn hold(&mut self, owner: &Owner) {
        let held = self.owners.iter().rev().take(Self::OWNER_WINDOW).any(|known| Arc::ptr_eq(known, owner));
        if !held {
            self.owners.push(Arc::clone(owner));
        }
    }

    /// Lets `observer` see the bytes of this batch, if the device can show them.
    pub fn observe(&mut self, observer: Box<dyn CopyObserver>) {
        self.observer = Some(observer);
    }

    /// Takes out who wants to see the bytes.
    pub(crate) fn take_observer(&mut self) -> Option<Box<dyn CopyObserver>> {
        self.observer.take()
    }

    fn push(
        &mut self,
        direction: Direction,
        memory: &DeviceMemory,
        copy: CopyRows,
    ) -> Result<(), DeviceError> {
        if direction != self.direction {
            return Err(DeviceError::WrongDirection { expected: self.direction, found: direction });
        }
        if let Some(expected) = self.device.filter(|known| *known != memory.device()) {
            return Err(DeviceError::WrongDevice { expected, found: memory.device() });
        }
        let grid = copy.grid;
        if !grid.is_apart() {
            let strides = grid.axes.iter().filter(|axis| axis.count > 1).map(|axis| axis.dst_stride);
            let value = strides.min().unwrap_or(0);
            let rule = "rows must not overlap in the destination";
            return Err(DeviceError::Invalid { what: "dst_stride", value, rule });
        }
        // Rows may all come from one place, so there may be more of them than addresses.
        let bytes = grid.bytes().and_then(|bytes| self.bytes.checked_add(bytes));
        let count = grid.count().and_then(|count| usize::try_from(count).ok());
        let pieces = count.and_then(|count| self.pieces.checked_add(count));
        let pieces = pieces.filter(|pieces| *pieces <= Self::MAX_PIECES);
        let (Some(bytes), Some(pieces)) = (bytes, pieces) else {
            return Err(DeviceError::BatchFull { limit: Self::MAX_PIECES });
        };
        if bytes > self.bytes {
            self.device = Some(memory.device());
            (self.bytes, self.pieces) = (bytes, pieces);
            self.pushed.push(copy);
        }
        Ok(())
    }
}

fn host_address(region: &HostRegion, offset: u64, extent: Option<u64>) -> Result<u64, DeviceError> {
    Ok(region.ptr_at(offset, extent.unwrap_or(u64::MAX))?.expose_provenance() as u64)
}

impl fmt::Debug for CopyBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyBatch({}, {} pieces, {} bytes)", self.direction, self.pieces, self.bytes)
    }
}

/// A batch that a stream did not take, and why. Nothing of it was copied.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CopyRejected {
    /// The batch, to submit again.
    pub batch: CopyBatch,
    /// Why it was refused.
    #[source]
    pub error: DeviceError,
}

impl From<Box<CopyRejected>> for DeviceError {
    fn from(rejected: Box<CopyRejected>) -> Self {
        rejected.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceId, HostBuffer};

    fn memory(device: u32, address: u64, len: u64) -> DeviceMemory {
        // SAFETY: these addresses are never given to a device.
        unsafe { DeviceMemory::from_raw(DeviceId(device), address, len, false, Arc::new(())) }
    }

    #[test]
    fn pieces_are_addresses_and_owners_are_held_once() {
        let host = HostBuffer::zeroed(64);
        let device = memory(0, 0x1000, 64);
        let held = Arc::strong_count(device.owner());
        let mut batch = CopyBatch::with_capacity(Direction::HostToDevice, 2);
        batch.push_host_to_device(&host, 8, &device, 16, 4).expect("fits");
        batch.push_host_to_device(&host, 0, &device, 63, 1).expect("fits");
        batch.push_host_to_device(&host, 64, &device, 64, 0).expect("nothing, at the end");
        let expected = [
            CopyPiece { src: host.address() + 8, dst: 0x1010, len: 4 },
            CopyPiece { src: host.address(), dst: 0x103f, len: 1 },
        ];
        assert_eq!(batch.pieces().collect::<Vec<_>>(), expected);
        assert_eq!((batch.bytes(), batch.len(), batch.device()), (5, 2, Some(DeviceId(0))));
        assert_eq!(Arc::strong_count(device.owner()), held + 1);
        drop(batch);
        assert_eq!(Arc::strong_count(device.owner()), held);
    }

    #[test]
    fn one_batch_is_one_device_and_one_direction() {
        let host = HostBuffer::zeroed(64);
        let (zero, one) = (memory(0, 0x1000, 64), memory(1, 0x1000, 64));
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&zero, 0, &host, 0, 64).expect("fits");
        let other = batch.push_device_to_host(&one, 0, &host, 0, 64);
        assert_eq!(other, Err(DeviceError::WrongDevice { expected: DeviceId(0), found: DeviceId(1) }));
        let wrong = batch.push_host_to_device(&host, 0, &zero, 0, 64);
        let (expected, found) = (Direction::DeviceToHost, Direction::HostToDevice);
        assert_eq!(wrong, Err(DeviceError::WrongDirection { expected, found }));
        assert_eq!(batch.len(), 1);
    }
}
