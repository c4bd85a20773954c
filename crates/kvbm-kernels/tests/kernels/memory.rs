//! Memory of a device that does not exist: segments at addresses of its own, every access checked.

use kvbm_kernels::Launch;

/// A contiguous allocation.
#[derive(Clone)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: Vec<u8>,
    /// Holds addresses of other segments.
    pub(crate) is_table: bool,
}

/// Where memory begins. The upper half is no count that an argument holds, so that addresses among
/// its fields are recognised.
const START: u64 = 0x00F7_6B76_0000_0000;

#[derive(Clone, Default)]
pub(crate) struct Memory {
    pub(crate) segments: Vec<Segment>,
}

/// Whatever runs kernels.
pub(crate) trait Executor {
    /// Runs one launch, the threads of a block of threads one after the other, the last one first
    /// if `reverse`.
    fn run(&mut self, launch: &Launch, memory: &mut Memory, reverse: bool) -> Result<(), String>;
}

impl Memory {
    /// `len` bytes, `skew` behind a multiple of 4096; between allocations lie at least 4096 bytes
    /// that are nobody's.
    pub(crate) fn allocate(&mut self, len: usize, skew: u64, byte: u8) -> u64 {
        let end = self.segments.last().map_or(START, |last| last.address + last.bytes.len() as u64);
        let address = end.next_multiple_of(4096) + 4096 + skew;
        self.segments.push(Segment { address, bytes: vec![byte; len], is_table: false });
        address
    }

    /// `len` bytes at an address behind everything that is allocated.
    pub(crate) fn allocate_at(&mut self, address: u64, len: usize, byte: u8) {
        assert!(self.segments.last().is_none_or(|last| last.address + (last.bytes.len() as u64) < address));
        self.segments.push(Segment { address, bytes: vec![byte; len], is_table: false });
    }

    /// Addresses, as a launch wants them.
    pub(crate) fn table(&mut self, entries: &[u64]) -> u64 {
        let address = self.allocate(entries.len() * 8, 0, 0);
        let segment = self.segments.last_mut().expect("just allocated");
        segment.is_table = true;
        segment.bytes = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        address
    }

    /// Which segment the address lies in, and where.
    pub(crate) fn find(&self, address: u64) -> Option<(usize, usize)> {
        let at = self.segments.partition_point(|segment| segment.address <= address).checked_sub(1)?;
        let offset = (address - self.segments[at].address) as usize;
        (offset < self.segments[at].bytes.len()).then_some((at, offset))
    }

    /// The bytes at an address, if all of them belong to one segment.
    pub(crate) fn at(&mut self, address: u64, len: usize) -> Option<&mut [u8]> {
        let (at, offset) = self.find(address)?;
        self.segments[at].bytes.get_mut(offset..offset + len)
    }
}
