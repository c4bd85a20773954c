//! Who changes which object of a store whose calls may hang: no lock is held over such a call.

use crate::BlobKey;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::time::Instant;

/// What an object was before and what it is now are one step for whoever counts: of the changes of a key one at a time is under way.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    taken: Mutex<HashSet<BlobKey>>,
    given_back: Condvar,
}

/// The change of a key, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    key: BlobKey,
}

impl Claims {
    /// Waits until nobody else changes `key`; none where that takes beyond `deadline`.
    pub(crate) fn take(&self, key: &BlobKey, deadline: Instant) -> Option<Claim<'_>> {
        let mut taken = self.taken.lock();
        while !taken.insert(*key) {
            if self.given_back.wait_until(&mut taken, deadline).timed_out() {
                return taken.insert(*key).then(|| Claim { claims: self, key: *key });
            }
        }
        Some(Claim { claims: self, key: *key })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.claims.taken.lock().remove(&self.key);
        self.claims.given_back.notify_all();
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
        let claims = Claims::default();
        let soon = || Instant::now() + Duration::from_secs(60);
        let first = claims.take(&key(1), soon()).expect("free");
        assert!(claims.take(&key(1), Instant::now() + Duration::from_millis(1)).is_none(), "it hangs");
        // Every other key, also those that share its hash in a table.
        let others: Vec<_> =
            (2..=255).map(|number| claims.take(&key(number), soon()).expect("free")).collect();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| claims.take(&key(1), soon()).is_some());
            drop(first);
            assert!(waits.join().expect("it ends"));
        });
        drop(others);
        assert!(claims.taken.lock().is_empty());
    }
}
