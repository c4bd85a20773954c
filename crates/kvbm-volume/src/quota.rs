//! How much of a volume's capacity is used.

use std::collections::HashMap;
#[cfg(feature = "s3")]
use std::hash::{DefaultHasher, Hash, Hasher};

use kvbm_plan::NamespaceTag;
use kvbm_plan::simulation::{Planted, planted};
use parking_lot::Mutex;

use crate::{BlobKey, VolumeDescriptor, VolumeError, key_object};

/// Keys that share a turn: few enough to keep, so many that two of them seldom wait for each other.
#[cfg(feature = "s3")]
const TURNS: usize = 64;

/// The quota counts a change of an object as one step, so only one change of a key runs at a time.
#[cfg(feature = "s3")]
#[derive(Debug)]
pub(crate) struct Turns<L>(Vec<L>);

#[cfg(feature = "s3")]
impl<L: Default> Default for Turns<L> {
    fn default() -> Self {
        Self((0..TURNS).map(|_| L::default()).collect())
    }
}

#[cfg(feature = "s3")]
impl<L> Turns<L> {
    /// The lock of a key.
    pub(crate) fn of(&self, key: &BlobKey) -> &L {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        &self.0[hasher.finish() as usize % TURNS]
    }
}

/// Counts the bytes of a volume's objects against its capacity, each namespace by itself: neither
/// takes another's room. Objects of keys are small and do not count.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    used: Mutex<HashMap<NamespaceTag, u64>>,
}

impl Quota {
    /// Counts in an object that is there already, by its path in the store. What is none of ours
    /// does not count.
    pub(crate) fn found(&mut self, path: &str, bytes: u64) {
        if let Some(key) = BlobKey::parse(path).filter(|key| !key_object::is_key_object(key)) {
            let used = self.used.get_mut().entry(key.namespace).or_default();
            *used = used.saturating_add(bytes);
        }
    }

    /// Of all namespaces.
    pub(crate) fn used(&self) -> u64 {
        self.used.lock().values().fold(0, |sum, used| sum.saturating_add(*used))
    }

    /// Counts `needed` bytes of `key` in, or says that there is no room; `replaced` bytes will
    /// become free.
    pub(crate) fn reserve(
        &self,
        descriptor: &VolumeDescriptor,
        key: &BlobKey,
        needed: u64,
        replaced: u64,
    ) -> Result<(), VolumeError> {
        if key_object::is_key_object(key) {
            return Ok(());
        }
        let capacity = descriptor.capacity_bytes.unwrap_or(u64::MAX);
        let mut namespaces = self.used.lock();
        let used = namespaces.entry(key.namespace).or_default();
        match used.checked_add(needed) {
            Some(after) if after.saturating_sub(replaced) <= capacity || planted(Planted::IgnoreQuota) => {
                *used = after;
                Ok(())
            }
            _ => Err(VolumeError::Full {
                volume: descriptor.id,
                needed,
                free: capacity.saturating_sub(used.saturating_sub(replaced)),
            }),
        }
    }

    /// [Reserves](Self::reserve) until the result is dropped or [kept](Room::keep).
    #[cfg(feature = "s3")]
    pub(crate) fn take(
        quota: &std::sync::Arc<Self>,
        descriptor: &VolumeDescriptor,
        key: BlobKey,
        needed: u64,
        replaced: u64,
    ) -> Result<Room, VolumeError> {
        quota.reserve(descriptor, &key, needed, replaced)?;
        Ok(Room { quota: std::sync::Arc::clone(quota), key, bytes: needed })
    }

    /// `bytes` of `key` are there no more. Other processes may have written what we delete, so the
    /// count may be below it.
    pub(crate) fn release(&self, key: &BlobKey, bytes: u64) {
        if key_object::is_key_object(key) {
            return;
        }
        if let Some(used) = self.used.lock().get_mut(&key.namespace) {
            *used = used.saturating_sub(bytes);
        }
    }
}

/// Room for an object, free again when this is dropped: its writer may give up anywhere. What has
/// landed nevertheless counts from the next opening on.
#[cfg(feature = "s3")]
#[derive(Debug)]
pub(crate) struct Room {
    quota: std::sync::Arc<Quota>,
    key: BlobKey,
    /// What becomes free.
    bytes: u64,
}

#[cfg(feature = "s3")]
impl Room {
    /// The object is there, and `replaced` bytes are not any more.
    pub(crate) fn keep(mut self, replaced: u64) {
        self.bytes = replaced;
    }
}

#[cfg(feature = "s3")]
impl Drop for Room {
    fn drop(&mut self) {
        self.quota.release(&self.key, self.bytes);
    }
}
