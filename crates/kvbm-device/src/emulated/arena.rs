//! Allocations of the emulated device: first fit over free ranges, every range known by name.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::mapping::{DoubleMapping, SHOWN_ALIGNMENT};
use crate::{DeviceError, DeviceId, DeviceMemory};

/// Allocations start and end at multiples of this many bytes.
pub(super) const GRANULARITY: u64 = 4096;

pub(super) struct Arena {
    device: DeviceId,
    mapping: DoubleMapping,
    ranges: Mutex<Ranges>,
}

/// All offsets are relative to the shown address.
struct Ranges {
    /// Offset -> length; neighbours are always merged.
    free: BTreeMap<u64, u64>,
    /// Offset -> allocation. The handle may be on its way out (weak), the entry goes when it is
    /// freed.
    live: BTreeMap<u64, Live>,
}

struct Live {
    len: u64,
    handle: Weak<Allocation>,
}

/// An allocated range; dropping it frees it.
pub(super) struct Allocation {
    arena: Arc<Arena>,
    offset: u64,
    len: u64,
    reserved: u64,
}

impl Allocation {
    /// Its first device address.
    pub(super) fn address(&self) -> u64 {
        self.arena.base() + self.offset
    }

    /// Whether a range of device addresses lies inside, and at which offset of the arena.
    pub(super) fn offset_of(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.arena.base())?;
        let end = offset.checked_add(len)?;
        (offset >= self.offset && end <= self.offset + self.len).then_some(offset)
    }
}

impl Arena {
    pub(super) fn new(device: DeviceId, len: u64) -> Result<Arc<Self>, DeviceError> {
        if len == 0 {
            return Err(DeviceError::Invalid {
                what: "memory_bytes",
                value: 0,
                rule: "a device needs memory",
            });
        }
        let len = len.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
        let mapping = DoubleMapping::new(len)?;
        let ranges = Ranges { free: BTreeMap::from([(0, len)]), live: BTreeMap::new() };
        Ok(Arc::new(Self { device, mapping, ranges: Mutex::new(ranges) }))
    }

    pub(super) fn mapping(&self) -> &DoubleMapping {
        &self.mapping
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.mapping.len()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.ranges.lock().free.values().sum()
    }

    fn base(&self) -> u64 {
        self.mapping.shown_address()
    }

    pub(super) fn allocate(self: &Arc<Self>, len: u64, alignment: u64) -> Result<DeviceMemory, DeviceError> {
        if len == 0 {
            return Err(DeviceError::Invalid {
                what: "length",
                value: 0,
                rule: "an allocation needs at least one byte",
            });
        }
        if !alignment.is_power_of_two() || alignment > SHOWN_ALIGNMENT {
            let rule = "an alignment is a power of two of at most 2 MiB";
            return Err(DeviceError::Invalid { what: "alignment", value: alignment, rule });
        }
        let reserved = len.checked_next_multiple_of(GRANULARITY).ok_or_else(|| self.out_of_memory(len))?;
        let mut ranges = self.ranges.lock();
        let Some(offset) = ranges.take(reserved, alignment.max(GRANULARITY)) else {
            drop(ranges);
            return Err(self.out_of_memory(reserved));
        };
        let allocation = Arc::new(Allocation { arena: Arc::clone(self), offset, len, reserved });
        ranges.live.insert(offset, Live { len, handle: Arc::downgrade(&allocation) });
        drop(ranges);
        // SAFETY: the range was just taken from the free list and is given back when `allocation`
        // is dropped.
        Ok(unsafe { DeviceMemory::from_raw(self.device, self.base() + offset, len, false, allocation) })
    }

    /// A handle over memory that an engine allocated here. It keeps the mapping, not the
    /// allocation.
    pub(super) fn external(self: &Arc<Self>, address: u64, len: u64) -> Result<DeviceMemory, DeviceError> {
        self.find(address, len)?;
        // SAFETY: the range is inside a live allocation now, and every later access looks it up
        // again.
        Ok(unsafe {
            DeviceMemory::from_raw(self.device, address, len, true, Arc::clone(self) as crate::Owner)
        })
    }

