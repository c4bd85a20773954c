//! How much of a volume's capacity is used.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{VolumeDescriptor, VolumeError};

/// Counts the bytes of a volume's objects against its capacity.
#[derive(Debug)]
pub(crate) struct Quota {
    used: AtomicU64,
}

impl Quota {
    /// `used` bytes are there already.
    pub(crate) fn new(used: u64) -> Self {
        Self { used: AtomicU64::new(used) }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Counts `needed` bytes in, or says that there is no room; `replaced` bytes will become free.
    pub(crate) fn reserve(
        &self,
        descriptor: &VolumeDescriptor,
        needed: u64,
        replaced: u64,
    ) -> Result<(), VolumeError> {
        let capacity = descriptor.capacity_bytes.unwrap_or(u64::MAX);
        let add = |used: u64| {
            let after = used.checked_add(needed)?;
            (after.saturating_sub(replaced) <= capacity).then_some(after)
        };
        let full = |used: u64| VolumeError::Full {
            volume: descriptor.id,
            needed,
            free: capacity.saturating_sub(used.saturating_sub(replaced)),
        };
        self.used.fetch_update(Relaxed, Relaxed, add).map(drop).map_err(full)
    }

    /// `bytes` are there no more. Other processes may have written what we delete, so the count may be below it.
    pub(crate) fn release(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        // The closure never gives None, so the update cannot fail.
        let _ = self.used.fetch_update(Relaxed, Relaxed, less);
    }
}
