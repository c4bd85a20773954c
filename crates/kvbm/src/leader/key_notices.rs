//! What ranks have said of the data keys of forgotten namespaces, until a receipt names it.

use kvbm_keys::KeyId;
use kvbm_plan::{KeyNotice, NamespaceId, Rank, Tier, VolumeId};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Notices that are kept: a `forget` that waits for nothing leaves its notices here. The oldest go
/// first.
const KEPT: usize = 4096;

/// A data key of a forgotten namespace. What it encrypted cannot be read once it is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForgottenKey {
    /// Its public name, as `kvbm disk inspect` shows it.
    pub id: KeyId,
    /// The rank that destroys it.
    pub rank: Rank,
    /// The volume that it lay on; `None` for the rank's disk.
    pub volume: Option<VolumeId>,
    /// Whether it is gone for good. Else its store could not be written, and that is tried again.
    pub is_destroyed: bool,
}

impl ForgottenKey {
    /// The tier of the blocks that it encrypted.
    pub fn tier(&self) -> Tier {
        if self.volume.is_some() { Tier::G4 } else { Tier::G3 }
    }
}

/// The notices.
#[derive(Default)]
pub(crate) struct KeyNotices(Mutex<VecDeque<(NamespaceId, ForgottenKey)>>);

impl KeyNotices {
    pub(super) fn note(&self, rank: Rank, volume: Option<VolumeId>, keys: &[KeyNotice]) {
        let mut kept = self.0.lock();
        for &KeyNotice { namespace, id, is_destroyed } in keys {
            let key = ForgottenKey { id: KeyId::from_bytes(id), rank, volume, is_destroyed };
            let place = (key.id, key.rank, key.volume);
            // It takes the place of what the rank said before.
            kept.retain(|(_, former)| (former.id, former.rank, former.volume) != place);
            kept.push_back((namespace, key));
        }
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
    }

    /// What is known of a namespace's keys. Those that are destroyed are named once.
    pub(super) fn take(&self, namespace: NamespaceId) -> Vec<ForgottenKey> {
        let mut kept = self.0.lock();
        let keys = kept.iter().filter(|(of, _)| *of == namespace).map(|(_, key)| *key).collect();
        kept.retain(|(of, key)| *of != namespace || !key.is_destroyed);
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: NamespaceId = NamespaceId(1);

    fn notice(namespace: NamespaceId, id: u8, is_destroyed: bool) -> KeyNotice {
        KeyNotice { namespace, id: [id; 16], is_destroyed }
    }

    #[test]
    fn a_key_is_named_until_it_is_destroyed_and_once_more() {
        let notices = KeyNotices::default();
        let states = || -> Vec<_> {
            let keys = notices.take(OURS);
            keys.iter().map(|key| (key.id.as_bytes()[0], key.tier(), key.is_destroyed)).collect()
        };
        notices.note(Rank(0), None, &[notice(OURS, 1, false), notice(NamespaceId(2), 2, true)]);
        assert_eq!(states(), [(1, Tier::G3, false)]);
        assert_eq!(states(), [(1, Tier::G3, false)], "it is still to be destroyed");
        notices.note(Rank(0), None, &[notice(OURS, 1, true)]);
        notices.note(Rank(0), Some(VolumeId(1)), &[notice(OURS, 1, true)]);
        assert_eq!(states(), [(1, Tier::G3, true), (1, Tier::G4, true)]);
        assert_eq!(states(), []);
    }

    #[test]
    fn notices_that_nobody_asks_for_are_few() {
        let notices = KeyNotices::default();
        for rank in 0..KEPT as u16 + 7 {
            notices.note(Rank(rank), None, &[notice(OURS, 1, true)]);
        }
        let kept = notices.take(OURS);
        assert_eq!((kept.len(), kept[0].rank), (KEPT, Rank(7)));
    }
}