    /// The allocation that holds a range of device addresses, kept alive by the result.
    pub(super) fn find(&self, address: u64, len: u64) -> Result<Arc<Allocation>, DeviceError> {
        let offset = address.checked_sub(self.base()).filter(|offset| *offset < self.total_bytes());
        let ranges = self.ranges.lock();
        let before = offset.and_then(|offset| ranges.live.range(..=offset).next_back());
        let nearest = before.map(|(start, live)| (*start, live.len));
        let handle = before.and_then(|(_, live)| live.handle.upgrade());
        // Released first: were this the last handle, its drop would take the lock.
        drop(ranges);
        handle
            .filter(|allocation| allocation.offset_of(address, len).is_some())
            .ok_or_else(|| self.unknown(address, len, nearest))
    }

    fn unknown(&self, address: u64, len: u64, nearest: Option<(u64, u64)>) -> DeviceError {
        let nearest = match nearest {
            Some((start, size)) => format!("the nearest is {size} bytes at {:#x}", self.base() + start),
            None => format!("none lies before it; the device's addresses start at {:#x}", self.base()),
        };
        DeviceError::UnknownMemory { device: self.device, address, len, nearest }
    }

    pub(super) fn out_of_memory(&self, asked: u64) -> DeviceError {
        let ranges = self.ranges.lock();
        DeviceError::OutOfMemory {
            device: self.device,
            asked,
            free: ranges.free.values().sum(),
            largest: ranges.free.values().copied().max().unwrap_or(0),
            total: self.total_bytes(),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.arena.mapping.discard(self.offset, self.reserved);
        let mut ranges = self.arena.ranges.lock();
        ranges.live.remove(&self.offset);
        ranges.give(self.offset, self.reserved);
    }
}

impl Ranges {
    /// Takes the first free range that fits.
    fn take(&mut self, len: u64, alignment: u64) -> Option<u64> {
        let (start, size, offset) = self.free.iter().find_map(|(&start, &size)| {
            let offset = start.checked_next_multiple_of(alignment)?;
            let end = offset.checked_add(len)?;
            (end <= start + size).then_some((start, size, offset))
        })?;
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        let rest = start + size - (offset + len);
        if rest > 0 {
            self.free.insert(offset + len, rest);
        }
        Some(offset)
    }

    /// Gives a range back and merges it with its neighbours.
    fn give(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &size)) = self.free.range(..offset).next_back()
            && before + size == offset
        {
            self.free.remove(&before);
            offset = before;
            len += size;
        }
        if let Some(size) = self.free.remove(&(offset + len)) {
            len += size;
        }
        self.free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_merge() {
        let mut ranges = Ranges { free: BTreeMap::from([(0, 100)]), live: BTreeMap::new() };
        let taken: Vec<u64> = (0..10).map_while(|_| ranges.take(10, 1)).collect();
        assert_eq!(taken, (0..10).map(|i| i * 10).collect::<Vec<u64>>());
        assert_eq!(ranges.take(1, 1), None);
        for offset in [20, 40, 30, 0, 90, 10, 50, 70, 60, 80] {
            ranges.give(offset, 10);
        }
        assert_eq!(ranges.free, BTreeMap::from([(0, 100)]));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Against a bitmap: ranges never overlap, obey alignment, and everything comes back.
        #[test]
        fn ranges_behave_like_a_bitmap(steps in prop::collection::vec((any::<bool>(), 1_u64..40, 0_u32..4), 1..200)) {
            const SIZE: u64 = 256;
            let mut ranges = Ranges { free: BTreeMap::from([(0, SIZE)]), live: BTreeMap::new() };
            let mut used = [false; SIZE as usize];
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (allocate, len, power) in steps {
                let alignment = 1_u64 << power;
                if allocate {
                    let fits = (0..SIZE).step_by(alignment as usize)
                        .find(|&at| at + len <= SIZE && (at..at + len).all(|i| !used[i as usize]));
                    let got = ranges.take(len, alignment);
                    prop_assert_eq!(got, fits, "first fit");
                    if let Some(at) = got {
                        (at..at + len).for_each(|i| used[i as usize] = true);
                        held.push((at, len));
                    }
                } else if !held.is_empty() {
                    let (at, len) = held.swap_remove(len as usize % held.len());
                    (at..at + len).for_each(|i| used[i as usize] = false);
                    ranges.give(at, len);
                }
            }
            for (at, len) in held {
                ranges.give(at, len);
            }
            prop_assert_eq!(ranges.free, BTreeMap::from([(0, SIZE)]));
        }
    }
}
