//! Locks on keys. No mutex is held over a store's call, which may hang.

use crate::BlobKey;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::time::Instant;

/// The quota counts a change of an object as one step, so only one change of a key runs at a time.
#[derive(Debug, Default)]
pub(crate) struct KeyLocks {
    locked: Mutex<HashSet<BlobKey>>,
    unlocked: Condvar,
}

/// The change of a key, until this is dropped.
#[derive(Debug)]
pub(crate) struct KeyLock<'a> {
    locks: &'a KeyLocks,
    key: BlobKey,
}

impl KeyLocks {
    /// Waits until no other call changes `key`; `None` at `deadline`.
    pub(crate) fn take(&self, key: &BlobKey, deadline: Instant) -> Option<KeyLock<'_>> {
        let mut locked = self.locked.lock();
        while !locked.insert(*key) {
            if self.unlocked.wait_until(&mut locked, deadline).timed_out() {
                return locked.insert(*key).then(|| KeyLock { locks: self, key: *key });
            }
        }
        Some(KeyLock { locks: self, key: *key })
    }
}

impl Drop for KeyLock<'_> {
    fn drop(&mut self) {
        self.locks.locked.lock().remove(&self.key);
        self.locks.unlocked.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlobSlice;
    use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash};
    use std::time::Duration;

    fn key(number: u8) -> BlobKey {
        BlobKey {
            namespace: NamespaceTag::from_bytes([1; 16]),
            label: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([number; 16]),
            slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
        }
    }

    #[test]
    fn one_change_of_a_key_at_a_time_and_a_wait_ends() {
        let locks = KeyLocks::default();
        let soon = || Instant::now() + Duration::from_secs(60);
        let first = locks.take(&key(1), soon()).expect("free");
        assert!(locks.take(&key(1), Instant::now() + Duration::from_millis(1)).is_none(), "it hangs");
        // Every other key, also those that share its hash in a table.
        let others: Vec<_> =
            (2..=255).map(|number| locks.take(&key(number), soon()).expect("free")).collect();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| locks.take(&key(1), soon()).is_some());
            drop(first);
            assert!(waits.join().expect("it ends"));
        });
        drop(others);
        assert!(locks.locked.lock().is_empty());
    }
}
